"""The routed experts of a checkpoint, layer by layer: which parameters hold them, and one matrix at a time.

Any readable format; values come as [out, in]. Nothing is checked here but what reading needs, and sizes: a
packing that looks like another shows in them. See expert_layout.py for what training requires.

Legend: E experts, I intermediate size of one expert, H hidden size; gate and up are [I, H], down [H, I].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from kt_ray.checkpoint.check_experts import (
    check_shapes,
    check_size,
    fused_sizes,
    no_experts,
    part_shapes,
    two_dimensions,
)
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.names import (
    LEAVES,
    PROJECTIONS,
    expert_name,
    family,
    gate_up_rows,
    is_interleaved,
    is_mtp,
    is_unknown_expert_tensor,
)
from kt_ray.checkpoint.safetensors_file import damaged, read_tensor

# What config.json calls the experts' input: a projection of the hidden state in some families, else itself.
_WIDTHS = ("routed_expert_hidden_size", "moe_latent_size", "moe_hidden_size", "hidden_size")


@dataclass(frozen=True)
class ExpertGroup:
    """The routed experts of one layer: (role, expert) -> parameter; the expert is None in a fused tensor."""

    index: CheckpointIndex
    prefix: str  # "model.layers.3.mlp.experts"
    layer: int  # -1 without one
    mtp: bool  # of multi-token prediction or a speech model: neither training nor adapters reach it
    interleaved: bool  # rows of gate and up alternate in a fused tensor
    names: dict[tuple[str, int | None], str] = field(default_factory=dict)
    biases: dict[tuple[str, int | None], str] = field(default_factory=dict)
    leaves: set[str] = field(default_factory=set)  # last parts of the names, as released

    @property
    def fused(self) -> bool:
        """All experts lie in one tensor per role."""
        return ("down", None) in self.names

    @cached_property
    def count(self) -> int:
        """E."""
        if self.fused:
            return self.index.shape(self.names["down", None])[0]
        return 1 + max((e for _, e in self.names if e is not None), default=0)

    @cached_property
    def gated(self) -> bool:
        """Whether experts have a gate; without, they are up and down alone."""
        return any(role in ("gate", "gate_up") for role, _ in self.names)

    @property
    def projections(self) -> tuple[str, ...]:
        """gate, up and down, or those that experts have."""
        return PROJECTIONS if self.gated else PROJECTIONS[1:]

    @property
    def roles(self) -> tuple[str, ...]:
        """What transformers' parameters of all experts hold."""
        return ("gate_up", "down") if self.gated else ("up", "down")

    @property
    def stored_roles(self) -> tuple[str, ...]:
        """What fused tensors of these experts hold: `roles`, or gate and up each in its own (Step-3.7)."""
        return self.projections if ("gate", None) in self.names else self.roles

    def role(self, projection: str) -> str:
        """What holds a projection of all experts: "gate_up", or the projection itself."""
        return projection if projection in self.stored_roles else "gate_up"

    @cached_property
    def sizes(self) -> tuple[int, int, bool]:
        """H, I, and whether fused tensors are [E, H, 2I] and [E, I, H]."""
        if self.fused:
            up, down = (self.names[role, None] for role in self.stored_roles[-2:])
            return fused_sizes(self.index, up, down, both="gate_up" in self.stored_roles)
        rows, columns = two_dimensions(self.index, self.names["up", 0])
        return columns, rows, False

    @property
    def transposed(self) -> bool:
        """Fused tensors as [E, H, 2I] and [E, I, H]."""
        return self.sizes[2]

    def shape(self, projection: str) -> tuple[int, int]:
        """[out, in] of gate, up, down or gate_up."""
        hidden, intermediate, _ = self.sizes
        rows = 2 * intermediate if projection == "gate_up" else intermediate
        return (hidden, intermediate) if projection == "down" else (rows, hidden)

    def source(self, projection: str, expert: int) -> str:
        """The parameter that holds a projection of one expert."""
        return self.names.get((projection, expert)) or self.names[self.role(projection), None]

    def read(self, expert: int, projection: str) -> Tensor:
        """gate or up [I, H], down [H, I] or gate_up [2I, H] in the family's order, of one expert, float32."""
        if projection == "gate_up" and not (self.fused and projection in self.stored_roles):
            return join_rows(self.read(expert, "gate"), self.read(expert, "up"), self.interleaved)
        if not self.fused:
            return self.index.value(self.names[projection, expert], torch.float32)
        role = projection if projection == "gate_up" else self.role(projection)
        value = read_one(self.index, self.names[role, None], expert)
        value = value.t().contiguous() if self.transposed else value
        return value if role == projection else split_rows(value, self.interleaved)[projection == "up"]

    def bias(self, expert: int, projection: str) -> Tensor:
        """The bias of one expert's projection, or of gate_up in the family's order, as stored."""
        if (projection, expert) in self.biases:
            return self.index.read(self.biases[projection, expert])
        if projection == "gate_up" and (projection, None) not in self.biases:
            return join_rows(self.bias(expert, "gate"), self.bias(expert, "up"), self.interleaved)
        role = projection if projection == "gate_up" else self.role(projection)
        value = read_tensor(self.index.tensors[self.biases[role, None]].one(expert))
        return value if role == projection else split_rows(value, self.interleaved)[projection == "up"]

    def leaf(self, projection: str) -> str:
        """Name of a projection of one expert as released; of fused tensors, as they are split."""
        parts = expert_name(self.names.get((projection, 0), ""))
        return LEAVES[projection] if parts is None else parts.leaf


def read_one(index: CheckpointIndex, name: str, expert: int) -> Tensor:
    """One matrix of a stack, as it lies in the file, float32."""
    matrix = index.matrices.get(name)
    if matrix is not None:
        return matrix.one(expert).dequantize()
    return read_tensor(index.tensors[name].one(expert)).float()


def split_rows(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rows of gate and rows of up."""
    gate, up = gate_up_rows(both.shape[0] // 2, interleaved)
    return both[gate], both[up]


def join_rows(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split_rows`."""
    return torch.stack((gate, up), 1).flatten(0, 1) if interleaved else torch.cat((gate, up))


def find_groups(
    index: CheckpointIndex,
) -> tuple[dict[str, ExpertGroup], tuple[str, ...], tuple[str, ...]]:
    """All groups of routed experts by prefix, the names below "experts." that are of no known layout, and
    those of zero experts: transformers saves their gate and up, which nothing reads (LongCat-Flash)."""
    layers = index.layer_count
    interleaved = is_interleaved(family(index.config))
    zero = index.zero_experts
    groups: dict[str, ExpertGroup] = {}
    unknown: list[str] = []
    unused: list[str] = []
    for name in sorted(index.names):
        parts = expert_name(name)
        if parts is None:
            if is_unknown_expert_tensor(name):
                unknown.append(name)
            continue
        if parts.bias and index.is_blank_bias(name):
            continue
        if parts.expert in zero and parts.role != "down":
            unused.append(name)
            continue
        group = groups.get(parts.prefix)
        if group is None:
            layer = -1 if parts.layer is None else parts.layer
            group = ExpertGroup(index, parts.prefix, layer, is_mtp(name, layers), interleaved)
            groups[parts.prefix] = group
        (group.biases if parts.bias else group.names)[parts.role, parts.expert] = name
        group.leaves.add(parts.leaf)
    ordered = sorted(groups.items(), key=lambda item: (item[1].mtp, item[1].layer, item[0]))
    return dict(ordered), tuple(unknown), tuple(unused)


def expert_groups(index: CheckpointIndex) -> dict[str, ExpertGroup]:
    """All groups of routed experts by prefix, those of multi-token prediction included.

    Raises:
        UserError: no routed experts, some that are missing, or of other sizes than config.json says.
    """
    groups, _, _ = find_groups(index)
    if not groups:
        raise no_experts(index)
    missing = sorted(name for group in groups.values() for name in _missing(group))
    if missing:
        required = "gate, up and down of every expert"
        raise damaged("checkpoint lacks experts", index.path, f"missing: {some(missing)}", required)
    for group in groups.values():
        if not group.mtp:
            _check_sizes(group)
    return groups


def _check_sizes(group: ExpertGroup) -> None:
    index, text = group.index, group.index.text_config
    hidden, intermediate, transposed = group.sizes
    width = next((size for key in _WIDTHS if (size := text.get(key))), None)
    check_size("hidden size of the experts", index.path, hidden, width)
    shapes = part_shapes(hidden, intermediate, transposed, group.count if group.fused else None)
    for (role, _), name in group.names.items():
        check_shapes(index, (name,), shapes[role])


def _missing(group: ExpertGroup) -> Iterable[str]:
    if any(expert is None for _, expert in group.names):
        return [f"{group.prefix}.{r}_proj" for r in group.stored_roles if (r, None) not in group.names]
    return [
        f"{group.prefix}.{e}.{LEAVES[p]}"
        for e in range(group.count)
        for p in group.projections
        if (p, e) not in group.names
    ]
