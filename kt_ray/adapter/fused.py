"""The fused form of expert adapters, as PEFT stores adapters of fused parameters: made, and taken apart.

PEFT adapts a fused parameter W [E, out, in] by A [E*r, in] (row e*r + j) and B [out, r*E]
(column j*E + e). gate and up share one parameter, so kt_ray writes their adapters as one of rank 2r: A is
gate's rows over up's, B is block-diagonal. In an adapter that PEFT trained, gate and up may both use all of
A. Experts without a gate keep up at rank r. B's columns of different experts lie next to each other, so
actors cannot write them by byte range; the fused file is made from the per-expert one, layer by layer. Of
Llama 4 both are turned round and change places: A [E*r, out] holds B, and B [in, r*E] holds A. transformers'
gate and up of LongCat-Flash have rows of zero experts, too, which nothing reads: their adapters are zeros.

Legend: E experts, r rank, I intermediate size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kt_ray.adapter.adapter_file import Lora, Pair
from kt_ray.adapter.peft_config import module_of
from kt_ray.checkpoint.expert_groups import split_rows
from kt_ray.checkpoint.names import one_expert
from kt_ray.checkpoint.safetensors_file import TensorInfo, read_tensor, write_safetensors

Factors = tuple[Tensor, Tensor]


def fuse_down(pairs: list[Factors]) -> Factors:
    """One (A [r, in], B [out, r]) per expert -> A [E*r, in], B [out, r*E]."""
    a = torch.cat([a for a, _ in pairs])
    b = torch.stack([b for _, b in pairs], dim=2)  # [out, r, E]
    return a, b.flatten(1)


def fuse_gate_up(gate: list[Factors], up: list[Factors], *, interleaved: bool = False) -> Factors:
    """Adapters of gate and up -> A [E*2r, H], B [2I, 2r*E]."""
    both: list[Factors] = []
    for (gate_a, gate_b), (up_a, up_b) in zip(gate, up, strict=True):
        b = torch.block_diag(gate_b, up_b)  # rows of gate, then rows of up
        if interleaved:
            b = torch.stack(b.chunk(2), dim=1).flatten(0, 1)
        both.append((torch.cat((gate_a, up_a)), b))
    return fuse_down(both)


def with_zero_experts(pairs: list[Factors], count: int) -> list[Factors]:
    """The same and as many experts more, whose adapters are zeros."""
    a, b = pairs[0]
    return pairs + count * [(torch.zeros_like(a), torch.zeros_like(b))]


def turn(a: Tensor, b: Tensor, experts: int) -> Factors:
    """A [E*r, in], B [out, r*E] -> B as [E*r, out], A as [in, r*E]."""
    rows, columns = a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts)
    return columns.permute(2, 1, 0).flatten(0, 1), rows.permute(2, 1, 0).flatten(1)


_Modules = dict[str, dict[tuple[str, int], str]]  # "...experts" -> (projection, expert) -> module


def write_fused(
    source: Mapping[str, TensorInfo],
    target: Path,
    prefix: str,
    *,
    interleaved: bool,
    turned: bool,
    zero_experts: int = 0,
) -> None:
    """Write the fused form of a per-expert adapter, `prefix` ("base_model.model.") before every key.

    Args:
        source: name (without `prefix`) -> place in the per-expert file.
        interleaved: order of gate and up rows in the model's parameter.
        turned: A and B turned round, in each other's place.
        zero_experts: that gate and up have besides.
    """
    modules: _Modules = {}
    rest: list[str] = []
    for name in source:
        module = module_of(name)
        expert = one_expert(module)
        if expert is None or expert.expert is None:
            rest.append(name)
        else:
            modules.setdefault(expert.prefix, {})[expert.role, expert.expert] = module
    entries = [(prefix + name, source[name].dtype, source[name].shape) for name in rest]
    for path, names in modules.items():
        E, wide = 1 + max(e for _, e in names), 2 if ("gate", 0) in names else 1
        assert len(names) == E * (wide + 1), f"{path}: the fused form needs every expert"
        up_a, up_b = (source[f"{names['up', 0]}.lora_{half}.weight"] for half in "AB")
        (r, H), (I, _) = up_a.shape, up_b.shape
        shapes: dict[str, tuple[int, int]] = {}
        inner, down = ("base_layer.lora", E + zero_experts, wide * r, H, wide * I), ("lora", E, r, I, H)
        for key, count, rank, n_in, n_out in (inner, down):
            a, b = (n_out, n_in) if turned else (n_in, n_out)
            shapes |= {f"{key}_A": (count * rank, a), f"{key}_B": (b, rank * count)}
        entries += [(f"{prefix}{path}.{key}.weight", up_a.dtype, shape) for key, shape in shapes.items()]
    values = _fused_values(source, modules, rest, interleaved, turned, zero_experts)
    write_safetensors(target, entries, values)


def _fused_values(
    source: Mapping[str, TensorInfo],
    modules: _Modules,
    rest: list[str],
    interleaved: bool,
    turned: bool,
    zero_experts: int,
) -> Iterator[Tensor]:
    for name in rest:
        yield read_tensor(source[name])
    for names in modules.values():
        pairs: dict[str, list[Factors]] = {}
        for (projection, _), module in sorted(names.items(), key=lambda item: item[0][1]):
            a, b = (read_tensor(source[f"{module}.lora_{half}.weight"]) for half in "AB")
            pairs.setdefault(projection, []).append((a, b))
        for projection in pairs.keys() - {"down"}:
            pairs[projection] = with_zero_experts(pairs[projection], zero_experts)
        if "gate" in pairs:
            inner = fuse_gate_up(pairs["gate"], pairs["up"], interleaved=interleaved)
        else:
            inner = fuse_down(pairs["up"])
        for fused in (inner, fuse_down(pairs["down"])):
            yield from turn(*fused, len(pairs["up"])) if turned else fused


@dataclass(frozen=True)
class FusedLayer:
    """One layer's fused pairs, taken apart into one pair per expert and projection.

    Where gate and up share all of A, both keep it, and the rank of the result is PEFT's.
    """

    prefix: str  # "...experts"
    inner: Pair | None  # of gate and up, or of up alone
    down: Pair | None
    gated: bool  # whether experts have a gate
    halves: bool  # gate and up have half of gate_up's rank each
    interleaved: bool  # rows of gate and up alternate

    @classmethod
    def of(cls, lora: Lora, prefix: str, interleaved: bool) -> FusedLayer:
        """The layer of an adapter; reads B to see whether gate and up are apart."""
        both, down = lora.fused.get((prefix, "gate_up")), lora.fused.get((prefix, "down"))
        up, halves = lora.fused.get((prefix, "up")), False
        if both is not None and both.rank % 2 == 0:
            half = both.rank // 2
            rows = split_rows(both.stacked_b(), interleaved)
            halves = not bool(rows[0][:, half:].any()) and not bool(rows[1][:, :half].any())
        return cls(prefix, both or up, down, up is None, halves, interleaved)

    def _pair(self, projection: str) -> Pair:
        pair = self.down if projection == "down" else self.inner
        assert pair is not None, projection
        return pair

    @property
    def experts(self) -> int:
        """E."""
        return self._pair(self.projections[0]).experts

    @property
    def projections(self) -> tuple[str, ...]:
        """Those that are adapted."""
        inner = ("gate", "up") if self.gated else ("up",)
        return (*(inner if self.inner else ()), *(("down",) if self.down else ()))

    @property
    def rank(self) -> int:
        """Smallest rank that holds every projection."""
        own = 0 if self.inner is None else self.inner.rank // (2 if self.halves else 1)
        return max(own, 0 if self.down is None else self.down.rank)

    @property
    def scale(self) -> float:
        """Scale of `factors`, not 0; another one of down goes into its B."""
        scales = (self._pair(projection).scale for projection in self.projections)
        return next((scale for scale in scales if scale), 1.0)

    def shape(self, projection: str) -> tuple[int, int]:
        """[out, in]."""
        pair = self._pair(projection)
        return pair.out_features // (2 if self.gated and projection != "down" else 1), pair.in_features

    def split(self, expert: int, projection: str) -> tuple[Tensor, Tensor, float]:
        """A [r, in], B [out, r] and scale of one expert's projection, at its own rank."""
        pair = self._pair(projection)
        a, b = pair.factors(expert)
        if self.gated and projection != "down":
            b = split_rows(b, self.interleaved)[projection == "up"]
            if self.halves:
                half = pair.rank // 2
                part = slice(half, None) if projection == "up" else slice(0, half)
                a, b = a[part], b[:, part]
        return a, b, pair.scale

    def factors(self, expert: int, projection: str, rank: int) -> Factors:
        """A [rank, in] and B [out, rank] of one expert for `scale`, zeros beyond its own rank."""
        a, b, scale = self.split(expert, projection)
        own = a.shape[0]
        padded_a, padded_b = torch.zeros(rank, a.shape[1]), torch.zeros(b.shape[0], rank)
        padded_a[:own], padded_b[:, :own] = a, b * (scale / self.scale)
        return padded_a, padded_b
