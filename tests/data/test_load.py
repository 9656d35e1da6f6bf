"""load_data: what is kept, cut and dropped, and that the report says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_ray.batch import IGNORE
from kt_ray.config.schema import Config
from kt_ray.data import load_data, preview_rows
from kt_ray.data.cache import TokenCache
from kt_ray.errors import UserError
from tests.data.conftest import PLAIN, trained_texts

Build = Callable[..., Config]
# Tokens around question and answer: one per byte of the role headers and line breaks, four special ones.
HEAD = len("user\n\nassistant\n") + 3  # up to the answer: im_start … im_end … im_start
TAIL = 2  # im_end, line break


def alpaca(path: Path, *pairs: tuple[str, str]) -> str:
    path.write_text("".join(json.dumps({"instruction": q, "output": a}) + "\n" for q, a in pairs))
    return str(path)


def load(config: Config) -> Any:
    return load_data(config, "", 0)


def test_rows_and_report_without_loss(config: Build, tmp_path: Path) -> None:
    bundle = load(config(path=alpaca(tmp_path / "a.jsonl", ("abc", "de"), ("f", "ghij"))))
    assert [row.sample_id for row in bundle.train] == [0, 1]
    assert [len(row.input_ids) for row in bundle.train] == [HEAD + 3 + 2 + TAIL, HEAD + 1 + 4 + TAIL]
    assert [row.trained for row in bundle.train] == [3, 5]
    report = bundle.report.train
    assert (report.source_rows, report.rows, report.truncated, report.tokens_lost) == (2, 2, 0, 0)
    assert report.tokens == sum(len(row.input_ids) for row in bundle.train)
    assert (report.trained, report.longest) == (8, HEAD + 7)
    assert bundle.report.eval is None
    assert bundle.report.lines() == [
        f"train: 2 of 2 rows, {report.tokens} tokens, 8 trained ({8 / report.tokens:.0%}), "
        f"longest row {HEAD + 7}"
    ]


def test_truncation_is_counted_to_the_token(config: Build, tmp_path: Path) -> None:
    path = alpaca(tmp_path / "a.jsonl", ("q", "short"), ("q" * 3, "a" * 50), ("q" * 60, "lost"))
    bundle = load(config(path=path, max_length=HEAD + 13))
    report = bundle.report.train
    assert [row.sample_id for row in bundle.train] == [0, 1]
    assert (report.source_rows, report.rows, report.truncated, report.dropped_no_answer) == (3, 2, 1, 1)
    cut = bundle.train[1]
    assert len(cut.input_ids) == HEAD + 13
    assert (cut.labels[-10:] != IGNORE).all(), "the start of the answer stays"
    assert report.tokens_lost == (HEAD + 3 + 50 + TAIL - (HEAD + 13)) + (HEAD + 60 + 4 + TAIL)
    assert report.trained_lost == (51 - 10) + 5
    assert (report.trained, report.longest) == (6 + 10, HEAD + 66)
    text = "\n".join(bundle.report.lines())
    for part in (
        "2 of 3 rows",
        f"1 rows cut to {HEAD + 13}",
        "1 rows dropped, no answer",
        "46 of 62 trained",
        f"data.max_length={HEAD + 66}",
    ):
        assert part in text
    assert report.longest_kept == HEAD + 13
    kept = load(config(path=path, max_length=HEAD + 66)).report.train
    assert kept.rows == 3
    assert kept.tokens == report.tokens + report.tokens_lost


def test_long_rows_can_be_dropped_instead(config: Build, tmp_path: Path) -> None:
    path = alpaca(tmp_path / "a.jsonl", ("q", "short"), ("q", "a" * 50))
    bundle = load(config(path=path, max_length=HEAD + 20, overflow="drop"))
    report = bundle.report.train
    assert [row.sample_id for row in bundle.train] == [0]
    assert (report.dropped_long, report.dropped_no_answer, report.truncated) == (1, 0, 0)
    assert report.tokens_lost == HEAD + 1 + 50 + TAIL
    assert report.longest_kept == len(bundle.train[0].input_ids) < HEAD + 20 < report.longest


def test_no_row_left_is_an_error(config: Build, tmp_path: Path) -> None:
    path = alpaca(tmp_path / "a.jsonl", ("q", "a"))
    with pytest.raises(UserError, match=r"no row is left.*data\.max_length") as caught:
        load(config(path=path, max_length=5))
    assert caught.value.remedy == f"set data.max_length={HEAD + 4}"


def test_held_out_rows_keep_their_source_numbers(config: Build, tmp_path: Path) -> None:
    path = alpaca(tmp_path / "a.jsonl", *((f"q{i}", "a") for i in range(20)))
    bundle = load(config(path=path, eval_fraction=0.2))
    assert len(bundle.eval) == 4
    assert sorted(row.sample_id for row in (*bundle.train, *bundle.eval)) == list(range(20))
    assert bundle.report.eval.rows == 4


def test_an_eval_file_of_its_own_and_its_overlap(config: Build, tmp_path: Path) -> None:
    train = alpaca(tmp_path / "a.jsonl", ("q1", "a"), ("q2", "a"))
    held = alpaca(tmp_path / "b.jsonl", ("q2", "b"), ("q3", "c"))
    bundle = load(config(path=train, eval_path=held, eval_fraction=0.5))
    assert (len(bundle.train), len(bundle.eval)) == (2, 2)
    assert "1 of 2 held-out rows ask a question that training rows ask too" in bundle.report.notes[0]
    with pytest.raises(UserError, match=r"data\.eval_path=.*absent"):
        load(config(path=train, eval_path=str(tmp_path / "absent.jsonl")))


def test_files_that_a_name_alone_leaves_out_are_told(config: Build, tmp_path: Path) -> None:
    folder = str(tmp_path / "rows")
    Path(folder).mkdir()
    alpaca(Path(folder, "cooking.jsonl"), ("q1", "a"), ("q2", "a"))
    alpaca(Path(folder, "web-dev.jsonl"), ("q3", "a"))
    bundle = load(config(path=folder))
    assert len(bundle.train) == 2
    (note,) = bundle.report.notes
    assert note.startswith(f"{folder}: not trained on") and "web-dev.jsonl (validation)" in note
    assert "list the files in data.path" in note
    for asked in ({"split": "train"}, {"eval_path": folder}, {"eval_path": f"{folder}/"}):
        assert not load(config(path=folder, **asked)).report.notes
    named = f"{folder}/web-dev.jsonl"
    assert not load(config(path=folder, eval_path=named)).report.notes
    assert not load(config(path=[folder, named])).report.notes
    sources = [{"path": folder}, {"path": folder, "split": "validation"}]
    assert not load(config(sources=sources)).report.notes
    for other in ("README", "load.py", ".hidden.gz", "more.jsonl.gz"):
        Path(folder, other).write_bytes(b"\x1f\x8bpacked" if other.endswith("gz") else b"")
    for asked in (
        {"path": folder, "split": "train"},
        {"path": named, "eval_path": folder},
        {"sources": sources},
    ):
        notes = load(config(**asked)).report.notes
        (note,) = (note for note in notes if "not read" in note)
        assert note.startswith(f"{folder}: not read: more.jsonl.gz; what is read: .jsonl, ")
    with pytest.raises(UserError, match=r"a gzip archive.*\. To fix: unpack it"):
        load(config(path=f"{folder}/more.jsonl.gz"))


def test_limit_and_several_files(config: Build, tmp_path: Path) -> None:
    paths = [alpaca(tmp_path / f"{i}.jsonl", (f"q{i}", "a"), (f"p{i}", "a")) for i in range(3)]
    assert [row.sample_id for row in load(config(path=paths)).train] == [0, 1, 2, 3, 4, 5]
    assert [row.sample_id for row in load(config(path=paths, limit=3)).train] == [0, 1, 2]


def test_labels_are_the_tokens_themselves_when_pad_is_eos(config: Build, tmp_path: Path) -> None:
    bundle = load(config(path=alpaca(tmp_path / "a.jsonl", ("q", "a"))))
    bundle.tokenizer.pad_token = bundle.tokenizer.eos_token
    bundle.tokenizer.save_pretrained(tmp_path / "same")
    same = load(
        config(path=alpaca(tmp_path / "b.jsonl", ("q", "a")), model={"tokenizer": str(tmp_path / "same")})
    )
    assert same.pad_id == same.tokenizer.eos_token_id
    assert np.array_equal(same.train[0].labels, bundle.train[0].labels)
    assert same.train[0].labels.max() == same.tokenizer.eos_token_id


def test_the_demo_data_set_is_built_in(config: Build) -> None:
    bundle = load(config(builtin="demo", eval_fraction=0.1))
    assert len(bundle.train) + len(bundle.eval) >= 300


BAD = {
    "nothing named": ({}, "no training data is named"),
    "unknown builtin": ({"builtin": "poems"}, r"no such built-in data set.*poems"),
    "tokenizer": (
        {"builtin": "demo", "model": {"tokenizer": "/absent"}},
        "tokenizer directory does not exist",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case: str, config: Build) -> None:
    options, expected = BAD[case]
    with pytest.raises(UserError, match=expected) as caught:
        load(config(**options))
    assert caught.value.remedy


def test_an_unanswered_row_is_named(config: Build, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"answer is empty.*a\.jsonl, line 2"):
        load(config(path=alpaca(tmp_path / "a.jsonl", ("q", "a"), ("q2", ""))))


def test_an_all_masked_row_is_named(config: Build, tmp_path: Path) -> None:
    """The answer first, no headers: one of a token has nothing before it to be predicted from."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages | reverse %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] | replace('!', '') }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    for answer, expected in (("x", "no token of the row is trained.*2 tokens"), ("!", "cannot be located")):
        rows = alpaca(tmp_path / "a.jsonl", ("q", "loud"), ("p", answer))
        with pytest.raises(UserError, match=expected) as caught:
            load(config(path=rows, model={"chat_template": str(template)}))
        assert "a.jsonl, line 2" in str(caught.value)


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def quiet(tmp_path: Path) -> dict[str, str]:
    """A model with a template that refuses every "!"."""
    file = tmp_path / "quiet.jinja"
    refusal = "{% if '!' in m['content'] %}{{ raise_exception('no shouting') }}{% endif %}"
    file.write_text(PLAIN.replace("%}", f"%}}{refusal}", 1))
    return {"chat_template": str(file)}


SHOUTED = [("q", "a"), ("r", "b!"), ("s!", "c"), ("t", "d")]


def test_rows_that_the_template_refuses_are_told_at_once(
    config: Build, tmp_path: Path, quiet: dict[str, str]
) -> None:
    path = alpaca(tmp_path / "a.jsonl", *SHOUTED)
    match = r"^2 of 4 rows of the data are bad: the chat template refuses the conversation \(line 2, line 3\)"
    match += "; found TemplateError: no shouting"
    with pytest.raises(UserError, match=match):
        load(config(path=path, model=quiet))
    with pytest.raises(UserError, match=r"refuses the conversation; at .*line 2; found .*no shouting"):
        load(config(path=alpaca(tmp_path / "b.jsonl", *SHOUTED[:2]), model=quiet))


def test_rows_that_the_template_refuses_are_left_out(
    config: Build, tmp_path: Path, quiet: dict[str, str]
) -> None:
    path = alpaca(tmp_path / "a.jsonl", *SHOUTED)
    held_out = alpaca(tmp_path / "b.jsonl", ("u", "e!"), ("v", "f"), ("w", "g"))
    chosen = config(path=path, eval_path=held_out, bad_rows="skip", model=quiet)
    cache = TokenCache(tmp_path / "cache", 1.0, worth=1)
    bundle = load_data(chosen, "", 0, cache=cache)
    assert [row.sample_id for row in bundle.train] == [0, 3] and len(bundle.eval) == 2
    told = "\n".join(bundle.report.lines())
    assert "train: the data: 2 of 4 rows left out" in told and "(line 2, line 3)" in told
    assert "1 of 3 rows left out" in told and not bundle.report.cached
    again = load_data(chosen, "", 0, cache=cache)
    assert again.report.cached and again.report.lines() == bundle.report.lines()
    for one, other in zip((*bundle.train, *bundle.eval), (*again.train, *again.eval), strict=True):
        assert one.sample_id == other.sample_id and (one.labels == other.labels).all()


def test_a_pair_goes_with_either_side(config: Build, tmp_path: Path, quiet: dict[str, str]) -> None:
    answers = [("good", "bad"), ("good!", "bad"), ("good", "bad!"), ("good", "worse")]
    rows = [{"prompt": f"q{i}", "chosen": a, "rejected": b} for i, (a, b) in enumerate(answers)]
    path = lines(tmp_path / "a.jsonl", *rows)
    bundle = load_data(config(path=path, bad_rows="skip", model=quiet), "", 0, ("pairs",))
    texts = [
        trained_texts(bundle.tokenizer, row.input_ids, row.labels)
        for pair in bundle.train
        for row in (pair.chosen, pair.rejected)
    ]
    assert texts == [[f"{text}<|im_end|>"] for text in ("good", "bad", "good", "worse")]


def test_copies_of_a_row_are_one_bad_row(config: Build, tmp_path: Path, quiet: dict[str, str]) -> None:
    sources = [{"path": alpaca(tmp_path / "a.jsonl", *SHOUTED), "weight": 2}]
    bundle = load(config(sources=sources, bad_rows="skip", model=quiet))
    assert len(bundle.train) == 4
    (note,) = bundle.report.train.notes
    assert "2 of 4 rows left out" in note and note.count("line 2") == 1


def test_preference_pairs(config: Build, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "chosen": "good", "rejected": "a worse one"} for i in range(6)]
    chosen = config(path=lines(tmp_path / "a.jsonl", *rows), eval_fraction=0.3)
    bundle = load_data(chosen, "", 0, ("pairs",))
    assert (bundle.kind, len(bundle.train), len(bundle.eval)) == ("pairs", 4, 2)
    for pair in (*bundle.train, *bundle.eval):
        assert (pair.chosen.sign, pair.rejected.sign) == (1, -1)
        assert pair.rejected.sample_id == pair.chosen.sample_id + 1
        texts = [trained_texts(bundle.tokenizer, r.input_ids, r.labels) for r in (pair.chosen, pair.rejected)]
        assert texts == [["good<|im_end|>"], ["a worse one<|im_end|>"]]
    ids = [row.sample_id for pair in (*bundle.train, *bundle.eval) for row in (pair.chosen, pair.rejected)]
    assert sorted(ids) == list(range(12))
    shown = [row.title.partition(":")[0] for row in preview_rows(bundle.train, bundle.tokenizer, 1)]
    first = bundle.train[0].chosen.sample_id // 2
    assert shown == [f"row {first} (chosen)", f"row {first} (rejected)"], "as trainer.preview shows them"
    with pytest.raises(UserError, match=r"not what this run trains on.*line 1.*preference pairs"):
        load_data(chosen, "", 0, ("sft", "kto"))


def test_a_pair_that_loses_an_answer_is_dropped_whole(config: Build, tmp_path: Path) -> None:
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q" * 90, "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "b" * 90},
        {"prompt": "p", "chosen": "b" * 90 + "a", "rejected": "b" * 91},
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    for overflow, kept in (("truncate", [0, 2]), ("drop", [0])):
        bundle = load_data(config(path=path, max_length=80, overflow=overflow), "", 0, ("pairs",))
        assert [pair.chosen.sample_id // 2 for pair in bundle.train] == kept
        assert bundle.report.train.source_rows == 4
        assert bundle.report.train.dropped_long + bundle.report.train.dropped_no_answer == 4 - len(kept)


def test_a_pair_that_the_template_makes_alike_is_a_bad_row(config: Build, tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "a", "reasoning_content": thought} for thought in "bc"]
    path = lines(tmp_path / "a.jsonl", {"prompt": "q", "chosen": answers[:1], "rejected": answers[1:]})
    with pytest.raises(UserError, match=r"the same as the chat template writes them.*line 1"):
        load_data(config(path=path), "", 0, ("pairs",))


def test_verdicts(config: Build, tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "a", "label": i % 2 == 0} for i in range(4)]
    bundle = load_data(config(path=lines(tmp_path / "a.jsonl", *rows)), "", 0, ("kto",))
    assert [row.sign for row in bundle.train] == [1, -1, 1, -1]


def test_long_texts_are_cut_into_rows_and_lose_nothing(config: Build, tmp_path: Path) -> None:
    texts = ["x" * 100, "short", "y" * 33]
    path = lines(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    bundle = load_data(config(path=path, max_length=32), "", 0)
    assert [len(row.input_ids) for row in bundle.train] == [32, 32, 32, 5, 6, 32, 2]
    whole = np.concatenate([row.input_ids for row in bundle.train])
    assert bundle.tokenizer.decode(whole) == "".join(f"{text}<|im_end|>" for text in texts)
    ids = [row.sample_id for row in bundle.train]
    assert ids[0] == 0 and ids[4] == 1 and ids[5] == 2 and len(set(ids)) == 7
    assert bundle.report.train.tokens_lost == 0
    assert "2 texts cut into rows" in "\n".join(bundle.report.lines())
    assert not bundle.report.notes
    dropped = load_data(config(path=path, max_length=32, overflow="drop", system="Be brief."), "", 0)
    assert [row.sample_id for row in dropped.train] == [1]
    assert dropped.report.notes == ["a.jsonl: raw text has no turns, and so no system prompt (data.system)"]


def test_pre_training_trains_every_token_of_rows_with_turns(config: Build, tmp_path: Path) -> None:
    """Counted so, too, and cut rows without an answer stay."""
    path = alpaca(tmp_path / "a.jsonl", ("q", "an answer"), ("q" * 90, "cut off"))
    chosen = config(path=path, max_length=60)
    bundle = load(replace(chosen, trainer=replace(chosen.trainer, stage="pt")))
    assert [len(row.input_ids) for row in bundle.train] == [HEAD + 1 + 9 + TAIL, 60]
    assert all((row.labels == row.input_ids).all() for row in bundle.train)
    assert bundle.report.train.trained == sum(len(row.input_ids) - 1 for row in bundle.train)
    assert bundle.report.train.dropped_no_answer == 0 and load(chosen).report.train.dropped_no_answer == 1


def test_preview_shows_pairs_and_verdicts(
    config: Build, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kt_ray.modes import preview

    path = lines(tmp_path / "a.jsonl", {"prompt": "q", "chosen": "good", "rejected": "bad"})
    assert preview.run(config(path=path)) == 0
    out = capsys.readouterr().out
    assert "row 0 (chosen)" in out and "[[good<|im_end|>]]" in out
    assert "row 0 (rejected)" in out and "[[bad<|im_end|>]]" in out
    assert "source: a.jsonl: 1 rows, format preference (detected)" in out
    assert "template: the tokenizer's own" in out
    path = lines(tmp_path / "b.jsonl", {"prompt": "q", "completion": "bad", "label": False})
    assert preview.run(config(path=path)) == 0
    assert "row 0 (not wanted)" in capsys.readouterr().out
