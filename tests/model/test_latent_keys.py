"""Latent attention over an unexpanded cache, against keys and values that are made of all of it."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn

from kt_ray.checkpoint.quantized_linear import QuantizedLinear
from kt_ray.generate.requests import Sampling
from kt_ray.model import latent_keys
from kt_ray.native import ExpertMatrix
from tests.helpers.devices import DEVICES
from tests.helpers.families import save_whole, write_config
from tests.helpers.generation import answers, random_prompts
from tests.helpers.runs import config_for, local_cluster

B, H, M, D, P, E, R = 3, 4, 21, 24, 8, 16, 40
SCALE = 0.2


def made(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A module, one query of each head, and a cache."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    linear = nn.Linear(R, H * (D + E), bias=False, dtype=dtype)
    linear.weight = nn.Parameter(random(H * (D + E), R) * R**-0.5, requires_grad=False)
    return SimpleNamespace(kv_b_proj=linear), random(B, H, 1, D + P), random(B, 1, M, P), random(B, 1, M, R)


def adapted(module: Any) -> None:
    """With a large adapter."""
    generator = torch.Generator().manual_seed(1)
    linear = PeftLinear(module.kv_b_proj, "default", peft.LoraConfig(), r=5, lora_alpha=15)
    for side in (linear.lora_A, linear.lora_B):
        weight = side["default"].weight
        weight.data = torch.randn(weight.shape, generator=generator) * 0.3
    module.kv_b_proj = linear


def expanded(module: Any, query: Tensor, rotated: Tensor, latents: Tensor, mask: Tensor | None) -> Tensor:
    """[B, 1, H, E] in float64, as transformers' modules have it."""
    linear = module.kv_b_proj
    inner = linear.get_base_layer() if isinstance(linear, PeftLinear) else linear
    weight = inner.weight.double()
    if isinstance(linear, PeftLinear) and not linear.disable_adapters:
        up, down = linear.lora_B["default"].weight.double(), linear.lora_A["default"].weight.double()
        weight = weight + linear.scaling["default"] * up @ down
    both = (latents.double() @ weight.T).view(B, M, H, D + E).transpose(1, 2)
    key = torch.cat((both[..., :D], rotated.double().expand(B, H, M, P)), -1)
    scores = SCALE * query.double() @ key.transpose(2, 3)
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask == 0
        scores = scores.masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ both[..., D:]).transpose(1, 2)


def masks(dtype: torch.dtype) -> dict[str, Tensor | None]:
    padded = (torch.arange(M) >= torch.tensor([0, 7, 20])[:, None])[:, None, None]
    added = torch.zeros(B, 1, 1, M, dtype=dtype).masked_fill(~padded, torch.finfo(dtype).min)
    heads = torch.randn(B, H, 1, M, generator=torch.Generator().manual_seed(2)) > -1
    return {"none": None, "padded": padded, "added": added, "own of each head": heads}


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("mask", ["none", "padded", "added", "own of each head"])
@pytest.mark.parametrize("adapter", ["none", "used", "switched off"])
@pytest.mark.parametrize("device", DEVICES)
def test_as_expanded(dtype: torch.dtype, most: float, mask: str, adapter: str, device: str) -> None:
    module, query, rotated, latents = made(dtype)
    if adapter != "none":
        adapted(module)
        module.kv_b_proj._disable_adapters = adapter == "switched off"
    seen = masks(dtype)[mask]
    want = expanded(module, query, rotated, latents, seen)
    module.kv_b_proj.to(device)
    inputs = [value.to(device) for value in (query, rotated, latents)]
    with torch.no_grad():
        got = latent_keys.attend(module, *inputs, None if seen is None else seen.to(device), SCALE)
    assert got.shape == (B, 1, H, E) and got.dtype == dtype
    assert (got.cpu() - want).norm() <= most * want.norm()


def test_a_weight_that_stays_quantised() -> None:
    module, query, rotated, latents = made(torch.bfloat16)
    shape = module.kv_b_proj.weight.shape
    values = torch.randint(
        -127, 128, (1, *shape), dtype=torch.int8, generator=torch.Generator().manual_seed(3)
    )
    stored = ExpertMatrix.int8(values, torch.full((1, shape[0], 1), 1e-3))
    module.kv_b_proj = QuantizedLinear(stored, torch.bfloat16, "cpu")
    want = expanded(module, query, rotated, latents, None)
    with torch.no_grad():
        got = latent_keys.attend(module, query, rotated, latents, None, SCALE)
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize(
    ("family", "overrides", "each_step"),
    [
        ("deepseek_v2", (), False),
        ("deepseek_v3", (), False),
        ("deepseek_v32", (), False),
        ("longcat_flash", (), False),
        ("deepseek_v3", ("generate.latent_keys=expanded",), True),
        ("deepseek_v3", ("model.attn_implementation=eager",), True),
        ("deepseek_v3", ("lora.dora=true", "lora.experts=false"), True),
        ("deepseek_v3", ("lora.dora=true", "lora.experts=false", "lora.target_modules=[o_proj]"), False),
    ],
)
def test_one_token_makes_no_keys_of_what_is_cached(
    tmp_path: Path, family: str, overrides: Sequence[str], each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_config(tmp_path / "base", family)
    save_whole(base)
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    (attention,) = {c for c in vars(modeling).values() if isinstance(c, type) and "expand_kv" in vars(c)}
    widths: list[int] = []
    expand = attention.expand_kv

    def noted(self: Any, latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        widths.append(latents.shape[2])
        found: tuple[Tensor, Tensor] = expand(self, latents, rotated)
        return found

    monkeypatch.setattr(attention, "expand_kv", noted)
    config = config_for(base, "rule=cpu_1worker_1socket", *overrides)
    with local_cluster(base, config) as cluster:
        widths.clear()  # of what a model is asked while it is built
        answers(cluster, random_prompts((9,)), Sampling(max_new_tokens=4))
        layers = cluster.plan.dims.num_layers * cluster.plan.dims.attentions
    if not latent_keys.caches_latents(attention):  # but their expansions, one by one
        assert widths == [n for n in (9, 1, 1, 1) for _ in range(layers)]
        return
    assert widths == [n for n in (9, 10, 11, 12) for _ in range(layers) if n == 9 or each_step]


class _CachesFirst:
    def forward(self, x: Any, cache: Any) -> Any:
        latents = cache.update(x)
        return self.expand_kv(latents)  # type: ignore[attr-defined]


class _ExpandsFirst:
    def forward(self, x: Any, cache: Any) -> Any:
        keys = self.expand_kv(x)  # type: ignore[attr-defined]
        return cache.update(keys)


def test_who_caches_before_expanding() -> None:
    """DeepSeek-V3.2 does it the other way round before transformers 5.18."""
    assert latent_keys.caches_latents(_CachesFirst) and not latent_keys.caches_latents(_ExpandsFirst)
