"""The lane's device: queues of work on it, transfers between it and the host, page-locked weights.

On a GPU one stream copies to it, one from it, and one computes; they wait for each other by events, and the
host waits for the last event of a call, never for the whole device. On the CPU, the stand-in, everything
happens at once and the same calls do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kt_ray.errors import UserError
from kt_ray.gpu import choose_kernels, driver
from kt_ray.gpu_turns import paused
from kt_ray.pulse import beat

FLOAT8_FROM = (8, 9)  # compute capability
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of the process


class LaneDevice:
    """A device with queues that copy to it, compute, and copy back. Used by one thread.

    Args:
        name: "cpu" or "cuda:i", as this process numbers its GPUs. float8: whether it is to multiply FP8.

    Raises:
        UserError: this process sees no such GPU, or one that has no FP8 products.
    """

    def __init__(self, name: str, *, float8: bool = False) -> None:
        self.device = torch.device(name)
        self._copying: Any = None
        self._computing: Any = None
        self._returning: Any = None
        if self.device.type == "cuda":
            choose_kernels()
            have = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (self.device.index or 0) >= have:
                raise UserError(
                    "the lane's GPU is not there",
                    where="rule.experts.lane_device, in an expert actor",
                    observed=f"{have} GPUs visible to torch {torch.__version__}",
                    required=name,
                    remedy="install a torch with CUDA on every host that has expert actors, or set "
                    "rule.experts.lane_device=cpu",
                )
            capability = torch.cuda.get_device_capability(self.device) if float8 else FLOAT8_FROM
            if capability < FLOAT8_FROM:
                raise UserError(
                    "the lane's GPU has no FP8 products",
                    where="rule.experts.gpu_products=float8",
                    observed=f"{torch.cuda.get_device_name(self.device)}, compute capability "
                    f"{capability[0]}.{capability[1]}",
                    required="8.9 or higher (RTX 4090, L40, H100 and later)",
                    remedy="set rule.experts.gpu_products=bfloat16",
                )
        self._driver = driver()
        self._queues = self._driver.queues(self.device)
        if self._queues:
            self._copying = self._driver.stream(self.device, "experts")
            self._computing = self._driver.stream(self.device, "lane")
            self._returning = self._driver.stream(self.device, "kept")

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the copying queue."""
        return self._driver.using(self._copying) if self._queues else contextlib.nullcontext()

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the computing queue."""
        return self._driver.using(self._computing) if self._queues else contextlib.nullcontext()

    def returning(self) -> contextlib.AbstractContextManager[Any]:
        """Work inside goes to the queue that copies to the host."""
        return self._driver.using(self._returning) if self._queues else contextlib.nullcontext()

    def returned(self) -> Any:
        """A mark after what was given to the returning queue so far."""
        return self._returning.record_event() if self._queues else None

    def return_after(self, mark: Any) -> None:
        """The returning queue goes on once `mark` is reached."""
        if self._queues and mark is not None:
            self._returning.wait_event(mark)

    def copied(self) -> Any:
        """A mark after what was given to the copying queue so far."""
        return self._copying.record_event() if self._queues else None

    def computed(self) -> Any:
        """A mark after what was given to the computing queue so far."""
        return self._computing.record_event() if self._queues else None

    def copy_after(self, mark: Any) -> None:
        """The copying queue goes on once `mark` is reached."""
        if self._queues and mark is not None:
            self._copying.wait_event(mark)

    def compute_after(self, mark: Any) -> None:
        """The computing queue goes on once `mark` is reached."""
        if self._queues and mark is not None:
            self._computing.wait_event(mark)

    def finish(self) -> None:
        """The host waits for the computing queue (for one event of it)."""
        if self._queues:
            with self.computing():
                mark = self._driver.mark(self.device)
            with paused():
                mark.synchronize()

    def drain(self) -> None:
        """The host waits for all queues: copies ahead outlive a call, and after an error all may."""
        if self._queues:
            with paused():
                for queue in (self._copying, self._computing, self._returning):
                    queue.synchronize()

    def upload(self, tensor: Tensor) -> Tensor:
        """A host tensor on the device, on the current queue; page-locked ones do not hold the host up."""
        return self._driver.upload(tensor, self.device) if self._queues else tensor

    def numbers(self, values: Sequence[int]) -> Tensor:
        """int64 on the device, on the current queue, which the host does not wait for."""
        return self.upload(torch.tensor(values, dtype=torch.int64, pin_memory=self.is_cuda))

    def download(self, tensor: Tensor) -> Tensor:
        """A host tensor for what is on the device: on a GPU page-locked, and complete after `finish`."""
        if not self._queues:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.is_cuda)
        self._driver.copy_out(host, tensor)
        return host

    def reads(self, tensor: Tensor) -> None:
        """The computing queue reads what another stream allocated: only then its memory is free again."""
        if self._queues:
            self._driver.used_by(self._computing, tensor)

    def copy_out(self, to: Tensor, source: Tensor) -> None:
        """Copy what is on the device to host memory, on the current queue."""
        self._driver.copy_out(to, source)

    def copy_in(self, to: Tensor, source: Tensor) -> None:
        """Copy a host tensor to the device, on the current queue."""
        self._driver.copy_in(to, source)


class PinnedWeights:
    """Memory that the GPU reads directly: registered with CUDA, given back at the end.

    Registration may be refused (a limit on locked memory, a kernel that does not allow it); the rest then
    stays pageable, which copies more slowly and holds the lane's thread up meanwhile, but computes the same.
    """

    def __init__(self, device: LaneDevice) -> None:
        self._device = device
        self._held: dict[int, int] = {}  # address -> bytes
        self.refusal: str | None = None

    @property
    def bytes(self) -> int:
        return sum(self._held.values())

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Register the storages of these host tensors; nothing on the CPU, nothing after a refusal."""
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        for address, size in storages.items():
            self._register(address, size)

    def add_parts(self, parts: Iterable[Tensor]) -> None:
        """Register the bytes of these tensors, and not the rest of what they are views of."""
        for part in parts:
            self._register(part.data_ptr(), part.nbytes)

    def _register(self, address: int, size: int) -> None:
        if not self._device.is_cuda or self.refusal is not None or not size or address in self._held:
            return
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if error:
            self.refusal = f"cudaHostRegister of {size} bytes: error {error}"
            self._forget_error()
        else:
            self._held[address] = size
        beat()  # it takes its time: the kernel walks all pages

    def remove(self, tensor: Tensor) -> None:
        """Give back a tensor's storage, or all parts of it, before its memory goes and with no copy under
        way."""
        storage = tensor.untyped_storage()
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for address in [held for held in self._held if first <= held < last]:
            del self._held[address]
            torch.cuda.cudart().cudaHostUnregister(address)

    def _forget_error(self) -> None:
        """CUDA remembers a failed call until somebody asks; a launch that asks would fail for it."""
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device.device)

    def release(self) -> None:
        for address in self._held:
            torch.cuda.cudart().cudaHostUnregister(address)
        self._held.clear()
