"""The actors under Ray: placement group, named actors, dashboard, clean end."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray.actors.cluster import ActorCluster, ActorDied, Handle, LoadNote
from kt_ray.actors.mailbox import Address
from kt_ray.actors.ray_actor import RemoteActor
from kt_ray.actors.ray_port import Peer
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import UserError
from kt_ray.placement.types import Plan

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
        self.started_ray = False
        self._group: Any = None

    # -- start --------------------------------------------------------------------------------

    def connect(self) -> list[str]:
        """Join a running cluster or start a local one; says which, and where the dashboard is."""
        if ray.is_initialized():
            self.dashboard_url = _dashboard_url()
            return [f"Ray: the cluster this process is connected to already{self._dashboard_hint()}"]
        common: dict[str, Any] = {
            "namespace": self.namespace,
            "log_to_driver": False,
            "logging_level": logging.ERROR,
        }
        address = self.config.address
        if address != "local":
            try:
                context = ray.init(address=address, **common)
                self.dashboard_url = _dashboard_url(context)
                gcs = ray.get_runtime_context().gcs_address
                return [f"Ray: connected to the running cluster at {gcs}{self._dashboard_hint()}"]
            except ConnectionError as error:
                if address != "auto":
                    raise UserError(
                        "no Ray cluster answers",
                        where="cluster.address",
                        observed=f"{address} ({error})",
                        remedy="start one with 'ray start --head', or use cluster.address=auto",
                    ) from error
        context = ray.init(
            address="local",
            include_dashboard=self.config.dashboard,
            dashboard_host=self.config.dashboard_host,
            dashboard_port=self.config.dashboard_port,
            **common,
        )
        self.started_ray = True
        self.dashboard_url = _dashboard_url(context) if self.config.dashboard else None
        why = "no running cluster found, started" if address == "auto" else "started"
        return [f"Ray: {why} a local one{self._dashboard_hint()}"]

    def _dashboard_hint(self) -> str:
        if self.dashboard_url is None:
            return ", without a dashboard"
        # Ray asks API clients and the browser for this token when authentication is on (its default).
        return (
            f"; dashboard {self.dashboard_url} (if it asks for a token: 'ray get-auth-token' or the file "
            f"{os.environ.get('RAY_AUTH_TOKEN_PATH', '~/.ray/auth_token')})"
        )

    def _spawn(self) -> None:
        if not ray.is_initialized():
            self.connect()
        # (address, CPUs it may use, arguments, CPUs it reserves, GPUs it reserves)
        wanted: list[tuple[Address, tuple[int, ...], tuple[Any, ...], float, float]] = []
        worker_cpus, expert_cpus = self._reservations()
        gpu_share = _gpu_share(self.plan)
        for rank, stage in enumerate(self.specs.stages):
            worker = self.plan.workers[rank]
            args = (self.plan, rank, _own_device(stage), self.specs.optim, self.specs.timeout)
            wanted.append(
                (("worker", rank), worker.cpus, args, worker_cpus, gpu_share.get(worker.device, 0.0))
            )
        for host in self.specs.experts:
            wanted.append(
                (("experts", host.rank), host.cpus, (self.plan, host, self.specs.timeout), expert_cpus, 0.0)
            )
        bundles = [{"CPU": cpus, **({"GPU": gpus} if gpus else {})} for _, _, _, cpus, gpus in wanted]
        self._group = placement_group(bundles, strategy=self.rule.strategy)
        self._await_group(bundles)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        runtime_env = {"runtime_env": {"env_vars": environment}} if environment else {}
        for bundle, (address, cpu_ids, args, cpus, gpus) in enumerate(wanted):
            actor = RemoteActor.options(
                name=f"{address[0]}-{address[1]}",
                namespace=self.namespace,
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=bundle
                ),
                **runtime_env,
            ).remote(address[0], address[1], cpu_ids, *args)
            (self.workers if address[0] == "worker" else self.experts).append(RayHandle(address, actor))
        nodes = [handle.actor.node.remote() for handle in self._ray_handles()]
        peers: dict[Address, Peer] = {}
        for handle, future in zip(self._ray_handles(), nodes, strict=True):
            try:
                peers[handle.address] = Peer(handle.actor, ray.get(future, timeout=self.config.start_timeout))
            except GetTimeoutError as error:
                raise UserError(
                    f"{handle.name} did not start within {self.config.start_timeout:.0f} s",
                    remedy="raise cluster.start_timeout, or look at the Ray logs in /tmp/ray/session_latest/logs",
                ) from error
            except RayTaskError as error:
                raise _cause(error) from error
            except RayActorError as error:
                raise UserError(f"{handle.name} did not start", observed=str(error)) from error
        ray.get([handle.actor.connect.remote(peers) for handle in self._ray_handles()])

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
                remedy="free resources, choose a smaller rule, or lower rule.ray.worker_cpus and rule.ray.expert_cpus",
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
        except RayActorError as error:
            raise ActorDied(" ".join(str(error).split())) from None

    def _close(self) -> None:
        if not ray.is_initialized():
            return
        for handle in self._ray_handles():
            ray.kill(handle.actor, no_restart=True)
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
        if self.started_ray:
            ray.shutdown()
            self.started_ray = False


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


def _dashboard_url(context: Any = None) -> str | None:
    url = getattr(context, "dashboard_url", None) if context is not None else None
    if not url:
        from ray._private.worker import get_dashboard_url

        url = get_dashboard_url()
    return f"http://{url}" if url and not str(url).startswith("http") else url


def _ray_status() -> str:
    """What `ray status` prints for the connected cluster."""
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return "ray status: no answer within 60 s"
    return done.stdout or done.stderr
