"""Where a checkpoint keeps its routed experts, and as what.

    per_expert  ...layers.L.<moe>.experts.E.{gate_proj,up_proj,down_proj}.weight
                ...layers.L.<moe>.experts.E.{w1,w3,w2}.weight  (Mixtral, MiniMax, PhiMoE, DeepSeek-V4)
    fused       ...layers.L.<moe>.experts.gate_up_proj [E, 2I, H] and down_proj [E, H, I]
                (rows of gate, then rows of up; or interleaved; or with the last two axes swapped)

each plain (BF16, F32) or quantised (stored.py), gated or not (up and down alone), with or without biases.
A *part* is what the checkpoint stores as one: gate, up and down, or gate_up and down.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kt_ray.errors import UserError

if TYPE_CHECKING:
    from kt_ray.checkpoint.index import CheckpointIndex

PROJECTIONS = ("gate", "up", "down")
_AGAIN = "download the checkpoint again, or check that config.json belongs to it"
# What stands before the layers: "model.", the name of a multimodal checkpoint's language model, or nothing
# (DeepSeek-V4, whose keys begin with "layers.").
_ROOT = re.compile(r"^.*?\b(?=layers\.\d+\.)")


@dataclass(frozen=True)
class ExpertLayout:
    """The routed experts of a checkpoint, all shapes and types already checked.

    Attributes:
        kind: "per_expert" or "fused".
        moe_layers: layers with routed experts, ascending.
        num_experts: E. hidden: H. intermediate: I of one expert.
        prefixes: layer -> "model.layers.3.mlp.experts".
        leaves: projection -> its name as released ("gate" -> "gate_proj" or "w1"); no gate where experts
            have none.
        sources: layer -> part -> the parameters that hold it: one per expert, or one of all.
        biases: likewise; empty without biases.
        formats: layer -> part -> "bf16", "f32", "fp8", "mxfp4", "int8" or "int4".
        expert_bytes: layer -> bytes of one expert, scales and biases included.
        interleaved: fused only: rows of gate and up alternate instead of following each other.
        transposed: fused only: [E, H, 2I] and [E, I, H].
        keys: every parameter and every tensor that belongs to a routed expert.
        skipped: those outside the model's layers (multi-token prediction, a speech model), never loaded.
    """

    kind: str
    moe_layers: tuple[int, ...]
    num_experts: int
    hidden: int
    intermediate: int
    prefixes: dict[int, str]
    leaves: dict[str, str]
    sources: dict[int, dict[str, tuple[str, ...]]] = field(repr=False)
    biases: dict[int, dict[str, tuple[str, ...]]] = field(repr=False)
    formats: dict[int, dict[str, str]] = field(repr=False)
    expert_bytes: dict[int, int] = field(repr=False)
    interleaved: bool = False
    transposed: bool = False
    keys: frozenset[str] = field(default=frozenset(), repr=False)
    skipped: tuple[str, ...] = field(default=(), repr=False)

    @classmethod
    def detect(
        cls, index: CheckpointIndex, *, interleaved: bool | None = None, transposed: bool | None = None
    ) -> ExpertLayout:
        """Find and check the experts.

        Args:
            index: the checkpoint.
            interleaved, transposed: layout of fused weights; None = as the family releases them
                (gpt_oss interleaves), and the orientation from the shapes.

        Raises:
            UserError: no experts, missing experts, mixed shapes or types, formats that are not read.
        """
        from kt_ray.checkpoint.find_experts import find_experts

        return find_experts(index, interleaved, transposed)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return "gate" in self.leaves

    @property
    def biased(self) -> bool:
        """Whether experts have biases."""
        return any(self.biases.values())

    @property
    def distinct_formats(self) -> tuple[str, ...]:
        """Formats that occur, sorted."""
        return tuple(sorted({f for parts in self.formats.values() for f in parts.values()}))

    def names(self, layer: int, expert: int, root: str = "model") -> dict[str, str]:
        """Module names of one expert's projections, as released: {"gate": "...experts.5.gate_proj", ...}.

        Args:
            layer, expert: which.
            root: module name of the language model where it is trained, in place of the checkpoint's own:
                "model", or "model.language_model" inside a multimodal model. PEFT leaves out other names.
        """
        prefix = _ROOT.sub(f"{root}.", self.prefixes[layer])
        return {p: f"{prefix}.{expert}.{leaf}" for p, leaf in self.leaves.items()}

    def check(
        self,
        *,
        num_experts: int | None = None,
        hidden: int | None = None,
        intermediate: int | None = None,
        moe_layers: Iterable[int] | None = None,
        where: str = "config.json",
    ) -> None:
        """Compare with what the configuration promises. Raises UserError on the first difference."""
        expected: list[tuple[str, Any, Any]] = [
            ("number of routed experts", self.num_experts, num_experts),
            ("hidden size of the experts", self.hidden, hidden),
            ("intermediate size of the experts", self.intermediate, intermediate),
        ]
        for what, observed, required in expected:
            if required is not None and observed != required:
                raise UserError(
                    f"checkpoint and configuration disagree about the {what}",
                    where=where,
                    observed=f"{observed} in the weights",
                    required=required,
                    remedy=_AGAIN,
                )
        if moe_layers is not None:
            promised, found = set(moe_layers), set(self.moe_layers)
            if promised != found:
                raise UserError(
                    "checkpoint and configuration disagree about the layers that have routed experts",
                    where=where,
                    observed=f"without: {sorted(promised - found)}; unexpected: {sorted(found - promised)}",
                    required=f"{len(promised)} layers",
                    remedy=_AGAIN,
                )
