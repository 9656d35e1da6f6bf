"""The before/after table: base model against adapter, as Markdown, JSON and rows for W&B."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kt_ray.evaluate.answer_file import AnswerFile
from kt_ray.evaluate.scores import METRICS, Metric, Scores

VERSION = 1


@dataclass(frozen=True)
class Line:
    """One metric of the table; None = not measured on that side."""

    metric: Metric
    base: float | None
    adapter: float | None

    @property
    def change(self) -> float | None:
        """Adapter minus base."""
        if self.base is None or self.adapter is None:
            return None
        return self.adapter - self.base

    @property
    def improved(self) -> bool | None:
        """Whether the change is for the better; None = no change, or one side missing."""
        if not self.change:
            return None
        return (self.change > 0) == (self.metric.better == "higher")

    def texts(self, columns: Sequence[str]) -> list[str]:
        """The title, and of "base", "adapter", "change" those asked for."""
        texts = [self.metric.title]
        for name in columns:
            value = getattr(self, name)
            digits = 2 if self.metric.percent else 4
            sign = "+" if name == "change" else ""
            texts.append("–" if value is None else f"{value:{sign}.{digits}f}")
        return texts


@dataclass(frozen=True)
class Sample:
    """One prompt with both answers; None = that model was not asked."""

    row: int
    prompt: str
    label: str
    base: str | None
    adapter: str | None


@dataclass(frozen=True)
class Comparison:
    """The result of an evaluation: some prompts with their answers, and the scores of at least one side."""

    lines: tuple[Line, ...]
    samples: tuple[Sample, ...]
    base: Scores | None = None
    adapter: Scores | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Answers per model."""
        scores = self.adapter or self.base
        assert scores is not None
        return scores.rows

    def markdown(self) -> str:
        """The table and the samples, ending in a newline."""
        text = markdown_table(self.columns(), self.cells())
        text += [
            "",
            f"{self.rows} rows. Scores in percent; higher is better, except for loss and perplexity.",
        ]
        text += [f"{note[0].upper()}{note[1:]}." for note in self.notes]
        for sample in self.samples:
            text += ["", f"**Row {sample.row}**", ""]
            for name in ("prompt", "label", "base", "adapter"):
                value = getattr(sample, name)
                if value is not None:
                    text += [f"- {name}:", *(f"  > {line}".rstrip() for line in value.splitlines() or [""])]
        return "\n".join(text) + "\n"

    def columns(self) -> list[str]:
        """Headings: the metric, each side that was measured, and the change if both were."""
        sides = [s for s in ("base", "adapter") if any(getattr(line, s) is not None for line in self.lines)]
        return ["metric", *sides, *(["change"] if len(sides) == 2 else [])]

    def cells(self) -> list[list[str]]:
        """The table's body as texts, one list per line."""
        return [line.texts(self.columns()[1:]) for line in self.lines]

    def to_dict(self) -> dict[str, Any]:
        """eval.json: plain values; metrics by name."""
        return {
            "version": VERSION,
            "rows": self.rows,
            "base": _side(self.base),
            "adapter": _side(self.adapter),
            "change": {line.metric.name: line.change for line in self.lines if line.change is not None},
            "notes": list(self.notes),
            "samples": [vars(sample) for sample in self.samples],
        }

    def tables(self) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """Name -> (columns, rows) for trackers' `table`: the metrics, and the samples."""
        metrics = [
            [line.metric.name, *(getattr(line, name) for name in self.columns()[1:])] for line in self.lines
        ]
        samples = [list(vars(sample).values()) for sample in self.samples]
        return {
            "eval/metrics": (self.columns(), metrics),
            "eval/samples": (["row", "prompt", "label", "base", "adapter"], samples),
        }


def compare(
    base: Scores | None,
    adapter: Scores | None,
    *,
    samples: int = 3,
    losses: Mapping[str, Mapping[str, float]] | None = None,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """The table of one or two sets of answers to the same questions.

    Args:
        base, adapter: scores of the answers; at least one.
        samples: how many rows to show, evenly spread over the data.
        losses: "base" or "adapter" -> metrics measured elsewhere (the run's held-out loss); metrics of the
            answers themselves take precedence.
        notes: printed under the table.
    """
    if base is None and adapter is None:
        raise ValueError("there is nothing to compare")
    losses = losses or {}
    before = {**losses.get("base", {}), **(base.metrics if base else {})}
    after = {**losses.get("adapter", {}), **(adapter.metrics if adapter else {})}
    return Comparison(
        lines=measured(before, after),
        samples=pick_samples(base.answers if base else None, adapter.answers if adapter else None, samples),
        base=base,
        adapter=adapter,
        notes=notes,
    )


def measured(base: Mapping[str, float], adapter: Mapping[str, float]) -> tuple[Line, ...]:
    """A line for every metric that a side has, in the order of `METRICS`."""
    lines = (Line(m, base.get(m.name), adapter.get(m.name)) for m in METRICS)
    return tuple(line for line in lines if line.base is not None or line.adapter is not None)


def pick_samples(base: AnswerFile | None, adapter: AnswerFile | None, count: int) -> tuple[Sample, ...]:
    """At most `count` rows, evenly spread, with the answers of both sides; none when there is no side."""
    shown = adapter or base
    if shown is None:
        return ()
    return tuple(
        Sample(
            row=i + 1,
            prompt=shown.rows[i].prompt,
            label=shown.rows[i].label,
            base=base.rows[i].answer if base else None,
            adapter=adapter.rows[i].answer if adapter else None,
        )
        for i in spread(len(shown.rows), count)
    )


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table whose columns but the first are aligned right."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(headings), "|---" + "|---:" * (len(headings) - 1) + "|", *map(line, rows)]


def spread(total: int, count: int) -> list[int]:
    """At most `count` of range(total), evenly spread, each once: the first of every equal part."""
    count = min(total, count)
    return [i * total // count for i in range(count)]


def _side(scores: Scores | None) -> dict[str, Any] | None:
    return None if scores is None else {"source": scores.answers.source, "metrics": scores.metrics}
