"""Where a stage's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kt_ray.gpu import host_event


class Clock:
    """Seconds by term. Host time inside a span of another term is not counted there.

    On CUDA, device work is measured with events, which are read when the figures are asked for; so
    measuring never synchronises. On the CPU it is wall time.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event, float]] = []
        self._inner = [0.0]  # host seconds of finished spans inside each open one

    @contextmanager
    def device(self, term: str) -> Iterator[None]:
        """Time work that runs on the stage's device."""
        if not self.cuda:
            with self.host(term):
                yield
            return
        start, stop = (host_event(timing=True) for _ in range(2))
        start.record()
        self._inner.append(0.0)
        try:
            yield
        finally:
            inside = self._inner.pop()
        stop.record()
        self._events.append((term, start, stop, inside))

    @contextmanager
    def host(self, term: str) -> Iterator[None]:
        """Time the calling thread: waiting, mostly."""
        begun = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - begun
            self.seconds[term] += seconds - self._inner.pop()
            self._inner[-1] += seconds

    def read(self) -> dict[str, float]:
        """Seconds by term so far (waits for the events that were recorded)."""
        for term, start, stop, inside in self._events:
            stop.synchronize()
            self.seconds[term] += max(0.0, start.elapsed_time(stop) / 1e3 - inside)
        self._events.clear()
        return dict(self.seconds)
