"""Which device each attention worker gets: how many stages, and their devices per replica. Pure functions.

Workers have a GPU each unless the rule says in so many words that they share one: two stages that
`rule.layers` gives the same device, or replicas whose devices it lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from kt_ray.config.limits import INT8_BACKENDS
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, RuleConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.describe import gpus_of_workers, named_devices, sliced_gpu, stages_named
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.generation_memory import generates
from kt_ray.placement.lane_plan import lane_wanted
from kt_ray.placement.plan_types import WorkerPlan
from kt_ray.placement.render import counted
from kt_ray.placement.split import Named


def with_gpus(rule: RuleConfig, hardware: Hardware) -> Hardware:
    """The hardware with as many GPUs, and as much memory of each, as rule.gpus and rule.gpu_memory say.

    Raises:
        UserError: there are fewer, or a card is cut into slices and GPUs are wanted.
    """
    on_cpu = rule.device == "cpu" and (not lane_wanted(rule) or "cpu" in rule.experts.lane_devices)
    if hardware.sliced and not on_cpu:
        raise sliced_gpu(hardware.sliced)
    if not isinstance(rule.gpu_memory, str):
        most = int(rule.gpu_memory * (1 << 30))
        hardware = replace(hardware, gpus=tuple(replace(gpu, cap=most) for gpu in hardware.gpus))
    unused = rule.device == "cpu" and not lane_wanted(rule)
    if unused or not isinstance(rule.gpus, int):
        return hardware
    present = len(hardware.gpus)
    if rule.gpus > present:
        other = "rule.gpus=auto" if present or rule.name == "auto" else "rule=auto"
        raise UserError(
            "the rule is for more GPUs than there are",
            where=f"rule.gpus={rule.gpus}" + (f" of rule {rule.name}" if rule.name != "auto" else ""),
            observed=f"{counted(present, 'GPU')} on {hardware.source}",
            required=counted(rule.gpus, "GPU"),
            remedy=f"set {other}, or mode=plan to see the plan",
        )
    return replace(hardware, gpus=hardware.gpus[: rule.gpus])


def first_kind(hardware: Hardware) -> int:
    """How many GPUs are as the first one, without a break: what rule.gpus may leave of uneven cards."""
    kinds = [(gpu.name, gpu.memory_bytes) for gpu in hardware.gpus]
    return next((n for n, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))


def with_stream(config: Config, hardware: Hardware) -> Config:
    """The configuration with rule.experts.stream=auto as off where nothing can be streamed: without a GPU, or
    beside attention on the CPU; to a stand-in; for answers, which have few tokens at a time; by experts in
    int8, which a GPU would multiply otherwise. hardware: as `with_gpus` leaves it."""
    asked = config.rule.experts
    possible = bool(hardware.gpus) and resolve_device(config.rule, hardware) == "cuda"
    possible &= (
        "cpu" not in asked.lane_devices and asked.backend not in INT8_BACKENDS and not generates(config)
    )
    if asked.stream != "auto" or possible:
        return config
    return with_keys(config, {"rule.experts.stream": "off"})


def resolve_device(rule: RuleConfig, hardware: Hardware) -> str:
    """ "cpu" or "cuda": what rule.device, or the devices that rule.layers names, come to on this host."""
    if rule.device != "auto":
        return rule.device
    named = named_devices(rule)
    if named:
        return "cuda" if any(name.startswith("cuda") for name in named) else "cpu"
    return "cuda" if hardware.gpus else "cpu"


def attention_hosts(rule: RuleConfig, device: str, hosts: int) -> int:
    """How many of so many hosts have attention workers: the driver's, or all, as many replicas on each.

    Raises:
        UserError: rule.attention_hosts=all with replicas that do not divide evenly.
    """
    if rule.attention_hosts == "driver" or hosts == 1:
        return 1
    even = rule.replica_count % hosts == 0
    if rule.attention_hosts == "all" and not even:
        raise UserError(
            "the replicas cannot be divided evenly over the hosts",
            where=f"rule.attention_hosts=all with rule.nodes={hosts}",
            observed=f"rule.replicas={rule.replicas}",
            required=f"{hosts} replicas, or a multiple of it",
            remedy=f"set rule.replicas={hosts}, or rule.attention_hosts=driver",
        )
    return hosts if even and (rule.attention_hosts == "all" or device == "cuda") else 1


def expert_copies(rule: RuleConfig, attention: int) -> int:
    """Copies of all routed experts.

    Args:
        attention: hosts with attention workers; with cluster=local those that one process stands for.

    Raises:
        UserError: they do not divide the hosts, or a team of hosts would have no attention worker.
    """
    copies = rule.experts.copy_count
    if rule.nodes % copies or (copies > 1 and attention < rule.nodes):
        raise UserError(
            "the hosts cannot be divided into teams with a copy of the experts each",
            where=f"rule.experts.copies={copies}",
            observed=f"rule.nodes={rule.nodes}, attention workers on {counted(attention, 'host')}",
            required="a divisor of rule.nodes, and attention workers on all hosts",
            remedy="set rule.experts.copies=1"
            if rule.nodes % copies
            else f"set rule.attention_hosts=all and rule.replicas={rule.nodes} (or a multiple), or "
            "rule.experts.copies=1",
        )
    return copies


def count_stages(rule: RuleConfig, device: str, hardware: Hardware, dims: ModelDims) -> int:
    """Pipeline stages per replica.

    Raises:
        UserError: more GPUs would be needed than there are.
    """
    hosts = attention_hosts(rule, device, hardware.hosts)
    if device == "cpu":
        return stages_named(rule, default=1)
    present = len(hardware.gpus)
    replicas = rule.replica_count // hosts  # of each host
    stages = stages_named(rule, default=max(1, min(present // replicas, len(dims.cuts) + 1)))
    wanted = gpus_of_workers(rule, stages, replicas)
    if wanted > present:
        numbered = isinstance(rule.stages, int) and rule.stages > 1
        change = "rule=auto"
        if rule.layers:  # which say themselves how many stages there are
            change = "rule.layers=null" + (" rule.stages=auto" if numbered else "")
        elif present >= replicas:
            change = f"rule.stages={max(1, present // replicas)}"
        elif rule.name == "auto":  # what asks for GPUs is then a key of its own
            change = f"rule.replicas={present * hosts}" if present else "rule.device=cpu"
            change += " rule.stages=1" if present and numbered else ""
        share = ", let workers share a GPU (rule.layers with a device list)" if present else ""
        raise UserError(
            "the rule needs more GPUs than there are",
            where=f"rule {rule.name} ({counted(stages, 'stage')}, {counted(rule.replica_count, 'replica')})",
            observed=f"{counted(present, 'GPU')} on {hardware.source}",
            required=counted(wanted, "GPU") + (" on each host" if hosts > 1 else ""),
            remedy=f"set {change}{share}, or mode=plan to see the plan",
        )
    return stages


def stage_devices(
    rule: RuleConfig, device: str, named: Sequence[Named], hardware: Hardware
) -> tuple[tuple[str, ...], ...]:
    """Device of every stage, per replica.

    Args:
        named: per stage what rule.layers says: a device, a list of one per replica, or None. The r-th replica
            of a host uses a device that is named alone moved up by r times the number of different devices
            named.

    Raises:
        UserError: a device that is not there, or replicas that would share a GPU although no list says so.
    """
    stages = len(named)
    if device == "cpu":
        return (("cpu",) * stages,) * rule.replica_count
    present = [f"cuda:{gpu.index}" for gpu in hardware.gpus]
    step = len({name for name in named if isinstance(name, str)}) or stages
    per_replica: list[tuple[str, ...]] = []
    per_host = rule.replica_count // attention_hosts(rule, device, hardware.hosts)
    for replica in range(rule.replica_count):
        names = []
        for stage, entry in enumerate(named):
            if isinstance(entry, tuple):
                name = entry[replica]
            else:
                first = stage if entry is None else _ordinal(entry, present)
                name = f"cuda:{first + replica % per_host * step}"
            if name not in present:
                raise _absent(name, ", ".join(present))
            names.append(name)
        per_replica.append(tuple(names))
    for first in range(0, rule.replica_count, per_host):
        _check_sharing(named, per_replica[first : first + per_host])
    return tuple(per_replica)


def _ordinal(name: str, present: Sequence[str]) -> int:
    digits = name.removeprefix("cuda:")
    if not digits.isdigit():
        raise _absent(name, ", ".join(present))
    return int(digits)


def _check_sharing(named: Sequence[Named], per_replica: Sequence[Sequence[str]]) -> None:
    """Replicas share a GPU only where a list says so: stepping on to a named device is a slip."""
    single = [stage for stage, entry in enumerate(named) if not isinstance(entry, tuple)]
    users: dict[str, set[int]] = {}
    for replica, names in enumerate(per_replica):
        for stage in single:
            users.setdefault(names[stage], set()).add(replica)
    if any(len(replicas) > 1 for replicas in users.values()):
        raise UserError(
            "two attention workers would share a GPU",
            where="rule.layers with rule.replicas",
            observed=", ".join(name for names in per_replica for name in names),
            required="a GPU per worker (replica r uses the named devices + r * the number of them)",
            remedy="number the devices of rule.layers from cuda:0 without gaps, or list one device per "
            "replica (device: [cuda:0, cuda:0] lets two replicas share cuda:0), or set rule.replicas=1",
        )


def shared_devices(workers: Sequence[WorkerPlan]) -> dict[str, int]:
    """GPUs with more than one attention worker, and how many."""
    users = Counter(worker.place for worker in workers if worker.device.startswith("cuda"))
    return {device: count for device, count in users.items() if count > 1}


def _absent(name: str, have: str) -> UserError:
    return UserError(
        "rule.layers names a device that is not there",
        where="rule.layers",
        observed=name,
        required=f"one of {have}",
        remedy="correct the devices, or set rule.layers=null for a balanced split",
    )
