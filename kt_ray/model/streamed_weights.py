"""Weights of decoder layers that do not stay on the stage's device (rule.resident_layers).

The frozen matrices of a streamed layer lie in page-locked host memory, one block per layer in the bytes in
which they were loaded, and are copied as a whole into one of a few slots on the device, one layer ahead of
the computation. LoRA, norms and buffers are small and stay on the device. On the CPU, the stand-in, slots
are memory of the process and copies happen at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.gpu import PageLock, aligned, driver, whole_pages
from kt_ray.placement.weight_slots import Filled, WeightSlots


@dataclass
class _Matrices:
    """A layer's streamed tensors and where each lies in the layer's block."""

    tensors: list[Tensor]  # the module's own: what they show is changed
    strides: list[tuple[int, ...]]  # a transposed matrix stays one
    offsets: list[int]  # bytes
    block: Tensor  # uint8, in host memory

    def show(self, block: Tensor) -> None:
        """Let the module's tensors be those of a copy of the block."""
        for tensor, stride, offset in zip(self.tensors, self.strides, self.offsets, strict=True):
            size = tensor.numel() * tensor.element_size()
            flat = block[offset : offset + size].view(tensor.dtype)
            tensor.data = flat.as_strided(tensor.shape, stride, flat.storage_offset())


class StreamedWeights:
    """Host memory and slots of one stage: layers are added while they are loaded, then attached.

    Args:
        streamed: indices of the layers, ascending, at least one.
        count: slots.
        device: of the stage.
        shared: path and name of a file in memory with the blocks of all replicas of this stage, each of which
            writes the same bytes to the same place; None = memory of its own.

    Raises:
        RuntimeError: by `add`, where CUDA refuses to page-lock the host memory.
    """

    def __init__(
        self,
        streamed: Sequence[int],
        count: int,
        device: torch.device,
        shared: tuple[str, str] | None = None,
    ) -> None:
        self.slots, self.device = WeightSlots(streamed, count), device
        self._shared = shared
        self.not_shared = ""  # why not, although it was to be
        self._lock = PageLock(remedy="raise it, or let more layers stay on the GPU (rule.resident_layers)")
        self._layers: dict[int, _Matrices] = {}
        self._memory: list[Tensor] = []
        self._driver = driver()
        queues = self._driver.queues(device)
        self._copying: Any = self._driver.stream(device, "weights") if queues else None
        self._arrived: list[Any] = [None] * count  # per slot the event of its copy
        self.copied_bytes = 0

    def add(self, index: int, layer: nn.Module) -> None:
        """Move a layer's matrices from the CPU into one block of host memory, and all else to the device."""
        matrices: dict[int, Tensor] = {}
        for module in layer.modules():
            own: list[Tensor] = [*module.parameters(recurse=False)]
            if isinstance(module, QuantizedLinear):
                own += module.buffers(recurse=False)
            matrices |= {id(t): t for t in own if t.dim() > 1 and not t.requires_grad and not t.is_meta}
        for tensor in (*layer.parameters(), *layer.buffers()):
            if id(tensor) not in matrices and not tensor.is_meta:
                tensor.data = tensor.data.to(self.device)
        tensors, offsets, size = list(matrices.values()), [], 0
        for tensor in tensors:
            offsets.append(size)
            size += aligned(tensor.numel() * tensor.element_size())
        before = [_dense(tensor.data) for tensor in tensors]
        packed = _Matrices(tensors, [value.stride() for value in before], offsets, self._room(size))
        packed.show(packed.block)
        for tensor, value in zip(tensors, before, strict=True):
            tensor.data.copy_(value)
        if self.device.type == "cuda":
            self._lock.register(packed.block.data_ptr(), size)
        self._layers[index] = packed

    def _room(self, size: int) -> Tensor:
        if self._shared is None:
            return whole_pages(size)
        start = sum(_pages(own.block.numel()) for own in self._layers.values())
        try:
            mapped = _mapped(*self._shared, start, _pages(size))
        except OSError as error:  # the driver is in another container, say
            self.not_shared, self._shared = str(error), None
            return whole_pages(size)
        return torch.frombuffer(mapped, dtype=torch.uint8)[:size]

    def attach(self, layers: Mapping[int, nn.Module]) -> None:
        """Make the slots; from now on a call of a streamed layer brings its weights."""
        assert tuple(self._layers) == self.slots.layers, "every streamed layer was added, in order"
        largest = max(own.block.numel() for own in self._layers.values())
        self._memory = [torch.empty(largest, dtype=torch.uint8, device=self.device) for _ in self._arrived]
        for index in self._layers:
            layers[index]._kt_weights = _Streamed(self, index)  # type: ignore[assignment]
            layers[index].register_forward_pre_hook(layers[index]._kt_weights)  # type: ignore[arg-type]

    @property
    def shared(self) -> bool:
        """Whether other replicas have the same host memory."""
        return self._shared is not None

    @property
    def host_bytes(self) -> int:
        return sum(own.block.numel() for own in self._layers.values())

    @property
    def device_bytes(self) -> int:
        """Of the slots."""
        return sum(slot.numel() for slot in self._memory)

    def facts(self) -> dict[str, int]:
        """For env.json."""
        return {
            "layers": len(self._layers),
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
            "copied_bytes": self.copied_bytes,
        }

    def bring(self, layer: int) -> None:
        """Called before each use of a layer: its weights are on the device for what this stream does next,
        and the next layer's are on their way."""
        filled = self.slots.bring(layer)
        if filled is not None:
            self._copy(filled)
        slot = self.slots.slot_of(layer)
        assert slot is not None
        if self._arrived[slot] is not None:
            self._driver.current(self.device).wait_event(self._arrived[slot])
        following = self.slots.ahead(layer, downwards=torch.is_grad_enabled())
        if following is not None:
            self._copy(following)

    def _copy(self, filled: Filled) -> None:
        if filled.evicted is not None:
            evicted = self._layers[filled.evicted]
            evicted.show(evicted.block)
        own, memory = self._layers[filled.layer], self._memory[filled.slot]
        memory = memory[: own.block.numel()]
        if self._copying is None:
            memory.copy_(own.block)
        else:
            # What used the slot before was given to the device before this.
            self._copying.wait_stream(self._driver.current(self.device))
            with self._driver.using(self._copying):
                self._driver.copy_in(memory, own.block)
            self._arrived[filled.slot] = self._copying.record_event()
        own.show(memory)
        self.copied_bytes += own.block.numel()

    def close(self) -> None:
        """Give the page-lock back, before the memory goes."""
        if self._copying is not None:
            self._copying.synchronize()
        self._lock.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # CUDA may be gone already
            self.close()


def _dense(value: Tensor) -> Tensor:
    """The value in memory without gaps, in the order of dimensions that it has."""
    return torch.empty_like(value, memory_format=torch.preserve_format).copy_(value)


def _mapped(path: str, name: str, start: int, size: int) -> mmap.mmap:
    """Part of the file in memory of that name.

    Raises:
        OSError: there is none, or the path is another file's.
    """
    file = os.open(path, os.O_RDWR)
    try:
        found = os.readlink(f"/proc/self/fd/{file}")
        if not found.startswith(f"/memfd:{name}"):
            raise OSError(f"{path} is {found}, another file")
        os.posix_fallocate(file, start, size)  # never shortens it, whoever comes first
        return mmap.mmap(file, size, offset=start)
    finally:
        os.close(file)


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class _Streamed:
    """What a streamed layer's module knows of its weights: the hook before each of its calls."""

    def __init__(self, weights: StreamedWeights, layer: int) -> None:
        self._weights, self._layer = weights, layer

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self._weights.bring(self._layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Streamed:
        return self  # of a probe's float32 copy of the layer


def bring(layer: nn.Module) -> None:
    """A layer whose weights are looked at, not called: they are on the device now, if they are streamed."""
    streamed = getattr(layer, "_kt_weights", None)
    if streamed is not None:
        streamed(layer, ())
