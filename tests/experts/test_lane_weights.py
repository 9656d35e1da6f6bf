"""Which copies bring experts and their adapters to the lane's device, and what is there then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kt_ray import gpu
from kt_ray.experts import lane_weights
from kt_ray.experts.lane_device import LaneDevice
from kt_ray.experts.lane_weights import (
    Adapter,
    DeviceLora,
    HeldExperts,
    JoinedLora,
    PackedExperts,
    adapter_bytes,
    expert_tensors,
)
from kt_ray.native import ExpertWeights
from tests.helpers.native import Case, Shape, make_case

CPU = torch.device("cpu")
EXPERTS, RANK = 12, 5


class Counting(gpu.Driver):
    """Bytes of each copy to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[int] = []

    def copy_in(self, to: Tensor, source: Tensor) -> None:
        self.copied.append(source.nbytes)
        super().copy_in(to, source)


@pytest.fixture
def counting() -> Iterator[Counting]:
    before, made = gpu.driver(), Counting()
    gpu.use_driver(made)
    yield made
    gpu.use_driver(before)


def case_of(**fields: str) -> Case:
    return make_case(Shape(experts=EXPERTS, hidden=48, inter=32, rank=RANK), torch.bfloat16, **fields)


@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("owners", [1, 2])
@pytest.mark.parametrize("order", [((7, 1), (2, 0), (9,)), (range(8), range(8, EXPERTS))])
def test_adapters_travel_together(
    order: Sequence[Sequence[int]],
    owners: int,
    activation: str,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One copy per matrix and owner, or one per run of experts where those between are too many."""
    (whole,) = case_of(activation=activation).lora
    halves = [whole.map(lambda t, at=at: t[at].clone()) for at in (slice(0, 5), slice(5, EXPERTS))]
    lora: Adapter = whole if owners == 1 else JoinedLora(halves)
    matrices = len(whole.named())
    for most, runs in ((1 << 19, owners), (0, owners if len(order) == 2 else 3)):
        monkeypatch.setattr(lane_weights, "_COPY_BYTES", most)
        counting.copied.clear()
        there = DeviceLora(lora, torch.full((adapter_bytes(lora),), 255, dtype=torch.uint8), order)
        assert len(counting.copied) == runs * matrices and sum(counting.copied) == there.carried
        for batch, own in zip(order, there.batches(LaneDevice("cpu")), strict=True):
            at = list(batch)
            inputs = [name for name in ("gate", "up") if f"{name}_a" in whole.named()]
            assert own.scale == whole.scale
            for found, name in ((own.down_a, "down_a"), (own.down_b, "down_b")):
                assert torch.equal(found, getattr(whole, name)[at])
            for number, name in enumerate(inputs):
                a = own.in_a.view(len(at), len(inputs), RANK, 48)[:, number]
                assert torch.equal(a, getattr(whole, f"{name}_a")[at])
                assert torch.equal(own.in_b[number], getattr(whole, f"{name}_b")[at])


def test_held_experts_are_used_where_they_lie(counting: Counting) -> None:
    """Those of a batch that was copied to the device at once; others are brought together there."""
    weights = case_of().weights
    host = PackedExperts.of({e: expert_tensors(weights, e) for e in range(EXPERTS)})
    held, device = HeldExperts(6), LaneDevice("cpu")
    held.fit(host)
    for batch in ((4, 7, 2), (1, 0, 3)):
        there, carried = held.get(0, host, batch, CPU)
        assert carried == 3 * host.parcels[0].carried
        check(there.in_place(batch), weights, batch)
    buffer = torch.empty(3 * host.nbytes, dtype=torch.uint8)
    before = len(counting.copied)
    for batch in ((7, 4, 2), (2, 0, 1), (3,)):  # (2, 1) would be neighbours
        there, carried = held.get(0, host, batch, CPU)
        assert carried == 0 and (there.in_place(batch) is None) == (len(batch) > 1)
        check(there.copy_into(buffer, batch, device), weights, batch)
    assert len(counting.copied) == before
    there, carried = held.get(0, host, (7, 9), CPU)  # one here, for the other there is no place
    assert carried == host.parcels[9].carried and there.in_place((7, 9)) is None
    check(there.copy_into(buffer, (7, 9), device), weights, (7, 9))
    there, _ = held.get(2, host, (5, 6), CPU)  # another layer's take the places
    check(there.in_place((5, 6)), weights, (5, 6))


def test_residents_lie_one_after_the_other() -> None:
    weights = case_of().weights
    moved = PackedExperts.of({e: expert_tensors(weights, e) for e in (1, 3, 4)}).moved_to(CPU)
    check(moved.in_place((1, 3)), weights, (1, 3))
    assert moved.in_place((3, 1)) is None
    buffer = torch.empty(2 * moved.nbytes, dtype=torch.uint8)
    check(moved.copy_into(buffer, (4, 1), LaneDevice("cpu")), weights, (4, 1))


def check(found: dict[str, Tensor] | None, weights: ExpertWeights, batch: Sequence[int]) -> None:
    assert found is not None
    for number, e in enumerate(batch):
        for name, wanted in expert_tensors(weights, e).items():
            assert torch.equal(found[name][number], wanted), (name, e)
