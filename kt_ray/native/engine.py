"""The expert engine: forward and backward of one layer's local experts, in C++.

    engine = Engine()
    weights = ExpertWeights(gate, up, down)            # [E, I, H], [E, I, H], [E, H, I]
    y, saved = engine.forward(weights, x, ids, w)      # x [T, H], ids and w [T, K]
    dx, dw = engine.backward(weights, saved, dy)

Legend: T tokens, K experts per token, E local experts, H hidden size, I intermediate size. docs/numerics.md
has the mathematics, the roundings and the tolerances; reference.py says the same in torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from kt_ray.native import _native
from kt_ray.native.isa import select_isa
from kt_ray.native.tensors import (
    FORMATS,
    LORA_FIELDS,
    PLAIN,
    DropoutSpec,
    ExpertLora,
    ExpertWeights,
    gate_limit,
    projection_arg,
)

Lora = ExpertLora | Sequence[ExpertLora] | None
LoraGrads = ExpertLora | Sequence[ExpertLora | None] | None
SaveMode = bool | Literal["recompute", "int8"]

INTEGER_FORMATS = ("int8", "int4")  # what `int8_products` takes

_KEEP = {False: 0, "recompute": 1, True: 2, "int8": 3}


def _arg(name: str, tensor: Tensor) -> _native.TensorArg:
    """What the binding needs of a tensor; it checks and names the argument on failure."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name}: must be a tensor, got {type(tensor).__name__}")
    usable = tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    address = tensor.data_ptr() if usable else 0
    return name, address, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), usable


def _optional_arg(name: str, tensor: Tensor | None) -> _native.TensorArg | None:
    return None if tensor is None else _arg(name, tensor)


def _result(name: str, out: Tensor | None, shape: Sequence[int]) -> Tensor:
    """The caller's memory for a result, or new memory."""
    if out is None:
        return torch.empty(tuple(shape), dtype=torch.float32, device="cpu")
    if out.dtype != torch.float32 or tuple(out.shape) != tuple(shape) or not out.is_contiguous():
        raise ValueError(
            f"{name}: {str(out.dtype).removeprefix('torch.')} {list(out.shape)}, "
            f"required contiguous float32 {list(shape)}"
        )
    return out


def _check_apart(results: Mapping[str, Tensor], weights: ExpertWeights, **read: Tensor) -> None:
    """The caller's memory for results holds neither each other's nor tokens or weights, which are read
    meanwhile."""
    stored = {name: p if isinstance(p, Tensor) else p.data for name, p in weights.projections().items()}
    spans: dict[str, tuple[int, int]] = {}
    for name, tensor in {**read, **stored, **results}.items():
        start, stop = _span(tensor)
        for other, (first, end) in spans.items() if name in results else ():
            if max(start, first) < min(stop, end):
                raise ValueError(f"{name}: shares memory with {other}, required memory of its own")
        spans[name] = start, stop


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of a tensor's first byte and after its last; none of what the binding refuses."""
    if tensor.layout != torch.strided:
        return 0, 0
    start, size = tensor.data_ptr(), tensor.nbytes
    if size and not tensor.is_contiguous():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        size = (1 + sum((n - 1) * stride for n, stride in steps)) * tensor.element_size()
    return start, start + size


def _check_integers(weights: ExpertWeights) -> None:
    """`int8_products` takes no other weights."""
    first = weights.formats[0]
    for name, projection in weights.projections().items():
        if isinstance(projection, Tensor):
            seen = f"a {PLAIN[projection.dtype]} tensor"
        elif projection.format not in INTEGER_FORMATS:
            seen = f"format {projection.format}"
        elif projection.format != first:
            seen = f"format {projection.format} beside {first}"
        elif projection.format == "int8" and projection.scale_block != (1, projection.shape[2]):
            seen = f"format int8 with a scale per {projection.scale_block[1]} columns"
        else:
            continue
        raise ValueError(
            f"{name}: {seen}, required format int4, or int8 with one scale per output channel, the same for "
            f"all projections, by an engine with int8_products=True; quantise them so, or build it without"
        )


def _weights_arg(weights: ExpertWeights) -> _native.WeightsArg:
    return (
        None if weights.gate is None else projection_arg("gate", weights.gate),
        projection_arg("up", weights.up),
        projection_arg("down", weights.down),
        weights.layer,
        list(weights.expert_ids),
        (
            weights.activation,
            weights.alpha,
            gate_limit(weights),
            math.inf if weights.limit is None else weights.limit,
        ),
        (
            _optional_arg("gate_bias", weights.gate_bias),
            _optional_arg("up_bias", weights.up_bias),
            _optional_arg("down_bias", weights.down_bias),
        ),
    )


def _adapter_arg(prefix: str, adapter: ExpertLora, gated: bool) -> _native.LoraArg:
    for name in ("gate_a", "gate_b"):
        if (getattr(adapter, name) is not None) != gated:
            seen = "None, required a tensor" if gated else "given, required None"
            raise ValueError(f"{prefix}.{name}: {seen}: the experts have {'a' if gated else 'no'} gate")
    gate_a, gate_b = (_optional_arg(f"{prefix}.{n}", getattr(adapter, n)) for n in LORA_FIELDS[:2])
    up_a, up_b, down_a, down_b = (_arg(f"{prefix}.{n}", getattr(adapter, n)) for n in LORA_FIELDS[2:])
    return gate_a, gate_b, up_a, up_b, down_a, down_b, adapter.scale


def _lora_args(name: str, lora: LoraGrads, gated: bool) -> list[Any]:
    """One per adapter; None for gradients that are not wanted."""
    if lora is None:
        return []
    if isinstance(lora, ExpertLora):
        return [_adapter_arg(name, lora, gated)]
    return [None if a is None else _adapter_arg(f"{name}[{i}]", a, gated) for i, a in enumerate(lora)]


class Engine:
    """Computes expert layers on threads of its own.

    Results do not depend on the number of threads, bit for bit. One call runs at a time; concurrent
    callers wait for each other. The GIL is released during the work.

    Args:
        isa: an instruction set or "auto", see `select_isa`.
        threads: number of threads; None = one per CPU of `cpus`.
        cpus: CPUs the threads are pinned to, in this order, but for those outside this process's affinity
            mask; None = the whole mask. Where threads are fewer, the first ones serve: one CPU of each core
            before their siblings, whose numbers may be neighbours.
        pinned: False = the kernel moves the threads among all of `cpus`.
        tokens_per_row: tokens of a call for each row that an expert gets, were routing even: all experts of a
            layer over those that a token chooses; 0 = the experts of a call's weights over its slots. It
            decides which calls go by rows, see `row_tokens`.
        int8_products: multiply in int8, with activations and gradients quantised: row by row for weights in
            format "int8" with one scale per output channel (W8A8), in groups of 32 in the forward of
            weights in format "int4" (W4A8). Less exact, see docs/numerics.md; takes no other weights.

    Attributes:
        isa: the instruction set in use.
        isa_reason: why it was chosen.
        threads: number of threads.
        cpus: the CPUs they are pinned to, in turn, or move among.
        pinned: as given.
        int8_products: as given.
        compute: the type it multiplies in.
        formats: weight formats it computes.

    Raises:
        ValueError: an unavailable instruction set, no thread, or no usable CPU.
    """

    def __init__(
        self,
        isa: str = "auto",
        threads: int | None = None,
        cpus: Sequence[int] | None = None,
        *,
        pinned: bool = True,
        int8_products: bool = False,
        tokens_per_row: float = 0.0,
    ) -> None:
        self.isa, self.isa_reason = select_isa(isa)
        allowed = os.sched_getaffinity(0)
        self.cpus = tuple(sorted(allowed) if cpus is None else [cpu for cpu in cpus if cpu in allowed])
        if not self.cpus:
            raise ValueError(f"cpus: none of {list(cpus or ())} is in the affinity mask {sorted(allowed)}")
        self.threads = len(self.cpus) if threads is None else threads
        if self.threads < 1:
            raise ValueError(f"threads: {self.threads}, required at least 1")
        self.pinned, self.int8_products = pinned, int8_products
        to = list(self.cpus) if pinned else []
        os.sched_setaffinity(0, self.cpus)  # of this thread alone; those that it starts inherit it
        try:
            self._engine = _native.Engine(self.isa, self.threads, to, int8_products, tokens_per_row)
        finally:
            os.sched_setaffinity(0, allowed)

    @property
    def formats(self) -> tuple[str, ...]:
        """Weight formats this engine computes: all, on every instruction set, but for `int8_products`."""
        return INTEGER_FORMATS if self.int8_products else FORMATS

    @property
    def compute(self) -> Literal["f32", "bf16", "int8"]:
        """The type that the frozen products multiply in, but for float32 weights: theirs is float32."""
        if self.int8_products:
            return "int8"
        return "bf16" if self.isa in ("avx512_bf16", "amx") else "f32"

    @property
    def calls(self) -> int:
        """Forward and backward calls computed so far."""
        return self._engine.calls

    @property
    def busy_seconds(self) -> float:
        """CPU time of engine threads inside kernels so far, summed over threads."""
        return self._engine.busy_seconds

    @property
    def scratch_bytes(self) -> int:
        """Memory the engine holds between calls, for reuse."""
        return self._engine.scratch_bytes

    def row_tokens(self, weights: ExpertWeights, slots: int) -> int:
        """Up to so many tokens of `slots` each, a forward with these weights that keeps nothing goes by rows
        of the weights instead of panels: with another order of additions (docs/numerics.md). 0 = none."""
        return self._engine.row_tokens(_weights_arg(weights), slots)

    def forward(
        self,
        weights: ExpertWeights,
        x: Tensor,
        ids: Tensor,
        weights_TK: Tensor,
        *,
        lora: Lora = None,
        adapter_of_token: Tensor | None = None,
        dropout: DropoutSpec | None = None,
        keys: Tensor | None = None,
        save: SaveMode = True,
        check_finite: bool = False,
        out: Tensor | None = None,
        tokens_alone: int | None = None,
    ) -> tuple[Tensor, _native.Saved | None]:
        """The weighted sum of the chosen experts of every token.

        Args:
            weights: the local experts.
            x: [T, H] float32 or bfloat16.
            ids: [T, K] int32 or int64 local expert numbers; E means no expert; one expert may stand
                twice in a row.
            weights_TK: [T, K] float32 router weights.
            lora: one adapter or several.
            adapter_of_token: [T] int64, the adapter of each token, -1 for none; required with several,
                by default 0 with one.
            dropout: LoRA dropout; needs `keys`.
            keys: [T] int64, sample * 2**32 + position of each token.
            save: True keeps gate and up for backward, and x where there are adapters; "int8" the same with
                gate and up in blocks of int8, from which y is computed, too; "recompute" keeps x and
                computes the rest again in backward; False keeps nothing. True and "recompute" give the same
                bits; False may add products of few tokens in another order (`row_tokens`).
            check_finite: look for NaN and infinity in x and y.
            out: contiguous float32 [T, H] to write y to, in memory of its own; None = new memory.
            tokens_alone: for a call that joins several, tokens of the largest of them: its order of additions
                is theirs, as if each were alone; None = T.

        Returns:
            (y [T, H] float32, what backward needs or None).

        Raises:
            ValueError: an argument of the wrong type, shape or range, named first in the message; with
                `check_finite` a value that is not finite, with its layer and expert.
            MemoryError: no memory for activations or scratch; names the layer, and for scratch the expert.
        """
        if save not in _KEEP:
            raise ValueError(f"save: {save!r}, required True, 'int8', 'recompute' or False")
        if self.int8_products:
            _check_integers(weights)
        x_arg, ids_arg, router_arg = _arg("x", x), _arg("ids", ids), _arg("weights_TK", weights_TK)
        y_TH = _result("out", out, x.shape)
        if out is not None:
            _check_apart({"out": out}, weights, x=x, ids=ids, weights_TK=weights_TK)
        saved = self._engine.forward(
            _weights_arg(weights),
            x_arg,
            ids_arg,
            router_arg,
            _lora_args("lora", lora, weights.gate is not None),
            _optional_arg("adapter_of_token", adapter_of_token),
            None if dropout is None else (dropout.p, dropout.seed, dropout.step),
            _optional_arg("keys", keys),
            _KEEP[save],
            _arg("y", y_TH),
            check_finite,
            tokens_alone,
        )
        return y_TH, saved

    def backward(
        self,
        weights: ExpertWeights,
        saved: _native.Saved | None,
        dy: Tensor,
        *,
        lora: Lora = None,
        lora_grads: LoraGrads = None,
        input_grad: bool = True,
        check_finite: bool = False,
        out: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of `forward`.

        Args:
            weights: as in the forward.
            saved: from the forward; stays usable.
            dy: [T, H] float32.
            lora: as in the forward.
            lora_grads: gradients are added to these; an adapter whose entry is None gets none.
            input_grad: whether dx is wanted. Without it the products with gate and up are saved; all else has
                the same bits.
            check_finite: look for NaN and infinity in dy, dx and the adapters' gradients.
            out: contiguous float32 to write the results to, in memory of their own; None = new memory.

        Returns:
            (dx [T, H] float32, or [T, 0] if it is not wanted; gradient of weights_TK [T, K] float32, 0 where
            there is no expert).

        Raises:
            ValueError, MemoryError: as `forward`.
        """
        if saved is None:
            raise ValueError("saved: None; the forward must run with save=True, 'int8' or 'recompute'")
        if self.int8_products:
            _check_integers(weights)
        weights_arg, dy_arg = _weights_arg(weights), _arg("dy", dy)
        dx_out, dw_out = (None, None) if out is None else out
        dx_TH = _result("out[0]", dx_out, (saved.tokens, weights.H if input_grad else 0))
        dw_TK = _result("out[1]", dw_out, (saved.tokens, saved.slots))
        if out is not None:
            _check_apart({"out[0]": dx_TH, "out[1]": dw_TK}, weights, dy=dy)
        self._engine.backward(
            weights_arg,
            saved,
            dy_arg,
            _lora_args("lora", lora, weights.gate is not None),
            _lora_args("lora_grads", lora_grads, weights.gate is not None),
            _arg("dx", dx_TH) if input_grad else None,
            _arg("dw", dw_TK),
            check_finite,
        )
        return dx_TH, dw_TK

    def join(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        """Copy parts into `out`, one after another along the rows, on all threads.

        torch's own threads, waiting for the next copy, would spin on the engine's cores.

        Args:
            parts: contiguous [T_i, ...] of one type, float32, bfloat16, int32 or int64.
            out: contiguous [sum of T_i, ...] of that type; or bfloat16, to which float32 is rounded (to
                nearest, ties to even).

        Returns:
            out.
        """
        named = [_arg(f"parts[{i}]", part) for i, part in enumerate(parts)]
        self._engine.join(named, _arg("out", out))
        return out

    def add_rows(self, parts: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
        """out[index] += values, one part after the other, on all threads.

        Args:
            parts: (index, values): int64 [U], none twice, and contiguous float32 [U, ...].
            out: contiguous float32 [T, ...].
        """
        named = [
            (_arg(f"parts[{i}].index", index), _arg(f"parts[{i}].values", values))
            for i, (index, values) in enumerate(parts)
        ]
        self._engine.add_rows(named, _arg("out", out))

    def squared_norm(self, tensors: Sequence[Tensor]) -> float:
        """Sum of squares of all elements in float64, on all threads; the same bits for any number of them.

        Args:
            tensors: contiguous float32, any shapes.
        """
        named = [_arg(f"tensors[{i}]", tensor) for i, tensor in enumerate(tensors)]
        return math.fsum(self._engine.squares(named))

    def close(self) -> None:
        """End the threads and free the memory; the engine is of no use afterwards. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
