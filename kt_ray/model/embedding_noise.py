"""NEFTune (Jain et al. 2023, arXiv:2310.05914): noise on the embeddings of a training pass.

A row of L tokens gets noise that is uniform in ±alpha / √(L·H) on each of its L·H elements. The draws are the
counter-based hashes of kt_ray.native.dropout_hash, so noise is a function of (seed, step, sample, position,
element) alone: layouts, recomputation, resume and recovery see the same. Of packed rows each document is a
row; padding gets none.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kt_ray.batch import MicroBatch
from kt_ray.model.dropout import module_stream
from kt_ray.model.state import MicroState
from kt_ray.native.dropout_hash import element_hash, row_hash

STREAM = module_stream("neftune")
_ROWS = 512  # positions at a time: their hashes are as large as their embeddings


def with_noise(embedded_BSH: Tensor, micro: MicroState, alpha: float, seed: int, step: int) -> Tensor:
    """The embeddings with noise, in their type; sums are rounded once from float32."""
    hidden = embedded_BSH.shape[-1]
    noised_NH = embedded_BSH.reshape(-1, hidden).clone()
    bound_N = alpha / np.sqrt(np.maximum(_lengths(micro.batch), 1) * hidden).reshape(-1)
    rows = torch.arange(len(noised_NH), device=noised_NH.device) if micro.rows is None else micro.rows
    bound_T = torch.from_numpy(bound_N).to(rows.device)[rows].float()
    row_T = row_hash(seed, step, STREAM, micro.samples_N[rows], micro.positions_N[rows])
    for at in range(0, len(rows), _ROWS):
        part = slice(at, at + _ROWS)
        draw_TH = element_hash(row_T[part], hidden).float() * 2.0**-31  # uniform in [-1, 1]
        noised_NH[rows[part]] = (noised_NH[rows[part]].float() + draw_TH * bound_T[part, None]).to(
            noised_NH.dtype
        )
    return noised_NH.view(embedded_BSH.shape)


def _lengths(batch: MicroBatch) -> np.ndarray:
    """int64 [b, s]: tokens of each position's row, or of its document."""
    if batch.positions_BS is None:
        return np.broadcast_to(batch.lengths[:, None], batch.input_ids.shape)
    document = (batch.positions_BS == 0).reshape(-1).cumsum()  # a row begins with one
    return np.bincount(document)[document].reshape(batch.input_ids.shape)
