"""What all clusters share, on handles that only pretend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray.actors import watch
from kt_ray.actors.actor_calls import Handle
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.ray import ray_cluster, ray_hosts
from kt_ray.actors.ray.ray_address import Running
from kt_ray.actors.ray.ray_cluster import RayActorSpec, RayCluster, RayHandle
from kt_ray.actors.ray.ray_hosts import RayNode, choose
from kt_ray.actors.specs import ActorSpecs, actor_specs
from kt_ray.actors.watch import Status
from kt_ray.batch import PassSpec
from kt_ray.config.schema import ClusterConfig, RayRule
from kt_ray.errors import TryAgain, UserError
from kt_ray.hardware.host_look import Shared, Sight, versions
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.transport.messages import Address
from tests.placement.configs import make_config, make_hardware, small_dims


class Loading(Handle):
    """An expert actor whose load call ends after a given number of looks at its progress."""

    def __init__(self, rank: int, progress: Sequence[tuple[int, int, int]]) -> None:
        self.address = ("experts", rank)
        self.progress = list(progress)
        self.looks = 0

    def start(self, method: str, *args: Any) -> Any:
        return SimpleNamespace(done=lambda: self.looks > len(self.progress), value={"method": method})

    def control(self, method: str, *args: Any) -> Any:
        status = Status(self.looks, "", self.name, self.progress[min(self.looks, len(self.progress) - 1)])
        self.looks += 1
        return SimpleNamespace(done=lambda: True, value=status)


class Pretended(ActorCluster):
    def connect(self) -> list[str]:
        return []

    def _spawn(self) -> None:
        raise AssertionError("spawned by the test")

    def _wait(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        return [future for future in futures if future.done()][:1]

    def _result(self, future: Any) -> Any:
        return future.value

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        raise AssertionError("nobody dies here")

    def _kill(self, lost: AbstractSet[Address]) -> None:
        pass

    def _close(self) -> None:
        pass


def test_load_progress_is_told_once_per_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOK", 0.0)
    notes: list[tuple[str, int, int, int]] = []
    specs = cast(ActorSpecs, SimpleNamespace(timeout=10.0))
    cluster = Pretended(cast(Plan, None), specs, lambda *note: notes.append(note))
    quick = [(0, 0, 0), (1, 5, 10), (2, 10, 10)]
    slow = [(0, 0, 0), (1, 5, 10), (1, 5, 10), (1, 5, 10), (2, 10, 10)]
    cluster.experts = [Loading(0, quick), Loading(1, slow)]
    facts: dict[Address, dict[str, Any]] = {}
    cluster._load({}, facts)
    assert facts == {("experts", rank): {"method": "load"} for rank in (0, 1)}
    for rank in (0, 1):
        assert [n[1:] for n in notes if n[0] == f"expert actor {rank}"] == [(1, 5, 10), (2, 10, 10)]


@pytest.mark.parametrize(("profile", "frozen"), [(None, 90.0), ("traces", 1800.0)])
def test_an_actor_that_writes_a_trace_is_not_frozen(profile: str | None, frozen: float) -> None:
    """torch's profiler lets no other thread of its process answer meanwhile."""
    cluster = Pretended(cast(Plan, None), cast(ActorSpecs, SimpleNamespace(timeout=1800.0)))
    seen: list[float] = []

    def start(method: str, *args: Any) -> Any:
        seen.append(cluster._watch([])._frozen)
        raise ActorLost("enough")

    cluster.experts = [cast(Handle, SimpleNamespace(start=start))]
    with pytest.raises(ActorLost):
        cluster.run_pass(cast(PassSpec, SimpleNamespace(profile=profile)))
    assert seen == [frozen] and cluster._watch([])._frozen == 90.0


class Hurried(Handle):
    """An actor whose control thread is late: an abort arrives only when it is waited for."""

    def __init__(self, rank: int, log: list[str]) -> None:
        self.address = ("experts", rank)
        self.log = log

    def start(self, method: str, *args: Any) -> Any:
        self.log.append(method)
        return SimpleNamespace(done=lambda: True, value=None)

    def control(self, method: str, *args: Any) -> Any:
        def done() -> bool:
            self.log.append(f"{method} arrived")
            return True

        return SimpleNamespace(done=done, value=None)


@pytest.mark.parametrize("what", ["discard", "skip"])
def test_no_abort_is_on_its_way_when_a_step_is_given_up(what: str) -> None:
    log: list[str] = []
    cluster = Pretended(cast(Plan, None), cast(ActorSpecs, SimpleNamespace(timeout=10.0)))
    cluster.experts = [Hurried(0, log), Hurried(1, log)]
    cluster._abort("a loss is not finite")
    cluster.discard() if what == "discard" else cluster.skip(3)
    assert log == ["abort arrived", "abort arrived", what, what] and not cluster._aborts


class Frozen(Hurried):
    """An actor that answers nothing until it is killed."""

    killed = False

    def control(self, method: str, *args: Any) -> Any:
        assert self.killed or method == "abort", "a frozen one that is known as such is not asked again"

        def done() -> bool:
            self.log.append(f"{method} ended" if self.killed else f"{method} waits")
            return self.killed

        return SimpleNamespace(done=done, value=None)


def test_a_frozen_actor_is_killed_before_its_abort_is_waited_for() -> None:
    """Else a recovery takes a minute more."""
    log: list[str] = []
    frozen = Frozen(1, log)

    class Killing(Pretended):
        def _kill(self, lost: AbstractSet[Address]) -> None:
            frozen.killed = frozen.address in lost

    cluster = Killing(cast(Plan, None), cast(ActorSpecs, SimpleNamespace(timeout=10.0)))
    cluster.experts = [Hurried(0, log), frozen]
    cluster._abort("it did not answer")
    cluster._lost.add(frozen.address)
    assert cluster._find_lost() == {frozen.address}
    assert log == ["status arrived", "abort arrived", "abort ended"] and not cluster._aborts


@pytest.mark.parametrize("dies", [True, False])
def test_who_fails_to_connect_may_have_missed_one_that_died(
    dies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With gloo all actors connect to each other: a dead one is the cause, whoever complains first."""
    ends = {
        "complains": RayTaskError("connect", "traceback", RuntimeError("connection reset by peer")),
        "fine": None,
        "last": RayActorError() if dies else None,
    }

    def get(future: str) -> None:
        if (error := ends[future]) is not None:
            raise error

    pretended = SimpleNamespace(get=get, wait=lambda futures, **_: (futures[:1], futures[1:]))
    monkeypatch.setattr(ray_cluster, "ray", pretended)
    cluster = RayCluster(cast(Plan, None), cast(ActorSpecs, None), ClusterConfig(), RayRule(), "test")
    waiting = {name: RayHandle(("experts", rank), None) for rank, name in enumerate(ends)}
    with pytest.raises(ActorLost if dies else RuntimeError, match="died" if dies else "connection reset"):
        cluster._await_introduced(waiting, 5.0)
    assert cluster._lost == ({("experts", 2)} if dies else set())


def test_several_hosts_are_not_planned_through_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running("ray://10.0.0.1:10001", "cluster.address")
    monkeypatch.setattr(ray_cluster, "running_cluster", lambda _: running)
    plan = cast(Plan, SimpleNamespace(hardware=SimpleNamespace(hosts=2)))
    cluster = RayCluster(plan, cast(ActorSpecs, None), ClusterConfig(), RayRule(), "test")
    with pytest.raises(UserError, match="does not run through ray://") as caught:
        cluster.connect()
    assert "rule.nodes=2" in str(caught.value.where) and "cluster.address=HOST:PORT" in caught.value.remedy


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_network_that_is_closed_is_named(hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo's ports are the system's choice: a firewall shows as actors that never connect."""
    monkeypatch.setattr(ray_cluster, "ray", SimpleNamespace(wait=lambda futures, **_: ([], futures)))
    plan = cast(Plan, SimpleNamespace(hardware=SimpleNamespace(hosts=hosts)))
    cluster = RayCluster(plan, cast(ActorSpecs, None), ClusterConfig(), RayRule(), "test")
    with pytest.raises(UserError, match="could not be introduced") as caught:
        cluster._await_introduced({"waits": RayHandle(("experts", 0), None)}, 0.1)
    assert ("rule.transport=ray" in (caught.value.remedy or "")) == (hosts > 1)


def test_hosts_whose_nodes_die_get_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three in turn, of three hosts: each gets a node of its own, when one joins, and new CPU numbers.
    Another run takes the last one's before it is reserved: then the next, where Ray is slow."""
    hosts = make_hardware(sockets=1, cores=4)
    plan = make_plan(small_dims(), make_config(rule={"nodes": 3, "device": "cpu"}), hosts)
    nodes = {name: RayNode(name, name, 8, 8, Sight(hosts, versions(), ())) for name in "abc"}
    alive = list("abc")
    removed: list[Any] = []
    shift = replace(hosts, sockets=tuple(replace(s, cpus=(4, 5, 6, 7)) for s in hosts.sockets))

    def joins(_: float) -> None:
        assert len(removed) < 9  # else it would be asked for ever
        name = chr(ord("d") + len(removed) - 1)
        nodes[name] = RayNode(name, name, 8, 8, Sight(shift, versions(), ()))
        alive.append(name)

    def await_group(group: list[dict[str, str]], _: Any, timeout: float, **__: Any) -> None:
        if group == [{"ray.io/node-id": "f"}]:
            nodes["f"] = replace(nodes["f"], free=0)
        if group == [{"ray.io/node-id": "f"}] or (group == [{"ray.io/node-id": "g"}] and timeout < 30):
            raise UserError("Ray did not provide the actors' resources")

    context = SimpleNamespace(get_node_id=lambda: "a")

    def late(future: str, timeout: float) -> None:
        raise GetTimeoutError(future)

    pretended = SimpleNamespace(
        nodes=lambda: [{"NodeID": name, "Alive": True} for name in alive],
        get_runtime_context=lambda: context,
        get=late,
    )
    for module in (ray_cluster, ray_hosts):
        monkeypatch.setattr(module, "ray", pretended)
    monkeypatch.setattr(
        ray_hosts, "_nodes", lambda _, __, known: [nodes[name] for name in alive if name not in known]
    )
    monkeypatch.setattr(ray_cluster, "placement_group", lambda _, **how: how["bundle_label_selector"])
    monkeypatch.setattr(ray_cluster, "await_group", await_group)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_cluster.time, "sleep", joins)
    cluster = RayCluster(
        plan, actor_specs(plan, make_config(), "", formulas={}), ClusterConfig(), RayRule(), "test"
    )
    cluster._shared = Shared(())
    cluster.hosts = choose(plan, nodes.values(), "a", [8, 8, 8], versions())
    reserved = cluster._reservations()
    cluster._describe(reserved, *cluster._reserve(reserved, range(3)))
    for host, dead, new in [(1, "b", "d"), (2, "c", "e"), (2, "e", "g")]:
        alive.remove(dead)
        cluster._lost.clear()
        cluster._replace_hosts(time.monotonic() + 60)
        assert cluster._lost == {("experts", host)} and cluster.hosts.nodes[host].id == new
        spec = cluster._actor_specs["experts", host]
        assert spec.place.placement_group == [{"ray.io/node-id": new}] and spec.arguments[2] == (4, 5, 6, 7)
    assert removed == [[{"ray.io/node-id": name}] for name in "bcefg"]
    assert [host.id for host in cluster.hosts.nodes] == ["a", "d", "g"] and cluster._gone() == set()
    # An actor waits for no place on a dead node.
    alive.remove("g")
    with pytest.raises(ActorLost, match="expert actor 2 died; found its node is dead"):
        cluster._placed(RayHandle(("experts", 2), None), "place", 60.0)
    # Where no try succeeded in time, `ray status` says why, once.
    nodes["f"] = replace(nodes["f"], free=8)
    monkeypatch.setattr(ray_cluster, "ray_status", lambda: "as Ray counts")
    with pytest.raises(UserError, match="did not provide"):
        cluster._replace_hosts(time.monotonic() - 1)
    assert capsys.readouterr().err == "as Ray counts\n" and len(cluster._groups) == 2


def test_who_does_not_say_where_it_is_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor that freezes while another is replaced; but where no node has room, nobody is to blame."""

    answer: dict[str, Exception] = {}

    def get(future: str, timeout: float) -> tuple[str, None, None]:
        if future == "frozen":
            raise answer.get(future) or GetTimeoutError("no answer")
        return "node", None, None

    table = {"state": "CREATED"}
    node = {"Alive": True}
    pretended = SimpleNamespace(get=get, available_resources=dict, nodes=lambda: [node])
    monkeypatch.setattr(ray_cluster, "ray", pretended)
    monkeypatch.setattr(ray_cluster, "placement_group_table", lambda group: table)
    config = ClusterConfig(start_timeout=4.0)
    cluster = RayCluster(cast(Plan, None), cast(ActorSpecs, None), config, RayRule(), "test")
    for rank, place in enumerate(["fine", "frozen"]):
        remote = SimpleNamespace(place=SimpleNamespace(remote=lambda place=place: place))
        cluster.experts.append(RayHandle(("experts", rank), remote))
    seat = PlacementGroupSchedulingStrategy(cast(PlacementGroup, None))
    cluster._actor_specs[("experts", 1)] = RayActorSpec((), seat, 2.0, 0.0)
    with pytest.raises(ActorLost, match="expert actor 1 did not answer for 4 s"):
        cluster._introduce()
    assert cluster._lost == {("experts", 1)}
    table["state"] = "RESCHEDULING"
    with pytest.raises(UserError, match="no node has room for expert actor 1") as raised:
        cluster._introduce()
    assert not isinstance(raised.value, ActorLost)
    # Ray calls an actor dead that its node's Python cannot import: others would not live there, either.
    answer["frozen"] = RayActorError(error_msg="The actor died: RemoteActor failed to import on the worker.")
    with pytest.raises(UserError, match="a Ray node cannot run kt_ray; at expert actor 1") as raised:
        cluster._introduce()
    assert not isinstance(raised.value, ActorLost)
    del answer["frozen"]
    # The only node of a Ray of our own: nothing to wait for.
    node["Alive"], cluster.config = False, ClusterConfig(start_timeout=60.0)
    with pytest.raises(TryAgain, match=r"Ray's node is dead.*trainer\.restarts"):
        cluster._introduce()
