"""One loss curve, whatever the layout: stages, replicas, expert actors, micro-batches; and resume."""

import time
from pathlib import Path
from typing import Any

import pytest

from kt_ray.experts import LocalExperts
from tests.helpers.devices import DEVICES, layers_on
from tests.helpers.exhaustive import exhaustive
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, steps, waves_of

STEPS = 4  # two passes over the batches: every batch is met again by weights that it has changed
BATCHES = [random_rows(8, seed=s) for s in range(2)]
LAYOUTS = {
    "2 stages": ["rule.stages=2"],
    "2 replicas": ["rule=cpu_replicas_2"],
    "2 expert actors": ["rule.experts.sockets=2"],
    "2 stages, 2 replicas, 2 expert actors, 3 groups": [
        "rule.stages=2",
        "rule.replicas=2",
        "rule.experts.sockets=2",
        "rule.groups=3",
        "trainer.micro_batch_size=1",
    ],
    "micro-batch 1": ["trainer.micro_batch_size=1"],
    "micro-batch 8": ["trainer.micro_batch_size=8"],
    "micro-batch 3": ["trainer.micro_batch_size=3"],
    "micro-batches of rows of similar length": ["trainer.micro_batch_size=auto", "data.max_length=64"],
    "rows padded to multiples of 16": ["data.pad_to_multiple_of=16"],
    "recompute": ["rule.experts.activations=recompute"],
    "layers retained, 2 stages, 2 replicas": [
        *("rule.activations=retain", "rule.stages=2", "rule.replicas=2"),
    ],
    "layers recomputed": ["rule.activations=group"],
    "one micro-batch at a time": ["rule.activations=micro_batch"],
    "hidden states on the host, 2 stages, 2 replicas": [
        "rule.activations=host",
        "rule.stages=2",
        "rule.replicas=2",
        "trainer.micro_batch_size=1",
    ],
    "ranges of heads and tokens, 2 stages, 2 replicas": [
        "rule.activations=ranges",
        "rule.stages=2",
        "rule.replicas=2",
    ],
    "streamed layers, 2 stages, 2 replicas": ["rule.resident_layers=0", "rule.stages=2", "rule.replicas=2"],
    "waves of 3 micro-batches": ["rule.wave=3", "trainer.micro_batch_size=1"],
    "micro-batch-major": ["rule.wave=1"],
    "waves of 2, 2 stages, 2 replicas": [
        *("rule.wave=2", "rule.stages=2", "rule.replicas=2", "trainer.micro_batch_size=1"),
    ],
}
PATTERNS = ["lora.rank_pattern={experts: 2, o_proj: 6}", "lora.alpha_pattern={q_a_proj: 3, experts: 8}"]
ALL_AT_ONCE = "2 stages, 2 replicas, 2 expert actors, 3 groups"


def curve(path: Path, *overrides: str, stop: int = STEPS) -> list[float]:
    common = ("rule.device=cpu", "optim.lr=0.05", "trainer.batch_size=8", "trainer.micro_batch_size=2")
    config = config_for(path, *common, *overrides)
    with local_cluster(path, config) as cluster:
        lowered = [note for note in cluster.plan.notes if "lowered" in note]
        assert not lowered, "the layout is not the one that is asked for"
        return steps(cluster, config, BATCHES, STEPS, stop=stop)


@pytest.mark.parametrize(("dropout", "layouts"), [(0.1, [*LAYOUTS]), (0.0, [ALL_AT_ONCE])])
def test_every_layout_gives_the_same_curve(tmp_path: Path, dropout: float, layouts: list[str]) -> None:
    """With dropout and noise, which must not depend on the layout either; without them, all at once."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    common = [f"lora.dropout={dropout}", f"trainer.neftune_noise_alpha={dropout}", *PATTERNS]
    expected = curve(path, *common)
    assert expected[-1] < 0.9 * expected[0], "the curve must go somewhere, or the comparison says nothing"
    for name in layouts:
        observed = curve(path, *common, *LAYOUTS[name])
        for step, (a, b) in enumerate(zip(observed, expected, strict=True)):
            assert a == pytest.approx(b, rel=1e-4), f"{name}, step {step}"


@pytest.mark.accept("layouts")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("stages", "replicas", "sockets"), [(2, 1, 1), (1, 2, 2), (2, 2, 2)])
def test_workers_on_cards_give_the_curve_of_one(
    tmp_path: Path, stages: int, replicas: int, sockets: int, device: str
) -> None:
    """Cards are shared where there are fewer than workers."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    common = ["lora.dropout=0.1", "rule.groups=2"]
    expected = curve(path, *common, *layers_on(device, 3), stop=3)
    layout = [*layers_on(device, 3, stages, replicas), f"rule.experts.sockets={sockets}"]
    assert curve(path, *common, *layout, stop=3) == pytest.approx(
        expected, rel=1e-4 if device == "cpu" else 1e-3
    )


def test_gate_and_up_in_int8_give_nearly_the_same_curve(tmp_path: Path) -> None:
    """To the rounding of 8 bits, whatever the layout, and not the curve of what was not rounded."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    expected, kept = curve(path, stop=2), "rule.experts.activations=int8"
    found = curve(path, kept, stop=2)
    assert found != expected and found == pytest.approx(expected, rel=1e-2)
    assert curve(path, kept, "rule.stages=2", "rule.replicas=2", stop=2) == pytest.approx(found, rel=1e-3)


def test_overlap_changes_no_bit(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    for layout in ([], LAYOUTS[ALL_AT_ONCE]):
        waiting = curve(path, *layout, "rule.overlap=false", stop=3)
        assert waiting == curve(path, *layout, stop=3)


@pytest.mark.parametrize("family", ["deepseek_v3", exhaustive("olmoe")])
def test_what_attention_holds_changes_no_bit(tmp_path: Path, family: str) -> None:
    """The same sums in the same order, whatever is recomputed when and wherever hidden states wait."""
    path = build_checkpoint(tmp_path, family)
    common = ["rule.groups=2", "trainer.micro_batch_size=2", "lora.dropout=0.1"]
    recomputed = "rule.attention_output=recompute"
    whole = curve(path, *common, "rule.activations=group", recomputed, stop=3)
    assert curve(path, *common, "rule.activations=retain", stop=3) == whole
    for held in ("group", "micro_batch", "host"):
        for output in (recomputed, "rule.attention_output=retain"):
            assert curve(path, *common, f"rule.activations={held}", output, stop=3) == whole


@pytest.mark.parametrize(
    ("family", "dense"), [("deepseek_v3", {"first_k_dense_replace": 3}), exhaustive(("olmoe", {}))]
)
def test_streamed_layers_change_no_bit(tmp_path: Path, family: str, dense: dict[str, int]) -> None:
    """Seven layers through three slots, all or every other one.

    While a group passes the dense layers, the one above them is still held for the other group.
    """
    path = build_checkpoint(tmp_path, family, num_hidden_layers=7, **dense)
    common = ["rule.groups=2", "trainer.micro_batch_size=2", "lora.dropout=0.1"]
    whole = curve(path, *common, stop=3)
    for resident in (0, 3):
        for held in ("group", "host"):
            rule = [f"rule.resident_layers={resident}", f"rule.activations={held}"]
            assert curve(path, *common, *rule, stop=3) == whole


def test_without_overlap_waiting_is_the_experts_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are submitted in the middle of a layer, and the answer is awaited there."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule=cpu_1worker_1socket", "rule.overlap=false")
    forward, calls = LocalExperts.forward, []

    def slow(self: LocalExperts, layer: int, *args: Any, **more: Any) -> Any:
        calls.append(layer)
        time.sleep(0.5)
        return forward(self, layer, *args, **more)

    monkeypatch.setattr(LocalExperts, "forward", slow)
    with local_cluster(path, config) as cluster:
        began = time.perf_counter()
        report = cluster.run_pass(one_pass(cluster, waves_of(BATCHES[0], config, cluster.plan), "eval"))
        seconds = time.perf_counter() - began
    (worker,) = report.workers
    assert calls and worker.terms["experts"] >= 0.5 * len(calls)
    assert worker.terms["attention"] <= seconds - 0.5 * len(calls)


def test_dropout_changes_the_curve_and_repeats(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    with_dropout = curve(path, "lora.dropout=0.1", stop=4)
    assert curve(path, stop=4) != with_dropout
    assert curve(path, "lora.dropout=0.1", stop=4) == with_dropout


@pytest.mark.accept("layouts")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("actors", "keys"),
    [
        *((1, PATTERNS), (2, PATTERNS), (1, ["lora.dora=true", "lora.experts=false"])),
        (1, ["rule.activations=ranges"]),
    ],
)
def test_resumed_run_is_bit_identical(tmp_path: Path, actors: int, keys: list[str], device: str) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    overrides = [
        *layers_on(device, 3, actors),
        f"rule.experts.sockets={actors}",
        "optim.lr=0.02",
        "lora.dropout=0.1",
        "trainer.neftune_noise_alpha=0.2",
        "optim.weight_decay=0.01",
        *keys,
    ]
    config = config_for(path, *overrides)
    shards = tmp_path / "shards"
    shards.mkdir()
    with local_cluster(path, config) as cluster:
        straight = steps(cluster, config, BATCHES, STEPS)
        final = cluster.parameters()
    with local_cluster(path, config) as cluster:
        first = steps(cluster, config, BATCHES, STEPS, stop=STEPS // 2)
        cluster.save_shards(str(shards))
    with local_cluster(path, config) as cluster:
        cluster.restore(str(shards), STEPS // 2)
        second = steps(cluster, config, BATCHES, STEPS, first=STEPS // 2)
        resumed = cluster.parameters()
    assert first + second == straight
    assert all((resumed[name] == final[name]).all() for name in final) and set(resumed) == set(final)
