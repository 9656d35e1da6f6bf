"""Order, resume, and how a step's rows are dealt to replicas and groups."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from kt_ray.batch import IGNORE, MicroBatch, PassSpec, trained_tokens
from kt_ray.data.batches import (
    Batches,
    Wave,
    epoch_order,
    eval_waves,
    micro_batch,
    side_by_side,
    step_waves,
    to_share,
)
from kt_ray.data.row_types import Row


def make_rows(n: int) -> list[Row]:
    result = []
    for i in range(n):
        ids = np.arange(3 + i % 4, dtype=np.int64) + 10 * i
        labels = ids.copy()
        labels[: 1 + i % 2] = IGNORE
        result.append(Row(ids, labels, i))
    return result


ROWS = make_rows(23)


def ids(rows: list[Row]) -> list[int]:
    return [row.sample_id for row in rows]


def test_every_epoch_is_a_permutation_and_epochs_and_seeds_differ() -> None:
    orders = [epoch_order(100, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    for order in orders:
        assert sorted(order) == list(range(100))
    assert len({tuple(order) for order in orders}) == 4
    assert epoch_order(4, 0, 3, shuffle=False).tolist() == [0, 1, 2, 3]


def test_the_order_is_fixed_for_good() -> None:
    """A changed order would break the resume of every old run: Philox4x64 is a standard, so is this list."""
    assert epoch_order(8, seed=1, epoch=2).tolist() == [4, 2, 0, 6, 1, 5, 7, 3]


def test_batches_cover_an_epoch_and_never_cross_it() -> None:
    batches = Batches(ROWS, batch_size=5, seed=3)
    assert batches.steps_per_epoch == 5
    for epoch in range(3):
        steps = [ids(batches.step(epoch * 5 + i)) for i in range(5)]
        assert [len(step) for step in steps] == [5, 5, 5, 5, 3]
        assert list(itertools.chain(*steps)) == epoch_order(23, 3, epoch).tolist()


def test_resume_from_any_step_equals_a_straight_run() -> None:
    straight = Batches(ROWS, batch_size=4, seed=9)
    run = [ids(straight.step(step)) for step in range(20)]
    for start in (1, 3, 6, 11, 17):  # mid-epoch ones among them: an epoch has 6 steps
        resumed = Batches(ROWS, batch_size=4, seed=9)
        assert [ids(resumed.step(step)) for step in range(start, 20)] == run[start:]
    assert [ids(straight.step(step)) for step in reversed(range(20))] == run[::-1]


def test_without_shuffle_rows_come_in_source_order() -> None:
    batches = Batches(ROWS, batch_size=10, shuffle=False)
    assert ids(batches.step(0)) == ids(batches.step(3)) == list(range(10))


def test_the_layout_does_not_change_which_rows_a_step_has() -> None:
    expected = sorted(ids(Batches(ROWS, 8, seed=2).step(1)))
    for micro, replicas, groups in itertools.product((1, 3, 8), (1, 2, 3), (1, 2, 4)):
        (whole,) = Batches(ROWS, 8, micro, replicas, groups, seed=2).waves(1)
        assert sorted(samples(whole)) == expected
        for largest in (1, 2, 3):
            waves = Batches(ROWS, 8, micro, replicas, groups, seed=2, largest_wave=largest).waves(1)
            assert sorted(i for w in waves for i in samples(w)) == expected
            assert all(len(list(itertools.chain(*replica))) <= largest for w in waves for replica in w)


def samples(wave_: Wave) -> list[int]:
    return [i for groups in wave_ for group in groups for mb in group for i in mb.sample_ids.tolist()]


@pytest.mark.parametrize(
    ("rows", "micro", "replicas", "largest", "sizes"),
    [
        (8, 1, 1, None, [8]),
        (8, 1, 1, 8, [8]),
        (8, 1, 1, 5, [4, 4]),  # alike, not 5 and 3
        (8, 1, 1, 3, [3, 3, 2]),
        (8, 1, 2, 3, [4, 4]),
        (7, 2, 1, 2, [4, 3]),
        (1, 4, 2, 1, [1]),
        (0, 1, 1, 1, []),
    ],
)
def test_steps_are_cut_into_as_few_and_even_waves_as_allowed(
    rows: int, micro: int, replicas: int, largest: int | None, sizes: list[int]
) -> None:
    waves = step_waves(ROWS[:rows], micro, replicas, 1, largest)
    assert [len(samples(w)) for w in waves] == sizes
    assert sorted(i for w in waves for i in samples(w)) == sorted(ids(ROWS[:rows]))


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(("replicas", "groups"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_rows_of_similar_length_share_micro_batches(replicas: int, groups: int, multiple: int) -> None:
    lengths = [90, 3, 40, 5, 88, 41, 4, 100, 6, 39, 2, 7]
    rows = [Row(np.arange(n), np.arange(n), sample_id=i) for i, n in enumerate(lengths)]
    budget = 104

    def cut(rows: list[Row]) -> list[MicroBatch]:
        waves = step_waves(rows, 1, replicas, groups, None, multiple=multiple, budget=budget)
        return [mb for wave_ in waves for share in wave_ for group in share for mb in group]

    micro = cut(rows)
    assert sorted(i for mb in micro for i in mb.sample_ids.tolist()) == list(range(len(rows)))
    assert all(mb.input_ids.size <= budget for mb in micro)
    assert replicas * groups <= len(micro) < len(rows)  # every replica and group has some
    assert max(len(mb.lengths) for mb in micro) <= max(1, len(rows) // (replicas * groups))
    padding = sum(mb.input_ids.size - mb.tokens for mb in micro)
    assert padding < 0.2 * sum(lengths) + multiple * len(rows)
    assert [mb.sample_ids.tolist() for mb in cut(rows)] == [mb.sample_ids.tolist() for mb in micro]
    # long and short ones are mixed as the rows are, not long ones first
    firsts = [int(mb.sample_ids[0]) for mb in step_micro(rows, budget)]
    assert firsts == sorted(firsts) and firsts[0] == 0


def step_micro(rows: list[Row], budget: int) -> list[MicroBatch]:
    [((micro,),)] = step_waves(rows, 1, budget=budget)
    return list(micro)


def test_rows_as_long_as_may_be_are_cut_as_the_plan_counts_them() -> None:
    rows = [Row(np.arange(16), np.arange(16), sample_id=i) for i in range(8)]
    for planned in (1, 2, 4):
        assert [len(mb.lengths) for mb in step_micro(rows, planned * 16)] == [planned] * (8 // planned)


@pytest.mark.parametrize("n", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_wave_deals_round_robin_and_cuts_evenly(n: int, micro: int, replicas: int, groups: int) -> None:
    rows = ROWS[:n]
    (waves,) = step_waves(rows, micro, replicas, groups)
    assert [len(replica) for replica in waves] == [groups] * replicas
    expected = [ids(rows[i : i + micro]) for i in range(0, n, micro)]
    for r, replica in enumerate(waves):
        assert [mb.sample_ids.tolist() for group in replica for mb in group] == expected[r::replicas]
        sizes = [len(group) for group in replica]
        assert max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes, reverse=True), "empty groups come last"
    assert trained_tokens(waves) == sum(row.trained for row in rows)
    spec = PassSpec(0, 0, "train", 0, waves, trained_tokens(waves))
    assert spec.tokens == sum(len(row.input_ids) for row in rows)


def test_padding_is_right_masked_and_known_by_length_even_if_pad_is_a_real_token() -> None:
    last = int(ROWS[0].input_ids[-1])
    mb = micro_batch([ROWS[0], ROWS[3]], pad_id=last)
    assert mb.input_ids.shape == mb.labels.shape == (2, 6)
    assert mb.lengths.tolist() == [3, 6]
    assert mb.input_ids[0].tolist() == [*ROWS[0].input_ids.tolist(), last, last, last]
    assert mb.labels[0].tolist() == [*ROWS[0].labels.tolist(), IGNORE, IGNORE, IGNORE]
    assert mb.labels[0, 2] == last, "the real token with the pad's id stays trained"
    assert {array.dtype for array in (mb.input_ids, mb.labels, mb.lengths, mb.sample_ids)} == {
        np.dtype(np.int64)
    }


@pytest.mark.parametrize("multiple,width", [(1, 6), (4, 8), (6, 6), (16, 16)])
def test_widths_are_multiples_and_the_rest_is_padding(multiple: int, width: int) -> None:
    plain, padded = micro_batch([ROWS[0], ROWS[3]]), micro_batch([ROWS[0], ROWS[3]], multiple=multiple)
    assert padded.input_ids.shape == (2, width)
    assert padded.lengths.tolist() == plain.lengths.tolist()
    assert (padded.input_ids[:, :6] == plain.input_ids).all() and (padded.labels[:, 6:] == IGNORE).all()
    batches = Batches(ROWS, 4, multiple=multiple)
    shapes = [mb.input_ids.shape[1] for w in batches.waves(0) for r in w for g in r for mb in g]
    held_out = eval_waves(ROWS, 4, 1, multiple=multiple)
    shapes += [mb.input_ids.shape[1] for (w,) in held_out for r in w for g in r for mb in g]
    assert all(s % multiple == 0 for s in shapes)


def test_eval_waves_hold_every_row_once_in_order() -> None:
    batches = eval_waves(ROWS, batch_size=6, micro_batch_size=2, replicas=2, groups=2)
    assert len(batches) == 4
    found = [sorted(i for r in w for g in r for mb in g for i in mb.sample_ids.tolist()) for (w,) in batches]
    assert found == [list(range(i, min(i + 6, 23))) for i in range(0, 23, 6)]
    assert eval_waves([], 6, 2) == []


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_of_rows_of_similar_length(shuffle: bool) -> None:
    lengths = np.random.default_rng(0).integers(2, 400, 1003)
    rows = [Row(np.arange(n), np.arange(n), i) for i, n in enumerate(lengths.tolist())]

    def padding(batches: Batches) -> int:
        steps = [batches.step(i) for i in range(batches.steps_per_epoch)]
        assert sorted(i for step in steps for i in ids(step)) == list(range(1003))
        assert [len(step) for step in steps] == [8] * 125 + [3]
        return sum(max(len(r.input_ids) for r in step) * len(step) for step in steps) - int(lengths.sum())

    grouped = Batches(rows, 8, seed=1, shuffle=shuffle, group_by_length=True)
    assert padding(grouped) < padding(Batches(rows, 8, seed=1, shuffle=shuffle)) / 5
    again = Batches(rows, 8, seed=1, shuffle=shuffle, group_by_length=True)
    assert ids(again.step(130)) == ids(grouped.step(130)), "the second epoch, without the first"
    longest = [max(len(r.input_ids) for r in grouped.step(i)) for i in range(125)]
    assert longest != sorted(longest, reverse=True) or not shuffle, "batches are mixed over an epoch"
    other = ids(grouped.step(0)) == ids(grouped.step(126))
    assert other == (not shuffle)


def test_rows_of_several_micro_batches_side_by_side() -> None:
    def micro(training: str, rows: int, width: int) -> MicroBatch:
        made = [Row(np.arange(1, n + 1), np.arange(1, n + 1), n) for n in range(width - rows + 1, width + 1)]
        return replace(micro_batch(made), training=training)

    def chosen(most: int, *, alike: bool) -> list[list[str]]:
        return [[str(part.training) for part in parts] for parts in to_share(given, most, alike=alike)]

    given = [micro("a", 2, 8), micro("b", 1, 10), micro("c", 1, 4), micro("d", 1, 8)]
    assert chosen(100, alike=False) == [["b", "a", "d"], ["c"]]  # c: not half as wide as b
    assert chosen(30, alike=False) == [["b", "a"], ["d", "c"]]
    assert chosen(100, alike=True) == [["b"], ["a", "d"], ["c"]]
    assert chosen(1, alike=False) == [["b"], ["a"], ["d"], ["c"]]  # none is smaller than it was
    b, a = given[1], given[0]
    mixed = side_by_side([b, a])
    assert mixed.parts == (b, a) and mixed.tokens == a.tokens + b.tokens
    assert mixed.lengths.tolist() == [10, 7, 8] and mixed.sample_ids.tolist() == [10, 7, 8]
    assert mixed.input_ids[1].tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0, 0]
    assert mixed.labels[2].tolist() == [*range(1, 9), IGNORE, IGNORE]
    assert side_by_side([a]) is a
