"""The actors under Ray: placement group, named actors, dashboard, clean end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray import torch_environment
from kt_ray.actors.actor_calls import NOTICE, Handle
from kt_ray.actors.cluster import ActorCluster, LoadNote
from kt_ray.actors.ray.ray_actor import Peer, RemoteActor
from kt_ray.actors.ray.ray_address import dashboard_hint, dashboard_url, ray_directory, running_cluster
from kt_ray.actors.ray.ray_connection import RayConnection, last_line
from kt_ray.actors.ray.ray_hosts import Hosts, check_nodes, find_hosts, own_cpus, shared_by, worker_cpus
from kt_ray.actors.ray.ray_placement import (
    PACKED,
    Seats,
    await_group,
    by_gpu,
    cards_of,
    cpus_for_one_host,
    differ,
    gpu_share,
    gpus_behind,
    host_of,
    lane_devices,
    on_own_node,
    ray_status,
    reservations,
    reserved_by_host,
    seats,
)
from kt_ray.actors.ray.ray_weights import share_on_hosts
from kt_ray.actors.specs import ActorSpecs
from kt_ray.actors.watch import ActorDied
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import TryAgain, UserError
from kt_ray.hardware.host_look import Shared
from kt_ray.hardware.machine import Gpu
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.transports import several_nodes
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.transport.gloo_link import Meeting
from kt_ray.transport.inbox import Inbox
from kt_ray.transport.messages import Address

logger = logging.getLogger(__name__)

START_AGAIN = (
    "look for the kernel's out-of-memory killer (dmesg), then start again; "
    "trainer.restarts=10 does so by itself"
)
NOT_IMPORTED = "failed to import on the worker"  # Ray's words; it takes such an actor for a dead one
TAKEN = 10.0  # seconds after which a node that had room is another run's, at the first try
LOOK = 5.0  # seconds between looks at whether Ray still has a node

# Settings of the driver's environment that actors must see as well.
PASSED_ON = ("KT_RAY_ISA", "KT_RAY_DEBUG", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


class RayHandle(Handle):
    """The driver's hold on one actor."""

    def __init__(self, address: Address, actor: Any) -> None:
        self.address = address
        self.actor = actor

    def start(self, method: str, *args: Any) -> Any:
        return self.actor.compute.remote(method, *args)

    def control(self, method: str, *args: Any) -> Any:
        return self.actor.control.remote(method, *args)

    def listen(self, method: str, *args: Any) -> Any:
        return self.actor.listen.remote(method, *args)


@dataclass(frozen=True)
class RayActorSpec:
    """What one Ray actor is started from: arguments of `RayActor`, its bundle, and what it takes of it."""

    arguments: tuple[Any, ...]
    place: PlacementGroupSchedulingStrategy
    cpus: float
    gpus: float


class RayCluster(ActorCluster):
    """`cluster=ray`.

    Args:
        plan, specs, on_load: as for every cluster.
        config: how to reach or start Ray.
        rule: Ray resources of the rule.
        run_name: names the namespace of the actors.
        run_dir: where the actors write, which all hosts of the plan must share; None = not checked.
    """

    def __init__(
        self,
        plan: Plan,
        specs: ActorSpecs,
        config: ClusterConfig,
        rule: RayRule,
        run_name: str,
        on_load: LoadNote | None = None,
        run_dir: str | None = None,
    ) -> None:
        super().__init__(plan, specs, on_load)
        self.config = config
        self.run_dir = run_dir
        self.hosts: Hosts | None = None  # of a plan for several
        self.rule = rule
        self.namespace = config.namespace or f"kt_ray-{run_name}"
        self.dashboard_url: str | None = None
        self.joined = False  # a cluster that was there before
        self._connection = RayConnection(config, self.namespace)
        self._shared: Shared | None = None  # what all hosts of a plan for several see
        self._groups: dict[int, Any] = {}  # placement group of every host
        self._behind: dict[int, tuple[str, Gpu | None]] = {}  # the GPU of every bundle that has one
        self._actor_specs: dict[Address, RayActorSpec] = {}
        self._keepers: list[Any] = []  # see share_on_hosts
        self._epoch = 0  # how often the actors were introduced to each other

    # -- start --------------------------------------------------------------------------------

    def connect(self) -> list[str]:
        """Join a running cluster or start a local one; says which, and where the dashboard is.

        Raises:
            UserError: the cluster named does not answer or refuses, or the dashboard has no port or would be
                open to everybody.
        """
        if ray.is_initialized():
            self.dashboard_url = dashboard_url()
            where = "the cluster this process is connected to already"
            return [f"Ray: {where}{dashboard_hint(self.dashboard_url)}", *self._find_hosts()]
        running = running_cluster(self.config.address)
        if running is not None:
            if self.plan.hardware.hosts > 1 and running.address.startswith("ray://"):
                raise UserError(  # Ray tells a client neither its node nor what is free where
                    "a plan for several hosts does not run through ray://",
                    where=f"rule.nodes={self.plan.hardware.hosts} with {running.source}",
                    observed=running.address,
                    required="the HOST:PORT of the cluster, from one of its own hosts",
                    remedy="run this command on a host of the cluster with the cluster.address=HOST:PORT "
                    "that 'ray start' took; or set rule.nodes=1",
                )
            self.dashboard_url = self._connection.join(running)
            self.joined = True
            where = f"{running.address} (from {running.source})"
            return [
                f"Ray: joined the running cluster at {where}{dashboard_hint(self.dashboard_url)}",
                *self._find_hosts(),
            ]
        if self.plan.hardware.hosts > 1:
            raise UserError(
                "the plan needs several hosts, but no running Ray cluster was found",
                where=f"rule.nodes={self.plan.hardware.hosts} with cluster.address={self.config.address}",
                required="a cluster that these hosts have joined",
                remedy="start it with 'ray start --head' here and 'ray start --address=HOST:PORT' on the "
                "others (docs/multi_node.md), or set rule.nodes=1",
            )
        self.dashboard_url, notes = self._connection.start_local()
        why = "no running cluster found, started" if self.config.address == "auto" else "started"
        return [
            f"Ray: {why} a local one, which ends with this run{dashboard_hint(self.dashboard_url)}",
            *notes,
        ]

    def _find_hosts(self) -> tuple[str, ...]:
        """Which node is which host of a plan for several; its expert actors get that host's CPUs."""
        if self.plan.hardware.hosts == 1:
            return ()
        self._shared = shared_by(self.specs, self.run_dir)
        needed = reserved_by_host(self.plan, self.rule)
        self.hosts = find_hosts(self.plan, self._shared, needed, self.config.start_timeout)
        self.specs = own_cpus(self.plan, self.specs, self.hosts)
        return self.hosts.lines

    def _spawn(self) -> None:
        if not ray.is_initialized() or (self.plan.hardware.hosts > 1 and self.hosts is None):
            self.connect()
        reserved = self._reservations()
        chosen, cards = self._reserve(reserved, range(self.plan.hardware.hosts))
        self._keepers, self.specs = share_on_hosts(
            self.plan, self.specs, self._groups, chosen, self.config.start_timeout
        )
        self._describe(reserved, chosen, cards)
        for address in self._actor_specs:
            try:
                handle = self._create(address)
            except ValueError as error:
                raise UserError(
                    f"an actor {_name(address)} runs already",
                    where=f"Ray namespace {self.namespace}",
                    observed=error,
                    remedy="wait until the other run has ended, or set another run.name or cluster.namespace",
                ) from error
            (self.workers if address[0] == "worker" else self.experts).append(handle)
        self._introduce()

    def _reservations(self) -> dict[Address, float]:
        have = [node.cpus for node in self.hosts.nodes] if self.hosts else [cpus_for_one_host(self.rule)]
        return reservations(self.plan, self.rule, have)

    def _describe(self, reserved: dict[Address, float], chosen: Seats, cards: dict[str, str]) -> None:
        """What every actor is started from, now or after a death. Args: see `_reserve`."""
        share, specs = gpu_share(self.plan), self.specs.in_own_processes(cards)
        for (kind, rank), arguments in specs.arguments(self.plan).items():
            worker = self.plan.workers[rank] if kind == "worker" else None
            gpus = share.get(worker.place, 0.0) if worker else 0.0
            cpus = worker_cpus(self.plan, worker, self.hosts) if worker else specs.experts[rank].cpus
            place = chosen.place(self._groups, chosen.of[kind, rank])
            self._actor_specs[kind, rank] = RayActorSpec(
                (kind, rank, cpus, *arguments), place, reserved[kind, rank], gpus
            )

    def environment(self) -> dict[str, str]:
        """Variables that processes of this cluster must see."""
        variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        if self.joined:  # that cluster's processes have an environment of their own
            variables |= torch_environment.settings(os.environ)
        return variables

    def names(self) -> dict[Address, str]:
        """What the actors are called in the namespace."""
        return {address: _name(address) for address in self._actor_specs}

    def _create(self, address: Address) -> RayHandle:
        """An actor in its bundle of the placement group. Raises ValueError when its name is taken."""
        spec = self._actor_specs[address]
        environment = self.environment()
        runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
        factory = RemoteActor.options(
            name=_name(address),
            namespace=self.namespace,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            max_restarts=0,  # we put a new one in its place: decisions/010
            max_task_retries=0,
            scheduling_strategy=spec.place,
            **runtime_env,
        )
        return RayHandle(address, factory.remote(*spec.arguments))

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        """Into the bundles of those lost. Of a plan for one host, Ray moves the bundles of a dead node."""
        timeout = self.config.start_timeout
        deadline = time.monotonic() + timeout
        while True:
            self._kill(self._lost | lost)  # none may come back beside its successor
            self._replace_hosts(deadline)
            for address in sorted(self._lost | lost):
                handles = self.workers if address[0] == "worker" else self.experts
                handles[address[1]] = self._create_again(address)
            try:
                return self._introduce()
            except ActorLost:
                # Until Ray has noticed that a node is dead, it starts actors there.
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _replace_hosts(self, deadline: float) -> None:
        """Another node, now or when one joins, for every host whose node is dead. All actors there are lost.

        Not left to Ray, which would put the actors of two hosts on one node, or on one that nobody looked at.

        Raises:
            UserError: no node was as planned until `deadline`.
        """
        gone = self._gone()
        if self.hosts is None or self._shared is None or not gone:
            return
        self._lost |= {address for address in self._actor_specs if host_of(self.plan, address) in gone}
        for host in gone & self._groups.keys():
            remove_placement_group(self._groups.pop(host))
        kept = {host: node for host, node in enumerate(self.hosts.nodes) if host not in gone}
        needed, patience = reserved_by_host(self.plan, self.rule), TAKEN
        while True:
            try:
                self.hosts = find_hosts(self.plan, self._shared, needed, self.config.start_timeout, kept)
                self.specs = own_cpus(self.plan, self.specs, self.hosts)
                reserved = self._reservations()
                taken = self._reserve(reserved, gone, patience)
                break
            except UserError:  # another run may have taken a node since we looked, and wait for one of ours
                if tried := gone & self._groups.keys():
                    patience *= 2  # or Ray is only slow, and would never be done in time
                for host in tried:
                    remove_placement_group(self._groups.pop(host))
                if time.monotonic() > deadline:
                    if tried:
                        print(ray_status(), file=sys.stderr)
                    raise
                time.sleep(1.0)
        for line in self.hosts.lines:
            self.say(line)
        self._describe(reserved, *taken)

    def _gone(self) -> set[int]:
        """Hosts of a plan for several whose node is dead. With the driver's the driver dies."""
        if self.hosts is None:
            return set()
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return {host for host, node in enumerate(self.hosts.nodes) if host and node.id not in alive}

    def _kill(self, lost: AbstractSet[Address]) -> None:
        """Ray sends SIGKILL to one that does not follow within seconds: a stopped process, too."""
        for handle in self._ray_handles():
            if handle.address in lost:
                with contextlib.suppress(Exception):
                    ray.kill(handle.actor, no_restart=True)

    def _create_again(self, address: Address) -> RayHandle:
        """`_create`, again while the name is taken: Ray frees a dead actor's when it notices the death."""
        timeout = self.config.start_timeout
        deadline = time.monotonic() + timeout
        while True:
            try:
                return self._create(address)
            except ValueError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"Ray did not free a dead actor's name within {timeout:.0f} s",
                        observed=error,
                        remedy="raise cluster.start_timeout",
                    ) from error
                time.sleep(0.2)

    def _introduce(self) -> None:
        """Tell every actor its peers; again when some of them were replaced (between passes)."""
        self._epoch += 1
        timeout = self.config.start_timeout
        places = [handle.actor.place.remote() for handle in self._ray_handles()]
        peers: dict[Address, Peer] = {}
        for handle, future in zip(self._ray_handles(), places, strict=True):
            try:
                peers[handle.address] = Peer(handle.actor, *self._placed(handle, future, timeout))
            except GetTimeoutError as error:
                raise self._not_started(handle, str(error)) from error
            except RayTaskError as error:
                raise _cause(error) from error
            except RayActorError as error:
                if NOT_IMPORTED in str(error):
                    raise _cannot_import(handle, error) from error
                raise self._death(handle, _died(error)) from error
        meeting = self._meeting(peers, timeout)
        self._await_introduced(
            {
                handle.actor.connect.remote(peers, self._epoch, meeting): handle
                for handle in self._ray_handles()
            },
            timeout,
        )

    def _placed(self, handle: RayHandle, future: Any, timeout: float) -> Any:
        """Where an actor is, once it has a place.

        Raises:
            GetTimeoutError: not in time.
            ActorLost: the node of its host is dead.
            TryAgain: this run's own Ray has lost its only node: none will come.
        """
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return ray.get(future, timeout=max(0.0, min(LOOK, left)))
            except GetTimeoutError:
                if left <= LOOK:
                    raise
            if (gone := self._gone()) and host_of(self.plan, handle.address) in gone:
                raise self._death(handle, ActorDied("its node is dead"))
            if not self.joined and not any(node["Alive"] for node in ray.nodes()):
                raise TryAgain(
                    "Ray's node is dead",
                    where="the Ray that this run started",
                    observed="no node that is alive",
                    remedy=START_AGAIN,
                )

    def _not_started(self, handle: RayHandle, error: str) -> UserError:
        """Why an actor does not answer in time: no node has room for it, or it is frozen, or slow."""
        timeout = self.config.start_timeout
        spec = self._actor_specs[handle.address]
        if placement_group_table(spec.place.placement_group).get("state") == "CREATED":
            how = f"did not answer for {timeout:.0f} s"
            logs = ray_directory() / "session_latest/logs"
            remedy = f"raise cluster.start_timeout if it is only slow, or look into {logs}"
            return self._death(handle, ActorDied(error, how, remedy))
        free = ray.available_resources()
        alive = sum(1 for node in ray.nodes() if node["Alive"])
        return UserError(
            f"no node has room for {handle.name}, and none came within {timeout:.0f} s",
            observed=f"{alive} nodes; free now: CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}",
            required=f"CPU {spec.cpus:g}" + (f", GPU {spec.gpus:g}" if spec.gpus else "") + " on one node",
            remedy="start a node with these resources (the run waits cluster.start_timeout seconds for one)",
        )

    def _await_introduced(self, waiting: dict[Any, RayHandle], timeout: float) -> None:
        """Until all have connected. An actor that fails may only have been the first to miss one that died.

        Args:
            waiting: future -> whose connection it is.

        Raises:
            ActorLost: one died. UserError: not all are connected after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        failed: RayTaskError | None = None
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not done:
                break
            handle = waiting.pop(done[0])
            try:
                ray.get(done[0])
            except RayTaskError as error:
                failed = failed or error
                deadline = min(deadline, time.monotonic() + NOTICE)
            except RayError as error:
                raise self._death(handle, _died(error)) from error
        if failed is not None:
            raise _cause(failed) from failed
        if waiting:
            what = f"the actors could not be introduced to each other within {timeout:.0f} s"
            observed = " | ".join(self._states())
            remedy = "raise cluster.start_timeout"
            if self.plan.hardware.hosts > 1:
                remedy += "; the hosts must reach each other at all TCP ports, or set rule.transport=ray"
            raise (ActorLost if self._lost else UserError)(what, observed=observed, remedy=remedy)

    def _meeting(self, peers: Mapping[Address, Peer], timeout: float) -> Meeting | None:
        """Where all actors meet, if tensors travel through gloo.

        Raises:
            UserError: shared memory is forced, and the actors are on several nodes.
        """
        nodes = len({peer.node for peer in peers.values()})
        near, far = self.plan.transport
        if nodes > 1 and not far:
            raise several_nodes(nodes)
        if "gloo" not in (near, far if nodes > 1 else near):
            return None
        first = self._ray_handles()[0]
        try:
            meeting: Meeting = ray.get(first.actor.meeting.remote(), timeout=timeout)
        except (GetTimeoutError, RayActorError) as error:
            raise self._death(first, _died(error)) from error
        return meeting

    def _reserve(
        self, reserved: dict[Address, float], hosts: Collection[int], patience: float | None = None
    ) -> tuple[Seats, dict[str, str]]:
        """Placement groups for these hosts, one each, so that one that is lost is reserved anew by itself.

        Args:
            reserved: CPUs of every actor.
            patience: seconds that a group may take where the caller then looks for other nodes.

        Returns:
            The bundle of every actor, and the cards that lanes compute on by name (`cards_of`).
        """
        chosen = seats(self.plan, reserved)
        bundles = {host: [chosen.bundles[i] for i in chosen.of_host(host)] for host in hosts}
        # One after the other, by node: of two runs that want the same nodes, one would else hold what the
        # other waits for.
        for host in sorted(hosts, key=lambda host: self.hosts.nodes[host].id if self.hosts else ""):
            if self.hosts is None:
                strategy = self.rule.strategy
                selectors = on_own_node(bundles[host]) if strategy in PACKED else None
            else:
                strategy = "PACK"
                selectors = [{"ray.io/node-id": self.hosts.nodes[host].id}] * len(bundles[host])
            self._groups[host] = placement_group(
                bundles[host], strategy=strategy, bundle_label_selector=selectors
            )
            timeout = self.config.start_timeout if patience is None else patience
            await_group(self._groups[host], bundles[host], timeout, status=patience is None)
        if self.hosts is None:
            node_of = placement_group_table(self._groups[0])["bundles_to_node_id"]
            experts: dict[str, set[int]] = {node: set() for node in node_of.values()}
            for (kind, rank), bundle in chosen.of.items():
                if kind == "experts":
                    experts[node_of[bundle]].add(rank)
            self._check_nodes(experts)
        lanes = bool(lane_devices(self.plan))
        if not lanes and not differ(self.plan):
            return chosen, {}
        groups = {host: self._groups[host] for host in hosts}
        self._behind |= gpus_behind(groups, chosen, self.config.start_timeout)
        if differ(self.plan):
            chosen = by_gpu(self.plan, chosen, self._behind)
        return chosen, cards_of(chosen, self._behind) if lanes else {}

    def _check_nodes(self, experts: Mapping[str, AbstractSet[int]]) -> None:
        """Of a plan for one host: each but the driver's in a Ray of this run's own must see what it sees.

        Args:
            experts: ranks of the expert actors on every node that has actors.

        Raises:
            UserError: see `check_nodes`.
        """
        own = ray.get_runtime_context().get_node_id()
        others = experts.keys() - {own}
        if others and self.rule.strategy in PACKED:
            logger.warning(
                "the driver's node has no room for all actors: Ray put them on %s. The hardware there was "
                "not compared with the plan, which is for the driver's host. To plan for several hosts: "
                "rule.nodes. To keep all on the driver's: free CPUs and GPUs there (ray status)",
                "another node" if len(experts) == 1 else f"{len(experts)} nodes",
            )
        if look_at := others | {own} if self.joined else others:
            there = {node: experts.get(node, frozenset()) for node in look_at}
            check_nodes(self.plan, shared_by(self.specs, self.run_dir), there, self.config.start_timeout)

    def _ray_handles(self) -> list[RayHandle]:
        return cast(list[RayHandle], self.handles)

    # -- calls --------------------------------------------------------------------------------

    def _wait(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        done, _ = ray.wait(list(futures), num_returns=1, timeout=max(0.0, timeout))
        # ray.wait hands back equal, not identical, references.
        return [future for future in futures if any(future == d for d in done)]

    def _result(self, future: Any) -> Any:
        try:
            return ray.get(future)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            # RayActorError, and what Ray says instead when memory ran out or a node went away.
            raise _died(error) from None

    def _make_inbox(self) -> Inbox | None:
        return Inbox() if self.plan.transport.near == "arena" else None

    def _close(self) -> None:
        if ray.is_initialized():
            self._leave_ray()
        # Not after an error in that: the guard then ends what is left when this process is gone.
        self._connection.end_guard()

    def _leave_ray(self) -> None:
        try:
            for actor in (*(handle.actor for handle in self._ray_handles()), *self._keepers):
                ray.kill(actor, no_restart=True)
            while self._groups:
                remove_placement_group(self._groups.popitem()[1])
        finally:
            self._connection.disconnect()


def _name(address: Address) -> str:
    return f"{address[0]}-{address[1]}"


def _died(error: Exception) -> ActorDied:
    return ActorDied(" ".join(str(error).split()))


def _cannot_import(handle: RayHandle, error: Exception) -> UserError:
    return UserError(
        "a Ray node cannot run kt_ray",
        where=handle.name,
        observed=last_line(error),
        required="the driver's packages on every node of the cluster",
        remedy="start Ray there with a Python that has kt_ray and its packages, in the driver's versions",
    )


def _cause(error: RayTaskError) -> BaseException:
    cause: BaseException | None = error.cause
    if cause is None:
        return error
    if not isinstance(cause, UserError):
        cause.add_note(str(error))  # the traceback inside the actor
    return cause
