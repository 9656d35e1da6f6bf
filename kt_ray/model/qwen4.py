"""Qwen4-Exp's index over blocks of keys, for all queries at once: transformers' class goes query by query,
with tens of kernels for each.

Blocks whose scores are equal (of many no head sees anything in: zero) are taken in the row's order; in what
order transformers takes them depends on the device and on the row's length.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


def index_at_once(model: nn.Module) -> None:
    """Let the indexers of a model choose for all queries at once."""
    theirs, ours = _classes()
    for module in model.modules():
        if type(module) is theirs:
            module.__class__ = ours


@cache
def _classes() -> tuple[type[nn.Module], type[nn.Module]]:
    """transformers' indexer, and ours."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextQSAIndexer, apply_rotary_pos_emb

    class Indexer(Qwen4ExpTextQSAIndexer):
        @torch.no_grad()
        def forward(
            self: Any,  # transformers types its sizes as int | None
            hidden_states: Tensor,
            position_embeddings: tuple[Tensor, Tensor],
            attention_mask: Tensor,
            past_key_values: Any,
        ) -> Tensor:
            """Which keys each query sees: bool [b, 1, s, keys]."""
            b, s, _ = hidden_states.shape
            seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            seen = seen[:, 0].expand(b, -1, -1)  # [b, s, keys]
            some, bytes = seen.any(-1), seen.view(torch.uint8)
            first, after = bytes.argmax(-1), seen.shape[-1] - bytes.flip(-1).argmax(-1)
            # Keys that a query sees, if these are all from a row's first that is no padding; on padding none.
            count, start = (after - first) * some, (first * some).amax(-1)
            place = torch.arange(seen.shape[-1], device=seen.device) - start[:, None]  # [b, keys]
            if not torch.equal(seen, (place >= 0)[:, None] & (place[:, None] < count[..., None])):
                inputs = hidden_states, position_embeddings, attention_mask, past_key_values
                return super().forward(*inputs)
            split = [self.index_n_heads * self.index_head_dim, self.index_head_dim]
            q, keys = self.index_qk_proj(hidden_states).split(split, dim=-1)
            if past_key_values is not None:
                keys = past_key_values.update_indexer(keys, self.layer_idx)
            ratio, whole = self.compress_ratio, count // self.compress_ratio
            blocks = int(whole.max())
            if blocks <= self.block_topk:
                return seen[:, None]

            # The blocks' keys: means of whole blocks, placed where these begin.
            cos, sin = (x.expand(b, -1, -1) for x in position_embeddings)
            inside = start[:, None] + torch.arange(blocks * ratio, device=seen.device)
            inside = inside.clamp(max=keys.shape[1] - 1)  # of rows that have fewer blocks
            groups, begin = _rows(keys, inside).unflatten(1, (blocks, ratio)), inside[:, ::ratio]
            pooled = self.k_layernorm(groups.float().mean(2).to(keys.dtype))[:, :, None]
            turn = _rows(cos, begin), _rows(sin, begin)
            pooled = apply_rotary_pos_emb(pooled, None, *turn, unsqueeze_dim=2)
            pooled = pooled.float().permute(0, 2, 3, 1)  # [b, 1, d, blocks]
            q = self.q_layernorm(q.unflatten(-1, (self.index_n_heads, -1)))
            q = apply_rotary_pos_emb(q, cos=cos[:, -s:], sin=sin[:, -s:], unsqueeze_dim=2)
            chosen = torch.empty(b, s, blocks, dtype=torch.bool, device=seen.device)
            # Scores of some queries at a time, which take no more than a mask.
            step = max(1, s * seen.shape[-1] // (4 * self.index_n_heads * blocks))
            number = torch.arange(blocks, device=seen.device)
            for at in range(0, s, step):
                own = slice(at, at + step)
                scores = q[:, own].float() @ pooled
                scores = scores.relu_().sum(2).div_(math.sqrt(self.index_head_dim))
                scores.masked_fill_(number >= whole[:, own, None], -math.inf)
                best = scores.sort(dim=-1, descending=True, stable=True).indices[..., : self.block_topk]
                chosen[:, own] = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
            block = place.div(ratio, rounding_mode="floor").clamp(0, blocks - 1)
            chosen = torch.stack([row.index_select(1, of) for row, of in zip(chosen, block, strict=True)])
            chosen |= place[:, None] >= ratio * whole[..., None]  # after the last whole block
            return (chosen & seen)[:, None]

    return Qwen4ExpTextQSAIndexer, Indexer


def _rows(values: Tensor, numbers: Tensor) -> Tensor:
    """values [b, n, d] at numbers [b, m]: [b, m, d]."""
    return values.gather(1, numbers[..., None].expand(-1, -1, values.shape[-1]))
