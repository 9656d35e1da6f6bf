"""PiSSA: the function of the model at the start, the adapter for unchanged weights, what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model import pissa
from kt_ray.model.lora import init_lora_a
from kt_ray.model.pissa import doubled_shape, relative_to_weights, take_principal
from kt_ray.pulse import beats
from tests.helpers.composing import compose
from tests.helpers.hf_reference import Reference, random_rows
from tests.helpers.stages import make_stages, pass_spec, run

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16"])
@pytest.mark.parametrize("rslora", [False, True])
def test_takes_the_largest_singular_values(init: str, rslora: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(12, 20)
    before = linear.weight.detach().clone()
    lora = LoraConfig(rank=4, alpha=6.0, rslora=rslora, init=init, experts=False)
    a, b = torch.empty(4, 12), torch.empty(20, 4)
    take_principal(linear, a, b, lora, "0:name")
    torch.testing.assert_close(linear.weight + lora.scale * b @ a, before, atol=1e-6, rtol=0)
    values = torch.linalg.svdvals(before)
    rtol = 1e-4 if init == "pissa" else 1e-2  # the randomised decomposition is close, not exact
    torch.testing.assert_close(torch.linalg.svdvals(lora.scale * b @ a)[:4], values[:4], rtol=rtol, atol=1e-5)
    torch.testing.assert_close(torch.linalg.svdvals(linear.weight.detach())[0], values[4], rtol=rtol, atol=0)


def test_equals_pefts() -> None:
    import peft

    torch.manual_seed(0)
    holder = torch.nn.Sequential(torch.nn.Linear(12, 20, bias=False))
    mine = torch.nn.Linear(12, 20, bias=False)
    mine.load_state_dict(holder[0].state_dict())
    a, b = torch.empty(4, 12), torch.empty(20, 4)
    take_principal(mine, a, b, LoraConfig(rank=4, alpha=6.0, init="pissa", experts=False), "")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights="pissa")
    theirs = peft.inject_adapter_in_model(config, holder)[0]
    torch.testing.assert_close(mine.weight, theirs.get_base_layer().weight, atol=1e-6, rtol=0)
    torch.testing.assert_close(b @ a, theirs.lora_B["default"].weight @ theirs.lora_A["default"].weight)


def test_adapter_for_the_unchanged_weights() -> None:
    torch.manual_seed(0)
    names = ("m.lora_A.weight", "m.lora_B.weight")
    (a, b), (a0, b0) = [(torch.randn(3, 7), torch.randn(5, 3)) for _ in range(2)]
    doubled = relative_to_weights(
        dict(zip(names, (a, b), strict=False)), dict(zip(names, (a0, b0), strict=False))
    )
    assert {n: doubled_shape(n, tuple(t.shape)) for n, t in zip(names, (a, b), strict=False)} == {
        n: tuple(t.shape) for n, t in doubled.items()
    }
    torch.testing.assert_close(doubled[names[1]] @ doubled[names[0]], b @ a - b0 @ a0)


def test_gaussian_is_normal_with_deviation_one_over_rank() -> None:
    value = init_lora_a(0, "x", (8, 4096), "gaussian")
    assert float(value.std()) == pytest.approx(1 / 8, rel=0.02) and abs(float(value.mean())) < 0.003
    assert torch.equal(value, init_lora_a(0, "x", (8, 4096), "gaussian"))
    assert not torch.equal(value, init_lora_a(1, "x", (8, 4096), "gaussian"))


def test_a_stage_computes_the_same_and_exports_for_the_unchanged_weights(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen3_moe")
    lora = LoraConfig(rank=2, alpha=6.0, init="pissa", experts=False)
    (stage,) = make_stages(path, (0, 3), lora)
    base = Reference(path, LoraConfig(rank=2, experts=False))
    rows = random_rows(3)
    found = run([stage], pass_spec(rows, kind="eval"), base).logits
    for row, expected in zip(rows, base.run(rows, train=False).logits, strict=True):
        assert (found[row.sample] - expected).norm() <= 1e-4 * expected.norm()
    prefix = "model.layers.1.self_attn.q_proj"
    names = [f"{prefix}.lora_{side}.weight" for side in "AB"]
    original = base.model.get_submodule(prefix).weight
    left = stage.model.layers[1].self_attn.q_proj.get_base_layer().weight  # type: ignore[union-attr]
    assert not torch.allclose(left, original, atol=1e-3)  # type: ignore[arg-type]
    with torch.no_grad():
        for name in names:
            stage.parameters[name].add_(0.01)
    a, b = (stage.parameters[name].detach() for name in names)
    wide_a, wide_b = (stage.adapter()[name] for name in names)
    assert wide_a.shape[0] == wide_b.shape[1] == 4
    trained = left + lora.scale * b @ a  # type: ignore[operator]
    torch.testing.assert_close(original + lora.scale * wide_b @ wide_a, trained, atol=1e-5, rtol=0)  # type: ignore[operator]
    stage.load_parameters(stage.initial_parameters())
    assert not stage.adapter()[names[0]][:2].sub(stage.adapter()[names[0]][2:]).any()


def test_each_decomposition_is_something_done(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model has hundreds, each of seconds or more: an actor at them is not stuck."""
    done: list[int] = []

    def noted(*args: Any) -> None:
        done.append(beats())
        take_principal(*args)

    monkeypatch.setattr("kt_ray.model.lora.take_principal", noted)
    make_stages(checkpoint("qwen3_moe"), (0, 3), LoraConfig(rank=2, init="pissa", experts=False))
    assert len(done) > 2 and len(set(done)) == len(done)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.init=pissa"], r"lora\.init=pissa with lora\.experts=true .*weights stay as stored"),
        (["lora.init=pissa", "lora.experts=false", "model.keep_quantized=true"], "keep_quantized"),
        (["lora.dora=true"], r"lora\.dora=true does not reach the routed experts.*set lora\.experts=false"),
        (
            ["lora.dora=true", "lora.experts=false", "lora.init=pissa"],
            r"weights that lora\.init=pissa changes",
        ),
        (
            ["lora.dora=true", "lora.experts=false", "rule.attention_output=retain"],
            r"multiplies again for backward.*set rule\.attention_output=auto",
        ),
        (["lora.dora=true", "lora.experts=false", "optim=muon"], r"trains vectors, and optim\.name=muon"),
        (["lora.rank_pattern={q_proj: 300}"], r"lora\.rank_pattern\.q_proj=300 is out of range"),
        (["lora.alpha_pattern={q_proj: 0}"], r"lora\.alpha_pattern\.q_proj=0 is out of range"),
        (["lora.rank_pattern={*proj: 4}"], r"is not a regular expression .*correct lora\.rank_pattern"),
        (["optim=deepspeed_cpu_adam", "lora.experts=false"], r"experts' LoRA, but lora\.experts=false"),
        (["optim.decay=2.5"], r"optim\.decay=2\.5 is neither a share"),
    ],
)
def test_refused_before_anything_starts(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        compose(overrides)


@pytest.mark.parametrize("shape", [(48, 30), (30, 48)])
def test_the_iteration_is_torchs_from_a_start_of_the_cpu(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, vh = pissa._low_rank(weight, 4, 2, "module")
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(hashlib.sha256(b"module").digest()[:7], "little"))
        want = torch.svd_lowrank(weight, 4, niter=2)
    assert torch.equal(s, want[1]) and torch.equal(u, want[0]) and torch.equal(vh, want[2].T)
