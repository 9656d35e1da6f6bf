"""Repeated timing of one call: the median, and torch's threads for the time of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

SECONDS = 0.15  # that one figure may take beyond its first repeats
REPEATS = 3  # at least


def median_seconds(call: Callable[[], object], seconds: float = SECONDS, repeats: int = REPEATS) -> float:
    """Median duration of `call`, after one call that does not count.

    It is repeated until `seconds` are used up; calls too short for the clock are timed in batches.
    """
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-9)
    batch = max(1, int(1e-4 / once))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < repeats or (time.perf_counter() < end and len(times) < 50):
        start = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - start) / batch)
    return max(statistics.median(times), 1e-9)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """torch on `threads` threads within, as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
