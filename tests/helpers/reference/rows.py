"""Samples of tests, one by one and as padded micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kt_ray.batch import IGNORE, MicroBatch


@dataclass(frozen=True)
class Row:
    """One sample: token ids, labels (IGNORE where not trained), index in its data set."""

    ids: list[int]
    labels: list[int]
    sample: int


def random_rows(
    count: int, vocab: int = 96, seed: int = 0, lengths: Sequence[int] = (9, 5, 12, 7)
) -> list[Row]:
    """Rows of unequal lengths; the first two tokens of each are not trained."""
    rng = np.random.default_rng(seed)
    rows = []
    for sample in range(count):
        ids = rng.integers(3, vocab, lengths[sample % len(lengths)]).tolist()
        rows.append(Row(ids, [IGNORE, IGNORE, *ids[2:]], sample + 100))
    return rows


def micro_batch(rows: Sequence[Row], pad: int = 0) -> MicroBatch:
    """Rows as one right-padded micro-batch."""
    width = max(len(row.ids) for row in rows)
    return MicroBatch(
        input_ids=np.array([row.ids + [pad] * (width - len(row.ids)) for row in rows], dtype=np.int64),
        labels=np.array([row.labels + [IGNORE] * (width - len(row.labels)) for row in rows], dtype=np.int64),
        lengths=np.array([len(row.ids) for row in rows], dtype=np.int64),
        sample_ids=np.array([row.sample for row in rows], dtype=np.int64),
    )


def loss_tokens(rows: Sequence[Row]) -> int:
    """Trained tokens after the shift."""
    return sum(label != IGNORE for row in rows for label in row.labels[1:])
