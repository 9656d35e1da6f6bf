#!/usr/bin/env python
"""Experts on another node: what the network costs, against bytes / bandwidth as the plan counts them.

    python benchmarks/network.py --json out.json

Two Ray nodes on this machine, the second in a network namespace behind a veth pair that `tc` limits
(benchmarks/two_hosts.py; needs root). Records:

    link        milliseconds of one message to the other node and its short answer, through Ray's own
                transfer and through gloo: what decides rule.transport=auto
    socket      what one plain TCP connection carries over the pair, limited and not
    train       seconds of the fastest step, attention worker and expert actor on different nodes, and bytes
                on the wire, beside `kt_ray.placement.traffic`. Expected: the seconds without a limit,
                measured right before, plus expected bytes / rate: right where nothing overlaps
                (rule.groups=1), an upper bound elsewhere

Both nodes share this machine's cores, so absolute rates say little; the ratio to the unlimited run does.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import add_common_arguments, quiet_machine, write_json
from two_hosts import TwoHosts, two_hosts, two_ray_nodes

Record = dict[str, Any]
WARMUP = 3  # training steps before the measured ones


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if os.geteuid() != 0:
        sys.exit("benchmarks/network.py makes a network namespace: run it as root")
    about = quiet_machine(args.wait_quiet)
    rates = [None, *(float(rate) for rate in args.gbit.split(",") if rate)]
    os.environ.setdefault("RAY_worker_niceness", str(os.nice(0)))  # else Ray's workers are nicer still
    with two_hosts() as hosts:
        records = [_socket(hosts, rate) for rate in rates]
        _show(records)
        with two_ray_nodes(hosts, (2, 2)) as address:
            if args.links:
                records += links(hosts, address, [float(mb) for mb in args.links.split(",")], args)
            if args.steps:
                records += train(hosts, address, rates, args)
    if args.json:
        write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", default="25,10,1,0.5,0.1", help="limits of each direction, Gbit/s")
    parser.add_argument("--links", default="1,4,8,16,32", help="sizes of messages in MB; empty = none")
    parser.add_argument("--repeats", type=int, default=15, help="messages of each size")
    parser.add_argument("--steps", type=int, default=4, help="measured training steps per limit; 0 = none")
    parser.add_argument("--model", default="mini", help="a conf/model that is built locally")
    parser.add_argument("--batch", type=int, default=16, help="rows per step")
    parser.add_argument("--max-length", type=int, default=256, help="tokens per row")
    parser.add_argument("--groups", type=int, default=1, help="rule.groups; 1 = nothing overlaps")
    parser.add_argument("--transport", default="auto", help="rule.transport")
    add_common_arguments(parser)
    return parser.parse_args(argv)


def _show(records: Sequence[Record]) -> None:
    for record in records:
        print("  ".join(f"{key}={value}" for key, value in record.items()), flush=True)


def _socket(hosts: TwoHosts, rate: float | None) -> Record:
    hosts.limit(rate)
    gbit = round(hosts.socket_gbit(), 3)
    return {"kind": "socket", "limit_gbit": rate, "gbit": gbit}


# -- one message -------------------------------------------------------------------------------


class End:
    """One end of a link: a port as an actor has it. Sends a message, or answers one shortly."""

    def __init__(self, rank: int, way: str) -> None:
        from kt_ray.actors.ray.ray_actor import RayPort
        from kt_ray.placement.transports import Transport
        from kt_ray.transport.messages import Mailbox

        torch.set_num_threads(1)
        self.me, self.other = ("worker", rank), ("worker", 1 - rank)
        self.mailbox = Mailbox(f"end {rank}")
        self.port = RayPort(
            "end", self.mailbox.put, self.mailbox.fail, transport=Transport(way, way), timeout=120.0
        )

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def meeting(self) -> Any:
        import ray

        from kt_ray.transport.gloo_link import MeetingPoint

        self.point = MeetingPoint(ray.util.get_node_ip_address())
        return self.point.next()

    def connect(self, peers: Any, meeting: Any) -> None:
        import ray

        self.port.connect(self.me, peers, 1, meeting, ray.util.get_node_ip_address())

    def deliver(self, packed: Any) -> None:
        self.port.receive(packed)

    def answer(self, count: int) -> None:
        from kt_ray.transport.messages import Message

        for number in range(count):
            self.mailbox.take(("ask", number), 120)
            self.port.send([self.other], Message(("answer", number), {"y": torch.zeros(1)}))

    def ask(self, count: int, size: int) -> list[float]:
        """Seconds of each message and its answer."""
        from kt_ray.transport.messages import Message

        taken = []
        x = torch.randn(size // 4)
        for number in range(count):
            start = time.monotonic()
            lease = self.port.send([self.other], Message(("ask", number), {"x": x}))
            self.mailbox.take(("answer", number), 120)
            self.port.release(lease)
            taken.append(time.monotonic() - start)
        return taken


def links(hosts: TwoHosts, address: str, sizes: Sequence[float], args: argparse.Namespace) -> list[Record]:
    """Ray against gloo, in turn for each size."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from kt_ray.actors.ray.ray_actor import Peer

    hosts.limit(None)
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=_path())
    records = []
    try:
        nodes = sorted(ray.nodes(), key=lambda node: node["NodeManagerAddress"] != hosts.here)
        remote: Any = ray.remote(num_cpus=0.1, max_concurrency=4)(End)  # type: ignore[call-overload]
        ends = {}
        for way in ("ray", "gloo"):
            pair = [
                remote.options(
                    scheduling_strategy=NodeAffinitySchedulingStrategy(nodes[rank]["NodeID"], soft=False)
                ).remote(rank, way)
                for rank in (0, 1)
            ]
            peers = {("worker", r): Peer(end, ray.get(end.node.remote())) for r, end in enumerate(pair)}
            meeting = ray.get(pair[0].meeting.remote())
            ray.get([end.connect.remote(peers, meeting) for end in pair])
            ends[way] = pair
        for size in sizes:
            for way, (near, far) in ends.items():
                count = args.repeats + 2
                answers = far.answer.remote(count)
                taken = ray.get(near.ask.remote(count, int(size * 1e6)))[2:]
                ray.get(answers)
                median = statistics.median(taken)
                records.append(
                    {
                        "kind": "link",
                        "way": way,
                        "mb": size,
                        "median_ms": round(median * 1e3, 2),
                        "fastest_ms": round(min(taken) * 1e3, 2),
                        "gbit": round(8e-3 * size / median, 3),
                    }
                )
                _show(records[-1:])
    finally:
        ray.shutdown()
    return records


def _path() -> dict[str, Any]:
    """Actors import this file and kt_ray as this process does."""
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}}


# -- training ----------------------------------------------------------------------------------


def train(
    hosts: TwoHosts, address: str, rates: Sequence[float | None], args: argparse.Namespace
) -> list[Record]:
    """One cluster, loaded once; some steps under each limit and without one, in turn."""
    import ray

    from kt_ray.config.compose import compose
    from kt_ray.placement.traffic import traffic
    from kt_ray.runs.prepare import prepare
    from kt_ray.runs.start_cluster import make_cluster
    from kt_ray.tracking import StepMetrics
    from kt_ray.train.trainer import Events, Trainer

    # Each limit right after its own steps without one: a shared machine is not equally fast all the time.
    plan_of = [rate for limit in rates if limit is not None for rate in (None, limit)]
    config = compose(
        [
            f"model={args.model}",
            "data=demo",
            "optim=demo",
            f"data.max_length={args.max_length}",
            f"trainer.batch_size={args.batch}",
            f"trainer.max_steps={WARMUP + args.steps * len(plan_of)}",
            "trainer.eval_every=0",
            "rule=cpu_1worker_1socket",
            "rule.ray.strategy=STRICT_SPREAD",
            f"rule.groups={args.groups}",
            f"rule.transport={args.transport}",
            "cluster=ray",
            f"cluster.address={address}",
        ]
    )
    hosts.limit(None)
    prepared = prepare(config)
    cluster = make_cluster(prepared, f"network-{os.getpid()}")
    records: list[Record] = []
    try:
        cluster.connect()
        cluster.start()
        taken: list[StepMetrics] = []
        trainer = Trainer(config, cluster, prepared.batches, Events(on_step=taken.append))
        plan = prepared.plan
        for step in range(WARMUP):
            trainer.step(step)
        done, base = WARMUP, 0.0
        for rate in plan_of:
            hosts.limit(rate)
            taken.clear()
            before = sum(hosts.bytes())
            for _ in range(args.steps):
                trainer.step(done)
                done += 1
            seen = (sum(hosts.bytes()) - before) / args.steps
            # Steps are not equally long, so time is compared per token; of the fastest step, which others on
            # the machine disturbed least.
            tokens = statistics.fmean(m.tokens for m in taken)
            seconds = tokens * min(m.seconds / m.tokens for m in taken)
            median = tokens * statistics.median(m.seconds / m.tokens for m in taken)
            expected_bytes = traffic(plan, far=[0], tokens=tokens).to_experts(far=True)
            if rate is None:
                base = seconds / tokens
            expected = base * tokens + (8 * expected_bytes / (rate * 1e9) if rate else 0.0)
            records.append(
                {
                    "kind": "train",
                    "limit_gbit": rate,
                    "groups": plan.groups,
                    "transport": plan.transport.far,
                    "steps": len(taken),
                    "tokens": round(tokens),
                    "seconds": round(seconds, 4),
                    "median_seconds": round(median, 4),
                    "tokens_per_s": round(tokens / seconds, 1),
                    "bytes_expected": round(expected_bytes),
                    "bytes_on_wire": round(seen),
                    "seconds_expected": round(expected, 4),
                    "tokens_per_s_expected": round(tokens / expected, 1),
                }
            )
            _show(records[-1:])
    finally:
        cluster.shutdown()
        if ray.is_initialized():
            ray.shutdown()
    return records


if __name__ == "__main__":
    sys.exit(main())
