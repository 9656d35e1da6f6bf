"""Show rows as the model will see them, trained tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from kt_ray.batch import IGNORE
from kt_ray.data.row_types import Pair, Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerFast

OPEN, CLOSE = "[[", "]]"
SEPARATOR = "\n--- next document ---\n"


@dataclass(frozen=True)
class PreviewRow:
    """A decoded row."""

    sample_id: int  # index in source order
    tokens: int  # tokens of the row
    trained: int  # tokens that contribute to the loss
    segments: tuple[tuple[str, bool], ...]  # (text, is it trained), in order; joined they are the decoded row
    what: str = ""  # what kind of row it is, where that is not plain

    @property
    def title(self) -> str:
        what = f" ({self.what})" if self.what else ""
        return f"row {self.sample_id}{what}: {self.tokens} tokens, {self.trained} trained"

    def plain(self) -> str:
        """Trained text between [[ and ]]."""
        return "".join(f"{OPEN}{text}{CLOSE}" if trained else text for text, trained in self.segments)

    def rich(self) -> Text:
        """Trained text in green, the rest dim."""
        from rich.text import Text

        return Text.assemble(*((text, "green" if trained else "dim") for text, trained in self.segments))


def preview_rows(
    rows: Sequence[Row | Pair], tokenizer: PreTrainedTokenizerFast, n: int = 3
) -> list[PreviewRow]:
    """The first `n` rows, decoded; of pairs both sides, under the pair's number.

    Of a packed row, each document begins on a line of its own.
    """
    shown: list[PreviewRow] = []
    for row in rows[:n]:
        if isinstance(row, Pair):
            for side, what in ((row.chosen, "chosen"), (row.rejected, "rejected")):
                shown.append(replace(_preview(side, tokenizer, what), sample_id=side.sample_id // 2))
        else:
            shown.append(_preview(row, tokenizer, _what(row)))
    return shown


def _what(row: Row) -> str:
    if row.documents:
        return f"packed: rows {', '.join(str(sample) for sample, _ in row.documents)}"
    if row.sign:
        return "wanted" if row.sign > 0 else "not wanted"
    return ""


def print_preview(previews: Sequence[PreviewRow], console: Console) -> None:
    """Colours on a terminal, brackets elsewhere (a log file keeps the marks)."""
    for preview in previews:
        console.print(preview.title, style="bold", highlight=False)
        if console.is_terminal:
            console.print(preview.rich(), soft_wrap=True)
        else:
            console.print(preview.plain(), markup=False, highlight=False, soft_wrap=True)
        console.print()


def _preview(row: Row, tokenizer: PreTrainedTokenizerFast, what: str = "") -> PreviewRow:
    segments: list[tuple[str, bool]] = []
    marks = (row.labels != IGNORE).tolist()
    ids = row.input_ids.tolist()
    start = 0
    for _, length in row.documents or ((row.sample_id, len(ids)),):
        if start:
            segments.append((SEPARATOR, False))
        document, shown, stop = ids[start : start + length], "", 0
        for trained, run in groupby(marks[start : start + length]):
            stop += len(list(run))
            # with what stands before it: some tokenizers drop the space that a text begins with
            whole = str(tokenizer.decode(document[:stop], clean_up_tokenization_spaces=False))
            segments.append((whole[len(shown) :], bool(trained)))
            shown = whole
        start += length
    return PreviewRow(row.sample_id, len(ids), row.trained, tuple(segments), what)
