"""NEFTune's noise: its formula, which positions have it, and passes against Hugging Face with it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kt_ray.batch import MicroBatch
from kt_ray.config.schema import LoraConfig
from kt_ray.data.batches import micro_batch
from kt_ray.data.row_types import Row
from kt_ray.model.embedding_noise import STREAM, with_noise
from kt_ray.model.state import MicroState
from kt_ray.native.dropout_hash import combine, fmix
from tests.helpers.hf_reference import Reference, build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, relative, waves_of

HIDDEN, ALPHA, SEED = 24, 5.0, 3


def one_draw(step: int, sample: int, position: int, element: int) -> float:
    """The hash in Python's integers, as a number in [-1, 1)."""
    h = 0
    for value in (SEED, 0, step, STREAM, sample, 0, position):
        h = combine(h, value)
    u = fmix(h + (element + 1) * 0x9E3779B9)
    return (u - (1 << 32) if u >= 1 << 31 else u) / 2.0**31


def noise(batch: MicroBatch, step: int = 7, hidden: int = HIDDEN) -> Tensor:
    zeros = torch.zeros(*batch.input_ids.shape, hidden)
    return with_noise(zeros, MicroState.create(batch, torch.device("cpu")), ALPHA, SEED, step)


def rows(*lengths: int) -> list[Row]:
    return [Row(np.arange(1, n + 1), np.arange(1, n + 1), 10 + i) for i, n in enumerate(lengths)]


def test_every_element_is_the_papers() -> None:
    """Uniform in ±alpha / √(L·H), L without padding."""
    lengths = (6, 3)
    found = noise(micro_batch(rows(*lengths), 0))
    for i, n in enumerate(lengths):
        for position in range(n):
            for element in (0, 1, HIDDEN - 1):
                expected = one_draw(7, 10 + i, position, element) * ALPHA / math.sqrt(n * HIDDEN)
                assert float(found[i, position, element]) == pytest.approx(expected, rel=1e-6)
        assert not found[i, n:].any()


def test_draws_are_uniform_and_new_in_every_step() -> None:
    (row,) = rows(1500)  # more positions than are computed at a time
    bound = ALPHA / math.sqrt(1500 * 64)
    first, second = (noise(micro_batch([row], 0), step, 64)[0] / bound for step in (0, 1))
    assert float(first.abs().max()) <= 1 and float(first.abs().max()) > 0.999
    assert float(first.mean()) == pytest.approx(0, abs=0.01)
    assert float(first.var()) == pytest.approx(1 / 3, abs=0.01)
    assert float((first * second).mean()) == pytest.approx(0, abs=0.01)


def test_packed_documents_have_the_noise_of_their_rows() -> None:
    alone = rows(5, 8, 2)
    joined = Row(
        np.concatenate([r.input_ids for r in alone[:2]]),
        np.concatenate([r.labels for r in alone[:2]]),
        10,
        documents=((10, 5), (11, 8)),
    )
    packed = noise(micro_batch([joined, alone[2]], 0))
    for at, row in ((0, alone[0]), (5, alone[1])):
        length = len(row.input_ids)
        torch.testing.assert_close(
            packed[0, at : at + length], noise(micro_batch([row], 0))[0], rtol=0, atol=0
        )
    torch.testing.assert_close(packed[1, :2], noise(micro_batch([alone[2]], 0))[0], rtol=0, atol=0)
    assert not packed[1, 2:].any()


def test_rounded_once_to_the_embeddings_type() -> None:
    batch = micro_batch(rows(4), 0)
    embedded = torch.randn(1, 4, HIDDEN).bfloat16()
    micro = MicroState.create(batch, torch.device("cpu"))
    before = embedded.clone()
    found = with_noise(embedded, micro, ALPHA, SEED, 7)
    torch.testing.assert_close(found, (embedded.float() + noise(batch)).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(embedded, before, rtol=0, atol=0)


class NoisyReference(Reference):
    """Adds the definition's noise to what the embedding gives for a row."""

    alpha = 0.0

    def noisy(self) -> None:
        def hook(module: nn.Module, inputs: object, out: Tensor) -> Tensor:
            length, hidden = out.shape[1:]
            draws = [[one_draw(self._step, self._sample, p, j) for j in range(hidden)] for p in range(length)]
            return out + torch.tensor(draws)[None] * self.alpha / math.sqrt(length * hidden)

        self.model.get_input_embeddings().register_forward_hook(hook)


@pytest.mark.parametrize("layout", ["rule=cpu_1worker_1socket", "rule=cpu_2workers_2sockets"])
def test_a_pass_is_hugging_faces_with_the_same_noise(tmp_path: Path, layout: str) -> None:
    path = build_checkpoint(tmp_path, "qwen3_moe")
    data = random_rows(4)
    reference = NoisyReference(path, LoraConfig(rank=4, alpha=8.0), seed=SEED)
    reference.randomize_b(1)
    plain = reference.run(data, step=2)
    reference.alpha = 20.0
    reference.noisy()
    expected = reference.run(data, step=2)
    config = config_for(path, layout, "trainer.micro_batch_size=3")
    with local_cluster(path, config) as cluster:
        cluster.set_parameters({k: v.detach() for k, v in reference.parameters.items()})
        waves = waves_of(data, config, cluster.plan)
        spec = replace(one_pass(cluster, waves, step=2), noise_alpha=20.0)
        report = cluster.run_pass(spec)
        errors = relative(cluster.gradients(), expected.grads)
        evaluated = cluster.run_pass(replace(spec, number=2, kind="eval"))
    assert report.loss == pytest.approx(expected.loss, rel=1e-5)
    assert max(errors.values()) <= 1e-4
    assert evaluated.loss == pytest.approx(plain.loss, rel=1e-5)  # none in an evaluation
    assert abs(plain.loss - expected.loss) > 1e-3 * plain.loss  # and in training it makes a difference
