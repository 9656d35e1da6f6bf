"""What `LocalExperts` is built from, and what it counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.model.stage_spec import StartAdapter
from kt_ray.native import ExpertFormula
from kt_ray.placement.plan_types import ExpertActorPlan


@dataclass(frozen=True, kw_only=True)
class LocalExpertsSpec(ExpertActorPlan):
    """One expert actor's part of the plan, and what else it needs; `node` -1: memory of any NUMA node."""

    model_dir: str  # Hugging Face directory
    # lora, optim: as configured
    lora: LoraConfig
    optim: OptimConfig
    seed: int  # the run's seed (LoRA initialisation, dropout)
    # MoE layer -> what its experts compute; layers that are not named are plain SwiGLU
    formulas: Mapping[int, ExpertFormula] = field(default_factory=dict)
    tokens_per_row: float = 0.0  # as `Engine` has it
    # GGUF file that the experts are read from instead of `model_dir`, in its types whatever the backend; None
    # = `model_dir`
    experts_path: str | None = None
    start: StartAdapter | None = None  # what LoRA starts from; None = `lora.init`
    root: str = "model"  # module name of the language model, with which the parameters' names begin
    fingerprint: str = ""  # of the model's weights, `experts_path` included; "" = any
    shared: bool = False  # weights and LoRA lie where attention workers of the host can map them


@dataclass
class ExpertCounters:
    """Since the last `take_counters`: seconds in the engine by direction, routed slots, FLOPs' inputs.

    lane_slots: slots of forward and backward that the lane computed, counted in the others as well.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    forward_slots: int = 0
    backward_slots: int = 0
    recomputed_slots: int = 0
    kept_bytes_peak: int = 0
    tokens_per_expert: dict[int, list[int]] = field(default_factory=dict)  # layer -> per expert held
    lane_slots: int = 0

    def plus(self, other: ExpertCounters) -> ExpertCounters:
        """Both together; of peaks the larger."""
        tokens = {layer: list(counts) for layer, counts in self.tokens_per_expert.items()}
        for layer, counts in other.tokens_per_expert.items():
            before = tokens.setdefault(layer, [0] * len(counts))
            tokens[layer] = [a + b for a, b in zip(before, counts, strict=True)]
        return ExpertCounters(
            self.forward_seconds + other.forward_seconds,
            self.backward_seconds + other.backward_seconds,
            self.forward_slots + other.forward_slots,
            self.backward_slots + other.backward_slots,
            self.recomputed_slots + other.recomputed_slots,
            max(self.kept_bytes_peak, other.kept_bytes_peak),
            tokens,
            self.lane_slots + other.lane_slots,
        )
