"""Attention of a decoder layer in three parts, where rows do not fit on the device (rule.activations=ranges).

    entries   linear modules of attention's own input: q_a and kv_a of latent attention, else q, k, v
    heads     what lies between: the module as it is, on a range of heads at a time
    exit      its last projection, of all heads' outputs

Entries, exit and the rest of the layer act on tokens one by one and run on ranges of tokens; heads see the
whole row. The layer's own code computes each part. For a part that is not wanted, its modules hand known
values over: attention in the layer, or entries and exit in attention. Of what lies between (latent
attention's q_b and kv_b, sinks) a range of heads takes its part of the rows.

Which layers can do that is found by trying (`find_ranges`): outputs and gradients have to be those of the
whole layer.

Shapes: b rows of s positions, E_i outputs of entry i, O inputs of the exit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.errors import UserError
from kt_ray.model.family import first_line
from kt_ray.model.layer_calls import LayerContext, RecordedCall
from kt_ray.model.lora_linear import LoraLinear, input_gradient
from kt_ray.model.streamed_weights import bring

# Relative to the norm: rounding differs, other heads would be off by about 1.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}


SHORTER_ROWS = "lower data.max_length: mode=plan with rule.activations=host names a length that fits"


class _Reached(Exception):
    """Leaves a layer at its attention."""


@dataclass(frozen=True)
class Call:
    """How a layer calls its attention, but for the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool


@dataclass(frozen=True)
class HeadRanges:
    """One layer's attention.

    entries: linear modules of attention's input, with whether their outputs are heads'. inner: those
    between, whose outputs are. own: names of attention's own parameters that are heads'. outputs: how many
    things attention returns; 0 = a tensor.
    """

    attention: nn.Module
    entries: tuple[tuple[nn.Module, bool], ...]
    inner: tuple[nn.Module, ...]
    own: tuple[str, ...]
    exit: nn.Module
    outputs: int

    @property
    def width(self) -> int:
        """O."""
        return int(_linear(self.exit).in_features)

    def enter(self, run: Callable[[], Any]) -> tuple[list[Tensor], Call]:
        """What the entries give [..., E_i] when the layer runs, and how attention was called."""
        hidden, call = _called(self.attention, run)
        return [module(hidden) for module, _ in self.entries], call

    @contextmanager
    def left(self, heads: Tensor) -> Iterator[None]:
        """Inside, attention gives the exit's output of these heads' outputs [..., O]."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            out = self.exit(heads)
            return (out, *[None] * (self.outputs - 1)) if self.outputs else out

        with _instead(self.attention, forward):
            yield

    def attend(self, call: Call, entered: Sequence[Tensor], number: int, count: int) -> Tensor:
        """[b, s, O / count], the outputs of one of `count` ranges of heads.

        Args:
            entered: of the entries; `part` of those that are heads'.
        """
        b, s = entered[0].shape[:2]
        # Of the input only the shape is looked at: the entries have it.
        hidden = entered[0].new_zeros(()).expand(b, s, _linear(self.entries[0][0]).in_features)
        found: list[Tensor] = []

        def leave(x: Tensor) -> Tensor:
            found.append(x)
            return x

        with ExitStack() as stack:
            for (module, _), values in zip(self.entries, entered, strict=True):
                stack.enter_context(_instead(module, partial(_given, values)))
            for module in self.inner:
                stack.enter_context(_narrowed(module, number, count))
            for name in self.own:
                stack.enter_context(_narrowed_parameter(self.attention, name, number, count))
            stack.enter_context(_instead(self.exit, leave))
            if call.by_name:
                self.attention(hidden_states=hidden, **call.kwargs)
            else:
                self.attention(hidden, *call.args, **call.kwargs)
        (out,) = found
        return out

    def part(self, entered: Sequence[Tensor], number: int, count: int) -> list[Tensor]:
        """What a range of heads takes of the entries' outputs: views."""
        return [
            values[..., _rows(values.shape[-1], number, count)] if of_heads else values
            for (_, of_heads), values in zip(self.entries, entered, strict=True)
        ]


def _given(values: Tensor, x: Tensor) -> Tensor:
    return values


def _rows(size: int, number: int, count: int) -> slice:
    return slice(size * number // count, size * (number + 1) // count)


def _linear(module: nn.Module) -> Any:
    """The linear module that an adapter may be around."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


@contextmanager
def _instead(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the module calls `forward`."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _called(attention: nn.Module, run: Callable[[], Any]) -> tuple[Tensor, Call]:
    """Attention's input when `run` runs its layer, which is left there, and the rest of its call."""
    found: list[tuple[Tensor, Call]] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        found.append((hidden, Call(args[1:], kwargs, not args)))
        raise _Reached

    with _instead(attention, forward):
        try:
            run()
        except _Reached:
            return found[0]
    raise RuntimeError(f"the layer did not call its {type(attention).__name__}")


@contextmanager
def _narrowed(module: nn.Module, number: int, count: int) -> Iterator[None]:
    """Inside, a linear module with or without an adapter gives a range of its outputs."""
    base = _linear(module)
    rows = _rows(base.out_features, number, count)
    with ExitStack() as stack:
        stack.enter_context(_instead(base, partial(_Rows.apply, base, rows)))
        if isinstance(module, LoraLinear):
            module.rows = rows
            stack.callback(lambda: setattr(module, "rows", slice(None)))
        if isinstance(module, BaseTunerLayer):
            b: nn.Module
            for b in module.lora_B.values():  # type: ignore[operator]
                stack.enter_context(_instead(b, partial(_times_rows, b, rows)))
        yield


def _times_rows(module: Any, rows: slice, x: Tensor) -> Tensor:
    return nn.functional.linear(x, module.weight[rows], None if module.bias is None else module.bias[rows])


@contextmanager
def _narrowed_parameter(module: nn.Module, name: str, number: int, count: int) -> Iterator[None]:
    whole = module._parameters[name]
    assert whole is not None
    module._parameters[name] = whole[_rows(whole.shape[0], number, count)]  # type: ignore[assignment]
    try:
        yield
    finally:
        module._parameters[name] = whole


class _Rows(torch.autograd.Function):
    """x W[rows]ᵀ + b[rows] of a frozen linear module. Keeps no weight: that of a streamed layer moves."""

    @staticmethod
    def forward(ctx: Any, base: Any, rows: slice, x: Tensor) -> Tensor:
        ctx.base, ctx.rows = base, rows
        weight = (base.dequantize(x.dtype) if isinstance(base, QuantizedLinear) else base.weight)[rows]
        return nn.functional.linear(x, weight, None if base.bias is None else base.bias[rows])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (dy,) = grads
        dx = input_gradient(ctx.base, dy.reshape(-1, dy.shape[-1]), ctx.rows)
        return None, None, dx.view(*dy.shape[:-1], dx.shape[-1])


# ------------------------------------------------------------------ which layers can do that


def find_ranges(
    layers: Mapping[int, nn.Module],
    calls: Mapping[int, RecordedCall],
    contexts: Mapping[int, LayerContext],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    count: int,
    model_type: str,
) -> dict[int, HeadRanges]:
    """Layer -> how its attention goes by `count` ranges of heads, found on one layer of each kind.

    Args:
        calls, contexts, shape, dtype: as `known_outputs.find_all` has them.

    Raises:
        UserError: a layer that cannot, by name.
    """
    found: dict[int, HeadRanges] = {}
    kinds: dict[object, Named] = {}
    for index, layer in layers.items():
        sizes = [(n, m.in_features, m.out_features) for n, m in layer.named_modules() if _is_linear(m)]
        kind = (type(layer), index in contexts, *sizes)
        try:
            if kind not in kinds:
                kinds[kind] = _Trial(layer, calls[index], contexts.get(index), shape, dtype, count).find()
            found[index] = kinds[kind].of(layer)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            raise UserError(
                f"{model_type} cannot train with rule.activations=ranges",
                where=f"layer {index}",
                observed=first_line(error),
                required="attention that computes heads apart, in a layer that else acts on single tokens",
                remedy=SHORTER_ROWS,
            ) from error
    return found


class _Unfit(ValueError):
    """What a layer does that ranges cannot."""


class Named(NamedTuple):
    """`HeadRanges` by names within a layer, so that they are those of every layer of its kind."""

    attention: str
    entries: tuple[tuple[str, bool], ...]
    inner: tuple[str, ...]
    own: tuple[str, ...]
    exit: str
    outputs: int

    def of(self, layer: nn.Module) -> HeadRanges:
        attention = layer.get_submodule(self.attention)
        inner = [attention.get_submodule(name) for name in self.inner]
        entries = tuple((attention.get_submodule(name), of_heads) for name, of_heads in self.entries)
        return HeadRanges(
            attention, entries, tuple(inner), self.own, attention.get_submodule(self.exit), self.outputs
        )


def _is_linear(module: nn.Module) -> bool:
    return isinstance(_linear(module), nn.Linear)


class _Whole(NamedTuple):
    """Attention computed at once. entered: of each entry, a leaf. heads: input of the exit."""

    entered: list[Tensor]
    heads: Tensor
    named: Named
    call: Call


class _Trial:
    """One layer on random numbers, whole and by ranges."""

    def __init__(
        self,
        layer: nn.Module,
        call: RecordedCall,
        context: LayerContext | None,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        count: int,
    ) -> None:
        self.layer, self.call, self.context, self.count, self.dtype = layer, call, context, count, dtype
        bring(layer)
        name = next((n for n in ("self_attn", "attention", "attn") if hasattr(layer, n)), None)
        if name is None:
            raise _Unfit(f"{type(layer).__name__} without attention")
        self.name, self.attention = name, layer.get_submodule(name)
        if len(shape) != 3:
            raise _Unfit("hidden states of several streams")
        self.generator = torch.Generator().manual_seed(0)
        self.device = next(layer.parameters()).device
        self.h = self._normal(shape)

    def _normal(self, shape: Sequence[int]) -> Tensor:
        values = torch.randn(tuple(shape), generator=self.generator, dtype=torch.float32)
        return values.to(self.device, self.dtype)

    def find(self) -> Named:
        whole = self._whole()
        kind = type(self.attention).__name__
        grad = self._normal(whole.heads.shape)
        inner = [self.attention.get_submodule(name) for name in whole.named.inner]
        trained = [p for module in inner for p in module.parameters() if p.requires_grad]
        expected = torch.autograd.grad(
            whole.heads, [*whole.entered, *trained], grad, allow_unused=True, retain_graph=True
        )
        reason: Exception = _Unfit("other heads' values change what they give")
        for of_heads in itertools.product((True, False), repeat=len(whole.entered)):
            entries = [(name, cut) for (name, _), cut in zip(whole.named.entries, of_heads, strict=True)]
            named = whole.named._replace(entries=tuple(entries))
            try:
                if self._agrees(named.of(self.layer), whole, grad, trained, expected):
                    break
            except (RuntimeError, ValueError, TypeError) as error:  # a part where the whole is needed
                reason = error
        else:
            raise _Unfit(f"{kind}: {reason}")
        self._check_tokens(named.of(self.layer), whole)
        return named

    def _whole(self) -> _Whole:
        """Attention at once, and which of its modules do what."""
        with torch.no_grad(), self._experts([]):
            hidden, call = _called(self.attention, lambda: self.call.run(self.layer, self.h))
        modules = {
            name: module
            for name, module in self.attention.named_modules()
            if _is_linear(module) and not _inside_adapter(self.attention, name)
        }
        entered: dict[str, Tensor] = {}
        between: list[str] = []
        last: list[tuple[str, Tensor, Tensor]] = []

        def note(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            if args[0] is hidden:
                entered[name] = output = output.detach().requires_grad_()
            else:
                between.append(name)
                last[:] = [(name, args[0], output)]
            return output

        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for name, module in modules.items():
                stack.enter_context(module.register_forward_hook(partial(note, name)))
            if call.by_name:
                out = self.attention(hidden_states=hidden, **call.kwargs)
            else:
                out = self.attention(hidden, *call.args, **call.kwargs)
        outputs = len(out) if isinstance(out, tuple) else 0
        first = out[0] if outputs else out
        if (
            not entered
            or not last
            or last[0][2] is not first
            or (outputs and any(o is not None for o in out[1:]))
        ):
            raise _Unfit(f"{type(self.attention).__name__} is not linear modules at both ends")
        own = [name for name, p in self.attention.named_parameters(recurse=False) if p.dim() == 1]
        entries = tuple((name, False) for name in entered)
        named = Named(self.name, entries, tuple(between[:-1]), tuple(own), last[0][0], outputs)
        return _Whole(list(entered.values()), last[0][1], named, call)

    def _agrees(
        self,
        ranges: HeadRanges,
        whole: _Whole,
        grad: Tensor,
        trained: Sequence[Tensor],
        expected: Sequence[Any],
    ) -> bool:
        """Whether ranges of heads give what all give, and their gradients."""
        sizes = [_linear(m).out_features for m in (*(m for m, cut in ranges.entries if cut), *ranges.inner)]
        sizes += [getattr(ranges.attention, name).shape[0] for name in ranges.own]
        if any(size % self.count for size in sizes):
            raise _Unfit(f"{self.count} ranges do not divide {sizes}")
        leaves = [t.detach().requires_grad_() for t in whole.entered]
        with torch.enable_grad():
            outs = [
                ranges.attend(whole.call, ranges.part(leaves, number, self.count), number, self.count)
                for number in range(self.count)
            ]
            heads = torch.cat(outs, -1)
        if heads.shape != whole.heads.shape or not self._close(heads, whole.heads):
            return False
        found = torch.autograd.grad(heads, [*leaves, *trained], grad, allow_unused=True)
        return all(self._close(a, b) for a, b in zip(found, expected, strict=True))

    def _check_tokens(self, ranges: HeadRanges, whole: _Whole) -> None:
        """Raises _Unfit where the rest of the layer does not act on tokens one by one."""
        inputs: list[Tensor] = []
        rows = slice(1, 3)
        with torch.no_grad(), self._experts(inputs):
            out = self.call.run(self.layer, self.h)
            part = self.h.flatten(0, 1)[None, rows]
            entered, _ = ranges.enter(lambda: self.call.run(self.layer, part))
            with ranges.left(whole.heads.detach().flatten(0, 1)[None, rows]):
                left = self.call.run(self.layer, part)
        pairs = [(left, out), *zip(entered, whole.entered, strict=True)]
        if inputs:
            pairs.append((inputs[1][None], inputs[0][None]))
        for one, every in pairs:
            if not self._close(one.flatten(0, 1), every.flatten(0, 1)[rows]):
                raise _Unfit(f"{type(self.layer).__name__}: other tokens change what it gives to one")

    @contextmanager
    def _experts(self, inputs: list[Tensor]) -> Iterator[None]:
        """Experts note their inputs and answer zeros."""

        def answer(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            inputs.append(hidden.reshape(-1, hidden.shape[-1]))
            return torch.zeros_like(hidden)

        if self.context is None:
            yield
            return
        with self.context.handled_by(answer):
            yield

    def _close(self, found: Tensor | None, expected: Tensor | None) -> bool:
        if found is None or expected is None:
            return found is expected
        found, expected = found.detach().double(), expected.detach().double()
        return float((found - expected).norm()) <= _TOLERANCE[self.dtype] * float(expected.norm())


def _inside_adapter(root: nn.Module, name: str) -> bool:
    """Whether a module is part of one with an adapter."""
    above = name.split(".")[:-1]
    return any(
        isinstance(root.get_submodule(".".join(above[:n])), BaseTunerLayer) for n in range(1, len(above) + 1)
    )
