"""Bytes that a layer of released size needs on a GPU: measured there, or counted without one.

Without one, tensors are on torch's meta device: they have shapes and storages, but no memory, and nothing
is computed. `Allocations` counts the storages that are alive. What kt_ray and torch do on a GPU only is done
here as well: `on_a_gpu` lets meta tensors pass for a GPU's, and stands in for torch's fused kernels, with the
memory that they take:

    flash attention   forward keeps q, k, v, the output and a float32 per head and query. Backward has the
                      three gradients, float32 sums of that of q, and a float32 per head and query; where
                      heads share keys, gradients of keys and values for every head first (pytorch,
                      aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd)
    norm              keeps its input and a float32 per row
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.checkpoint.non_experts import materialize_buffers
from kt_ray.config.schema import LoraConfig
from kt_ray.gpu import Driver
from kt_ray.model import fused_norms
from kt_ray.model.build import StageModel, build_on_meta
from kt_ray.model.clock import Clock
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.head_ranges import HeadRanges
from kt_ray.model.known_outputs import KnownOutputs
from kt_ray.model.lora import AdapterSwitch, inject_lora, resolve_targets
from kt_ray.model.range_loop import RangeLoop
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.state import GroupState, MicroState
from kt_ray.native import dropout_hash
from kt_ray.placement.order import Op

META = torch.device("meta")


class Allocations(TorchDispatchMode):
    """Counts bytes of storages that come into being inside, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self._note(value)
        return out

    def _note(self, tensor: Tensor) -> None:
        """A tensor lives, whose memory this may not have seen."""
        storage = tensor.untyped_storage()
        if tensor.device != META or storage in self._known:
            return
        self._known.add(storage)
        if self._paused:
            return
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.live -= size

    def restart(self) -> None:
        """The peak is that of what comes now."""
        self.peak = self.live

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside is in other memory."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1


class _Flash(torch.autograd.Function):
    """What torch's flash kernels allocate. q [b, h, n, d], k and v [b, k, m, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, heads, n, d = q.shape
        out = q.new_empty(b, n, heads, d).transpose(1, 2)
        statistics = q.new_empty(b, heads, n, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, statistics = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        sums = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(statistics)]
        if k.shape[1] < q.shape[1]:
            sums += [k.new_empty(q.shape[0], q.shape[1], *k.shape[2:]) for _ in range(2)]
        return dq, dk, dv


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    assert query.shape[-1] == key.shape[-1] == value.shape[-1] and query.dtype == torch.bfloat16
    assert enable_gqa or query.shape[1] == key.shape[1]
    if attn_mask is None:
        assert is_causal
        return _Flash.apply(query, key, value)
    # The memory-efficient kernel takes a window's mask, of blocks in the place of rows.
    assert attn_mask.shape[-1] <= 1 << 12 and not enable_gqa
    return _Flash.apply(query, key, value)


class _Norm(torch.autograd.Function):
    """What torch's fused norm allocates, of frozen weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return torch.empty_like(ctx.saved_tensors[0])


def _first_of_fmix(h: Tensor) -> Tensor:
    """The first step of `dropout_hash._fmix_` alone: the others take no more memory, but much time."""
    h ^= (h >> 16) & 0xFFFF
    return h


@contextmanager
def on_a_gpu(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, meta tensors take the ways of a GPU's."""
    with patch.context() as inside:
        inside.setattr(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device == META))
        inside.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
        inside.setattr(F, "scaled_dot_product_attention", _attention)
        inside.setattr(F, "rms_norm", lambda x, *more: _Norm.apply(x))
        inside.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
        inside.setattr(dropout_hash, "_fmix_", _first_of_fmix)
        yield


class _Copies(Driver):
    """Copies to and from the host, of which neither has memory."""

    def queues(self, device: torch.device) -> bool:
        return False

    def upload(self, tensor: Tensor, device: torch.device, *, copy: bool = False) -> Tensor:
        return torch.empty_like(tensor, device=device)

    def copy_out(self, to: Tensor, source: Tensor) -> None:
        assert to.shape == source.shape and to.dtype == source.dtype


class _Measured:
    """`Allocations` of a device with memory; a CPU's are not measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    @property
    def peak(self) -> int:
        whole = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else 0
        return whole - self._before

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        yield


@dataclass
class _Host:
    """Host memory: of what waits, and of the experts that answer."""

    counted: Allocations | _Measured
    device: torch.device
    tokens: int
    hidden: int
    top_k: int

    def clear(self, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> None: ...

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with self.counted.elsewhere():
            if self.device == META:
                return torch.empty(tuple(shape), dtype=dtype, device=META)
            return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self.device.type == "cuda")

    alloc = room

    def after(self, ready: Any) -> None: ...

    def submit_forward(self, *args: Any) -> None: ...

    submit_backward = submit_forward

    def join_forward(self, layer: int, group: int) -> Tensor:
        return self.room((self.tokens, self.hidden), torch.float32)

    def join_backward(self, layer: int, group: int) -> tuple[Tensor, Tensor]:
        return self.join_forward(layer, group), self.room((self.tokens, self.top_k), torch.float32)


def layer_peaks(
    patch: pytest.MonkeyPatch,
    path: Path,
    config: dict[str, Any],
    ranges: Callable[[torch.nn.Module], HeadRanges],
    unused: Sequence[str],
    *,
    layers: int,
    tokens: int,
    count: int,
    lora: LoraConfig,
    device: str = "meta",
) -> dict[tuple[str, int], int]:
    """(operation, layer) -> bytes on the device at its worst, weights and adapters left out.

    Args:
        path: where to write config.json. config: of a model of so many layers, in bfloat16.
        ranges: of a layer. unused: names in a layer of modules whose outputs nobody needs in backward.
        tokens: of each of two micro-batches of one row. count: ranges of heads.
        device: a GPU, where random weights are computed with; "meta" = stand in for one.
    """
    from kt_ray import gpu

    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    spec = StageSpec(str(path), (0, layers), layers, device=device, dtype="bfloat16", lora=lora)
    model = build_on_meta(spec)
    for layer in model.layers.values():
        for experts in [m for m in layer.modules() if hasattr(m, "_kt_stage")]:
            for name in list(experts._parameters):
                experts.register_parameter(name, None)
    at = model.device
    if at == META:
        _stand_in_for_norms(model.layers.values())
    else:
        _random_weights(model.causal, at)
        if at.type == "cuda":
            fused_norms.fuse_norms(model.layers.values())
    model.causal.requires_grad_(False)
    model.causal.eval()
    dropout = DropoutContext()
    names = resolve_targets(lora.target_modules, model.lora_names, lora.layers, experts=lora.experts)
    parameters = inject_lora(
        {model.names[i]: layer for i, layer in model.layers.items()}, names, lora, 0, dropout, at
    )
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    if at != META:
        return _peaks(model, ranges, unused, dropout, tokens, count)
    before = gpu.driver()
    gpu.use_driver(_Copies())
    try:
        with on_a_gpu(patch):
            return _peaks(model, ranges, unused, dropout, tokens, count)
    finally:
        gpu.use_driver(before)


def _stand_in_for_norms(layers: Iterable[torch.nn.Module]) -> None:
    """All with one weight are RMS norms, which is not to be tried without numbers."""

    def instead(module: Any, epsilon: float) -> Callable[..., Tensor]:
        written_out = module.forward
        return lambda *args, **kwargs: fused_norms._forward(module, written_out, epsilon, *args, **kwargs)

    for layer in layers:
        for module in layer.modules():
            epsilon = fused_norms._epsilon(module)
            if epsilon is not None:
                module.forward = instead(module, epsilon)


@torch.no_grad()
def _random_weights(causal: Any, device: torch.device) -> None:
    for module in causal.modules():
        for name, weight in module.named_parameters(recurse=False):
            values = torch.empty_like(weight, device=device)
            values = values.fill_(1) if weight.dim() == 1 else values.normal_(std=0.02)
            module.register_parameter(name, torch.nn.Parameter(values))
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.zeros_like(buffer, device=device))
    materialize_buffers(causal, device)


def _peaks(
    model: StageModel,
    ranges: Callable[[torch.nn.Module], HeadRanges],
    unused: Sequence[str],
    dropout: DropoutContext,
    tokens: int,
    count: int,
) -> dict[tuple[str, int], int]:
    ids = np.zeros((1, tokens), dtype=np.int64)
    batch = MicroBatch(ids, ids, np.array([tokens]), np.array([0]))
    device = model.device
    micro = MicroState.create(batch, device)
    counted = Allocations() if device == META else _Measured(device)
    host = _Host(counted, device, 2 * tokens, model.hidden_size, model.top_k)

    def note(index: int, hidden: Tensor) -> Tensor:
        if index == 0:
            with counted.elsewhere():
                micro.embedded = torch.empty_like(hidden) if device == META else hidden.cpu()
        return hidden[:, :1] if index == len(model.layers) - 1 else hidden

    peaks: dict[tuple[str, int], int] = {}
    with counted.elsewhere(), counted:
        for tensor in [*model.causal.parameters(), *model.causal.buffers()]:
            tensor.view(-1)
    with counted:
        counted.restart()
        inputs = {"input_ids": torch.zeros(1, tokens, dtype=torch.int64, device=device)}
        micro.calls = model.capture.record(inputs, None, note)
        peaks["begin", 0] = counted.peak
    known = {
        index: KnownOutputs(tuple(m for name, m in layer.named_modules() if name in unused))
        for index, layer in model.layers.items()
    }
    pass_spec = PassSpec(1, 0, "train", 0, (((batch,),),), tokens)
    with counted:
        scales, clock = dict.fromkeys(model.experts, 1.0), Clock(torch.device("cpu"))
        # Two micro-batches: nothing of the first may be there when the second is differentiated.
        group = GroupState([micro, dataclasses.replace(micro)])
        own = (model, scales, AdapterSwitch(model.layers, {}), dropout, None, pass_spec, [group])
        loop = RangeLoop(
            *(*own, host, None, clock),
            known=known,
            ranges={index: ranges(layer) for index, layer in model.layers.items()},
            count=count,
            retain=False,
            host=host,
        )
        state = loop.groups[0]

        def run(kind: str, layer: int) -> None:
            counted.restart()
            loop.run(Op(kind, layer, 0))
            peaks[kind, layer] = counted.peak

        run("embed", 0)
        for layer in model.layers:
            run("forward", layer)
            if layer in model.experts:
                run("join", layer)
        state.grads = [host.room(h.shape, h.dtype) for h in state.hidden or []]
        for layer in reversed(model.layers):
            run("recompute", layer)
            run("backward", layer)
    return peaks
