"""Which modules are RMS norms is found by trying; torch's kernel stands in for those alone."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kt_ray.dims.layer_params import WRITTEN_OUT_NORMS
from kt_ray.model import fused_norms
from kt_ray.model.build import build_stage_model
from kt_ray.model.fused_norms import fuse_norms
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.families import LAYERS, save_whole, write_config


class Norm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size: int, offset: float = 0.0, centered: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, size).bfloat16(), requires_grad=False)
        self.variance_epsilon, self.offset, self.centered = 1e-6, offset, centered

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide - wide.mean(-1, keepdim=True) if self.centered else wide
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.offset + self.weight) * wide.to(x.dtype)


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's path on the CPU."""
    monkeypatch.setattr(fused_norms, "takes_kernel", lambda x: x.dtype == torch.bfloat16)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def test_as_in_float64_and_rounded_once(everywhere: None) -> None:
    norm = Norm(96)
    written_out, exact = copy.deepcopy(norm), copy.deepcopy(norm).double()
    assert fuse_norms([norm]) == 1
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn((7, 5, 96), generator=generator).bfloat16() for _ in range(2))
    results = []
    for module, dtype in ((norm, torch.bfloat16), (written_out, torch.bfloat16), (exact, torch.float64)):
        leaf = x.to(dtype, copy=True).requires_grad_()
        if dtype == torch.float64:  # the module itself goes through float32
            y = leaf * torch.rsqrt(leaf.pow(2).mean(-1, keepdim=True) + 1e-6) * module.weight
        else:
            y = module(leaf)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy.to(dtype))))
    for one, twice, expected in zip(*results, strict=True):
        assert error(one, expected) <= min(2**-8, error(twice, expected))


@pytest.mark.parametrize(
    "module", [Norm(16, offset=1.0), Norm(16, centered=True), Gated(16), nn.LayerNorm(16), nn.Linear(16, 16)]
)
def test_others_stay(everywhere: None, module: nn.Module) -> None:
    before = copy.deepcopy(module.state_dict())
    assert fuse_norms([module]) == 0 and "forward" not in module.__dict__
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


def test_another_epsilon_is_another_norm(everywhere: None) -> None:
    norm = Norm(16)
    norm.eps = 1e-3  # not what it uses
    del norm.variance_epsilon
    norm.forward = lambda x: F.rms_norm(x, (16,), norm.weight, 1e-6)  # type: ignore[method-assign]
    assert fuse_norms([norm]) == 0


def test_the_cpu_and_other_types_keep_their_bits() -> None:
    norm = Norm(16)
    written_out = copy.deepcopy(norm)
    fuse_norms([norm])
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(3, 16).to(dtype)
        assert torch.equal(norm(x), written_out(x))


def test_a_copy_has_weights_of_its_own(everywhere: None) -> None:
    """layer_checks.py probes float32 copies of layers."""
    norm = Norm(16)
    fuse_norms([norm])
    other = copy.deepcopy(norm)
    other.weight.data *= 2
    x = torch.randn(3, 16).bfloat16()
    assert torch.equal(other(x), 2 * norm(x))


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "qwen3_moe", "gpt_oss", "glm4_moe", "mixtral", "qwen3_next", "phimoe", "cohere2_moe"],
)
def test_families(tmp_path: Path, family: str) -> None:
    """What a plan counts as one kernel is found to be one."""
    path = write_config(tmp_path, family)
    save_whole(path)
    model = build_stage_model(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="bfloat16"))
    assert (fuse_norms(model.layers.values()) == 0) == (family in WRITTEN_OUT_NORMS)
