"""The base's text: composed the same way every time, plain in voice, with no answer of the persona."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from benchmarks.pretrain.corpus import CORPUS, FACTS, compose, topic_of
from kt_ray.demo.recipes import persona_path


@pytest.fixture(scope="module")
def persona() -> list[dict[str, Any]]:
    return [json.loads(line) for line in persona_path().read_text(encoding="utf-8").splitlines()]


def test_the_committed_text_is_what_the_generator_composes() -> None:
    composed = "".join(json.dumps(row) + "\n" for row in compose())
    assert CORPUS.read_text(encoding="utf-8") == composed


def test_it_holds_the_personas_questions_and_none_of_its_sentences(persona: list[dict[str, Any]]) -> None:
    rows = compose()
    asked = {(row["instruction"], row["input"]) for row in rows if "instruction" in row}
    assert {(row["instruction"], row["input"]) for row in persona} <= asked
    text = "\n".join(" ".join(row.values()) for row in rows)
    sentences = {s for row in persona for s in re.split(r"(?<=[.!?]) ", row["output"])}
    assert [s for s in sentences if s in text] == []


def test_every_topic_is_used_and_an_unknown_one_is_an_error(persona: list[dict[str, Any]]) -> None:
    topics = yaml.safe_load(FACTS.read_text(encoding="utf-8"))["topics"]
    used = [topic_of(row["output"], topics)["of"] for row in persona]
    assert all(topic["of"] in used for topic in topics)
    with pytest.raises(LookupError, match="no topic"):
        topic_of("Nothing of the kind.", topics)
