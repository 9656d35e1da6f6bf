"""Speed of the host around the experts: memory, torch on the CPU, AdamW, disk."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from kt_ray.config.schema import OptimConfig
from kt_ray.hardware.rates import Curve, DeviceRate, Figure, MemoryRate
from kt_ray.measure.blocks import measure_blocks
from kt_ray.measure.timing import SECONDS, median_seconds, torch_threads
from kt_ray.native import allocate
from kt_ray.optim.optimizers import LoraOptimizer

MIB = 1 << 20
MEASURED = "measured"
GEMM_ROWS = (1, 16, 64, 256, 1024)
_BLOCK = 8 * MIB  # of a read from disk


def measure_memory(threads: int, size: int = 256 * MIB, seconds: float = SECONDS) -> MemoryRate:
    """Bytes/s of memory, one thread and `threads`; `size` bytes, several times the last-level cache."""
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


def measure_cpu(
    threads: int, hidden: int = 2048, vocabulary: int = 32768, tokens: int = 512, seconds: float = SECONDS
) -> DeviceRate:
    """torch on `threads` threads: matrix products [rows, hidden] x [hidden, hidden], attention, the rest."""
    with torch_threads(threads):
        gemm = {
            name: Curve(
                tuple(float(rows) for rows in GEMM_ROWS),
                tuple(_gemm(rows, hidden, dtype, seconds) for rows in GEMM_ROWS),
                MEASURED,
            )
            for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
        }
        a = torch.ones(tokens, hidden)
        b, c = torch.ones_like(a), torch.empty_like(a)
        adding = median_seconds(lambda: torch.add(a, b, out=c), seconds)
        small = torch.ones(16)
        return DeviceRate(
            name=f"cpu, {threads} thread{'s' if threads > 1 else ''}",
            threads=threads,
            gemm=gemm,
            memory=Figure(12 * a.numel() / adding, MEASURED),
            sdpa=Figure(_sdpa(tokens, seconds), MEASURED),
            softmax=Figure(_softmax(max(1, tokens // 8), vocabulary, seconds), MEASURED),
            operation=Figure(median_seconds(lambda: small + small, seconds), MEASURED),
            blocks=measure_blocks(
                torch.device("cpu"),
                lambda call: median_seconds(call, seconds),
                MEASURED,
                tokens=tokens,
                hidden=hidden,
            ),
        )


def _gemm(rows: int, hidden: int, dtype: torch.dtype, seconds: float) -> float:
    x, w = torch.ones(rows, hidden, dtype=dtype), torch.ones(hidden, hidden, dtype=dtype)
    return 2 * rows * hidden * hidden / median_seconds(lambda: F.linear(x, w), seconds)


def _sdpa(tokens: int, seconds: float, heads: int = 16, width: int = 128) -> float:
    q, k, v = (torch.ones(1, heads, tokens, width, dtype=torch.bfloat16) for _ in range(3))
    took = median_seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), seconds)
    return 4 * heads * tokens * tokens * width / took


def _softmax(rows: int, vocabulary: int, seconds: float) -> float:
    logits = torch.zeros(rows, vocabulary, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64)

    def loss() -> None:
        logits.grad = None
        F.cross_entropy(logits, labels).backward()

    return rows * vocabulary / median_seconds(loss, seconds)


def measure_optimizer(threads: int, parameters: int = 1 << 22, seconds: float = SECONDS) -> Figure:
    """Parameters/s of AdamW as training steps it."""
    with torch_threads(threads):
        held = [torch.nn.Parameter(torch.zeros(parameters // 16)) for _ in range(16)]
        optimizer = LoraOptimizer(held, OptimConfig())
        took = median_seconds(lambda: optimizer.apply(1e-4, 0.5), seconds)
        return Figure(parameters // 16 * 16 / took, MEASURED)


def measure_disk(where: Path, size: int = 256 * MIB) -> Figure | None:
    """Bytes/s read of a file that is not in memory; None where none can be read or written.

    Args:
        where: a file or a model directory, whose largest file is read; where there is none, a file is
            written into the directory, read and removed.
        size: bytes read at most.
    """
    file = where if where.is_file() else max(_files(where), key=lambda f: f.stat().st_size, default=None)
    if file is not None and file.stat().st_size >= size // 8:
        return _read(file, size, f"{MEASURED}: {file.name}")
    folder = where if where.is_dir() else where.parent
    try:
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
