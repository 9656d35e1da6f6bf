"""Which rows make which step: a pure function of (seed, step), so a resume needs the step number only.

Shapes: b rows, s tokens per row.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kt_ray.batch import IGNORE, MicroBatch, Wave
from kt_ray.data.row_types import Pair, Row

GROUPED_BATCHES = 50  # batches whose rows are sorted together: similar lengths, still mixed over an epoch


def epoch_order(rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Order of the rows in one epoch, int64 [rows].

    Philox keyed by (seed, epoch), and a stable sort of its raw words: the raw stream is fixed by the
    algorithm, whereas numpy may change how `permutation` draws from it.
    """
    if not shuffle:
        return np.arange(rows, dtype=np.int64)
    words = np.random.Philox(key=np.array([seed & 0xFFFFFFFFFFFFFFFF, epoch], dtype=np.uint64)).random_raw(
        rows
    )
    return np.argsort(words, kind="stable").astype(np.int64)


def grouped_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """`epoch_order` with rows of similar length beside each other, int64 [rows].

    The shuffled rows are cut into spans of GROUPED_BATCHES batches, each sorted by length, longest first;
    then full batches are shuffled, so that an epoch does not run from long rows to short ones again and
    again. Rows of a smaller last batch stay last.

    Args:
        lengths: int64 [rows], tokens. batch_size: rows per optimizer step.
    """
    order = epoch_order(len(lengths), seed, epoch, shuffle)
    span = batch_size * GROUPED_BATCHES
    parts = [order[i : i + span] for i in range(0, len(order), span)]
    order = np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])
    full = len(order) // batch_size
    # another stream than the rows' own
    batches = epoch_order(full, seed ^ 0x5BD1E995, epoch, shuffle)
    head = order[: full * batch_size].reshape(full, batch_size)[batches].reshape(-1)
    return np.concatenate([head, order[full * batch_size :]])


def micro_batch(rows: Sequence[Row], pad_id: int = 0, multiple: int = 1) -> MicroBatch:
    """Rows padded on the right to the longest of them, and that to a multiple of `multiple`. Padding is known
    by `lengths`, never by its id."""
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    width = math.ceil(int(lengths.max()) / multiple) * multiple
    ids_BS = np.full((len(rows), width), pad_id, dtype=np.int64)
    labels_BS = np.full_like(ids_BS, IGNORE)
    for i, row in enumerate(rows):
        ids_BS[i, : lengths[i]] = row.input_ids
        labels_BS[i, : lengths[i]] = row.labels
    samples = np.array([row.sample_id for row in rows], dtype=np.int64)
    signs = np.array([row.sign for row in rows], dtype=np.int64)
    if not any(row.documents for row in rows):
        return MicroBatch(ids_BS, labels_BS, lengths, samples, signs)
    samples_BS = np.empty_like(ids_BS)
    positions_BS = np.empty_like(ids_BS)
    for i, row in enumerate(rows):
        # Padding is one more document: it neither sees the others nor is seen.
        padding = (int(row.sample_id), ids_BS.shape[1] - int(lengths[i]))
        documents = [*(row.documents or ((row.sample_id, int(lengths[i])),)), padding]
        samples_BS[i] = np.concatenate([np.full(n, sample) for sample, n in documents])
        positions_BS[i] = np.concatenate([np.arange(n) for _, n in documents])
    # Whoever made the labels: a document's first token is never predicted from the document before.
    labels_BS[positions_BS == 0] = IGNORE
    return MicroBatch(
        ids_BS, labels_BS, lengths, samples, signs, samples_BS=samples_BS, positions_BS=positions_BS
    )


def to_share(micro: Sequence[MicroBatch], most: int, *, alike: bool) -> list[list[MicroBatch]]:
    """Micro-batches of several trainings, those together that become one (`side_by_side`), widest first.

    Args:
        most: positions of one, padding included; a micro-batch that finds no other may have more.
        alike: rows of one length only, for models that padding moves; else the narrowest are at least half as
            wide as the widest.
    """
    chosen: list[list[MicroBatch]] = []
    rows = 0  # of the last
    for one in sorted(micro, key=lambda m: -m.input_ids.shape[1]):  # stable
        own, wide = one.input_ids.shape
        width = chosen[-1][0].input_ids.shape[1] if chosen else 0
        rows += own
        if chosen and rows * width <= most and wide >= (width if alike else width / 2):
            chosen[-1].append(one)
        else:
            chosen.append([one])
            rows = own
    return chosen


def side_by_side(parts: Sequence[MicroBatch]) -> MicroBatch:
    """One after another, padded to the widest; what a loss reads stays with the parts. One alone stays as it
    is."""
    if len(parts) == 1:
        return parts[0]
    width = max(part.input_ids.shape[1] for part in parts)

    def rows(name: str, pad: int) -> np.ndarray:
        arrays = [getattr(part, name) for part in parts]
        return np.concatenate(
            [np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=pad) for array in arrays]
        )

    return MicroBatch(
        rows("input_ids", 0),
        rows("labels", IGNORE),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.sample_ids for part in parts]),
        parts=tuple(parts),
    )


def flat(units: Sequence[Row | Pair]) -> tuple[list[Row], int]:
    """(rows in order, a pair's chosen one first; rows per unit: 2 for pairs)."""
    rows = [row for u in units for row in ((u.chosen, u.rejected) if isinstance(u, Pair) else (u,))]
    return rows, max(1, len(rows) // max(1, len(units)))


def mismatched(rows: Sequence[Row], max_length: int) -> list[Row]:
    """KTO's rows for its reference point: each prompt with the answer of the row before it.

    The answer is what follows the first trained token; the first row takes the last one's. One row alone has
    none.
    """
    if len(rows) < 2:
        return []
    result = []
    for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True):
        begin, theirs = (int(np.argmax(r.labels != IGNORE)) for r in (row, other))
        ids = np.concatenate([row.input_ids[:begin], other.input_ids[theirs:]])[:max_length]
        labels = np.concatenate([np.full(begin, IGNORE), other.labels[theirs:]])[:max_length]
        result.append(Row(ids, labels.astype(np.int64), row.sample_id))
    return result


def shared_micro_batches(
    rows: Sequence[Row], least: int, shares: int, budget: int, multiple: int, alike: bool
) -> list[Sequence[Row]]:
    """Rows of similar length together, the widest of each times their number at most `budget` positions.

    A function of the rows in their order. Micro-batches come in the order of their first rows, so that long
    and short ones are mixed as the rows are.

    Args:
        least: rows that a micro-batch may hold anyway; more only while there is one for each of `shares`.
        multiple: as in `micro_batch`. alike: rows of one length only.
    """
    widths = [math.ceil(len(row.input_ids) / multiple) * multiple for row in rows]
    most = max(least, len(rows) // shares)
    parts: list[list[int]] = []
    for i in sorted(range(len(rows)), key=lambda i: -widths[i]):  # stable
        last = parts[-1] if parts else []
        fits = not alike or (last and widths[last[0]] == widths[i])
        if last and fits and len(last) < most and (len(last) + 1) * widths[last[0]] <= budget:
            last.append(i)
        else:
            parts.append([i])
    return [[rows[i] for i in part] for part in sorted(sorted(part) for part in parts)]


def wave(
    parts: Sequence[Sequence[Row]],
    replicas: int = 1,
    groups: int = 1,
    pad_id: int = 0,
    multiple: int = 1,
    unpadded: bool = False,
) -> Wave:
    """The micro-batches of one pass as PassSpec wants them: `parts` are the rows of each.

    Micro-batch i goes to replica i % replicas; a replica's share is
    cut into `groups` contiguous groups whose sizes differ by one at most. With few rows a replica may
    have empty groups, always the last ones. `pad_id` may be any id: padding is neither attended to nor
    trained. The rest as in `Batches`.
    """
    if unpadded:
        alike = (itertools.groupby(part, key=lambda row: len(row.input_ids)) for part in parts)
        parts, multiple = [list(group) for runs in alike for _, group in runs], 1
    micro = [micro_batch(part, pad_id, multiple) for part in parts]

    def grouped(share: Sequence[MicroBatch]) -> tuple[tuple[MicroBatch, ...], ...]:
        small, larger = divmod(len(share), groups)
        starts = [group * small + min(group, larger) for group in range(groups + 1)]
        return tuple(tuple(share[start:stop]) for start, stop in itertools.pairwise(starts))

    return tuple(grouped(micro[replica::replicas]) for replica in range(replicas))


def step_waves(
    rows: Sequence[Row],
    micro_batch_size: int,
    replicas: int = 1,
    groups: int = 1,
    largest: int | None = None,
    pad_id: int = 0,
    multiple: int = 1,
    unpadded: bool = False,
    budget: int | None = None,
) -> list[Wave]:
    """The passes of a step: as few waves as `largest` allows, all but the last of the same size.

    Args:
        largest: micro-batches of a replica per wave at the most; None = all in one.
        budget: positions of a micro-batch, which rows share by their lengths (`shared_micro_batches`); None =
            micro_batch_size rows each, in order.
    """
    if not rows:
        return []
    if budget is None:
        parts = [rows[i : i + micro_batch_size] for i in range(0, len(rows), micro_batch_size)]
    else:
        multiple = 1 if unpadded else multiple
        shares = replicas * groups
        parts = shared_micro_batches(rows, micro_batch_size, shares, budget, multiple, unpadded)
    micro = math.ceil(len(parts) / replicas)  # of the first replica, which has most
    waves = math.ceil(micro / (largest or micro))
    count = math.ceil(micro / waves) * replicas
    return [
        wave(parts[i : i + count], replicas, groups, pad_id, multiple, unpadded)
        for i in range(0, len(parts), count)
    ]


def with_loss_inputs(waves: Sequence[Wave], inputs: Mapping[int, Mapping[str, np.ndarray]]) -> list[Wave]:
    """The same waves with what a TokenLoss reads.

    Args:
        inputs: by sample id, float32 [s] each of the row's tokens.
    """

    def filled(micro: MicroBatch) -> MicroBatch:
        rows = [inputs[int(sample)] for sample in micro.sample_ids]
        arrays = {
            name: np.zeros(micro.input_ids.shape, dtype=np.float32)
            for name in {n for row in rows for n in row}
        }
        for place, row in enumerate(rows):
            for name, values in row.items():
                arrays[name][place, : len(values)] = values
        return replace(micro, loss_inputs=arrays)

    return [
        tuple(tuple(tuple(filled(micro) for micro in group) for group in groups) for groups in wave)
        for wave in waves
    ]


def eval_waves(
    rows: Sequence[Row] | Sequence[Pair],
    batch_size: int,
    micro_batch_size: int,
    replicas: int = 1,
    groups: int = 1,
    pad_id: int = 0,
    largest: int | None = None,
    multiple: int = 1,
    unpadded: bool = False,
    budget: int | None = None,
) -> list[list[Wave]]:
    """All rows once, in source order, as batches of `batch_size` rows, each as its waves."""
    parts = [flat(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    return [
        step_waves(
            part, unit * micro_batch_size, replicas, groups, largest, pad_id, multiple, unpadded, budget
        )
        for part, unit in parts
    ]


@dataclass
class Batches:
    """The training rows cut into optimizer steps.

    A batch never crosses an epoch; the last one of an epoch may be smaller. The same step has the same rows
    whether or not the steps before it were taken.
    """

    rows: Sequence[Row] | Sequence[Pair]  # training rows, or pairs of them; at least one
    batch_size: int  # rows (pairs) per optimizer step, over all replicas
    micro_batch_size: int = 1  # rows (pairs) that pass a layer together
    replicas: int = 1  # copies of the attention side
    groups: int = 1  # micro-batch groups in flight per replica
    shuffle: bool = True  # a new order every epoch; False = source order
    seed: int = 0
    pad_id: int = 0  # id that fills padding
    # micro-batches of a replica that pass the layers together, at the most; None = all
    largest_wave: int | None = None
    multiple: int = 1  # widths of micro-batches are multiples of this
    group_by_length: bool = False  # batches of rows of similar length, see `grouped_order`
    # micro-batches of rows of one length: for models that padding moves
    unpadded: bool = False
    budget: int | None = None  # positions of a micro-batch, see `step_waves`
    # The latest epoch and its order.
    _epoch: tuple[int, np.ndarray] | None = field(default=None, init=False)

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def step(self, step: int) -> list[Row]:
        """The rows of optimizer step `step` (0-based), in order; of pairs both, chosen first."""
        return flat(self.units(step))[0]

    def units(self, step: int) -> list[Any]:
        """The rows or pairs of optimizer step `step` (0-based), in order."""
        epoch, index = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        order = self._epoch[1][index * self.batch_size : (index + 1) * self.batch_size]
        return [self.rows[i] for i in order]

    def _order(self, epoch: int) -> np.ndarray:
        if not self.group_by_length:
            return epoch_order(len(self.rows), self.seed, epoch, self.shuffle)
        lengths = [sum(len(row.input_ids) for row in flat([unit])[0]) for unit in self.rows]
        return grouped_order(np.array(lengths), self.batch_size, self.seed, epoch, self.shuffle)

    def waves(self, step: int) -> list[Wave]:
        """The passes of optimizer step `step`, each as PassSpec wants it."""
        return self.waves_of(*flat(self.units(step)))

    def waves_of(self, rows: Sequence[Row], unit: int = 1) -> list[Wave]:
        """Passes over any rows, cut as those of a step; `unit` rows are never parted."""
        size = unit * self.micro_batch_size
        return step_waves(
            rows,
            size,
            self.replicas,
            self.groups,
            self.largest_wave,
            self.pad_id,
            self.multiple,
            self.unpadded,
            self.budget,
        )
