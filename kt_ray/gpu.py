"""How torch uses a GPU here."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from kt_ray.errors import UserError

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process


def cuda_fault() -> str:
    """Why torch can use no GPU of this host; "" where it can."""
    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    return f"torch {torch.__version__} finds no CUDA device"


def host_event(*, timing: bool = False) -> torch.cuda.Event:
    """An event that the host may wait for: asleep, since a wait that spins takes a core from the experts."""
    return torch.cuda.Event(enable_timing=timing, blocking=True)


class Driver:
    """Streams of work, marks in them, copies and products, as this code asks a GPU for them.

    What is given to a device goes to the stream that the calling thread uses at that time. Where cards are
    described, not present, another one stands for them (benchmarks/described_card.py).
    """

    def __init__(self) -> None:
        self._named: dict[tuple[torch.device, str], Any] = {}

    def queues(self, device: torch.device) -> bool:
        """Whether the device computes later than it is told to; no other has streams."""
        return device.type == "cuda"

    def stream(self, device: torch.device, name: str) -> Any:
        """A new one; name: of what it does, for a record."""
        return torch.cuda.Stream(device)

    def named(self, device: torch.device, name: str) -> Any:
        """The stream of that name, which all of the process use."""
        if (device, name) not in self._named:
            self._named[device, name] = self.stream(device, name)
        return self._named[device, name]

    def current(self, device: torch.device) -> Any:
        """The stream that this thread uses."""
        return torch.cuda.current_stream(device)

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        """This thread uses `stream` inside."""
        return torch.cuda.stream(stream)

    def mark(self, device: torch.device) -> Any:
        """An event that the host may wait for: this thread's stream has done all that it was given."""
        event = host_event()
        event.record(torch.cuda.current_stream(device))
        return event

    def used_by(self, stream: Any, *tensors: Tensor) -> None:
        """Free their memory only once `stream`, which did not allocate it, has done what it was given."""
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(stream)

    def copy_in(self, to: Tensor, source: Tensor) -> None:
        """Copy a host tensor to a device."""
        to.copy_(source, non_blocking=True)

    def copy_out(self, to: Tensor, source: Tensor) -> None:
        """Copy a device's tensor to the host."""
        to.copy_(source, non_blocking=True)

    def upload(self, tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
        """A host tensor on the device; copy: another tensor even where that is the host."""
        return tensor.to(device, non_blocking=True, copy=copy)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """As `kt_ray.gpu.product`."""
        if a.dtype == torch.float32:
            return a @ b
        if a.is_cuda:
            multiply = torch.mm if a.dim() == 2 else torch.bmm
            return multiply(a, b, out_dtype=torch.float32)
        return a.float() @ b.float()  # the same sums

    def product8(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
        """Products of FP8 matrices, the second one transposed, each row by its own scale.

        Sums are float32; scaled, they are rounded to bfloat16, which is what torch's kernels for cards give.

        Args:
            a: [B, n, k] and b: [B, m, k] float8_e4m3fn, contiguous; k and m multiples of 16.
            a_scale: [B, n] and b_scale: [B, m] float32.

        Returns:
            [B, n, m] float32.
        """
        if not a.is_cuda:
            sums = a.float() @ b.float().mT
            return (sums * a_scale.unsqueeze(-1) * b_scale.unsqueeze(-2)).bfloat16().float()
        made = torch.empty((*a.shape[:-1], b.shape[-2]), dtype=torch.float32, device=a.device)
        for out, x, x_scale, w, w_scale in zip(made, a, a_scale, b, b_scale, strict=True):
            scales = x_scale.unsqueeze(-1), w_scale.unsqueeze(0)
            out.copy_(torch._scaled_mm(x, w.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=False))
        return made


_driver = Driver()


def driver() -> Driver:
    """The process's."""
    return _driver


def use_driver(other: Driver) -> None:
    """Let another one stand for GPUs, before anything asks for it."""
    global _driver
    _driver = other


@contextmanager
def aside(device: torch.device, name: str) -> Iterator[Any]:
    """Work inside goes to the stream of that name, beside what this thread's stream does.

    Yields the stream; None on a device that computes at once.
    """
    if not _driver.queues(device):
        yield None
        return
    stream = _driver.named(device, name)
    with _driver.using(stream):
        yield stream


def choose_kernels() -> None:
    """Products of this process in the precision of their types, and attention by flash, memory-efficient or
    plain kernels, without cuDNN's.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which some containers set, would have float32 products (LoRA of experts
    on GPUs, float32 models) rounded to TF32. Where cuDNN's are the first choice (H100 and later), one may
    compute the forward and another the recomputation under grad; routers then choose other experts, which
    ends the run. And each length that cuDNN has not seen costs 25 to 35 ms.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_cudnn_sdp(False)


def whole_pages(size: int) -> Tensor:
    """Bytes of host memory to page-lock, uint8 [size]: in pages that no other allocation shares."""
    pages = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.uint8)[:size]


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [n, k] b [k, m] of one type, accumulated and returned in float32; or of as many of both, [B, ...]."""
    return _driver.product(a, b)


def aligned(size: int) -> int:
    """Bytes up to the next place for a tensor in a block of several: CUDA's own allocations begin at such."""
    return -(-size // 256) * 256


class PageLock:
    """Registers mappings of this process with CUDA (`cudaHostRegister`), each once: the GPU copies straight
    out of them and into them.

    Args:
        runtime: what `torch.cuda.cudart()` returns; None = that, at first use.
        remedy: what a user does about a limit of locked memory that is too low.

    Registering makes the pages resident, so a segment then takes all of its memory. Each process registers
    its own mapping of the same pages.
    """

    def __init__(self, runtime: Any = None, remedy: str = "raise it, or set rule.transport=ray") -> None:
        self._runtime = runtime
        self._remedy = remedy
        self._registered: dict[int, int] = {}  # address -> bytes

    def register(self, address: int, size: int) -> None:
        """Page-lock a mapping; again for the same one, does nothing.

        Raises:
            UserError: CUDA refuses (a limit of locked memory, say).
        """
        if size == 0 or address in self._registered:
            return
        if code := int(self._cuda().cudaHostRegister(address, size, _PORTABLE)):
            raise UserError(
                "CUDA cannot page-lock host memory",
                observed=f"cudaError {code} for {size} bytes, after {self.bytes} bytes",
                remedy=f"the limit of locked memory (ulimit -l) may be too low: {self._remedy}",
            )
        self._registered[address] = size

    def unregister(self, address: int) -> None:
        """Undo `register`, if it was; before the mapping goes away, and with no copy under way."""
        if self._registered.pop(address, None) is None:
            return
        if code := int(self._cuda().cudaHostUnregister(address)):
            raise RuntimeError(f"CUDA cannot unlock pages: cudaError {code}")

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister(address)

    @property
    def bytes(self) -> int:
        return sum(self._registered.values())

    def _cuda(self) -> Any:
        if self._runtime is None:
            self._runtime = torch.cuda.cudart()
        return self._runtime
