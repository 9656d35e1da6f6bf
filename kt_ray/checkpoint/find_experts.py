"""Find a checkpoint's routed experts among its parameters, and check them. Legend: see experts.py."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from kt_ray.checkpoint.check_experts import (
    check_bias,
    check_formats,
    check_fused,
    check_hidden,
    check_part,
    expert_bytes_of,
    fault,
    fused_sizes,
    part_shapes,
    two_dimensions,
)
from kt_ray.checkpoint.expert_layout import PROJECTIONS, ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.errors import UserError

_LEAVES = (
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate": "w1", "up": "w3", "down": "w2"},
)
_PER_EXPERT = re.compile(
    r"^(?P<root>.*?)\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bexperts)\.(?P<expert>\d+)"
    r"\.(?P<leaf>gate_proj|up_proj|down_proj|w1|w2|w3)\.(?P<suffix>weight|bias)$"
)
_FUSED = re.compile(
    r"^(?P<root>.*?)\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bexperts)"
    r"\.(?P<leaf>gate_up_proj|up_proj|down_proj|fc1|fc2)(?P<suffix>|\.weight|_bias|\.bias)$"
)
_GRANITE = re.compile(
    r"^(?P<root>.*?)\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bblock_sparse_moe)"
    r"\.(?P<leaf>input_linear|output_linear)(?P<suffix>\.weight)$"
)
# Leaves of fused experts: gate over up, and down. Aria's and Granite's names besides transformers' own.
_FUSED_LEAVES = (("gate_up_proj", "down_proj"), ("fc1", "fc2"), ("input_linear", "output_linear"))
# Anything else below "experts." belongs to a layout or a format that is not known.
_UNKNOWN = re.compile(r"\blayers\.(?P<layer>\d+)\.(?P<moe>.*?\bexperts)\.(\d+\.)?(?P<rest>[\w.]+)$")
# Multi-token prediction, and the speech model of Qwen3-Omni.
_BESIDE = re.compile(r"(^|\.)mtp\b|^talker\.")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class _Found:
    """Names that belong to routed experts. by_layer: layer -> (leaf, expert or None, is a bias) -> name."""

    by_layer: dict[int, dict[tuple[str, int | None, bool], str]]
    prefixes: dict[int, str]
    skipped: tuple[str, ...]


def find_experts(index: CheckpointIndex, interleaved: bool | None, transposed: bool | None) -> ExpertLayout:
    """See `ExpertLayout.detect`."""
    found = _collect(index)
    fused = {expert is None for held in found.by_layer.values() for _, expert, _ in held}
    if len(fused) > 1:
        raise fault(index, "checkpoint mixes fused and per-expert weights", _one_of_each(found), "one layout")
    names = {leaf for held in found.by_layer.values() for leaf, _, _ in held}
    if fused == {True}:
        both = next((pair for pair in _FUSED_LEAVES if names & set(pair)), _FUSED_LEAVES[0])
        gated = both[0] in names or "up_proj" not in names
        parts = {"gate_up": both[0]} if gated else {"up": "up_proj"}
        parts["down"] = both[1]
        leaves = dict(_LEAVES[0])
    else:
        known = next((ls for ls in _LEAVES if names <= set(ls.values())), None)
        if known is None:
            raise fault(
                index,
                "experts have mixed names",
                ", ".join(sorted(names)),
                "gate_proj, up_proj, down_proj or w1, w2, w3",
            )
        parts = {p: leaf for p, leaf in known.items() if p != "gate" or leaf in names}
        leaves = dict(known)
    if "gate" not in parts and "gate_up" not in parts:
        del leaves["gate"]
    count = _count(index, found, fused == {True}, parts)
    _check_complete(index, found, parts, count, fused == {True})
    return _layout(index, found, parts, leaves, count, fused == {True}, interleaved, transposed)


def _collect(index: CheckpointIndex) -> _Found:
    layers = index.text_config.get("num_hidden_layers")
    by_layer: dict[int, dict[tuple[str, int | None, bool], str]] = defaultdict(dict)
    prefixes: dict[int, set[str]] = defaultdict(set)
    skipped: list[str] = []
    unknown: list[str] = []
    for name in index.names:
        if "experts." not in name and "block_sparse_moe." not in name:
            continue
        match = _PER_EXPERT.match(name) or _FUSED.match(name) or _GRANITE.match(name)
        if match is None:
            match = _UNKNOWN.search(name)
            if match is not None and match["rest"] == "e_score_correction_bias":
                continue  # the router's, which Laguna keeps here
            if match is not None and "shared" not in match["moe"]:
                outside = isinstance(layers, int) and int(match["layer"]) >= layers
                (skipped if outside or _BESIDE.search(name) else unknown).append(name)
            continue
        if "shared" in match["moe"]:
            continue
        layer = int(match["layer"])
        if (isinstance(layers, int) and layer >= layers) or _BESIDE.search(match["root"]):
            skipped.append(name)
            continue
        groups = match.groupdict()
        expert = int(groups["expert"]) if groups.get("expert") is not None else None
        by_layer[layer][match["leaf"], expert, match["suffix"].lstrip("._") == "bias"] = name
        # Granite's experts have no level of their own in the file, but one in transformers.
        moe = match["moe"] if match["moe"].endswith("experts") else match["moe"] + ".experts"
        prefixes[layer].add(f"{match['root']}layers.{layer}.{moe}")
    if unknown:
        raise fault(
            index,
            "routed experts hold tensors of an unknown layout or format",
            some(sorted(unknown)),
            "...experts.N.{gate,up,down}_proj, ...experts.N.{w1,w2,w3} or ...experts.{gate_up,down}_proj",
        )
    if not by_layer:
        raise UserError(
            "checkpoint has no routed experts",
            where=str(index.path),
            observed=f"model_type {index.config.get('model_type')!r}, {len(index.tensors)} tensors",
            required="...experts.N.{gate,up,down}_proj.weight, ...experts.N.{w1,w2,w3}.weight "
            "or ...experts.{gate_up,down}_proj",
            remedy="choose a Mixture-of-Experts checkpoint (model.path)",
        )
    for layer, several in sorted(prefixes.items()):
        if len(several) > 1:
            raise UserError(
                "a layer has more than one set of routed experts",
                where=f"{index.path}, layer {layer}",
                observed=", ".join(sorted(several)),
                required="one",
                remedy="choose another model",
            )
    ordered = {layer: by_layer[layer] for layer in sorted(by_layer)}
    return _Found(ordered, {layer: next(iter(prefixes[layer])) for layer in ordered}, tuple(sorted(skipped)))


def _one_of_each(found: _Found) -> str:
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for held in found.by_layer.values():
        for (_, expert, _), name in held.items():
            kinds[expert is None].append(name)
    return " beside ".join(some(sorted(names), 2) for names in kinds.values())


def _count(index: CheckpointIndex, found: _Found, fused: bool, parts: dict[str, str]) -> int:
    """Experts per layer: what the configuration says, else what the tensors hold."""
    for key in _EXPERT_COUNTS:
        value = index.text_config.get(key)
        if isinstance(value, int) and value > 0:
            return value
    if fused:
        first = next(iter(found.by_layer.values()))
        name = first.get((parts["down"], None, False))
        return index.shape(name)[0] if name is not None else 1
    return 1 + max(e for held in found.by_layer.values() for _, e, _ in held if e is not None)


def _check_complete(
    index: CheckpointIndex, found: _Found, parts: dict[str, str], count: int, fused: bool
) -> None:
    """Every layer has every part of every expert, and nothing beyond; biases everywhere or nowhere."""
    biased = any(bias for held in found.by_layer.values() for _, _, bias in held)
    experts: list[int | None] = [None] if fused else list(range(count))
    wanted = {
        (leaf, expert, bias)
        for leaf in parts.values()
        for expert in experts
        for bias in ((False, True) if biased else (False,))
    }
    missing: list[str] = []
    extra: list[str] = []
    for layer, held in found.by_layer.items():
        prefix = found.prefixes[layer]
        for leaf, expert, bias in wanted - set(held):
            middle = "" if expert is None else f"{expert}."
            end = ("_bias" if bias else "") if fused else (".bias" if bias else ".weight")
            missing.append(f"{prefix}.{middle}{leaf}{end}")
        extra += [held[key] for key in set(held) - wanted]
    if missing or extra:
        raise fault(
            index,
            "checkpoint lacks experts" if missing else "checkpoint has more experts than its configuration",
            f"{'missing' if missing else 'unexpected'}: {some(sorted(missing or extra))}",
            f"{count} experts with {', '.join(parts.values())} in each of {len(found.by_layer)} layers",
        )


def _layout(
    index: CheckpointIndex,
    found: _Found,
    parts: dict[str, str],
    leaves: dict[str, str],
    count: int,
    fused: bool,
    interleaved: bool | None,
    transposed: bool | None,
) -> ExpertLayout:
    experts: list[int | None] = [None] if fused else list(range(count))
    sources = {
        layer: {p: tuple(held[leaf, e, False] for e in experts) for p, leaf in parts.items()}
        for layer, held in found.by_layer.items()
    }
    biased = any(bias for held in found.by_layer.values() for _, _, bias in held)
    biases = {
        layer: {p: tuple(held[leaf, e, True] for e in experts) for p, leaf in parts.items()} if biased else {}
        for layer, held in found.by_layer.items()
    }
    first = next(iter(sources.values()))
    if fused:
        hidden, intermediate, swapped = fused_sizes(index, first, transposed)
    else:
        intermediate, hidden, swapped = *two_dimensions(index, first["up"][0]), False
    formats, expert_bytes = {}, {}
    for layer in sources:
        shapes = part_shapes(hidden, intermediate, swapped, None if not fused else count)
        formats[layer] = {p: check_part(index, names, shapes[p]) for p, names in sources[layer].items()}
        if fused:
            check_fused(index, sources[layer], intermediate, swapped)
        for part, names in biases[layer].items():
            rows = {"down": hidden, "gate_up": 2 * intermediate}.get(part, intermediate)
            check_bias(index, names, (count, rows) if fused else (rows,))
        expert_bytes[layer] = expert_bytes_of(
            index, (*sources[layer].values(), *biases[layer].values()), count
        )
    check_formats(index, sources, formats)
    check_hidden(index, hidden)
    every = [n for layer in (*sources.values(), *biases.values()) for names in layer.values() for n in names]
    skipped = set(found.skipped)
    keys = set(every)
    for name in (*every, *found.skipped):
        matrix = index.matrices.get(name)
        if matrix is not None:
            (skipped if name in skipped else keys).update(matrix.keys)
    by_type = index.text_config.get("model_type") == "gpt_oss"
    return ExpertLayout(
        kind="fused" if fused else "per_expert",
        moe_layers=tuple(sources),
        num_experts=count,
        hidden=hidden,
        intermediate=intermediate,
        prefixes=found.prefixes,
        leaves=leaves,
        sources=sources,
        biases=biases,
        formats=formats,
        expert_bytes=expert_bytes,
        interleaved=fused and (by_type if interleaved is None else interleaved),
        transposed=swapped,
        keys=frozenset(keys),
        skipped=tuple(sorted(skipped)),
    )


assert set(_LEAVES[0]) == set(PROJECTIONS)
