"""What tokenisation did to the data, in figures: nothing is cut or dropped without being counted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class SplitReport:
    """Counts of one part of the data."""

    source_rows: int = 0  # rows given to this part
    rows: int = 0  # rows kept
    truncated: int = 0  # kept rows that were cut to max_length
    dropped_long: int = 0  # rows left out because they are longer than max_length (data.overflow=drop)
    # rows left out because cutting took every trained token, or what the answers of a pair differ in
    dropped_no_answer: int = 0
    tokens: int = 0  # tokens of the kept rows, after cutting
    trained: int = 0  # tokens among them that contribute to the loss
    tokens_lost: int = 0  # tokens cut or dropped
    trained_lost: int = 0  # trained tokens among those
    longest: int = 0  # tokens of the longest row before cutting
    longest_kept: int = 0  # of the longest kept row, after cutting
    cut_texts: int = 0  # raw texts that became several rows
    notes: list[str] = field(default_factory=list)

    def lines(self, name: str, max_length: int) -> list[str]:
        """A short account; losses are mentioned only when there are any."""
        share = self.trained / max(1, self.tokens)
        learnt = f"{self.trained:,} trained ({share:.0%}), " if self.trained else ""
        lines = [
            f"{name}: {self.rows:,} of {self.source_rows:,} rows, {self.tokens:,} tokens, {learnt}"
            f"longest row {self.longest:,}"
        ]
        counts = (
            (self.cut_texts, f"texts cut into rows of at most {max_length:,} tokens"),
            (self.truncated, f"rows cut to {max_length:,} tokens, answers cut short"),
            (self.dropped_long, f"rows dropped, longer than {max_length:,} tokens"),
            (
                self.dropped_no_answer,
                f"rows dropped, no answer (of a pair: none, or no difference) within {max_length:,} tokens",
            ),
        )
        lines += [f"{name}: {count:,} {what}" for count, what in counts if count]
        if self.tokens_lost:
            every = self.tokens + self.tokens_lost
            trained = self.trained + self.trained_lost
            lines.append(
                f"{name}: lost {self.tokens_lost:,} of {every:,} tokens ({self.tokens_lost / every:.1%}) and "
                f"{self.trained_lost:,} of {trained:,} trained ones; data.max_length={self.longest} keeps all"
            )
        return lines + [f"{name}: {note}" for note in self.notes]


@dataclass
class DataReport:
    """Both parts and the notes on them. `eval` is None when nothing is held out."""

    max_length: int
    train: SplitReport = field(default_factory=SplitReport)
    eval: SplitReport | None = None
    notes: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # one line per source: rows and format
    template: str = ""  # where the chat template comes from
    cached: bool = False  # tokens came from the cache
    # packed_from, packed_to: training rows before and after packing; 0 = not packed
    packed_from: int = 0
    packed_to: int = 0

    def origin(self) -> list[str]:
        """Where rows and template come from, for mode=preview."""
        lines = [f"source: {line}" for line in self.sources]
        lines.append(f"template: {self.template}")
        return [*lines, "tokens: from the cache"] if self.cached else lines

    def lines(self) -> list[str]:
        lines = self.train.lines("train", self.max_length)
        if self.packed_to:
            filled = self.train.tokens / (self.packed_to * self.max_length)
            lines.append(
                f"train: {self.packed_from:,} rows packed into {self.packed_to:,}, {filled:.0%} of "
                f"{self.max_length:,} tokens each"
            )
        if self.eval is not None:
            lines += self.eval.lines("held out", self.max_length)
        return lines + [f"note: {note}" for note in self.notes]
