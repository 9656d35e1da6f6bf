"""Attention with sinks that never holds its scores, where transformers has only "eager".

A sink is a number s per head, one more logit of every query, whose probability is dropped (gpt-oss,
arXiv 2508.10925). Here it is a key of its own, with a value of zeros. Queries get features that hold s over
the scale and that no other key answers: the sink's logit is s, and no other logit changes. The features are
three parts of the number, which bfloat16 keeps to 24 bits. The sink comes first, and before the queries one
that is thrown away. So plain causal attention remains causal, needs no mask, and fused kernels take it.

Shapes: b rows, h heads, n queries, m keys, d features of queries and keys, e of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NAME = "fused_sinks"
# Model types whose attention hands sinks to the interface and changes scores in no other way.
FAMILIES = frozenset(("flint", "gpt_oss", "granitemoe_swa", "mimo_v2_flash"))
PARTS = 3  # of s / scale
ALIGNED = 8  # features: what fused kernels want a multiple of


def register() -> None:
    """Make `attn_implementation="fused_sinks"` known to transformers (idempotent)."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [b, h, n, d]. key: [b, h / g, m, d]. value: [b, h / g, m, e].
        attention_mask: [b or 1, h or 1, n, m], bool or added to logits; None = causal.
        s_aux: [h], the sinks; None = this layer has none.

    Returns:
        [b, n, h, e], and no weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if s_aux is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    b, heads, n, d = query.shape
    groups = heads // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    width = -(-(d + PARTS) // ALIGNED) * ALIGNED
    tail = F.pad(_parts(s_aux, scale, query.dtype), (0, width - d - PARTS))
    q = torch.cat((query, tail[None, :, None].expand(b, heads, n, width - d)), -1)
    sink = F.pad(query.new_ones(PARTS), (d, width - d - PARTS)).expand(b, heads, 1, width)
    k = torch.cat((sink, F.pad(key, (0, width - d))), 2)
    v = F.pad(value, (0, max(0, width - value.shape[-1]), 1, 0))
    causal = attention_mask is None and n > 1
    if causal:
        q, k, v = F.pad(q, (0, 0, 1, 0)), k[:, :, : n + 1], v[:, :, : n + 1]
    elif attention_mask is not None:
        seen = attention_mask.dtype == torch.bool  # True, or 0 added to the sink's logit
        attention_mask = F.pad(attention_mask, (1, 0), value=seen)
    out = F.scaled_dot_product_attention(q, k, v, attention_mask, dropout, is_causal=causal, scale=scale)
    return out[:, :, int(causal) :, : value.shape[-1]].transpose(1, 2).contiguous(), None


def _parts(sinks: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[h, PARTS] of `dtype`, whose sum times `scale` is the sink."""
    rest, parts = sinks.float() / scale, []
    for _ in range(PARTS):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts, -1)
