"""Speed of the host around experts and attention: memory, AdamW, disk, messages within one process."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import time
from pathlib import Path

import torch

from kt_ray.config.schema import OptimConfig
from kt_ray.hardware.rates import Figure, MemoryRate
from kt_ray.measure.timing import SECONDS, median_seconds, torch_threads
from kt_ray.native import allocate
from kt_ray.optim.optimizers import LoraOptimizer
from kt_ray.transport.messages import Mailbox, Message
from kt_ray.transport.shared_memory import Arena

MIB = 1 << 20
MEASURED = "measured"
WAIT = 30.0  # seconds that a message may take before something is wrong
_BLOCK = 8 * MIB  # of a read from disk


def measure_memory(threads: int, size: int, seconds: float = SECONDS) -> MemoryRate:
    """Bytes/s of memory, one thread and `threads`; `size` bytes, several times the last-level caches."""
    source = torch.ones(size // 4, dtype=torch.float32)
    target = torch.zeros_like(source)

    def read(n: int) -> Figure:
        with torch_threads(n):
            return Figure(size / median_seconds(source.sum, seconds), MEASURED)

    def copy(n: int) -> Figure:
        with torch_threads(n):
            return Figure(size / median_seconds(lambda: target.copy_(source), seconds), MEASURED)

    def fresh() -> None:
        allocate((size // 8,), torch.uint8).fill_(1)

    with torch_threads(threads):
        first = Figure(size / 8 / median_seconds(fresh, seconds), MEASURED)
    return MemoryRate(read(1), read(threads), copy(1), copy(threads), first)


def measure_optimizer(threads: int, parameters: int, seconds: float = SECONDS) -> Figure:
    """Parameters/s of AdamW as training steps it."""
    with torch_threads(threads):
        weights = [torch.nn.Parameter(torch.zeros(parameters // 16)) for _ in range(16)]
        optimizer = LoraOptimizer(weights, OptimConfig())
        took = median_seconds(lambda: optimizer.apply(1e-4, 0.5), seconds)
        return Figure(parameters // 16 * 16 / took, MEASURED)


def measure_disk(where: Path, size: int = 256 * MIB) -> Figure | None:
    """Bytes/s read of a file that is not in memory; None where none can be read or written.

    Args:
        where: a file or a model directory, whose largest file is read; where there is none, a file is
            written into the directory, read and removed.
        size: bytes read at most.
    """
    try:
        file = where if where.is_file() else max(_files(where), key=lambda f: f.stat().st_size, default=None)
        if file is not None and file.stat().st_size >= size // 8:
            return _read(file, size, f"{MEASURED}: {file.name}")
        folder = where if where.is_dir() else where.parent
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kt_ray-disk-") as written:
            for _ in range(max(1, size // _BLOCK)):
                written.write(os.urandom(min(size, _BLOCK)))
            written.flush()
            os.fsync(written.fileno())
            return _read(Path(written.name), size, f"{MEASURED}: a file written to {folder}")
    except OSError:
        return None


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return [f for f in folder.glob("*.safetensors") if f.is_file()]
    return []


def _read(file: Path, size: int, source: str) -> Figure | None:
    buffer = bytearray(min(size, _BLOCK))
    try:
        handle = os.open(file, os.O_RDONLY)
    except OSError:
        return None
    try:
        os.posix_fadvise(handle, 0, size, os.POSIX_FADV_DONTNEED)  # clean pages leave memory
        done, start = 0, time.perf_counter()
        while done < size:
            got = os.preadv(handle, [buffer], done)
            if got == 0:
                break
            done += got
        return Figure(done / max(time.perf_counter() - start, 1e-9), source) if done else None
    finally:
        os.close(handle)


def measure_local_message(rounds: int = 200) -> Figure:
    """Seconds of a small message from one actor's thread to another's in one process, half a round trip."""
    asker, answerer = Mailbox("asker"), Mailbox("answerer")

    def answer() -> None:
        for i in range(rounds):
            answerer.take(("ask", i), WAIT)
            asker.put(Message(("answer", i)))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    start = time.perf_counter()
    for i in range(rounds):
        answerer.put(Message(("ask", i)))
        asker.take(("answer", i), WAIT)
    took = time.perf_counter() - start
    thread.join(WAIT)
    return Figure(took / (2 * rounds), MEASURED)


def measure_arena(size: int = 8 << 20, seconds: float = SECONDS) -> Figure:
    """Bytes/s copied into a segment of shared memory that is in use already."""
    arena, tensor = Arena("rates"), torch.ones(size, dtype=torch.uint8)

    def write() -> None:
        _, block = arena.write(tensor)
        arena.free(block)

    return Figure(size / median_seconds(write, seconds), MEASURED)
