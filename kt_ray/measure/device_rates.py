"""Speed of what runs attention: torch on the CPU, and one GPU with its link to the host.

No GPU has been measured by it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kt_ray.cpu_products import widen_products
from kt_ray.gpu import choose_kernels
from kt_ray.hardware.rates import Curve, DeviceRate, Figure, LinkRate
from kt_ray.measure.blocks import Timed, measure_blocks
from kt_ray.measure.timing import SECONDS, median_seconds, torch_threads

MIB = 1 << 20
MEASURED = "measured"
CPU_ROWS = (1, 16, 64, 256, 1024)
GPU_ROWS = (16, 64, 256, 1024, 4096)


def measure_cpu(
    threads: int, hidden: int = 2048, vocabulary: int = 32768, tokens: int = 512, seconds: float = SECONDS
) -> DeviceRate:
    """torch on `threads` threads."""
    widen_products()

    def timed(call: Callable[[], object]) -> float:
        return median_seconds(call, seconds)

    name = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    with torch_threads(threads):
        cpu = torch.device("cpu")
        return _rate(cpu, timed, name, threads, CPU_ROWS, tokens * hidden, hidden, 16, tokens, vocabulary)


def measure_gpu(
    device: torch.device, size: int = 256 * MIB, hidden: int = 4096, seconds: float = SECONDS
) -> tuple[DeviceRate, LinkRate]:
    """A GPU, and copies each way from page-locked and pageable memory.

    Args:
        device: "cuda:i". With "cpu" the same code runs as a stand-in (page-locking left out), for tests.
        size: bytes of the largest tensors.
    """
    on_gpu = device.type == "cuda"
    choose_kernels()

    def timed(call: Callable[[], object]) -> float:
        def done() -> None:
            call()
            if on_gpu:
                torch.cuda.synchronize(device)

        return median_seconds(done, seconds)

    name = torch.cuda.get_device_name(device) if on_gpu else "cpu stand-in"
    rate = _rate(device, timed, name, 0, GPU_ROWS, size // 4, hidden, 32)
    return rate, _link(device, size // 4, timed)


def _rate(
    device: torch.device,
    timed: Timed,
    name: str,
    threads: int,
    rows: Sequence[int],
    elements: int,
    hidden: int,
    heads: int,
    tokens: int = 512,
    vocabulary: int = 32768,
) -> DeviceRate:
    """What is timed on one device.

    Args:
        timed: seconds of a call, waited for. elements: added up for memory.
        rows: of the matrix products [rows, hidden] x [hidden, hidden].
    """

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    def gemm(n: int, dtype: torch.dtype) -> float:
        x, w = ones(n, hidden, dtype=dtype), ones(hidden, hidden, dtype=dtype)
        return 2 * n * hidden**2 / timed(lambda: F.linear(x, w))

    types = (("bfloat16", torch.bfloat16), ("float32", torch.float32))
    at = tuple(map(float, rows))
    a, b, c = (ones(elements) for _ in range(3))
    adding = timed(lambda: torch.add(a, b, out=c))
    q, k, v = (ones(1, heads, tokens, 128, dtype=torch.bfloat16) for _ in range(3))
    attention = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    small = ones(16)
    scored = max(1, tokens // 8)
    logits = ones(scored, vocabulary).requires_grad_()
    labels = torch.zeros(scored, dtype=torch.int64, device=device)

    def loss() -> None:
        logits.grad = None
        F.cross_entropy(logits, labels).backward()

    return DeviceRate(
        name=name,
        threads=threads,
        gemm={kind: Curve(at, tuple(gemm(n, dtype) for n in rows), MEASURED) for kind, dtype in types},
        memory=Figure(12 * elements / adding, MEASURED),
        sdpa=Figure(4 * heads * tokens**2 * 128 / attention, MEASURED),
        softmax=Figure(scored * vocabulary / timed(loss), MEASURED),
        operation=Figure(timed(lambda: small + small) if threads else _launch(device), MEASURED),
        blocks=measure_blocks(device, timed, tokens, hidden, masked=not threads),
    )


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
    return statistics.median(times)


def _link(device: torch.device, size: int, timed: Timed) -> LinkRate:
    gpu = torch.empty(size, dtype=torch.uint8, device=device)
    pageable = torch.ones(size, dtype=torch.uint8)
    locked = pageable.pin_memory() if device.type == "cuda" else pageable

    def copy(target: Tensor, source: Tensor) -> Figure:
        return Figure(size / timed(lambda: target.copy_(source, non_blocking=True)), MEASURED)

    return LinkRate(copy(gpu, locked), copy(locked, gpu), copy(gpu, pageable), copy(pageable, gpu))
