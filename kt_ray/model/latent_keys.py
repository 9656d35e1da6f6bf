"""Latent attention over a cache as it is: for one new token nothing cached is expanded.

transformers keeps what keys and values of all heads are made of, c, and a rotated part that heads share, and
makes all of them anew for every new token. But q · (K c) = (Kᵀ q) · c, and a sum of p V c is V times the sum
of p c ("absorbed" in DeepSeek-V2, arXiv 2405.04434, 2.1.2). So the query of a head is brought to the width of
c, attends to that as if all heads shared one key, and its answer is brought to the width of a value. Per
cached token and head that takes r + p and r products instead of d + p and e, but not the r (d + e) that make
a key and a value, nor their memory: of a token DeepSeek-V3 has 576 numbers instead of 40,960.

Shapes: b rows, h heads, m cached tokens; per head d numbers of a key that come from c, p rotated ones, e of a
value; r numbers of c; k rank of the adapter.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def latent_attention(layer: nn.Module) -> list[Any]:
    """The attention modules of a decoder layer that can do without expanded keys; none where the keys' weight
    is no sum of a matrix and an adapter (DoRA), attention is transformers' "eager", or expanded keys are what
    is cached."""
    return [
        module
        for module in layer.modules()
        if hasattr(module, "expand_kv")
        and caches_latents(module)
        and getattr(module.config, "_attn_implementation", "eager") != "eager"
        and not any(getattr(module.kv_b_proj, "use_dora", {}).values())
    ]


def caches_latents(module: Any) -> bool:
    """Whether an attention module (or its class) caches first and expands then; DeepSeek-V3.2 of
    transformers before 5.18 does it the other way round."""
    names = inspect.unwrap(module.forward).__code__.co_names
    return "expand_kv" in names and "update" in names[: names.index("expand_kv")]


@contextmanager
def unexpanded(modules: Sequence[Any]) -> Iterator[None]:
    """Inside, these modules hand the cache to their attention function as it is, for `attend`."""
    for module in modules:
        module.expand_kv = lambda latents, rotated: (rotated, latents)
    try:
        yield
    finally:
        for module in modules:
            del module.expand_kv


def is_unexpanded(query: Tensor, key: Tensor) -> bool:
    """Whether an attention function got what `unexpanded` gives: all others have keys as wide as queries."""
    return query.shape[-1] != key.shape[-1]


def attend(
    module: Any, query: Tensor, rotated: Tensor, latents: Tensor, mask: Tensor | None, scaling: float
) -> Tensor:
    """Attention of one new token.

    Args:
        module: with the linear `kv_b_proj`, [h (d + e), r], which may have an adapter.
        query: [b, h, 1, d + p]. rotated: [b, 1, m, p]. latents: [b, 1, m, r].
        mask: [b or 1, h or 1, 1, m], bool or added to logits; None = all are seen.

    Returns:
        [b, 1, h, e].
    """
    (_, heads, _, width), size = query.shape, latents.shape[-1]
    from_latents = width - rotated.shape[-1]
    expansion, adapter = _matrices(module.kv_b_proj, heads)
    of_keys, of_values = expansion[:, :from_latents], expansion[:, from_latents:]
    q = query[:, :, 0].transpose(0, 1)  # [h, b, d + p]
    own, shared = q[..., :from_latents], q[..., from_latents:]
    asked = own @ of_keys
    if adapter is not None:
        down, up = adapter
        asked = (asked + own.float() @ up[:, :from_latents] @ down).to(q.dtype)
    q = torch.cat((asked, shared), -1).transpose(0, 1)[:, None]  # [b, 1, h, r + p]
    # One tensor is both, so that kernels which want one width take it.
    keys = torch.cat((latents, rotated), -1)
    mask = None if mask is None else mask.transpose(1, 2)
    found = F.scaled_dot_product_attention(q, keys, keys, mask, scale=scaling)[:, 0, :, :size]
    found = found.transpose(0, 1)  # [h, b, r]
    out = found @ of_values.transpose(1, 2)
    if adapter is not None:
        down, up = adapter
        out = (out + (found.float() @ down.T) @ up[:, from_latents:].transpose(1, 2)).to(out.dtype)
    return out.transpose(0, 1)[:, None]


def _matrices(linear: Any, heads: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """The frozen weight [h, d + e, r]; of the adapter in use A [k, r] and scale B [h, d + e, k], float32."""
    from peft.tuners.lora import LoraLayer  # takes seconds, and expert actors import this module

    if not isinstance(linear, LoraLayer):
        return linear.weight.unflatten(0, (heads, -1)), None
    base: Any = linear.get_base_layer()
    weight: Tensor = base.weight.unflatten(0, (heads, -1))
    if linear.disable_adapters:
        return weight, None
    (name,) = linear.active_adapters
    up: Tensor = linear.scaling[name] * linear.lora_B[name].weight
    down: Any = linear.lora_A[name].weight
    return weight, (down, up.unflatten(0, (heads, -1)))
