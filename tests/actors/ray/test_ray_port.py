"""Every way that tensors travel gives the same bits: ports as under Ray, with doorbells in one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.ray import ray_actor
from kt_ray.actors.ray.ray_actor import Packed, Peer, RayActor, RayPort
from kt_ray.actors.specs import actor_specs
from kt_ray.placement.transports import Transport
from kt_ray.transport.gloo_link import MeetingPoint
from kt_ray.transport.messages import Address, Mailbox, Message
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

BATCHES = [random_rows(8, seed=s) for s in range(2)]
LAYOUT = ("rule.device=cpu", "rule.stages=2", "rule.replicas=2", "rule.experts.sockets=2", "rule.groups=2")


class Doorbell:
    """Stands where a Ray handle stands; counts the ways that tensors took."""

    def __init__(self, port: RayPort, ways: dict[str, int]) -> None:
        self.deliver = self
        self._port, self._ways = port, ways

    def remote(self, packed: Packed) -> None:
        for way in ("refs", "inline", "gloo"):
            self._ways[way] = self._ways.get(way, 0) + len(getattr(packed, way))
        self._port.receive(packed)


def introduce(
    ports: dict[Address, RayPort], nodes: dict[Address, str], meeting: Any, ways: dict[str, int]
) -> None:
    """What the driver does: every port meets every other, all at once."""
    peers = {a: Peer(Doorbell(port, ways), nodes.get(a, "here")) for a, port in ports.items()}
    with ThreadPoolExecutor(len(ports)) as pool:
        list(pool.map(lambda item: item[1].connect(item[0], peers, meeting=meeting), ports.items()))


class PortCluster(LocalCluster):
    """A local cluster whose actors send as Ray actors on two nodes do."""

    transport = Transport()
    point: MeetingPoint
    ways: dict[str, int]

    def _spawn(self) -> None:
        super()._spawn()
        local: Sequence[LocalHandle] = [h for h in self.handles if isinstance(h, LocalHandle)]
        ports = {
            h.address: RayPort(
                "test", h.actor.deliver, h.actor.abort, transport=self.transport, timeout=120.0
            )
            for h in local
        }
        self.ways = {}
        there: dict[Address, str] = {("experts", 1): "there", ("worker", 3): "there"}
        self.point = MeetingPoint("127.0.0.1")
        introduce(ports, there, self.point.next(), self.ways)
        for handle in local:
            handle.actor.port = ports[handle.address]


def test_all_ways_give_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "INLINE_BYTES", 64)  # small messages go the ways of large ones
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *LAYOUT, "optim.lr=0.02", "lora.dropout=0.1")
    with local_cluster(path, config) as local:
        expected = steps(local, config, BATCHES, 2)
        parameters = local.parameters()
    plan = plan_for(path, config)
    for transport, used in [
        (Transport("arena", "ray"), {"refs", "inline"}),
        (Transport("arena", "gloo"), {"refs", "gloo"}),
        (Transport("ray", "ray"), {"inline"}),
        (Transport("gloo", "gloo"), {"gloo"}),
    ]:
        cluster = PortCluster(plan, actor_specs(plan, config, str(path)))
        cluster.transport = transport
        try:
            cluster.start()
            cluster.ways.clear()
            assert steps(cluster, config, BATCHES, 2) == expected, transport
            for name, value in cluster.parameters().items():
                assert torch.equal(value, parameters[name]), (transport, name)
        finally:
            cluster.shutdown()
        # Beside the tensors that are too small even for this limit, nothing went another way.
        assert {way for way in used if cluster.ways[way]} == used
        assert all(not cluster.ways[way] for way in ("refs", "gloo") if way not in used)


class Pair:
    """Two actors' ports and mailboxes."""

    def __init__(self, transport: Transport) -> None:
        self.addresses: list[Address] = [("experts", 0), ("worker", 0)]
        self.lost: list[str] = []
        self.noticed = threading.Event()
        self.mailboxes = {a: Mailbox(str(a)) for a in self.addresses}
        self.point = MeetingPoint("127.0.0.1")
        self.ports = {a: self.port(a, transport) for a in self.addresses}
        self.meet()

    def port(self, address: Address, transport: Transport) -> RayPort:
        return RayPort("pair", self.mailboxes[address].put, self._note, transport=transport, timeout=20.0)

    def _note(self, why: str) -> None:
        self.lost.append(why)
        self.noticed.set()

    def meet(self) -> None:
        introduce(self.ports, {}, self.point.next(), {})

    def close(self) -> None:
        for port in self.ports.values():
            port.close()


@pytest.fixture(params=["arena", "ray", "gloo"])
def pair(request: pytest.FixtureRequest) -> Any:
    made = Pair(Transport(request.param, request.param))
    yield made
    made.close()


def test_messages_keep_their_order_types_and_shapes(pair: Pair) -> None:
    experts, worker = pair.addresses
    sent = []
    for i in range(20):
        tensors = {
            "x": torch.randn(50 + 1000 * (i % 3), 64).bfloat16(),
            "ids": torch.arange(i),
            "none": torch.empty(0, 7),
            "part": torch.randn(400, 90)[10 * i : 10 * i + 150],
            "across": torch.randn(90, 100).T,
        }
        sent.append(tensors)
        pair.ports[worker].send([experts], Message(("m", i), tensors, {"i": i}))
    for i, tensors in enumerate(sent):
        message = pair.mailboxes[experts].take(("m", i), 60)
        assert message.facts == {"i": i} and set(message.tensors) == set(tensors)
        for name, tensor in tensors.items():
            assert message.tensors[name].dtype == tensor.dtype
            assert torch.equal(message.tensors[name], tensor)


def test_ports_connect_again_after_a_peer_was_replaced(pair: Pair) -> None:
    experts, worker = pair.addresses
    x = torch.randn(300, 64)
    pair.ports[worker].send([experts], Message(("before",), {"x": x}))
    assert torch.equal(pair.mailboxes[experts].take(("before",), 60).tensors["x"], x)
    old = pair.ports[experts]
    pair.ports[experts] = pair.port(experts, old._transport)
    old.close()
    pair.meet()
    for to, other in ((experts, worker), (worker, experts)):
        pair.ports[other].send([to], Message(("after",), {"x": x + 1}))
        assert torch.equal(pair.mailboxes[to].take(("after",), 60).tensors["x"], x + 1)
    assert pair.lost == []


def test_allocated_memory_travels_without_a_copy_and_comes_back() -> None:
    pair = Pair(Transport("arena", ""))
    experts, worker = pair.addresses
    port = pair.ports[worker]
    x = port.alloc((300, 64), torch.float32)
    x.copy_(torch.randn(300, 64))
    lease = port.send([experts], Message(("m",), {"x": x}))
    seen = pair.mailboxes[experts].take(("m",), 60).tensors["x"]
    assert torch.equal(seen, x)
    x[0, 0] = 7.0
    assert seen[0, 0] == 7.0  # the very memory
    port.release(lease)
    again = port.alloc((300, 64), torch.float32)
    assert again.data_ptr() == x.data_ptr()
    port.release_all()  # never sent
    assert port.alloc((300, 64), torch.float32).data_ptr() == x.data_ptr()
    part = port.alloc((300, 64), torch.float32).fill_(1.0)
    port.send([experts], Message(("part",), {"x": part[:200]}))
    assert pair.mailboxes[experts].take(("part",), 60).tensors["x"].sum() == 200 * 64
    pair.close()


def test_slices_of_allocated_memory_travel_without_a_copy() -> None:
    """An answer of several replicas: free when all of its slices were sent and read, and not before."""
    pair = Pair(Transport("arena", ""))
    experts, worker = pair.addresses
    port = pair.ports[experts]
    y = port.alloc((500, 64), torch.float32)
    y.copy_(torch.randn(500, 64))
    leases = []
    for name, rows in (("first", slice(0, 200)), ("none", slice(200, 200)), ("second", slice(200, 500))):
        leases.append(port.send([worker], Message((name,), {"y": y[rows]})))
        seen = pair.mailboxes[worker].take((name,), 60).tensors["y"]
        assert torch.equal(seen, y[rows])
        if seen.numel():
            seen[0, 0] = 7.0
            assert y[rows][0, 0] == 7.0  # the very memory
        if name == "first":  # read before the rest is sent
            port.release(leases.pop())
            assert port.alloc((500, 64), torch.float32).data_ptr() != y.data_ptr()
    port.release(leases.pop(0))
    assert port.alloc((500, 64), torch.float32).data_ptr() != y.data_ptr()
    port.release(leases.pop())
    assert port.alloc((500, 64), torch.float32).data_ptr() == y.data_ptr()
    # A slice is sent, the rest never: free between passes.
    port.send([worker], Message(("part",), {"y": port.alloc((500, 64), torch.float32)[:100]}))
    before = port._arena.bytes
    for _ in range(3):
        port.release_all()
        port.alloc((500, 64), torch.float32)
    assert port._arena.bytes == before
    pair.close()


def test_a_peer_that_is_gone_is_told() -> None:
    pair = Pair(Transport("gloo", "gloo"))
    experts, worker = pair.addresses
    pair.ports[experts].close()
    with pytest.raises(RuntimeError):
        for i in range(50):
            # Whether the send itself fails or the wait for it: nobody waits in vain.
            pair.ports[worker].send([experts], Message(("m", i), {"x": torch.zeros(1 << 20)}))
            if pair.noticed.wait(1.0):
                raise RuntimeError(pair.lost[0])
    pair.close()


def test_an_actor_that_could_not_be_built_has_a_name() -> None:
    """Ray asks for it when it hands the error of `__init__` on: a second error would be all that is heard."""
    assert repr(RayActor.__new__(RayActor)) == "not built"
