"""How long messages under Ray take: a small call, one that carries tensors, one in shared memory."""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import time
from collections.abc import Sequence
from typing import Any

import ray
import torch

from kt_ray.actors.ray.ray_access import token_to_join, token_to_start
from kt_ray.actors.ray.ray_actor import INLINE_BYTES, Packed, Peer, RayPort
from kt_ray.actors.ray.ray_address import files_to_start, running_cluster
from kt_ray.actors.ray.ray_guard import RayGuard
from kt_ray.hardware.rates import Figure
from kt_ray.placement.transports import Transport
from kt_ray.transport.messages import Address, Mailbox, Message
from kt_ray.transport.shared_memory import DoorbellAddress

WAIT = 60.0  # seconds for an answer before the probe gives up
_SMALL, _LARGE = 64, 8 << 20  # bytes of tensors in a message


class Probe:
    """One end of the measurement; takes messages while it waits, as the real actors do.

    Args:
        rank: 0 asks, 1 answers.
    """

    def __init__(self, rank: int) -> None:
        self._me, self._other = ("worker", rank), ("worker", 1 - rank)
        self._mailbox = Mailbox(f"probe {rank}")
        put, fail = self._mailbox.put, self._mailbox.fail
        self._ports = {
            near: RayPort("probe", put, fail, transport=Transport(near, "ray")) for near in ("arena", "ray")
        }

    @ray.method(concurrency_group="control")
    def place(self) -> tuple[str, DoorbellAddress | None]:
        return str(ray.get_runtime_context().get_node_id()), self._ports["arena"].listen()

    @ray.method(concurrency_group="control")
    def connect(self, peers: dict[Address, Peer]) -> None:
        for port in self._ports.values():
            port.connect(self._me, peers)

    @ray.method(concurrency_group="control")
    def deliver(self, packed: Packed) -> None:
        self._ports["ray"].receive(packed)

    @ray.method(concurrency_group="compute")
    def answer(self, near: str, rounds: int) -> None:
        """Answer `rounds` messages with small ones, through shared memory ("arena") or calls ("ray")."""
        for i in range(rounds):
            self._mailbox.take(("ask", i), WAIT)
            self._ports[near].send([self._other], Message(("answer", i)))

    @ray.method(concurrency_group="compute")
    def ask(self, near: str, size: int, rounds: int) -> float:
        """Median seconds until a message with `size` bytes of tensors was answered."""
        port, tensor = self._ports[near], torch.ones(size, dtype=torch.uint8)
        times = []
        for i in range(rounds):
            start = time.perf_counter()
            lease = port.send([self._other], Message(("ask", i), {"x": tensor}))
            self._mailbox.take(("answer", i), WAIT)
            times.append(time.perf_counter() - start)
            port.release(lease)
        return statistics.median(times[len(times) // 5 :])  # the first ones start connections


_Remote: Any = ray.remote(concurrency_groups={"compute": 1, "control": 2})(Probe)  # type: ignore[call-overload]


def probe_ray(rounds: int = 100, arena_bytes: float = float("inf")) -> dict[str, Figure]:
    """Figures of the connected Ray cluster: "call", "arena", "ray_bytes" (see TransportRate).

    Args:
        rounds: of small messages; a tenth of it of large ones.
        arena_bytes: bytes/s of the copy into shared memory, which "arena" leaves out.
    """
    pair = [_Remote.options(num_cpus=0).remote(rank) for rank in (0, 1)]
    try:
        one_node = introduce(pair)
        small = round_trip(pair, "ray", _SMALL, rounds) / 2
        carried = max(round_trip(pair, "ray", _LARGE, max(5, rounds // 10)) - 2 * small, 1e-9)
        figures = {"call": Figure(small, "measured"), "ray_bytes": Figure(_LARGE / carried, "measured")}
        if one_node:
            size = 8 * INLINE_BYTES  # a message there in shared memory, and a small one back
            one_way = (round_trip(pair, "arena", size, rounds) - size / arena_bytes) / 2
            figures["arena"] = Figure(max(one_way, 1e-6), "measured")
        return figures
    finally:
        for handle in pair:
            ray.kill(handle)


def introduce(pair: Sequence[Any]) -> bool:
    """Connect two probes; whether both are on one node."""
    places = ray.get([handle.place.remote() for handle in pair], timeout=WAIT)
    peers = {("worker", r): Peer(h, *at) for r, (h, at) in enumerate(zip(pair, places, strict=True))}
    ray.get([handle.connect.remote(peers) for handle in pair], timeout=WAIT)
    return bool(places[0][0] == places[1][0])


def round_trip(pair: Sequence[Any], near: str, size: int, rounds: int) -> float:
    """`Probe.ask` of two that were introduced."""
    done = pair[1].answer.remote(near, rounds)
    seconds = ray.get(pair[0].ask.remote(near, size, rounds), timeout=WAIT * 2)
    ray.get(done, timeout=WAIT)
    return float(seconds)


def measure_ray(address: str, arena_bytes: float = float("inf")) -> dict[str, Figure]:
    """`probe_ray` on the cluster that a run would use, starting a local one for the time of it.

    Raises:
        UserError: a cluster named by the user does not answer, or a local one may open too few files.
    """
    if ray.is_initialized():
        return probe_ray(arena_bytes=arena_bytes)
    running = running_cluster(address)
    os.environ.setdefault("RAY_worker_niceness", "0")
    how: dict[str, Any] = {"address": "local", "include_dashboard": False}
    guard: RayGuard | None = None
    if running is None:
        files_to_start()
        token_to_start()
        guard = RayGuard()
    else:
        token_to_join(found=running.source == "ray start")
        how = {"address": running.address}
    try:
        with guard.own_ray() if guard is not None else contextlib.nullcontext():
            ray.init(namespace="kt_ray-rates", log_to_driver=False, logging_level=logging.ERROR, **how)
        return probe_ray(arena_bytes=arena_bytes)
    finally:
        ray.shutdown()
        if guard is not None:
            guard.end()
