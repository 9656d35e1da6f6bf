"""The port of a Ray actor: shared memory to peers on the same node, Ray's own transfer to others.

On the same node a Ray call is only a doorbell that carries where the tensors lie; small messages
and messages to other nodes carry their bytes inside the call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kt_ray.actors.arena import Arena, ArenaReader, TensorRef
from kt_ray.actors.mailbox import Address, Message, Tag
from kt_ray.actors.port import Lease

INLINE_BYTES = 16 * 1024  # below this a message is cheaper inside the call than through the arena


@dataclass
class Packed:
    """A message on the wire: tensors as references, or as (dtype name, shape, uint8 array)."""

    tag: Tag
    facts: dict[str, Any]
    refs: dict[str, TensorRef] = field(default_factory=dict)
    inline: dict[str, tuple[str, tuple[int, ...], np.ndarray]] = field(default_factory=dict)
    epoch: int = 0  # of the introduction that the sender knew


def pack_inline(message: Message) -> Packed:
    """Every tensor's bytes inside the call (bfloat16 has no numpy type, so they travel as bytes)."""
    inline = {}
    for name, tensor in message.tensors.items():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        inline[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat)
    return Packed(message.tag, message.facts, inline=inline)


def unpack(packed: Packed, reader: ArenaReader) -> Message:
    """The message again; arena tensors are views of the sender's memory."""
    tensors = {name: reader.read(ref) for name, ref in packed.refs.items()}
    for name, (dtype, shape, flat) in packed.inline.items():
        # A copy, since arrays that come out of Ray are read-only.
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        if flat.size:
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(flat.copy()))
        tensors[name] = tensor
    return Message(packed.tag, tensors, packed.facts)


@dataclass(frozen=True)
class Peer:
    """Another actor: its Ray handle and the node it runs on."""

    handle: Any
    node: str


class RayPort:
    """Sends for one Ray actor.

    Args:
        name: for the arena's name in /proc maps.
        node: Ray node id of this actor.
        peers: all actors by address.
        epoch: number of the introduction that these peers come from.
    """

    def __init__(self, name: str, node: str, peers: Mapping[Address, Peer], epoch: int = 0) -> None:
        self._node = node
        self._peers = dict(peers)
        self.epoch = epoch
        self._arena = Arena(name)
        self._blocks: dict[Lease, list[tuple[int, int, int]]] = {}
        self._next: Lease = 1

    def connect(self, peers: Mapping[Address, Peer], epoch: int) -> None:
        """Meet all actors by address; again, between passes, when some of them were replaced.

        What was sent before belongs to an older epoch, and receivers of this one pass it over.
        """
        self.release_all()
        self._peers = dict(peers)
        self.epoch = epoch

    def send(self, to: Sequence[Address], message: Message) -> Lease:
        size = sum(t.numel() * t.element_size() for t in message.tensors.values())
        near = [self._peers[a] for a in to if size > INLINE_BYTES and self._peers[a].node == self._node]
        far = [self._peers[a] for a in to if not (size > INLINE_BYTES and self._peers[a].node == self._node)]
        lease = self._next
        self._next += 1
        if near:
            packed = Packed(message.tag, message.facts, epoch=self.epoch)
            blocks = []
            for name, tensor in message.tensors.items():
                packed.refs[name], block = self._arena.write(tensor)
                blocks.append(block)
            self._blocks[lease] = blocks
            for peer in near:
                peer.handle.deliver.remote(packed)
        if far:
            inline = pack_inline(message)
            inline.epoch = self.epoch
            for peer in far:
                peer.handle.deliver.remote(inline)
        return lease

    def release(self, lease: Lease) -> None:
        for block in self._blocks.pop(lease, []):
            self._arena.free(block)

    def release_all(self) -> None:
        for lease in list(self._blocks):
            self.release(lease)

    @property
    def arena_bytes(self) -> int:
        return self._arena.bytes
