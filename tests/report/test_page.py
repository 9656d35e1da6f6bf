"""report.html: complete, self-contained, and safe whatever the answers contain."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from kt_ray.errors import UserError
from kt_ray.report.page import report_page
from kt_ray.runs.rundata import read_run


class Checked(HTMLParser):
    """Collects tags, attributes and text, and sees that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")
        ]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_has_every_section_and_loads_nothing(tmp_path, make_run, make_predictions):
    path = make_run(tmp_path, "run <1>", rank=16)
    make_predictions(path)
    (path / "eval.json").write_text(
        json.dumps(
            {
                "rows": 8,
                "base": {"metrics": {"bleu-4": 1.5}},
                "adapter": {"metrics": {"bleu-4": 30.25}},
                "change": {"bleu-4": 28.75},
            }
        )
    )
    page = Checked(text := report_page(read_run(path), samples=2))
    assert page.references == [] and not {"script", "img", "link", "iframe"} & set(page.tags)
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    for title in (
        *("Loss", "Learning rate", "Throughput", "Gradient norm", "Time of a step", "Memory", "Expert load"),
        *("Tokens per expert", "Before and after", "Who held what", "Configuration", "Environment"),
    ):
        assert re.search(rf"<h[23]>{title}</h[23]>", text), title
    assert text.count("<svg") == 9
    assert "run <1>" in page.text and "launch.py model=demo 'data.path=my rows.jsonl'" in page.text
    assert "lora.rank" in page.text and "avx512_bf16" in page.text and "prefers-color-scheme: dark" in text
    # answers are text, not markup; two of eight rows
    assert "<b>question</b> 0" in page.text and "the cat sat 4" in page.text and "a dog 4" in page.text
    assert "the cat sat 1" not in page.text and "+28.75" in page.text


def test_what_is_missing_is_said_or_left_out(tmp_path, make_run, make_predictions):
    path = make_run(tmp_path, "a")
    for name in ("metrics.jsonl", "env.json"):
        (path / name).unlink()
    text = report_page(read_run(path))
    assert "No step has been finished yet" in text and "Before and after" not in text and "Curves" not in text
    (path / "checkpoints" / "step_000060" / "manifest.json").unlink()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    make_predictions(path, base=False)
    text = report_page(read_run(path))
    assert "No checkpoint of this run holds a histogram" in text and "mode=eval computes them" in text
    Checked(text)


def test_answers_of_another_data_set_are_not_set_beside(tmp_path, make_run, make_predictions):
    path = make_run(tmp_path, "a")
    make_predictions(path, rows=8)
    (path / "predictions_base.jsonl").write_text(
        '{"prompt": "other", "prediction": "a wolf", "label": "x"}\n'
    )
    text = report_page(read_run(path))
    assert "a wolf" not in text and "the cat sat 0" in text


@pytest.mark.parametrize("begun", ["", '{"id": 0, "prom'])
def test_answers_that_have_only_begun_are_left_out(tmp_path, make_run, begun):
    """mode=predict was started again before its first answer, or writes it now."""
    path = make_run(tmp_path, "a")
    (path / "predictions.json").write_text('{"count": 3}')
    (path / "predictions.jsonl").write_text(begun)
    assert "Before and after" not in report_page(read_run(path))


def test_damaged_predictions_are_refused(tmp_path, make_run):
    path = make_run(tmp_path, "a")
    (path / "predictions.jsonl").write_text("{\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl:1"):
        report_page(read_run(path))
