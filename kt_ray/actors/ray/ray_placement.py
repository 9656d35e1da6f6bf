"""Where Ray puts the actors of a plan: CPUs they reserve, bundles of the placement group, GPUs behind them.

Workers of one GPU share a bundle that reserves it whole: fractions alone would let Ray spread them over the
free halves of several. The lane of expert actors computes on the card behind its device's bundle, which is
reserved for it alone where no worker has that device. Sharing and cards of different size are untested on
hardware; the logic is tested with GPUs that Ray is told about.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RaySystemError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray.config.schema import RayRule
from kt_ray.errors import UserError
from kt_ray.hardware.describe import this_host
from kt_ray.hardware.machine import Gpu, gpu_name
from kt_ray.placement.plan_types import Plan
from kt_ray.transport.messages import Address

PACKED = ("PACK", "STRICT_PACK")  # of rule.ray.strategy: all actors on one node


@dataclass(frozen=True)
class Seats:
    """bundles of the placement groups; of: the bundle of every actor; host: of every bundle; gpu: the bundle
    of every GPU of the plan that is used (`gpu_name`).
    """

    bundles: tuple[dict[str, float], ...]
    of: dict[Address, int]
    host: tuple[int, ...]
    gpu: dict[str, int]

    def of_host(self, host: int) -> list[int]:
        """Bundles of a host, in the order of its placement group."""
        return [bundle for bundle, there in enumerate(self.host) if there == host]

    def place(self, groups: Mapping[int, Any], bundle: int) -> PlacementGroupSchedulingStrategy:
        """A bundle for Ray. groups: the placement group of its host, by host."""
        host = self.host[bundle]
        index = self.of_host(host).index(bundle)
        return PlacementGroupSchedulingStrategy(groups[host], placement_group_bundle_index=index)


def threads_of(plan: Plan) -> dict[Address, float]:
    """Threads of every actor."""
    workers: dict[Address, float] = {("worker", w.rank): float(w.threads) for w in plan.workers}
    most = float(max(actor.threads for actor in plan.experts))
    return workers | {("experts", actor.rank): most for actor in plan.experts}


def host_of(plan: Plan, address: Address) -> int:
    """Host of an actor."""
    kind, rank = address
    return plan.experts[rank].host if kind == "experts" else plan.workers[rank].host


def reservations(plan: Plan, rule: RayRule, have: Sequence[float]) -> dict[Address, float]:
    """CPUs that every actor reserves.

    On a host without GPUs both kinds compute on the same cores in turn, so threads may add up to more than
    there are; reservations are then scaled down to what the host has.

    Args:
        have: CPUs of every host, as Ray counts them; one figure for all where Ray places freely.
    """
    threads = threads_of(plan)
    reserved: dict[Address, float] = {}
    for address, count in threads.items():
        host = host_of(plan, address) if len(have) > 1 else 0
        peers = sum(t for a, t in threads.items() if len(have) == 1 or host_of(plan, a) == host)
        cpus = rule.worker_cpus if address[0] == "worker" else rule.expert_cpus
        scale = min(1.0, have[host] / peers)
        # Ray takes no bundle of nothing.
        reserved[address] = max(0.01, float(cpus) if cpus != "auto" else int(count * scale * 100) / 100)
    return reserved


def cpus_for_one_host(rule: RayRule) -> float:
    """CPUs for the actors of a plan for one host, as Ray counts them.

    Those of one node, so that PACK can keep the actors there: the driver's, or the largest where that one
    offers none. SPREAD asks for all nodes.
    """
    of_node = {node["NodeID"]: node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]}
    if rule.strategy not in PACKED:
        return float(sum(of_node.values())) or 1.0
    own = of_node.get(ray.get_runtime_context().get_node_id())
    return float(own or max(of_node.values(), default=0.0)) or 1.0


def on_own_node(bundles: Sequence[Mapping[str, float]]) -> list[dict[str, str]] | None:
    """Ray's label selectors that keep bundles on the driver's node; None where it has no room for all now.

    PACK prefers no node, and the driver's has the run directory and the model.
    """
    from ray._private.state import available_resources_per_node

    own = ray.get_runtime_context().get_node_id()
    try:
        free = available_resources_per_node().get(own, {})
    except RaySystemError:  # through ray:// Ray does not say
        return None
    for kind in ("CPU", "GPU"):
        if sum(bundle.get(kind, 0.0) for bundle in bundles) > free.get(kind, 0.0) + 1e-6:
            return None
    return [{"ray.io/node-id": own}] * len(bundles)


def reserved_by_host(plan: Plan, rule: RayRule) -> list[float]:
    """CPUs that the actors of every host reserve together where there are enough."""
    hosts = range(plan.hardware.hosts)
    reserved = reservations(plan, rule, [math.inf] * len(hosts))
    return [
        sum(cpus for address, cpus in reserved.items() if host_of(plan, address) == host) for host in hosts
    ]


def gpu_share(plan: Plan) -> dict[str, float]:
    """Share of a GPU for each worker on it, by `WorkerPlan.place`."""
    users: dict[str, int] = {}
    for worker in plan.workers:
        if worker.device.startswith("cuda"):
            users[worker.place] = users.get(worker.place, 0) + 1
    return {device: 1.0 / count for device, count in users.items()}


def lane_devices(plan: Plan) -> dict[str, int]:
    """GPUs of the plan on which expert actors compute, in order, and the host of each."""
    cards = {
        actor.place(device): actor.host
        for actor in plan.experts
        if actor.lane is not None and actor.lane.cuda
        for device in actor.lane.devices
    }
    return dict(sorted(cards.items()))


def gpus_of(plan: Plan, host: int) -> list[Gpu]:
    """GPUs of a host that the plan uses."""
    used = {worker.place for worker in plan.workers if worker.host == host and worker.device != "cpu"}
    used |= {card for card, there in lane_devices(plan).items() if there == host}
    return [gpu for gpu in plan.hardware.gpus if gpu_name(host, f"cuda:{gpu.index}") in used]


def seats(plan: Plan, cpus: dict[Address, float]) -> Seats:
    """A bundle per GPU for all its workers, and one per actor without a GPU.

    A lane's GPU without workers has a bundle in which no actor sits. Where cards differ, bundles of GPUs are
    all as large as the largest, so that they can be exchanged (`by_gpu`).
    """
    bundles: list[dict[str, float]] = []
    of: dict[Address, int] = {}
    host: list[int] = []
    on_gpu: dict[str, int] = {}
    for address, reserved in cpus.items():
        worker = plan.workers[address[1]] if address[0] == "worker" else None
        device = worker.place if worker is not None and worker.device != "cpu" else "cpu"
        if device in on_gpu:
            of[address] = on_gpu[device]
            bundles[on_gpu[device]]["CPU"] += reserved
            continue
        of[address] = len(bundles)
        host.append(host_of(plan, address))
        if device != "cpu":
            on_gpu[device] = len(bundles)
            bundles.append({"CPU": reserved, "GPU": 1.0})
        else:
            bundles.append({"CPU": reserved})
    for device, there in lane_devices(plan).items():
        if device not in on_gpu:
            on_gpu[device] = len(bundles)
            host.append(there)
            bundles.append({"GPU": 1.0})
    most = max((bundles[i].get("CPU", 0.0) for i in on_gpu.values()), default=0.0)
    for i in on_gpu.values() if most and differ(plan) else ():
        bundles[i]["CPU"] = most
    return Seats(tuple(bundles), of, tuple(host), on_gpu)


def by_gpu(plan: Plan, chosen: Seats, gpus: dict[int, tuple[str, Gpu | None]]) -> Seats:
    """The seats with workers and lanes at the bundles whose GPUs are those of the plan.

    Args:
        gpus: bundle -> (Ray's id of its GPU, the GPU itself or None where it cannot be seen).

    Raises:
        UserError: Ray reserved cards of another name than the plan's, or smaller ones.
    """
    planned = {
        gpu_name(host, f"cuda:{gpu.index}"): gpu
        for host in range(plan.hardware.hosts)
        for gpu in plan.hardware.gpus
    }
    devices = [device for device in planned if device in chosen.gpu]
    free = sorted(gpus, key=lambda bundle: (len(gpus[bundle][0]), gpus[bundle][0]))
    bundle_of: dict[str, int] = {}
    for device in devices:
        gpu = planned[device]
        fitting = {
            bundle: gpu.memory_bytes if card is None else card.memory_bytes
            for bundle, (_, card) in ((bundle, gpus[bundle]) for bundle in free)
            if chosen.host[bundle] == chosen.host[chosen.gpu[device]]
            and (card is None or (card.name == gpu.name and card.memory_bytes >= gpu.memory_bytes))
        }
        if fitting:  # the smallest: another may need a larger one
            bundle_of[device] = min(fitting, key=fitting.__getitem__)
            free.remove(bundle_of[device])
        else:
            raise UserError(
                "Ray reserved another GPU than the plan's",
                where=f"{device}: {gpu.name}",
                observed=", ".join(
                    f"GPU {i}: {card.name if card else 'unknown'}" for i, card in gpus.values()
                ),
                remedy="end what else uses GPUs in the cluster, or plan with the cards that are free "
                "(CUDA_VISIBLE_DEVICES, rule.layers)",
            )
    of = {
        address: bundle_of.get(plan.workers[address[1]].place, bundle) if address[0] == "worker" else bundle
        for address, bundle in chosen.of.items()
    }
    return Seats(chosen.bundles, of, chosen.host, bundle_of)


def differ(plan: Plan) -> bool:
    """Whether it matters which card a device of the plan is: those of a host, or of hosts, may differ."""
    kinds = {(gpu.name, gpu.memory_bytes) for gpu in plan.hardware.gpus}
    return (len(kinds) > 1 or plan.attention_hosts > 1) and bool(gpu_share(plan) or lane_devices(plan))


def cards_of(chosen: Seats, gpus: dict[int, tuple[str, Gpu | None]]) -> dict[str, str]:
    """What CUDA_VISIBLE_DEVICES calls the card of every GPU of the plan, in any process of its host."""
    cards = {device: gpus[bundle] for device, bundle in chosen.gpu.items()}
    return {
        device: gpu.uuid if gpu is not None and gpu.uuid else name for device, (name, gpu) in cards.items()
    }


def gpus_behind(
    groups: Mapping[int, Any], chosen: Seats, timeout: float
) -> dict[int, tuple[str, Gpu | None]]:
    """The GPU of every bundle of these hosts' that reserves one, as a task inside it sees it."""
    task: Any = ray.remote(num_cpus=0, num_gpus=1, max_retries=0)(_own_gpu)
    answers = {
        bundle: task.options(scheduling_strategy=chosen.place(groups, bundle)).remote()
        for bundle, resources in enumerate(chosen.bundles)
        if "GPU" in resources and chosen.host[bundle] in groups
    }
    return {bundle: ray.get(answer, timeout=timeout) for bundle, answer in answers.items()}


def _own_gpu() -> tuple[str, Gpu | None]:
    """Ray's id of the GPU that this task holds, and the GPU as nvidia-smi describes it."""
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    gpus = this_host().gpus
    return (ids[0] if ids else "", gpus[0] if gpus else None)


def await_group(
    group: Any, bundles: Sequence[dict[str, float]], timeout: float, *, status: bool = True
) -> None:
    """Wait until Ray has reserved the placement group; else say what is missing, with `ray status` or not."""
    try:
        ray.get(group.ready(), timeout=timeout)
    except GetTimeoutError as error:
        totals = {key: round(sum(b.get(key, 0.0) for b in bundles), 2) for key in ("CPU", "GPU")}
        have = ray.available_resources()
        if status:
            print(ray_status(), file=sys.stderr)
        raise UserError(
            f"Ray did not provide the actors' resources within {timeout:.0f} s",
            where="placement group " + " ".join(str(b) for b in bundles),
            observed=f"free now: CPU {have.get('CPU', 0):g}, GPU {have.get('GPU', 0):g}",
            required=f"CPU {totals['CPU']:g}, GPU {totals['GPU']:g}",
            remedy="free resources, choose a smaller rule, or lower rule.ray.worker_cpus and "
            "rule.ray.expert_cpus",
        ) from error


def ray_status() -> str:
    """What `ray status` prints for the connected cluster, and its resources as Ray counts them now."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        status = done.stdout or done.stderr
    except subprocess.TimeoutExpired:
        status = "ray status: no answer within 60 s\n"
    # A cluster that has just started has no status yet.
    total, free = ray.cluster_resources(), ray.available_resources()
    counted = [
        f"  {kind}: {free.get(kind, 0):g} of {total[kind]:g} free" for kind in ("CPU", "GPU") if kind in total
    ]
    return "\n".join([status.rstrip(), f"Resources of {len(ray.nodes())} node(s):", *counted])
