"""Training with a lane: the loss curve of the run without, to rounding; checkpoints resume without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.devices import DEVICES
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, steps

STEPS = 6
BATCHES = [random_rows(8, seed=s) for s in range(3)]
COMMON = ("rule.device=cpu", "optim.lr=0.02", "trainer.batch_size=8", "lora.dropout=0.1")
LANES = {
    "resident": ["rule.experts.gpu_resident=2"],
    "streamed, 2 groups": ["rule.experts.stream=0.5", "trainer.micro_batch_size=2"],
    "both, 2 expert actors, recompute": [
        *("rule.experts.gpu_resident=3", "rule.experts.stream=0.5", "rule.experts.sockets=2"),
        "rule.experts.activations=recompute",
    ],
    "two devices": ["rule.experts.gpu_resident=3", "rule.experts.stream=0.9"],
}


def lane_on(device: str) -> str:
    """A card computes for expert actors while attention stays on the CPU."""
    return f"rule.experts.lane_device={'cpu' if device == 'cpu' else 'cuda:0'}"


def curve(path: Path, *overrides: str) -> list[float]:
    config = config_for(path, *COMMON, *overrides)
    with local_cluster(path, config) as cluster:
        return steps(cluster, config, BATCHES, STEPS)


@pytest.mark.accept("lane")
@pytest.mark.parametrize("device", DEVICES)
def test_every_lane_gives_the_same_curve(tmp_path: Path, device: str) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    expected = curve(path)
    assert expected[-1] != pytest.approx(expected[0], rel=0.02), "a curve that goes nowhere says nothing"
    for name, overrides in LANES.items():
        on = lane_on(device) if name != "two devices" else "rule.experts.lane_device=[cpu,cpu]"
        found = curve(path, on, *overrides)
        assert found == pytest.approx(expected, rel=1e-4 if device == "cpu" else 1e-3), name


def test_a_checkpoint_with_a_lane_resumes_without(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    shards = tmp_path / "shards"
    shards.mkdir()
    with_lane = config_for(path, *COMMON, lane_on("cpu"), *LANES["both, 2 expert actors, recompute"])
    with local_cluster(path, with_lane) as cluster:
        first = steps(cluster, with_lane, BATCHES, STEPS, stop=STEPS // 2)
        cluster.save_shards(str(shards))
        at_half = cluster.parameters()
    without = config_for(path, *COMMON)
    with local_cluster(path, without) as cluster:
        cluster.restore(str(shards), STEPS // 2)
        taken = cluster.parameters()
        second = steps(cluster, without, BATCHES, STEPS, first=STEPS // 2)
    assert taken.keys() == at_half.keys() and all((taken[n] == at_half[n]).all() for n in taken)
    assert first + second == pytest.approx(curve(path), rel=1e-4)
