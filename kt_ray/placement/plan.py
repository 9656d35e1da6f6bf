"""From (model dimensions, configuration, hardware) to a plan. Pure functions; every "auto" ends here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kt_ray.config.schema import Config, RuleConfig
from kt_ray.errors import UserError
from kt_ray.placement.formats import BACKEND_STORAGE
from kt_ray.placement.hardware import stages_named
from kt_ray.placement.memory import budgets
from kt_ray.placement.render import counted, gib, plan_to_dict
from kt_ray.placement.split import LayerSplit, split_experts, split_layers
from kt_ray.placement.transport import choose_transport
from kt_ray.placement.types import Budget, ExpertActorPlan, Hardware, ModelDims, Plan, Socket, WorkerPlan

__all__ = ["choose_activations", "make_plan", "plan_to_dict", "resolve_device"]

GPU_WORKER_THREADS = 4  # a GPU's worker only copies and launches on the host


def make_plan(dims: ModelDims, config: Config, hardware: Hardware) -> Plan:
    """Who holds and does what for this model, configuration and host.

    Raises:
        UserError: the model cannot be trained (mode=train), or the rule asks for more stages than
            layers, more GPUs than there are, more replicas than rows, an instruction set the host lacks.
    """
    rule = config.rule
    if config.mode == "train" and dims.refusal:
        raise UserError(
            f"{dims.model_type} cannot be trained from this checkpoint",
            where=dims.name,
            observed=dims.refusal,
            remedy="use another checkpoint, or mode=plan to see its placement",
        )
    _check_replicas(config)
    device = resolve_device(rule, hardware)
    stages = _stages(rule, device, hardware, dims)
    split = split_layers(dims, rule, stages)
    devices = _devices(rule, device, split, stages, hardware)
    dtype = dims.dtype if config.model.dtype == "auto" else config.model.dtype
    notes = [*dims.notes, *_weights_notes(dims, config, dtype)]
    if not hardware.present:
        notes.append(f"planned for described hardware, not for this host: {hardware.source}")
    workers = _workers(rule, hardware, split, devices, device)
    experts, expert_notes = _experts(dims, rule, hardware)
    groups, group_notes = _groups(config)
    memory = budgets(dims, config, hardware, workers, experts, groups, dtype)
    if rule.experts.activations == "auto":
        chosen, why = choose_activations(memory)
        experts = tuple(replace(actor, activations=chosen) for actor in experts)
        memory = budgets(dims, config, hardware, workers, experts, groups, dtype)
        expert_notes.append(why)
    notes += expert_notes + group_notes + _backend_notes(rule, hardware)
    return Plan(
        dims=dims,
        hardware=hardware,
        workers=workers,
        experts=experts,
        stages=stages,
        replicas=rule.replicas,
        groups=groups,
        budgets=memory,
        notes=tuple(notes),
        rule=rule.name,
        dtype=dtype,
        tokens_per_step=config.trainer.batch_size * config.data.max_length,
        transport=choose_transport(rule),
    )


ROOM = 0.9  # of a socket's memory that a plan may fill by choice: the system and the page cache need some


def choose_activations(retained: Sequence[Budget]) -> tuple[str, str]:
    """What rule.experts.activations=auto comes to, and why.

    Args:
        retained: budgets of the plan with "retain".

    Returns:
        "retain" where every socket then has room to spare, else "recompute"; and a sentence for the plan's
        notes. What a GPU lacks changes nothing: experts keep nothing there.
    """
    over = [
        b for b in retained if b.device.startswith("socket") and b.capacity and b.total > ROOM * b.capacity
    ]
    if not over:
        return "retain", "rule.experts.activations=auto: retain, which fits"
    worst = max(over, key=lambda b: b.total / b.capacity)
    return "recompute", (
        f"rule.experts.activations=auto: recompute; retain would need {gib(worst.total)} of the "
        f"{gib(worst.capacity)} of {worst.device}"
    )


def resolve_device(rule: RuleConfig, hardware: Hardware) -> str:
    """ "cpu" or "cuda": what rule.device, or the devices its layer patterns name, come to on this host."""
    if rule.device != "auto":
        return rule.device
    named = [str(e.get("device", "")) for e in rule.layers or () if isinstance(e, Mapping)]
    if named:
        return "cuda" if any(name.startswith("cuda") for name in named) else "cpu"
    return "cuda" if hardware.gpus else "cpu"


def _check_replicas(config: Config) -> None:
    rows, replicas = config.trainer.batch_size, config.rule.replicas
    if replicas > rows:
        raise UserError(
            "there are more replicas than rows per step",
            where="rule.replicas",
            observed=replicas,
            required=f"at most trainer.batch_size={rows}",
            remedy=f"set rule.replicas={rows} or raise trainer.batch_size",
        )


def _stages(rule: RuleConfig, device: str, hardware: Hardware, dims: ModelDims) -> int:
    if device == "cpu":
        return stages_named(rule, default=1)
    present = len(hardware.gpus)
    stages = stages_named(rule, default=max(1, min(present // rule.replicas, dims.num_layers)))
    if stages * rule.replicas > present:
        fewer = f"rule.stages={max(1, present // rule.replicas)}"
        other = "rule=auto"
        if rule.name == "auto":  # what asks for GPUs is then a key of its own
            other = "rule.layers=null" if rule.layers else "rule.device=cpu"
        raise UserError(
            "the rule needs more GPUs than there are",
            where=f"rule {rule.name} ({counted(stages, 'stage')}, {counted(rule.replicas, 'replica')})",
            observed=f"{counted(present, 'GPU')} on {hardware.source}",
            required=counted(stages * rule.replicas, "GPU"),
            remedy=f"set {fewer if present >= rule.replicas else other}, or mode=plan to see the plan",
        )
    return stages


def _devices(
    rule: RuleConfig, device: str, split: LayerSplit, stages: int, hardware: Hardware
) -> tuple[tuple[str, ...], ...]:
    """Device of every stage, per replica."""
    if device == "cpu":
        wrong = [name for name in split.devices if name not in (None, "cpu")]
        if wrong:
            raise _absent(wrong[0] or "", "only the cpu (rule.device=cpu)")
        return (("cpu",) * stages,) * rule.replicas
    present = {f"cuda:{gpu.index}" for gpu in hardware.gpus}
    per_replica = []
    for replica in range(rule.replicas):
        names = []
        for stage in range(stages):
            named = split.devices[stage]
            ordinal = stage
            if named is not None:
                if not named.removeprefix("cuda:").isdigit():
                    raise _absent(named, ", ".join(sorted(present)))
                ordinal = int(named.removeprefix("cuda:"))
            name = f"cuda:{ordinal + replica * stages}"
            if name not in present:
                raise _absent(name, ", ".join(sorted(present)))
            names.append(name)
        per_replica.append(tuple(names))
    flat = [name for names in per_replica for name in names]
    if len(set(flat)) != len(flat):
        raise UserError(
            "two attention workers would share a GPU",
            where="rule.layers with rule.replicas",
            observed=", ".join(flat),
            required="a GPU per worker (replica r uses the named devices + r * stages)",
            remedy="number the devices of rule.layers from cuda:0 without gaps, or set rule.replicas=1",
        )
    return tuple(per_replica)


def _absent(name: str, have: str) -> UserError:
    return UserError(
        "rule.layers names a device that is not there",
        where="rule.layers",
        observed=name,
        required=f"one of {have}",
        remedy="correct the devices, or set rule.layers=null for a balanced split",
    )


def _workers(
    rule: RuleConfig,
    hardware: Hardware,
    split: LayerSplit,
    devices: tuple[tuple[str, ...], ...],
    device: str,
) -> tuple[WorkerPlan, ...]:
    """All workers get the same number of torch threads, so that results do not depend on the layout.

    On the CPU a replica's stages work one after the other, and in turn with the experts: all may use
    every core of their socket; only replicas on the same socket share it.
    """
    sockets = hardware.sockets
    cores = min(socket.cores for socket in sockets)
    if isinstance(rule.worker_threads, int):
        threads = rule.worker_threads
    elif device == "cpu":
        threads = max(1, cores // math.ceil(rule.replicas / len(sockets)))
    else:
        threads = max(1, min(GPU_WORKER_THREADS, cores // 4))
    workers = []
    for replica, names in enumerate(devices):
        for stage, name in enumerate(names):
            rank = replica * len(names) + stage
            bound = device == "cpu" and len(sockets) > 1
            cpus = sockets[rank % len(sockets)].cpus if bound else ()
            workers.append(WorkerPlan(rank, replica, stage, split.ranges[stage], name, threads, cpus))
    return tuple(workers)


def _experts(
    dims: ModelDims, rule: RuleConfig, hardware: Hardware
) -> tuple[tuple[ExpertActorPlan, ...], list[str]]:
    sockets, wanted = hardware.sockets, rule.experts
    count = wanted.sockets if isinstance(wanted.sockets, int) else min(len(sockets), dims.num_experts)
    shares = split_experts(dims.num_experts, count)
    notes: list[str] = []
    if count > len(sockets):
        nodes = counted(len(sockets), "NUMA node")
        notes.append(f"{count} expert actors on {nodes}: actors of one node divide its cores and memory")
    # Actor i goes to node i * nodes // actors, so that neighbours in rank share a node.
    homes = [i * len(sockets) // count if count > len(sockets) else i for i in range(count)]
    actors = []
    for rank, home in enumerate(homes):
        socket, peers = sockets[home], [i for i, h in enumerate(homes) if h == home]
        cpus, cores = divide_cpus(socket, len(peers), peers.index(rank))
        if len(peers) > socket.cores and rank == peers[0]:
            notes.append(f"{len(peers)} expert actors share the {socket.cores} cores of node {socket.node}")
        threads = wanted.threads if isinstance(wanted.threads, int) else cores
        if threads > max(1, len(cpus)):
            notes.append(f"expert actor {rank}: {threads} threads on {len(cpus)} CPUs of node {socket.node}")
        actors.append(
            ExpertActorPlan(
                rank=rank,
                node=socket.node,
                cpus=cpus,
                threads=threads,
                experts=shares[rank],
                backend=wanted.backend,
                isa=wanted.isa,
                activations="retain" if wanted.activations == "auto" else wanted.activations,
            )
        )
    return tuple(actors), notes


def divide_cpus(socket: Socket, parts: int, part: int) -> tuple[tuple[int, ...], int]:
    """CPUs and cores of the `part`-th of `parts` actors on one node: whole cores, first threads first."""
    first, siblings = socket.cpus[: socket.cores], socket.cpus[socket.cores :]
    if parts > socket.cores:  # more actors than cores: they share
        core = part % socket.cores
        return first[core : core + 1], 1

    def piece(cpus: tuple[int, ...]) -> tuple[int, ...]:
        return cpus[len(cpus) * part // parts : len(cpus) * (part + 1) // parts]

    own = piece(first) if first else ()
    cores = len(own) if first else socket.cores // parts
    return own + piece(siblings), max(1, cores)


def _groups(config: Config) -> tuple[int, list[str]]:
    """Groups in flight: one where a replica has one micro-batch, else two, never more than micro-batches."""
    rows = math.ceil(config.trainer.batch_size / config.rule.replicas)
    micro_batches = math.ceil(rows / config.trainer.micro_batch_size)
    asked = config.rule.groups
    if not isinstance(asked, int):
        return min(2, micro_batches), []
    if asked > micro_batches:
        return micro_batches, [
            f"rule.groups={asked} lowered to {micro_batches}, the micro-batches of a replica"
        ]
    return asked, []


def _weights_notes(dims: ModelDims, config: Config, dtype: str) -> list[str]:
    """How weights outside the routed experts are held where the checkpoint stores them quantised."""
    if not dims.quantised:
        if not config.model.keep_quantized:
            return []
        return ["model.keep_quantized=true changes nothing: no weight outside the experts is quantised"]
    if config.model.keep_quantized:
        return ["quantised weights outside the experts stay as they are stored and are dequantised when used"]
    return [f"quantised weights outside the experts are dequantised to {dtype} when they are loaded"]


def _backend_notes(rule: RuleConfig, hardware: Hardware) -> list[str]:
    isa, backend = rule.experts.isa, rule.experts.backend
    best = hardware.isas[-1] if hardware.isas else "reference"
    if isa != "auto" and isa not in hardware.isas:
        raise UserError(
            "the forced instruction set is not available",
            where=f"rule.experts.isa on {hardware.source}",
            observed=isa,
            required="auto, " + ", ".join(hardware.isas),
            remedy="set rule.experts.isa=auto",
        )
    notes = []
    if backend in ("AMXBF16", *BACKEND_STORAGE) and "amx" not in hardware.isas:
        notes.append(f"{backend} without AMX: the same mathematics on {best if isa == 'auto' else isa}")
    if backend in BACKEND_STORAGE:
        fmt = BACKEND_STORAGE[backend].format
        notes.append(f"{backend}: experts are quantised to {fmt} while they stream in")
    return notes
