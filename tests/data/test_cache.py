"""The cache of tokenised rows: hits only what is the same, survives damage, stays within its limit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_ray.batch import IGNORE
from kt_ray.config.schema import Config
from kt_ray.data.cache import TokenCache, encoder_key, rows_key
from kt_ray.data.encode_rows import Encoded
from kt_ray.data.load import load_data
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from tests.data.conftest import MARKED, make_tokenizer

Build = Callable[..., Config]
TALK = Conversation((Turn(role="user", content="q"), Turn(role="assistant", content="a")), 0, "f, line 1")


def cache(path: Path, limit: float = 1.0) -> TokenCache:
    return TokenCache(path, limit, worth=1)


def random_rows(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        ids = rng.integers(0, 1000, int(rng.integers(1, 9)))
        rows.append((ids, np.where(rng.random(len(ids)) < 0.5, ids, IGNORE)))
    return rows


def same(a: Any, b: Any) -> bool:
    return all(
        np.array_equal(x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True)
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = random_rows(20)
    cache(tmp_path).write("key", rows, ["a note"])
    entry = cache(tmp_path).read("key", 20)
    assert entry is not None and same(entry[0], rows) and entry[1] == ["a note"]
    assert entry[0][0][0].dtype == entry[0][0][1].dtype == np.int64
    assert cache(tmp_path).read("other", 20) is None
    assert cache(tmp_path).read("key", 19) is None, "not these rows"


def test_the_key_covers_everything_that_tokens_depend_on() -> None:
    def key(talk: Conversation = TALK, template: str | None = None, **options: Any) -> str:
        tokenizer = make_tokenizer(**({"template": template} if template else {}))
        return rows_key([talk], encoder_key(ChatEncoder(tokenizer, **options)))

    keys = [
        key(),
        key(template=MARKED),
        key(train_on="last"),
        key(replace(TALK, messages=(*TALK.messages[:1], Turn(role="assistant", content="b")))),
        key(replace(TALK, messages=(TALK.messages[0], {**TALK.messages[1], "reasoning_content": "t"}))),
        key(replace(TALK, tools=({"type": "function", "function": {"name": "f"}},))),
        key(replace(TALK, messages=(), text="q")),
        key(replace(TALK, label=True)),
        key(replace(TALK, tools=({"type": "function", "function": {"name": "f", "x": 1}},))),
        key(replace(TALK, tools=({"type": "function", "function": {"x": 1, "name": "f"}},))),
        rows_key([TALK, TALK], encoder_key(ChatEncoder(make_tokenizer()))),
        rows_key(
            [TALK], encoder_key(ChatEncoder(make_tokenizer(extra_special_tokens=["<|im_start|>", "<x>"])))
        ),
    ]
    assert len(set(keys)) == len(keys)
    assert key(replace(TALK, where="elsewhere", sample_id=9)) == keys[0], "places and numbers do not matter"


def test_damaged_and_unfinished_files_are_no_hits(tmp_path: Path) -> None:
    rows = random_rows(20)
    cache(tmp_path).write("key", rows)
    file = tmp_path / "key.npz"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK\x03\x04" + b"x" * 50):
        file.write_bytes(content)
        assert cache(tmp_path).read("key", 20) is None
    cache(tmp_path).write("key", rows)
    assert cache(tmp_path).read("key", 20) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["key.npz"], "nothing unfinished is left"


def test_runs_at_the_same_time_read_whole_files_or_none(tmp_path: Path) -> None:
    rows = random_rows(200)

    def work(number: int) -> bool:
        cache(tmp_path).write("key", rows)
        entry = cache(tmp_path).read("key", 200)
        return entry is not None and same(entry[0], rows)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(24)))
    assert [p.name for p in tmp_path.iterdir()] == ["key.npz"]


def test_the_longest_unused_go_when_the_limit_is_reached(tmp_path: Path) -> None:
    rows = random_rows(100)
    for i, name in enumerate(("a", "b", "c")):
        cache(tmp_path).write(name, rows)
        os.utime(tmp_path / f"{name}.npz", (i, i))
    assert cache(tmp_path).read("a", 100) is not None  # used: now the newest
    size = (tmp_path / "a.npz").stat().st_size
    cache(tmp_path, 3.5 * size / 1e9).write("d", rows)
    assert sorted(p.stem for p in tmp_path.iterdir()) == ["a", "c", "d"]
    cache(tmp_path, 0.0).write("e", rows)
    assert cache(tmp_path, 0.0).read("a", 100) is None
    assert not (tmp_path / "e.npz").exists()


def test_files_that_a_killed_run_left_unfinished_go(tmp_path: Path) -> None:
    for name, hours in (("of a killed run.part", 25), ("of a run that goes on.part", 1)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - 3600 * hours,) * 2)
    cache(tmp_path).write("key", random_rows(3))
    assert {path.name for path in tmp_path.iterdir()} == {"key.npz", "of a run that goes on.part"}


def test_a_place_that_cannot_be_written_costs_only_the_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache(tmp_path / "file" / "below").write("key", random_rows(3))


def test_a_second_run_tokenises_nothing(
    config: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [{"instruction": f"q{i}", "output": "a" * (i + 1)} for i in range(6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen = config(path=str(rows), eval_fraction=0.5)
    first = load_data(chosen, "", 0, cache=cache(tmp_path / "cache"))
    assert not first.report.cached

    def forbidden(self: Any, conversation: Any) -> Any:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(ChatEncoder, "encode", forbidden)
    again = load_data(chosen, "", 0, cache=cache(tmp_path / "cache"))
    assert again.report.cached and "tokens: from the cache" in again.report.origin()
    for one, other in zip((*first.train, *first.eval), (*again.train, *again.eval), strict=True):
        assert one.sample_id == other.sample_id
        assert np.array_equal(one.input_ids, other.input_ids) and np.array_equal(one.labels, other.labels)
    with pytest.raises(AssertionError, match="tokenised again"):
        rows.write_text(rows.read_text().replace("q3", "q33"))
        load_data(chosen, "", 0, cache=cache(tmp_path / "cache"))


def test_what_encoding_had_to_say_is_said_again(tmp_path: Path) -> None:
    def notes(cached: bool) -> list[str]:
        encoder = ChatEncoder(
            make_tokenizer(template="{% for m in messages %}{{ m['content'] }}{% endfor %}")
        )
        assert Encoded([TALK], encoder, cache(tmp_path)).cached == cached
        return encoder.notes

    first = notes(False)
    assert "ends no answer with a special token" in first[-1] and notes(True) == first


def test_a_note_that_names_a_row_is_of_this_run(tmp_path: Path) -> None:
    asked = Turn(role="user", content="<|im_end|>")
    for where in ("a.jsonl, line 1", "b.jsonl, line 7"):
        encoder = ChatEncoder(make_tokenizer())
        talk = replace(TALK, messages=(asked, TALK.messages[1]), where=where)
        assert Encoded([talk], encoder, cache(tmp_path)).cached == where.startswith("b")
        assert encoder.notes[-1].endswith(where)


def test_small_sets_are_not_worth_a_file(tmp_path: Path) -> None:
    encoder = ChatEncoder(make_tokenizer())
    small = TokenCache(tmp_path / "cache", 1.0)
    assert not Encoded([TALK], encoder, small).cached
    assert not (tmp_path / "cache").exists()
