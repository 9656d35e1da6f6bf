"""A run does not start on a device whose experts are wrong, or that fails."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kt_ray.errors import UserError
from kt_ray.experts.lane_check import check_lane
from kt_ray.gpu import Driver
from tests.helpers.devices import DEVICES
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.matrices import VARIANTS, quantised_case
from tests.helpers.native import ACTIVATIONS, Shape, make_case
from tests.helpers.runs import config_for, local_cluster

SMALL = Shape(tokens=2, slots=1, experts=3, hidden=96, inter=64, rank=2)


def device_named(kind: str) -> str:
    return "cpu" if kind == "cpu" else "cuda:0"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_right_passes(dtype: torch.dtype, activation: str, bias: bool, device: str) -> None:
    weights = make_case(SMALL, dtype, activation=activation, bias=bias).weights
    state = torch.get_rng_state()
    check_lane(device_named(device), weights)
    if dtype == torch.bfloat16:
        check_lane(device_named(device), weights, float8=True)
    assert torch.equal(torch.get_rng_state(), state), "a run draws as it would without"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_formats(variant: str, device: str) -> None:
    shape = dataclasses.replace(SMALL, hidden=512, inter=256)
    check_lane(device_named(device), quantised_case(shape, variant).weights)


class Faulty(Driver):
    """A driver whose products go wrong."""

    def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fault = fault

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return self.fault(super().product(a, b))


def _lost_rows(out: Tensor) -> Tensor:
    out[..., ::8, :] = 0
    return out


def _not_a_number(out: Tensor) -> Tensor:
    out.view(-1)[0] = torch.nan
    return out


def _refused(_: Tensor) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")


def _mistaken(_: Tensor) -> Tensor:
    raise TypeError("_scaled_mm() got an unexpected keyword argument")


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "every eighth row": (_lost_rows, r"a GPU computes experts wrongly; at cpu, .* of 16 tokens"),
    "a tenth": (lambda out: out * 1.1, "a relative error of .*; required at most 5%"),
    "not a number": (_not_a_number, "a relative error of nan%"),
    "another torch": (_mistaken, "a GPU fails where it is to compute experts; at cpu; found _scaled_mm"),
    "no kernel": (
        _refused,
        "a GPU fails where it is to compute experts; at cpu; found CUDA error: no kernel",
    ),
}


@contextlib.contextmanager
def faulty(fault: Callable[[Tensor], Tensor]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kt_ray.gpu._driver", Faulty(fault))
        yield


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_wrong_does_not(fault: str) -> None:
    weights = make_case(SMALL, torch.bfloat16).weights
    broken, message = FAULTS[fault]
    with faulty(broken), pytest.raises(UserError, match=message) as refused:
        check_lane("cpu", weights)
    with faulty(broken), pytest.raises(UserError, match="; at host 1 cuda:3 ") as named:
        check_lane("cpu", weights, "host 1 cuda:3 (GPU-aa)")
    assert str(named.value) == str(refused.value).replace("at cpu", "at host 1 cuda:3 (GPU-aa)")
    assert "set rule.experts.stream=off rule.experts.gpu_resident=0" in str(refused.value)


def test_what_a_checkpoint_has_wrong_is_not_the_gpu_s() -> None:
    weights = make_case(SMALL, torch.bfloat16).weights
    assert isinstance(weights.up, Tensor)
    weights.up[0, 0, 0] = torch.inf
    check_lane("cpu", weights)


def test_the_default_type_is_another_s() -> None:
    """In one process a worker that builds its model changes it meanwhile."""
    weights = make_case(SMALL, torch.bfloat16).weights
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_lane("cpu", weights, float8=True)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "keys",
    [
        ("rule.experts.stream=0.5",),
        ("rule.experts.gpu_resident=8",),
        ("rule.experts.stream=0.5", "rule.experts.stream_to=workers"),
    ],
    ids=["streamed", "resident", "workers"],
)
def test_a_run_does_not_start(tmp_path: Path, keys: tuple[str, ...]) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule.device=cpu", "rule.experts.lane_device=cpu", *keys)
    wrong = pytest.raises(UserError, match="a GPU computes experts wrongly")
    with faulty(_lost_rows), wrong, local_cluster(path, config):
        pass
