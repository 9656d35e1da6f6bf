"""What a message between two actors of one node costs: through the doorbell, and as a Ray call.

    python benchmarks/doorbell.py --rounds 1000 --pause-ms 0,10 --json out.json

A message whose tensors lie in shared memory goes there, a small one comes back. `median_s` and `p90_s` are
of half that time. `actors_cpu_s` and `ray_cpu_s` are CPU seconds per message of both actors together and of
Ray's other processes, beyond what they take at rest. A pause before each message is as in training, where
nothing is warm.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import psutil

sys.path.insert(0, str(common.REPO))

import ray
import torch

from kt_ray.actors.ray.ray_actor import Peer
from kt_ray.actors.ray.ray_probe import WAIT, Probe
from kt_ray.transport.messages import Message

BYTES = 128 << 10


class End(Probe):
    """A probe that reports every time, and pauses."""

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        import os

        return os.getpid()

    @ray.method(concurrency_group="compute")
    def times(self, rounds: int, pause: float) -> list[float]:
        """Seconds of each message there and back, without the pause before it."""
        port, x = self._ports["arena"], torch.ones(BYTES, dtype=torch.uint8)
        taken = []
        for i in range(rounds):
            time.sleep(pause)
            start = time.perf_counter()
            lease = port.send([self._other], Message(("ask", i), {"x": x}))
            self._mailbox.take(("answer", i), WAIT)
            taken.append(time.perf_counter() - start)
            port.release(lease)
        return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--pause-ms", default="0,10")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = common.machine()
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        remote: Any = ray.remote(concurrency_groups={"compute": 1, "control": 2})(End)  # type: ignore[call-overload]
        pair = [remote.options(num_cpus=0).remote(rank) for rank in (0, 1)]
        records = []
        for repeat in range(given.repeats):
            for pause in given.pause_ms.split(","):
                for way in ("call", "doorbell"):
                    records.append(
                        {"repeat": repeat, **_measure(pair, way, given.rounds, float(pause) / 1e3)}
                    )
                    print(records[-1], flush=True)
    finally:
        ray.shutdown()
    if given.json:
        common.write_json(given.json, records, about)
    return 0


def _measure(pair: list[Any], way: str, rounds: int, pause: float) -> dict[str, Any]:
    places = ray.get([end.place.remote() for end in pair])
    peers = {
        ("worker", r): Peer(end, *place) for r, (end, place) in enumerate(zip(pair, places, strict=True))
    }
    if way == "call":
        peers = {address: dataclasses.replace(peer, doorbell=None) for address, peer in peers.items()}
    ray.get([end.connect.remote(peers) for end in pair])
    pids = set(ray.get([end.pid.remote() for end in pair]))
    _run(pair, 20, 0.0)
    idle = _cpu(pids)
    time.sleep(3.0)
    rest = [(after - before) / 3.0 for after, before in zip(_cpu(pids), idle, strict=True)]
    before, start = _cpu(pids), time.monotonic()
    taken = sorted(seconds / 2 for seconds in _run(pair, rounds, pause))
    wall, after = time.monotonic() - start, _cpu(pids)
    actors, others = (
        (late - early - at_rest * wall) / (2 * rounds)
        for late, early, at_rest in zip(after, before, rest, strict=True)
    )
    return {
        "impl": way,
        "bytes": BYTES,
        "pause_s": pause,
        "median_s": statistics.median(taken),
        "p90_s": taken[len(taken) * 9 // 10],
        "actors_cpu_s": actors,
        "ray_cpu_s": others,
    }


def _run(pair: list[Any], rounds: int, pause: float) -> list[float]:
    done = pair[1].answer.remote("arena", rounds)
    taken: list[float] = ray.get(pair[0].times.remote(rounds, pause))
    ray.get(done)
    return taken


def _cpu(pids: set[int]) -> tuple[float, float]:
    """CPU seconds so far of the two actors, and of the other processes of Ray, this one not counted."""
    sums = [0.0, 0.0]
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
            sums[process.pid not in pids] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return sums[0], sums[1]


if __name__ == "__main__":
    raise SystemExit(main())
