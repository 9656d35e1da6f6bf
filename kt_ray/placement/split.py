"""Which stage holds which layers, and which actor holds which experts. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kt_ray.config.schema import RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError

Named = str | tuple[str, ...] | None  # a stage's device as rule.layers has it: one, one per replica, or none


class LayerSplit(NamedTuple):
    """Per stage: its half-open range of layers, and its device where the rule names one (else None)."""

    ranges: tuple[tuple[int, int], ...]
    devices: tuple[Named, ...]


def split_experts(num_experts: int, n_actors: int) -> tuple[tuple[int, ...], ...]:
    """Global expert ids of each actor: contiguous runs whose lengths differ by one at most.

    Contiguous, because fused checkpoints and the adapter file store experts one after another, so an
    actor reads and writes one byte range per layer. The same split holds for every MoE layer, and
    loader and dispatcher both call this function.
    """
    if num_experts < 1 or n_actors < 1:
        raise ValueError("num_experts and n_actors must be at least 1")
    if n_actors > num_experts:
        raise UserError(
            "there are more expert actors than experts",
            where="rule.experts.sockets",
            observed=n_actors,
            required=f"at most {num_experts}",
            remedy=f"set rule.experts.sockets={num_experts} or less",
        )
    edges = [num_experts * i // n_actors for i in range(n_actors + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges))


def split_layers(
    dims: ModelDims,
    rule: RuleConfig,
    n_stages: int,
    balance: Callable[[], tuple[tuple[int, int], ...]],
) -> LayerSplit:
    """Divide the decoder layers among `n_stages` pipeline stages as `rule.layers` says.

    Args:
        balance: the ranges where it says nothing.

    Raises:
        UserError: more stages than layers, a wrong sum, gaps, overlaps, or patterns that do not give
            `n_stages` contiguous runs of layers.
    """
    if n_stages > dims.num_layers:
        raise UserError(
            "there are more pipeline stages than layers",
            where="rule.stages",
            observed=n_stages,
            required=f"at most {dims.num_layers} (the model's layers)",
            remedy=f"set rule.stages={dims.num_layers} or less",
        )
    entries = rule.layers
    if not entries:
        return LayerSplit(balance(), (None,) * n_stages)
    if all(isinstance(entry, Mapping) and "layers" not in entry for entry in entries):
        return _patterns(dims, entries, n_stages)
    if len(entries) != n_stages:
        raise _fault(
            f"rule.layers has {len(entries)} entries for {n_stages} stages",
            entries,
            f"{n_stages} entries, one per stage",
            f"set rule.stages={len(entries)}, or rule.layers=null for a balanced split",
        )
    if all(isinstance(entry, int) and not isinstance(entry, bool) for entry in entries):
        return LayerSplit(_counts(dims, entries), (None,) * n_stages)
    if all(isinstance(entry, Mapping) for entry in entries):
        ranges = _ranges(dims, [entry.get("layers") for entry in entries])
        return LayerSplit(ranges, tuple(_device(entry) for entry in entries))
    return LayerSplit(_ranges(dims, entries), (None,) * n_stages)


def _counts(dims: ModelDims, counts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    if min(counts) < 1 or sum(counts) != dims.num_layers:
        raise _fault(
            "the counts in rule.layers do not add up to the model's layers",
            f"{list(counts)}, sum {sum(counts)}",
            f"counts of at least 1 with the sum {dims.num_layers}",
            "correct the counts, or set rule.layers=null for a balanced split",
        )
    stops = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple((stop - count, stop) for stop, count in zip(stops, counts, strict=True))


def _ranges(dims: ModelDims, entries: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    expected = 0
    for entry in entries:
        match = re.fullmatch(r"\s*(\d+)\s*-\s*(\d+)\s*", str(entry))
        if not match:
            raise _fault(
                "an entry of rule.layers is neither a count, a range nor a pattern",
                repr(entry),
                "all entries counts (16), or inclusive ranges ('0-15'), or {match, device}",
                "write rule.layers=['0-15','16-30'], or set rule.layers=null for a balanced split",
            )
        first, last = int(match[1]), int(match[2])
        if first != expected or last < first:
            problem = (
                "overlap" if first < expected else "leave a gap" if first > expected else "run backwards"
            )
            raise _fault(
                f"the ranges in rule.layers {problem}",
                entry,
                f"a range that begins with layer {expected}",
                "give every layer to exactly one stage, in order",
            )
        ranges.append((first, last + 1))
        expected = last + 1
    if expected != dims.num_layers:
        raise _fault(
            "the ranges in rule.layers do not end with the model's last layer",
            entries[-1],
            f"an end at layer {dims.num_layers - 1}",
            "correct the last range, or set rule.layers=null for a balanced split",
        )
    return tuple(ranges)


def _patterns(dims: ModelDims, entries: Sequence[Mapping[str, Any]], n_stages: int) -> LayerSplit:
    """Patterns in the reference system's style: the first that matches a module's name gives its device."""
    rules = [(_compiled(entry), _device(entry)) for entry in entries]
    devices: list[Named] = []
    for layer in range(dims.num_layers):
        found: dict[Named, str] = {}
        for name in _module_names(dims, layer):
            device = next((device for pattern, device in rules if pattern.search(name)), None)
            if device is not None:
                found.setdefault(device, name)
        if not found:
            raise _fault(
                f"no pattern in rule.layers matches layer {layer}",
                f"model.layers.{layer}.self_attn, ...",
                "a device for every layer",
                "add a last entry {match: '^model\\.layers\\.', device: ...} that takes what is left",
            )
        if len(found) > 1:
            raise _fault(
                f"the patterns in rule.layers divide layer {layer} between devices",
                ", ".join(f"{name} on {_text(device)}" for device, name in found.items()),
                "one device per layer (attention workers hold whole layers)",
                "end the patterns after the layer number, as in '^model\\.layers\\.([0-9])\\.'",
            )
        devices.append(next(iter(found)))
    starts = [i for i in range(dims.num_layers) if i == 0 or devices[i] != devices[i - 1]]
    order = [devices[i] for i in starts]
    if len(set(order)) != len(order) != n_stages:
        raise _fault(
            "the patterns in rule.layers give a device separate runs of layers",
            ", ".join(f"{_text(d)} from layer {i}" for d, i in zip(order, starts, strict=True)),
            "one contiguous run of layers per device",
            "reorder the patterns so that each device holds consecutive layers, or let one worker per run "
            f"share the device with rule.stages={len(order)}",
        )
    if len(order) != n_stages:
        raise _fault(
            f"the patterns in rule.layers use {len(order)} devices for {n_stages} stages",
            ", ".join(_text(device) for device in order),
            f"{n_stages} devices",
            f"set rule.stages={len(order)}",
        )
    stops = [*starts[1:], dims.num_layers]
    return LayerSplit(tuple(zip(starts, stops, strict=True)), tuple(order))


def _module_names(dims: ModelDims, layer: int) -> list[str]:
    """Names that a pattern may match: the layer, its norms and its modules."""
    prefix = f"model.layers.{layer}"
    modules = [module for module, _, _ in dims.lora_in_out[layer]]
    return [
        f"{prefix}.{m}" for m in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm", *modules)
    ]


def _device(entry: Mapping[str, Any]) -> Named:
    """The device that an entry names: one, or one per replica."""
    device = entry.get("device")
    return tuple(map(str, device)) if isinstance(device, list | tuple) else device


def _text(device: Named) -> str:
    return device if isinstance(device, str) else "[" + ", ".join(device or ()) + "]"


def _compiled(entry: Mapping[str, Any]) -> re.Pattern[str]:
    match = entry.get("match")
    if not isinstance(match, str) or not isinstance(entry.get("device"), str | list | tuple):
        raise _fault(
            "a pattern in rule.layers is incomplete", dict(entry), "the keys match (a regex) and device",
            "write {match: '^model\\.layers\\.', device: 'cuda:0'}",
        )  # fmt: skip
    try:
        return re.compile(match)
    except re.error as error:
        raise _fault(
            "a pattern in rule.layers is not a valid regular expression", f"{match!r}: {error}",
            "a Python regular expression", "correct the pattern",
        ) from None  # fmt: skip


def _fault(what: str, observed: object, required: object, remedy: str) -> UserError:
    return UserError(what, where="rule.layers", observed=observed, required=required, remedy=remedy)
