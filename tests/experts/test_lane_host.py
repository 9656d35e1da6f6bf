"""An actor's experts with a lane against the same without: whatever is resident or streamed."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kt_ray.config.schema import LoraConfig, OptimConfig
from kt_ray.experts import ExpertCounters, LocalExperts, LocalExpertsSpec, lane_routing
from kt_ray.experts.lane import all_started
from kt_ray.native import ExpertFormula
from kt_ray.placement import lane_share
from kt_ray.placement.plan_types import LanePlan
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.native import tolerance

HELD = (1, 2, 4, 5, 7)
SOME = ((0, (2, 7)), (2, (1,)))  # MoE layers are 0 and 2
ALL = ((0, HELD), (2, HELD))
LANES = {
    "resident": LanePlan(("cpu",), SOME),
    "streamed": LanePlan(("cpu",), (), ((0, 0.5),)),
    "both": LanePlan(("cpu",), SOME, ((0, 0.5),)),
    "all resident": LanePlan(("cpu",), ALL),
    "all streamed": LanePlan(("cpu",), (), ((0, 1.0),)),
    "both, on two devices": LanePlan(("cpu", "cpu"), SOME, ((0, 0.5),)),
    "streamed large calls only": LanePlan(("cpu",), (), ((20, 0.5),)),
    "held for the second group": LanePlan(("cpu",), SOME, ((0, 0.5),), held=3),
    "more for the second group": LanePlan(("cpu",), (), ((0, 0.3),), held=4, later=((0, 0.7),)),
    "all streamed, some held, on two devices, recomputed": LanePlan(
        ("cpu",) * 2, (), ((0, 1.0),), held=1, recompute=True
    ),
}


def results(
    path: Path, lane: LanePlan | None, dropout: float, activations: str, tokens: int = 40
) -> tuple[dict[str, Tensor], LocalExperts]:
    """Two groups forward and backward, with adapters that do something; gradients by name."""
    lora = LoraConfig(rank=4, dropout=dropout)
    spec = LocalExpertsSpec(
        0, -1, (), 1, HELD, "auto", "auto", activations, lane=lane,
        model_dir=str(path), lora=lora, optim=OptimConfig(), seed=5,
    )  # fmt: skip
    host = LocalExperts(spec)
    host.load()
    for name, tensor in host.lora.named("param"):
        if "lora_B" in name:
            seed = sum(name.encode())
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))
    g = torch.Generator().manual_seed(9)
    host.begin_pass(3, True)
    found: dict[str, Tensor] = {}
    layers = sorted(host.order)[:2]
    dys = {}
    for layer in layers:
        for group in range(2):
            ids = host.local_ids(layer, torch.randint(0, 9, (tokens, 3), generator=g), 8)
            x, dy = (torch.randn(tokens, 48, generator=g) for _ in range(2))
            weights = torch.rand(tokens, 3, generator=g)
            keys = torch.arange(tokens) + 2**32 * group
            y = host.forward(layer, group, [x[:9], x[9:]], ids, weights, keys, keep=True)
            found[f"y {layer} {group}"], dys[layer, group] = y, dy
    for layer, group in sorted(dys, reverse=True):
        dx, dw = host.backward(layer, group, dys[layer, group].split(17))
        found |= {f"dx {layer} {group}": dx, f"dw {layer} {group}": dw}
    found |= {name: grad.clone() for name, grad in host.lora.named("grad")}
    return found, host


@functools.cache
def _plain(path: Path, dropout: float, activations: str) -> tuple[dict[str, Tensor], ExpertCounters]:
    found, host = results(path, None, dropout, activations)
    host.close()
    return found, host.take_counters()


def close_to(
    found: dict[str, Tensor], plain: dict[str, Tensor], dtype: torch.dtype, depth: int = 400
) -> None:
    """Both sides are within the tests' tolerance of the exact value, so within twice that of each other."""
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        limit = 2 * tolerance(dtype, depth, 10)
        error = float((found[name] - value).norm())
        assert error <= limit * float(value.norm()), (name, error / float(value.norm()), limit)


@pytest.mark.parametrize("activations", ["retain", "recompute"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_rows_in_parts_change_nothing_but_rounding(
    checkpoint: tuple[Path, torch.dtype], dropout: float, activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert with more rows than a GPU computes at a time: their adapter gradients add up."""
    path, dtype = checkpoint
    parts: list[int] = []
    divide = lane_routing._in_parts

    def counted(counts: Sequence[int]) -> list[tuple[int, ...]]:
        made = divide(counts)
        parts.append(len(made))
        return made

    for module in (lane_routing, lane_share):
        monkeypatch.setattr(module, "LANE_ROWS", 7)
    monkeypatch.setattr(lane_routing, "_in_parts", counted)
    found, host = results(path, LANES["both"], dropout, activations)
    host.close()
    assert max(parts) > 1
    close_to(found, _plain(path, dropout, activations)[0], dtype)


@pytest.mark.parametrize("together", [1, 8])
def test_held_experts_are_carried_once(
    checkpoint: tuple[Path, torch.dtype], together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both groups of a layer use one copy, forward and backward; the second group takes the experts that are
    there, and nothing else changes: experts that are computed where they lie, and batches of them."""
    monkeypatch.setattr(lane_share, "LANE_BATCH", together)
    carried, results_of = {}, {}
    for held in (0, 2, 5):
        lane = LanePlan(("cpu",), (), ((0, 1.0),), held=held)
        results_of[held], host = results(checkpoint[0], lane, 0.2, "retain")
        assert host.lane is not None
        carried[held] = host.lane.carried
        host.close()
    # Two layers, both ways; of the five experts all but two, or none, are carried for the second group.
    expert = (carried[0] - carried[5]) / (2 * 2 * 5)
    assert carried[0] - carried[2] == 2 * 2 * 2 * expert > 0
    for held in (2, 5):
        assert all(torch.equal(results_of[0][name], value) for name, value in results_of[held].items())


@pytest.mark.parametrize("activations", ["retain", "recompute"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("name", LANES)
def test_a_lane_changes_nothing_but_rounding(
    checkpoint: tuple[Path, torch.dtype], name: str, dropout: float, activations: str
) -> None:
    path, dtype = checkpoint
    found, host = results(path, LANES[name], dropout, activations)
    counters = host.take_counters()
    host.close()
    plain, reference = _plain(path, dropout, activations)
    close_to(found, plain, dtype)
    assert counters.tokens_per_expert == reference.tokens_per_expert
    assert (counters.forward_slots, counters.backward_slots) == (
        reference.forward_slots,
        reference.backward_slots,
    )
    share = counters.lane_slots / (counters.forward_slots + counters.backward_slots)
    assert share == 1 if name.startswith("all") else 0.1 < share < 0.9
    assert counters.kept_bytes_peak > 0


@pytest.mark.parametrize("name", ["both", "both, on two devices"])
def test_every_run_gives_the_same_bits(checkpoint: tuple[Path, torch.dtype], name: str) -> None:
    path, _ = checkpoint
    first, host = results(path, LANES[name], 0.2, "retain")
    assert host.lane is not None and all(part.carried for part in host.lane.parts)
    host.close()
    second, host = results(path, LANES[name], 0.2, "retain")
    host.close()
    recomputed, host = results(path, LANES[name], 0.2, "recompute")
    host.close()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], recomputed[name]) for name in first)


def test_small_calls_stay_with_the_engine(checkpoint: tuple[Path, torch.dtype]) -> None:
    path, _ = checkpoint
    found, host = results(path, LANES["streamed large calls only"], 0.0, "retain", tokens=19)
    assert host.take_counters().lane_slots == 0
    plain, without = results(path, None, 0.0, "retain", tokens=19)
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    assert host.lane is not None and host.lane.carried == 0
    host.close()
    without.close()


def test_int4_experts_quantised_while_they_are_read(tmp_path: Path) -> None:
    """Residents are quantised like the others, and by themselves."""
    path = build_checkpoint(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    with pytest.raises(AssertionError):  # the two formats are told apart by this comparison
        close_to(*(_sized(path, None, backend) for backend in ("auto", "AMXINT4")), torch.bfloat16)
    close_to(_sized(path, LANES["both"], "AMXINT4"), _sized(path, None, "AMXINT4"), torch.bfloat16)


def test_w4a8_is_the_same_int4_multiplied_in_int8(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    own, int8, exact = (_sized(path, None, backend) for backend in ("AMXINT4", "W4A8", "auto"))
    assert own.keys() == int8.keys()
    for name, value in own.items():
        rounding, quantising = (float((t[name] - value).norm()) for t in (int8, exact))
        assert 0.002 * float(value.norm()) < rounding < quantising, name


def _sized(path: Path, lane: LanePlan | None, backend: str) -> dict[str, Tensor]:
    spec = LocalExpertsSpec(
        0, -1, (), 1, HELD, backend, "auto", "retain", lane=lane,
        model_dir=str(path), lora=LoraConfig(rank=4), optim=OptimConfig(), seed=5,
    )  # fmt: skip
    host = LocalExperts(spec)
    host.load()
    g = torch.Generator().manual_seed(9)
    layer = min(host.order)
    host.begin_pass(0, True)
    ids = host.local_ids(layer, torch.randint(0, 9, (40, 3), generator=g), 8)
    x, dy = torch.randn(40, 64, generator=g), torch.randn(40, 64, generator=g)
    weights = torch.linspace(0.1, 1, 120).view(40, 3)
    y = host.forward(layer, 0, [x], ids, weights, torch.arange(40), keep=True)
    dx, dw = host.backward(layer, 0, [dy])
    host.close()
    return {"y": y, "dx": dx, "dw": dw}


def test_formulas_and_biases(tmp_path: Path) -> None:
    """gpt-oss: interleaved halves, biases, a clamp."""
    path = build_checkpoint(tmp_path, "gpt_oss")
    formula = ExpertFormula("swiglu_oai", 1.702, 7.0)
    made = []
    for lane in (None, LanePlan(("cpu",), ((0, (1,)),), ((0, 0.5),))):
        spec = LocalExpertsSpec(
            0, -1, (), 1, (0, 1, 2, 3), "auto", "auto", "retain", lane=lane,
            model_dir=str(path), lora=LoraConfig(rank=4), optim=OptimConfig(), seed=5,
            formulas={0: formula, 1: formula, 2: formula},
        )  # fmt: skip
        host = LocalExperts(spec)
        host.load()
        g = torch.Generator().manual_seed(9)
        host.begin_pass(0, True)
        width = next(iter(host.weights.values())).H
        x, dy = torch.randn(30, width, generator=g), torch.randn(30, width, generator=g)
        ids, weights = torch.randint(0, 4, (30, 2), generator=g), torch.rand(30, 2, generator=g)
        y = host.forward(0, 0, [x], host.local_ids(0, ids, 8), weights, torch.arange(30), keep=True)
        dx, dw = host.backward(0, 0, [dy])
        made.append(
            {"y": y, "dx": dx, "dw": dw} | {n: t.clone() for n, t in host.lora.named("grad") if ".0." in n}
        )
        host.close()
    close_to(made[1], made[0], torch.bfloat16)


@pytest.mark.parametrize("activations", ["retain", "recompute"])
def test_what_is_kept_is_the_host_s_own(checkpoint: tuple[Path, torch.dtype], activations: str) -> None:
    """Under Ray a forward reads tensors in their sender's memory, which is used again before the backward."""
    path, _ = checkpoint
    made = []
    lanes = (None, LANES["all streamed"])
    for lane, used_again in itertools.product(lanes, (False, True)):
        spec = LocalExpertsSpec(
            0, -1, (), 1, HELD, "auto", "auto", activations, lane=lane,
            model_dir=str(path), lora=LoraConfig(rank=4, dropout=0.2), optim=OptimConfig(), seed=5,
        )  # fmt: skip
        host = LocalExperts(spec)
        host.load()
        g = torch.Generator().manual_seed(9)
        layer = min(host.order)
        host.begin_pass(0, True)
        # Every token has an expert here, so the lane takes x as a whole.
        ids = torch.tensor(HELD)[torch.randint(0, len(HELD), (30, 3), generator=g)]
        x, dy = (torch.randn(30, 48, generator=g).to(checkpoint[1]) for _ in range(2))
        given = [host.local_ids(layer, ids, 8), torch.rand(30, 3, generator=g), torch.arange(30)]
        host.forward(layer, 0, [x], *given, keep=True)
        if used_again:
            for tensor in (x, *given):
                tensor.zero_()
        dx, dw = host.backward(layer, 0, [dy.float()])
        made.append({"dx": dx, "dw": dw} | {name: grad.clone() for name, grad in host.lora.named("grad")})
        host.close()
    for before, after in (made[:2], made[2:]):
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_error_in_the_lane_is_the_caller_s(checkpoint: tuple[Path, torch.dtype], monkeypatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no device")

    monkeypatch.setattr("kt_ray.experts.device_lane.project_in", broken)
    monkeypatch.setattr("kt_ray.experts.local_experts.check_lane", lambda *_, **__: None)  # it would notice
    with pytest.raises(RuntimeError, match="no device"):
        results(checkpoint[0], LANES["both"], 0.0, "retain")


def test_what_has_started_is_awaited_where_another_does_not() -> None:
    """It reads the caller's tensors, which may be used again once the caller has its error."""
    done: list[str] = []

    def parts(pool: ThreadPoolExecutor) -> Iterator[Future[None]]:
        yield pool.submit(lambda: (time.sleep(0.2), done.append("first"))[1])
        raise RuntimeError("no thread")

    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="no thread"):
        try:
            all_started(parts(pool))
        finally:
            assert done == ["first"]
