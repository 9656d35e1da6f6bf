"""From plan and configuration to what each actor is built from."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kt_ray.config.lora_patterns import expert_lora
from kt_ray.config.schema import Config, OptimConfig
from kt_ray.experts import LocalExpertsSpec
from kt_ray.model.build import build_on_meta
from kt_ray.model.stage_spec import StageSpec, StartAdapter
from kt_ray.native import ExpertFormula
from kt_ray.placement.generation_memory import absorbs_keys
from kt_ray.placement.memory import embedding_on_host, shares_weights
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.worker_lanes import experts_near
from kt_ray.transport.messages import Address

CUDA_VISIBLE = "CUDA_VISIBLE_DEVICES"


def _stage(spec: StageSpec) -> Any:
    from kt_ray.model.stage import Stage  # loads PEFT: seconds, for attention workers only

    return Stage(spec)


@dataclass(frozen=True)
class ActorSpecs:
    """Everything needed to spawn the actors of a plan.

    stages: per worker rank; experts: per expert actor rank; timeout: seconds without progress after which an
    actor is given up. recoveries: how often actors may be replaced. build_stage: what makes a worker's stage
    of its spec; a picklable stand-in replaces it in measurements and tests.
    """

    stages: tuple[StageSpec, ...]
    experts: tuple[LocalExpertsSpec, ...]
    optim: OptimConfig
    timeout: float
    recoveries: int = 0
    build_stage: Callable[[StageSpec], Any] = _stage

    def in_own_processes(self, cards: Mapping[str, str]) -> ActorSpecs:
        """The same for actors of which each sees one GPU only, as cuda:0.

        Args:
            cards: GPU of the plan on which lanes compute -> its name in CUDA_VISIBLE_DEVICES.
        """
        return replace(
            self,
            stages=tuple(
                replace(s, device="cuda:0") if s.device.startswith("cuda") else s for s in self.stages
            ),
            experts=tuple(own_lane(spec, cards) for spec in self.experts),
        )

    def expecting(self, stages: str, experts: str) -> ActorSpecs:
        """The same for actors that load these weights only, by fingerprint: an actor that is started again in
        the middle of a run must not take others."""
        return replace(
            self,
            stages=tuple(replace(spec, fingerprint=stages) for spec in self.stages),
            experts=tuple(replace(spec, fingerprint=experts) for spec in self.experts),
        )

    def arguments(self, plan: Plan) -> dict[Address, tuple[Any, ...]]:
        """What every `AttentionWorker` and `ExpertActor` is made of."""
        workers: dict[Address, tuple[Any, ...]] = {
            ("worker", rank): (plan, rank, stage, self.optim, self.timeout, self.build_stage)
            for rank, stage in enumerate(self.stages)
        }
        return workers | {("experts", spec.rank): (plan, spec, self.timeout) for spec in self.experts}


def share_weights(plan: Plan, specs: ActorSpecs) -> tuple[ActorSpecs, list[int]]:
    """Specs with which replicas of the driver's host have one copy of their streamed layers' weights.

    Returns:
        The specs, and the descriptors of files in memory, one per stage, that the caller keeps open: workers
        open them through this process, those that replace dead ones, too. None where nothing is shared.
    """
    if not shares_files(plan, specs):
        return specs, []
    files, paths = weights_files(plan.stages)
    return with_weights_files(plan, specs, 0, paths), files


def shares_files(plan: Plan, specs: ActorSpecs) -> bool:
    """Whether replicas of a host have streamed layers in common."""
    shared = any(spec.streamed and shares_weights(spec.lora) for spec in specs.stages)
    return shared and plan.replicas > plan.attention_hosts


def weights_files(count: int) -> tuple[list[int], list[tuple[str, str]]]:
    """Descriptors of new files in memory, and path and name of each for processes of this host."""
    # A name that no other file has: in another container the same path may be a stranger's.
    names = [f"kt_ray-weights-{secrets.token_hex(8)}" for _ in range(count)]
    files = [os.memfd_create(name, os.MFD_CLOEXEC) for name in names]
    return files, [(f"/proc/{os.getpid()}/fd/{file}", name) for file, name in zip(files, names, strict=True)]


def with_weights_files(
    plan: Plan, specs: ActorSpecs, host: int, paths: Sequence[tuple[str, str]]
) -> ActorSpecs:
    """Specs with which the workers of a host share these files, one per stage."""
    stages = (
        replace(spec, weights_file=paths[worker.stage]) if worker.host == host else spec
        for spec, worker in zip(specs.stages, plan.workers, strict=True)
    )
    return replace(specs, stages=tuple(stages))


def actor_specs(
    plan: Plan,
    config: Config,
    model_dir: str,
    formulas: Mapping[int, ExpertFormula] | None = None,
    root: str = "model",
    start: StartAdapter | None = None,
) -> ActorSpecs:
    """Specs for every actor of `plan`.

    Args:
        plan, config: who does what, and how.
        model_dir: the resolved Hugging Face directory.
        formulas: MoE layer -> what its experts compute; None = found out, and `root`, by building the model
            on meta.
        root: module name of the language model (`StageModel.root`).
        start: what LoRA starts from, if actors have to read it.
    """
    stages = stage_specs(plan, config, model_dir, start)
    if formulas is None:
        whole = replace(stages[0].of_layer(0), layers=(0, plan.dims.num_layers))
        built = build_on_meta(whole)
        formulas, root = built.formulas, built.root
    nodes = len(plan.hardware.on(0))
    lent = {actor for worker in plan.workers for actor in lent_experts(plan, worker.rank)}
    experts = tuple(
        LocalExpertsSpec(
            **vars(actor) | {"node": actor.node if nodes > 1 else -1},
            model_dir=model_dir,
            lora=expert_lora(config.lora, plan.dims.moe_layers, plan.dims.num_experts),
            optim=config.optim,
            seed=config.seed,
            formulas=formulas,
            tokens_per_row=plan.dims.tokens_per_row,
            experts_path=config.model.experts_path,
            root=root,
            start=start,
            shared=actor.rank in lent,
        )
        for actor in plan.experts
    )
    return ActorSpecs(
        stages=stages,
        experts=experts,
        optim=config.optim,
        timeout=config.trainer.step_timeout,
        recoveries=config.trainer.recoveries,
    )


def stage_specs(
    plan: Plan, config: Config, model_dir: str, start: StartAdapter | None = None
) -> tuple[StageSpec, ...]:
    """What each attention worker of `plan` builds, by rank."""
    return tuple(
        StageSpec(
            model_dir=model_dir,
            layers=worker.layers,
            num_layers=plan.dims.num_layers,
            device=worker.device,
            dtype=plan.dtype,
            attn_implementation=config.model.attn_implementation,
            seed=config.seed,
            lora=config.lora,
            loss_chunk=config.trainer.loss_chunk,
            keep_quantized=config.model.keep_quantized,
            activations=plan.activations,
            attention_output=plan.attention_output,
            head_ranges=plan.head_ranges,
            waiting=worker.waiting,
            handed=plan.dims.handed,
            streamed=worker.streamed,
            slots=worker.slots,
            embedding_on_host=embedding_on_host(plan.dims, worker, plan.stages),
            backward=plan.backward,
            absorbs_keys=absorbs_keys(config),
            padded=config.pads(plan.replicas),
            start=start,
        )
        for worker in plan.workers
    )


def lent_experts(plan: Plan, rank: int) -> tuple[int, ...]:
    """Ranks of the expert actors whose memory an attention worker reads: with a lane, those of its host that
    compute its replica's tokens."""
    worker = plan.workers[rank]
    if worker.lane is None:
        return ()
    actors = [plan.experts[actor] for actor in plan.experts_of(worker.replica)]
    return tuple(actor.rank for actor in experts_near(worker, actors))


def own_lane(spec: LocalExpertsSpec, cards: Mapping[str, str]) -> LocalExpertsSpec:
    """The spec for a process that sees the lane's GPUs only, as its cuda:0, cuda:1, …

    Expert actors take no part of a GPU from Ray: the card is reserved whole, for the attention workers of the
    same device or for the lane alone, and the plan counts what the lane uses of it. Ray leaves the
    environment of an actor without GPUs alone or hides them all, by version, so the actor names its own
    before CUDA starts.

    Args:
        cards: see `ActorSpecs.in_own_processes`.
    """
    if spec.lane is None or not spec.lane.cuda:
        return spec
    places = [spec.place(device) for device in spec.lane.devices]
    own = tuple(f"cuda:{number}" for number in range(len(places)))
    visible, named = [cards[place] for place in places], tuple(f"{p} ({cards[p]})" for p in places)
    return replace(spec, lane=replace(spec.lane, devices=own, visible=",".join(visible), named=named))


def show_own_gpu(spec: LocalExpertsSpec) -> None:
    """Let this process see the GPUs of its lane, and no other.

    Raises:
        RuntimeError: CUDA runs already and would not look again.
    """
    if spec.lane is None or not spec.lane.visible:
        return
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"{CUDA_VISIBLE} is set too late: CUDA runs already in this process")
    os.environ[CUDA_VISIBLE] = spec.lane.visible
