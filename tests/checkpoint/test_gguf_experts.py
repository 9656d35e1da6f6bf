"""Routed experts of GGUF files: values as the gguf package decodes them, and files that do not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, GgufExperts
from kt_ray.checkpoint.gguf_experts import ARCHITECTURES
from kt_ray.errors import UserError
from kt_ray.native import ExpertFormula, ExpertMatrix
from kt_ray.native.matrix import GGUF_BLOCKS
from tests.checkpoint.conftest import config_dict, write_checkpoint
from tests.helpers.gguf_files import Stacks, stack, values, write_gguf

E, H, I, LAYERS = 5, 512, 256, 3  # layer 0 is dense
SHAPES = {"gate": (E, I, H), "up": (E, I, H), "gate_up": (E, 2 * I, H), "down": (E, H, I)}


def model(root: Path, *, gated: bool = True, biased: bool = False, **config: Any) -> CheckpointIndex:
    """A directory whose own experts (one value each) nobody reads."""
    tensors = {}
    for layer in range(1, LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts"
        leaves = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
        for leaf, shape in leaves.items():
            if leaf == "gate_proj" and not gated:
                continue
            for e in range(E):
                tensors[f"{prefix}.{e}.{leaf}.weight"] = torch.zeros(shape, dtype=torch.bfloat16)
                if biased:
                    tensors[f"{prefix}.{e}.{leaf}.bias"] = torch.zeros(shape[0])
    settings = {"hidden_size": H, "num_experts": E, "num_hidden_layers": LAYERS, **config}
    return CheckpointIndex.open(write_checkpoint(root / "model", tensors, config=config_dict(**settings)))


def stacks(
    kinds: str | dict[str, str] = "Q8_0", layers: tuple[int, ...] = (1, 2), biased: bool = False
) -> dict[str, Any]:
    """Tensors of layers with experts: part -> type, or one type for gate, up and down."""
    if isinstance(kinds, str):
        kinds = dict.fromkeys(("gate", "up", "down"), kinds)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {"token_embd.weight": torch.ones(4, 32)}
    for layer in layers:
        for part, kind in kinds.items():
            value = torch.randn(SHAPES[part], generator=generator)
            tensors[f"blk.{layer}.ffn_{part}_exps.weight"] = stack(kind, value)
            if biased:
                bias = torch.randn(SHAPES[part][:2], generator=generator)
                tensors[f"blk.{layer}.ffn_{part}_exps.bias"] = bias
    return tensors


def opened(root: Path, tensors: Stacks, architecture: str = "qwen3moe", **changes: Any) -> GgufExperts:
    index = model(root, **changes)
    path = write_gguf(root / "m.gguf", architecture, tensors)
    return GgufExperts.open(path, index, ExpertLayout.detect(index))


def dense(value: torch.Tensor | ExpertMatrix | None) -> torch.Tensor:
    assert value is not None
    return values(value)


def test_architectures_are_those_of_llama_cpp() -> None:
    from gguf.constants import MODEL_ARCH_NAMES

    assert set(ARCHITECTURES.values()) <= set(MODEL_ARCH_NAMES.values())


@pytest.mark.parametrize("kind", [*(name.upper() for name in GGUF_BLOCKS), "F32", "F16", "BF16"])
def test_types(tmp_path: Path, kind: str) -> None:
    tensors = stacks(kind)
    experts = opened(tmp_path, tensors)
    chosen = [2, 3, 4, 0]
    formula = ExpertFormula("silu", limit=7.0)
    loaded = experts.load(2, chosen, formula=formula, threads=3, drop_cache=True)
    expected = {"F32": "f32", "F16": "bf16", "BF16": "bf16"}.get(kind, kind.lower())
    assert loaded.formats == (expected,) * 3 and experts.layout.distinct_formats == (expected,)
    assert len(experts.notes) == (kind == "F16")
    assert loaded.bytes == len(chosen) * experts.layout.expert_bytes[2]
    assert (loaded.layer, loaded.expert_ids, loaded.limit) == (2, (2, 3, 4, 0), 7.0)
    for part in ("gate", "up", "down"):
        wanted = values(tensors[f"blk.2.ffn_{part}_exps.weight"])[chosen]
        if kind == "F16":
            wanted = wanted.bfloat16().float()
        assert torch.equal(dense(getattr(loaded, part)), wanted), part


@pytest.mark.parametrize("kind", ["Q4_K", "F16"])
def test_unfinished_downloads(tmp_path: Path, kind: str) -> None:
    """Of the size that was reserved for them: holes, or zeros where the file was copied."""
    experts = opened(tmp_path, stacks(kind))
    experts.check_content()
    file, last = experts.header.path, experts.stacks[2]["down"]
    size = file.stat().st_size
    for end in (last.rows(0, 4).end, size):
        with file.open("r+b") as opened_file:
            opened_file.seek(last.start)
            opened_file.write(bytes(end - last.start))
        with pytest.raises(UserError, match=r"GGUF file holds zeros.*blk\.2\.ffn_down_exps\.weight;"):
            experts.check_content()
    with file.open("r+b") as opened_file:
        opened_file.truncate(last.start)
        opened_file.truncate(size)
    with pytest.raises(UserError, match=r"holes.*blk\.2\.ffn_down_exps"):
        experts.check_content()


def test_types_differ_by_tensor_and_layer(tmp_path: Path) -> None:
    """As llama-quantize mixes them (Q4_K_M), in a split set."""
    tensors = stacks({"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"}, layers=(1,))
    tensors |= stacks({"gate": "Q5_K", "up": "BF16", "down": "Q5_1"}, layers=(2,))
    index = model(tmp_path)
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, split=2)
    experts = GgufExperts.open(path, index, ExpertLayout.detect(index))
    assert len(experts.header.files) == 4
    assert experts.layout.distinct_formats == ("bf16", "q4_k", "q5_1", "q5_k", "q6_k")
    assert experts.layout.formats[1] == {"gate": "q4_k", "up": "q4_k", "down": "q6_k"}
    for layer in (1, 2):
        loaded = experts.load(layer, range(E))
        assert loaded.bytes == E * experts.layout.expert_bytes[layer]
        for part in ("gate", "up", "down"):
            wanted = values(tensors[f"blk.{layer}.ffn_{part}_exps.weight"])
            assert torch.equal(dense(getattr(loaded, part)), wanted)
    assert experts.layout.nbytes == E * sum(experts.layout.expert_bytes[layer] for layer in (1, 2))


@pytest.mark.parametrize("kind", ["Q4_0", "BF16"])
def test_fused_gate_and_up_with_biases(tmp_path: Path, kind: str) -> None:
    tensors = stacks({"gate_up": kind, "down": "Q8_0"}, biased=True)
    experts = opened(tmp_path, tensors, "gpt-oss", biased=True, model_type="gpt_oss")
    formula = ExpertFormula("swiglu_oai", 1.702, 7.0)
    loaded = experts.load(1, [4, 1], formula=formula)
    both = values(tensors["blk.1.ffn_gate_up_exps.weight"])[[4, 1]]
    bias = tensors["blk.1.ffn_gate_up_exps.bias"][[4, 1]]
    assert torch.equal(dense(loaded.gate), both[:, :I]) and torch.equal(dense(loaded.up), both[:, I:])
    assert torch.equal(dense(loaded.gate_bias), bias[:, :I]) and torch.equal(
        dense(loaded.up_bias), bias[:, I:]
    )
    assert torch.equal(dense(loaded.down_bias), tensors["blk.1.ffn_down_exps.bias"][[4, 1]])
    assert loaded.activation == "swiglu_oai"


def test_biases_of_half_precision(tmp_path: Path) -> None:
    tensors = stacks(biased=True)
    tensors["blk.2.ffn_up_exps.bias"] = tensors["blk.2.ffn_up_exps.bias"].half()
    loaded = opened(tmp_path, tensors, "gpt-oss", biased=True, model_type="gpt_oss").load(2, [0, 1])
    assert torch.equal(dense(loaded.up_bias), tensors["blk.2.ffn_up_exps.bias"][:2].float())
    assert torch.equal(dense(loaded.gate_bias), tensors["blk.2.ffn_gate_exps.bias"][:2])


def test_experts_without_a_gate(tmp_path: Path) -> None:
    tensors = stacks({"up": "Q8_0", "down": "Q8_0"})
    experts = opened(tmp_path, tensors, "nemotron_h_moe", gated=False, model_type="nemotron_h")
    loaded = experts.load(1, [3], formula=ExpertFormula("relu2"))
    assert loaded.gate is None and loaded.E == 1


def test_layers_beyond_the_model_are_skipped(tmp_path: Path) -> None:
    """Multi-token prediction: llama.cpp numbers its layer after the others."""
    experts = opened(tmp_path, stacks(layers=(1, 2, 3)))
    assert experts.layout.moe_layers == (1, 2) and set(experts.stacks) == {1, 2}
    assert experts.skipped == tuple(f"blk.3.ffn_{part}_exps.weight" for part in ("down", "gate", "up"))
    assert [note.count("blk.3.") for note in experts.notes] == [3]


def test_fingerprint_follows_the_values(tmp_path: Path) -> None:
    index = model(tmp_path)
    layout = ExpertLayout.detect(index)
    tensors = stacks("Q8_0")
    one = GgufExperts.open(write_gguf(tmp_path / "a.gguf", "qwen3moe", tensors), index, layout)
    split = GgufExperts.open(write_gguf(tmp_path / "b.gguf", "qwen3moe", tensors, split=3), index, layout)
    tensors["blk.2.ffn_up_exps.weight"] = stack("Q8_0", torch.ones(SHAPES["up"]))
    other = GgufExperts.open(write_gguf(tmp_path / "c.gguf", "qwen3moe", tensors), index, layout)
    assert one.fingerprint == split.fingerprint != other.fingerprint


def test_wrong_questions(tmp_path: Path) -> None:
    experts = opened(tmp_path, stacks())
    with pytest.raises(ValueError, match="layer 0 has no"):
        experts.load(0, [0])
    with pytest.raises(ValueError, match=r"experts \[5\] outside 0\.\.4"):
        experts.load(1, [5])


def test_a_file_that_shrinks(tmp_path: Path) -> None:
    experts = opened(tmp_path, stacks())
    path = tmp_path / "m.gguf"
    with path.open("r+b") as file:
        file.truncate(experts.stacks[2]["up"].start + 100)
    with pytest.raises(UserError, match="ended while it was read") as caught:
        experts.load(2, range(E), threads=2)
    assert str(path) in str(caught.value)


def without(*names: str) -> dict[str, Any]:
    return {name: tensor for name, tensor in stacks().items() if name not in names}


def wrong_type(kind: str, size: int) -> dict[str, Any]:
    """A type that the engine lacks: other bytes under its number."""
    import gguf

    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1] == size
    raw = torch.zeros(E, I, H // gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] * size)
    return stacks() | {"blk.2.ffn_up_exps.weight": (kind, raw.to(torch.uint8))}


FAULTS: dict[str, tuple[Any, str]] = {
    "layer": (lambda: stacks(layers=(1,)), r"disagree about the layers.*without: \[2\]"),
    "other layer": (lambda: stacks(layers=(0, 1, 2)), r"disagree about the layers.*unexpected: \[0\]"),
    "tensor": (
        lambda: without("blk.2.ffn_up_exps.weight"),
        r"lacks tensors.*layer 2; found missing: blk\.2\.ffn_up_exps\.weight",
    ),
    "no experts": (lambda: {"token_embd.weight": torch.ones(4, 32)}, "has no routed experts.*1 tensors"),
    "old form": (
        lambda: {"blk.1.ffn_gate.0.weight": torch.ones(4, 32)},
        r"old form of experts.*ffn_gate\.0.*convert the model again",
    ),
    "biases": (lambda: stacks(biased=True), "too many tensors.*layer 1; found unexpected: .*bias"),
    "unknown": (
        lambda: stacks() | {"blk.1.ffn_up_exps.scale": torch.ones(E)},
        r"tensor of the experts that is not known.*ffn_up_exps\.scale",
    ),
    "norm": (
        lambda: stacks() | {"blk.1.ffn_norm_exps.weight": torch.ones(H)},
        r"not known.*ffn_norm_exps",
    ),
    "number of experts": (
        lambda: stacks() | {"blk.1.ffn_up_exps.weight": torch.ones(E + 1, I, H)},
        r"sizes of the experts.*blk\.1\.ffn_up.*found \[6, 256, 512\]; required \[5, 256, 512\]",
    ),
    "turned": (
        lambda: stacks() | {"blk.2.ffn_down_exps.weight": torch.ones(E, I, H)},
        r"sizes of the experts.*found \[5, 256, 512\]; required \[5, 512, 256\]",
    ),
    "float32 beside others": (
        lambda: stacks() | {"blk.2.ffn_down_exps.weight": torch.ones(E, H, I)},
        r"mixed types.*f32 \(blk\.2\.ffn_down_exps\.weight\), q8_0",
    ),
    "float64": (
        lambda: stacks() | {"blk.1.ffn_gate_exps.weight": ("F64", torch.ones(E, I, H).double())},
        "a GGUF type that is not computed.*found F64",
    ),
    **{
        kind: (
            lambda kind=kind, size=size: wrong_type(kind, size),
            rf"not computed.*blk\.2\.ffn_up_exps.*found {kind}; required F32, BF16, F16, Q8_0.*Q6_K.*llama-q",
        )
        for kind, size in {
            "Q4_1": 20, "Q2_K": 84, "Q3_K": 110, "IQ4_XS": 136, "IQ2_XXS": 66, "TQ1_0": 54, "MXFP4": 17
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named(tmp_path: Path, case: str) -> None:
    make, message = FAULTS[case]
    with pytest.raises(UserError, match=message) as caught:
        opened(tmp_path, make())
    assert str(tmp_path / "m.gguf") in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_vl_moe_text", "mixtral"])
def test_another_architecture(tmp_path: Path, family: str) -> None:
    message = (
        f"another architecture.*deepseek2; required {ARCHITECTURES[re.sub('_text$', '', family)]}, as of"
    )
    with pytest.raises(UserError, match=message):
        opened(tmp_path, stacks(), "deepseek2", model_type=family)


def test_unknown_families_go_by_their_sizes(tmp_path: Path) -> None:
    assert opened(tmp_path, stacks(), "ernie4_5-moe", model_type="ernie4_5_moe").layout.distinct_formats == (
        "q8_0",
    )


def test_missing_biases(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks tensors.*blk\.1\.ffn_down_exps\.bias"):
        opened(tmp_path, stacks(), "gpt-oss", biased=True, model_type="gpt_oss")
