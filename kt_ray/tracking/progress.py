"""What a person at the terminal sees: load progress, the training bar, the summary at the end.

On a terminal these are live bars; into a file or a pipe they are plain lines, one per event.
Every line also goes to train.log, through the logger.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from kt_ray.config.resume_line import chat_line
from kt_ray.terminal import shortened
from kt_ray.tracking.console import console as shared_console
from kt_ray.tracking.metrics import Value

log = logging.getLogger(__name__)


class _Display:
    """A context: its bars are live inside, and its clock starts on entering."""

    def __init__(
        self,
        columns: Sequence[ProgressColumn],
        screen: Console | None,
        live: bool,
        clock: Callable[[], float],
    ) -> None:
        self.console = screen or shared_console()
        self.live = live and self.console.is_terminal
        self._progress = Progress(*columns, console=self.console, disable=not self.live)
        self._clock = clock
        self._began = clock()

    def __enter__(self) -> Self:
        self._began = self._clock()
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.live:  # older releases of rich print an empty line otherwise
            self._progress.stop()

    def line(self, text: str, *, shown: bool = True) -> None:
        """One line to train.log and, if `shown`, to the console."""
        log.info("%s", text)
        if shown:
            self.console.print(text, markup=False, soft_wrap=True)


class TrainProgress(_Display):
    """The bar of the training loop: step, loss, tokens/s, time left.

    Args:
        total_steps: steps of the whole run.
        done_steps: steps done before this process (resume).
        live: `tracking.progress`; without it, or without a terminal, plain lines.
        log_every: steps between plain lines on the console; train.log has all.
        screen: where to draw; None = standard output.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        total_steps: int,
        done_steps: int = 0,
        *,
        live: bool = True,
        log_every: int = 1,
        screen: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        figures = TextColumn("{task.fields[figures]}")
        columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), figures, TimeElapsedColumn())
        super().__init__(columns, screen, live, clock)
        self.total_steps = total_steps
        self.log_every = max(1, log_every)
        self._first = done_steps
        self._task = self._progress.add_task("", total=total_steps, completed=done_steps, figures="")

    def update(self, record: Mapping[str, Value]) -> None:
        """Show one record of metrics.jsonl (`StepMetrics.to_dict`)."""
        step = int(record["step"])
        left = self.eta(step)
        figures = [
            f"{label} {_short(value)}"
            for key, label in _SHOWN
            if isinstance(value := record.get(key), int | float)
        ]
        if left is not None:
            figures.append(f"{duration(left)} left")
        text = "  ".join(figures)
        self._progress.update(self._task, completed=step, figures=text)
        due = step % self.log_every == 0 or step in (self._first + 1, self.total_steps)
        self.line(f"step {step}/{self.total_steps}  {text}", shown=not self.live and due)

    def evaluated(self, step: int, figure: str) -> None:
        """Show a held-out figure. The time of one before the first step is no step's."""
        if step == self._first:
            self._began = self._clock()
        self.line(f"step {step}/{self.total_steps}  held-out {figure}")

    def repeating(self, step: int) -> None:
        """The run went back after a loss and is at `step` again, whose figures were shown before."""
        self._progress.update(self._task, completed=step, figures="repeating")

    def eta(self, step: int) -> float | None:
        """Seconds left after `step`, from the mean step time of this process; None before the first."""
        done = step - self._first
        return (self._clock() - self._began) / done * (self.total_steps - step) if done > 0 else None


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= value < 1e9 else f"{value:.4g}"


_SHOWN = (
    ("loss", "loss"),
    ("policy_reward", "reward"),
    ("policy_answer_tokens", "tokens per answer"),
    ("eval_loss", "held-out"),
    ("grad_norm", "grad"),
    ("tokens_per_s", "tokens/s"),
)


@dataclass
class _Actor:
    began: float
    done: int
    total: int
    layer: int | None
    task: TaskID


_EVERY = 5.0  # seconds between plain lines of loading


class LoadProgress(_Display):
    """Loading, per actor: GB read, GB/s, time left. Updates may come from any thread.

    Args:
        live: as for TrainProgress.
        screen: where to draw; None = standard output.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        *,
        live: bool = True,
        screen: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[figures]}"))
        super().__init__(columns, screen, live, clock)
        self._last_line = self._began
        self._actors: dict[str, _Actor] = {}
        self._lock = threading.Lock()

    def update(self, actor: str, bytes_done: int, bytes_total: int, layer: int | None = None) -> None:
        """An actor has read `bytes_done` of `bytes_total` bytes and is at `layer`."""
        with self._lock:
            now = self._clock()
            entry = self._actors.get(actor)
            if entry is None:
                task = self._progress.add_task(f"loading {actor}", total=bytes_total, figures="")
                # Counted from the display's start: the first report already has bytes behind it.
                entry = self._actors[actor] = _Actor(self._began, 0, bytes_total, None, task)
            if bytes_done < entry.done:
                entry.began = now  # another actor in its place loads again
            entry.done, entry.total, entry.layer = bytes_done, bytes_total, layer
            figures = self._figures(entry, now)
            self._progress.update(entry.task, completed=bytes_done, total=bytes_total, figures=figures)
            finished = bytes_done >= bytes_total
            if finished or now - self._last_line >= _EVERY:
                self._last_line = now
                self.line(f"loading {actor}: {figures}", shown=not self.live)

    def _figures(self, entry: _Actor, now: float) -> str:
        seconds = now - entry.began
        rate = entry.done / seconds if seconds > 0 else 0.0
        text = f"{size(entry.done)} of {size(entry.total)}, {rate / 1e9:.2f} GB/s"
        if entry.layer is not None:
            text += f", layer {entry.layer}"
        if entry.done >= entry.total:
            return f"{text}, done in {duration(seconds)}"
        return f"{text}, {duration((entry.total - entry.done) / rate)} left" if rate > 0 else text


_WIDTH = 100  # characters of a question or an answer


@dataclass(frozen=True)
class Summary:
    """What the final panel says.

    A loss is None if it was not measured, the first one also where there is only one; `figure` is what "loss"
    is called.
    """

    run_dir: Path
    steps: int
    epochs: float  # that those steps are, of all rows
    rows: int
    seconds: float  # from the command to the adapter
    first_loss: float | None
    last_loss: float | None
    eval_before: float | None = None
    eval_after: float | None = None
    recoveries: int = 0
    seconds_lost: float = 0.0
    figure: str = "loss"  # or "reward": of the steps, and of the held-out rows
    sample: tuple[str, ...] = ()  # a held-out question, the answer before, the answer after

    def text(self) -> str:
        """The panel's lines."""
        epochs = f"{self.epochs:.3g} epoch{'s' * (self.epochs != 1)} of {self.rows} rows"
        lines = [f"trained        {self.steps} steps in {duration(self.seconds)}: {epochs}"]
        for label, before, after, of in (
            (f"training {self.figure}", self.first_loss, self.last_loss, ""),
            (
                f"held-out {self.figure}",
                self.eval_before,
                self.eval_after,
                ", on rows that it was not trained on",
            ),
        ):
            if after is None:
                continue
            change, first = "", ""
            if before is not None:
                first = f"{before:.4f} → "
                if before > 0 and math.isfinite(after):
                    change = f"  ({100 * (after - before) / before:+.0f} %)"
            lines.append(f"{label:14} {first}{after:.4f}{change}{of}")
        for label, text in zip(("asked", "before", "after"), self.sample, strict=False):
            lines.append(f"{label:14} {shortened(text, _WIDTH)}")
        if self.recoveries:
            lines.append(f"recoveries     {self.recoveries}, {duration(self.seconds_lost)} lost")
        lines.append(f"run directory  {self.run_dir}")
        lines += [
            f"adapter        {self.run_dir / 'adapter'}",
            "",
            "Talk to it:",
            f"  {chat_line(self.run_dir)}",
        ]
        return "\n".join(lines)


def show_summary(summary: Summary, screen: Console | None = None) -> None:
    """Print the final panel; its text also goes to train.log."""
    target = screen or shared_console()
    log.info("finished\n%s", summary.text())
    if target.is_terminal:
        # What a user copies stays outside the box, which would wrap it.
        figures, _, snippet = summary.text().partition("\n\n")
        target.print(Panel(Text(figures), title="finished", title_align="left", expand=False))
        target.print(snippet, markup=False, highlight=False, soft_wrap=True)
    else:
        # Without a terminal a box would wrap, and nothing in it could be copied.
        target.print(summary.text(), markup=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """ "42 s", "3:05", "2:03:05"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def size(count: int) -> str:
    """Decimal bytes: "812 kB", "3.2 MB", "45.1 GB"."""
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e9 else f"{count / 1e9:.1f} GB"
