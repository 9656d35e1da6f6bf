"""Real rows through real tokenizers. KT_RAY_TEST_DATA names the folder; skipped without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.data import load_data
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.tokenizer_files import load_tokenizer

from .conftest import trained_texts

Build = Callable[..., Config]
END = "<|im_end|>"


@pytest.mark.parametrize("name", ["minimind", "qwen2"])
def test_nekoqa_answers_are_trained_exactly(name: str, config: Build, shared_data: Path) -> None:
    path = shared_data / "nekoqa" / "neko_union_alpaca.json"
    source = json.loads(path.read_text(encoding="utf-8"))
    tokenizer = str(shared_data / "tokenizers" / name)
    bundle = load_data(config(path=str(path), max_length=2048, model={"tokenizer": tokenizer}), "", 0)
    assert len(bundle.train) == len(source)
    assert bundle.report.train.tokens_lost == 0
    for row in bundle.train:
        answer = source[row.sample_id]["output"]
        texts = trained_texts(bundle.tokenizer, row.input_ids, row.labels)
        # templates may strip line breaks at an answer's margins
        assert [text.strip() for text in texts] == [answer.strip("\n").strip() + END] or texts == [
            answer + END
        ]


@pytest.mark.parametrize("name", ["minimind", "qwen2"])
def test_multi_turn(name: str, shared_data: Path) -> None:
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / name))
    encoder = ChatEncoder(tokenizer)
    assert not encoder.marked, "these templates have no generation blocks"
    contents = ("你好", "喵呜~", "Where?", "On the\n\nrock.", "再见", "See you!")
    messages = tuple(Turn(role=("user", "assistant")[i % 2], content=c) for i, c in enumerate(contents))
    ids, labels = encoder.encode(Conversation(messages, 0, "here"))
    assert trained_texts(tokenizer, ids, labels) == [f"{answer}{END}" for answer in contents[1::2]]


def test_preparation_is_the_same_twice(config: Build, shared_data: Path) -> None:
    options: dict[str, Any] = {
        "path": str(shared_data / "identity" / "identity.json"),
        "eval_fraction": 0.2,
        "model": {"tokenizer": str(shared_data / "tokenizers" / "minimind")},
    }
    first, second = (load_data(config(**options), "", 7) for _ in range(2))
    for a, b in ((first.train, second.train), (first.eval, second.eval)):
        assert [(r.sample_id, r.input_ids.tolist()) for r in a] == [
            (r.sample_id, r.input_ids.tolist()) for r in b
        ]
