"""Weights outside the experts that are stored quantised: dequantised on load, or kept; the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, check_non_experts, load_non_experts
from kt_ray.checkpoint.quantized_linear import QuantizedLinear, dequantized
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.families import randomise, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.quantised_weights import BLOCK, FORMATS, dequantise, quantise, write_quantised
from tests.helpers.stages import backward, forward, pass_spec

ROWS = random_rows(3)
LAYERS = 3  # the first without experts
# q_lora_rank 64: every quantised matrix has whole groups of 32 columns
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "q_lora_rank"), 64),
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Writes a DeepSeek-V3 with plain weights and attention biases."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = write_config(tmp_path_factory.mktemp("plain"), "deepseek_v3", attention_bias=True, **SIZES)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(made), dtype=torch.float32)
    randomise(model)
    model.save_pretrained(made)
    return lambda path: Path(shutil.copytree(made, path))


def quantised_names(path: Path) -> list[str]:
    """Linear weights outside the experts, the head among them."""
    index = CheckpointIndex.open(path)
    keep = ("norm", "gate.weight", "embed_tokens", ".experts.")
    return sorted(
        n
        for n in index.names
        if n.endswith(".weight") and not any(k in n for k in keep) and index.shape(n)[-1] % 32 == 0
    )


def stage_of(
    path: Path, dtype: str, *, keep: bool, layers: tuple[int, int] = (0, LAYERS), **more: Any
) -> Stage:
    lora = LoraConfig(rank=2, alpha=4.0)
    return Stage(StageSpec(str(path), layers, LAYERS, dtype=dtype, lora=lora, keep_quantized=keep, **more))


def gradients(stage: Stage, experts: dict[int, Any]) -> tuple[float, dict[str, torch.Tensor]]:
    spec = pass_spec(ROWS, groups=2, micro=2)
    for name, parameter in stage.parameters.items():
        if name.endswith("lora_B.weight"):
            with torch.no_grad():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1
                )
    loops = forward([stage], spec, EagerExchange(experts))  # type: ignore[arg-type]
    loss = loops[-1].loss_sum
    backward([stage], loops)
    return loss, {n: p.grad.clone() for n, p in stage.parameters.items() if p.grad is not None}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_and_dequantised_are_one_model(
    tmp_path: Path, plain: Callable[[Path], Path], kind: str, dtype: str
) -> None:
    """Loss and every LoRA gradient bit for bit, as with a plain checkpoint of the dequantised weights.

    So, too, with weights that pass through slots as they are stored. By ranges of heads, which cut what is
    decoded, also through blocks of scales: gradients to rounding.
    """
    path = plain(tmp_path / "stored")
    names = quantised_names(path)
    assert "lm_head.weight" in names and any("shared_experts" in n for n in names)
    write_quantised(path, names, kind)
    torch_dtype = getattr(torch, dtype)
    judge = dequantise(path, tmp_path / "plain", torch_dtype)
    stages = [
        stage_of(judge, dtype, keep=False),
        stage_of(path, dtype, keep=False),
        stage_of(path, dtype, keep=True),
        stage_of(path, dtype, keep=True, streamed=tuple(range(LAYERS)), slots=2),
    ]
    experts = Eager(judge, stages[0].model).experts
    (loss, grads), *others = [gradients(stage, experts) for stage in stages]
    assert any(g.abs().max() > 0 for g in grads.values())
    for other_loss, other in others:
        assert other_loss == loss
        assert grads.keys() == other.keys()
        assert all(torch.equal(grads[n], other[n]) for n in grads)
    if dtype == "float32":
        ranges = stage_of(path, dtype, keep=True, activations="ranges", head_ranges=4)
        found, other = gradients(ranges, experts)
        assert found == pytest.approx(loss, rel=1e-6) and grads.keys() == other.keys()
        for name, grad in grads.items():
            assert float((other[name] - grad).norm()) <= 1e-5 * float(grad.norm()), name
    kept = [m for m in stages[2].model.causal.modules() if isinstance(m, QuantizedLinear)]
    assert len(kept) == len(names)
    assert not any(isinstance(m, QuantizedLinear) for m in stages[1].model.causal.modules())
    saved = stages[1].weight_bytes - stages[2].weight_bytes
    size = torch_dtype.itemsize
    weights = sum(m.in_features * m.out_features for m in kept)
    assert saved == weights * size - sum(m.values.nbytes + m.scales.nbytes for m in kept)


def test_report_and_state(tmp_path: Path, plain: Callable[[Path], Path]) -> None:
    path = plain(tmp_path / "m")
    names = quantised_names(path)
    write_quantised(path, names, "fp8_block")
    index = CheckpointIndex.open(path)
    model = build_on_meta(StageSpec(str(path), (0, LAYERS), LAYERS, dtype="bfloat16"))
    for context in model.causal.modules():
        for name in list(context._parameters) if hasattr(context, "_apply_gate") else []:
            context.register_parameter(name, None)
    check_non_experts(index, model.causal)
    report = load_non_experts(
        index, model.causal, layers=(0, LAYERS), dtype=torch.bfloat16, device="cpu", keep_quantized=True
    )
    kept = {f"{n}.weight" for n, m in model.causal.named_modules() if isinstance(m, QuantizedLinear)}
    assert kept == set(names) and report.unexpected == [] and report.ignored == []


@pytest.mark.parametrize("kind", FORMATS)
def test_the_module_alone(kind: str, tmp_path: Path) -> None:
    """The module alone: its weight, a bias, and its backward against autograd on the dequantised weight."""
    from safetensors.torch import save_file

    torch.manual_seed(1)
    tensors = quantise("a.weight", torch.randn(40, 96), kind)
    save_file(
        {k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors", {"format": "pt"}
    )
    quantization: dict[str, Any] = {"weight_block_size": [BLOCK, BLOCK]}
    if kind in ("gptq", "awq"):
        quantization = {"quant_method": kind, "group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    index = CheckpointIndex.open(tmp_path)
    stored = index.matrices["a.weight"].read()
    linear = QuantizedLinear(stored, torch.float32, "cpu")
    bias = torch.nn.Parameter(torch.randn(40), requires_grad=False)
    linear.register_parameter("bias", bias)
    weight = index.value("a.weight")
    assert torch.equal(linear.weight, weight) and torch.equal(dequantized(stored, "cpu")[0], weight)
    assert torch.equal(linear.float().weight, weight), "casting the module does not touch the values"
    x = torch.randn(2, 3, 96, requires_grad=True)
    y = linear(x)
    want = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(y, want)
    dy = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(out, x, dy)[0] for out in (y, want)))


def test_wrong_shape_is_refused(tmp_path: Path, plain: Callable[[Path], Path]) -> None:
    path = plain(tmp_path / "m")
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj.weight"
    tensors |= quantise(name, tensors[name][:64], "int8")
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for keep in (False, True):
        with pytest.raises(UserError, match=r"disagree about a shape.*gate_proj.*found \[64, 64\]"):
            stage_of(path, "float32", keep=keep)
