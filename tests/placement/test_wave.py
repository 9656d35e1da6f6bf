"""Wave size and kept activations are chosen by memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kt_ray.config.schema import Config, LoraConfig
from kt_ray.placement.activation_bytes import may_retain
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Budget, Held, Plan
from kt_ray.placement.wave import ROOM, BudgetOf, attention_kinds, choose_groups, fit, output_kinds
from kt_ray.placement.wave_tokens import load_of
from tests.placement.configs import make_config, make_hardware, small_dims

DIMS = small_dims()


def linear(retain: int, recompute: int, capacity: int, base: int = 10, device: str = "socket 0") -> BudgetOf:
    """A device that needs `base` and so many bytes per micro-batch."""

    def budget_of(wave: int, held: Held) -> tuple[Budget, ...]:
        each = retain if held.experts == "retain" else recompute
        return (Budget(device, {"kept activations": base + each * wave}, capacity),)

    return budget_of


def config_of(rows: int, length: int = 16, **rule: Any) -> Config:
    return make_config(rule=dict(rule), trainer={"batch_size": rows}, data={"max_length": length})


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (0, (8, "retain")),  # capacity unknown
        (1000, (8, "retain")),
        (100, (8, "recompute")),  # retain would need two waves
        (40, (3, "recompute")),  # 10 + 3 * 8 = 34 <= 36; 8 micro-batches make three waves of 3, 3, 2
        (20, (1, "recompute")),
        (18, (1, "recompute")),  # fits, but leaves no room
        (10, (1, "recompute")),  # does not fit: the least of all
    ],
)
def test_fewest_waves_then_retain(capacity: int, expected: tuple[int, str]) -> None:
    chosen = fit(config_of(8), linear(20, 8, capacity))
    assert (chosen.wave, chosen.held.experts) == expected
    used = chosen.memory[0].total
    if capacity >= 20:
        assert used <= ROOM * capacity
    (note,) = (n for n in chosen.notes if n.startswith("rule.experts.activations=auto: "))
    assert expected[1] in note
    assert any(n.startswith("rule.wave=auto: ") for n in chosen.notes) == (expected[0] < 8)


def test_attentions_outputs_wait_where_that_costs_no_wave() -> None:
    def budgets_on(capacity: int) -> BudgetOf:
        def budget_of(wave: int, held: Held) -> tuple[Budget, ...]:
            size = (2 if held.output == "retain" else 1) * wave
            return (Budget("cuda:0", {"kept activations": size}, capacity),)

        return budget_of

    for capacity, expected in ((16, (8, "retain")), (15, (8, "recompute")), (2, (2, "recompute"))):
        chosen = fit(config_of(8), budgets_on(capacity), outputs=("retain", "recompute"))
        assert (chosen.wave, chosen.held.output) == expected
    assert output_kinds(config_of(8)) == ("retain", "recompute")
    assert output_kinds(config_of(8, attention_output="retain")) == ("retain",)
    assert output_kinds(dataclasses.replace(config_of(8), lora=LoraConfig(dora=True, experts=False))) == (
        "recompute",
    )


def test_retain_comes_first_where_both_need_as_many_waves() -> None:
    chosen = fit(config_of(8), linear(20, 18, 100))  # 4 micro-batches of either kind leave a tenth free
    assert (chosen.wave, chosen.held.experts) == (4, "retain")
    assert fit(config_of(8), linear(20, 8, 29)).held.experts == "recompute"  # retain would leave no room


def test_all_but_one_of_three() -> None:
    """Two waves, of which the larger has two micro-batches."""
    assert fit(config_of(3), linear(20, 20, 60)).wave == 2


def test_a_gpu_may_be_filled_but_not_overfilled() -> None:
    assert fit(config_of(8), linear(20, 8, 170, device="cuda:0")).wave == 8
    chosen = fit(config_of(8), linear(20, 20, 169, device="cuda:0"))
    assert chosen.wave == 4 and chosen.memory[0].total <= 169


def test_keys_that_are_set_leave_only_what_they_allow() -> None:
    given = fit(config_of(8, experts={"activations": "retain"}), linear(20, 8, 100))
    assert (given.wave, given.held.experts) == (4, "retain")
    assert not any("activations=auto" in n for n in given.notes)
    given = fit(config_of(8, wave=8), linear(20, 8, 100))
    assert (given.wave, given.held.experts) == (8, "recompute")
    given = fit(config_of(8, wave=8, experts={"activations": "retain"}), linear(20, 8, 100))
    assert (given.wave, given.held.experts) == (8, "retain") and given.memory[0].total > 100
    lowered = fit(config_of(8, wave=20), linear(20, 8, 0))
    assert lowered.wave == 8 and any("rule.wave=20 lowered to 8" in n for n in lowered.notes)


def of_levels(group: int, micro_batch: int, host: int, capacity: int) -> BudgetOf:
    """A GPU that needs so many bytes per micro-batch of a wave."""
    each = {"group": group, "micro_batch": micro_batch, "host": host}

    def budget_of(wave: int, held: Held) -> tuple[Budget, ...]:
        return (Budget("cuda:0", {"kept activations": each[held.attention] * wave}, capacity),)

    return budget_of


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        (800, (8, "group")),
        (400, (8, "micro_batch")),  # whole groups would need two waves
        (90, (8, "host")),
        (50, (4, "host")),
        (5, (1, "host")),  # does not fit: the least of all
    ],
)
def test_attention_holds_what_needs_the_fewest_waves(capacity: int, expected: tuple[int, str]) -> None:
    levels = ("group", "micro_batch", "host")
    chosen = fit(config_of(8), of_levels(100, 50, 10, capacity), levels)
    assert (chosen.wave, chosen.held.attention, chosen.held.experts) == (
        *expected,
        "retain" if capacity > 5 else "recompute",
    )
    notes = [note for note in chosen.notes if note.startswith("rule.activations=auto: ")]
    assert len(notes) == (expected[1] != "group")
    assert all(f"{expected[1]}; with group the whole step would need" in note for note in notes)


def test_what_attention_may_hold() -> None:
    assert attention_kinds(config_of(8), DIMS, "cpu") == ("retain", "group", "micro_batch")
    assert attention_kinds(config_of(8), DIMS, "cpu", resident=2) == ("group", "micro_batch")
    assert attention_kinds(config_of(8), DIMS, "cuda") == ("group", "micro_batch", "host")
    assert attention_kinds(config_of(8, activations="host"), DIMS, "cpu") == ("host",)
    streams = dataclasses.replace(DIMS, hidden_streams=4)  # everything would be computed twice
    for device in ("cpu", "cuda"):
        assert attention_kinds(config_of(8), streams, device) == ("group",)


@pytest.mark.parametrize(
    "keeps_more", [{"model_type": "jamba"}, {"model_type": "inkling_text"}, {"indexes": ((2, True),)}]
)
def test_layers_are_retained_where_all_that_they_keep_is_counted(keeps_more: dict[str, Any]) -> None:
    dims = dataclasses.replace(DIMS, **keeps_more)  # a Jamba of which no layer's state is known
    assert attention_kinds(config_of(8), dims, "cpu") == ("group", "micro_batch")
    assert attention_kinds(config_of(8, activations="retain"), dims, "cpu") == ("retain",)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_text", "deepseek_v32"])
def test_what_a_cpu_alone_is_known_to_keep(family: str) -> None:
    dims = small_dims(family)
    assert attention_kinds(config_of(8), dims, "cpu")[0] == "retain"
    assert may_retain(DIMS, gpu=True) and not may_retain(dims, gpu=True)


@pytest.mark.parametrize("family", ["kimi_linear", "nemotron_h", "qwen3_next"])
def test_what_a_packages_kernels_keep_of_a_state_is_not_known(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = small_dims(family)
    assert attention_kinds(config_of(8), dims, "cpu")[0] == "retain"
    for found in (False, True):
        monkeypatch.setattr("kt_ray.placement.activation_bytes.installed", lambda name, found=found: found)
        assert may_retain(dims, gpu=True) == (not found)


def test_groups_follow_the_wave() -> None:
    assert choose_groups(config_of(8), 1) == 1
    assert choose_groups(config_of(8), 8) == 2
    assert choose_groups(config_of(8, groups=4), 8) == 4
    assert choose_groups(config_of(8, groups=4), 3) == 3
    plan = make_plan(DIMS, config_of(3, groups=4), make_hardware())
    assert plan.groups == 3 and any("rule.groups=4 lowered to 3" in note for note in plan.notes)


def test_a_plan_that_lacks_memory_takes_smaller_waves() -> None:
    """A real plan: less memory, more waves, and every budget counts one wave's tokens."""
    config = config_of(16, 1 << 16)
    whole = make_plan(DIMS, config, make_hardware())
    assert whole.wave == 16 and whole.groups == 2
    memory = int(whole.budgets[0].total / ROOM) - 1
    seen = [whole.wave]
    while (plan := make_plan(DIMS, config, make_hardware(memory=memory))).wave > 2:
        assert plan.fits and plan.budgets[0].total <= ROOM * memory
        assert plan.wave <= seen[-1]
        seen.append(plan.wave)
        memory = int(memory * 0.9)
    assert set(seen) >= {16, 8, 4}
    quarter = make_plan(DIMS, config_of(16, 1 << 16, wave=4), make_hardware())
    assert _kept(quarter) == [size // 4 for size in _kept(whole)]


def _kept(plan: Plan) -> list[int]:
    return [b.items["kept activations"] for b in plan.budgets if "kept activations" in b.items]


@pytest.mark.parametrize(
    ("length", "batch_size", "replicas", "rows"),
    [(128, 8, 1, 4), (128, 8, 2, 2), (128, 8, 8, 1), (128, 64, 1, 4), (200, 64, 1, 2), (1024, 64, 1, 1)],
)
def test_micro_batches_at_auto_fill_512_positions_and_leave_every_replica_two(
    length: int, batch_size: int, replicas: int, rows: int
) -> None:
    settings: dict[str, Any] = {"batch_size": batch_size, "micro_batch_size": "auto"}
    config = make_config(data={"max_length": length}, trainer=settings, rule={"replicas": replicas})
    assert config.micro_batch_rows(replicas) == rows
    assert config.micro_batch_tokens(replicas) == rows * length
    plan = make_plan(small_dims(), config, make_hardware())
    assert plan.wave == math.ceil(math.ceil(batch_size / replicas) / rows)
    assert load_of(small_dims(), config, plan.wave, plan.groups).micro == rows * length


def test_micro_batches_of_so_many_tokens() -> None:
    """Padded rows; one always fits."""
    trainer = {"batch_size": 64, "micro_batch_size": "auto", "micro_batch_tokens": 2048}
    for length, rows in ((500, 4), (1000, 2), (4000, 1)):
        data = {"max_length": length, "pad_to_multiple_of": 64}
        config = make_config(data=data, trainer=trainer)
        assert config.micro_batch_rows(1) == rows
        plan = make_plan(small_dims(), config, make_hardware())
        assert (plan.micro_batch_rows, plan.micro_batch_tokens) == (rows, rows * config.data.widest_row)


def test_pairs_and_verdicts_do_not_share_micro_batches_by_length() -> None:
    for stage in ("dpo", "orpo", "kto"):
        config = make_config(data={"max_length": 16}, trainer={"micro_batch_size": "auto", "stage": stage})
        assert config.micro_batch_rows(1) == 1 and config.micro_batch_tokens(1) is None
    given = make_config(data={"max_length": 16}, trainer={"micro_batch_size": 3})
    assert given.micro_batch_rows(1) == 3 and given.micro_batch_tokens(1) is None
