"""Plans for several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.machine import with_hosts
from kt_ray.placement.memory import DRIVER_RUNTIME, EXPERT_RUNTIME, RAY_RUNTIME, WORKER_RUNTIME
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Budget
from kt_ray.placement.remedies import describe
from kt_ray.placement.render import expert_row, memory_table
from tests.placement.configs import make_config, make_hardware, small_dims

HOST = make_hardware(sockets=2, cores=4)


def test_experts_on_every_socket_of_every_host_attention_on_the_first() -> None:
    plan = make_plan(small_dims(), make_config(rule={"nodes": 2, "stages": 2, "replicas": 2}), HOST)
    assert [(a.host, a.node, a.cpus) for a in plan.experts] == [
        (0, 0, (0, 1, 2, 3)), (0, 1, (4, 5, 6, 7)), (1, 0, (0, 1, 2, 3)), (1, 1, (4, 5, 6, 7))
    ]  # fmt: skip
    assert [a.experts for a in plan.experts] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    alone = make_plan(small_dims(), make_config(rule={"stages": 2, "replicas": 2}), HOST)
    assert plan.workers == alone.workers  # the other host changes nothing about attention
    assert plan.hardware.hosts == 2 and plan.hardware.source == "2 hosts like test host"


def test_budgets_and_tables_per_host() -> None:
    plan = make_plan(small_dims(), make_config(rule={"nodes": 2, "replicas": 1}), HOST)
    names = ["host 0 socket 0", "host 0 socket 1", "host 1 socket 0", "host 1 socket 1"]
    assert [b.device for b in plan.budgets] == names
    assert all(b.is_socket and b.capacity == HOST.sockets[0].memory_bytes for b in plan.budgets)
    assert [b.host for b in plan.budgets] == [0, 0, 1, 1]
    runtime = [b.items["runtime"] for b in plan.budgets]
    assert runtime == [
        WORKER_RUNTIME + EXPERT_RUNTIME + DRIVER_RUNTIME + RAY_RUNTIME,
        EXPERT_RUNTIME,
        EXPERT_RUNTIME + RAY_RUNTIME,
        EXPERT_RUNTIME,
    ]
    header, rows = memory_table(plan)
    assert header == ["", *names] and rows[0] == ["layers", "0-3", "-", "-", "-"]
    assert rows[1] == ["experts per layer", "2", "2", "2", "2"]
    assert expert_row(plan, plan.experts[3])[1] == "1 of host 1"
    assert describe(plan.hardware).startswith("2 hosts of 2 sockets x 4 cores")
    one = make_plan(small_dims(), make_config(), HOST)
    assert [b.device for b in one.budgets] == ["socket 0", "socket 1"]
    assert not Budget("cuda:1", {}, 0).is_socket and Budget("cuda:1", {}, 0).host == 0


def test_what_does_not_fit_one_host_fits_three() -> None:
    dims, trainer = small_dims(moe_intermediate_size=200_000), {"batch_size": 1, "micro_batch_size": 1}
    one, three = (make_config(rule={"nodes": nodes}, trainer=trainer) for nodes in (1, 3))
    needs = [max(b.total for b in make_plan(dims, config, HOST).budgets) for config in (one, three)]
    between = make_hardware(sockets=2, cores=4, memory=sum(needs) // 2)
    assert not make_plan(dims, one, between).fits
    assert make_plan(dims, three, between).fits


def test_sockets_count_per_host() -> None:
    plan = make_plan(small_dims(), make_config(rule={"nodes": 2, "experts": {"sockets": 1}}), HOST)
    assert [(a.host, a.node) for a in plan.experts] == [(0, 0), (1, 0)]
    with pytest.raises(UserError, match="more expert actors"):
        make_plan(small_dims(), make_config(rule={"nodes": 5, "experts": {"sockets": 2}}), HOST)
    many = make_plan(small_dims(), make_config(rule={"nodes": 5}), HOST)  # 8 experts, 10 sockets
    assert len(many.experts) == 8 and {a.host for a in many.experts} == {0, 1, 2, 3}


def test_in_one_process_all_hosts_are_this_one() -> None:
    apart = make_plan(small_dims(), make_config(rule={"nodes": 2}), HOST)
    here = make_plan(small_dims(), make_config(rule={"nodes": 2}, cluster="local"), HOST)
    assert [a.experts for a in here.experts] == [a.experts for a in apart.experts]
    assert here.workers == apart.workers and here.hardware.hosts == 1
    assert [(a.host, a.node, a.cpus) for a in here.experts] == [
        (0, 0, (0, 1)), (0, 0, (2, 3)), (0, 1, (4, 5)), (0, 1, (6, 7))
    ]  # fmt: skip
    assert any("2 hosts are all in this process" in note for note in here.notes)


def test_hardware_files_describe_hosts(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    text = "isa: amx\nhosts: 3\nsockets: [{count: 2, cores: 8, memory_gib: 64}]\n"
    text += "gpus: [{name: g, memory_gib: 24}]\n"
    file.write_text(text)
    three = hardware_from_file(file)
    assert three.hosts == 3 and len(three.sockets) == 6 and len(three.gpus) == 1
    assert [s.node for s in three.on(2)] == [0, 1] and three.on(2)[0].cpus == three.on(0)[0].cpus
    assert len(with_hosts(three, 1).sockets) == 2 and with_hosts(three, 3) is three
    with pytest.raises(UserError, match="more hosts than are described"):
        with_hosts(three, 4)
    left = "planned for 2 of the 3 hosts described: set rule.nodes=3 for all"
    for nodes in (2, 3):
        notes = make_plan(small_dims(), make_config(rule={"nodes": nodes, "device": "cpu"}), three).notes
        assert (left in notes) == (nodes == 2)
    for wrong in ("0", "true", "[1]", "1.5"):
        file.write_text(text.replace("hosts: 3", f"hosts: {wrong}"))
        with pytest.raises(UserError, match="not a number of hosts"):
            hardware_from_file(file)
