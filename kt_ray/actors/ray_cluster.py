"""The actors under Ray: placement group, named actors, dashboard, clean end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray.actors.cluster import ActorCluster, ActorDied, Handle, LoadNote
from kt_ray.actors.mailbox import Address
from kt_ray.actors.ray_actor import RemoteActor
from kt_ray.actors.ray_address import Running, free_port, running_cluster
from kt_ray.actors.ray_port import Peer
from kt_ray.actors.ray_recovery import Wanted, let_go, not_started, when_free
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import UserError
from kt_ray.placement.types import Plan
from kt_ray.train.cluster import ActorLost

logger = logging.getLogger(__name__)

# Settings of the driver's environment that actors must see as well.
PASSED_ON = ("KT_RAY_ISA", "KT_RAY_DEBUG", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM")


class RayHandle(Handle):
    def __init__(self, address: Address, actor: Any) -> None:
        self.address = address
        self.actor = actor

    def start(self, method: str, *args: Any) -> Any:
        return self.actor.compute.remote(method, *args)

    def control(self, method: str, *args: Any) -> Any:
        return self.actor.control.remote(method, *args)


class RayCluster(ActorCluster):
    """`cluster=ray`.

    Args:
        plan, specs, on_load: as for every cluster.
        config: how to reach or start Ray.
        rule: Ray resources of the rule.
        run_name: names the namespace of the actors.
    """

    def __init__(
        self,
        plan: Plan,
        specs: ActorSpecs,
        config: ClusterConfig,
        rule: RayRule,
        run_name: str,
        on_load: LoadNote | None = None,
    ) -> None:
        super().__init__(plan, specs, on_load)
        self.config = config
        self.rule = rule
        self.namespace = config.namespace or f"kt_ray-{run_name}"
        self.dashboard_url: str | None = None
        self.connected = False  # to Ray, by this object: it then disconnects, too
        self._group: Any = None
        self._wanted: dict[Address, tuple[int, Wanted]] = {}  # with the number of its bundle
        self._epoch = 0  # how often the actors were introduced to each other

    # -- start --------------------------------------------------------------------------------

    def connect(self) -> list[str]:
        """Join a running cluster or start a local one; says which, and where the dashboard is.

        Raises:
            UserError: the cluster named does not answer or refuses, or the dashboard has no port.
        """
        if ray.is_initialized():
            self.dashboard_url = _dashboard_url()
            return [f"Ray: the cluster this process is connected to already{self._dashboard_hint()}"]
        running = running_cluster(self.config.address)
        if running is not None:
            self._join(running)
            where = f"{running.address} (from {running.source})"
            return [f"Ray: joined the running cluster at {where}{self._dashboard_hint()}"]
        # Named here only when it is shown: without a dashboard the port must not matter.
        port = (
            free_port(self.config.dashboard_host, self.config.dashboard_port)
            if self.config.dashboard
            else None
        )
        # Ray kills workers at 95 % of the host's memory; the plan has already counted every byte against
        # its capacity, and 5 % of a terabyte is much. A value of the user's stays.
        os.environ.setdefault("RAY_memory_usage_threshold", "0.99")
        # Ray's workers are nice by default; training is what this machine is here for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        context = self._init(
            address="local",
            include_dashboard=self.config.dashboard,
            dashboard_host=self.config.dashboard_host,
            dashboard_port=port,
        )
        self.dashboard_url = _dashboard_url(context) if self.config.dashboard else None
        why = "no running cluster found, started" if self.config.address == "auto" else "started"
        return [f"Ray: {why} a local one, which ends with this run{self._dashboard_hint()}"]

    def _join(self, running: Running) -> None:
        # Ray looks for this user's token only when it finds the cluster itself; with a named one
        # RAY_AUTH_MODE decides.
        address = "auto" if running.source == "ray start" else running.address
        try:
            context = self._init(address=address)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            raise UserError(
                "the Ray cluster cannot be joined",
                where=f"{running.address} (from {running.source})",
                observed=error,
                remedy="if it wants a token, set RAY_AUTH_MODE=token and put the token into "
                "~/.ray/auth_token (or name its file in RAY_AUTH_TOKEN_PATH); use the cluster's "
                "versions of Ray and Python; or set cluster.address=local",
            ) from error
        self.dashboard_url = _dashboard_url(context)

    def _init(self, **how: Any) -> Any:
        handler = signal.getsignal(signal.SIGTERM)
        context = ray.init(namespace=self.namespace, log_to_driver=False, logging_level=logging.ERROR, **how)
        self.connected = True
        if callable(handler) and threading.current_thread() is threading.main_thread():
            # ray.init puts its own in place, which ends the process with code 15.
            signal.signal(signal.SIGTERM, handler)
        return context

    def _dashboard_hint(self) -> str:
        if self.dashboard_url is None:
            return ", without a dashboard"
        return f"; dashboard {self.dashboard_url}{_token_hint()}"

    def _spawn(self) -> None:
        if not ray.is_initialized():
            self.connect()
        wanted: list[Wanted] = []
        worker_cpus, expert_cpus = self._reservations()
        gpu_share = _gpu_share(self.plan)
        for rank, stage in enumerate(self.specs.stages):
            worker = self.plan.workers[rank]
            device_spec, optim, timeout = _own_device(stage), self.specs.optim, self.specs.timeout
            args: tuple[Any, ...] = (self.plan, rank, device_spec, optim, timeout)
            gpus = gpu_share.get(worker.device, 0.0)
            wanted.append(Wanted(("worker", rank), worker.cpus, args, worker_cpus, gpus))
        for host in self.specs.experts:
            args = (self.plan, host, self.specs.timeout)
            wanted.append(Wanted(("experts", host.rank), host.cpus, args, expert_cpus, 0.0))
        bundles = [one.bundle for one in wanted]
        self._group = placement_group(bundles, strategy=self.rule.strategy)
        self._await_group(bundles)
        self._wanted = {one.address: (number, one) for number, one in enumerate(wanted)}
        for one in wanted:
            try:
                handle = self._create(one.address)
            except ValueError as error:
                raise UserError(
                    f"an actor {one.name} runs already",
                    where=f"Ray namespace {self.namespace}",
                    observed=error,
                    remedy="wait until the other run has ended, or set another run.name or cluster.namespace",
                ) from error
            (self.workers if one.address[0] == "worker" else self.experts).append(handle)
        self._introduce()

    def _create(self, address: Address) -> RayHandle:
        """An actor in its bundle of the placement group. Raises ValueError when its name is taken."""
        bundle, one = self._wanted[address]
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
        factory = RemoteActor.options(
            name=one.name,
            namespace=self.namespace,
            num_cpus=one.cpus,
            num_gpus=one.gpus,
            max_restarts=0,  # we put a new one in its place: decisions/012
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
            **runtime_env,
        )
        return RayHandle(address, factory.remote(address[0], address[1], one.cpu_ids, *one.arguments))

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        """Into the bundles of those lost. Ray moves the bundles of a dead node to one that has room."""
        timeout = self.config.start_timeout
        deadline = time.monotonic() + timeout
        while True:
            for old in self._ray_handles():
                if old.address in self._lost | lost:
                    let_go(old.actor)
            for address in sorted(self._lost | lost):
                handles = self.workers if address[0] == "worker" else self.experts
                handles[address[1]] = when_free(functools.partial(self._create, address), timeout)
            try:
                return self._introduce()
            except ActorLost:
                # Until Ray has noticed that a node is dead, it starts actors there.
                if time.monotonic() > deadline:
                    raise
                time.sleep(1.0)

    def _introduce(self) -> None:
        """Tell every actor its peers; again when some of them were replaced (between passes)."""
        self._epoch += 1
        timeout = self.config.start_timeout
        nodes = [handle.actor.node.remote() for handle in self._ray_handles()]
        peers: dict[Address, Peer] = {}
        for handle, future in zip(self._ray_handles(), nodes, strict=True):
            try:
                peers[handle.address] = Peer(handle.actor, ray.get(future, timeout=timeout))
            except GetTimeoutError as error:
                bundle = self._wanted[handle.address][1].bundle
                raise not_started(handle.name, self._group, bundle, timeout) from error
            except RayTaskError as error:
                raise _cause(error) from error
            except RayActorError as error:
                self._lost.add(handle.address)
                raise ActorLost(f"{handle.name} did not start", observed=str(error)) from error
        introduced = [handle.actor.connect.remote(peers, self._epoch) for handle in self._ray_handles()]
        for handle, future in zip(self._ray_handles(), introduced, strict=True):
            try:
                ray.get(future, timeout=timeout)
            except GetTimeoutError as error:
                raise UserError(
                    f"the actors could not be introduced to each other within {timeout:.0f} s",
                    observed=" | ".join(self._states()),
                    remedy="raise cluster.start_timeout",
                ) from error
            except RayTaskError as error:
                raise _cause(error) from error
            except RayError as error:
                raise self._death(handle, ActorDied(" ".join(str(error).split()))) from error

    def _reservations(self) -> tuple[float, float]:
        """CPUs per attention worker and per expert actor.

        On a host without GPUs both kinds compute on the same cores in turn, so threads may add up
        to more than there are; reservations are then scaled down to what the cluster has.
        """
        worker = float(self.plan.workers[0].threads)
        expert = float(max(actor.threads for actor in self.plan.experts))
        total = worker * len(self.plan.workers) + expert * len(self.plan.experts)
        have = float(ray.cluster_resources().get("CPU", 1.0))
        scale = min(1.0, have / total)

        def share(asked: float | str, threads: float) -> float:
            return float(asked) if asked != "auto" else max(0.01, int(threads * scale * 100) / 100)

        return share(self.rule.worker_cpus, worker), share(self.rule.expert_cpus, expert)

    def _await_group(self, bundles: list[dict[str, float]]) -> None:
        try:
            ray.get(self._group.ready(), timeout=self.config.start_timeout)
        except GetTimeoutError as error:
            asked = {key: round(sum(b.get(key, 0.0) for b in bundles), 2) for key in ("CPU", "GPU")}
            have = ray.available_resources()
            print(_ray_status(), file=sys.stderr)
            raise UserError(
                f"Ray did not provide the actors' resources within {self.config.start_timeout:.0f} s",
                where="placement group " + " ".join(str(b) for b in bundles),
                observed=f"free now: CPU {have.get('CPU', 0):g}, GPU {have.get('GPU', 0):g}",
                required=f"CPU {asked['CPU']:g}, GPU {asked['GPU']:g}",
                remedy="free resources, choose a smaller rule, or lower rule.ray.worker_cpus and "
                "rule.ray.expert_cpus",
            ) from error

    def _ray_handles(self) -> list[RayHandle]:
        handles = []
        for handle in self.handles:
            assert isinstance(handle, RayHandle)
            handles.append(handle)
        return handles

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
            raise ActorDied(" ".join(str(error).split())) from None

    def _close(self) -> None:
        if not ray.is_initialized():
            return
        try:
            for handle in self._ray_handles():
                ray.kill(handle.actor, no_restart=True)
            if self._group is not None:
                remove_placement_group(self._group)
                self._group = None
        finally:
            if self.connected:
                # Ends a cluster that `connect` started; leaves one that it joined.
                ray.shutdown()
                self.connected = False


def _own_device(stage: Any) -> Any:
    """Inside an actor that owns one GPU, the device is cuda:0 whatever its ordinal in the plan."""
    if not stage.device.startswith("cuda"):
        return stage
    from dataclasses import replace

    return replace(stage, device="cuda:0")


def _gpu_share(plan: Plan) -> dict[str, float]:
    """Share of a GPU for each worker on it, by plan device."""
    users: dict[str, int] = {}
    for worker in plan.workers:
        if worker.device.startswith("cuda"):
            users[worker.device] = users.get(worker.device, 0) + 1
    return {device: 1.0 / count for device, count in users.items()}


def _cause(error: RayTaskError) -> BaseException:
    cause: BaseException | None = error.cause
    if cause is None:
        return error
    if not isinstance(cause, UserError):
        cause.add_note(str(error))  # the traceback inside the actor
    return cause


def _token_hint() -> str:
    """How to get past the dashboard's question. `ray.init` sets RAY_AUTH_MODE when it turns tokens on."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return " (asks for a token: the value of RAY_AUTH_TOKEN)"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return f" (asks for a token: 'ray get-auth-token' prints it, from {path})"


def _dashboard_url(context: Any = None) -> str | None:
    url = getattr(context, "dashboard_url", None) if context is not None else None
    if not url:
        from ray._private.worker import get_dashboard_url

        url = get_dashboard_url()
    return f"http://{url}" if url and not str(url).startswith("http") else url


def _ray_status() -> str:
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
