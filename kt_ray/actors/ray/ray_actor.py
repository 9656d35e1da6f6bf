"""The plain actors as Ray actors: the wrapping, what one is started from, and how it starts and ends."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util import placement_group_table

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import Handle
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.ray.ray_port import Packed, Peer, RayPort
from kt_ray.actors.visible_gpu import show_own_gpu
from kt_ray.errors import UserError
from kt_ray.experts import bind_to_cpus
from kt_ray.experts.process_memory import give_back_freed_memory
from kt_ray.placement.render import experts_per_layer
from kt_ray.transport.doorbell import DoorbellAddress
from kt_ray.transport.gloo_link import Meeting, MeetingPoint
from kt_ray.transport.messages import Address

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RayActor:
    """One actor in its own process.

    Methods of the compute group run one at a time, in the order of the calls. Methods of the control group
    run beside them, so a busy actor still takes messages and answers questions. The listen group runs the one
    call that waits: for tokens.
    """

    def __init__(self, kind: str, rank: int, cpus: tuple[int, ...], *args: Any) -> None:
        # Before torch allocates or starts threads: memory is then first touched on the right node.
        if cpus:
            bind_to_cpus(cpus)
        if kind == "worker" and args[0].is_tight:
            give_back_freed_memory()
        if kind == "experts":
            show_own_gpu(args[1])
        self._name = f"{kind}-{rank}"
        self._address: Address = (kind, rank)
        self._meeting_point: MeetingPoint | None = None
        self.actor: AttentionWorker | ExpertActor
        self.actor = AttentionWorker(*args) if kind == "worker" else ExpertActor(*args)
        if ray.get_runtime_context().was_current_actor_reconstructed:
            logger.warning("%s was restarted; loading its weights again", self._name)
            self.actor.load_again()
        self._port = RayPort(
            self._name,
            self.actor.deliver,
            lambda why: self.actor.abort(f"{self._name}: {why}"),
            transport=self.actor.plan.transport,
            pinned=isinstance(self.actor, AttentionWorker) and self.actor.spec.device.startswith("cuda"),
            timeout=self.actor.timeout,
        )

    def __repr__(self) -> str:
        """What the dashboard shows beside the actor's name, and what its log lines begin with."""
        if isinstance(self.actor, AttentionWorker):
            start, stop = self.actor.here.layers
            return f"layers {start}-{stop - 1}" if stop - start > 1 else f"layer {start}"
        return f"{experts_per_layer(self.actor.plan, self.actor.experts.spec)} experts per layer"

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, DoorbellAddress | None]:
        """The node, and where peers on it may ring."""
        return _node_id(), self._port.listen()

    @ray.method(concurrency_group="control")
    def meeting(self) -> Meeting:
        """Where all actors can meet once, to exchange tensors through gloo."""
        if self._meeting_point is None:
            self._meeting_point = MeetingPoint(ray.util.get_node_ip_address())
        return self._meeting_point.next()

    @ray.method(concurrency_group="control")
    def connect(self, peers: dict[Address, Peer], epoch: int, meeting: Meeting | None) -> None:
        """Meet the peers; again, when some were replaced. Between passes."""
        self._port.connect(self._address, peers, epoch, meeting, ray.util.get_node_ip_address())
        # Messages of the old epoch may have arrived since the pass failed.
        self.actor.mailbox.clear()
        self.actor.port = self._port

    @ray.method(concurrency_group="control")
    def deliver(self, packed: Packed) -> None:
        try:
            self._port.receive(packed)
        except Exception as error:  # nobody waits for this call: the compute thread must hear of it
            logger.exception("message %s was lost", packed.tag)
            self.actor.abort(
                f"{self._name} could not take message {packed.tag}: {type(error).__name__}: {error}"
            )

    @ray.method(concurrency_group="control")
    def control(self, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)

    @ray.method(concurrency_group="listen")
    def listen(self, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)

    @ray.method(concurrency_group="compute")
    def compute(self, method: str, *args: Any) -> Any:
        return getattr(self.actor, method)(*args)


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


# Two control threads: a large message being copied must not hide an abort.
RemoteActor: Any = ray.remote(concurrency_groups={"compute": 1, "control": 2, "listen": 1})(RayActor)  # type: ignore[call-overload]


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
    """What one Ray actor is started from.

    Attributes:
        bundle_index: of the placement group.
        cpu_ids: that it may use.
        arguments: of the plain actor.
        cpus, gpus: that it reserves with Ray.
    """

    address: Address
    bundle_index: int
    cpu_ids: tuple[int, ...]
    arguments: tuple[Any, ...]
    cpus: float
    gpus: float

    @property
    def name(self) -> str:
        return f"{self.address[0]}-{self.address[1]}"

    @property
    def bundle(self) -> dict[str, float]:
        """What it takes of a node."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def end_actor(actor: Any) -> None:
    """End an actor that was found dead: if it only seemed so, it must not come back beside its successor."""
    with contextlib.suppress(Exception):  # it is gone already
        ray.kill(actor, no_restart=True)


def retry_name(create: Callable[[], T], timeout: float) -> T:
    """`create()`, again while it raises ValueError: Ray frees a dead actor's name when it notices the death.

    Raises:
        UserError: the name is still in use after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return create()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Ray did not free a dead actor's name within {timeout:.0f} s",
                    observed=error,
                    remedy="raise cluster.start_timeout",
                ) from error
            time.sleep(0.2)


def not_started(name: str, group: Any, bundle: dict[str, float], timeout: float) -> UserError:
    """Why an actor did not start in time: no node has room for it, or it is only slow."""
    if placement_group_table(group).get("state") == "CREATED":
        return UserError(
            f"{name} did not start within {timeout:.0f} s",
            remedy="raise cluster.start_timeout, or look into /tmp/ray/session_latest/logs",
        )
    free = ray.available_resources()
    alive = sum(1 for node in ray.nodes() if node["Alive"])
    return UserError(
        f"no node has room for {name}, and none came within {timeout:.0f} s",
        observed=f"{alive} nodes; free now: CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}",
        required=", ".join(f"{kind} {count:g}" for kind, count in bundle.items()) + " on one node",
        remedy="start a node with these resources (the run waits cluster.start_timeout seconds for one)",
    )
