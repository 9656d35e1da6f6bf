"""Rows padded on the right need no mask where every position looks only back: what a stage finds out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.dims.layer_params import MASKS_PADDING
from kt_ray.model.layer_checks import padding_moves
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.families import LAYERS, save_whole, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import backward, forward, pass_spec
from tests.model.test_families import families

ROWS = random_rows(3, lengths=(43, 30, 5))  # one micro-batch; longer than a window of 16
SAME = 1e-5  # of float32 sums in another order, relative in norm


def result(
    stage: Stage, reference: Eager, *, masked: bool
) -> tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits of the valid positions by sample; gradients of a training pass by name."""
    stage.masks_padding = masked
    evaluated = pass_spec(ROWS, micro=3, kind="eval")
    (loop,) = forward([stage], evaluated, EagerExchange(reference.experts))  # type: ignore[arg-type]
    batch = evaluated.wave[0][0][0]
    logits = {
        int(sample): loop.logits()[0][0][row, : int(batch.lengths[row])]
        for row, sample in enumerate(batch.sample_ids)
    }
    stage.zero_grad()
    loops = forward([stage], pass_spec(ROWS, micro=3), EagerExchange(reference.experts))  # type: ignore[arg-type]
    backward([stage], loops)
    return logits, {n: p.grad.clone() for n, p in stage.parameters.items() if p.grad is not None}


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm()) / max(float(b.norm()), 1e-12)


@pytest.mark.parametrize("family", families(1))
def test_a_family_without_the_mask(family: str, tmp_path: Path) -> None:
    path = write_config(tmp_path / family, family)
    save_whole(path)
    lora = LoraConfig(rank=2)
    stage = Stage(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="float32", lora=lora, padded=True))
    assert stage.masks_padding  # on a CPU
    with stage._zero_experts():
        moved = padding_moves(
            stage.model.capture, stage.model.layers, stage.hands, stage.device, masked=False
        )
    if stage.padding_moves:  # such a run has no padded rows
        assert moved
        return
    family = stage.model.causal.config.get_text_config().model_type
    assert bool(moved) == (family in MASKS_PADDING)
    if moved:
        return
    generator = torch.Generator().manual_seed(3)
    for parameter in stage.parameters.values():  # B is 0 at first, and so would be A's gradient
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    reference = Eager(path, stage.model)
    logits, grads = result(stage, reference, masked=True)
    without, others = result(stage, reference, masked=False)
    assert all(apart(without[sample], logits[sample]) <= SAME for sample in logits)
    assert grads.keys() == others.keys() and any(grad.any() for grad in grads.values())
    largest = max(float(grad.norm()) for grad in grads.values())
    for name, grad in grads.items():
        assert float((others[name] - grad).norm()) <= SAME * (float(grad.norm()) + 1e-2 * largest), name


def test_no_mask_leaves_causal_attention_to_the_kernel(tmp_path: Path) -> None:
    """Layers get no [b, 1, s, s] tensor, so torch may take a kernel that skips hidden pairs."""
    path = write_config(tmp_path, "qwen3_moe")
    save_whole(path)
    stage = Stage(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="float32", padded=True))
    spec = pass_spec(ROWS, micro=3, kind="eval")
    for masked in (True, False):
        stage.masks_padding = masked
        call = stage.begin(spec, 0, None).groups[0].micro[0].calls[0]  # type: ignore[arg-type]
        assert (call.kwargs["attention_mask"] is not None) is masked
