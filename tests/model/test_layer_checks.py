"""Packed rows give the losses and gradients of their documents alone, dropout included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.config.schema import LoraConfig
from kt_ray.data.batches import micro_batch
from kt_ray.data.pack_rows import join
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError
from tests.helpers.families import LAYERS, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import make_stages, run
from tests.helpers.tiny_families import tiny_family
from tests.model.test_families import build
from tests.model.test_stage_parity import ready

Checkpoint = Callable[..., Path]
LORA = LoraConfig(rank=4, dropout=0.2)
# The second begins with a trained token: packed, it must not be predicted from the first's last one.
ROWS = [
    Row(np.array(r.ids), np.array(r.ids if i == 1 else r.labels), r.sample)
    for i, r in enumerate(random_rows(5, lengths=(9, 5, 12, 7, 2)))
]


def spec(micro: Sequence[MicroBatch], kind: str = "train") -> PassSpec:
    tokens = sum(mb.loss_tokens for mb in micro)
    return PassSpec(1, 3, kind, 0, ((tuple(micro),),), tokens)


ALONE = spec([micro_batch([row]) for row in ROWS])
# Rows of unequal length, so that padding meets documents too; one row is not packed.
TOGETHER = spec([micro_batch([join(ROWS[:3]), join(ROWS[3:4])]), micro_batch(ROWS[4:])])


@pytest.mark.parametrize(
    ("family", "changes", "cuts"),
    [
        ("deepseek_v3", {}, (0, 3)),
        ("qwen3_moe", {}, (0, 2, 3)),
        ("mixtral", {"sliding_window": 4}, (0, 3)),
    ],
)
def test_packed_equals_unpacked(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], cuts: tuple[int, ...]
) -> None:
    reference, stages = ready(checkpoint(family, **changes), LORA, cuts)
    alone = run(stages, ALONE, reference)
    packed = run(stages, TOGETHER, reference)
    assert ALONE.loss_tokens == TOGETHER.loss_tokens
    assert packed.loss == pytest.approx(alone.loss, rel=1e-6)
    for name, grad in alone.grads.items():
        torch.testing.assert_close(packed.grads[name], grad, rtol=1e-4, atol=1e-6)
    assert any(grad.any() for grad in alone.grads.values())


def test_dropout_counts_samples_and_positions_within_them(checkpoint: Checkpoint) -> None:
    """With the counters of the packed row itself, masks and so the loss would be others."""
    reference, stages = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    alone = run(stages, ALONE, reference).loss
    mb = TOGETHER.wave[0][0][0]
    assert mb.samples_BS is not None
    moved = replace(mb, samples_BS=np.repeat(mb.sample_ids[:, None], mb.input_ids.shape[1], axis=1))
    wrong = replace(TOGETHER, wave=(((moved, *TOGETHER.wave[0][0][1:]),),))
    assert abs(run(stages, wrong, reference).loss - alone) > 1e-5


def test_positions_that_do_not_restart_change_the_loss(checkpoint: Checkpoint) -> None:
    """The guard at work: without restarting positions documents see each other."""
    reference, stages = ready(checkpoint("deepseek_v3"), replace(LORA, dropout=0.0), (0, 3))
    alone = run(stages, ALONE, reference).loss
    mb = micro_batch([join(ROWS[:3])])
    rest = [micro_batch([row]) for row in ROWS[3:]]
    assert run(stages, spec([mb, *rest]), reference).loss == pytest.approx(alone, rel=1e-6)
    blind = replace(mb, samples_BS=None, positions_BS=None)
    assert abs(run(stages, spec([blind, *rest]), reference).loss - alone) > 1e-4


@pytest.mark.parametrize("family", ["qwen3_next", "deepseek_v4"])
def test_layers_that_mix_documents_are_refused_by_what_they_do(family: str, tmp_path: Path) -> None:
    layers = 4
    path = tiny_family(tmp_path / family, family, num_hidden_layers=layers)
    (stage,) = make_stages(path, (0, layers), replace(LORA, dropout=0.0))
    stage.begin(ALONE, 0, None)  # type: ignore[arg-type]  # nothing is submitted
    with pytest.raises(UserError, match=rf"{family} cannot train packed rows.*layer \d.*data\.packing=false"):
        stage.begin(TOGETHER, 0, None)  # type: ignore[arg-type]


def test_a_mask_made_without_positions_is_refused_by_what_it_does(tmp_path: Path) -> None:
    """transformers 5 gives gpt_oss's masks no position ids: documents would see each other."""
    path = tiny_family(tmp_path / "gpt_oss", "gpt_oss", num_hidden_layers=2)
    (stage,) = make_stages(path, (0, 2), replace(LORA, dropout=0.0))
    with pytest.raises(UserError, match="gpt_oss cannot train packed rows"):
        stage.begin(TOGETHER, 0, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa", "axk2", "dots3_note_text"])
def test_indexed_attention_chooses_within_a_document(family: str, tmp_path: Path) -> None:
    """The index keeps 4 keys of up to 9. With few index heads scores tie at 0 and the choice is arbitrary."""
    path = write_config(tmp_path / family, family, index_n_heads=64, index_topk=4)
    build(path)
    (stage,) = make_stages(path, (0, LAYERS), LORA)
    stage.check_packing()


def test_bf16_layers_pass_the_check(checkpoint: Checkpoint) -> None:
    from kt_ray.model.layer_checks import check_packing

    (stage,) = make_stages(checkpoint("deepseek_v3"), (0, 3), LORA)
    for layer in stage.model.layers.values():
        layer.bfloat16()
    for context in stage.model.experts.values():
        context.handler = lambda x, ids, weights: torch.zeros_like(x)
    check_packing(stage.model.capture, stage.model.layers, stage.hands, stage.device)
