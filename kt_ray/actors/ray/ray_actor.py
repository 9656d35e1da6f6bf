"""The plain actors as Ray actors: the wrapping, and nothing else."""

from __future__ import annotations

import logging
from typing import Any

import ray

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import Handle
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.ray.ray_port import Packed, Peer, RayPort
from kt_ray.actors.visible_gpu import show_own_gpu
from kt_ray.experts import bind_to_cpus
from kt_ray.experts.process_memory import give_back_freed_memory
from kt_ray.placement.render import held_per_layer
from kt_ray.transport.doorbell import DoorbellAddress
from kt_ray.transport.gloo_link import Meeting, MeetingPoint
from kt_ray.transport.mailbox import Address

logger = logging.getLogger(__name__)


class RayActor:
    """One actor in its own process.

    Methods of the compute group run one at a time, in the order they were called; those of the
    control group run beside them, so a busy actor still takes messages and answers questions; the listen
    group has the one call that waits for something (tokens).
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
            # Its arguments say what it held, so it needs nobody to load its weights again.
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
        return f"{held_per_layer(self.actor.plan, self.actor.host.spec)} experts per layer"

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
        # Messages of the old epoch may have come, or failed to, since the pass was given up.
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
