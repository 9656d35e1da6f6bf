"""Stages against plain Hugging Face + factored LoRA: logits, loss and every LoRA gradient, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.model.stage import Stage
from tests.helpers.hf_reference import Reference, ReferenceResult, Row, random_rows
from tests.helpers.stages import Run, make_stages, pass_spec, run

Checkpoint = Callable[..., Path]
ROWS = random_rows(5)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12))


def assert_close(got: Run, want: ReferenceResult, tolerance: float = 1e-5) -> None:
    """Every gradient, by relative norm; a gradient that is exactly zero must be zero."""
    assert got.loss == pytest.approx(want.loss, rel=tolerance)
    assert set(got.grads) == set(want.grads)
    worst = max(want.grads, key=lambda name: relative(got.grads[name], want.grads[name]))
    assert relative(got.grads[worst], want.grads[worst]) <= tolerance, worst
    zero = [name for name, g in want.grads.items() if not g.any()]
    assert all(not got.grads[name].any() for name in zero)


def assert_logits(got: Run, rows: list[Row], want: ReferenceResult, tolerance: float = 1e-5) -> None:
    for row, logits in zip(rows, want.logits, strict=True):
        assert relative(got.logits[row.sample], logits) <= tolerance


def ready(path: Path, lora: LoraConfig, cuts: tuple[int, ...], **extra: Any) -> tuple[Reference, list[Stage]]:
    """A reference whose B matrices are not zero, and stages with the same parameters."""
    reference = Reference(path, lora)
    reference.randomize_b(1)
    stages = make_stages(path, cuts, lora, **extra)
    for stage in stages:
        stage.load_parameters({name: reference.parameters[name] for name in stage.parameters})
    return reference, stages


@pytest.mark.parametrize(
    ("family", "kinds", "attention"),
    [
        (
            "deepseek_v3",
            {"q_a_proj", "kv_b_proj", "shared_experts", "layers.0.mlp.down_proj", "experts.7.down_proj"},
            "sdpa",
        ),
        ("deepseek_v3", {"o_proj"}, "eager"),
        ("deepseek_v2", {"q_proj", "kv_a_proj_with_mqa"}, "sdpa"),
        ("qwen3_moe", {"q_proj", "layers.1.mlp.up_proj", "experts.0.gate_proj"}, "sdpa"),
        ("mixtral", {"k_proj", "block_sparse_moe.experts.3.w2", "block_sparse_moe.experts.3.w3"}, "sdpa"),
        ("mixtral", {"o_proj"}, "eager"),
        ("qwen2_moe", {"o_proj", "shared_expert.down_proj"}, "sdpa"),
        ("olmoe", {"v_proj"}, "sdpa"),
        ("glm4_moe", {"shared_experts.up_proj"}, "sdpa"),
        (
            "longcat_flash",
            {"self_attn.0.o_proj", "self_attn.1.kv_b_proj", "mlps.0.down_proj", "experts.7.down_proj"},
            "sdpa",
        ),
    ],
)
def test_family(checkpoint: Checkpoint, family: str, kinds: set[str], attention: str) -> None:
    """Padding, unequal lengths, two groups, two stages, dropout off and on."""
    lora = LoraConfig(rank=4, dropout=0.1)
    reference, stages = ready(checkpoint(family), lora, (0, 1, 3), attn_implementation=attention)
    want = reference.run(ROWS, step=3)
    got = run(stages, pass_spec(ROWS, groups=2, micro=2, step=3), reference)
    assert_close(got, want)
    for kind in kinds:
        assert any(kind in name and g.abs().max() > 0 for name, g in got.grads.items()), kind
    want = reference.run(ROWS, train=False)
    assert_logits(run(stages, pass_spec(ROWS, groups=2, micro=2, kind="eval"), reference), ROWS, want)
    assert {c for stage in stages for c in stage.scales.values()} == {1.0}
    assert all(stage.dtype == torch.float32 for stage in stages)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe"])  # without biases, with them
def test_dora(checkpoint: Checkpoint, family: str, dropout: float) -> None:
    lora = LoraConfig(rank=4, alpha=6.0, dropout=dropout, experts=False, dora=True)
    reference, stages = ready(checkpoint(family), lora, (0, 1, 3))
    generator = torch.Generator().manual_seed(4)
    moved = {n: p for n, p in reference.parameters.items() if n.endswith("magnitude_vector")}
    for name, value in moved.items():  # at first they are the norms, bit for bit
        stage = next(s for s in stages if name in s.parameters)
        torch.testing.assert_close(stage.parameters[name].data, value.data)
        value.data.mul_(1 + 0.3 * torch.randn(value.shape, generator=generator))
        stage.load_parameters({name: value})
    want = reference.run(ROWS, step=3)
    got = run(stages, pass_spec(ROWS, groups=2, micro=2, step=3), reference)
    assert_close(got, want)
    assert {n for n, g in got.grads.items() if g.any()} >= moved.keys()
    want = reference.run(ROWS, train=False)
    assert_logits(run(stages, pass_spec(ROWS, groups=2, micro=2, kind="eval"), reference), ROWS, want)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize(
    ("groups", "micro", "cuts", "rslora"),
    [
        (1, 1, (0, 3), False),
        (1, 5, (0, 3), True),
        (3, 1, (0, 1, 2, 3), False),
        (2, 3, (0, 2, 3), False),
        (3, 3, (0, 3), False),
    ],
)
def test_layouts(
    checkpoint: Checkpoint, groups: int, micro: int, cuts: tuple[int, ...], dropout: float, rslora: bool
) -> None:
    """One result for every layout, an empty group (3 groups of 2 micro-batches) among them."""
    lora = LoraConfig(rank=4, alpha=5.0, rslora=rslora, dropout=dropout)
    reference, stages = ready(checkpoint("deepseek_v3"), lora, cuts)
    spec = pass_spec(ROWS, groups=groups, micro=micro, step=7)
    assert_close(run(stages, spec, reference), reference.run(ROWS, step=7))


def test_dropout_layouts_agree_with_each_other(checkpoint: Checkpoint) -> None:
    lora = LoraConfig(rank=4, dropout=0.3)
    reference, stages = ready(checkpoint("qwen3_moe"), lora, (0, 3))
    rows = ROWS[:4]
    one = run(stages, pass_spec(rows, micro=4, step=2), reference)
    four = run(stages, pass_spec(rows, micro=1, step=2), reference)
    other = run(stages, pass_spec(rows, micro=1, step=3), reference)
    assert one.loss == pytest.approx(four.loss, rel=1e-6)
    assert max(relative(one.grads[n], four.grads[n]) for n in one.grads) <= 1e-5
    assert abs(other.loss - one.loss) > 1e-4, "another step draws other masks"
    again = run(stages, pass_spec(rows, micro=1, step=2), reference)
    assert again.loss == four.loss and all(torch.equal(again.grads[n], four.grads[n]) for n in four.grads)


@pytest.mark.parametrize(
    ("target", "same", "experts"),
    [
        ("none", "none", True),
        (["o_proj"], ["o_proj"], True),
        (["o_proj"], ["o_proj"], False),
        (
            r".*\.mlp\.shared_experts\..*",
            ["shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"],
            False,
        ),
    ],
)
def test_targets(
    checkpoint: Checkpoint, target: str | list[str], same: str | list[str], experts: bool
) -> None:
    """Few or no adapters outside the experts: gradients still reach what is left."""
    path = checkpoint("deepseek_v3")
    reference = Reference(path, LoraConfig(rank=2, target_modules=same, experts=experts))
    reference.randomize_b(1)
    stages = make_stages(path, (0, 2, 3), LoraConfig(rank=2, target_modules=target, experts=experts))
    for stage in stages:
        stage.load_parameters({name: reference.parameters[name] for name in stage.parameters})
    got = run(stages, pass_spec(ROWS, groups=2), reference)
    assert_close(got, reference.run(ROWS))


def test_bf16_experts_and_replay(checkpoint: Checkpoint) -> None:
    """BF16 experts under a float32 stage; the stage's experts replayed into the reference."""
    lora = LoraConfig(rank=4)
    reference, stages = ready(checkpoint("deepseek_v3", expert_dtype=torch.bfloat16), lora, (0, 3))
    got = run(stages, pass_spec(ROWS), reference)
    assert_close(got, reference.run(ROWS, forced_ids=got.exchange.expert_ids))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral"])
def test_replayed_routing_changes_the_reference(checkpoint: Checkpoint, family: str) -> None:
    """forced_ids is honoured: other experts, another loss; the router's own, the same loss."""
    reference, _ = ready(checkpoint(family), LoraConfig(rank=2), (0, 3))
    free = reference.run(ROWS)
    same = reference.run(ROWS, forced_ids=free.expert_ids)
    assert same.loss == pytest.approx(free.loss, rel=1e-6)
    shifted = {layer: {s: (ids + 1) % 8 for s, ids in by.items()} for layer, by in free.expert_ids.items()}
    moved = reference.run(ROWS, forced_ids=shifted)
    assert abs(moved.loss - free.loss) > 1e-3
    assert all(torch.equal(moved.expert_ids[la][s], shifted[la][s]) for la in shifted for s in shifted[la])


def test_bf16_stage(checkpoint: Checkpoint) -> None:
    """A bfloat16 stage keeps its adapters and the router's bias in float32, and stays near float32."""
    lora = LoraConfig(rank=4)
    path = checkpoint("deepseek_v3", dtype=torch.bfloat16)
    reference, _ = ready(path, lora, (0, 3))
    (stage,) = [Stage(_spec(path, lora, dtype="auto"))]
    assert stage.dtype == torch.bfloat16
    stage.load_parameters({name: reference.parameters[name] for name in stage.parameters})
    state = stage.model.causal.state_dict()
    assert state["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert state["model.norm.weight"].dtype == torch.bfloat16
    assert all(p.dtype == torch.float32 for p in stage.parameters.values())
    assert stage.scales == {1: 1.0, 2: 1.0}
    got = run([stage], pass_spec(ROWS), reference)
    want = reference.run(ROWS, forced_ids=got.exchange.expert_ids)
    assert got.loss == pytest.approx(want.loss, rel=1e-2)
    names = sorted(want.grads)
    flat_got, flat_want = (torch.cat([g[n].flatten() for n in names]) for g in (got.grads, want.grads))
    assert relative(flat_got, flat_want) <= 3e-2


def _spec(path: Path, lora: LoraConfig, **extra: Any) -> Any:
    from kt_ray.model.stage_spec import StageSpec

    return StageSpec(str(path), (0, 3), 3, lora=lora, **extra)


@pytest.mark.parametrize("cuts", [(0, 3), (0, 1, 3)])
def test_tied_embeddings(checkpoint: Checkpoint, cuts: tuple[int, ...]) -> None:
    path = checkpoint("qwen3_moe", tie_word_embeddings=True)
    reference, stages = ready(path, LoraConfig(rank=2), cuts)
    assert_close(run(stages, pass_spec(ROWS), reference), reference.run(ROWS))
    embedding = 96 * 48 * 4
    if len(cuts) == 2:
        assert stages[0].weight_bytes < 2 * embedding + 3 * 200_000
        causal = stages[0].model.causal
        assert causal.lm_head.weight is causal.model.embed_tokens.weight
