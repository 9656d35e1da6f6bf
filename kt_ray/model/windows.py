"""Attention within a window of keys, block by block: no mask of all pairs, and little work for hidden ones.

transformers makes a mask [b, 1, n, n] for such layers, of which each row shows as many keys as the window is
wide. Here the mask is one number, the window, and queries go by blocks of that length: each sees keys of its
own block and of the one before. So n · 2w pairs are computed in place of n², under one mask [w, 2w].

On a CPU this is done only where the mask would be large: short rows keep their bits.

Shapes: b rows, h heads, k heads of keys, n queries and keys, d features of queries and keys, e of values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kt_ray.dims.layer_params import HELD_BYTES, window_block


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask interface: its "sdpa" but for windows of whole rows.

    Returns:
        int64 [1, 1, 1, 1] on the CPU, the window; or as transformers' `sdpa_mask`.
    """
    from transformers.masking_utils import sdpa_mask

    if (
        allow_is_causal_skip
        and local_size is not None
        and isinstance(q_offset, int)
        and q_offset == kv_offset == 0
        and q_length == kv_length >= local_size
        and (torch.device(device).type == "cuda" or q_length * kv_length > HELD_BYTES)
        and (attention_mask is None or bool(attention_mask.all()))
        and _slides(mask_function, local_size)
    ):
        return torch.full((1, 1, 1, 1), local_size)
    more = {"mask_function": mask_function, "local_size": local_size, "device": device, **kwargs}
    sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
    made: Tensor | None = sdpa_mask(
        *sizes, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip, **more
    )
    return made


def window_of(attention_mask: Tensor | None) -> int | None:
    """The window that stands for a mask; None = it is a mask, or there is none."""
    stands = attention_mask is not None and attention_mask.dtype == torch.int64
    return int(attention_mask) if stands and attention_mask is not None else None


def whole_mask(window: int, n: int, device: torch.device) -> Tensor:
    """bool [1, 1, n, n]: the mask itself, for what does not go by blocks."""
    at = torch.arange(n, device=device)
    return _seen(at, at, window)[None, None]


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, window: int, scale: float, sink: Tensor | None = None
) -> Tensor:
    """Causal attention of each query to `window` keys, its own among them.

    Args:
        q: [b, h, n, d]. k: [b, k, n, d]. v: [b, k, n, e].
        sink: [d], one more key, which all queries see, with a value of zeros.

    Returns:
        [b, h, n, e].
    """
    heads, n = q.shape[1:3]
    shared, size = k.shape[1], window_block(window)
    count = -(-n // size)
    missing = count * size - n
    q, k, v = (F.pad(t, (0, 0, 0, missing)) if missing else t for t in (q, k, v))
    keys, values = (t.unflatten(2, (count, size)) for t in (k, v))
    at = torch.arange(size, device=q.device)
    seen = _seen(at, torch.cat((at - size, at)), window)
    first = _keys(keys[:, :, :1], values[:, :, :1], seen[:, size:], sink)
    rest = None
    if count > 1:
        wide_keys, wide_values = (torch.cat((t[:, :, :-1], t[:, :, 1:]), 3) for t in (keys, values))
        rest = _keys(wide_keys, wide_values, seen, sink)
    outs = []
    for group in q.unflatten(1, (shared, heads // shared)).unbind(2):  # heads that share no keys
        blocks = group.unflatten(2, (count, size))
        out = [_attend(blocks[:, :, :1], first, scale)]
        if rest is not None:
            out.append(_attend(blocks[:, :, 1:], rest, scale))
        outs.append(torch.cat(out, 2).flatten(2, 3))
    return torch.stack(outs, 2).flatten(1, 2)[:, :, :n]


def _seen(queries: Tensor, keys: Tensor, window: int) -> Tensor:
    """bool [queries, keys] of positions."""
    back = queries[:, None] - keys[None]
    return (back >= 0) & (back < window)


def _keys(keys: Tensor, values: Tensor, seen: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What each block of [b, k, blocks, keys, d] sees, blocks in the place of rows: keys, values, mask."""
    keys, values = (t.transpose(1, 2).flatten(0, 1) for t in (keys, values))
    if sink is not None:
        keys = torch.cat((sink.expand(*keys.shape[:2], 1, -1), keys), 2)
        values, seen = F.pad(values, (0, 0, 1, 0)), F.pad(seen, (1, 0), value=True)
    return keys, values, seen[None, None]


def _attend(q: Tensor, keys: tuple[Tensor, Tensor, Tensor], scale: float) -> Tensor:
    """[b, k, blocks, w, e] of q [b, k, blocks, w, d]."""
    k, v, seen = keys
    blocks = q.transpose(1, 2).flatten(0, 1)
    out = F.scaled_dot_product_attention(blocks, k, v, seen, scale=scale)
    return out.unflatten(0, (q.shape[0], q.shape[2])).transpose(1, 2)


def _slides(function: Callable[..., Tensor], window: int) -> bool:
    """Whether a mask function is that of a sliding window: the same size may be that of chunks."""
    zero, query = torch.tensor(0), torch.tensor(window)
    keys = (0, 1, window, window + 1)
    return [bool(function(zero, zero, query, torch.tensor(key))) for key in keys] == [0, 1, 1, 0]
