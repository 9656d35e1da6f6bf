"""How long Ray takes: a small message, one whose tensors lie in shared memory, one that carries them."""

from __future__ import annotations

import logging
import os
import statistics
import time
from typing import Any

import ray
import torch

from kt_ray.actors.arena import ArenaReader
from kt_ray.actors.mailbox import Mailbox, Message
from kt_ray.actors.ray_address import running_cluster
from kt_ray.actors.ray_port import INLINE_BYTES, Packed, Peer, RayPort, pack_inline, unpack
from kt_ray.placement.rates import Figure
from kt_ray.placement.transport import Transport

WAIT = 60.0  # seconds for an answer before the probe gives up
_SMALL, _LARGE = 64, 8 << 20  # bytes of tensors in a message


class Probe:
    """One end of the measurement; takes messages while it waits, as the real actors do."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reader = ArenaReader()
        self._mailbox = Mailbox(name)

    @ray.method(concurrency_group="control")
    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    @ray.method(concurrency_group="control")
    def deliver(self, packed: Packed) -> None:
        self._mailbox.put(unpack(packed, self._reader))

    @ray.method(concurrency_group="compute")
    def answer(self, peer: Peer, rounds: int) -> None:
        """Answer `rounds` messages with small ones."""
        for i in range(rounds):
            self._mailbox.take(("ask", i), WAIT)
            peer.handle.deliver.remote(Packed(("answer", i), {}))

    @ray.method(concurrency_group="compute")
    def ask(self, peer: Peer, size: int, shared: bool, rounds: int) -> float:
        """Median seconds until a message with `size` bytes of tensors was answered."""
        tensor = torch.ones(size, dtype=torch.uint8)
        port = RayPort(self._name, self._mailbox.put, self._mailbox.fail, transport=Transport("arena", "ray"))
        me = ("worker", 0)
        port.connect(me, {me: Peer(None, peer.node), ("experts", 0): peer})
        times = []
        for i in range(rounds):
            message = Message(("ask", i), {"x": tensor})
            start = time.perf_counter()
            if shared:
                lease = port.send([("experts", 0)], message)
            else:
                peer.handle.deliver.remote(pack_inline(message))
            self._mailbox.take(("answer", i), WAIT)
            times.append(time.perf_counter() - start)
            if shared:
                port.release(lease)
        return statistics.median(times[len(times) // 5 :])  # the first ones start connections


_Remote: Any = ray.remote(concurrency_groups={"compute": 1, "control": 2})(Probe)  # type: ignore[call-overload]


def probe_ray(rounds: int = 100, arena_bytes: float = float("inf")) -> dict[str, Figure]:
    """Figures of the connected Ray cluster: "call", "arena", "ray_bytes" (see TransportRate).

    Args:
        rounds: of small messages; a tenth of it of large ones.
        arena_bytes: bytes/s of the copy into shared memory, which "arena" leaves out.
    """
    here, there = _Remote.options(num_cpus=0).remote("here"), _Remote.options(num_cpus=0).remote("there")
    try:
        nodes = ray.get([here.node.remote(), there.node.remote()], timeout=WAIT)
        ends = [Peer(handle, node) for handle, node in zip((here, there), nodes, strict=True)]

        def round_trip(size: int, shared: bool, count: int) -> float:
            done = there.answer.remote(ends[0], count)
            took = ray.get(here.ask.remote(ends[1], size, shared, count), timeout=WAIT * 2)
            ray.get(done, timeout=WAIT)
            return float(took)

        small = round_trip(_SMALL, False, rounds) / 2
        few = max(5, rounds // 10)
        carried = max(round_trip(_LARGE, False, few) - 2 * small, 1e-9)
        figures = {"call": Figure(small, "measured"), "ray_bytes": Figure(_LARGE / carried, "measured")}
        if nodes[0] == nodes[1]:
            size = 8 * INLINE_BYTES
            one_way = round_trip(size, True, rounds) - small - size / arena_bytes
            figures["arena"] = Figure(max(one_way, 1e-6), "measured")
        return figures
    finally:
        for handle in (here, there):
            ray.kill(handle)


def measure_ray(address: str, rounds: int = 100, arena_bytes: float = float("inf")) -> dict[str, Figure]:
    """`probe_ray` on the cluster that a run would use, starting a local one for the time of it.

    Args:
        address: `cluster.address`.

    Raises:
        UserError: a cluster named by the user does not answer.
    """
    if ray.is_initialized():
        return probe_ray(rounds, arena_bytes)
    running = running_cluster(address)
    os.environ.setdefault("RAY_worker_niceness", "0")
    how: dict[str, Any] = {"address": "local", "include_dashboard": False}
    if running is not None:
        how = {"address": "auto" if running.source == "ray start" else running.address}
    ray.init(namespace="kt_ray-rates", log_to_driver=False, logging_level=logging.ERROR, **how)
    try:
        return probe_ray(rounds, arena_bytes)
    finally:
        ray.shutdown()
