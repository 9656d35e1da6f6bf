"""From plan and configuration to what each actor is built from."""

from __future__ import annotations

from dataclasses import dataclass

from kt_ray.config.schema import Config, OptimConfig
from kt_ray.experts import ExpertHostSpec
from kt_ray.model.spec import StageSpec
from kt_ray.placement.types import Plan


@dataclass(frozen=True)
class ActorSpecs:
    """Everything needed to spawn the actors of a plan.

    stages: per worker rank; experts: per expert actor rank; timeout, load_timeout: seconds.
    """

    stages: tuple[StageSpec, ...]
    experts: tuple[ExpertHostSpec, ...]
    optim: OptimConfig
    timeout: float
    load_timeout: float


def actor_specs(plan: Plan, config: Config, model_dir: str) -> ActorSpecs:
    """Specs for every actor of `plan`; `model_dir` is the resolved Hugging Face directory."""
    dtype = config.model.dtype if config.model.dtype != "auto" else plan.dims.dtype
    stages = tuple(
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
        )
        for worker in plan.workers
    )
    nodes = len({socket.node for socket in plan.hardware.sockets})
    experts = tuple(
        ExpertHostSpec(
            rank=actor.rank,
            model_dir=model_dir,
            experts=actor.experts,
            lora=config.lora,
            optim=config.optim,
            seed=config.seed,
            isa=actor.isa,
            threads=actor.threads,
            cpus=actor.cpus,
            node=actor.node if nodes > 1 else -1,
            activations=actor.activations,
            backend=actor.backend,
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
