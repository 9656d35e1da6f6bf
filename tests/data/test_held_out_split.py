"""The held-out rows: a function of the seed, and no prompt on both sides."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kt_ray.config.schema import Config, DataConfig, EvalConfig, TrainerConfig
from kt_ray.data.held_out_split import as_split, split
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.sources import count_rows
from kt_ray.errors import UserError


def rows(*prompts: str) -> list[Conversation]:
    return [
        Conversation((Turn(role="user", content=p), Turn(role="assistant", content="a")), i, f"line {i}")
        for i, p in enumerate(prompts)
    ]


MANY = rows(*(f"q{i % 30}" for i in range(100)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
def test_no_prompt_straddles_and_every_row_is_somewhere(fraction: float, seed: int) -> None:
    train, held = split(MANY, fraction, seed)
    assert not {r.prompt_key for r in train} & {r.prompt_key for r in held}
    assert sorted(r.sample_id for r in (*train, *held)) == list(range(100))
    assert [r.sample_id for r in train] == sorted(r.sample_id for r in train)
    assert train and held
    assert abs(len(held) - 100 * fraction) <= 3


def test_a_prompt_is_the_first_question_without_its_margins() -> None:
    longer = Conversation(
        (*MANY[0].messages, Turn(role="user", content="more"), Turn(role="assistant", content="b")),
        1,
        "",
    )
    assert longer.prompt_key == MANY[0].prompt_key
    with_system = Conversation((Turn(role="system", content="s"), *rows(" q0\n")[0].messages), 2, "")
    assert with_system.prompt_key == MANY[0].prompt_key


def test_it_depends_on_the_seed_and_not_on_the_order_of_rows() -> None:
    unique = rows(*(f"q{i}" for i in range(50)))
    chosen = [{r.prompt_key for r in split(unique, 0.2, seed)[1]} for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert {r.prompt_key for r in split(unique[::-1], 0.2, 0)[1]} == chosen[0]


def test_zero_holds_nothing_out_and_a_small_share_one_row() -> None:
    assert split(MANY, 0.0, 0) == (MANY, [])
    assert len(split(rows("a", "b", "c"), 0.01, 0)[1]) == 1


@pytest.mark.parametrize(("count", "held"), [(99, 0), (100, 5), (2000, 100), (4000, 128)])
def test_auto_leaves_small_sets_whole_and_is_bounded(count: int, held: int) -> None:
    found = split(rows(*(f"q{i}" for i in range(count))), "auto", 0)
    assert [len(part) for part in found] == [count - held, held]


def test_auto_holds_nothing_out_rather_than_half_of_the_rows() -> None:
    for few in (["a"] * 200, ["a", "b"] * 100):
        assert [len(part) for part in split(rows(*few), "auto", 0)] == [200, 0]


def test_a_number_of_rows(tmp_path: Path) -> None:
    found = rows(*(f"q{i}" for i in range(50)))
    assert [len(part) for part in split(found, 7.0, 0)] == [43, 7]
    match = r"no row would be left.*eval_fraction=50.*50 rows"
    with pytest.raises(UserError, match=match):
        split(found, 50.0, 0)
    file = tmp_path / "rows.jsonl"  # counted for a plan, which reads no row
    file.write_text('{"instruction": "a", "output": "b"}\n' * 50)
    with pytest.raises(UserError, match=match):
        count_rows(DataConfig(path=str(file), eval_fraction=50.0))
    half = {"path": str(file), "weight": 0.5}  # of which 40 are held out before the weight
    assert count_rows(DataConfig(sources=[half], eval_fraction=40.0)) == 5


def test_training_that_evaluates_nothing_keeps_every_row() -> None:
    def held_out(mode: str, data: DataConfig | None = None, after: int = 0, **trainer: int) -> float | str:
        config = Config(mode=mode, trainer=TrainerConfig(**trainer), eval=EvalConfig(after_training=after))
        return as_split(replace(config, data=data or DataConfig())).eval_fraction

    assert held_out("train", eval_every=0) == 0
    assert held_out("train") == held_out("train", after=3, eval_every=0) == "auto"
    assert held_out("train", DataConfig(eval_fraction=0.1), eval_every=0) == 0.1
    assert held_out("predict", eval_every=0) == "auto"  # which asks for them


def test_large_groups_only() -> None:
    train, held = split(rows(*"aaaaabbbbbb"), 0.1, 0)
    assert {r.prompt_key for r in held} == {"a"}
    assert len(train) == 6


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(UserError, match=r"all rows ask the same question.*data\.eval_fraction=0"):
        split(rows("a", "a"), 0.5, 0)


def test_one_question_in_other_spellings_stays_on_one_side() -> None:
    spellings = [("Who\u00a0keeps  the light?", "who keeps the LIGHT?"), ("ﬁne?", "fine?")]
    found = rows(*(text for pair in spellings for text in pair), *(f"q{i}" for i in range(20)))
    for seed in range(20):
        _, held = split(found, 0.3, seed)
        ids = {row.sample_id for row in held}
        assert (0 in ids) == (1 in ids) and (2 in ids) == (3 in ids)
