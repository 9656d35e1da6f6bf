"""Finding and reading routed experts, in every layout, and refusing what cannot be computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, load_experts
from kt_ray.errors import UserError
from kt_ray.experts.lane_weights import expert_tensors, pack
from kt_ray.native import ExpertWeights

Tensors = dict[str, torch.Tensor]
Make = Callable[..., Any]
LEAVES = ("gate_proj", "up_proj", "down_proj")


def _name(layer: int, expert: int, leaf: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{leaf}.weight"


def _stack(tensors: Tensors, layer: int, leaf: str, experts: list[int]) -> torch.Tensor:
    return torch.stack([tensors[_name(layer, e, leaf)] for e in experts])


def _values(weights: ExpertWeights) -> list[torch.Tensor]:
    values = [weights.gate, weights.up, weights.down]
    assert all(isinstance(v, torch.Tensor) for v in values)
    return values  # type: ignore[return-value]


def _fuse(
    tensors: Tensors, *, interleaved: bool = False, transposed: bool = False, suffix: str = ""
) -> Tensors:
    fused: Tensors = {}
    for layer in (1, 2):
        gate, up, down = (_stack(tensors, layer, leaf, [0, 1, 2, 3]) for leaf in LEAVES)
        both = torch.stack((gate, up), 2).flatten(1, 2) if interleaved else torch.cat((gate, up), 1)
        if transposed:
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        prefix = f"model.layers.{layer}.mlp.experts"
        fused[f"{prefix}.gate_up_proj{suffix}"] = both.contiguous()
        fused[f"{prefix}.down_proj{suffix}"] = down.contiguous()
    return fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shards", [1, 3])
def test_per_expert(
    tmp_path: Path, write: Make, make_experts: Make, dtype: torch.dtype, threads: int, shards: int
) -> None:
    tensors = make_experts(dtype)
    index = CheckpointIndex.open(write(tmp_path / "m", tensors, shards=shards))
    layout = ExpertLayout.detect(index)
    assert (layout.kind, layout.moe_layers, layout.num_experts) == ("per_expert", (1, 2), 4)
    assert (layout.hidden, layout.intermediate) == (8, 6)
    assert layout.distinct_formats == (("bf16",) if dtype == torch.bfloat16 else ("f32",))
    assert layout.names(2, 3)["down"] == "model.layers.2.mlp.experts.3.down_proj"
    inside = layout.names(2, 3, "model.language_model")["up"]
    assert inside == "model.language_model.layers.2.mlp.experts.3.up_proj"
    wanted = [3, 0]
    loaded = load_experts(index, layout, 2, wanted, threads=threads, drop_cache=threads == 3)
    for value, leaf in zip(_values(loaded), LEAVES, strict=True):
        assert value[0].is_contiguous() and torch.equal(value, _stack(tensors, 2, leaf, wanted))
    for expert in range(2):
        assert len(pack(expert_tensors(loaded, expert)).stretches) == 1, "a lane copies it in one piece"
    assert loaded.bytes == 2 * layout.expert_bytes[2]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_fused(
    tmp_path: Path,
    write: Make,
    make_experts: Make,
    make_config: Make,
    interleaved: bool,
    transposed: bool,
    suffix: str,
) -> None:
    tensors = make_experts(torch.bfloat16)
    fused = _fuse(tensors, interleaved=interleaved, transposed=transposed, suffix=suffix)
    config = make_config(model_type="gpt_oss" if interleaved else "qwen3_moe")
    index = CheckpointIndex.open(write(tmp_path / "m", fused, config=config))
    layout = ExpertLayout.detect(index)
    assert (layout.kind, layout.transposed, layout.interleaved) == ("fused", transposed, interleaved)
    assert layout.names(1, 2)["gate"] == "model.layers.1.mlp.experts.2.gate_proj"
    loaded = load_experts(index, layout, 1, [2, 1], threads=2)
    for value, leaf in zip(_values(loaded), LEAVES, strict=True):
        assert torch.equal(value, _stack(tensors, 1, leaf, [2, 1]))


def test_mixtral_names(tmp_path: Path, write: Make, make_experts: Make) -> None:
    tensors = make_experts(mixtral=True)
    index = CheckpointIndex.open(write(tmp_path / "m", tensors))
    layout = ExpertLayout.detect(index)
    prefix = "model.layers.1.block_sparse_moe.experts.0"
    assert layout.names(1, 0) == {"gate": f"{prefix}.w1", "up": f"{prefix}.w3", "down": f"{prefix}.w2"}
    gate, up, down = _values(load_experts(index, layout, 1, [0]))
    for value, leaf in ((gate, "w1"), (up, "w3"), (down, "w2")):
        assert torch.equal(value[0], tensors[f"{prefix}.{leaf}.weight"])


@pytest.mark.parametrize("before", ["model.language_model.", "language_model.model.", "backbone.", ""])
def test_names_begin_as_the_trained_model_does(
    tmp_path: Path, write: Make, make_experts: Make, before: str
) -> None:
    tensors = {before + k.removeprefix("model."): v for k, v in make_experts().items()}
    layout = ExpertLayout.detect(CheckpointIndex.open(write(tmp_path / "m", tensors)))
    assert layout.prefixes[1] == f"{before}layers.1.mlp.experts"
    for root in ("model", "model.language_model"):
        assert layout.names(1, 2, root)["gate"] == f"{root}.layers.1.mlp.experts.2.gate_proj"


def test_multi_token_prediction_layers_are_passed_over(
    tmp_path: Path, write: Make, make_experts: Make
) -> None:
    tensors = make_experts()
    beyond = {
        name.replace("layers.2.", "layers.3."): value
        for name, value in tensors.items()
        if "layers.2." in name
    }
    mtp = {
        name.replace("model.layers.2.", "mtp.layers.0."): v
        for name, v in tensors.items()
        if "layers.2." in name
    }
    talker = {f"talker.{name}": v for name, v in tensors.items() if "experts" in name}  # Qwen3-Omni's
    index = CheckpointIndex.open(write(tmp_path / "m", tensors | beyond | mtp | talker))
    layout = ExpertLayout.detect(index)
    assert layout.moe_layers == (1, 2) and layout.prefixes[1].startswith("model.layers.")
    assert set(layout.skipped) == set(beyond) | set(mtp) | set(talker)


def test_shared_experts_and_nested_prefix(
    tmp_path: Path, write: Make, make_experts: Make, make_config: Make
) -> None:
    tensors = {n.replace("model.", "model.language_model.", 1): v for n, v in make_experts().items()}
    tensors["model.language_model.layers.1.mlp.shared_experts.gate_proj.weight"] = torch.zeros(3, 8)
    config = {"model_type": "outer", "text_config": make_config()}
    layout = ExpertLayout.detect(CheckpointIndex.open(write(tmp_path / "m", tensors, config=config)))
    assert layout.prefixes[1] == "model.language_model.layers.1.mlp.experts"
    assert not any("shared" in key for key in layout.keys)


def test_unknown_layer_or_expert_is_a_programming_error(checkpoint: Path) -> None:
    index = CheckpointIndex.open(checkpoint)
    layout = ExpertLayout.detect(index)
    with pytest.raises(ValueError, match="layer 0 has no routed experts"):
        load_experts(index, layout, 0, [0])
    with pytest.raises(ValueError, match="outside"):
        load_experts(index, layout, 1, [4])


def _replace(name: str, value: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: value}


def _drop(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def _all(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: change(v) for k, v in tensors.items()}


def _drop_fused(tensors: Tensors) -> Tensors:
    return {k: v for k, v in _fuse(tensors).items() if k != "model.layers.2.mlp.experts.down_proj"}


def _biased(tensors: Tensors, rows: int = 6) -> Tensors:
    """Biases of `rows` for gate and up."""
    sizes = {"gate_proj": rows, "up_proj": rows, "down_proj": 8}
    return tensors | {
        name.removesuffix("weight") + "bias": torch.linspace(-1, 1, sizes[name.split(".")[-2]])
        for name in tensors
    }


G = _name(2, 3, "gate_proj")
REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no experts": (lambda t: {"model.embed_tokens.weight": torch.zeros(2, 8)}, "no routed experts"),
    "one projection missing": (_drop(G), f"missing: {G}"),
    "one expert missing": (
        _drop(*(_name(1, 2, leaf) for leaf in LEAVES)),
        "layers.1.mlp.experts.2.down_proj",
    ),
    "many missing": (_drop(*(_name(1, e, leaf) for e in range(4) for leaf in LEAVES[:2])), "(8 in all)"),
    "an expert too many": (_replace(_name(1, 4, "gate_proj"), torch.zeros(6, 8)), "more experts than"),
    "mixed shapes": (_replace(G, torch.zeros(7, 8)), "mixed shapes"),
    "transposed expert": (_replace(G, torch.zeros(8, 6)), "mixed shapes"),
    "one-dimensional": (_all(lambda v: v.flatten()), "mixed shapes"),
    "mixed types": (_replace(G, torch.zeros(6, 8).bfloat16()), "mixed types"),
    "float16": (_all(lambda v: v.half()), "found F16"),
    "fp8": (_all(lambda v: v.to(torch.float8_e4m3fn)), "F8_E4M3 without scales"),
    "scales alone": (_replace(G + "_scale_inv", torch.zeros(1)), f"{G}_scale_inv (no weight)"),
    "gptq": (_replace(G.replace("weight", "qweight"), torch.zeros(1).int()), "GPTQ"),
    "packed": (_replace(G.replace("weight", "weight_packed"), torch.zeros(1).int()), "I32 without scales"),
    "mxfp4": (
        lambda t: {
            "model.layers.1.mlp.experts.gate_up_proj_blocks": torch.zeros(4, 12, 1, 4).to(torch.uint8)
        },
        "U8 without scales",
    ),
    "one bias": (
        _replace(G.replace("weight", "bias"), torch.zeros(6)),
        "missing: model.layers.1.mlp.experts.0.down_proj.bias",
    ),
    "bias of another shape": (lambda t: _biased(t, 7), "mixed shapes"),
    "unknown tensors": (_replace("model.layers.1.mlp.experts.0.up_proj.scale_x", torch.zeros(1)), "unknown"),
    "mixed names": (_replace("model.layers.1.mlp.experts.0.w1.weight", torch.zeros(6, 8)), "mixed names"),
    "two sets": (
        _replace("model.layers.1.ffn.experts.0.up_proj.weight", torch.zeros(6, 8)),
        "more than one set",
    ),
    "fused beside per-expert": (lambda t: t | _fuse(t), "mixes fused and per-expert"),
    "fused, half missing": (_drop_fused, "missing: model.layers.2.mlp.experts.down_proj"),
    "fused, odd shapes": (
        lambda t: {k: v[:, :-1].contiguous() for k, v in _fuse(t).items()},
        "shapes that do not fit together",
    ),
    "fused, two-dimensional": (lambda t: {k: v[0].clone() for k, v in _fuse(t).items()}, "mixed shapes"),
    "fused, fewer experts": (lambda t: {k: v[:3].clone() for k, v in _fuse(t).items()}, "mixed shapes"),
    "other hidden size": (
        _all(lambda v: torch.zeros(6, 9) if v.shape == (6, 8) else torch.zeros(9, 6)),
        "required 8",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_remedy(tmp_path: Path, write: Make, make_experts: Make, case: str) -> None:
    change, message = REFUSED[case]
    index = CheckpointIndex.open(write(tmp_path / "m", change(make_experts())))
    with pytest.raises(UserError) as caught:
        ExpertLayout.detect(index)
    assert message in str(caught.value)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("promised", "message"),
    [
        ({"num_experts": 8}, "number of routed experts"),
        ({"hidden": 16}, "hidden size of the experts"),
        ({"intermediate": 12}, "intermediate size of the experts"),
        ({"moe_layers": (0, 1, 2)}, "without: [0]"),
        ({"moe_layers": (1,)}, "unexpected: [2]"),
    ],
)
def test_configuration_must_agree(checkpoint: Path, promised: dict[str, Any], message: str) -> None:
    layout = ExpertLayout.detect(CheckpointIndex.open(checkpoint))
    layout.check(num_experts=4, hidden=8, intermediate=6, moe_layers=(1, 2))
    with pytest.raises(UserError) as caught:
        layout.check(**{"moe_layers": (1, 2), **promised})
    assert message in str(caught.value) and caught.value.remedy
