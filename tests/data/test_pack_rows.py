"""Packed rows: everything once, nothing too long, and no document predicted from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kt_ray.batch import IGNORE, trained_tokens
from kt_ray.config.schema import Config
from kt_ray.data.batches import micro_batch, step_waves
from kt_ray.data.pack_rows import join, pack
from kt_ray.data.row_types import Row
from kt_ray.errors import UserError

Build = Callable[..., Config]


def make_rows(count: int, longest: int = 40, seed: int = 0) -> list[Row]:
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        ids = rng.integers(0, 90, int(rng.integers(2, longest + 1)))
        rows.append(Row(ids, ids.copy(), 100 + i))  # trained from the first token on
    return rows


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_is_in_one_pack_once(shuffle: bool) -> None:
    rows = make_rows(200)
    packed = pack(rows, 64, seed=3, shuffle=shuffle)
    found = [document for row in packed for document in row.documents]
    assert sorted(found) == sorted((row.sample_id, len(row.input_ids)) for row in rows)
    assert all(len(row.input_ids) <= 64 for row in packed)
    tokens = sum(len(row.input_ids) for row in rows)
    assert tokens / (64 * len(packed)) > 0.95, "best fit leaves little"
    by_id = {row.sample_id: row for row in rows}
    for row in packed:
        start = 0
        for sample, length in row.documents:
            assert np.array_equal(row.input_ids[start : start + length], by_id[sample].input_ids)
            start += length
    assert [r.documents for r in packed] == [r.documents for r in pack(rows, 64, 3, shuffle)]


def test_no_document_is_predicted_from_the_one_before() -> None:
    """The first token has no predecessor of its own; its label in a packed row would have a stranger's."""
    rows = make_rows(7)
    packed = join(rows)
    assert packed.trained == sum(row.trained for row in rows)
    start = 0
    for _, length in packed.documents:
        assert packed.labels[start] == IGNORE
        assert (packed.labels[start + 1 : start + length] != IGNORE).all()
        start += length
    assert rows[1].labels[0] != IGNORE, "the rows themselves are left alone"
    together, apart = step_waves([packed], 1)[0], step_waves(rows, 1)[0]
    assert trained_tokens(together) == trained_tokens(apart)


def test_micro_batches_know_documents_and_keep_padding_apart() -> None:
    a, b, c = make_rows(3, longest=6, seed=5)
    mb = micro_batch([join([a, b]), c], pad_id=7)
    first = [*range(len(a.input_ids)), *range(len(b.input_ids))]
    assert mb.positions_BS is not None and mb.samples_BS is not None
    assert mb.positions_BS[0, : len(first)].tolist() == first
    assert mb.samples_BS[0, : len(a.input_ids)].tolist() == [100] * len(a.input_ids)
    assert mb.samples_BS[0, len(a.input_ids) : len(first)].tolist() == [101] * len(b.input_ids)
    length = len(c.input_ids)
    assert mb.positions_BS[1].tolist() == [*range(length), *range(len(first) - length)], "padding: one more"
    assert micro_batch([a, c]).positions_BS is None
    # a row whose labels were made anew, after packing
    careless = replace(join([a, b]), labels=join([a, b]).input_ids.copy())
    labels = micro_batch([careless]).labels[0]
    assert labels[len(a.input_ids)] == IGNORE and (labels != IGNORE).sum() == len(first) - 2


def test_data_packing(config: Build) -> None:
    from kt_ray.data import load_data, preview_rows

    plain = load_data(config(builtin="demo", max_length=512, eval_fraction=0.1), "", 0)
    packed = load_data(config(builtin="demo", max_length=512, eval_fraction=0.1, packing=True), "", 0)
    assert len(packed.train) < len(plain.train) / 1.5
    assert sum(row.trained for row in packed.train) == sum(row.trained for row in plain.train)
    assert [r.sample_id for r in packed.eval] == [r.sample_id for r in plain.eval]
    assert not any(row.documents for row in packed.eval)
    lines = "\n".join(packed.report.lines())
    assert f"{len(plain.train)} rows packed into {len(packed.train)}" in lines
    shown = preview_rows(packed.train, packed.tokenizer, 1)[0]
    assert "packed: rows" in shown.title
    assert shown.plain().count("--- next document ---") == len(packed.train[0].documents) - 1


def test_pairs_are_not_packed(config: Build, tmp_path: Any) -> None:
    from kt_ray.data import load_data

    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    with pytest.raises(UserError, match=r"cannot be packed.*data\.packing"):
        load_data(config(path=str(path), packing=True), "", 0, ("pairs",))
