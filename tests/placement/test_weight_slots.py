"""Streamed layers: which weights are in a slot when, how many slots are needed, and when a plan streams."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from kt_ray.dims.config_json import dims_from_config
from kt_ray.placement.memory import GIB
from kt_ray.placement.order import Op, stage_program
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.weight_slots import WeightSlots, resident_of, slots_needed, streaming
from tests.placement.configs import DEEPSEEK_V3, make_config, make_hardware, small_dims

V3 = dims_from_config(DEEPSEEK_V3)

# Layers with experts of models with ten.
PATTERNS = [range(10), range(3, 10), range(0, 10, 2), range(1, 10, 2), (4, 5), (9,), (0,)]


def walked(program: tuple[Op, ...], slots: WeightSlots) -> tuple[list[int], list[int]]:
    """Play a worker's program. Returns the layers that had to be copied when they were needed, and all that
    were copied. What a recomputed layer holds must be where it was until it is differentiated."""
    late, copied = list[int](), list[int]()
    held: dict[int, int] = {}  # layer -> its slot when it was recomputed
    for op in program:
        if op.layer not in slots.layers or op.kind not in ("forward", "recompute", "backward"):
            continue
        if op.kind == "backward":
            slots.release(op.layer)
            if op.layer not in slots._held:
                assert slots.slot_of(op.layer) == held.pop(op.layer)
            continue
        if op.kind == "recompute":
            slots.hold(op.layer)
        needed = slots.bring(op.layer)
        following = slots.ahead(op.layer, downwards=op.kind == "recompute")
        late += [needed.layer] if needed else []
        copied += [filled.layer for filled in (needed, following) if filled]
        now = slots.slot_of(op.layer)
        assert now is not None
        if op.kind == "recompute":
            assert held.setdefault(op.layer, now) == now
        for layer, slot in held.items():
            assert slots.slot_of(layer) == slot, f"layer {layer} is still needed"
    return late, copied


@pytest.mark.parametrize("moe", PATTERNS)
@pytest.mark.parametrize("groups", [1, 2, 3, 5])
@pytest.mark.parametrize("cut", [(10,), (4, 10), (1, 9, 10)])
def test_what_a_program_needs_is_enough(moe: Any, groups: int, cut: tuple[int, ...]) -> None:
    """Whatever is streamed: each layer finds a slot, and nothing that is held is evicted."""
    ranges = list(itertools.pairwise((0, *cut)))
    for stage, (start, stop) in enumerate(ranges):
        for kind in ("train", "eval"):
            program = stage_program(ranges, moe, groups, stage, kind)
            for streamed in (tuple(range(start, stop)), tuple(range(start, stop, 2)), (stop - 1,)):
                count = slots_needed(program, streamed)
                assert count <= min(len(streamed), 4)
                walked(program, WeightSlots(streamed, count))


def test_one_layer_ahead_in_both_directions() -> None:
    """Every layer but a pass's first is on its way before it is needed, and is copied once each way."""
    program = stage_program([(0, 10)], range(10), 2, 0, "train")
    assert slots_needed(program, range(10)) == 3
    slots = WeightSlots(range(10), 3)
    for first in (0, 3):  # the second pass finds the first three there
        slots.begin(wraps=False)
        late, copied = walked(program, slots)
        assert late == [0][first:] and copied == [*range(first, 10), *range(6, -1, -1)]
    forward = stage_program([(0, 10)], range(10), 2, 0, "eval")
    slots.begin(wraps=True)  # upwards the first layer follows the last: another pass
    assert walked(forward, slots) == ([], [*range(3, 10), 0])
    assert walked(forward, slots) == ([], [*range(1, 10), 0])


def test_too_few_slots_are_told() -> None:
    slots = WeightSlots(range(4), 2)
    for layer in (0, 1):
        slots.hold(layer)
        slots.bring(layer)
    assert slots.ahead(1, downwards=False) is None
    with pytest.raises(RuntimeError, match=r"layer 2 finds no slot .* 2 slots, held are layers \[0, 1\]"):
        slots.bring(2)
    slots.release(0)
    filled = slots.bring(2)
    assert filled is not None and (filled.slot, filled.evicted) == (0, 0)
    slots.begin(wraps=True)
    assert slots.bring(1) is None and slots.slot_of(0) is None


@pytest.mark.parametrize(
    ("layers", "count"), [((0, 61), 5), ((30, 61), 30), ((2, 3), 1), ((0, 7), 0), ((0, 7), 7)]
)
def test_resident_layers_are_spread(layers: tuple[int, int], count: int) -> None:
    stay = resident_of(layers, count)
    assert len(stay) == count and set(stay) <= set(range(*layers))
    gaps = {b - a for a, b in itertools.pairwise(stay)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


def plan_of(*, gpus: int = 1, memory: float = 16, batch: int = 8, **rule: Any) -> Plan:
    config = make_config(
        rule=rule, trainer={"batch_size": batch, "micro_batch_size": 1}, data={"max_length": 512}
    )
    return make_plan(V3, config, make_hardware(2, 48, gpus, 2048 * GIB, isa="amx", gpu_gib=memory))


def weights_on(plan: Plan, device: str, item: str = "weights") -> float:
    (budget,) = (b for b in plan.budgets if b.device == device)
    return budget.items.get(item, 0) / GIB


def test_a_model_of_671_billion_parameters_fits_one_card_of_16_gib() -> None:
    """What is outside the experts is 32 GiB in bfloat16. As many layers stay as fit."""
    plan = plan_of(attention_output="recompute")
    assert plan.fits and plan.stages == plan.replicas == 1
    (worker,) = plan.workers
    assert worker.slots == 3 and 40 < len(worker.streamed) < 61
    (note,) = (text for text in plan.notes if text.startswith("rule.resident_layers=auto: "))
    assert f"{61 - len(worker.streamed)} of each worker's layers" in note and "on cuda:0" in note
    assert weights_on(plan, "cuda:0") + weights_on(plan, "socket 0") > 28
    # The head on the card, the embedding on the host: 129,280 x 7,168 numbers of two bytes each.
    assert weights_on(plan, "cuda:0", "embedding and head") == pytest.approx(1.726, abs=1e-3)
    assert weights_on(plan, "socket 0", "embedding and head") == pytest.approx(1.726, abs=1e-3)
    more = plan_of(
        resident_layers=61 - len(worker.streamed) + 1,
        activations=plan.activations,
        attention_output="recompute",
    )
    assert not more.fits or more.wave < plan.wave
    least = plan_of(resident_layers=0, attention_output="recompute")
    assert least.fits and least.wave == plan.wave and len(least.workers[0].streamed) == 61
    assert weights_on(least, "cuda:0") < 4 < weights_on(plan, "cuda:0")


def test_an_embedding_that_is_the_head_stays() -> None:
    tied = dataclasses.replace(V3, tie_embeddings=True)
    config = make_config(rule={"resident_layers": 0}, trainer={"batch_size": 8}, data={"max_length": 512})
    plan = make_plan(tied, config, make_hardware(2, 48, 1, 2048 * GIB, isa="amx", gpu_gib=24))
    assert weights_on(plan, "cuda:0", "embedding and head") == pytest.approx(1.726, abs=1e-3)
    assert weights_on(plan, "socket 0", "embedding and head") == 0


def test_layers_stay_where_they_fit() -> None:
    for plan in (plan_of(memory=64), plan_of(gpus=2, memory=24)):
        assert plan.fits and not any(worker.streamed for worker in plan.workers)
        assert not any("resident_layers" in note for note in plan.notes)


def test_host_memory_that_is_short_is_no_reason() -> None:
    """Streaming would need more of it."""
    config = make_config(trainer={"batch_size": 8})
    plan = make_plan(V3, config, make_hardware(2, 48, 2, 100 * GIB, isa="amx", gpu_gib=64))
    assert not plan.fits and not any(worker.streamed for worker in plan.workers)


def test_each_worker_streams_its_own() -> None:
    plan = plan_of(gpus=2, memory=48, stages=2, replicas=1, resident_layers=10)
    for worker in plan.workers:
        start, stop = worker.layers
        assert len(worker.streamed) == stop - start - 10 and set(worker.streamed) < set(range(start, stop))
    every = plan_of(gpus=2, memory=48, stages=2, replicas=1, resident_layers=40)
    assert not any(worker.streamed for worker in every.workers)


def test_generation_holds_nothing_for_backward() -> None:
    config = make_config(rule={"resident_layers": 0}, mode="predict")
    plan = make_plan(small_dims(), config, make_hardware())
    assert [worker.slots for worker in plan.workers] == [2]
    assert any("each step of generation copies" in note for note in plan.notes)
    trained = make_plan(small_dims(), make_config(rule={"resident_layers": 0}), make_hardware())
    assert trained.workers[0].slots == min(3, len(trained.workers[0].streamed))
    assert any("stand-in for a GPU" in note for note in trained.notes)
    assert streaming(plan.workers, plan.dims, 1, None) == plan.workers
