"""Which node is which host: every reason to refuse one, and what a host looks at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from kt_ray.actors.ray import ray_hosts
from kt_ray.actors.ray.ray_hosts import Hosts, RayNode, check_nodes, choose, own_cpus, unfit
from kt_ray.actors.specs import ActorSpecs
from kt_ray.config.schema import OptimConfig
from kt_ray.errors import UserError
from kt_ray.experts import LocalExpertsSpec
from kt_ray.hardware.host_look import Shared, Sight, digest, look, versions
from kt_ray.hardware.machine import Gpu, Hardware
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from tests.placement.configs import make_config, make_hardware, small_dims

OWN = (("kt_ray", "1"), ("torch", "2"))
HOST = make_hardware(sockets=2, cores=4)
FIRST = replace(HOST, sockets=HOST.sockets[:1])  # as a mask shows it


def plan(nodes: int = 2, **rule: Any) -> Plan:
    return make_plan(small_dims(), make_config(rule={"nodes": nodes, "device": "cpu", **rule}), HOST)


def node(name: str, hardware: Hardware = HOST, *, free: float = 8, unseen: tuple[str, ...] = ()) -> RayNode:
    return RayNode(name, f"10.0.0.{ord(name[0])}", 8, free, Sight(hardware, OWN, unseen))


def test_the_driver_first_then_by_id() -> None:
    hosts = choose(plan(3), [node("c"), node("a"), node("b"), node("d")], "c", [8, 8, 8], OWN)
    assert [n.id for n in hosts.nodes] == ["c", "a", "b"]
    assert hosts.lines[0].startswith("host 0: Ray node 10.0.0.99")


def test_a_host_that_was_lost_gets_another_node() -> None:
    """A spare one or one that has just come, as planned; never a node of another host."""
    kept = {0: node("c", free=0), 2: node("b", free=0)}  # their own actors have the CPUs
    hosts = choose(plan(3), [node("e", free=1), node("d"), node("f")], "c", [8, 8, 8], OWN, kept)
    assert [n.id for n in hosts.nodes] == ["c", "d", "b"]
    assert [line.partition(":")[0] for line in hosts.lines] == ["host 1"]
    with pytest.raises(UserError, match="too few nodes") as caught:
        choose(plan(3), [node("e", free=1)], "c", [8, 8, 8], OWN, kept)
    assert "2 nodes as planned; node 10.0.0.101 (e): 1 of its 8 CPUs" in str(caught.value.observed)


def test_unfit_nodes_are_passed_over_and_named() -> None:
    busy, blind = node("a", free=1), node("b", unseen=("/models/x cannot be read there",))
    hosts = choose(plan(), [node("d"), busy, blind, node("e")], "d", [8, 8], OWN)
    assert [n.id for n in hosts.nodes] == ["d", "e"]
    assert any("not used" in line and "1 of its 8 CPUs are free" in line for line in hosts.lines)
    with pytest.raises(UserError, match="too few nodes") as caught:
        choose(plan(), [node("d"), busy, blind], "d", [8, 8], OWN)
    assert "/models/x" in str(caught.value.observed) and caught.value.remedy
    with pytest.raises(UserError, match="driver's Ray node"):
        choose(plan(), [node("d", unseen=("gone",)), node("e")], "d", [8, 8], OWN)


def test_every_reason() -> None:
    def why(hardware: Hardware = HOST, **more: Any) -> str:
        given = node("n", hardware, **more)
        return unfit(plan(), 1, given, 8, OWN) or ""

    assert why() == ""
    assert "1 socket, planned 2" in why(make_hardware(sockets=1, cores=4))
    assert "[3, 3] cores, planned [4, 4]" in why(make_hardware(sockets=2, cores=3))
    assert "the plan needs" in why(make_hardware(sockets=2, cores=4, memory=1 << 20))
    assert "best instruction set is avx2" in why(make_hardware(sockets=2, cores=4, isa="avx2"))
    assert "amx" in why(make_hardware(sockets=2, cores=4, isa="amx"))  # other kernels, other figures
    assert "no answer" in (unfit(plan(), 1, RayNode("n", "1", 8, 8, "no answer within 9 s"), 8, OWN) or "")
    assert "torch 2, here 3" in (unfit(plan(), 1, node("n"), 8, (("kt_ray", "1"), ("torch", "3"))) or "")
    assert "offers no CPUs" in (unfit(plan(), 1, replace(node("n"), cpus=0, free=0), 8, OWN) or "")
    forced = plan(experts={"isa": "avx2"})
    more = node("n", make_hardware(sockets=2, cores=4, isa="amx"))
    assert unfit(forced, 1, more, 8, OWN) is None


def test_a_node_with_other_gpus_is_passed_over() -> None:
    """Found before Ray reserves them: another node may have the plan's."""
    two = make_plan(
        small_dims(),
        make_config(rule={"nodes": 2, "device": "cuda", "replicas": 2}),
        make_hardware(gpus=1, sockets=2, cores=4),
    )
    own = two.hardware.gpus[0]

    def with_cards(name: str, *cards: Gpu) -> RayNode:
        given = node(name)
        assert isinstance(given.sight, Sight)
        return replace(given, gpus=1, sight=replace(given.sight, cards=cards))

    other = with_cards("a", replace(own, name="another"))
    hosts = choose(two, [with_cards("d", own), other, with_cards("e", own)], "d", [8, 8], OWN)
    assert [n.id for n in hosts.nodes] == ["d", "e"]
    assert "its GPUs are 1 × another of " in hosts.lines[-1]
    more, less = (replace(own, memory_bytes=own.memory_bytes + (n << 20)) for n in (3, -3))
    assert unfit(two, 1, with_cards("f", less, more), 8, OWN) is None  # another driver reserves less
    assert "the plan needs 1 × " in (unfit(two, 1, with_cards("f", less), 8, OWN) or "")
    assert unfit(two, 1, with_cards("f"), 8, OWN) is None  # not known: Ray's count alone
    cut = replace(node("g", replace(HOST, sliced="GPU 1: A100")), gpus=1)
    assert "slices (MIG): GPU 1: A100" in (unfit(two, 1, cut, 8, OWN) or "")
    assert unfit(plan(), 1, cut, 8, OWN) is None


@pytest.mark.parametrize(
    ("sight", "id", "found"),
    [
        (Sight(HOST, versions(), ()), "own", None),
        (Sight(FIRST, versions(), ()), "cards", None),  # no expert actor is on it
        (Sight(HOST, versions(), ("the run directory /runs is not shared with it",)), "other", "not shared"),
        (Sight(HOST, tuple((name, "0") for name, _ in versions()), ()), "other", "other packages"),
        ("it cannot run kt_ray (ModuleNotFoundError)", "own", "cannot run kt_ray"),
        (Sight(FIRST, versions(), ()), "own", "expert actor 1 is planned on the CPUs 4-7, Ray may use 0-3"),
    ],
)
def test_nodes_of_a_plan_for_one_host(
    sight: Sight | str, id: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Ray puts its actors, they must find what the driver found."""
    nodes = [{"NodeID": name, "NodeManagerAddress": "10.0.0.1"} for name in ("own", "other", "cards")]
    context = SimpleNamespace(get_node_id=lambda: "own")
    pretended = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context)
    monkeypatch.setattr(ray_hosts, "ray", pretended)
    monkeypatch.setattr(ray_hosts, "_sights", lambda nodes, *_: [sight for _ in nodes])
    shared = Shared((), "/runs", "mark")
    experts = {id: {0, 1} if id != "cards" else frozenset[int]()}
    if found is None:
        return check_nodes(plan(1), shared, experts, 1.0)
    with pytest.raises(UserError, match="not as the run needs it") as raised:
        check_nodes(plan(1), shared, experts, 1.0)
    assert found in str(raised.value.observed) and "cluster.address=local" in raised.value.remedy
    assert ("run.root on a disk" in raised.value.remedy) == (id == "other")


def test_nodes_that_hang_cost_one_timeout_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def get(answer: str, timeout: float) -> Sight:
        if answer == "own":
            return Sight(HOST, OWN, ())
        clock[0] += timeout
        raise GetTimeoutError(answer)

    def remote(**_: Any) -> Any:
        options = lambda scheduling_strategy: SimpleNamespace(  # noqa: E731
            remote=lambda shared: scheduling_strategy.node_id
        )
        return lambda task: SimpleNamespace(options=options)

    monkeypatch.setattr(ray_hosts, "ray", SimpleNamespace(get=get, remote=remote))
    monkeypatch.setattr(ray_hosts, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(
        ray_hosts, "NodeAffinitySchedulingStrategy", lambda name, soft: SimpleNamespace(node_id=name)
    )
    sights = ray_hosts._sights([{"NodeID": name} for name in ("hangs", "too", "own")], Shared(()), 120.0)
    assert sights[:2] == ["no answer within 120 s"] * 2 and isinstance(sights[2], Sight)
    assert clock[0] == 120.0


def test_a_ray_that_may_not_use_all_cpus_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`ray start` under taskset, or in a job step of its own."""
    context = SimpleNamespace(get_node_id=lambda: "own")
    found = [{"NodeID": "own", "NodeManagerAddress": "10.0.0.1"}]
    pretended = SimpleNamespace(nodes=lambda: found, get_runtime_context=lambda: context)
    monkeypatch.setattr(ray_hosts, "ray", pretended)
    sockets = tuple(replace(s, cpus=s.cpus[:3], cores=3) for s in HOST.sockets)
    sight = Sight(replace(HOST, sockets=sockets), versions(), ())
    monkeypatch.setattr(ray_hosts, "_sights", lambda nodes, *_: [sight for _ in nodes])
    check_nodes(plan(1), Shared((), None, "mark"), {"own": {0, 1}}, 1.0)
    assert "may not use the CPUs 3,7" in caplog.text


def spec(actor: Any) -> LocalExpertsSpec:
    config = make_config()
    return LocalExpertsSpec(
        **vars(actor) | {"threads": 1}, model_dir="m", lora=config.lora, optim=config.optim, seed=0
    )


def test_actors_take_the_cpus_of_their_own_host() -> None:
    there = replace(
        HOST,
        sockets=tuple(
            replace(s, node=s.node + 4, cpus=tuple(c + 100 for c in s.cpus), pinned=False)
            for s in HOST.sockets
        ),
    )
    two = plan(experts={"sockets": 4})
    assert [(a.host, a.node) for a in two.experts] == [(h, n) for h in (0, 1) for n in (0, 0, 1, 1)]
    specs = ActorSpecs((), tuple(spec(a) for a in two.experts), OptimConfig(), 1)
    changed = own_cpus(two, specs, Hosts((node("a"), node("b", there))))
    assert changed.experts[:4] == specs.experts[:4]
    assert [(s.node, s.cpus, s.pinned) for s in changed.experts[4:]] == [
        (4, (100, 101), False), (4, (102, 103), False), (5, (104, 105), False), (5, (106, 107), False)
    ]  # fmt: skip
    # Ray's processes on the driver's host: in another job step than the driver.
    changed = own_cpus(two, specs, Hosts((node("a", there), node("b"))))
    assert [(s.node, s.cpus) for s in changed.experts[:2]] == [(4, (100, 101)), (4, (102, 103))]
    assert changed.experts[4:] == specs.experts[4:]


def test_look(tmp_path: Path) -> None:
    model, runs = tmp_path / "model", tmp_path / "runs"
    model.mkdir()
    runs.mkdir()
    (model / "config.json").write_text("{}")
    (model / "a.safetensors").write_bytes(b"12345")
    (runs / "mark").touch()
    shared = Shared(((str(model), digest(str(model))),), str(runs), "mark")
    sight = look(shared)
    assert sight.unseen == () and sight.hardware.sockets and sight.versions == versions()
    assert [p.name for p in runs.iterdir()] == ["mark"]  # what it wrote is gone
    (model / "a.safetensors").write_bytes(b"123456")
    (runs / "mark").unlink()
    other, lost = look(shared).unseen
    assert "holds something else there" in other and "is not shared with it" in lost
    (model / "config.json").unlink()
    assert "holds something else there" in look(shared).unseen[0]
    model.rename(tmp_path / "gone")
    assert "cannot be read there" in look(shared).unseen[0]


def test_digest_of_gguf(tmp_path: Path) -> None:
    """A file, a split set by any of its files, or a directory without a config.json."""
    whole, parts = tmp_path / "x.gguf", [tmp_path / f"y-0000{i}-of-00002.gguf" for i in (1, 2)]
    for file in (whole, *parts):
        file.write_bytes(b"12")
    before = [digest(str(path)) for path in (whole, *parts, tmp_path)]
    assert before[1] == before[2] and len(set(before)) == 3
    parts[1].write_bytes(b"123")
    after = [digest(str(path)) for path in (whole, *parts, tmp_path)]
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, False, False, False]
