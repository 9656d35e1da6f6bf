"""An actor's own process under Ray: its port, and the wrapping that Ray calls.

A port sends through shared memory, bytes inside the message, or gloo, as the plan says per peer. A packed
message names where its tensors lie, or the gloo tags they arrive under; small messages carry their bytes. It
goes through the peer's doorbell if the actors share memory, and as a Ray call otherwise or when
the doorbell does not take it. A message is packed once for each way.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import ray
import torch

from kt_ray.actors.build_actor import build_actor
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.specs import show_own_gpu
from kt_ray.experts import bind_to_cpus
from kt_ray.gpu import PageLock
from kt_ray.placement.render import experts_per_layer
from kt_ray.placement.transports import Transport
from kt_ray.transport.gloo_link import GlooLink, Meeting, MeetingPoint
from kt_ray.transport.messages import Address, Lease, Message, Tag
from kt_ray.transport.shared_memory import (
    Arena,
    ArenaReader,
    Block,
    Doorbell,
    DoorbellAddress,
    Ringer,
    TensorRef,
)

if TYPE_CHECKING:
    from kt_ray.actors.attention_worker import AttentionWorker

P = ParamSpec("P")
T = TypeVar("T")
logger = logging.getLogger(__name__)

INLINE_BYTES = 16 * 1024  # below this a message is cheaper inside the call than by any other way
RUNG_BYTES = 2 * 1024  # the same for the doorbell, whose frames are small


@dataclass
class Packed:
    """A message on the wire."""

    tag: Tag
    facts: dict[str, Any]
    refs: dict[str, TensorRef] = field(default_factory=dict)  # tensors in shared memory
    # (dtype name, shape, uint8 array) of those inside the call
    inline: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = field(default_factory=dict)
    # (gloo tag, dtype name, shape) of tensors from rank `source`
    gloo: dict[str, tuple[int, str, tuple[int, ...]]] = field(default_factory=dict)
    source: int = -1
    epoch: int = 0  # of the introduction that the sender knew


def pack_inline(message: Message) -> Packed:
    """Every tensor's bytes inside the call (bfloat16 has no numpy type, so they travel as bytes)."""
    return Packed(message.tag, message.facts, inline={n: _inline(t) for n, t in message.tensors.items()})


def _inline(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _dtype_name(tensor), tuple(tensor.shape), flat


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def unpack(packed: Packed, reader: ArenaReader) -> Message:
    """The message without its gloo tensors; arena tensors are views of the sender's memory."""
    tensors = {name: reader.read(ref) for name, ref in packed.refs.items()}
    for name, (dtype, shape, flat) in packed.inline.items():
        # A copy, since arrays that come out of Ray are read-only.
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if flat.size:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(flat.copy()))
        tensors[name] = tensor
    return Message(packed.tag, tensors, packed.facts)


@dataclass
class _Held:
    """Memory of the arena that messages lie in: free when all of it was sent and read."""

    ref: TensorRef
    block: Block
    address: int = 0
    unsent: int = 0  # bytes
    leases: int = 0

    def part(self, tensor: torch.Tensor) -> TensorRef | None:
        """Where a tensor lies in it; None = elsewhere."""
        offset = tensor.data_ptr() - self.address
        size = tensor.numel() * tensor.element_size()
        inside = offset >= 0 and offset + size <= self.ref.nbytes
        if not (inside and tensor.is_contiguous() and self.ref.dtype == _dtype_name(tensor)):
            return None
        return replace(self.ref, offset=self.ref.offset + offset, shape=tuple(tensor.shape))


@dataclass(frozen=True)
class Peer:
    """Another actor: its Ray handle, the node it runs on, where to ring there (None = nowhere), and the
    shared memory that it made at its start."""

    handle: Any
    node: str
    doorbell: DoorbellAddress | None = None
    memory: TensorRef | None = None


def _alone(method: Callable[P, T]) -> Callable[P, T]:
    """One thread of the port's at a time."""

    @functools.wraps(method)
    def alone(*args: P.args, **named: P.kwargs) -> T:
        with args[0]._lock:  # type: ignore[attr-defined]
            return method(*args, **named)

    return alone


class RayPort:
    """Sends and receives for one Ray actor.

    Args:
        name: for the arena's name in /proc maps.
        deliver: called with each received message.
        lost: called with the reason when a message cannot be received or sent.
        transport: how to reach peers on this node, and on others.
        pinned: this actor copies to CUDA, so memory that it shares or maps is page-locked.
        timeout: seconds that one transfer through gloo may take.

    Any thread may allocate, send, release and receive; `connect` and `close` are called while they rest.
    """

    def __init__(
        self,
        name: str,
        deliver: Callable[[Message], None],
        lost: Callable[[str], None],
        *,
        transport: Transport,
        pinned: bool = False,
        timeout: float = 600.0,
    ) -> None:
        self._deliver = deliver
        self._lost = lost
        self._transport = transport
        self._timeout = timeout
        self._peers: dict[Address, Peer] = {}
        self._me: Address = ("", 0)
        self._node = ""
        self._ranks: dict[Address, int] = {}
        self._link: GlooLink | None = None
        self._doorbell: Doorbell | None = None
        self._ringers: dict[Address, Ringer] = {}
        self.epoch = -1
        self._arena = Arena(name)
        self._memory: TensorRef | None = None  # what `reserve` made
        self._pinned = pinned
        self._reader = ArenaReader(PageLock() if pinned else None)
        self._leases: dict[Lease, list[_Held]] = {}
        self._unsent: list[_Held] = []  # from `alloc`, not sent yet or not all of it
        self._next: Lease = 1
        self._lock = threading.RLock()  # of the arena, what is sent and what is not

    # -- peers -------------------------------------------------------------------------------

    def listen(self) -> DoorbellAddress | None:
        """Where peers may ring; None if none of them shares memory with this actor."""
        if self._transport.near != "arena":
            return None
        if self._doorbell is None:
            self._doorbell = Doorbell(lambda frame: self.receive(pickle.loads(frame)), self._lost)
        return self._doorbell.address

    def reserve(self, size: int, *, resident: bool = False) -> TensorRef | None:
        """Make the shared memory that messages of `size` bytes need at once; again, nothing happens.

        Args:
            resident: a peer will page-lock it.

        Returns:
            Where it lies; None if no peer shares memory with this actor.
        """
        if self._transport.near != "arena":
            return None
        if self._memory is None:
            self._memory = self._arena.reserve(size, pinned=self._pinned, resident=resident)
        return self._memory

    def connect(
        self,
        me: Address,
        peers: Mapping[Address, Peer],
        epoch: int = 0,
        meeting: Meeting | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """Meet the peers; again, between passes, when some of them were replaced.

        Drops all state of the old peers. Messages sent before belong to an older epoch and are ignored.

        Args:
            me: this actor's address.
            peers: all actors by address, this one included.
            epoch: number of this introduction.
            meeting: where all of them meet for gloo; None = no message goes that way.
            host: this node's address as the others see it.
        """
        self.release_all()
        self._reader.forget()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._me, self._peers, self.epoch = me, dict(peers), epoch
        self._node = peers[me].node
        self._ranks = {address: rank for rank, address in enumerate(sorted(peers))}
        self._find_doorbells()
        if self._pinned:
            self._map_ahead()
        if meeting is not None and len(peers) > 1:
            self._link = GlooLink(meeting, self._ranks[me], len(peers), host, self._timeout, self._lost)

    def _map_ahead(self) -> None:
        """Page-lock what the first pass will read: answers of experts, or tokens for them, and messages of
        neighbouring stages."""
        for address, peer in self._peers.items():
            stages = address[0] == self._me[0] == "worker" and abs(address[1] - self._me[1]) == 1
            read = address[0] != self._me[0] or stages
            if read and peer.memory is not None and self.shares(address):
                self._reader.read(peer.memory)

    def _find_doorbells(self) -> None:
        while self._ringers:
            self._ringers.popitem()[1].close()
        for address, peer in self._peers.items():
            if address == self._me or peer.doorbell is None or not self.shares(address):
                continue
            try:
                self._ringers[address] = Ringer(peer.doorbell)
            except OSError as error:
                logger.warning("messages to %s-%d go through Ray: %s", *address, error)

    def way(self, address: Address) -> str:
        """ "arena", "ray" or "gloo": how a large message gets to that actor."""
        near = self._peers[address].node == self._node
        return self._transport.near if near else self._transport.far

    def shares(self, address: Address) -> bool:
        return self.way(address) == "arena"

    # -- sending -----------------------------------------------------------------------------

    @_alone
    def alloc(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool = False) -> torch.Tensor:
        if self._transport.near != "arena":
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=pinned)
        tensor, ref, block = self._arena.alloc(shape, dtype, pinned=pinned)
        if tensor.numel():
            self._unsent.append(_Held(ref, block, tensor.data_ptr(), ref.nbytes))
        else:
            self._arena.free(block)
        return tensor

    @_alone
    def send(self, to: Sequence[Address], message: Message) -> Lease:
        lease = self._next
        self._next += 1
        held = self._leases[lease] = []
        # First, whatever the ways: memory allocated for a message is freed with it.
        owned = {}
        for name, tensor in message.tensors.items():
            ref = self._take_unsent(tensor, held) if tensor.numel() else None
            if ref is not None:
                owned[name] = ref
        size = sum(t.numel() * t.element_size() for t in message.tensors.values())
        by_way: dict[str, list[Address]] = {}
        for address in to:
            limit = min(RUNG_BYTES, INLINE_BYTES) if address in self._ringers else INLINE_BYTES
            by_way.setdefault(self.way(address) if size > limit else "inline", []).append(address)
        for way, addresses in by_way.items():
            if way == "arena":
                packed = Packed(message.tag, message.facts)
                for name, tensor in message.tensors.items():
                    ref = owned.get(name)
                    if ref is None:
                        ref, block = self._arena.write(tensor)
                        held.append(_Held(ref, block, leases=1))
                    packed.refs[name] = ref
                self._ring(addresses, packed)
            elif way == "gloo":
                for address in addresses:
                    self._ring([address], self._through_gloo(address, message))
            else:
                self._ring(addresses, pack_inline(message))
        return lease

    def _take_unsent(self, tensor: torch.Tensor, held: list[_Held]) -> TensorRef | None:
        """Where a tensor from `alloc`, or a slice of one, lies; the lease whose `held` it is holds it."""
        for memory in self._unsent:
            ref = memory.part(tensor)
            if ref is not None:
                memory.unsent -= ref.nbytes
                memory.leases += 1
                held.append(memory)
                if not memory.unsent:
                    self._unsent.remove(memory)
                return ref
        return None

    def _ring(self, addresses: Sequence[Address], packed: Packed) -> None:
        packed.epoch = self.epoch
        frame = b""
        for address in addresses:
            ringer = self._ringers.get(address)
            if ringer is not None:
                frame = frame or pickle.dumps(packed, pickle.HIGHEST_PROTOCOL)
            if ringer is None or not ringer.ring(frame):
                self._peers[address].handle.deliver.remote(packed)

    def _through_gloo(self, address: Address, message: Message) -> Packed:
        assert self._link is not None, "connect() without a meeting"
        packed = Packed(message.tag, message.facts, source=self._ranks[self._me])
        for name, tensor in message.tensors.items():
            if tensor.numel() * tensor.element_size() <= INLINE_BYTES:
                packed.inline[name] = _inline(tensor)
                continue
            ready = tensor.detach().contiguous()
            tag = self._link.send(self._ranks[address], ready)
            packed.gloo[name] = tag, _dtype_name(tensor), tuple(tensor.shape)
        return packed

    @_alone
    def release(self, lease: Lease) -> None:
        for memory in self._leases.pop(lease, []):
            memory.leases -= 1
            if not memory.leases and not memory.unsent:
                self._arena.free(memory.block)

    @_alone
    def release_all(self) -> None:
        for lease in list(self._leases):
            self.release(lease)
        for memory in self._unsent:
            self._arena.free(memory.block)
        self._unsent.clear()

    # -- receiving ---------------------------------------------------------------------------

    def receive(self, packed: Packed) -> None:
        """Take a message from a peer, from any thread; gloo is waited for elsewhere."""
        if packed.epoch != self.epoch:
            return  # of a pass that failed when an actor died
        message = unpack(packed, self._reader)
        if not packed.gloo:
            self._deliver(message)
            return
        if self._link is None:
            raise RuntimeError("a message's tensors come through gloo, but this actor has no gloo connection")
        coming = []
        for name, (tag, dtype, shape) in packed.gloo.items():
            message.tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            coming.append((tag, message.tensors[name]))

        def done(problem: Exception | None) -> None:
            if problem is None:
                try:
                    self._deliver(message)
                    return
                except Exception as error:
                    problem = error
            self._lost(f"message {message.tag}: {type(problem).__name__}: {problem}")

        self._link.receive(packed.source, coming, done)

    def close(self) -> None:
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
        while self._ringers:
            self._ringers.popitem()[1].close()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._reader.forget()
        self._leases.clear()
        self._unsent.clear()
        self._arena.close()
        self._memory = None


def _uses_cuda(actor: AttentionWorker | ExpertActor) -> bool:
    """Whether it copies what it is sent to a GPU."""
    if not isinstance(actor, ExpertActor):
        return actor.spec.device.startswith("cuda")
    lane = actor.experts.spec.lane
    return lane is not None and any(device.startswith("cuda") for device in lane.devices)


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
        if kind == "experts":
            show_own_gpu(args[1])
        self._address: Address = (kind, rank)
        self._meeting_point: MeetingPoint | None = None
        self.actor = build_actor(kind, *args)
        self._port = RayPort(
            self.actor.name,
            self.actor.deliver,
            lambda why: self.actor.abort(f"{self.actor.name}: {why}"),
            transport=self.actor.plan.transport,
            pinned=_uses_cuda(self.actor),
            timeout=self.actor.timeout,
        )

    def __repr__(self) -> str:
        """What the dashboard shows beside the actor's name, and what its log lines begin with."""
        if not hasattr(self, "actor"):  # Ray asks when __init__ has failed, too, and would lose its error
            return "not built"
        if isinstance(self.actor, ExpertActor):
            return f"{experts_per_layer(self.actor.plan, self.actor.experts.spec)} experts per layer"
        start, stop = self.actor.part.layers
        return f"layers {start}-{stop - 1}" if stop - start > 1 else f"layer {start}"

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, DoorbellAddress | None, TensorRef | None]:
        """The node, where peers on it may ring, and the memory that this actor's messages will lie in."""
        plan, rank = self.actor.plan, self.actor.rank
        own = plan.experts[rank] if isinstance(self.actor, ExpertActor) else plan.workers[rank]
        locked = any(worker.device != "cpu" for worker in plan.workers)
        memory = self._port.reserve(own.staging, resident=locked)
        return str(ray.get_runtime_context().get_node_id()), self._port.listen(), memory

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
                f"{self.actor.name} could not take message {packed.tag}: {type(error).__name__}: {error}"
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


# Two control threads: a large message being copied must not hide an abort.
RemoteActor: Any = ray.remote(concurrency_groups={"compute": 1, "control": 2, "listen": 1})(RayActor)  # type: ignore[call-overload]
