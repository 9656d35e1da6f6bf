"""Several runs side by side: how their configurations differ, and their results."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray.config.fields import show
from kt_ray.config.mapping import REMOVED
from kt_ray.errors import UserError
from kt_ray.evaluate.table import markdown_table
from kt_ray.runs.rundata import RunData, read_run
from kt_ray.runs.rundir import is_run, runs_in
from kt_ray.tracking.progress import duration

VERSION = 1
INLINE_KEYS = 4  # differing keys that stand beside the results; more get a table of their own
# Where files go and what watches a run: these differ between any two runs and explain no result.
_IGNORED = (
    *("run.", "tracking.", "eval.", "report.", "compare.", "cluster.dashboard", "plan."),
    *("trainer.restarts", "trainer.recoveries"),  # deaths change no figure
)


@dataclass(frozen=True)
class Column:
    """One figure of the table. better: "lower", "higher" or "" (neither)."""

    name: str
    title: str
    better: str
    digits: int = 3

    def text(self, value: float | None) -> str:
        """The figure as tables show it."""
        if value is None:
            return "–"
        return duration(value) if self.name == "seconds" else f"{value:.{self.digits}f}"


COLUMNS = (
    Column("steps", "steps", "", 0),
    Column("loss", "loss, last steps", "lower"),
    Column("eval_loss_best", "held-out, best", "lower"),
    Column("eval_loss", "held-out, last", "lower"),
    Column("reward", "reward, last steps", "higher"),
    Column("eval_reward_best", "held-out reward, best", "higher"),
    Column("eval_reward", "held-out reward, last", "higher"),
    Column("tokens_per_s", "tokens/s", "higher", 1),
    Column("seconds", "time", ""),
    Column("perplexity", "perplexity", "lower"),
    Column("bleu-4", "BLEU-4", "higher", 2),
    Column("rouge-l", "ROUGE-L", "higher", 2),
    Column("exact_match", "exact match", "higher", 2),
    Column("letter_accuracy", "letter accuracy", "higher", 2),
)
"""Figures of metrics.jsonl, then metrics of eval.json (the adapter's)."""

_SORTED_BY = {"loss": "loss", "eval_loss": "eval_loss_best", "tokens_per_s": "tokens_per_s"}


@dataclass(frozen=True)
class Entry:
    """One run of the comparison: its label, its files, and its figures by column name."""

    label: str
    run: RunData
    figures: dict[str, float]


@dataclass(frozen=True)
class RunComparison:
    """Runs in the order of the table."""

    entries: tuple[Entry, ...]  # at least two
    differing: tuple[str, ...]  # configuration keys whose values are not the same in all runs

    @property
    def columns(self) -> list[Column]:
        """Those that a run has a figure for."""
        return [c for c in COLUMNS if any(c.name in entry.figures for entry in self.entries)]

    @property
    def inline(self) -> tuple[str, ...]:
        """Differing keys shown in the table of results; none when there are many."""
        return self.differing if len(self.differing) <= INLINE_KEYS else ()

    def headings(self) -> list[str]:
        """Of the table of results."""
        return ["run", *self.inline, *(column.title for column in self.columns)]

    def cells(self) -> list[list[str]]:
        """The table of results, one list per run."""
        return [
            [
                entry.label,
                *(self.setting(entry, key) for key in self.inline),
                *(column.text(entry.figures.get(column.name)) for column in self.columns),
            ]
            for entry in self.entries
        ]

    def best(self) -> set[tuple[int, int]]:
        """(row, column) of the best figures of `cells`, where not all are equal."""
        cells: set[tuple[int, int]] = set()
        for number, column in enumerate(self.columns, 1 + len(self.inline)):
            values = {
                r: e.figures[column.name] for r, e in enumerate(self.entries) if column.name in e.figures
            }
            if not column.better or len(set(values.values())) < 2:
                continue
            target = min(values.values()) if column.better == "lower" else max(values.values())
            cells |= {(r, number) for r, value in values.items() if value == target}
        return cells

    def setting(self, entry: Entry, key: str) -> str:
        """A configuration value as it is typed; "–" where the run does not know the key."""
        settings = entry.run.settings()
        return show(settings[key]) if key in settings else "–"

    def setting_rows(self) -> list[list[str]]:
        """The separate table of differing keys, one list per key and its values; empty if inline."""
        if self.inline:
            return []
        return [[key, *(self.setting(entry, key) for entry in self.entries)] for key in self.differing]

    def markdown(self) -> str:
        """Both tables, the best figures in bold; ends in a newline."""
        best = self.best()
        cells = [
            [f"**{cell}**" if (r, c) in best else cell for c, cell in enumerate(row)]
            for r, row in enumerate(self.cells())
        ]
        lines = markdown_table(self.headings(), cells)
        if rows := self.setting_rows():
            lines += ["", *markdown_table(["key", *(entry.label for entry in self.entries)], rows)]
        if not self.differing:
            lines += ["", "No configuration key differs."]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """compare.json: plain values, figures unrounded."""
        return {
            "version": VERSION,
            "differing": list(self.differing),
            "runs": [
                {
                    "name": entry.label,
                    "path": str(entry.run.path),
                    "settings": {key: entry.run.settings().get(key) for key in self.differing},
                    "figures": entry.figures,
                }
                for entry in self.entries
            ],
        }


def compare_runs(paths: Sequence[Path], sort: str = "name") -> RunComparison:
    """Read and compare runs.

    Args:
        paths: run directories.
        sort: value of compare.sort; runs without that figure come last.

    Raises:
        UserError: fewer than two runs, or a damaged one.
    """
    if len(paths) < 2:
        raise UserError(
            "a comparison needs at least two runs",
            where=", ".join(map(str, paths)),
            observed=len(paths),
            remedy="name more in compare.runs, or use mode=report for one run",
        )
    runs = [read_run(path) for path in paths]
    entries = [Entry(label, run, _figures(run)) for label, run in zip(_labels(paths), runs, strict=True)]
    if sort != "name":
        key, sign = _SORTED_BY[sort], -1 if sort == "tokens_per_s" else 1
        entries.sort(key=lambda entry: (key not in entry.figures, sign * entry.figures.get(key, 0.0)))
    return RunComparison(tuple(entries), differing_keys([_begun_with(run) for run in runs]))


def _begun_with(run: RunData) -> dict[str, Any]:
    """A run's settings; that it went on from a checkpoint of its own is none."""
    settings = run.settings()
    resume = str(settings.get("trainer.resume"))
    name = settings.get("run.name") or run.name
    if resume == "latest" or Path(resume).parent.parent.name == name:
        settings["trainer.resume"] = None
    return settings


def differing_keys(settings: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Keys whose values are not all equal, in the order of the first run; a key may be absent in some.

    Names of options (model.name) stay; keys about output, tracking and other modes do not count, nor do
    removed ones.
    """
    absent = object()
    keys = dict.fromkeys(key for of_run in settings for key in of_run)
    return tuple(
        key
        for key in keys
        if not key.startswith(_IGNORED)
        and key not in REMOVED
        and any(of_run.get(key, absent) != settings[0].get(key, absent) for of_run in settings[1:])
    )


def find_runs(names: Sequence[str], root: Path) -> list[Path]:
    """Run directories that compare.runs means, each once, by name with numbers in their order.

    Raises:
        UserError: an entry that is no run, holds none and matches none.
    """
    paths: dict[Path, None] = {}
    for entry in names or [str(root)]:
        runs = _runs_of(entry, root)
        if not runs:
            known = [run.name for run in sorted(runs_in(root), key=natural)]
            close = difflib.get_close_matches(entry, known, n=1)
            raise UserError(
                f"compare.runs: {entry} is no run and holds none",
                where=str(root),
                observed=f"runs there: {', '.join(known[:10]) or 'none'}{', …' if len(known) > 10 else ''}",
                required="a run directory, a directory of runs, a multirun's name or a pattern",
                remedy=f"did you mean {close[0]}?" if close else "correct the name, or set run.root",
            )
        paths |= dict.fromkeys(path.resolve() for path in runs)
    return list(paths)


def _runs_of(entry: str, root: Path) -> list[Path]:
    """The runs that one entry names; a bare name is searched below the root first."""
    path = Path(entry).expanduser()
    places = [path] if path.is_absolute() or "/" in entry else [root / entry, path]
    named = [place for place in places if is_run(place)]  # also where its name reads as a pattern
    if not named and re.search(r"[*?\[]", entry):
        return sorted(filter(is_run, places[0].parent.glob(places[0].name)), key=natural)
    if named:
        return named[:1]
    for place in places:
        # The jobs of a multirun: <name>-0, <name>-1, …
        jobs = (
            p
            for p in place.parent.glob(f"{place.name}-*")
            if p.name.removeprefix(f"{place.name}-").isdecimal()
        )
        if runs := list(runs_in(place)) or list(filter(is_run, jobs)):
            return sorted(runs, key=natural)
    return []


def natural(path: Path) -> list[tuple[bool, int, str]]:
    """A sort key that puts sweep-2 before sweep-10."""
    parts = re.split(r"(\d+)", path.name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _labels(paths: Sequence[Path]) -> list[str]:
    """Names, with the parent's where two are equal."""
    names = [path.name for path in paths]
    return [f"{p.parent.name}/{p.name}" if names.count(p.name) > 1 else p.name for p in paths]


def _figures(run: RunData) -> dict[str, float]:
    evaluated = ((run.evaluation or {}).get("adapter") or {}).get("metrics", {})
    figures = {**{k: v for k, v in evaluated.items() if k != "loss"}, **run.figures()}
    if "reward" in figures:
        figures.pop("loss", None)  # GRPO's says nothing
    return {column.name: float(figures[column.name]) for column in COLUMNS if column.name in figures}
