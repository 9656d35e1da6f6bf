"""Several short rows in one, without seeing each other: which go together, and what the row then holds."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from kt_ray.batch import IGNORE
from kt_ray.data.batches import epoch_order
from kt_ray.data.row_types import Row


def pack(rows: Sequence[Row], max_length: int, seed: int, shuffle: bool = True) -> list[Row]:
    """Rows of at most `max_length` tokens, each holding as many of `rows` as fit: best fit.

    A row goes into the open bin that it leaves least room in. Rows come in the order of (seed, epoch 0), so
    that neighbours in the files do not share bins, and the outcome is a function of rows and seed.

    Args:
        rows: unpacked rows, none longer than max_length.
        shuffle: False = in source order.

    Returns:
        Packed rows, each with the sample_id of its first document; documents keep theirs.
    """
    bins: list[list[Row]] = []
    open_bins: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in epoch_order(len(rows), seed, 0, shuffle):
        row = rows[index]
        length = len(row.input_ids)
        at = bisect.bisect_left(open_bins, (length, 0))
        if at < len(open_bins):
            room, number = open_bins.pop(at)
        else:
            room, number = max_length, len(bins)
            bins.append([])
        bins[number].append(row)
        if room - length >= 2:  # a row of fewer tokens trains nothing
            bisect.insort(open_bins, (room - length, number))
    return [join(rows) for rows in bins]


def join(rows: Sequence[Row]) -> Row:
    """One row of several documents.

    The first token of each document loses its label: the token before it in the row belongs to another
    document, and must not predict it.
    """
    labels = []
    for row in rows:
        own = row.labels.copy()
        own[0] = IGNORE
        labels.append(own)
    documents = tuple((row.sample_id, len(row.input_ids)) for row in rows)
    ids = np.concatenate([row.input_ids for row in rows])
    return Row(ids, np.concatenate(labels), rows[0].sample_id, documents)
