"""rule.nodes > 1: which Ray node is which host of the plan, and whether it is as the plan wants it.

Before anything is loaded, a small task looks at every node of the cluster: its sockets, instruction sets and
packages, and whether it sees the model and the run directory. The driver's node is host 0; the others are
the first nodes, in the order of their ids, that are as planned and have enough free CPUs. A host whose node
dies gets another one in the same way.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kt_ray.actors.ray.ray_placement import gpus_of
from kt_ray.actors.specs import ActorSpecs
from kt_ray.errors import UserError
from kt_ray.hardware.host_look import Shared, Sight, digest, look, versions
from kt_ray.hardware.machine import Gpu, Socket
from kt_ray.placement.plan import divide_cpus
from kt_ray.placement.plan_types import Plan, WorkerPlan
from kt_ray.placement.render import counted, cpu_ranges, gib

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayNode:
    """A Ray node. sight: what the task found, or why it found nothing. cpus, free; gpus (free ones): as Ray
    counts them."""

    id: str
    address: str
    cpus: float
    free: float
    sight: Sight | str
    gpus: float = 0.0


@dataclass(frozen=True)
class Hosts:
    """nodes: the Ray node of every host, in the plan's order. lines: which these are, and why not others."""

    nodes: tuple[RayNode, ...]
    lines: tuple[str, ...] = ()


def unfit(plan: Plan, host: int, node: RayNode, cpus: float, own: Sequence[tuple[str, str]]) -> str | None:
    """Why `node` cannot be this host of the plan; None = it can.

    Args:
        cpus: CPUs that the host's actors reserve with Ray, at the most (`RayNode.cpus` where it has fewer).
        own: the driver's package versions.
    """
    sight = node.sight
    if isinstance(sight, str):
        return sight
    if min(cpus, node.cpus) > node.free + 1e-6:
        return f"{node.free:g} of its {node.cpus:g} CPUs are free, {min(cpus, node.cpus):g} are needed"
    if not node.cpus:
        return "it offers no CPUs"
    if len(gpus := gpus_of(plan, host)) > node.gpus and host:
        return (
            f"{counted(int(node.gpus), 'GPU')} free, {len(gpus)} needed (with rule.attention_hosts=driver "
            "only the driver's host needs any)"
        )
    if host and gpus and sight.hardware.sliced:
        return f"one of its cards is cut into slices (MIG): {sight.hardware.sliced}"
    if host and sight.cards and _lacks(gpus, sight.cards):
        return f"its GPUs are {_named(sight.cards)}, the plan needs {_named(gpus)}"
    planned_sockets, sockets = plan.hardware.on(host), sight.hardware.sockets
    if len(sockets) != len(planned_sockets):
        return f"it has {counted(len(sockets), 'socket')}, planned {len(planned_sockets)}"
    cores, planned_cores = [s.cores for s in sockets], [s.cores for s in planned_sockets]
    if cores != planned_cores:
        return f"its sockets have {cores} cores, planned {planned_cores}"
    needs = _needs(plan, host)
    for socket, planned in zip(sockets, planned_sockets, strict=True):
        need = needs.get(planned.node, 0)
        if socket.memory_bytes < need:
            return f"its socket {socket.node} has {gib(socket.memory_bytes)}, the plan needs {gib(need)}"
    forced = {actor.isa for actor in plan.experts if actor.host == host} - {"auto"}
    missing = [isa for isa in forced if isa not in sight.hardware.isas]
    if missing or (not forced and sight.hardware.isas[-1:] != plan.hardware.isas[-1:]):
        best = sight.hardware.isas[-1] if sight.hardware.isas else "none"
        return f"its best instruction set is {best}, planned {', '.join(forced) or plan.hardware.isas[-1]}"
    return _stranger(sight, own)


def _lacks(planned: Iterable[Gpu], cards: Sequence[Gpu]) -> bool:
    """Whether a planned GPU has no card of its name and at least its memory; a driver may reserve less."""

    def sizes(gpus: Iterable[Gpu], name: str) -> list[int]:
        return sorted((gpu.memory_bytes for gpu in gpus if gpu.name == name), reverse=True)

    planned = tuple(planned)
    for name in {gpu.name for gpu in planned}:
        need, have = sizes(planned, name), sizes(cards, name)
        if len(need) > len(have) or any(there < least for there, least in zip(have, need, strict=False)):
            return True
    return False


def _named(gpus: Iterable[Gpu]) -> str:
    kinds = Counter((gpu.name, gpu.memory_bytes) for gpu in gpus).items()
    return ", ".join(f"{count} × {name} of {gib(memory)}" for (name, memory), count in kinds)


def _stranger(sight: Sight, own: Sequence[tuple[str, str]]) -> str | None:
    """What a node has or sees otherwise than the driver."""
    other = [
        f"{name} {got}, here {mine}"
        for (name, got), (_, mine) in zip(sight.versions, own, strict=True)
        if got != mine
    ]
    if other:
        return "other packages: " + "; ".join(other)
    return "; ".join(sight.unseen) or None


def _needs(plan: Plan, host: int) -> dict[int, int]:
    """Planned bytes by NUMA node of a host."""
    return {int(b.device.split()[-1]): b.total for b in plan.budgets if b.is_socket and b.host == host}


def choose(
    plan: Plan,
    nodes: Iterable[RayNode],
    driver: str,
    cpus: Sequence[float],
    own: Sequence[tuple[str, str]],
    kept: Mapping[int, RayNode] = MappingProxyType({}),
) -> Hosts:
    """The Ray node of every host of the plan.

    Args:
        nodes: those alive. driver: id of the driver's. cpus: that each host's actors reserve.
        kept: hosts that have their nodes already; these are not in `nodes`.

    Raises:
        UserError: the driver's node is not as planned, or too few others are; it says why each is not.
    """
    chosen = dict(kept)
    if 0 not in chosen:
        chosen[0] = next(node for node in nodes if node.id == driver)
        wrong = unfit(plan, 0, chosen[0], cpus[0], own)
        if wrong is not None:
            raise UserError(
                "the driver's Ray node is not as planned",
                where=f"node {chosen[0].address} ({chosen[0].id[:8]})",
                observed=wrong,
                remedy="start Ray there with all CPUs of the host, and end what else runs in the cluster",
            )
    passed = []
    missing = [host for host in range(plan.hardware.hosts) if host not in chosen]
    for node in sorted((n for n in nodes if n.id != driver), key=lambda n: n.id):
        if not missing:
            break
        wrong = unfit(plan, missing[0], node, cpus[missing[0]], own)
        if wrong is None:
            chosen[missing.pop(0)] = node
        else:
            passed.append(f"node {node.address} ({node.id[:8]}): {wrong}")
    if missing:
        raise UserError(
            "the Ray cluster has too few nodes for the plan",
            where=f"rule.nodes={plan.hardware.hosts}",
            observed=f"{counted(len(chosen), 'node')} as planned" + "".join(f"; {line}" for line in passed),
            required=f"{plan.hardware.hosts} nodes like the driver's",
            remedy="start Ray on more hosts (ray start --address=HEAD:PORT; docs/multi_node.md), or lower "
            "rule.nodes",
        )
    new = [(i, node) for i, node in sorted(chosen.items()) if i not in kept]
    lines = [f"host {i}: Ray node {node.address} ({node.id[:8]})" for i, node in new]
    in_order = tuple(chosen[host] for host in range(plan.hardware.hosts))
    return Hosts(in_order, (*lines, *(f"not used: {line}" for line in passed)))


def find_hosts(
    plan: Plan,
    shared: Shared,
    cpus: Sequence[float],
    timeout: float,
    kept: Mapping[int, RayNode] = MappingProxyType({}),
) -> Hosts:
    """Look at every node of the connected cluster and choose the plan's hosts among them.

    Args:
        shared: what they must see. cpus: that each host's actors reserve with Ray.
        timeout: seconds that the nodes may take to answer. kept: hosts that have their nodes already.

    Raises:
        UserError: see `choose`.
    """
    nodes = _nodes(shared, timeout, {node.id for node in kept.values()})
    return choose(plan, nodes, ray.get_runtime_context().get_node_id(), cpus, versions(), kept)


def shared_by(specs: ActorSpecs, run_dir: str | None) -> Shared:
    """What all nodes must see as the driver sees it now. run_dir: None = not checked."""
    paths = {specs.stages[0].model_dir, *(host.experts_path for host in specs.experts if host.experts_path)}
    contents = tuple((path, digest(path)) for path in sorted(map(os.path.abspath, paths)))
    return Shared(contents, run_dir, f".kt_ray-{secrets.token_hex(8)}")


def check_nodes(plan: Plan, shared: Shared, experts: Mapping[str, AbstractSet[int]], timeout: float) -> None:
    """Nodes that Ray chose for a plan for one host.

    Args:
        experts: ranks of the expert actors on each of them, by its id. Else as in `find_hosts`.

    Raises:
        UserError: one of them cannot run kt_ray, or has other packages, does not see the files or may not use
            the CPUs of an expert actor on it.
    """
    own = versions()
    nodes = [node for node in ray.nodes() if node["NodeID"] in experts]
    for node, sight in zip(nodes, _sights(nodes, shared, timeout), strict=True):
        if isinstance(sight, str):
            wrong: str | None = sight
        else:
            wrong = _stranger(sight, own) or _without_cpus(plan, experts[node["NodeID"]], sight)
        here = node["NodeID"] == ray.get_runtime_context().get_node_id()
        if wrong is None:
            if here and isinstance(sight, Sight) and (missing := _planned_cpus(plan) - _cpus(sight)):
                logger.warning(
                    "Ray's processes on this host may not use the CPUs %s, which the plan counts on: steps "
                    "will be slower; start Ray without taskset, or in a container with all CPUs",
                    cpu_ranges(sorted(missing)),
                )
            continue
        raise UserError(
            "a Ray node is not as the run needs it",
            where=f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]}), "
            + ("the driver's" if here else "where Ray put actors: the driver's had no room for all"),
            observed=wrong,
            required="the driver's packages, model directory, run directory and CPUs",
            remedy="start Ray on this host with the Python, the user and the CPUs (taskset, Slurm) of this "
            "command, or set cluster.address=local"
            if here
            else "put the model and run.root on a disk that all nodes share and install the same packages on "
            "all; or free CPUs and GPUs on the driver's (ray status), or set cluster.address=local",
        )


def _cpus(sight: Sight) -> set[int]:
    """That processes there may use."""
    return {cpu for socket in sight.hardware.sockets for cpu in socket.cpus}


def _planned_cpus(plan: Plan) -> set[int]:
    own = [actor.cpus for actor in plan.experts] + [worker.cpus for worker in plan.workers]
    return {cpu for cpus in own for cpu in cpus}


def _without_cpus(plan: Plan, ranks: AbstractSet[int], sight: Sight) -> str | None:
    """An expert actor on a node that has none of its CPUs: its threads could not be pinned. ranks: of those
    that are there."""
    may = _cpus(sight)
    for actor in plan.experts:
        if actor.rank in ranks and actor.cpus and not may.intersection(actor.cpus):
            return (
                f"expert actor {actor.rank} is planned on the CPUs {cpu_ranges(actor.cpus)}, Ray may use "
                f"{cpu_ranges(sorted(may))} there"
            )
    return None


def _nodes(shared: Shared, timeout: float, known: AbstractSet[str]) -> list[RayNode]:
    from ray._private.state import available_resources_per_node

    alive = [node for node in ray.nodes() if node["Alive"] and node["NodeID"] not in known]
    free: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            float(node["Resources"].get("CPU", 0.0)),
            float(free.get(node["NodeID"], {}).get("CPU", 0.0)),
            sight,
            float(free.get(node["NodeID"], {}).get("GPU", 0.0)),
        )
        for node, sight in zip(alive, _sights(alive, shared, timeout), strict=True)
    ]


def _sights(nodes: Sequence[Mapping[str, Any]], shared: Shared, timeout: float) -> list[Sight | str]:
    """What each of these nodes finds when it looks, or why it cannot."""
    mark = Path(shared.run_dir) / shared.mark if shared.run_dir is not None else None
    if mark is not None:
        try:
            mark.touch()
        except OSError as error:  # after a death: at the start the directory has just been made
            what, remedy = "run directory cannot be written", "free space, or set run.root to another disk"
            raise UserError(what, where=str(mark.parent), observed=error, remedy=remedy) from error
    task: Any = ray.remote(num_cpus=0, max_retries=0)(look)
    try:
        answers = [
            task.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(shared)
            for node in nodes
        ]
        end = time.monotonic() + timeout  # for all together: each of many that hang would take its own
        return [_sight(answer, end, timeout) for answer in answers]
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _sight(answer: Any, end: float, timeout: float) -> Sight | str:
    try:
        sight: Sight = ray.get(answer, timeout=max(0.0, end - time.monotonic()))
    except GetTimeoutError:
        return f"no answer within {timeout:.0f} s"
    except RayError as error:  # kt_ray is not installed there, for one
        return f"it cannot run kt_ray ({str(error).strip().splitlines()[-1]})"
    return sight


def own_cpus(plan: Plan, specs: ActorSpecs, hosts: Hosts) -> ActorSpecs:
    """The specs with every expert actor's CPUs and NUMA node as its own host numbers them; on the driver's,
    too, Ray's processes may have others of its CPUs than the driver (job steps of Slurm)."""
    changed = []
    for actor, spec in zip(plan.experts, specs.experts, strict=True):
        planned = [socket.node for socket in plan.hardware.on(actor.host)]
        socket = _sockets(hosts, actor.host)[planned.index(actor.node)]
        peers = [a.rank for a in plan.experts if (a.host, a.node) == (actor.host, actor.node)]
        cpus, _ = divide_cpus(socket, len(peers), peers.index(actor.rank))
        node = socket.node if spec.node >= 0 else -1
        changed.append(replace(spec, cpus=cpus, pinned=socket.pinned, node=node))
    return replace(specs, experts=tuple(changed))


def worker_cpus(plan: Plan, worker: WorkerPlan, hosts: Hosts | None) -> tuple[int, ...]:
    """CPUs that an attention worker is bound to, as its own host numbers them; empty = any."""
    if hosts is None or not worker.cpus:
        return worker.cpus
    planned = [socket.cpus for socket in plan.hardware.on(worker.host)]
    return _sockets(hosts, worker.host)[planned.index(worker.cpus)].cpus


def _sockets(hosts: Hosts, host: int) -> tuple[Socket, ...]:
    sight = hosts.nodes[host].sight
    assert isinstance(sight, Sight), "`choose` takes no node without one"
    return sight.hardware.sockets
