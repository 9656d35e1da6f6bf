"""Attention by torch's fused kernels where transformers' "sdpa" would hold scores, or take a slower kernel.

`attend` is transformers' own "sdpa" but for four kinds of attention.

**Sinks**, for which transformers has only "eager". A sink is a number s per head, one more logit of every
query, whose probability is dropped (gpt-oss, arXiv 2508.10925). Here it is a key of its own, with a value of
zeros. Queries get features that hold s over the scale and that no other key answers: the sink's logit is s,
and no other logit changes. The features are three parts of the number, which bfloat16 keeps to 24 bits. The
sink comes first, and before the queries one that is thrown away. So plain causal attention remains causal,
needs no mask, and fused kernels take it.

**Values narrower than keys** (multi-head latent attention: 128 and 192), or wider. Flash kernels want one
width, so the narrower get zeros up to the wider, and the results' zeros are cut off. On CUDA this is done
wherever flash can be had, that is, without a mask; with one, torch takes the memory-efficient kernel, which
has two widths. A CPU would hold every score instead: there short rows are left alone, whose bits would
change.

**Windows** of keys: see windows.py. **Latent keys** of a cache: see latent_keys.py; layers that stay with
"sdpa" have them, too.

What torch's flash kernel refuses on CUDA (sdp_utils.cpp of torch 2.13): float32; a mask; widths above 256,
or of which one differs; and under grad, on compute capability 8.6 to 8.9 and 12.x, widths above 192 up to
224. There the forward without grad would take flash and the recomputation another kernel, and routers might
choose other experts. So no width between 192 and 256 is made here. Widths are multiples of 8, or torch makes
them so by copies. What CUDA does is tested in tests/model/test_gpu.py.

Shapes: b rows, h heads, n queries, m keys, d features of queries and keys, e of values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kt_ray.dims.layer_params import HELD_BYTES, LEARNED_BIAS, SINK_FEATURES, SINKS, flash_width
from kt_ray.model import latent_keys, windows

NAME = "kt_ray"
_WIDEST = 256  # that flash takes


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers, and latent keys to its "sdpa" (idempotent)."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_ATTENTION_FUNCTIONS.register("sdpa", _sdpa)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, windows.mask)


def implementation(config: Any, has_sdpa: bool) -> str:
    """What attention a family runs where "sdpa" is asked for; has_sdpa: whether transformers has it.

    Layers whose index chooses keys stay with "sdpa": they make their mask for that name and "eager" alone.
    """
    if config.model_type in LEARNED_BIAS:
        return "eager"
    if not has_sdpa:  # dims/layer_params.py counts the memory of "eager": WITHOUT_SDPA
        return NAME if config.model_type in SINKS else "eager"
    ours = hasattr(config, "v_head_dim") or getattr(config, "sliding_window", None)
    return NAME if ours and not hasattr(config, "index_topk") else "sdpa"


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
        attention_mask: [b or 1, h or 1, n, m], bool or added to logits; None = causal; or a window, of
            `windows.mask`.
        s_aux: [h], the sinks; None = this layer has none.

    Returns:
        [b, n, h, e], and no weights.
    """
    features = value.shape[-1]
    scaling = scaling if scaling is not None else float(query.shape[-1]) ** -0.5
    if latent_keys.is_unexpanded(query, key):
        return _sdpa(module, query, key, value, attention_mask, scaling=scaling)
    window = windows.window_of(attention_mask)
    if window is not None and (dropout or kwargs.get("position_bias") is not None):
        attention_mask, window = windows.whole_mask(window, query.shape[2], query.device), None
    if s_aux is not None:
        return _with_sinks(query, key, value, attention_mask, scaling, dropout, s_aux), None
    width = max(query.shape[-1], features)
    if window is not None:
        query, key, value = (_widened(t, flash_width(width)) for t in (query, key, value))
        out = windows.attend_in_blocks(query, key, value, window, scaling)
        return out[..., :features].transpose(1, 2).contiguous(), None
    if query.shape[-1] != features and width <= _WIDEST and _widens(query, key, attention_mask):
        query, key, value = (_widened(t, flash_width(width)) for t in (query, key, value))
    out, _ = _sdpa(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    return out[..., :features], None


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """transformers' own, and latent keys."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if latent_keys.is_unexpanded(query, key):
        return latent_keys.attend(module, query, key, value, attention_mask, kwargs["scaling"]), None
    answer: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return answer


def _widened(tensor: Tensor, width: int) -> Tensor:
    """With zeros up to this width; itself where it has it."""
    missing = width - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor


def _widens(query: Tensor, key: Tensor, mask: Tensor | None) -> bool:
    """Whether the narrower of keys and values are to get zeros."""
    b, heads, n, _ = query.shape
    if query.is_cuda:
        return mask is None and n > 1 and _flash(query)
    return 4 * b * heads * n * key.shape[2] > HELD_BYTES


def _flash(query: Tensor) -> bool:
    """Whether torch has a flash kernel for queries of this type on this GPU."""
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and half and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout: float,
    sinks: Tensor,
) -> Tensor:
    """[b, n, h, e]; as `attend`, with sinks [h]."""
    b, heads, n, d = query.shape
    window = windows.window_of(mask)
    causal = mask is None and n > 1
    # A GPU's flash kernel takes keys that heads share; the other kernels do not, and a CPU's would add
    # their gradients in another order.
    shared = (causal and _flash(query)) or window is not None
    groups = 1 if shared else heads // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) if groups > 1 else t for t in (key, value))
    width = flash_width(d + SINK_FEATURES)
    tail = F.pad(_parts(sinks, scale, query.dtype), (0, width - d - SINK_FEATURES))
    q = torch.cat((query, tail[None, :, None].expand(b, heads, n, width - d)), -1)
    sink = F.pad(query.new_ones(SINK_FEATURES), (d, width - d - SINK_FEATURES))
    if window is not None:
        k, v = F.pad(key, (0, width - d)), _widened(value, max(width, value.shape[-1]))
        out = windows.attend_in_blocks(q, k, v, window, scale, sink)
        return out[..., : value.shape[-1]].transpose(1, 2).contiguous()
    k = torch.cat((sink.expand(b, key.shape[1], 1, width), F.pad(key, (0, width - d))), 2)
    v = F.pad(value, (0, max(0, width - value.shape[-1]), 1, 0))
    if causal:
        q, k, v = F.pad(q, (0, 0, 1, 0)), k[:, :, : n + 1], v[:, :, : n + 1]
    elif mask is not None:
        seen = mask.dtype == torch.bool  # True, or 0 added to the sink's logit
        mask = F.pad(mask, (1, 0), value=seen)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=shared
    )
    return out[:, :, int(causal) :, : value.shape[-1]].transpose(1, 2).contiguous()


def _parts(sinks: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """[h, SINK_FEATURES] of `dtype`, whose sum times `scale` is the sink."""
    rest, parts = sinks.float() / scale, []
    for _ in range(SINK_FEATURES):
        parts.append(rest.to(dtype))
        rest = rest - parts[-1].float()
    return torch.stack(parts, -1)
