"""Text for pretraining: documents from files, tokens in packed rows.

A document is a text, or a conversation rendered by the tokenizer's own chat template. Documents follow
each other in rows of one length; positions begin at 0 in each document, which is how transformers knows
that attention must not cross from one into the next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_ray.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class Document:
    """A plain text (answer None) or a question with its answer."""

    text: str
    answer: str | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,) if self.answer is None else (self.text, self.answer)


def read_documents(files: Sequence[str | Path]) -> list[Document]:
    """All documents of the files, in their order.

    .jsonl holds one object per line and .json a list of them: {"text"} or alpaca's {"instruction",
    "input", "output"}. Any other file is plain text: paragraphs parted by empty lines.

    Raises:
        UserError: a file that cannot be read, a row of another shape, or nothing in any of them.
    """
    documents: list[Document] = []
    for file in files:
        path = Path(file)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                "a text file cannot be read",
                where=str(path),
                observed=reason,
                remedy="correct --text, and save the file as UTF-8",
            ) from error
        if path.suffix in (".json", ".jsonl"):
            documents += [_document(row, where) for row, where in _rows(path, text)]
        else:
            documents += [Document(p) for part in text.split("\n\n") if (p := part.strip())]
    if not documents:
        raise UserError(
            "there is nothing to train on",
            where="--text",
            observed=", ".join(str(f) for f in files) or "no file",
            required="at least one paragraph or row",
            remedy="name text, jsonl or json files",
        )
    return documents


def _rows(path: Path, text: str) -> Iterator[tuple[Any, str]]:
    try:
        if path.suffix == ".json":
            for number, row in enumerate(json.loads(text), 1):
                yield row, f"{path}, row {number}"
        else:
            for number, line in enumerate(text.split("\n"), 1):
                if line.strip():
                    yield json.loads(line), f"{path}:{number}"
    except (ValueError, TypeError) as error:
        raise UserError(
            "a text file is not JSON",
            where=str(path),
            observed=str(error)[:160],
            required="a list of objects (.json) or one object per line (.jsonl)",
            remedy="correct the file, or give plain text another suffix",
        ) from error


def _document(row: Any, where: str) -> Document:
    keys = ("text", "instruction", "input", "output")
    if isinstance(row, dict) and all(isinstance(row.get(k, ""), str) for k in keys):
        if "text" in row:
            return Document(row["text"])
        if row.get("instruction") and row.get("output"):
            return Document("\n".join(filter(None, (row["instruction"], row.get("input")))), row["output"])
    raise UserError(
        "a row is neither a text nor a question with its answer",
        where=where,
        observed=sorted(row) if isinstance(row, dict) else type(row).__name__,
        required='{"text": "..."} or {"instruction": "...", "input": "...", "output": "..."}',
        remedy="correct the row",
    )


def encode(tokenizer: PreTrainedTokenizerFast, document: Document) -> list[int]:
    """Token ids of a document: a text between BOS (if there is one) and EOS, a conversation as the
    chat template renders it."""
    if document.answer is None:
        ids: list[int] = tokenizer(document.text, add_special_tokens=False)["input_ids"]
        begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return [*begin, *ids, tokenizer.eos_token_id]
    messages = [
        {"role": "user", "content": document.text},
        {"role": "assistant", "content": document.answer},
    ]
    rendered: Any = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded: list[int] = tokenizer(str(rendered), add_special_tokens=False)["input_ids"]
    return encoded


class PackedText:
    """Rows of `length` tokens, without end: every pass has an order of its own.

    Args:
        documents: token ids, one list per document.
        length: tokens per row; a document that does not fit goes on in the next row.
        seed: decides the order of every pass.
    """

    def __init__(self, documents: Sequence[list[int]], length: int, seed: int) -> None:
        self.documents, self.length, self.seed = documents, length, seed
        self.tokens = sum(len(d) for d in documents)
        self.passes = 0
        self._ids: list[int] = []
        self._positions: list[int] = []

    def take(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The next rows: token ids and positions, both int64 [rows, length]."""
        import torch

        count = rows * self.length
        while len(self._ids) < count:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.passes)
            for index in torch.randperm(len(self.documents), generator=generator).tolist():
                document = self.documents[index]
                self._ids += document
                self._positions += range(len(document))
            self.passes += 1
        ids, self._ids = self._ids[:count], self._ids[count:]
        positions, self._positions = self._positions[:count], self._positions[count:]
        shape = (rows, self.length)
        return torch.tensor(ids).view(shape), torch.tensor(positions).view(shape)
