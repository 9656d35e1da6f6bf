"""Losses of single tokens through the whole system, against Hugging Face with factored LoRA and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.actors.cluster import ActorCluster
from kt_ray.batch import IGNORE, MicroBatch, PassSpec, Tops, Wave
from kt_ray.config.schema import LoraConfig
from kt_ray.train.reports import PassReport
from tests.helpers.devices import CARD, by_name
from tests.helpers.hf_reference import Reference, Row, build_checkpoint, random_rows
from tests.helpers.policy_losses import LOSSES, by_the_formula, row_inputs
from tests.helpers.runs import config_for, local_cluster, relative, waves_of

LORA = LoraConfig(rank=4, alpha=8.0)
LAYOUTS = {
    "one worker": ["rule=cpu_1worker_1socket", "trainer.micro_batch_size=4"],
    "two stages, two sockets": ["rule=cpu_2workers_2sockets", "trainer.micro_batch_size=2"],
    "two replicas": ["rule=cpu_replicas_2"],
    "ranges of heads": ["rule=cpu_1worker_1socket", "rule.activations=ranges", "trainer.micro_batch_size=2"],
    CARD: ["rule=cpu_1worker_1socket", "rule.device=cuda", "trainer.micro_batch_size=4"],
}
TOP = 5
Inputs = dict[int, dict[str, np.ndarray]]  # by sample, [n] each


def rows_of(count: int = 5) -> list[Row]:
    """A label behind every token, which is not the next token."""
    rng = np.random.default_rng(7)
    return [
        Row(r.ids, [IGNORE, *rng.integers(3, 96, len(r.ids) - 1).tolist()], r.sample)
        for r in random_rows(count, lengths=(9, 5, 12, 7, 8))
    ]


def whole_logps(model: Reference, row: Row) -> Tensor:
    """float64 [n, V] behind every token but the last."""
    model._sample = row.sample
    logits = model.model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(dim=-1)


def label_logps(model: Reference, row: Row) -> Tensor:
    return whole_logps(model, row).gather(1, torch.tensor(row.labels[1:])[:, None])[:, 0]


def with_inputs(waves: Wave, inputs: Inputs) -> Wave:
    def given(batch: MicroBatch) -> MicroBatch:
        found: dict[str, np.ndarray] = {}
        for i, sample in enumerate(batch.sample_ids.tolist()):
            for name, values in inputs[sample].items():
                whole = found.setdefault(name, np.zeros(batch.labels.shape, dtype=np.float32))
                whole[i, : len(values)] = values
        return replace(batch, loss_inputs=found)

    return tuple(tuple(tuple(given(b) for b in group) for group in groups) for groups in waves)


def token_logps(cluster: ActorCluster, waves: Wave, report: PassReport) -> dict[int, np.ndarray]:
    """By sample, float32 [n]."""
    found = {}
    for rank, groups in zip(cluster.coordinators, waves, strict=True):
        for group, values in zip(groups, report.workers[rank].token_logps, strict=True):
            for batch, logps in zip(group, values, strict=True):
                assert logps.dtype == np.float32 and logps.shape == batch.labels[:, 1:].shape
                for i, sample in enumerate(batch.sample_ids.tolist()):
                    found[sample] = logps[i, : batch.lengths[i] - 1]
    return found


def tops_of(cluster: ActorCluster, waves: Wave, report: PassReport) -> dict[int, Tops]:
    found = {}
    for rank, groups in zip(cluster.coordinators, waves, strict=True):
        for group, tops in zip(groups, report.workers[rank].tops, strict=True):
            for batch, (ids, logps) in zip(group, tops, strict=True):
                for i, sample in enumerate(batch.sample_ids.tolist()):
                    found[sample] = (ids[i, : batch.lengths[i] - 1], logps[i, : batch.lengths[i] - 1])
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_losses_gradients_and_log_probabilities(path: Path, layout: str) -> None:
    rows = rows_of()
    policy = Reference(path, LORA, seed=3)
    policy.randomize_b(1)
    config = config_for(path, *LAYOUTS[layout])
    with local_cluster(path, config) as cluster:
        cluster.set_parameters({k: v.detach() for k, v in policy.parameters.items()})
        plain = waves_of(rows, config, cluster.plan)
        for number, name in enumerate(LOSSES, 1):
            loss = LOSSES[name]
            inputs, wanted = expected(policy, rows, name)
            waves = with_inputs(plain, inputs)
            cluster.discard()  # the gradients so far
            spec = PassSpec(2 * number, 0, "train", 3, waves, 2, objective=loss)
            trained = cluster.run_pass(spec)
            errors = relative(cluster.gradients(), wanted[1])
            evaluated = cluster.run_pass(replace(spec, number=2 * number + 1, kind="eval", return_top=TOP))
            assert trained.loss == pytest.approx(wanted[0] / 2, rel=1e-4, abs=1e-5), name
            assert evaluated.loss == pytest.approx(trained.loss, rel=1e-5, abs=1e-6), name
            assert max(errors.values()) <= 1e-3, (name, max(errors.items(), key=lambda item: item[1]))
            found, again = (token_logps(cluster, waves, report) for report in (trained, evaluated))
            tops = tops_of(cluster, waves, evaluated)
            assert not any(w.tops for w in trained.workers)
            for row in rows:
                with torch.no_grad():
                    logps = whole_logps(policy, row)
                    own = label_logps(policy, row)
                np.testing.assert_allclose(found[row.sample], own.numpy(), rtol=1e-4)
                np.testing.assert_allclose(again[row.sample], own.numpy(), rtol=1e-4)
                ids, values = tops[row.sample]
                best = logps.topk(TOP)
                assert np.array_equal(ids, best.indices.numpy())
                np.testing.assert_allclose(values, best.values.numpy(), rtol=1e-4)


def expected(
    policy: Reference, rows: Sequence[Row], name: str
) -> tuple[Inputs, tuple[float, dict[str, Tensor]]]:
    """A loss's inputs, its sum, and the gradients of half of it."""
    for tensor in policy.parameters.values():
        tensor.grad = None
    inputs, total = {}, 0.0
    for row in rows:
        logps = label_logps(policy, row)
        inputs[row.sample] = row_inputs(LOSSES[name], logps, seed=row.sample)
        value = by_the_formula(LOSSES[name], logps, inputs[row.sample])
        (value / 2).backward()
        total += float(value.detach())
    grads = {
        n: torch.zeros_like(t) if t.grad is None else t.grad.clone() for n, t in policy.parameters.items()
    }
    return inputs, (total, grads)


@pytest.mark.parametrize("layout", by_name(LAYOUTS))
def test_importance_sampling_where_nothing_moved_is_cross_entropy(path: Path, layout: str) -> None:
    """With the pass's own log-probabilities and advantages of 1: the same gradient, to the bit."""
    rows = rows_of()
    config = config_for(path, *LAYOUTS[layout])
    with local_cluster(path, config) as cluster:
        waves = waves_of(rows, config, cluster.plan)
        spec = PassSpec(1, 0, "train", 3, waves, 1, objective=LOSSES["cross_entropy"])
        logps = token_logps(cluster, waves, cluster.run_pass(spec))
        wanted = cluster.gradients()
        cluster.discard()
        own = {s: {"logprobs": v, "advantages": np.ones_like(v)} for s, v in logps.items()}
        again = replace(spec, number=2, wave=with_inputs(waves, own), objective=LOSSES["importance_sampling"])
        assert cluster.run_pass(again).loss == -sum(len(r.ids) - 1 for r in rows)
        found = cluster.gradients()
        # and the mean token loss of the same labels, by its own way
        cluster.discard()
        mean = cluster.run_pass(replace(spec, number=3, objective=None))
        assert not any(w.token_logps for w in mean.workers)
        for name, grad in cluster.gradients().items():
            assert torch.equal(found[name], wanted[name]) and torch.equal(grad, wanted[name]), name
    assert any(grad.any() for grad in wanted.values())
