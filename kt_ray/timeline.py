"""What an actor does with its time: spans on one clock, cheap enough to be always on.

Every span belongs to one of three categories: "compute", "wait" (for messages of others) and
"transfer" (copying, sending). Spans nest; a span's own time is what its inner spans leave, so the
three sums of an actor add up to the time it was observed. The spans themselves are kept on request.

The clock is CLOCK_MONOTONIC, which all processes of a host share; `Activity.wall_offset` relates it
to the wall clock for actors of other hosts. Standard library only.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

Category = Literal["compute", "wait", "transfer"]
CATEGORIES: tuple[Category, ...] = ("compute", "wait", "transfer")


class Span(NamedTuple):
    """One span: seconds of CLOCK_MONOTONIC; layer and group are -1 where they mean nothing."""

    name: str
    category: Category
    start: float
    end: float
    layer: int = -1
    group: int = -1


@dataclass(frozen=True)
class Activity:
    """One actor's time in one pass."""

    actor: str  # "worker-0", "experts-1", "driver"
    host: str  # name of the machine whose clock this is
    # start, end: of the pass, seconds of CLOCK_MONOTONIC
    start: float
    end: float
    wall_offset: float  # seconds to add for the wall clock (since the epoch)
    seconds: dict[str, float]  # by category, inner spans taken out of outer ones
    # CPU time of the actor's compute thread and of the threads that it started for torch
    cpu_seconds: float = 0.0
    kernel_seconds: float = 0.0  # CPU time of engine threads inside kernels (expert actors)
    threads: int = 1  # over which a busy fraction is taken
    # queue_mean, queue_max: requests that lay ready when an engine call was taken up (expert actors)
    queue_mean: float = 0.0
    queue_max: int = 0
    calls: int = 0  # engine calls that the mean is over
    # in order of their ends; empty unless the pass was asked for them
    spans: tuple[Span, ...] = field(default=(), repr=False)

    def plus(self, later: Activity) -> Activity:
        """This pass and a later one of the same actor together."""
        return replace(
            self,
            end=later.end,
            wall_offset=later.wall_offset,
            seconds={kind: value + later.seconds[kind] for kind, value in self.seconds.items()},
            cpu_seconds=self.cpu_seconds + later.cpu_seconds,
            kernel_seconds=self.kernel_seconds + later.kernel_seconds,
            queue_mean=(self.queue_mean * self.calls + later.queue_mean * later.calls)
            / max(1, self.calls + later.calls),
            calls=self.calls + later.calls,
            queue_max=max(self.queue_max, later.queue_max),
            spans=self.spans + later.spans,
        )


class SpanRecorder:
    """Spans of one actor in one pass; used by its compute thread only.

    Args:
        full: keep spans, not only their sums.
    """

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.start = time.monotonic()
        self.seconds: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self.spans: list[Span] = []
        self._inner = [0.0]  # seconds of finished spans inside each open one
        self._depths: list[int] = []
        self._cpu = team_cpu_seconds()

    @contextmanager
    def span(self, name: str, category: Category, layer: int = -1, group: int = -1) -> Iterator[None]:
        """Time a block."""
        self._inner.append(0.0)
        start = time.monotonic()
        try:
            yield
        finally:
            end = time.monotonic()
            self.seconds[category] += end - start - self._inner.pop()
            self._inner[-1] += end - start
            if self.full:
                self.spans.append(Span(name, category, start, end, layer, group))

    def note_queue(self, depth: int) -> None:
        """Requests that lay ready when a call was taken up."""
        self._depths.append(depth)

    def activity(self, actor: str, host: str, threads: int, kernel_seconds: float = 0.0) -> Activity:
        """What was recorded since the beginning."""
        end = time.monotonic()
        depths = self._depths
        return Activity(
            actor=actor,
            host=host,
            start=self.start,
            end=end,
            wall_offset=time.time() - end,
            seconds=dict(self.seconds),
            cpu_seconds=team_cpu_seconds() - self._cpu,
            kernel_seconds=kernel_seconds,
            threads=threads,
            queue_mean=sum(depths) / len(depths) if depths else 0.0,
            queue_max=max(depths, default=0),
            calls=len(depths),
            spans=tuple(self.spans),
        )


def name_thread(name: str) -> None:
    """Give the calling thread a name in the kernel (15 characters), which threads that it starts inherit.

    The name identifies an actor's share of a process that holds several: its compute thread and the
    OpenMP team that torch starts for it. Threads that exist already keep their names.
    """
    _comm(threading.get_native_id()).write_text(name[:15], encoding="ascii")


def team_cpu_seconds() -> float:
    """CPU seconds so far of the calling thread and of all threads of this process with its name."""
    me = threading.get_native_id()
    try:
        name = _comm(me).read_bytes()
        total = 0
        for task in os.listdir("/proc/self/task"):
            try:
                if int(task) != me and _comm(int(task)).read_bytes() != name:
                    continue
                # Nanoseconds on a CPU; /proc/.../stat only counts hundredths of a second.
                total += int(Path(f"/proc/self/task/{task}/schedstat").read_bytes().split()[0])
            except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                continue
        return total * 1e-9
    except OSError:  # a kernel without these files
        return time.thread_time()


def _comm(task: int) -> Path:
    return Path(f"/proc/self/task/{task}/comm")
