"""The loss of a step is the mean over all its trained tokens, however it is cut into micro-batches and waves.

The trap: a mean per micro-batch (or wave), averaged, weights tokens of short rows more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import kt_ray.train.trainer as loop
from kt_ray.config.schema import LoraConfig
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row as DataRow
from tests.helpers.hf_reference import Reference, build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, relative

import numpy as np  # isort: skip

ROWS = random_rows(4, lengths=(31, 4, 17, 5))


def accumulated(tmp_path: Path) -> tuple[float, float, float]:
    """(the system's loss, the token mean, the worst gradient's relative error), a wave per micro-batch."""
    path = build_checkpoint(tmp_path, "qwen3_moe")
    reference = Reference(path, LoraConfig(rank=4, alpha=8.0), seed=3)
    reference.randomize_b(1)
    expected = reference.run(ROWS)
    config = config_for(path, "rule=cpu_1worker_1socket", "rule.wave=1", "trainer.batch_size=4")
    rows = [DataRow(np.array(r.ids), np.array(r.labels), r.sample) for r in ROWS]
    with local_cluster(path, config) as cluster:
        cluster.set_parameters({k: v.detach() for k, v in reference.parameters.items()})
        waves = step_waves(rows, 1, 1, cluster.plan.groups, 1)
        assert len(waves) == 4
        trainer = loop.Trainer(config, cluster, loop.StepBatches(1, 1, lambda step: waves))
        seen = {}
        commit = cluster.commit

        def note(step: int, lr: float, clip: float) -> float:
            seen.update(cluster.gradients())
            return commit(step, lr, clip)

        cluster.commit = note  # type: ignore[method-assign]
        trainer.step(0)
    return trainer.summary.losses[0], expected.loss, max(relative(seen, expected.grads).values())


def test_token_mean_over_the_whole_step(tmp_path: Path) -> None:
    loss, expected, error = accumulated(tmp_path)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert error <= 1e-5


def test_a_mean_per_wave_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the guard (each wave divided by its own tokens, then averaged) the test above fails."""
    whole = loop.Passes.run

    def per_wave(self: loop.Passes, step: int, kind: str, waves: loop.Wave, tokens: int, *rest, **more):  # type: ignore[no-untyped-def]
        return whole(self, step, kind, waves, 4 * loop.trained_tokens(waves), *rest, **more)

    monkeypatch.setattr(loop.Passes, "run", per_wave)
    loss, expected, error = accumulated(tmp_path)
    assert abs(loss / expected - 1) > 1e-3 and error > 1e-2
