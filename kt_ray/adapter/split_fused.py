"""Fused expert adapters taken apart: one pair per expert and projection.

gate and up share A in PEFT's form. Where B is block-diagonal, as kt_ray writes it, each has its own half of
the rank; otherwise (an adapter that PEFT trained) both keep all of A and the rank of the result is PEFT's.
Legend: E experts, r' rank of gate_up in the fused form, r of down, H hidden size, I intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kt_ray.adapter.adapter_file import Lora, Pair
from kt_ray.checkpoint.expert_reader import split_rows


@dataclass(frozen=True)
class FusedLayer:
    """One layer's fused pairs.

    Attributes:
        prefix: "...experts".
        gate_up, down: the pairs; None where the adapter has none.
        halves: gate and up have half of r' each.
        interleaved: rows of gate and up alternate.
    """

    prefix: str
    gate_up: Pair | None
    down: Pair | None
    halves: bool
    interleaved: bool

    @classmethod
    def of(cls, lora: Lora, prefix: str, interleaved: bool) -> FusedLayer:
        """The layer of an adapter; reads B to see whether gate and up are apart."""
        both, down = lora.fused.get((prefix, "gate_up")), lora.fused.get((prefix, "down"))
        halves = False
        if both is not None and both.rank % 2 == 0:
            half = both.rank // 2
            halves = all(
                not bool(gate[:, half:].any()) and not bool(up[:, :half].any())
                for expert in range(both.experts)
                for gate, up in [split_rows(both.factors(expert)[1], interleaved)]
            )
        return cls(prefix, both, down, halves, interleaved)

    @property
    def _any(self) -> Pair:
        pair = self.gate_up or self.down
        assert pair is not None
        return pair

    @property
    def experts(self) -> int:
        """E."""
        return self._any.experts

    @property
    def projections(self) -> tuple[str, ...]:
        """Those that are adapted."""
        return (*(("gate", "up") if self.gate_up else ()), *(("down",) if self.down else ()))

    @property
    def rank(self) -> int:
        """Smallest rank that holds every projection."""
        own = 0 if self.gate_up is None else self.gate_up.rank // (2 if self.halves else 1)
        return max(own, 0 if self.down is None else self.down.rank)

    @property
    def scale(self) -> float:
        """Scale of the results; another one of down goes into its B."""
        return self._any.scale

    def shape(self, projection: str) -> tuple[int, int]:
        """[out, in]."""
        pair = self.down if projection == "down" else self.gate_up
        assert pair is not None
        rows = pair.out_features if projection == "down" else pair.out_features // 2
        return rows, pair.in_features

    def factors(self, expert: int, projection: str, rank: int) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of one expert, zeros beyond its own rank."""
        pair = self.down if projection == "down" else self.gate_up
        assert pair is not None
        a, b = pair.factors(expert)
        if projection != "down":
            half = pair.rank // 2
            b = split_rows(b, self.interleaved)[projection == "up"]
            if self.halves:
                part = slice(half, None) if projection == "up" else slice(0, half)
                a, b = a[part], b[:, part]
        b = b * (pair.scale / self.scale)
        own = a.shape[0]
        padded_a, padded_b = torch.zeros(rank, a.shape[1]), torch.zeros(b.shape[0], rank)
        padded_a[:own], padded_b[:, :own] = a, b
        return padded_a, padded_b
