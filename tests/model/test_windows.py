"""Attention with a window goes by blocks: against float64, and every family with and without its mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from kt_ray.config.schema import LoraConfig
from kt_ray.model import attention, windows
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.families import LAYERS, save_whole, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import backward, forward, pass_spec
from tests.model.test_attention import B, H, exact, made, plainly
from tests.model.test_families import families

# By their configurations of tests/helpers/families.py; others' layers have no window.
WINDOWED = {
    *("afmoe", "beam", "cohere2_moe", "exaone_moe", "flint", "gemma4_text", "gpt_oss"),
    *("granitemoe_swa", "kolibri1", "mimo_v2_flash", "minimax", "mixtral", "phimoe", "step3p5"),
}


def stands(window: int) -> Tensor:
    return torch.full((1, 1, 1, 1), window)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize(("n", "window"), [(29, 29), (29, 5), (70, 16), (70, 17), (96, 32)])
@pytest.mark.parametrize(("groups", "d", "e"), [(1, 24, 24), (3, 16, 16), (2, 24, 16)])
def test_blocks(dtype: torch.dtype, unit: float, n: int, window: int, groups: int, d: int, e: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = ((B, H, n, d), (B, H // groups, n, d), (B, H // groups, n, e), (B, n, H, e))
    q, k, v, upstream = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
    module, _ = made(groups, d, e, dtype)
    want = plainly(q, k, v, windows.whole_mask(window, n, q.device), 0.2, upstream)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, _ = attention.attend(module, *leaves, stands(window), scaling=0.2)
    found = (out.detach(), *torch.autograd.grad(out, leaves, upstream))
    for own, value, roundings in zip(found, want, (2, 4, 4, 4), strict=True):
        assert own.shape == value.shape and own.dtype == dtype
        assert float((own.double() - value).norm()) <= roundings * unit * float(value.norm())


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("window", [5, 16, 29])
@pytest.mark.parametrize(("groups", "d", "e"), [(1, 64, 64), (3, 24, 16)])
def test_blocks_with_sinks(dtype: torch.dtype, most: float, window: int, groups: int, d: int, e: int) -> None:
    module, tensors = made(groups, d, e, dtype)
    n = tensors[0].shape[2]
    want, gradients = exact(module, tensors, windows.whole_mask(window, n, torch.device("cpu")), 0.125)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, _ = attention.attend(module, *leaves, stands(window), scaling=0.125, s_aux=module.sinks)
    found = torch.autograd.grad(out.double().square().sum(), leaves)
    for own, value in zip((out.detach(), *found), (want, *gradients), strict=True):
        assert float((own.double() - value).norm()) <= most * float(value.norm())


def test_no_call_gets_more_than_two_blocks_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[int] = []
    sdpa = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, **more: Any) -> Tensor:
        assert seen.shape == (1, 1, q.shape[2], k.shape[2])
        keys.append(k.shape[2])
        return sdpa(q, k, v, seen, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    q = torch.randn(1, 2, 400, 8)
    windows.attend_in_blocks(q, q, q, 30, 1.0)
    assert set(keys) == {32, 64}


def test_what_gets_a_number_in_place_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of whole rows; never padding, chunks of the same size, a cache, masks that are more."""
    slides, chunks = sliding_window_causal_mask_function(8), chunked_causal_mask_function(8, torch.zeros(1))
    usual = {"batch_size": 1, "q_length": 12, "kv_length": 12, "mask_function": slides, "local_size": 8}
    assert torch.equal(windows.mask(**usual), sdpa_mask(**usual))  # small, on a CPU
    monkeypatch.setattr(windows, "HELD_BYTES", 0)
    assert windows.window_of(windows.mask(**usual)) == 8
    assert windows.window_of(windows.mask(**usual, attention_mask=torch.ones(1, 12).bool())) == 8
    padded = (torch.arange(12) < 9)[None]
    others: list[dict[str, Any]] = [
        {"mask_function": chunks},
        {"attention_mask": padded},
        {"allow_is_causal_skip": False},
        {"kv_length": 20, "q_offset": 8},
    ]
    for changed in others:
        given = usual | changed
        made_mask = windows.mask(**given)
        assert made_mask is not None and windows.window_of(made_mask) is None
        assert torch.equal(made_mask, sdpa_mask(**given))
    assert windows.mask(**usual | {"q_length": 7, "kv_length": 7}) is None  # the window hides nothing


@pytest.mark.parametrize("family", families(2))
def test_a_family_by_blocks(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole rows of 43, 30 and 5 tokens, windows of 16: logits and the gradient of every LoRA matrix."""
    path = write_config(tmp_path / family, family)
    save_whole(path)
    stage = Stage(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="float32", lora=LoraConfig(rank=2)))
    generator = torch.Generator().manual_seed(3)
    for parameter in stage.parameters.values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    reference, results, numbers = Eager(path, stage.model), [], 0
    for most in (windows.HELD_BYTES, 0):
        monkeypatch.setattr(windows, "HELD_BYTES", most)
        stage.zero_grad()
        spec = pass_spec(random_rows(3, lengths=(43, 30, 5)), micro=1)
        loops = forward([stage], spec, EagerExchange(reference.experts))  # type: ignore[arg-type]
        for call in loops[0].groups[0].micro[0].calls.values():
            tensors = (t for t in call.kwargs.values() if isinstance(t, Tensor))
            numbers += any(t.shape == (1, 1, 1, 1) and t.dtype == torch.int64 for t in tensors)
        backward([stage], loops)
        grads = {n: p.grad.clone() for n, p in stage.parameters.items() if p.grad is not None}
        results.append((loops[-1].loss_sum, grads))
    model_type = stage.model.causal.config.get_text_config().model_type
    assert (numbers > 0) == (model_type in WINDOWED), model_type
    (loss, grads), (other, others) = results
    assert other == pytest.approx(loss, rel=1e-6)
    largest = max(float(grad.norm()) for grad in grads.values())
    # Gemma 4's scores are not scaled down, so float32 rounds more of them.
    close = 1e-4 if model_type == "gemma4_text" else 1e-5
    for name, grad in grads.items():
        assert float((others[name] - grad).norm()) <= close * (float(grad.norm()) + 1e-2 * largest), name
