"""The lane on CUDA against the engine and against the stand-in: run where there is a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kt_ray.experts.lane_device import LaneDevice, PinnedWeights
from kt_ray.native import allocate
from kt_ray.placement import lane_share
from tests.experts.test_lane_host import LANES, close_to, results
from tests.experts.test_lane_math import expected, run_in_lane, uneven
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.matrices import VARIANTS
from tests.helpers.native import Shape, make_case

pytestmark = [
    pytest.mark.accept("lane"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_format(name: str, recompute: bool) -> None:
    case = expected(name, 0.2)
    case.check(run_in_lane(case, recompute=recompute, devices=("cuda:0",)))


@pytest.mark.parametrize("activations", ["retain", "recompute"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LANES)
def test_a_lane_changes_nothing_but_rounding(
    tmp_path: Path, name: str, dtype: torch.dtype, activations: str
) -> None:
    path = build_checkpoint(tmp_path, "qwen3_moe", expert_dtype=dtype)
    lane = replace(LANES[name], devices=("cuda:0",))
    found, host = results(path, lane, 0.2, activations)
    host.close()
    again, host = results(path, lane, 0.2, activations)
    host.close()
    plain, host = results(path, None, 0.2, activations)
    host.close()
    assert all(torch.equal(found[n], again[n]) for n in found), "not the same bits twice"
    close_to(found, plain, dtype)


def test_weights_are_page_locked_once() -> None:
    device = LaneDevice("cuda:0")
    weights, lock = allocate((4 << 20,), torch.uint8), PinnedWeights(device)
    lock.add([weights[:10], weights[20:]])
    assert lock.refusal is None and lock.bytes == weights.untyped_storage().nbytes() and weights.is_pinned()
    lock.release()
    assert not weights.is_pinned()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_every_formula(dtype: torch.dtype, activation: str, recompute: bool) -> None:
    """One row beside 700, sizes of no multiple."""
    shape = Shape(tokens=720, hidden=37, inter=29)
    case = uneven(make_case(shape, dtype, dropout=0.2, activation=activation, bias=True)).expect()
    case.check(run_in_lane(case, recompute=recompute, devices=("cuda:0",)))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_streams_keep_experts_apart(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many experts through two buffers, each large enough that copies and products overlap."""
    monkeypatch.setattr(lane_share, "LANE_BATCH", batch)
    shape = Shape(tokens=512, slots=4, experts=48, hidden=1024, inter=512)
    case = make_case(shape, torch.bfloat16)
    first = run_in_lane(case, devices=("cuda:0",))
    for _ in range(20):
        again = run_in_lane(case, devices=("cuda:0",))
        assert all(torch.equal(first[name], again[name]) for name in first)
