"""What a family's layers do, found by trying and never assumed: on random numbers, before the first pass.

- `check_family`: how layers pass their hidden state, and that they pass nothing else but what
  handed_results.py knows.
- `probe_layer`: is a layer's output affine in the experts' output y? Where h_out = h_partial + c·y with a
  constant c, a recomputed layer does not need y, and the experts' backward can start before it. A norm after
  the experts, or hyper-connections, make it non-affine.
- `padding_moves`: do rows change with the padding beside them? Selections among ties and windows of keys do,
  and without a mask states that decay from the end of the row.
- `check_packing`: do layers keep packed documents apart? transformers builds block-diagonal masks from
  position ids that restart. A layer that carries a state from token to token (linear attention, Mamba), or
  groups neighbouring tokens (compressed keys), has no use for the mask and would mix documents without a
  word.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from kt_ray.errors import UserError
from kt_ray.model.family import first_line
from kt_ray.model.handed_results import Hands
from kt_ray.model.layer_calls import (
    LayerCallCapture,
    LayerContext,
    RecordedCall,
    Result,
    is_place,
    unsupported,
)
from kt_ray.model.streamed_weights import bring

# Of float32 layers at the probe's magnitudes; a norm or a gate is off by orders more.
_AFFINE_TOLERANCE = 1e-5
_DOCUMENTS = (5, 9, 3)  # tokens of each: no multiples of each other, of 4 or of 8
_ROWS = (43, 30, 5)  # tokens of padded rows
_CHOSEN = 4
_PACKING_TOLERANCE = 1e-4  # relative, of float32 layers; documents that see each other are off by far more


def check_family(capture: LayerCallCapture, first: bool, last: bool, hidden_size: int, device: str) -> None:
    """Learn how layers pass their hidden state; refuse a family whose layers pass more than that.

    Raises:
        UserError: layers depend on each other by more than h, or (more than one stage) on the tokens.
    """
    model_type = capture.causal.config.model_type
    beside = getattr(capture.base.config, "hc_count", 1)  # Qwen4-Exp's streams
    b, s = 1, 5

    def inputs(token: int) -> dict[str, Tensor]:
        return {"input_ids": torch.full((b, s), token, dtype=torch.int64, device=device)}

    shapes: set[tuple[int, ...]] = set()

    def noisy(index: int, hidden: Tensor) -> Tensor:
        if not isinstance(hidden, Tensor):
            raise TypeError("the hidden state is not a tensor")
        shapes.add(tuple(hidden.shape))
        return hidden + torch.full_like(hidden, 1.0 + index)

    refusal: Exception | None = None
    for capture.outputs in (0, 1, 2):
        shapes.clear()
        try:
            with_noise = capture.record(inputs(0), None, noisy)
        except (TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            refusal = refusal or error
            continue
        state = next(iter(shapes))
        widths = (hidden_size, beside * hidden_size)
        fits = state[:2] == (b, s) and len(state) in (3, 4) and state[-1] in widths
        if fits and len(shapes) == 1 and (not last or capture.output_shape == (b, s, hidden_size)):
            capture.side_by_side = state[-1] != hidden_size
            capture.state_shape = (beside, hidden_size) if capture.side_by_side else state[2:]
            break
    else:
        reason = first_line(refusal) if refusal else sorted(shapes)
        raise unsupported(model_type, f"layers whose input is not one hidden state ({reason})")
    if capture.outputs == 2:
        capture.extra = torch.zeros(1, device=device)
        calls = capture.record(inputs(0), None)
        named = [item for call in calls.values() for item in call.kwargs.items()]
        capture.carried = next((name for name, value in named if value is capture.extra), "")
        for index, call in calls.items():
            if any(value is capture.extra for value in call.args):
                raise unsupported(model_type, f"layer {index} receives what an earlier layer computed")
        capture.extra = None
    plain_calls = capture.record(inputs(0), None)
    for index, call in plain_calls.items():
        odd = _odd(call)
        if odd:
            raise unsupported(model_type, f"layer {index} receives {odd}")
        if not _same(call, with_noise[index]):
            raise unsupported(model_type, f"layer {index} receives what an earlier layer computed")
    if not (first and last):
        other = capture.record(inputs(1), None)
        for index, call in plain_calls.items():
            if not _same(call, other[index], _ids):
                raise unsupported(
                    model_type, f"layer {index} receives a tensor made from the tokens", "more than one stage"
                )


def probe_layer(
    layer: nn.Module,
    call: RecordedCall,
    context: LayerContext,
    shape: tuple[int, ...],
    constants: tuple[float, ...] = (),
    seed: int = 0,
) -> float | None:
    """c of h_out = h_partial + c·y of a decoder layer, or None when there is no such constant.

    Args:
        shape: (b, s, H), or (b, s, streams, H) of hyper-connections, which are never affine.
        constants: numbers c may equal exactly (a family's residual multiplier); 1 always is among them.

    Raises:
        UserError: the layer does not call its experts exactly once.
    """
    layer, call = _in_float(layer), _float_call(call)
    device = next(layer.parameters()).device
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float32) * scale).to(device)

    if len(shape) > 3:  # y goes to several streams by gates computed from h
        _run_with(layer, call, context, normal(1.0), torch.zeros(*shape[:2], shape[-1], device=device))
        return None
    estimates: list[float] = []
    for scale_h, scale_y in ((1.0, 1.0), (0.3, 5.0), (3.0, 0.5)):
        h, y = normal(scale_h), normal(scale_y)
        partial = _run_with(layer, call, context, h, torch.zeros_like(h))
        full = _run_with(layer, call, context, h, y)
        delta = (full - partial).double()
        c = float((delta * y.double()).sum() / y.double().square().sum())
        residual = float((delta - c * y.double()).norm())
        # rounding of the two outputs, not of their difference, bounds what can be asked
        size = float(full.double().norm() + partial.double().norm() + y.double().norm())
        if not residual <= _AFFINE_TOLERANCE * size:
            return None
        estimates.append(c)
    # the largest y relative to h gives the best estimate
    c = estimates[1]
    if any(abs(other - c) > 20 * _AFFINE_TOLERANCE * max(1.0, abs(c)) for other in estimates):
        return None
    nearest = min((1.0, *constants), key=lambda value: abs(value - c))
    return nearest if abs(nearest - c) <= _AFFINE_TOLERANCE * max(1.0, abs(nearest)) else c


@torch.no_grad()
def _run_with(layer: nn.Module, call: RecordedCall, context: LayerContext, h: Tensor, y: Tensor) -> Tensor:
    calls = context.calls
    with context.handled_by(lambda hidden, ids, weights: y.reshape(hidden.shape)):
        out = call.run(layer, h)
    if context.calls != calls + 1:
        raise UserError(
            "a layer with routed experts does not call them exactly once",
            where=f"layer {context.layer}",
            observed=f"{context.calls - calls} calls",
            required="1",
            remedy="choose another model family",
        )
    return out


def check_packing(
    capture: LayerCallCapture, layers: Mapping[int, nn.Module], hands: Hands, device: torch.device
) -> None:
    """Run every layer on three documents packed and alone, and compare. The caller answers for the experts.

    Raises:
        UserError: a layer whose output for a document depends on its neighbours in the row.
    """
    total = sum(_DOCUMENTS)
    ids = torch.zeros(1, total, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(n) for n in _DOCUMENTS])[None].to(device)
    packed = capture.record({"input_ids": ids, "position_ids": positions}, None)
    starts = [sum(_DOCUMENTS[:i]) for i in range(len(_DOCUMENTS))]
    alone = [capture.record({"input_ids": ids[:, :n]}, None) for n in _DOCUMENTS]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((1, total, *capture.state_shape), generator=generator, dtype=torch.float32).to(
        device
    )
    parts = [hidden[:, start : start + n] for start, n in zip(starts, _DOCUMENTS, strict=True)]
    packed = hands.given(layers, packed, hidden, run=_in_float_run(layers, hidden))
    alone = [
        hands.given(layers, calls, part, run=_in_float_run(layers, part))
        for calls, part in zip(alone, parts, strict=True)
    ]
    for index, layer in layers.items():
        layer = _in_float(layer)
        with torch.no_grad():
            together = _float_call(packed[index]).run(layer, hidden)
            apart = [
                _float_call(calls[index]).run(layer, part) for calls, part in zip(alone, parts, strict=True)
            ]
        expected = torch.cat(apart, dim=1)
        error = float((together - expected).abs().max())
        if not error <= _PACKING_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UserError(
                f"{capture.causal.config.model_type} cannot train packed rows",
                where=f"layer {index}, {_attention_name(layer)}",
                observed=f"a document's output changes by {error:.2g} with its neighbours in the row",
                required="layers that keep documents apart",
                remedy="set data.packing=false (data.group_by_length=true saves padding too)",
            )


def padding_moves(
    capture: LayerCallCapture,
    layers: Mapping[int, nn.Module],
    hands: Hands,
    device: torch.device,
    *,
    masked: bool,
) -> str:
    """Run a layer of each kind on padded rows and on each alone. The caller answers for the experts.

    An index that chooses a few positions breaks ties by the width of the row; compressed keys are made of
    whole windows. An index is made to choose few, as no probe is as long as it chooses.

    Args:
        masked: whether the model is told which positions are padding. It need not be where every position
            looks only back, since padding follows the row.

    Returns:
        The first layer that padding moves, and by how much; "" = none.
    """
    rates = getattr(capture.causal.config.get_text_config(), "compress_rates", None) or {}
    window = max((rate for rate in rates.values() if isinstance(rate, int)), default=0)
    lengths = [n + 2 * window for n in _ROWS]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64, device=device)
    valid = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        valid[row, :length] = 1
    generator = torch.Generator().manual_seed(0)
    shape = (*ids.shape, *capture.state_shape)
    hidden = torch.randn(shape, generator=generator, dtype=torch.float32).to(device)
    padded = capture.record({"input_ids": ids}, valid if masked else None)
    padded = hands.given(layers, padded, hidden, run=_in_float_run(layers, hidden))
    alone = [
        hands.given(
            layers, capture.record({"input_ids": ids[:1, :length]}, None), own, run=_in_float_run(layers, own)
        )
        for row, length in enumerate(lengths)
        for own in (hidden[row : row + 1, :length],)
    ]
    kinds: dict[tuple[object, ...], int] = {}
    for index, layer in layers.items():
        kinds.setdefault((type(layer), *_parts(layer), *_tensors(padded[index])), index)
    for index in kinds.values():
        layer = _in_float(layers[index])
        with _few_chosen(layer), torch.no_grad():
            together = _float_call(padded[index]).run(layer, hidden)
            for row, length in enumerate(lengths):
                own = _float_call(alone[row][index]).run(layer, hidden[row : row + 1, :length])
                error = float((together[row : row + 1, :length] - own).abs().max())
                if not error <= _PACKING_TOLERANCE * max(1.0, float(own.abs().max())):
                    return f"layer {index}, {_attention_name(layer)}, by {error:.2g}"
    return ""


def _in_float_run(
    layers: Mapping[int, nn.Module], hidden: Tensor
) -> Callable[[RecordedCall, int, dict[Result, tuple[Tensor, ...]]], object]:
    """Runs a layer of these on `hidden` in float32, where few positions are chosen."""

    def run(call: RecordedCall, index: int, left: dict[Result, tuple[Tensor, ...]]) -> None:
        layer = _in_float(layers[index])
        with _few_chosen(layer):
            _float_call(call).run(layer, hidden, left)

    return run


def _tensors(call: RecordedCall) -> tuple[int, ...]:
    """The tensors that a layer gets, each by its identity: layers of one kind share their masks."""
    leaves = tree_leaves((call.args, call.kwargs))
    return tuple(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))


def _parts(layer: nn.Module) -> list[type]:
    """Classes of a layer's modules, without routed experts' and projections' own."""
    return sorted({type(module) for module in layer.modules()}, key=lambda kind: kind.__name__)


@contextmanager
def _few_chosen(layer: nn.Module) -> Iterator[None]:
    """Indexers choose `_CHOSEN` positions at the most."""
    modules: list[Any] = [m for m in layer.modules() if isinstance(getattr(m, "index_topk", None), int)]
    changed = [(module, int(module.index_topk)) for module in modules]
    try:
        for module, count in changed:
            module.index_topk = min(_CHOSEN, count)
        yield
    finally:
        for module, count in changed:
            module.index_topk = count


def _in_float(layer: nn.Module) -> nn.Module:
    """The layer, or a float32 copy of one in another type; on the device."""
    bring(layer)
    if all(p.dtype == torch.float32 for p in layer.parameters()):
        return layer
    return copy.deepcopy(layer).float()


def _float_call(call: RecordedCall) -> RecordedCall:
    """The same call with floating tensors in float32."""

    def cast(value: Tensor) -> Tensor:
        return value.float() if value.is_floating_point() else value

    args, kwargs, given = (tree_map_only(Tensor, cast, x) for x in (call.args, call.kwargs, dict(call.given)))
    return replace(call, args=args, kwargs=kwargs, given=given)


def _attention_name(layer: nn.Module) -> str:
    names = ("self_attn", "linear_attn", "mixer", "mamba", "attention")
    return type(next((getattr(layer, name) for name in names if hasattr(layer, name)), layer)).__name__


def _odd(value: Any) -> str:
    """Name of the first argument that a layer could change or that cannot be kept, or ""."""
    if isinstance(value, RecordedCall):
        named = (
            f"{name}: {odd}"
            for name, argument in value.kwargs.items()
            if not is_place(argument) and (odd := _odd(argument))
        )
        return _odd(value.args) or next(named, "")
    if isinstance(value, Tensor | bool | int | float | str | torch.dtype | torch.device) or value is None:
        return ""
    if isinstance(value, Mapping | tuple | list):
        if not value and not isinstance(value, tuple):
            kind = "list" if isinstance(value, list) else "dict"
            return f"an empty {kind} (a place for layers to leave results)"
        return next(filter(None, map(_odd, value.values() if isinstance(value, Mapping) else value)), "")
    return f"a {type(value).__name__}"


def _same(a: Any, b: Any, also: Callable[[Tensor, Tensor], bool] | None = None) -> bool:
    """Whether two calls have equal arguments, or tensors that `also` lets pass."""
    if isinstance(a, RecordedCall) and isinstance(b, RecordedCall):
        a, b = (a.args, a.kwargs), (b.args, b.kwargs)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.shape == b.shape and torch.equal(a, b)) or (also is not None and also(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key], also) for key in a)
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, also) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _ids(a: Tensor, b: Tensor) -> bool:
    """The token ids themselves, of check_family's two inputs: every stage has them."""
    whole = a.dtype == b.dtype == torch.int64
    return whole and bool((a == 0).all()) and bool((b == 1).all())
