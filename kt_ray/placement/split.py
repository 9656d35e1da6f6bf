"""Which stage holds which layers, and which actor holds which experts. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from kt_ray.config.schema import RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.placement.render import id_ranges

Named = str | tuple[str, ...] | None  # a stage's device as rule.layers has it: one, one per replica, or none


class LayerSplit(NamedTuple):
    """Per stage: its half-open range of layers, and its device where the rule names one (else None)."""

    ranges: tuple[tuple[int, int], ...]
    devices: tuple[Named, ...]


def split_experts(num_experts: int, n_actors: int, hosts: int = 1) -> tuple[tuple[int, ...], ...]:
    """Global expert ids of each actor: contiguous runs whose lengths differ by one at most. hosts: so many
    have as many of the actors each.

    Contiguous, because fused checkpoints and the adapter file store experts one after another, so an
    actor reads and writes one byte range per layer. The same split holds for every MoE layer, and
    loader and dispatcher both call this function.
    """
    if num_experts < 1 or n_actors < 1:
        raise ValueError("num_experts and n_actors must be at least 1")
    if n_actors > num_experts:
        most = num_experts // hosts  # of a host, as the key counts them
        raise UserError(
            "there are more expert actors than experts",
            where="rule.experts.sockets",
            observed=f"{n_actors} on {hosts} hosts" if hosts > 1 else n_actors,
            required=f"at most {num_experts}",
            remedy=f"set rule.experts.sockets={most} or less" if most else "set rule.experts.sockets=auto",
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

    What is wrong with rule.layers whatever the model is, kt_ray.config.checks has refused.

    Args:
        balance: the ranges where it says nothing.

    Raises:
        UserError: more stages than layers, another number of layers than the model's, or patterns that do
            not give `n_stages` contiguous runs of layers.
    """
    most = len(dims.cuts) + 1
    if n_stages > most:
        places = " at which a stage may begin" if dims.handed else ""
        raise UserError(
            f"there are more pipeline stages than layers{places}",
            where="rule.stages",
            observed=n_stages,
            required=f"at most {most} (some layers take what earlier ones computed, in one stage with them)"
            if dims.handed
            else f"at most {most} (the model's layers)",
            remedy=f"set rule.stages={most} or less",
        )
    if not rule.layers:
        return LayerSplit(balance(), (None,) * n_stages)
    split = _as_written(dims, rule.layers, n_stages)
    for start, _ in split.ranges:
        for result in dims.handed:
            if result.crosses(start):
                raise _fault(
                    "rule.layers parts layers from what they take",
                    f"a stage that begins at layer {start}; layers up to {result.last} take what layer "
                    f"{result.layer} computed",
                    f"stages that begin at layers among {id_ranges(dims.cuts)}",
                    "correct the entries, or set rule.layers=null for a balanced split",
                )
    return split


def _as_written(dims: ModelDims, entries: Sequence[Any], n_stages: int) -> LayerSplit:
    if isinstance(entries[0], Mapping) and "layers" not in entries[0]:
        return _patterns(dims, entries, n_stages)
    if isinstance(entries[0], int):
        stops = list(accumulate(entries))
        if stops[-1] != dims.num_layers:
            raise _fault(
                "the counts in rule.layers do not add up to the model's layers",
                f"{list(entries)}, sum {stops[-1]}",
                f"counts of at least 1 with the sum {dims.num_layers}",
                "correct the counts, or set rule.layers=null for a balanced split",
            )
        return LayerSplit(tuple(pairwise((0, *stops))), (None,) * n_stages)
    devices = tuple(_device(entry) if isinstance(entry, Mapping) else None for entry in entries)
    texts = [str(entry["layers"] if isinstance(entry, Mapping) else entry) for entry in entries]
    ends = [text.split("-") for text in texts]
    ranges = tuple((int(first), int(last) + 1) for first, last in ends)
    if ranges[-1][1] != dims.num_layers:
        raise _fault(
            "the ranges in rule.layers do not end with the model's last layer",
            texts[-1],
            f"an end at layer {dims.num_layers - 1}",
            "correct the last range, or set rule.layers=null for a balanced split",
        )
    return LayerSplit(ranges, devices)


def _patterns(dims: ModelDims, entries: Sequence[Mapping[str, Any]], n_stages: int) -> LayerSplit:
    """Patterns in the reference system's style: the first that matches a module's name gives its device."""
    rules = [(re.compile(entry["match"]), _device(entry)) for entry in entries]
    devices: list[Named] = []
    for layer in range(dims.num_layers):
        names: dict[Named, str] = {}  # by device a module that it gets
        for name in _module_names(dims, layer):
            device = next((device for pattern, device in rules if pattern.search(name)), None)
            if device is not None:
                names.setdefault(device, name)
        if not names:
            raise _fault(
                f"no pattern in rule.layers matches layer {layer}",
                f"model.layers.{layer}.self_attn, ...",
                "a device for every layer",
                "add a last entry {match: '^model\\.layers\\.', device: ...} that takes what is left",
            )
        if len(names) > 1:
            raise _fault(
                f"the patterns in rule.layers divide layer {layer} between devices",
                ", ".join(f"{name} on {_text(device)}" for device, name in names.items()),
                "one device per layer (attention workers hold whole layers)",
                "end the patterns after the layer number, as in '^model\\.layers\\.([0-9])\\.'",
            )
        devices.append(next(iter(names)))
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


def _fault(what: str, observed: object, required: object, remedy: str) -> UserError:
    return UserError(what, where="rule.layers", observed=observed, required=required, remedy=remedy)
