"""The routed experts of a checkpoint in any readable format: one matrix at a time, as [out, in].

Legend: E experts, I intermediate size of one expert, H hidden size; gate and up are [I, H], down [H, I].
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.names import INTERLEAVED, LEAVES, PROJECTIONS, expert_name, family, is_mtp, layer_of
from kt_ray.checkpoint.safetensors_file import TensorInfo, read_tensor
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.errors import UserError

_AGAIN = "download the checkpoint again, or check that config.json belongs to it"


def slice_of(info: TensorInfo, start: int, stop: int) -> TensorInfo:
    """Indices [start, stop) of a tensor's first dimension."""
    width = info.nbytes // info.shape[0]
    shape = (stop - start, *info.shape[1:])
    return replace(info, shape=shape, start=info.start + start * width, end=info.start + stop * width)


def one_of(info: TensorInfo, index: int) -> TensorInfo:
    """One element of a tensor's first dimension, without that dimension."""
    part = slice_of(info, index, index + 1)
    return replace(part, shape=part.shape[1:])


def matrix_of(matrix: StoredMatrix, index: int) -> StoredMatrix:
    """One matrix of a stack."""
    return replace(
        matrix,
        data=one_of(matrix.data, index),
        scales=one_of(matrix.scales, index),
        shape=matrix.shape[1:],
    )


@dataclass(frozen=True)
class ExpertGroup:
    """The routed experts of one layer.

    Attributes:
        index: the checkpoint.
        prefix: "model.layers.3.mlp.experts".
        layer: number of the layer, or -1 without one.
        mtp: of multi-token prediction: adapters do not reach it.
        names: (role, expert) -> parameter; the expert is None in a fused tensor.
        biases: likewise.
        interleaved: rows of gate and up alternate in a fused tensor.
    """

    index: CheckpointIndex
    prefix: str
    layer: int
    mtp: bool
    interleaved: bool
    names: dict[tuple[str, int | None], str] = field(default_factory=dict)
    biases: dict[tuple[str, int | None], str] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """All experts lie in one tensor per projection."""
        return ("down", None) in self.names

    @property
    def count(self) -> int:
        """E."""
        if self.fused:
            return self.index.shape(self.names["down", None])[0]
        return 1 + max(e for _, e in self.names if e is not None)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate; without, they are up and down alone."""
        return any(role in ("gate", "gate_up") for role, _ in self.names)

    @property
    def projections(self) -> tuple[str, ...]:
        """gate, up and down, or those that experts have."""
        return PROJECTIONS if self.gated else PROJECTIONS[1:]

    def role(self, projection: str) -> str:
        """What holds a projection of all experts: "gate_up", or the projection itself."""
        return "gate_up" if self.gated and projection != "down" else projection

    @property
    def transposed(self) -> bool:
        """Fused tensors as [E, H, 2I] and [E, I, H]."""
        up, down = (self.index.shape(self.names[role, None]) for role in (self.role("up"), "down"))
        if not self.gated:  # [E, I, H] with [E, H, I] has the shapes of [E, H, I] with [E, I, H]
            return up[1] == self.index.text_config.get("hidden_size") != up[2]
        return up[2] == 2 * down[1] and up[1] == down[2]

    @property
    def hidden(self) -> int:
        """H."""
        return self.shape("up")[1]

    def shape(self, projection: str) -> tuple[int, int]:
        """[out, in] of gate, up or down."""
        if not self.fused:
            rows, columns = self.index.shape(self.names[projection, 0])
            return rows, columns
        _, rows, columns = self.index.shape(self.names["down", None])
        down = (columns, rows) if self.transposed else (rows, columns)
        return down if projection == "down" else (down[1], down[0])

    def read(self, expert: int, projection: str) -> Tensor:
        """gate or up [I, H] or down [H, I] of one expert, dequantised, float32."""
        if not self.fused:
            return self.index.value(self.names[projection, expert], torch.float32)
        if self.role(projection) != "gate_up":
            return self.read_fused(expert, projection)
        return split_rows(self.read_fused(expert, "gate_up"), self.interleaved)[projection == "up"]

    def read_fused(self, expert: int, role: str) -> Tensor:
        """gate_up [2I, H] in the order of the file, or down [H, I], of one expert, float32."""
        name = self.names[role, None]
        matrix = self.index.matrices.get(name)
        if matrix is not None:
            value = matrix_of(matrix, expert).dequantize()
        else:
            value = read_tensor(one_of(self.index.tensors[name], expert)).float()
        return value.t().contiguous() if self.transposed else value

    def bias(self, expert: int, projection: str) -> Tensor:
        """The bias of one expert's projection, as stored."""
        if (projection, expert) in self.biases:
            return self.index.read(self.biases[projection, expert])
        role = self.role(projection)
        value = read_tensor(one_of(self.index.tensors[self.biases[role, None]], expert))
        return value if role != "gate_up" else split_rows(value, self.interleaved)[projection == "up"]

    def leaf(self, projection: str) -> str:
        """Name of a projection of one expert as released; of fused tensors, as they are split."""
        name = self.names.get((projection, 0))
        found = None if name is None else expert_name(name)
        return LEAVES[projection] if found is None else found.leaf


def split_rows(both: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Rows of gate and rows of up."""
    if interleaved:
        return both[0::2], both[1::2]
    half = both.shape[0] // 2
    return both[:half], both[half:]


def join_rows(gate: Tensor, up: Tensor, interleaved: bool) -> Tensor:
    """The inverse of `split_rows`."""
    return torch.stack((gate, up), 1).flatten(0, 1) if interleaved else torch.cat((gate, up))


def expert_groups(index: CheckpointIndex) -> dict[str, ExpertGroup]:
    """All groups of routed experts by prefix, those of multi-token prediction included.

    Raises:
        UserError: no routed experts, or some that are missing.
    """
    layers = layer_count(index)
    interleaved = family(index.config) in INTERLEAVED
    groups: dict[str, ExpertGroup] = {}
    for name in sorted(index.names):
        found = expert_name(name)
        if found is None:
            continue
        group = groups.get(found.prefix)
        if group is None:
            layer = layer_of(name)
            group = ExpertGroup(
                index, found.prefix, -1 if layer is None else layer, is_mtp(name, layers), interleaved
            )
            groups[found.prefix] = group
        (group.biases if found.bias else group.names)[found.role, found.expert] = name
    if not groups:
        raise UserError(
            "checkpoint has no routed experts",
            where=str(index.path),
            observed=f"model_type {index.config.get('model_type')!r}, {len(index.tensors)} tensors",
            remedy="choose a Mixture-of-Experts checkpoint",
        )
    missing = sorted(lost for group in groups.values() for lost in _missing(group))
    if missing:
        raise UserError(
            "checkpoint lacks experts",
            where=str(index.path),
            observed=f"missing: {some(missing)}",
            required="gate, up and down of every expert",
            remedy=_AGAIN,
        )
    return dict(sorted(groups.items(), key=lambda item: (item[1].mtp, item[1].layer, item[0])))


def _missing(group: ExpertGroup) -> Iterable[str]:
    if any(expert is None for _, expert in group.names):
        roles = dict.fromkeys(group.role(p) for p in group.projections)
        return [f"{group.prefix}.{r}_proj" for r in roles if (r, None) not in group.names]
    return [
        f"{group.prefix}.{e}.{LEAVES[p]}"
        for e in range(group.count)
        for p in group.projections
        if (p, e) not in group.names
    ]


def layer_count(index: CheckpointIndex) -> int | None:
    """num_hidden_layers."""
    value = index.text_config.get("num_hidden_layers")
    return value if isinstance(value, int) else None
