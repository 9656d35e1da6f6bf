"""The planned order: complete, a linear extension, and free of deadlock whatever the timing."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from kt_ray.hardware.machine import Hardware
from kt_ray.placement.order import Op, expert_order, worker_program
from kt_ray.placement.plan_types import BackwardPart, ExpertActorPlan, Plan, WorkerPlan
from kt_ray.placement.split import split_experts
from tests.placement.configs import small_dims

LAYERS = 8
MIXES = {
    "all MoE": tuple(range(LAYERS)),
    "dense first": tuple(range(2, LAYERS)),
    "alternating": tuple(range(0, LAYERS, 2)),
    "dense last": tuple(range(LAYERS - 1)),
    "one": (3,),
}


def plan_of(stages: int, replicas: int, groups: int, moe: tuple[int, ...], actors: int = 2) -> Plan:
    """A plan with LAYERS layers; only what the order depends on is real."""
    dims = dataclasses.replace(small_dims(), num_layers=LAYERS, moe_layers=moe)
    edges = [LAYERS * i // stages for i in range(stages + 1)]
    workers = tuple(
        WorkerPlan(r * stages + s, r, s, (edges[s], edges[s + 1]), "cpu", 1)
        for r in range(replicas)
        for s in range(stages)
    )
    experts = tuple(
        ExpertActorPlan(i, 0, (), 1, held, "auto", "auto", "retain")
        for i, held in enumerate(split_experts(dims.num_experts, actors))
    )
    return Plan(dims, Hardware("test", (), (), ()), workers, experts, stages, replicas, groups)


ALL = [
    pytest.param(stages, replicas, groups, mix, kind, id=f"{stages}s-{replicas}r-{groups}g-{mix}-{kind}")
    for stages, replicas, groups, mix, kind in itertools.product(
        (1, 2, 3, 4), (1, 2), (1, 2, 3, 4), MIXES, ("train", "eval")
    )
]


@pytest.mark.parametrize(("stages", "replicas", "groups", "mix", "kind"), ALL)
def test_no_deadlock_and_complete(stages: int, replicas: int, groups: int, mix: str, kind: str) -> None:
    plan = plan_of(stages, replicas, groups, MIXES[mix])
    directions = ("forward", "backward") if kind == "train" else ("forward",)
    order = expert_order(plan, kind)
    wanted = {(layer, d, g) for layer in MIXES[mix] for d in directions for g in range(groups)}
    assert len(order) == len(wanted) and set(order) == wanted
    for seed in range(3):
        execute(plan, kind, random.Random(f"{stages}{replicas}{groups}{mix}{kind}{seed}"))


def execute(plan: Plan, kind: str, rng: random.Random) -> None:
    """Run every program under random timing, with mailboxes that hold what comes early.

    An actor or worker only moves when the message it waits for is there; one of those that can move
    is drawn at random. Nothing able to move before the end is a deadlock.
    """
    programs = {(w.replica, w.stage): worker_program(plan, w.replica, w.stage, kind) for w in plan.workers}
    order = expert_order(plan, kind)
    worker_at = dict.fromkeys(programs, 0)
    actor_at = dict.fromkeys(range(len(plan.experts)), 0)
    posted: set[tuple[object, ...]] = set()
    moe = set(plan.dims.moe_layers)

    def needs(replica: int, stage: int, op: Op) -> list[tuple[object, ...]]:
        if op.kind == "recv_hidden":
            return [("hidden", replica, stage, op.group)]
        if op.kind == "recv_grad":
            return [("grad", replica, stage, op.group)]
        if op.kind == "join" or (op.kind == "backward" and op.layer in moe):
            direction = "forward" if op.kind == "join" else "backward"
            return [("reply", i, replica, op.layer, direction, op.group) for i in actor_at]
        return []

    def gives(replica: int, stage: int, op: Op) -> tuple[object, ...] | None:
        if op.kind == "send_hidden":
            return ("hidden", replica, stage + 1, op.group)
        if op.kind == "send_grad":
            return ("grad", replica, stage - 1, op.group)
        if op.kind in ("forward", "recompute") and op.layer in moe:
            return ("ask", replica, op.layer, "forward" if op.kind == "forward" else "backward", op.group)
        return None

    while True:
        able: list[tuple[str, object]] = []
        for who, program in programs.items():
            at = worker_at[who]
            if at < len(program) and all(m in posted for m in needs(*who, program[at])):
                able.append(("worker", who))
        for i, at in actor_at.items():
            if at < len(order):
                layer, direction, group = order[at]
                asked = [("ask", r, layer, direction, group) for r in range(plan.replicas)]
                if all(m in posted for m in asked):
                    able.append(("actor", i))
        if not able:
            break
        what, who = rng.choice(able)
        if what == "worker":
            replica, stage = who  # type: ignore[misc]
            message = gives(replica, stage, programs[replica, stage][worker_at[replica, stage]])
            if message is not None:
                assert message not in posted
                posted.add(message)
            worker_at[replica, stage] += 1
        else:
            layer, direction, group = order[actor_at[who]]  # type: ignore[index]
            posted |= {("reply", who, r, layer, direction, group) for r in range(plan.replicas)}
            actor_at[who] += 1  # type: ignore[index]
    stuck = {w: programs[w][at] for w, at in worker_at.items() if at < len(programs[w])}
    assert not stuck and all(at == len(order) for at in actor_at.values()), f"deadlock at {stuck}"


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [1, 3])
def test_programs_respect_data_dependencies(stages: int, groups: int, mix: str) -> None:
    plan = plan_of(stages, 1, groups, MIXES[mix])
    moe = set(MIXES[mix])
    for stage in range(stages):
        start, stop = plan.worker(0, stage).layers
        program = worker_program(plan, 0, stage, "train")
        place = {op: i for i, op in enumerate(program)}
        assert len(place) == len(program), "an operation appears twice"
        first, last = stage == 0, stage == stages - 1
        for group in range(groups):
            enter = Op("embed" if first else "recv_hidden", start, group)
            leave = Op("loss" if last else "send_hidden", stop - 1, group)
            assert place[enter] < place[Op("forward", start, group)]
            for layer in range(start, stop):
                if layer > start:
                    assert place[Op("forward", layer - 1, group)] < place[Op("forward", layer, group)]
                    # A layer without experts submits nothing: it may be recomputed ahead of its gradient.
                    next_kind = "recompute" if layer - 1 in moe else "backward"
                    assert place[Op("backward", layer, group)] < place[Op(next_kind, layer - 1, group)]
                after = Op("forward", layer + 1, group) if layer + 1 < stop else leave
                if layer in moe:
                    join = place[Op("join", layer, group)]
                    assert place[Op("forward", layer, group)] < join < place[after]
                else:
                    assert Op("join", layer, group) not in place
                assert place[Op("recompute", layer, group)] < place[Op("backward", layer, group)]
            assert place[leave] < place[Op("recompute", stop - 1, group)]
            if not last:
                assert place[Op("recv_grad", stop - 1, group)] < place[Op("recompute", stop - 1, group)]
            if not first:
                assert place[Op("backward", start, group)] < place[Op("send_grad", start, group)]


def test_eval_is_the_forward_part_of_train() -> None:
    plan = plan_of(2, 1, 2, MIXES["dense first"])
    backward = ("recv_grad", "recompute", "backward", "send_grad")
    for stage in (0, 1):
        train = worker_program(plan, 0, stage, "train")
        assert tuple(op for op in train if op.kind not in backward) == worker_program(plan, 0, stage, "eval")
    assert {d for _, d, _ in expert_order(plan, "eval")} == {"forward"}


@pytest.mark.parametrize("lowest", range(LAYERS))
@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("mix", MIXES)
def test_backward_ends_at_the_lowest_layer_with_lora(mix: str, stages: int, groups: int, lowest: int) -> None:
    """Where the layers of a stage are all below it, nothing comes back to it."""
    whole = plan_of(stages, 2, groups, MIXES[mix])
    plan = dataclasses.replace(whole, backward=BackwardPart(lowest, lowest))
    back = ("recv_grad", "recompute", "backward", "send_grad")
    for worker in plan.workers:
        start, stop = worker.layers
        program = worker_program(plan, worker.replica, worker.stage, "train")
        kept = [
            op for op in worker_program(whole, worker.replica, worker.stage, "train") if op.kind not in back
        ]
        assert [op for op in program if op.kind not in back] == kept
        passed = [layer for layer in range(start, stop) if layer >= lowest]
        for kind in ("recompute", "backward"):
            found = [(op.layer, op.group) for op in program if op.kind == kind]
            assert sorted(found) == [(layer, group) for layer in passed for group in range(groups)]
        kinds = [op.kind for op in program]
        assert kinds.count("send_grad") == (groups if start > lowest and worker.stage else 0)
        assert kinds.count("recv_grad") == (groups if stop > lowest and worker.stage < stages - 1 else 0)
    order = expert_order(plan, "train")
    assert {layer for layer, way, _ in order if way == "backward"} == {n for n in MIXES[mix] if n >= lowest}
    execute(plan, "train", random.Random(f"{mix}{stages}{groups}{lowest}"))


def test_two_groups_alternate_between_attention_and_experts() -> None:
    program = worker_program(plan_of(1, 1, 2, MIXES["all MoE"]), 0, 0, "train")
    kinds = [(op.kind, op.layer, op.group) for op in program]
    # While group 0 of layer 0 is with the experts, group 1 is in attention, and the other way round.
    assert kinds[:8] == [
        ("embed", 0, 0),
        ("forward", 0, 0),
        ("embed", 0, 1),
        ("forward", 0, 1),
        ("join", 0, 0),
        ("forward", 1, 0),
        ("join", 0, 1),
        ("forward", 1, 1),
    ]
    # Group 0 turns round while group 1 is still in its forward.
    assert kinds[kinds.index(("loss", LAYERS - 1, 0)) :][:7] == [
        ("loss", LAYERS - 1, 0),
        ("recompute", LAYERS - 1, 0),
        ("join", LAYERS - 1, 1),
        ("loss", LAYERS - 1, 1),
        ("recompute", LAYERS - 1, 1),
        ("backward", LAYERS - 1, 0),
        ("recompute", LAYERS - 2, 0),
    ]
    order = expert_order(plan_of(1, 1, 2, MIXES["all MoE"]), "train")
    turn = order.index((LAYERS - 1, "forward", 1))
    assert order[turn - 1 : turn + 3] == (
        (LAYERS - 1, "forward", 0),
        (LAYERS - 1, "forward", 1),
        (LAYERS - 1, "backward", 0),
        (LAYERS - 1, "backward", 1),
    )


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_recomputed_layers_alive_are_at_most_the_groups(groups: int, stages: int, mix: str) -> None:
    plan = plan_of(stages, 1, groups, MIXES[mix])
    for stage in range(stages):
        alive = peak = 0
        for op in worker_program(plan, 0, stage, "train"):
            alive += {"recompute": 1, "backward": -1}.get(op.kind, 0)
            peak = max(peak, alive)
        assert alive == 0 and 0 < peak <= groups


def test_a_group_passes_dense_layers_on_its_way_to_the_experts() -> None:
    """Experts get group 0 before group 1 is begun, and no wait for them stands before work that is ready."""
    program = worker_program(plan_of(1, 1, 2, MIXES["dense first"]), 0, 0, "train")
    kinds = [(op.kind, op.layer, op.group) for op in program]
    forwards = [k for k in kinds if k[0] == "forward"]
    assert forwards[:6] == [("forward", layer, group) for group in (0, 1) for layer in (0, 1, 2)]
    # Dense layers 1 and 0 of group 0 are done, and one of group 1 recomputed, before the last wait.
    assert kinds[kinds.index(("recompute", 2, 1)) :] == [
        ("recompute", 2, 1),
        ("backward", 2, 0),
        ("recompute", 1, 0),
        ("backward", 1, 0),
        ("recompute", 0, 0),
        ("backward", 0, 0),
        ("recompute", 1, 1),
        ("backward", 2, 1),
        ("backward", 1, 1),
        ("recompute", 0, 1),
        ("backward", 0, 1),
    ]


def test_order_is_a_function_of_the_plan_only() -> None:
    plan = plan_of(3, 2, 3, MIXES["alternating"])
    more_actors = plan_of(3, 2, 3, MIXES["alternating"], actors=4)
    assert expert_order(plan, "train") == expert_order(more_actors, "train")
    one = expert_order(plan_of(1, 1, 2, (1,)), "train")
    assert one == ((1, "forward", 0), (1, "forward", 1), (1, "backward", 0), (1, "backward", 1))


def test_programming_errors() -> None:
    plan = plan_of(2, 1, 1, MIXES["one"])
    with pytest.raises(ValueError, match="kind"):
        worker_program(plan, 0, 0, "predict")
    with pytest.raises(ValueError, match="no worker"):
        worker_program(plan, 1, 0, "train")
