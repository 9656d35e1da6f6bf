"""From predictions files to scores and the before/after table."""

from __future__ import annotations

import json
import math

import pytest

from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import (
    AnswerFile,
    AnswerRow,
    check_complete,
    check_same_questions,
    find_answers,
    missing_answers,
    read_answers,
)
from kt_ray.evaluate.loss_sums import LossSum, loss_figures, read_losses
from kt_ray.evaluate.scores import score
from kt_ray.evaluate.table import compare, spread
from kt_ray.evaluate.text_metrics import text_scores


def answers(*pairs: tuple[str, str], **more) -> AnswerFile:
    return AnswerFile(
        "file", tuple(AnswerRow(f"q{i}", p, label, **more) for i, (p, label) in enumerate(pairs))
    )


def test_a_file_is_read_row_by_row(tmp_path):
    file = tmp_path / "predictions.jsonl"
    rows = [
        {"prompt": "q", "prediction": "line\u2028separator", "label": "l", "further": 1},
        {"prompt": [{"role": "user", "content": "q"}], "prediction": "", "label": "l"},
        {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
            "prediction": "B",
            "label": "B",
            "option_logits": {"A": 1, "B": 2.5},
            "loss_nats": 6,
            "loss_tokens": 3,
        },
    ]
    file.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows) + "\n", encoding="utf-8"
    )
    read = read_answers(file)
    assert read.source == str(file)
    assert [r.prompt for r in read.rows] == ["q", "q", "system: s\n\nuser: q"]
    assert read.rows[0].answer == "line\u2028separator" and read.rows[0].loss is None
    assert read.rows[2].option_logits == {"A": 1.0, "B": 2.5} and read.rows[2].loss == LossSum(6.0, 3)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prediction": "x"}', "no label"),
        ('{"label": "x"}', "no predict"),
        ('{"prediction": 1, "label": "x"}', "usable prediction"),
        ('{"prediction": "x", "label": "x", "prompt": 3}', "usable prompt"),
        ('{"prediction": "x", "label": "x", "option_logits": [1]}', "usable option_logits"),
        ('{"prediction": "x", "label": "x", "option_logits": {"A": NaN}}', "usable option_logits"),
        ('{"prediction": "x", "label": "x", "loss_nats": 1}', "usable loss_tokens"),
        ('{"prediction": "x", "label": "x", "loss_tokens": 1}', "usable loss_nats"),
        ('{"prediction": "x", "la', "start it again"),
        ("[1]", "no JSON object"),
    ],
)
def test_bad_lines_are_named_with_their_number(tmp_path, line, message):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prediction": "x", "label": "x"}\n' + line + "\n")
    with pytest.raises(UserError, match=message) as caught:
        read_answers(file)
    assert f"{file}:2" in str(caught.value)


def test_missing_empty_and_unreadable_files(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        find_answers(tmp_path / "x")
    with pytest.raises(UserError, match=r"no predictions\.jsonl"):
        find_answers(tmp_path)
    (tmp_path / "empty").write_text("\n\n")
    with pytest.raises(UserError, match="no rows"):
        read_answers(tmp_path / "empty")
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read"):
        read_answers(tmp_path / "latin")


def written(file, *rows) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_answers_of_both_in_one_file_and_in_the_order_of_their_ids(tmp_path):
    file = tmp_path / "predictions.jsonl"
    row = {"prompt": "q", "label": "l", "option_logits": {"A": 1.0}}
    written(
        file, row | {"id": 2, "predict": "two", "base": "b2"}, row | {"id": 1, "predict": "one", "base": "b1"}
    )
    base, adapter = find_answers(tmp_path)
    assert [r.answer for r in adapter.rows] == ["one", "two"] and adapter.rows[0].option_logits
    assert [r.answer for r in base.rows] == ["b1", "b2"] and not base.rows[0].option_logits
    written(file, row | {"id": 1, "predict": "x", "base": "y", "base_option_logits": {"A": 2.0}})
    assert [side.rows[0].option_logits["A"] for side in find_answers(file)] == [2.0, 1.0]
    written(file, row | {"id": 1, "predict": "x", "base": "y"}, row | {"id": 2, "predict": "x"})
    with pytest.raises(UserError, match="usable base"):
        find_answers(file)
    written(file, row | {"id": 1, "predict": "x"}, row | {"id": 1, "predict": "x"})
    with pytest.raises(UserError, match="an id of its own"):
        find_answers(file)


def test_messages_are_shown_where_they_end_in_the_question(tmp_path):
    file = tmp_path / "predictions.jsonl"
    row = {"prompt": "<|user|>q", "label": "l", "predict": "x"}
    turns = [{"role": "user", "content": "q"}]
    for messages in (turns, [*turns, {"role": "assistant", "content": "l"}], "text", []):
        written(file, row | {"messages": messages})
        shown = read_answers(file).rows[0].prompt
        assert shown == ("q" if messages == turns else "<|user|>q")


def test_a_part_of_the_answers_is_not_the_whole(tmp_path):
    row = {"prompt": "q", "label": "l", "predict": "x"}
    written(tmp_path / "predictions.jsonl", row, row)
    check_complete(tmp_path)  # nobody says how many there should be
    for count, missing in ((2, 0), (5, 3)):
        (tmp_path / "predictions.json").write_text(json.dumps({"count": count}))
        assert missing_answers(tmp_path / "predictions.jsonl") == missing
    with pytest.raises(UserError, match="3 of 5 rows"):
        check_complete(tmp_path)


def test_an_unfinished_last_line_is_no_answer(tmp_path):
    row = json.dumps({"prompt": "q", "label": "l", "predict": "猫"}, ensure_ascii=False).encode()
    file = tmp_path / "predictions.jsonl"
    file.write_bytes(row + b"\n" + row[:-3])  # a full disk cuts amid a character
    with pytest.raises(UserError, match="cannot be read"):  # another program's
        find_answers(tmp_path)
    (tmp_path / "predictions.json").write_text('{"count": 2}')
    assert len(find_answers(tmp_path)[1].rows) == 1
    with pytest.raises(UserError, match="1 of 2 rows"):
        check_complete(tmp_path)


def test_losses_beside_the_answers(tmp_path):
    assert read_losses(tmp_path) == {}
    (tmp_path / "losses.json").write_text('{"settings": {}, "base": {"nats": 6.0, "tokens": 3}}')
    assert read_losses(tmp_path) == {"base": LossSum(6.0, 3)}
    (tmp_path / "losses.json").write_text('{"base"')
    assert read_losses(tmp_path) == {}


def test_whose_answers_they_are(tmp_path):
    row = {"prompt": "q", "label": "l", "predict": "x"}
    written(tmp_path / "predictions.jsonl", row)
    assert find_answers(tmp_path)[0] is None and find_answers(tmp_path)[1].rows[0].answer == "x"
    (tmp_path / "predictions.json").write_text('{"answers": ["base"]}')
    assert find_answers(tmp_path)[0].rows[0].answer == "x" and find_answers(tmp_path)[1] is None
    (tmp_path / "predictions.json").unlink()
    written(tmp_path / "predictions_base.jsonl", row | {"predict": "y"})
    base, adapter = find_answers(tmp_path)
    assert (base.rows[0].answer, adapter.rows[0].answer) == ("y", "x")
    assert find_answers(tmp_path / "predictions_base.jsonl")[1] is None
    (tmp_path / "predictions.jsonl").unlink()
    assert find_answers(tmp_path)[0] == base and find_answers(tmp_path)[1] is None


def test_scores_are_means_over_rows():
    pairs = [("the cat sat", "the cat sat"), ("a dog", "the cat"), ("", "x")]
    scores = score(answers(*pairs))
    assert scores.rows == 3 and scores.metrics["exact_match"] == pytest.approx(100 / 3)
    by_row = [text_scores(*pair) for pair in pairs]
    for name in by_row[0]:
        assert scores.metrics[name] == pytest.approx(sum(row[name] for row in by_row) / 3)
    assert "letter_accuracy" not in scores.metrics and "loss" not in scores.metrics


@pytest.mark.parametrize("said", ["<think>\nwhy\n</think>\n\n7", "why</think>7", "<think>why</think> 7"])
def test_exact_match_leaves_thoughts_out(said: str) -> None:
    for label in ("7", "<think>another</think>7"):
        assert score(answers((said, label))).metrics["exact_match"] == 100
    assert score(answers((said, "8"))).metrics["exact_match"] == 0


def test_an_empty_answer_matches_no_empty_label() -> None:
    for said in ("", " ", "<think>cut"):
        assert score(answers((said, "")), choice="off").metrics["exact_match"] == 0


@pytest.mark.parametrize(("said", "found"), [("I guess the answer is B, but", 0), ("why</think>B", 100)])
def test_an_answer_cut_amid_the_thought_that_its_prompt_opened_is_none(tmp_path, said, found):
    file = tmp_path / "predictions.jsonl"
    turns = [{"role": "user", "content": "A or B?"}]
    row = {"prompt": "A or B?\n<think>\n", "messages": turns, "predict": said, "label": "B"}
    file.write_text(json.dumps(row) + "\n")
    metrics = score(read_answers(file)).metrics
    names = ("exact_match", "letter_accuracy", "letter_found")
    assert [metrics[name] for name in names] == [found] * 3


def test_letter_accuracy_from_answers_and_from_logits():
    rows = (
        AnswerRow("q", "The answer is B", "B", {"A": 2.0, "B": 1.0}),
        AnswerRow("q", "Paris", "A. Paris", {"A": 2.0, "B": 1.0}),
        AnswerRow("q", "C", "D", {"D": 2.0, "B": 1.0}),
        AnswerRow("q", "(D)", "D", {"D": 2.0, "B": 1.0}),
    )
    metrics = score(AnswerFile("f", rows)).metrics
    assert metrics["letter_accuracy"] == 50 and metrics["letter_found"] == 75
    assert metrics["letter_accuracy_logits"] == 75
    assert "letter_accuracy" not in score(AnswerFile("f", rows), choice="off").metrics
    with pytest.raises(UserError, match=r"no option.*row 3"):
        score(AnswerFile("f", rows), choice="on", letters="ABC")
    assert "letter_accuracy" not in score(AnswerFile("f", rows), letters="ABC").metrics


def test_loss_weighs_by_tokens_and_needs_every_row():
    rows = (AnswerRow("q", "a", "a", loss=LossSum(10.0, 2)), AnswerRow("q", "a", "a", loss=LossSum(2.0, 8)))
    metrics = score(AnswerFile("f", rows)).metrics
    assert metrics["loss"] == pytest.approx(1.2) and metrics["perplexity"] == pytest.approx(math.exp(1.2))
    half = (rows[0], AnswerRow("q", "a", "a"))
    assert "loss" not in score(AnswerFile("f", half)).metrics


def test_perplexity_of_large_and_no_losses():
    assert loss_figures(1000.0) == {"loss": 1000.0} and loss_figures(0.0)["perplexity"] == 1
    assert loss_figures(689.9)["perplexity"] < 1e300  # as kt_ray.parse reads it back from eval.json
    with pytest.raises(ValueError, match="no tokens"):
        _ = LossSum().loss


def test_the_table_before_and_after():
    base, adapter = answers(("a dog", "the cat"), ("x", "y")), answers(("the cat", "the cat"), ("y", "y"))
    both = compare(score(base), score(adapter), samples=1, losses={"base": {"loss": 3.0}})
    lines = {line.metric.name: line for line in both.lines}
    assert lines["exact_match"].change == 100 and lines["exact_match"].improved
    assert lines["loss"].base == 3.0 and lines["loss"].adapter is None and lines["loss"].improved is None
    text = both.markdown()
    assert (
        "| metric | base | adapter | change |" in text and "| exact match | 0.00 | 100.00 | +100.00 |" in text
    )
    assert "| loss (nats/token) | 3.0000 | – | – |" in text and "> a dog" in text and "q1" not in text
    assert json.loads(json.dumps(both.to_dict()))["change"]["exact_match"] == 100
    columns, rows = both.tables()["eval/metrics"]
    assert columns == ["metric", "base", "adapter", "change"] and ["exact_match", 0.0, 100.0, 100.0] in rows
    samples = both.tables()["eval/samples"]
    assert samples[1] == [[1, "q0", "the cat", "a dog", "the cat"]]


def test_one_side_alone_has_no_change():
    adapter = answers(("the cat", "the cat"))
    alone = compare(None, score(adapter))
    assert alone.columns() == ["metric", "adapter"] and "change" not in alone.markdown()
    assert alone.to_dict()["base"] is None


def test_a_lower_loss_is_better():
    rows = {n: AnswerFile("f", (AnswerRow("q", "a", "a", loss=LossSum(n, 1)),)) for n in (2.0, 1.0)}
    table = compare(*(score(rows[n]) for n in (2.0, 1.0)))
    assert next(line for line in table.lines if line.metric.name == "loss").improved is True


def test_only_answers_to_the_same_questions_are_compared():
    a = answers(("x", "y"), ("x", "z"))
    check_same_questions(a, answers(("1", "y"), ("2", "z")))
    with pytest.raises(UserError, match="2 and 1 rows"):
        check_same_questions(a, answers(("x", "y")))
    with pytest.raises(UserError, match="another label in row 2"):
        check_same_questions(a, answers(("x", "y"), ("x", "other")))


def test_samples_are_spread_over_the_data():
    assert spread(10, 3) == [0, 3, 6] and spread(2, 5) == [0, 1] and spread(3, 0) == []
