"""From plan and configuration to what each actor is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kt_ray.config.schema import Config, OptimConfig
from kt_ray.experts import LocalExpertsSpec
from kt_ray.model.build import build_on_meta
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.native import ExpertFormula
from kt_ray.placement.plan_types import Plan
from kt_ray.transport.messages import Address


@dataclass(frozen=True)
class ActorSpecs:
    """Everything needed to spawn the actors of a plan.

    stages: per worker rank; experts: per expert actor rank; timeout, load_timeout: seconds. build_stage:
    what makes a worker's stage of its spec; a picklable stand-in replaces it in measurements and tests.
    """

    stages: tuple[StageSpec, ...]
    experts: tuple[LocalExpertsSpec, ...]
    optim: OptimConfig
    timeout: float
    load_timeout: float
    build_stage: Callable[[StageSpec], Any] = Stage

    def arguments(self, plan: Plan) -> dict[Address, tuple[Any, ...]]:
        """What every `AttentionWorker` and `ExpertActor` is made of."""
        workers: dict[Address, tuple[Any, ...]] = {
            ("worker", rank): (plan, rank, stage, self.optim, self.timeout, self.build_stage)
            for rank, stage in enumerate(self.stages)
        }
        return workers | {("experts", spec.rank): (plan, spec, self.timeout) for spec in self.experts}


def actor_specs(
    plan: Plan,
    config: Config,
    model_dir: str,
    formulas: Mapping[int, ExpertFormula] | None = None,
    root: str = "model",
) -> ActorSpecs:
    """Specs for every actor of `plan`.

    Args:
        plan, config: who does what, and how.
        model_dir: the resolved Hugging Face directory.
        formulas: MoE layer -> what its experts compute; None = found out, and `root`, by building the model
            on meta.
        root: module name of the language model (`StageModel.root`).
    """
    stages = stage_specs(plan, config, model_dir)
    if formulas is None:
        whole = replace(stages[0], layers=(0, plan.dims.num_layers))
        built = build_on_meta(whole)
        formulas, root = built.formulas, built.root
    nodes = len(plan.hardware.on(0))
    experts = tuple(
        LocalExpertsSpec(
            **vars(actor) | {"node": actor.node if nodes > 1 else -1},
            model_dir=model_dir,
            lora=config.lora,
            optim=config.optim,
            seed=config.seed,
            formulas=formulas,
            experts_path=config.model.experts_path,
            root=root,
        )
        for actor in plan.experts
    )
    return ActorSpecs(
        stages=stages,
        experts=experts,
        optim=config.optim,
        timeout=config.trainer.step_timeout,
        load_timeout=config.cluster.load_timeout,
    )


def stage_specs(plan: Plan, config: Config, model_dir: str) -> tuple[StageSpec, ...]:
    """What each attention worker of `plan` builds, by rank."""
    dtype = config.model.dtype if config.model.dtype != "auto" else plan.dims.dtype
    return tuple(
        StageSpec(
            model_dir=model_dir,
            layers=worker.layers,
            num_layers=plan.dims.num_layers,
            device=worker.device,
            dtype=dtype,
            attn_implementation=config.model.attn_implementation,
            seed=config.seed,
            lora=config.lora,
            loss_chunk=config.trainer.loss_chunk,
            keep_quantized=config.model.keep_quantized,
        )
        for worker in plan.workers
    )
