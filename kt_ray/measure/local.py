"""Messages within one process, and copies into the memory that actors share."""

from __future__ import annotations

import threading
import time

import torch

from kt_ray.hardware.rates import Figure
from kt_ray.measure.timing import SECONDS, median_seconds
from kt_ray.transport.messages import Mailbox, Message
from kt_ray.transport.shared_memory import Arena

WAIT = 30.0  # seconds that a message may take before something is wrong


def measure_local_message(rounds: int = 200) -> Figure:
    """Seconds of a small message from one actor's thread to another's in one process, half a round trip."""
    here, there = Mailbox("here"), Mailbox("there")

    def answer() -> None:
        for i in range(rounds):
            there.take(("ask", i), WAIT)
            here.put(Message(("answer", i)))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    start = time.perf_counter()
    for i in range(rounds):
        there.put(Message(("ask", i)))
        here.take(("answer", i), WAIT)
    took = time.perf_counter() - start
    thread.join(WAIT)
    return Figure(took / (2 * rounds), "measured")


def measure_arena(size: int = 8 << 20, seconds: float = SECONDS) -> Figure:
    """Bytes/s copied into a segment of shared memory that is in use already."""
    arena, tensor = Arena("rates"), torch.ones(size, dtype=torch.uint8)

    def write() -> None:
        _, block = arena.write(tensor)
        arena.free(block)

    return Figure(size / median_seconds(write, seconds), "measured")
