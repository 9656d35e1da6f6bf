"""The fused form of expert adapters, for families whose per-expert keys PEFT cannot merge itself.

PEFT adapts a fused parameter W [E, out, in] by A [E*r, in] (row e*r + j) and B [out, r*E]
(column j*E + e). gate and up share one parameter, so their adapters become one of rank 2r: A is gate's
rows over up's, B is block-diagonal. Experts without a gate keep up at rank r. B's columns of different
experts lie next to each other, so actors cannot write them by byte range; the fused file is made from the
per-expert one, layer by layer.

Legend: E experts, r rank, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from kt_ray.adapter.peft_config import EXPERT, module_of
from kt_ray.checkpoint.safetensors_file import NAMES, TensorInfo, build_header, read_tensor, tensor_bytes

_PROJECTION = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
}
Pair = tuple[torch.Tensor, torch.Tensor]


def fuse_down(pairs: list[Pair]) -> Pair:
    """One (A [r, in], B [out, r]) per expert -> A [E*r, in], B [out, r*E]."""
    a = torch.cat([a for a, _ in pairs])
    b = torch.stack([b for _, b in pairs], dim=2)  # [out, r, E]
    return a, b.flatten(1)


def fuse_gate_up(gate: list[Pair], up: list[Pair], *, interleaved: bool = False) -> Pair:
    """Adapters of gate and up -> A [E*2r, H], B [2I, 2r*E]."""
    both: list[Pair] = []
    for (gate_a, gate_b), (up_a, up_b) in zip(gate, up, strict=True):
        b = torch.block_diag(gate_b, up_b)  # rows of gate, then rows of up
        if interleaved:
            b = torch.stack(b.chunk(2), dim=1).flatten(0, 1)
        both.append((torch.cat((gate_a, up_a)), b))
    return fuse_down(both)


def write_fused(source: Mapping[str, TensorInfo], target: Path, prefix: str, *, interleaved: bool) -> None:
    """Write the fused form of a per-expert adapter.

    Args:
        source: name (without `prefix`) -> place in the per-expert file.
        target: file to write.
        prefix: put before every key ("base_model.model.").
        interleaved: order of gate and up rows in the model's parameter.
    """
    groups, rest = _groups(source)
    entries: list[tuple[str, str, tuple[int, ...]]] = []
    for name in rest:
        entries.append((prefix + name, source[name].dtype, source[name].shape))
    for path, experts in groups.items():
        (up_a, up_b), (down_a, down_b) = ([source[n] for n in experts[0][p]] for p in ("up", "down"))
        E, r = len(experts), up_a.shape[0]
        H, I, dtype = up_a.shape[1], up_b.shape[0], up_a.dtype
        wide = 2 if "gate" in experts[0] else 1
        assert (down_a.shape, down_b.shape) == ((r, I), (H, r)), f"{path}: shapes do not fit together"
        entries.append((f"{prefix}{path}.base_layer.lora_A.weight", dtype, (E * wide * r, H)))
        entries.append((f"{prefix}{path}.base_layer.lora_B.weight", dtype, (wide * I, wide * r * E)))
        entries.append((f"{prefix}{path}.lora_A.weight", dtype, (E * r, I)))
        entries.append((f"{prefix}{path}.lora_B.weight", dtype, (H, r * E)))
    head, _, _ = build_header(entries)
    with target.open("wb") as file:
        file.write(head)
        values = _values(source, groups, rest, interleaved)
        for (name, dtype, shape), value in zip(entries, values, strict=True):
            assert tuple(value.shape) == shape and NAMES[value.dtype] == dtype, name
            file.write(tensor_bytes(value.contiguous()))
        file.flush()


_Groups = dict[str, list[dict[str, tuple[str, str]]]]


def _groups(source: Mapping[str, TensorInfo]) -> tuple[_Groups, list[str]]:
    """Per path "...experts": experts in order, each projection's (A name, B name); and the other names."""
    found: dict[str, dict[int, dict[str, tuple[str, str]]]] = {}
    rest: list[str] = []
    for name in source:
        module = module_of(name)
        match = EXPERT.match(module)
        if match is None:
            rest.append(name)
            continue
        projections = found.setdefault(match["prefix"], {}).setdefault(int(match["expert"]), {})
        projections[_PROJECTION[match["leaf"]]] = (f"{module}.lora_A.weight", f"{module}.lora_B.weight")
    groups: _Groups = {}
    for path, experts in found.items():
        assert sorted(experts) == list(range(len(experts))), f"{path}: the fused form needs every expert"
        groups[path] = [experts[e] for e in range(len(experts))]
    return groups, rest


def _values(
    source: Mapping[str, TensorInfo], groups: _Groups, rest: list[str], interleaved: bool
) -> Iterator[torch.Tensor]:
    for name in rest:
        yield read_tensor(source[name])
    for experts in groups.values():
        pairs: dict[str, list[Pair]] = {
            p: [(read_tensor(source[e[p][0]]), read_tensor(source[e[p][1]])) for e in experts]
            for p in experts[0]
        }
        if "gate" in pairs:
            yield from fuse_gate_up(pairs["gate"], pairs["up"], interleaved=interleaved)
        else:
            yield from fuse_down(pairs["up"])
        yield from fuse_down(pairs["down"])
