"""Speed of one GPU and of its link to the host. Written without a GPU at hand: untested on hardware."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kt_ray.hardware.rates import Curve, DeviceRate, Figure, LinkRate
from kt_ray.measure.blocks import measure_blocks
from kt_ray.measure.timing import SECONDS, median_seconds

MIB = 1 << 20
MEASURED = "measured"
GEMM_ROWS = (16, 64, 256, 1024, 4096)


def measure_gpu(
    device: torch.device, size: int = 256 * MIB, hidden: int = 4096, seconds: float = SECONDS
) -> tuple[DeviceRate, LinkRate]:
    """Products, memory, attention, launches; copies each way from page-locked and pageable memory.

    Args:
        device: "cuda:i". With "cpu" the same code runs as a stand-in (page-locking left out), for tests.
    """
    on_gpu = device.type == "cuda"

    def timed(call: Callable[[], object]) -> float:
        def done() -> None:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)

        return median_seconds(done, seconds)

    def gemm(rows: int, dtype: torch.dtype) -> float:
        x = torch.ones(rows, hidden, dtype=dtype, device=device)
        w = torch.ones(hidden, hidden, dtype=dtype, device=device)
        return 2 * rows * hidden * hidden / timed(lambda: F.linear(x, w))

    at = tuple(float(rows) for rows in GEMM_ROWS)
    curves = {
        name: Curve(at, tuple(gemm(rows, dtype) for rows in GEMM_ROWS), MEASURED)
        for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    }
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    adding = timed(lambda: torch.add(a, a, out=b))
    heads, tokens, width = 32, 512, 128
    q = torch.ones(1, heads, tokens, width, dtype=torch.bfloat16, device=device)
    attention = timed(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    rows, vocabulary = 64, 32768
    logits = torch.zeros(rows, vocabulary, device=device, requires_grad=True)
    labels = torch.zeros(rows, dtype=torch.int64, device=device)

    def loss() -> None:
        logits.grad = None
        F.cross_entropy(logits, labels).backward()

    rate = DeviceRate(
        name=torch.cuda.get_device_name(device) if on_gpu else "cpu stand-in",
        threads=0,
        gemm=curves,
        memory=Figure(8 * a.numel() / adding, MEASURED),
        sdpa=Figure(4 * heads * tokens * tokens * width / attention, MEASURED),
        softmax=Figure(rows * vocabulary / timed(loss), MEASURED),
        operation=Figure(_launch(device), MEASURED),
        blocks=measure_blocks(device, timed, MEASURED, tokens=tokens, hidden=heads * width),
    )
    return rate, _link(device, size // 4, timed)


def _launch(device: torch.device, count: int = 500) -> float:
    """Seconds per operation when many small ones follow each other, not waited for."""
    small = torch.ones(16, device=device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(count):
            small + small
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / count)
    return sorted(times)[1]


def _link(device: torch.device, size: int, timed: Callable[[Callable[[], object]], float]) -> LinkRate:
    there = torch.empty(size, dtype=torch.uint8, device=device)
    pageable = torch.ones(size, dtype=torch.uint8)
    locked = pageable.pin_memory() if device.type == "cuda" else pageable

    def copy(target: torch.Tensor, source: torch.Tensor) -> Figure:
        return Figure(size / timed(lambda: target.copy_(source, non_blocking=True)), MEASURED)

    return LinkRate(copy(there, locked), copy(locked, there), copy(there, pageable), copy(pageable, there))
