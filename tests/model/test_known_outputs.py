"""What a recomputed layer need not multiply: found by trying, and without a change of any bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kt_ray.config.schema import LoraConfig
from kt_ray.model.known_outputs import KnownOutputs
from kt_ray.model.lora_linear import Parts, with_adapters
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.families import LAYERS, save_whole, write_config
from tests.helpers.hf_reference import Reference, random_rows
from tests.helpers.stages import make_stages, pass_spec, run

Checkpoint = Callable[..., Path]
LORA = LoraConfig(rank=2, alpha=4.0)
ROWS = random_rows(5)


def named(stage: Stage) -> dict[int, tuple[str | None, list[str]]]:
    """Layer -> names of the module whose output is retained, and of those whose outputs nobody uses."""
    found = {}
    for layer, known in stage.known_outputs.items():
        names: dict[nn.Module | None, str | None] = {None: None}
        names |= {module: name for name, module in stage.model.layers[layer].named_modules()}
        found[layer] = (names[known.retained], [str(names[module]) for module in known.unused])
    return found


def stage_of(folder: Path, family: str, **changes: Any) -> Stage:
    path = write_config(folder / family, family, **changes)
    save_whole(path)
    return Stage(
        StageSpec(str(path), (0, LAYERS), LAYERS, dtype="float32", lora=LORA, attention_output="retain")
    )


@pytest.mark.parametrize(
    ("family", "first", "last"),
    [
        (
            "deepseek_v3",
            ("self_attn.o_proj", ["mlp.down_proj"]),
            ("self_attn.o_proj", ["mlp.shared_experts.down_proj"]),
        ),
        ("qwen3_moe", ("self_attn.o_proj", []), ("self_attn.o_proj", [])),
        # a sigmoid gate multiplies the shared expert's output, and keeps it
        ("qwen2_moe", ("self_attn.o_proj", []), ("self_attn.o_proj", [])),
        # attention and experts are side by side: nobody needs what attention gives
        ("cohere2_moe", *[("self_attn.q_proj", ["self_attn.o_proj"])] * 2),
        # a norm comes after the dense MLP
        ("afmoe", ("mlp.down_proj", []), ("self_attn.o_proj", [])),
        ("qwen3_next", ("linear_attn.out_proj", []), ("self_attn.o_proj", [])),
        # queries, as wide as the hidden state, are viewed as complex numbers
        (
            "llama4_text",
            ("self_attn.o_proj", ["feed_forward.down_proj"]),
            ("self_attn.o_proj", ["feed_forward.shared_expert.down_proj"]),
        ),
        # a second attention follows the first MLP
        ("longcat_flash", *[("self_attn.0.o_proj", ["mlps.1.down_proj"])] * 2),
    ],
)
def test_what_is_found(tmp_path: Path, family: str, first: object, last: object) -> None:
    found = named(stage_of(tmp_path, family))
    assert (found[0], found[LAYERS - 1]) == (first, last)


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32"])
def test_what_chooses_positions_is_computed_again(tmp_path: Path, family: str) -> None:
    """In short rows an indexer changes nothing, which is no reason to leave it out of long ones."""
    for _, unused in named(stage_of(tmp_path, family)).values():
        assert not any("indexer" in name or "compressor" in name for name in unused)


@pytest.mark.parametrize("targets", ["auto", ["q_a_proj", "gate_proj"]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_changes(checkpoint: Checkpoint, dtype: str, targets: Any) -> None:
    """With adapters of these modules and without: the same losses and gradients, with fewer products."""
    path = checkpoint("deepseek_v3")
    lora = replace(LORA, target_modules=targets)
    reference = Reference(path, lora)
    reference.randomize_b(1)
    (stage,) = make_stages(path, (0, 3), lora, dtype=dtype, attention_output="retain")
    stage.load_parameters({name: reference.parameters[name] for name in stage.parameters})
    found, spec = stage.known_outputs, pass_spec(ROWS, groups=2, micro=2)
    stage.known_outputs = {}
    whole = run([stage], spec, reference)
    for known in (found, {layer: replace(each, retained=None) for layer, each in found.items()}):
        stage.known_outputs = known
        result = run([stage], spec, reference)
        assert result.loss == whole.loss
        for name, grad in whole.grads.items():
            assert torch.equal(result.grads[name], grad), name
    assert all(each.retained is not None and each.unused for each in found.values())


def test_they_are_not_multiplied(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward multiplies once for each micro-batch; the recomputation, only what is not known."""
    path = checkpoint("deepseek_v3")
    reference = Reference(path, LORA)
    (stage,) = make_stages(path, (0, 3), LORA, attention_output="retain")
    spec, weights = pass_spec(ROWS, groups=2, micro=2), {}
    for layer, decoder in stage.model.layers.items():
        for name, module in decoder.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("base_layer"):
                weights[module.weight.data_ptr()] = f"{layer}.{name.removesuffix('.base_layer')}"
    counts = dict.fromkeys(weights.values(), 0)
    multiply = torch.nn.functional.linear

    def counted(x: torch.Tensor, weight: torch.Tensor, *more: Any) -> torch.Tensor:
        if weight.data_ptr() in weights:
            counts[weights[weight.data_ptr()]] += 1
        return multiply(x, weight, *more)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    run([stage], spec, reference)
    assert counts["2.self_attn.q_a_proj"] == 6 and counts["2.mlp.shared_experts.up_proj"] == 6
    assert counts["2.self_attn.o_proj"] == counts["2.mlp.shared_experts.down_proj"] == 3
    assert counts["0.self_attn.o_proj"] == counts["0.mlp.down_proj"] == 3


def test_dora_multiplies_again(checkpoint: Checkpoint) -> None:
    """The gradient of a magnitude needs W x."""
    lora = replace(LORA, dora=True, experts=False)
    (stage,) = make_stages(checkpoint("deepseek_v3"), (0, 3), lora, attention_output="retain")
    assert all(known == KnownOutputs() for known in stage.known_outputs.values())


def test_without_retaining_only_what_nobody_uses(checkpoint: Checkpoint) -> None:
    (stage,) = make_stages(checkpoint("deepseek_v3"), (0, 3), LORA)
    assert all(known.retained is None and known.unused for known in stage.known_outputs.values())


def test_gradients_of_what_was_not_multiplied() -> None:
    """LoRA in two parts (kt_ray/model/lora_linear.py): the same bits, zeros for the output."""
    generator = torch.Generator().manual_seed(0)
    base = nn.Linear(24, 16, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    values = [torch.randn(shape, generator=generator) for shape in ((5, 24), (4, 24), (16, 4))]
    dy = torch.randn((5, 16), generator=generator).bfloat16()
    results = []
    for multiplies in (True, False):
        x, a, b = (values[0].bfloat16().requires_grad_(), *(v.clone().requires_grad_() for v in values[1:]))
        known = KnownOutputs((base,)) if not multiplies else KnownOutputs()
        with known.given(None):
            y = with_adapters(x, [(a, b, Parts.of(a, b, 0.5))], 0.5, base, multiplies)
        y.backward(dy)
        results.append((y.detach(), x.grad, a.grad, b.grad))
    assert results[0][0].any() and not results[1][0].any()
    for one, other in zip(results[0][1:], results[1][1:], strict=True):
        assert one is not None and other is not None and torch.equal(one, other)
