"""The lane's arithmetic and its copies against the engine's definition: formats, slopes, roundings, rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kt_ray.experts.device_lane import DeviceLane, LaneInput, _DeviceRows
from kt_ray.experts.lane import Lane
from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_formats import matrix_values
from kt_ray.experts.lane_math import slopes
from kt_ray.experts.lane_routing import Routed, add_part, route
from kt_ray.experts.lane_weights import expert_tensors, pack
from kt_ray.native import Engine, ExpertFormula
from kt_ray.native.reference import activate
from kt_ray.placement import lane_share
from kt_ray.placement.plan_types import LanePlan
from tests.helpers.matrices import VARIANTS, quantised_case, random_matrix
from tests.helpers.native import ACTIVATIONS, ISAS, LAYOUTS, Case, Shape, lay_out, make_case
from tests.helpers.roundings import with_roundings


@pytest.mark.parametrize("name", VARIANTS)
def test_values_of_a_format_are_its_own(name: str) -> None:
    matrix = random_matrix(VARIANTS[name], 2, 40, 512, torch.Generator().manual_seed(0))
    found = matrix_values(matrix.format, matrix.data, matrix.scales, (40, 512), matrix.scale_block)
    assert torch.equal(found, matrix.dequantize())


@pytest.mark.parametrize("name", VARIANTS)
def test_decoding_copies_no_numbers_to_the_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a copy has the host wait for all that a GPU was told before: once is enough."""
    matrix = random_matrix(VARIANTS[name], 2, 40, 512, torch.Generator().manual_seed(0))
    given = (matrix.format, matrix.data, matrix.scales, (40, 512), matrix.scale_block)
    found = matrix_values(*given)
    monkeypatch.delattr(torch, "tensor")
    assert torch.equal(found, matrix_values(*given))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_slopes_are_the_derivatives(name: str) -> None:
    fields = ACTIVATIONS[name]
    formula = ExpertFormula(fields.get("activation", "silu"), fields.get("alpha", 1.702), fields.get("limit"))
    g = torch.Generator().manual_seed(1)
    up, upstream = (3 * torch.randn(50, 7, generator=g, dtype=torch.float64) for _ in range(2))
    up.requires_grad_()
    gate = None
    if name != "relu2":
        gate = (3 * torch.randn(50, 7, generator=g, dtype=torch.float64)).requires_grad_()
    leaves = [up] if gate is None else [up, gate]
    wanted = torch.autograd.grad(activate(formula, gate, up), leaves, upstream)
    d_gate, d_up = slopes(formula, None if gate is None else gate.detach(), up.detach(), upstream)
    torch.testing.assert_close(d_up, wanted[0])
    if gate is not None:
        torch.testing.assert_close(d_gate, wanted[1])
    else:
        assert d_gate is None


def run_in_lane(
    case: Case, *, recompute: bool = False, devices: tuple[str, ...] = ("cpu",), float8: bool = False
) -> dict[str, Tensor]:
    """Forward and backward of a case, every expert streamed through the lane; named as `Case.run` does."""
    lane = Lane(LanePlan(devices, (), ((0, 1.0),), float8=float8), 1, recompute=recompute)
    weights, lora = case.weights, case.lora[0] if case.lora else None
    try:
        lane.add_layer(weights.layer, weights.expert_ids, [weights])
        counts = torch.bincount(case.ids.reshape(-1), minlength=weights.E + 1)[: weights.E].tolist()
        chosen = lane.choose(weights.layer, counts, len(case.x))
        y, dx = torch.zeros(len(case.x), weights.H), torch.zeros(len(case.x), weights.H)
        dw, grads = torch.zeros(case.ids.shape), None if lora is None else lora.zeros_like()
        parts = case.x.tensor_split((3, 4))
        call = LaneInput(parts, case.ids, case.weights_TK, lora, case.dropout, case.keys, case.x, counts)
        for started in lane.forward(weights.layer, chosen, call):
            forward = started.result()
            assert forward.saved is not None and bool(forward.saved.pairs) != recompute
            y[forward.tokens] += forward.y
            (ended,) = lane.backward(weights.layer, [forward.saved], case.dy.tensor_split((2,)), lora)
            back = ended.result()
            dx[back.tokens] += back.dx
            dw.view(-1)[back.slots] = back.dw
            for experts, own in back.lora:
                for name, tensor in own.items():
                    getattr(grads, name).index_add_(0, experts, tensor)
    finally:
        lane.close()
    named = {} if grads is None else {f"0.{m}": t for m, t in grads.named().items()}
    return {"y": y, "dx": dx, "dw": dw, **named}


@functools.cache
def expected(name: str, dropout: float) -> Case:
    multiple = {1: (37, 29), 32: (96, 32), 128: (256, 128), 256: (256, 512)}[VARIANTS[name].multiple]
    shape = Shape(tokens=19, slots=2, experts=3, hidden=multiple[0], inter=multiple[1], rank=5)
    return quantised_case(shape, name, dropout=dropout).expect()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format(name: str, recompute: bool) -> None:
    """Within the engine's own tolerance of float64 on the dequantised values."""
    case = expected(name, 0.2)
    case.check(run_in_lane(case, recompute=recompute))


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("recompute", [False, True])
def test_several_devices(devices: int, recompute: bool) -> None:
    """Also more of them than a call has experts."""
    case = expected("fp8-128x128", 0.2)
    case.check(run_in_lane(case, recompute=recompute, devices=("cpu",) * devices))
    few = make_case(Shape(slots=3), torch.bfloat16, routing="one").expect()
    few.check(run_in_lane(few, recompute=recompute, devices=("cpu",) * devices))


@pytest.mark.parametrize("routing", ["random", "one", "none", "twice", "sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_routing(dtype: torch.dtype, routing: str) -> None:
    case = make_case(Shape(slots=3), dtype, routing=routing, dropout=0.3, x_dtype=torch.float32).expect()
    case.check(run_in_lane(case))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_activation(dtype: torch.dtype, activation: str, bias: bool) -> None:
    case = make_case(Shape(), dtype, activation=activation, bias=bias).expect()
    case.check(run_in_lane(case))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, rank: int) -> None:
    """Fused, interleaved and transposed experts travel in one piece and are the same experts."""
    case = make_case(Shape(rank=rank), torch.bfloat16)
    plain = run_in_lane(case)
    case.weights = lay_out(case.weights, layout)
    other = run_in_lane(case)
    tolerance = {name: 1e-5 * float(value.norm()) for name, value in plain.items()}
    assert all(float((other[name] - value).norm()) <= tolerance[name] for name, value in plain.items())


def test_interleaved_halves_are_copied_once() -> None:
    case = make_case(Shape(rank=0), torch.bfloat16)
    separate = pack(expert_tensors(case.weights, 1))
    together = pack(expert_tensors(lay_out(case.weights, "interleaved"), 1))
    assert (len(separate.stretches), len(together.stretches)) == (3, 2)
    # A half stops one element before the other's last; a stretch begins at a multiple of 16 bytes.
    assert abs(together.carried - separate.carried) <= 2 * 16


@pytest.mark.parametrize("isa", ISAS)
def test_roundings_are_the_engine_s(isa: str) -> None:
    """Lane and engine are as near to each other as either is to the listed roundings: no other ones."""
    case = make_case(Shape(tokens=40, hidden=96, inter=64), torch.bfloat16, dropout=0.2, bias=True)
    listed = with_roundings(case, products=True)
    with Engine(isa, threads=1) as engine:
        engine_s = case.run(engine)
    lane_s = run_in_lane(case)
    for name, value in listed.items():
        size = float(value.norm())
        errors = [float((r[name].double() - value).norm()) / size for r in (lane_s, engine_s)]
        # float32 sums in another order, and now and then a value on the boundary of two bfloat16 numbers.
        assert errors[0] <= max(5e-4, 2 * errors[1]), (name, errors)


def test_rows_are_sorted_and_repeats_are_told_apart() -> None:
    ids = torch.tensor([[2, 0, 2], [1, 3, 0], [0, 0, 0], [3, 3, 3]])
    weights = torch.arange(12.0).view(4, 3)
    routed = route(ids, weights, ((2,), (0,)), none=3)
    assert routed.slots.tolist() == [0, 2, 1, 5, 6, 7, 8]
    assert [[part.rows for part in parts] for parts in routed.parts] == [[slice(0, 2)], [slice(2, 7)]]
    assert [part.places for (part,) in routed.parts] == [slice(0, 8), slice(8, 16)]
    assert not any(part.full for (part,) in routed.parts)
    assert routed.tokens.tolist() == [0, 1, 2]
    assert routed.at.tolist() == [0, 0, *[4] * 6, 0, 1, 2, 2, 2, *[4] * 3]  # 4: no token
    assert routed.weight.tolist() == [0, 2, *[0] * 6, 1, 5, 6, 7, 8, *[0] * 3]
    assert [part.bags for (part,) in routed.parts] == [slice(0, 1), slice(1, 4)]
    assert routed.bag_tokens.tolist() == [0, 0, 1, 2] and routed.bag_starts.tolist() == [0, 0, 1, 2]
    assert routed.bag_places.tolist() == [0, 1, 0, 1, 2, 3, 4]


def test_rows_are_added_to_their_tokens() -> None:
    """Two experts, one with twice as many rows, which name a token three times."""
    routed = route(torch.tensor([[2, 0, 2], [1, 3, 0], [0, 0, 0], [3, 3, 3]]), torch.ones(4, 3), ((0, 2),), 3)
    ((part,),) = routed.parts
    bags = routed.bag_places, routed.bag_starts, routed.bag_tokens
    values = torch.full((2, 8, 1), 1e9)
    values[0, :5, 0], values[1, :2, 0] = torch.tensor([1.0, 2, 4, 8, 16]), torch.tensor([32.0, 64])
    out = torch.full((4, 1), 0.5)
    add_part(out, values, bags, None)
    assert out.flatten().tolist() == [1 + 32 + 64 + 0.5, 2.5, 4 + 8 + 16 + 0.5, 0.5]
    add_part(out, values, bags, torch.arange(16.0).view(2, 8))
    assert out.flatten().tolist() == [97.5 + 8 * 32 + 9 * 64, 4.5, 28.5 + 8 + 24 + 64, 0.5]
    assert part.bags == slice(0, 3)


def test_experts_of_a_batch_have_as_many_places() -> None:
    ids = torch.tensor([[2, 0, 2], [1, 3, 0], [0, 0, 0], [3, 3, 3]])
    routed = route(ids, torch.arange(12.0).view(4, 3), ((0, 2), (1,)), none=3)
    (both,), (alone,) = routed.parts
    assert routed.slots.tolist() == [1, 5, 6, 7, 8, 0, 2, 3] and both.counts == (5, 2) and not both.full
    assert (both.rows, both.places, both.width) == (slice(0, 7), slice(0, 16), 8)
    assert (alone.rows, alone.places, alone.width) == (slice(7, 8), slice(16, 24), 8)
    none = [4] * 3  # no token
    assert routed.at.tolist() == [0, 1, 2, 2, 2, *none, 0, 0, *none, *none, 1, *none, *none, 4]
    assert routed.weight.tolist() == [1, 5, 6, 7, 8, 0, 0, 0, 0, 2, *[0] * 6, 3, *[0] * 7]
    assert routed.spread.tolist() == [0, 1, 2, 3, 4, 8, 9, 0]


def test_an_expert_with_a_row_at_every_place_is_full() -> None:
    ids = torch.zeros((16, 1), dtype=torch.int64)
    ((part,),) = route(ids, torch.ones(16, 1), ((0,),), none=1).parts
    assert part.full and part.places == slice(0, 16)


ROWS = (700, 1, 37, 0, 64)  # of every expert, in a batch of all


def uneven(case: Case) -> Case:
    """720 tokens with two slots; some have two experts, some none."""
    case.ids = torch.full_like(case.ids, len(ROWS))
    for e, (count, first, slot) in enumerate(zip(ROWS, (0, 5, 100, 0, 690), (0, 1, 1, 1, 1), strict=True)):
        case.ids[first : first + count, slot] = e
    return case


def alike(found: dict[str, Tensor], wanted: dict[str, Tensor], dtype: torch.dtype) -> None:
    """To float32 sums in another order; now and then a value on the boundary of two bfloat16 numbers."""
    limit = 1e-5 if dtype == torch.float32 else 5e-4
    for name, value in wanted.items():
        error = float((found[name] - value).norm())
        assert error <= limit * float(value.norm()), (name, error)


def one_by_one(case: Case, monkeypatch: pytest.MonkeyPatch, *, recompute: bool = False) -> dict[str, Tensor]:
    with monkeypatch.context() as patched:
        patched.setattr(lane_share, "LANE_BATCH", 1)
        return run_in_lane(case, recompute=recompute)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_batch_in_every_format(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    multiple = {1: (37, 29), 32: (96, 32), 128: (256, 128), 256: (256, 512)}[VARIANTS[name].multiple]
    shape = Shape(tokens=720, slots=2, experts=5, hidden=multiple[0], inter=multiple[1], rank=5)
    case = uneven(quantised_case(shape, name, dropout=0.2))
    alike(run_in_lane(case), one_by_one(case, monkeypatch), torch.bfloat16)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_every_formula(
    dtype: torch.dtype, activation: str, bias: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(Shape(tokens=720, hidden=37, inter=29), dtype, activation=activation, bias=bias)
    found = run_in_lane(uneven(case), recompute=recompute)
    alike(found, one_by_one(case, monkeypatch, recompute=recompute), dtype)
    case.expect().check(found)


@pytest.mark.parametrize("mutation", ["values", "not a number"])
def test_places_without_a_row_would_be_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were they not zeros, they would change the adapters' gradients."""
    case = uneven(make_case(Shape(tokens=720), torch.float32, bias=True))
    wanted = run_in_lane(case, recompute=True)
    with_empty, rows_of = DeviceLane._with_empty, _DeviceRows.of

    def filled(self: DeviceLane, parts: Sequence[Tensor], dtype: torch.dtype, *there: bool) -> Tensor:
        made = with_empty(self, parts, dtype, *there)
        made[-1] = 1.0 if mutation == "values" else torch.nan
        return made

    def weighted(routed: Routed, device: LaneDevice) -> _DeviceRows:
        rows = rows_of(routed, device)
        return rows._replace(weight=torch.where(rows.at == len(case.x), 1.0, rows.weight))

    monkeypatch.setattr(DeviceLane, "_with_empty", filled)
    if mutation == "values":
        monkeypatch.setattr(_DeviceRows, "of", weighted)
    with pytest.raises(AssertionError, match="gate_a"):
        alike(run_in_lane(case, recompute=True), wanted, torch.float32)


def test_experts_that_lie_unlike_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of the first expert touch in memory, those of the second do not."""
    case = make_case(Shape(experts=2), torch.bfloat16)
    wanted = run_in_lane(case)
    gate, up = case.weights.gate, case.weights.up
    assert isinstance(gate, Tensor) and isinstance(up, Tensor)
    size, memory = gate[0].numel(), torch.zeros(6 * gate[0].numel(), dtype=torch.bfloat16)
    apart = memory.as_strided(gate.shape, (2 * size, *gate.stride()[1:])).copy_(gate)
    wider = memory.as_strided(up.shape, (3 * size, *up.stride()[1:]), size).copy_(up)
    case.weights = replace(case.weights, gate=apart, up=wider)
    parcels = [pack(expert_tensors(case.weights, e)) for e in range(2)]
    assert [len(parcel.stretches) for parcel in parcels] == [2, 3]
    assert all(torch.equal(value, wanted[name]) for name, value in run_in_lane(case).items())
