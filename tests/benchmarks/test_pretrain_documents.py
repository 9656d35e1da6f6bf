"""Documents from files and packed rows: every token once per pass, positions that restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.pretrain.documents import Document, PackedText, encode, read_documents
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(persona_path(), 600)


def test_documents_of_every_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\nStill one.\n\n\nTwo.\n")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "Three."}\n\n{"instruction": "Q", "input": "I", "output": "A"}\n'
    )
    (tmp_path / "c.json").write_text(json.dumps([{"instruction": "Q", "output": "A"}]))
    assert read_documents([tmp_path / name for name in ("a.txt", "b.jsonl", "c.json")]) == [
        Document("One.\nStill one."),
        Document("Two."),
        Document("Three."),
        Document("Q\nI", "A"),
        Document("Q", "A"),
    ]


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.jsonl", '{"text": "x"}\n{"output": "y"}', r"neither a text nor a question.*a\.jsonl:2"),
        ("a.jsonl", '{"text": 3}', r"neither a text nor a question"),
        ("a.json", "[3]", r"neither a text nor a question.*row 1.*int"),
        ("a.jsonl", "{", r"not JSON.*a\.jsonl"),
        ("a.txt", " \n\n ", r"nothing to train on"),
        ("a.txt", None, r"cannot be read.*No such file"),
    ],
)
def test_faults(tmp_path: Path, name: str, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=told):
        read_documents([tmp_path / name])


def test_a_document_is_framed_as_the_model_will_see_it(tokenizer: Any) -> None:
    assert tokenizer.decode(encode(tokenizer, Document("A lamp."))) == "<|bos|>A lamp.<|im_end|>"
    chat = tokenizer.decode(encode(tokenizer, Document("Who?", "I.")))
    assert chat == "<|bos|><|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nI.<|im_end|>\n"


def test_rows_hold_every_token_once_per_pass_in_an_order_of_its_own() -> None:
    documents = [[10 * d + i for i in range(d)] for d in range(1, 9)]  # 36 tokens
    text = PackedText(documents, length=6, seed=3)
    passes = [text.take(6), text.take(6)]
    for ids, positions in passes:
        assert ids.shape == positions.shape == (6, 6)
        assert sorted(ids.flatten().tolist()) == sorted(t for d in documents for t in d)
        assert torch.equal(positions, ids % 10)  # a token's position is its place in its document
    assert not torch.equal(passes[0][0], passes[1][0])
    again = PackedText(documents, length=6, seed=3)
    assert torch.equal(again.take(6)[0], passes[0][0])
    assert torch.equal(again.take(6)[0], passes[1][0])
