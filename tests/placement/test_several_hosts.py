"""rule.nodes: replicas on the GPUs of all hosts, each host's memory and link, who stands for whom."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.expert_load import touched
from kt_ray.placement.layout import layouts
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import memory_table
from kt_ray.placement.traffic import traffic
from kt_ray.timing.seats import machine_of
from tests.placement.configs import make_config, make_hardware, small_dims

ROWS = {"batch_size": 16, "micro_batch_size": 1}


def config_of(nodes: int = 2, trainer: dict[str, int] | None = None, **rule: Any) -> Config:
    return make_config(rule={"nodes": nodes, **rule}, trainer=trainer or ROWS)


def host(gpus: int = 2) -> Hardware:
    return make_hardware(sockets=2, cores=4, gpus=gpus)


def plan_of(nodes: int = 2, gpus: int = 2, **rule: Any) -> Plan:
    return make_plan(small_dims(), config_of(nodes, **rule), host(gpus))


def test_every_host_has_replicas_on_its_own_gpus() -> None:
    plan = plan_of(nodes=3)
    assert (plan.stages, plan.replicas, plan.attention_hosts) == (1, 6, 3)
    assert [(w.host, w.device) for w in plan.workers] == [
        (h, f"cuda:{i}") for h in range(3) for i in range(2)
    ]
    names = [budget.device for budget in plan.budgets]
    assert names[:6] == ["cuda:0", "cuda:1"] + [f"host {h} cuda:{i}" for h in (1, 2) for i in (0, 1)]
    gpus = {b.device: dict(b.items) for b in plan.budgets if not b.is_socket}
    assert gpus["cuda:1"] == gpus["host 1 cuda:0"]  # worker 0 holds the masters besides
    assert [b.host for b in plan.budgets if not b.is_socket] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rule", "rows", "found"),
    [
        ({}, 16, [(1, 4, 2), (2, 2, 2), (1, 2, 1), (2, 1, 1)]),
        ({}, 3, [(2, 2, 2), (1, 2, 1), (2, 1, 1)]),  # four replicas would be no faster than two
        ({"attention_hosts": "driver"}, 16, [(1, 2, 1), (2, 1, 1)]),
        ({"attention_hosts": "all"}, 16, [(1, 4, 2), (2, 2, 2)]),
        ({"stages": 2}, 16, []),
    ],
)
def test_layouts_to_choose_from(rule: dict[str, Any], rows: int, found: list[tuple[int, int, int]]) -> None:
    config = config_of(trainer={"batch_size": rows, "micro_batch_size": 1}, **rule)
    assert list(layouts(small_dims(), config, host())) == found


@pytest.mark.parametrize(
    ("rule", "hosts"),
    [
        ({"stages": 1, "replicas": 4}, 2),
        ({"stages": 1, "replicas": 1}, 1),  # cannot be divided
        ({"stages": 1, "replicas": 2, "attention_hosts": "driver"}, 1),
        ({"device": "cpu", "replicas": 4}, 1),
        ({"device": "cpu", "replicas": 4, "attention_hosts": "all"}, 2),
    ],
)
def test_where_attention_is(rule: dict[str, Any], hosts: int) -> None:
    plan = plan_of(**rule)
    assert plan.attention_hosts == hosts
    assert [w.host for w in plan.workers] == sorted(w.host for w in plan.workers)


def test_replicas_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="divided evenly") as caught:
        plan_of(stages=1, replicas=3, attention_hosts="all")
    assert caught.value.remedy and "rule.replicas=2" in caught.value.remedy


def test_one_process_computes_what_two_hosts_do() -> None:
    """cluster=local has all actors on one host, with as many threads each."""
    rule = {"device": "cpu", "replicas": 4, "attention_hosts": "all"}
    apart, local = plan_of(**rule), make_plan(small_dims(), in_process(config_of(**rule)), host())
    assert [w.threads for w in local.workers] == [w.threads for w in apart.workers]
    assert {w.host for w in local.workers} == {0}


def in_process(config: Config) -> Config:
    from kt_ray.config.mapping import with_keys

    return with_keys(config, {"cluster.name": "local"})


def test_lanes_are_on_every_host_with_attention() -> None:
    plan = plan_of(experts={"stream": 0.5})
    lanes = [(a.host, a.lane.devices) for a in plan.experts if a.lane]
    assert lanes == [(h, (f"cuda:{i}",)) for h in (0, 1) for i in (0, 1)]
    alone = plan_of(attention_hosts="driver", experts={"stream": 0.5})
    assert [a.host for a in alone.experts if a.lane] == [0, 0]


def test_tokens_of_other_hosts_travel_where_they_are_routed() -> None:
    plan = plan_of(nodes=4)
    moved, dims = traffic(plan), plan.dims
    share = touched(dims.num_experts, len(plan.experts[0].experts), dims.experts_per_token)
    near = [link.tokens for link in moved.experts if not link.far]
    far = [link.tokens for link in moved.experts if link.far]
    assert near == pytest.approx([plan.tokens_per_step / 4] * len(near))
    assert far == pytest.approx([plan.tokens_per_step * 3 / 4 * share] * len(far))
    assert len(near) == len(far) == len(plan.experts) * len(dims.moe_layers)


def test_the_first_host_stands_for_all() -> None:
    plan = plan_of(nodes=4)
    machine = machine_of(plan)
    assert machine.hosts == 4 and len(machine.workers) == 2
    assert [(c.actors, c.others) for c in machine.experts] == [((0,), (2, 4, 6)), ((1,), (3, 5, 7))]
    assert [way.far for way in machine.experts[0].ways] == [False, True]


def test_copies_of_the_experts() -> None:
    """Four hosts in two teams: each team has all experts and its own replicas."""
    plan = plan_of(nodes=4, experts={"copies": 2, "stream": 0.5})
    per_layer = plan.dims.num_experts
    assert plan.copies == 2 and [len(plan.replicas_of(copy)) for copy in (0, 1)] == [4, 4]
    for copy, hosts in ((0, (0, 1)), (1, (2, 3))):
        team = [actor for actor in plan.experts if actor.copy == copy]
        assert sorted(e for actor in team for e in actor.experts) == list(range(per_layer))
        assert sorted({actor.host for actor in team}) == list(hosts)
        assert [a.rank for a in team] == list(plan.experts_of(plan.replicas_of(copy)[-1]))
        assert {plan.worker(replica, 0).host for replica in plan.replicas_of(copy)} == set(hosts)
    # The copies' optimizers take turns with the layers.
    layers = plan.dims.moe_layers
    first, second = plan.experts[0], plan.experts[len(plan.first_copy)]
    assert first.experts == second.experts and first.lane == second.lane
    assert sorted(first.updates(layers) + second.updates(layers)) == list(layers)


def test_copies_need_more_memory_and_move_fewer_tokens() -> None:
    one, two = (plan_of(nodes=2, experts={"copies": copies}) for copies in (1, 2))

    def bytes_of(plan: Plan, item: str) -> int:
        return sum(b.items.get(item, 0) for b in plan.budgets if b.is_socket)

    assert bytes_of(two, "experts") == pytest.approx(2 * bytes_of(one, "experts"), rel=0.01)
    assert bytes_of(two, "optimizer") == pytest.approx(bytes_of(one, "optimizer"), rel=0.01)
    assert traffic(one).to_experts(far=True) > 0 == traffic(two).to_experts(far=True)
    machine = machine_of(two)
    assert (machine.hosts, machine.copies) == (1, 2) and not any(c.others for c in machine.experts)


@pytest.mark.parametrize(
    "rule",
    [
        {"nodes": 3, "experts": {"copies": 2}},  # does not divide the hosts
        {"nodes": 2, "device": "cpu", "replicas": 2, "experts": {"copies": 2}},  # attention on one
    ],
)
def test_copies_without_teams_are_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="teams") as caught:
        plan_of(**rule)
    assert caught.value.remedy


def test_one_process_with_two_copies_is_simulated() -> None:
    rule = {"device": "cpu", "replicas": 4, "attention_hosts": "all", "experts": {"copies": 2}}
    plan = make_plan(small_dims(), in_process(config_of(**rule)), host())
    machine = machine_of(plan)
    assert (plan.copies, plan.attention_hosts) == (2, 1)
    assert (machine.copies, machine.hosts, len(machine.workers)) == (2, 1, 2)
    assert set(machine.capacity.values()) == {2.0}  # half of each socket's cores


def test_hosts_that_are_filled_alike_have_one_column() -> None:
    header, rows = memory_table(plan_of(nodes=4, gpus=1, experts={"copies": 4}))
    assert header[1:] == [
        *("cuda:0", "hosts 1-3 cuda:0"),
        *("host 0 socket 0", "host 0 socket 1", "hosts 1-3 socket 0", "hosts 1-3 socket 1"),
    ]
    assert all(len(row) == len(header) for row in rows)
