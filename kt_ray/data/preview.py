"""Show rows as the model will see them, trained tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kt_ray.batch import IGNORE
from kt_ray.data.types import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerFast

OPEN, CLOSE = "[[", "]]"


@dataclass(frozen=True)
class PreviewRow:
    """A decoded row.

    Attributes:
        sample_id: index in source order.
        tokens: tokens of the row.
        trained: tokens that contribute to the loss.
        segments: (text, is it trained), in order; joined they are the decoded row.
    """

    sample_id: int
    tokens: int
    trained: int
    segments: tuple[tuple[str, bool], ...]

    @property
    def title(self) -> str:
        return f"row {self.sample_id}: {self.tokens} tokens, {self.trained} trained"

    def plain(self) -> str:
        """Trained text between [[ and ]]."""
        return "".join(f"{OPEN}{text}{CLOSE}" if trained else text for text, trained in self.segments)

    def rich(self) -> Text:
        """Trained text in green, the rest dim."""
        from rich.text import Text

        return Text.assemble(*((text, "green" if trained else "dim") for text, trained in self.segments))


def preview_rows(rows: Sequence[Row], tokenizer: PreTrainedTokenizerFast, n: int = 3) -> list[PreviewRow]:
    """The first `n` rows, decoded."""
    return [_preview(row, tokenizer) for row in rows[:n]]


def print_preview(previews: Sequence[PreviewRow], console: Console) -> None:
    """Colours on a terminal, brackets elsewhere (a log file keeps the marks)."""
    for preview in previews:
        console.print(preview.title, style="bold", highlight=False)
        if console.is_terminal:
            console.print(preview.rich(), soft_wrap=True)
        else:
            console.print(preview.plain(), markup=False, highlight=False, soft_wrap=True)
        console.print()


def _preview(row: Row, tokenizer: PreTrainedTokenizerFast) -> PreviewRow:
    segments: list[tuple[str, bool]] = []
    pairs = zip(row.input_ids.tolist(), (row.labels != IGNORE).tolist(), strict=True)
    for trained, run in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in run]
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        segments.append((str(text), bool(trained)))
    return PreviewRow(row.sample_id, len(row.input_ids), row.trained, tuple(segments))
