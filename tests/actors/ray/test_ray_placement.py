"""CPUs, bundles and GPUs of a plan's actors; with GPUs that only Ray believes in."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from kt_ray.actors.ray import ray_cluster, ray_placement
from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.ray.ray_hosts import Hosts, RayNode
from kt_ray.actors.ray.ray_placement import (
    by_gpu,
    cards_of,
    differ,
    gpu_share,
    gpus_behind,
    gpus_of,
    lane_devices,
    on_own_node,
    reservations,
    reserved_by_host,
    seats,
)
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import RayRule
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Gpu
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from tests.placement.configs import make_config, make_hardware, small_dims

SHARED = {"layers": [{"match": ".", "device": ["cuda:0", "cuda:0", "cuda:1"]}], "replicas": 3}


def plan(gpus: int = 0, sizes: tuple[int, ...] = (), **rule: Any) -> Plan:
    hardware = make_hardware(cores=4, gpus=gpus)
    if sizes:
        hardware = replace(hardware, gpus=tuple(Gpu(i, f"{s} GB", s * GIB) for i, s in enumerate(sizes)))
    return make_plan(small_dims(), make_config(rule=rule), hardware)


def test_reservations_scale_down_to_what_there_is() -> None:
    two = plan(device="cpu")  # a worker and an expert actor of 4 threads each
    assert reservations(two, RayRule(), [16.0]) == {("worker", 0): 4.0, ("experts", 0): 4.0}
    assert reservations(two, RayRule(), [4.0]) == {("worker", 0): 2.0, ("experts", 0): 2.0}
    asked = reservations(two, RayRule(worker_cpus=1, expert_cpus=0.5), [4.0])
    assert asked == {("worker", 0): 1.0, ("experts", 0): 0.5}
    # Ray takes no bundle of nothing.
    none = reservations(two, RayRule(worker_cpus=0, expert_cpus=0), [4.0])
    assert none == {("worker", 0): 0.01, ("experts", 0): 0.01}
    # Every host for itself: the second one has an expert actor only.
    apart = plan(device="cpu", nodes=2)
    assert reservations(apart, RayRule(), [4.0, 4.0]) == {
        ("worker", 0): 2.0, ("experts", 0): 2.0, ("experts", 1): 4.0
    }  # fmt: skip
    # What a node must have free to be one of them.
    assert reserved_by_host(apart, RayRule()) == [8.0, 4.0]
    assert reserved_by_host(apart, RayRule(expert_cpus=1.5)) == [5.5, 1.5]


def test_a_bundle_per_actor_and_per_gpu() -> None:
    cpu = seats(plan(device="cpu", nodes=2), {("worker", 0): 1.0, ("experts", 0): 2.0, ("experts", 1): 3.0})
    assert cpu.bundles == ({"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 3.0}) and cpu.host == (0, 0, 1)
    # In the placement group of its host.
    near, far = (SimpleNamespace(host=host) for host in (0, 1))
    places = [cpu.place({0: near, 1: far}, bundle) for bundle in range(3)]
    inside = [(place.placement_group, place.placement_group_bundle_index) for place in places]
    assert inside == [(near, 0), (near, 1), (far, 0)]
    three = plan(2, **SHARED)
    assert gpu_share(three) == {"cuda:0": 0.5, "cuda:1": 1.0}
    found = seats(three, {("worker", 0): 1.0, ("worker", 1): 1.0, ("worker", 2): 1.0, ("experts", 0): 2.0})
    assert found.of == {("worker", 0): 0, ("worker", 1): 0, ("worker", 2): 1, ("experts", 0): 2}
    assert found.bundles == ({"CPU": 2.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0})


def test_bundles_stay_on_the_drivers_node_where_all_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(get_node_id=lambda: "own")
    monkeypatch.setattr(ray_placement, "ray", SimpleNamespace(get_runtime_context=lambda: context))
    free = {"own": {"CPU": 4.0, "GPU": 1.0}, "other": {"CPU": 64.0, "GPU": 8.0}}
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: free)
    fits = [{"CPU": 1.5}, {"CPU": 2.5, "GPU": 1.0}]
    assert on_own_node(fits) == [{"ray.io/node-id": "own"}] * 2
    assert on_own_node([*fits, {"CPU": 0.01}]) is on_own_node([*fits, {"GPU": 1.0}]) is None


def test_gpus_of_several_hosts_have_bundles_there() -> None:
    """Two hosts with two GPUs: a replica on each GPU, and a lane for the expert actor of each host."""
    lanes = {"stream": 0.5, "lane_device": "cuda:1"}
    two = plan(2, device="cuda", nodes=2, stages=1, replicas=4, experts=lanes)
    assert gpu_share(two) == dict.fromkeys(("cuda:0", "cuda:1", "host 1 cuda:0", "host 1 cuda:1"), 1.0)
    assert lane_devices(two) == {"cuda:1": 0, "host 1 cuda:1": 1} and len(gpus_of(two, 1)) == 2
    chosen = seats(two, {("worker", rank): 1.0 for rank in range(4)} | {("experts", i): 2.0 for i in (0, 1)})
    assert chosen.host == (0, 0, 1, 1, 0, 1)
    assert chosen.gpu == {"cuda:0": 0, "cuda:1": 1, "host 1 cuda:0": 2, "host 1 cuda:1": 3}
    # A worker's card is one of its own host, whatever Ray numbers it.
    cards = {bundle: (str(bundle % 2), two.hardware.gpus[0]) for bundle in range(4)}
    assert by_gpu(two, chosen, cards).of == chosen.of
    with pytest.raises(UserError, match="another GPU"):
        by_gpu(two, chosen, cards | {3: ("1", Gpu(0, "another", 1))})


def test_cards_of_different_size_go_to_the_workers_planned_for_them() -> None:
    mixed = plan(sizes=(24, 48), device="cuda", stages=2)
    assert differ(mixed) and not differ(plan(2)) and not differ(plan())
    chosen = seats(mixed, {("worker", 0): 1.0, ("worker", 1): 1.0, ("experts", 0): 1.0})
    small, large = mixed.hardware.gpus
    swapped = by_gpu(mixed, chosen, {0: ("1", large), 1: ("0", small)})
    assert swapped.of == {("worker", 0): 1, ("worker", 1): 0, ("experts", 0): 2}
    assert by_gpu(mixed, chosen, {0: ("0", small), 1: ("1", large)}) == chosen
    # Cards that cannot be seen: in the order of Ray's ids.
    assert by_gpu(mixed, chosen, {0: ("10", None), 1: ("9", None)}).of["worker", 0] == 1
    with pytest.raises(UserError, match="another GPU") as caught:
        by_gpu(mixed, chosen, {0: ("2", small), 1: ("3", small)})
    assert "48 GB" in str(caught.value.where) and caught.value.remedy
    # Another driver reserves less of them.
    more = replace(small, memory_bytes=small.memory_bytes + (3 << 20))
    assert by_gpu(mixed, chosen, {0: ("1", large), 1: ("0", more)}).of == swapped.of
    named = replace(large, name=small.name)
    alike = replace(mixed, hardware=replace(mixed.hardware, gpus=(small, named)))
    assert by_gpu(alike, chosen, {0: ("0", named), 1: ("1", more)}).of == swapped.of


LANE = {"gpu_resident": 2}


def test_a_lane_computes_on_the_card_of_its_device() -> None:
    """Ray hands identical cards out as it likes: the lane's is the one behind the worker of its device."""
    two = plan(2, device="cuda", stages=2, experts={**LANE, "lane_device": "cuda:1"})
    assert lane_devices(two) == {"cuda:1": 0}
    chosen = seats(two, {("worker", 0): 1.0, ("worker", 1): 1.0, ("experts", 0): 2.0})
    assert chosen.gpu == {"cuda:0": 0, "cuda:1": 1} and chosen.of["experts", 0] == 2
    assert len(chosen.bundles) == 3 and not differ(two)
    first, second = (replace(gpu, uuid=name) for gpu, name in zip(two.hardware.gpus, ("A", "B"), strict=True))
    assert cards_of(chosen, {0: ("1", second), 1: ("0", first)}) == {"cuda:0": "B", "cuda:1": "A"}
    # A card that nvidia-smi does not show there: by Ray's name of it.
    assert cards_of(chosen, {0: ("1", None), 1: ("MIG-0", None)})["cuda:1"] == "MIG-0"


def test_a_lane_without_workers_beside_it_reserves_its_card() -> None:
    alone = plan(2, device="cpu", experts={**LANE, "lane_device": "cuda:0"})
    chosen = seats(alone, {("worker", 0): 1.0, ("experts", 0): 2.0})
    assert chosen.bundles == ({"CPU": 1.0}, {"CPU": 2.0}, {"GPU": 1.0})
    assert chosen.gpu == {"cuda:0": 2} and chosen.host == (0, 0, 0) and 2 not in chosen.of.values()
    beside = plan(3, device="cuda", stages=2, experts={**LANE, "lane_device": "cuda:2"})
    found = seats(beside, {("worker", 0): 1.0, ("worker", 1): 1.0, ("experts", 0): 2.0})
    assert found.gpu == {"cuda:0": 0, "cuda:1": 1, "cuda:2": 3} and found.bundles[3] == {"GPU": 1.0}
    # The large card is the lane's, whichever bundle Ray gave it to.
    mixed = plan(sizes=(24, 24, 48), device="cuda", stages=2, experts={**LANE, "lane_device": "cuda:2"})
    small, other, large = mixed.hardware.gpus
    found = seats(mixed, {("worker", 0): 1.0, ("worker", 1): 2.0, ("experts", 0): 2.0})
    assert [found.bundles[i] for i in (0, 1, 3)] == [{"CPU": 2.0, "GPU": 1.0}] * 3, "they can be exchanged"
    swapped = by_gpu(mixed, found, {0: ("2", large), 1: ("0", small), 3: ("1", other)})
    assert swapped.gpu == {"cuda:0": 1, "cuda:1": 3, "cuda:2": 0}
    assert swapped.of == {("worker", 0): 1, ("worker", 1): 3, ("experts", 0): 2}


def test_two_runs_over_the_same_nodes_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its driver on another of them. Both take the nodes in one order, each before the next."""
    apart = plan(device="cpu", nodes=2)
    config = make_config(rule={"device": "cpu", "nodes": 2}, cluster="ray")
    nodes = {name: RayNode(name, "", 4, 4, "") for name in "ab"}

    def asked(group: Any, **how: Any) -> Any:
        told.append("asked")
        return how["bundle_label_selector"][0]["ray.io/node-id"]

    monkeypatch.setattr(ray_cluster, "placement_group", asked)
    monkeypatch.setattr(ray_cluster, "await_group", lambda group, *_, **__: told.append(group))
    for driver, other in ("ab", "ba"):
        told: list[str] = []
        specs = actor_specs(apart, config, "", formulas={})
        cluster = RayCluster(apart, specs, config.cluster, config.rule.ray, driver)
        cluster.hosts = Hosts((nodes[driver], nodes[other]))
        cluster._reserve(reservations(apart, RayRule(), [4.0, 4.0]), range(2))
        assert told == ["asked", "a", "asked", "b"] and cluster._groups == {0: driver, 1: other}


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_an_expert_actor_is_shown_the_card_that_ray_reserved(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a worker on the lane's card, and with the card for the lane alone; another job has one."""

    @ray.remote(num_gpus=1, num_cpus=0)
    class Job:
        def gpu(self) -> str:
            return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])

    job = Job.remote()  # type: ignore[attr-defined]
    taken = ray.get(job.gpu.remote(), timeout=60)
    two = plan(2, device=device, experts={**LANE, "lane_device": "cuda:0"})
    config = make_config(rule={"device": device}, cluster="ray")
    specs = actor_specs(two, config, "", formulas={})
    cluster = RayCluster(two, specs, config.cluster, config.rule.ray, f"lane-{device}")
    made: dict[Any, Any] = {}

    def note(address: Any) -> None:
        made[address] = cluster._actor_specs[address]

    monkeypatch.setattr(cluster, "_create", note)
    monkeypatch.setattr(cluster, "_introduce", lambda: None)
    try:
        cluster._spawn()
        lane = made["experts", 0].arguments[-2].lane
        seat = made["worker", 0].place.placement_group_bundle_index if device == "cuda" else 2
        behind = gpus_behind(cluster._groups, seats(two, dict.fromkeys(made, 0.1)), 60)
        assert lane.devices == ("cuda:0",) and lane.visible == behind[seat][0] != taken
    finally:
        remove_placement_group(cluster._groups[0])
        ray.kill(job)


@pytest.mark.ray
@pytest.mark.usefixtures("local_ray")
def test_ray_gives_workers_of_one_device_the_same_gpu() -> None:
    three = plan(2, **SHARED)
    reserved = {("worker", 0): 0.1, ("worker", 1): 0.1, ("worker", 2): 0.1, ("experts", 0): 0.1}
    chosen = seats(three, reserved)  # type: ignore[arg-type]
    group = placement_group(list(chosen.bundles), strategy="PACK")
    ray.get(group.ready(), timeout=60)
    behind = gpus_behind({0: group}, chosen, 60)
    assert sorted(behind) == [0, 1] and len({gpu for gpu, _ in behind.values()}) == 2

    @ray.remote(max_restarts=0)
    class Worker:
        def gpu(self) -> list[str]:
            return list(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    share = gpu_share(three)
    workers = [
        Worker.options(  # type: ignore[attr-defined]
            num_cpus=0.1,
            num_gpus=share[worker.device],
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=chosen.of["worker", worker.rank]
            ),
        ).remote()
        for worker in three.workers
    ]
    first, second, third = (ids[0] for ids in ray.get([w.gpu.remote() for w in workers], timeout=60))
    assert first == second == behind[0][0] and third == behind[1][0] != first
