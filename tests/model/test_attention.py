"""Attention with sinks and with narrow values by torch's fused kernels, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from kt_ray.dims.layer_params import flash_width
from kt_ray.model import attention
from kt_ray.model.attention import _parts, attend

B, H, N = 2, 6, 29


def made(groups: int, d: int, e: int, dtype: torch.dtype, queries: int = N) -> tuple[Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    module = SimpleNamespace(num_key_value_groups=groups, sinks=2 * random(H), training=False)
    return module, [random(B, H, queries, d), random(B, H // groups, N, d), random(B, H // groups, N, e)]


def exact(
    module: Any, tensors: list[Tensor], seen: Tensor | None, scale: float
) -> tuple[Tensor, list[Tensor]]:
    """Output and gradients of its sum of squares, float64."""
    wide = [t.double().requires_grad_() for t in tensors]
    own = SimpleNamespace(**vars(module) | {"sinks": module.sinks.double()})
    mask = None if seen is None else torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).double()
    out, _ = eager_attention_forward(own, *wide, mask, scale)
    return out.detach(), list(torch.autograd.grad(out.square().sum(), wide))


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("kind", ["causal", "window", "padded", "added", "one query"])
@pytest.mark.parametrize(("groups", "d", "e"), [(1, 64, 64), (3, 24, 16), (2, 7, 7)])
def test_as_eager(dtype: torch.dtype, most: float, kind: str, groups: int, d: int, e: int) -> None:
    module, tensors = made(groups, d, e, dtype, queries=1 if kind == "one query" else N)
    n = torch.arange(N)
    causal = n[:, None] >= n[None]
    seen = causal[None, None].expand(B, 1, N, N)
    if kind == "window":
        seen = seen & (n[:, None] - n[None] < 5)
    elif kind == "padded":
        seen = seen & (n < torch.tensor([N, N - 9])[:, None, None, None])
    scale = d**-0.5
    given: Tensor | None = None if kind == "causal" else seen
    if kind == "added":
        given = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    elif kind == "one query":
        seen = given = None  # type: ignore[assignment]
    want, gradients = exact(module, tensors, seen, scale)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, weights = attend(module, *leaves, given, scaling=scale, s_aux=module.sinks)
    assert weights is None and out.shape == want.shape and out.dtype == dtype
    assert float((out.detach().double() - want).norm()) <= most * float(want.norm())
    found = torch.autograd.grad(out.double().square().sum(), leaves)
    for own, value in zip(found, gradients, strict=True):
        assert float((own.double() - value).norm()) <= most * float(value.norm())


def test_the_sink_has_24_bits_in_bfloat16() -> None:
    """One number would round it to 8."""
    sinks, scale = torch.tensor([1 / 3, -7.77, 0.0, 1e4]), 24**-0.5
    held = _parts(sinks, scale, torch.bfloat16).double().sum(-1) * scale
    assert torch.allclose(held, sinks.double(), rtol=2**-22)


def test_scores_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain causal attention stays so: no mask, and keys, queries and values of one width."""
    calls: list[tuple[Any, ...]] = []
    attention = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *rest: Any, **more: Any) -> Tensor:
        calls.append((q.shape, k.shape, v.shape, mask, more["is_causal"]))
        return attention(q, k, v, mask, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    module, tensors = made(3, 64, 48, torch.float32)
    attend(module, *tensors, None, s_aux=module.sinks)
    shape = torch.Size((B, H, N + 1, 72))
    assert calls == [(shape, shape, shape, None, True)]


def test_a_layer_without_sinks_is_transformers_own() -> None:
    module, tensors = made(3, 64, 64, torch.float32)
    out, _ = attend(module, *tensors, None, s_aux=None)
    plain = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(out, plain, atol=1e-6)


def plainly(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, upstream: Tensor
) -> tuple[Tensor, ...]:
    """[b, n, h, e] and the gradients of q, k and v, in float64 by the formula."""
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    groups = q.shape[1] // k.shape[1]
    q, k, v = wide[0], *(t.repeat_interleave(groups, 1) for t in wide[1:])
    scores = q @ k.transpose(-1, -2) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    return (out.detach(), *torch.autograd.grad(out, wide, upstream.double()))


# Roundings of a kernel's inner results: two on the way to an output, four on the way to a gradient, each of
# bfloat16's unit; in float32 of what sums of N terms and exp lose.
@pytest.mark.parametrize(("dtype", "unit"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize("kind", ["causal", "padded", "added", "one query"])
@pytest.mark.parametrize(
    ("groups", "d", "e"), [(1, 192, 128), (3, 24, 16), (1, 200, 136), (1, 7, 5), (2, 16, 24)]
)
def test_narrow_values(
    dtype: torch.dtype, unit: float, kind: str, groups: int, d: int, e: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "HELD_BYTES", 0)
    module, tensors = made(groups, d, e, dtype, queries=1 if kind == "one query" else N)
    n = torch.arange(N)
    seen = (n[:, None] >= n[None])[None, None].expand(B, 1, N, N)
    if kind == "padded":
        seen = seen & (n < torch.tensor([N, N - 9])[:, None, None, None])
    given: Tensor | None = seen if kind == "padded" else None
    if kind == "added":
        given = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    upstream = torch.randn(B, tensors[0].shape[2], H, e, generator=torch.Generator().manual_seed(1)).to(dtype)
    want = plainly(*tensors, None if kind == "one query" else seen, 0.07, upstream)
    leaves = [t.clone().requires_grad_() for t in tensors]
    out, weights = attend(module, *leaves, given, scaling=0.07)
    assert weights is None and out.dtype == dtype
    found = (out.detach(), *torch.autograd.grad(out, leaves, upstream))
    for own, value, roundings in zip(found, want, (2, 4, 4, 4), strict=True):
        assert own.shape == value.shape
        assert float((own.double() - value).norm()) <= roundings * unit * float(value.norm())


def test_long_rows_with_narrow_values_hold_no_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's flash kernel gets one width where scores would be large; short rows keep their bits."""
    widths: list[tuple[int, ...]] = []
    sdpa = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> Tensor:
        widths.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return sdpa(q, k, v, *rest, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    module, tensors = made(1, 24, 16, torch.float32)
    held = 4 * B * H * N * N
    for most in (held, held - 1):
        monkeypatch.setattr(attention, "HELD_BYTES", most)
        out, _ = attend(module, *tensors, None)
        assert out.shape == (B, N, H, 16)
    assert widths == [(24, 24, 16), (24, 24, 24)]


def test_widths_that_train_as_they_compute() -> None:
    """Flash refuses 200 to 224 under grad on some cards, and everything above 256."""
    assert [flash_width(n) for n in (67, 72, 192, 193, 224, 256)] == [72, 72, 192, 256, 256, 256]
