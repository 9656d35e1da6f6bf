"""Everything but the experts: equal, tensor by tensor, to what from_pretrained loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from kt_ray.checkpoint import (
    CheckpointIndex,
    ExpertLayout,
    check_non_experts,
    load_experts,
    load_non_experts,
)
from kt_ray.checkpoint.non_experts import materialize_buffers
from kt_ray.errors import UserError
from tests.helpers.families import write_config

Make = Callable[..., Any]
FAMILIES = ["deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe"]


def meta_model(path: Path, dtype: torch.dtype) -> Any:
    """Built on meta, routed-expert parameters removed."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            for parameter in list(module._parameters):
                delattr(module, parameter)
    return model.eval()


def saved(tmp_path: Path, model: Any) -> Path:
    path = tmp_path / "model"
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_from_pretrained(tmp_path: Path, make_model: Make, family: str, dtype: torch.dtype) -> None:
    path = saved(tmp_path, make_model(family, dtype=dtype))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = meta_model(path, dtype)
    index = CheckpointIndex.open(path)
    check_non_experts(index, model)
    report = load_non_experts(index, model, layers=(0, 3), dtype=dtype, device="cpu")
    materialize_buffers(model, "cpu")

    assert report.unexpected == [] and report.ignored == []
    expected = {
        n: t for n, t in (*reference.named_parameters(), *reference.named_buffers()) if ".experts." not in n
    }
    loaded = dict((*model.named_parameters(), *model.named_buffers()))
    assert loaded.keys() == expected.keys()
    for name, value in expected.items():
        assert loaded[name].dtype == value.dtype, name
        assert torch.equal(loaded[name], value), name
    assert not any(p.requires_grad for p in model.parameters())

    layout = ExpertLayout.detect(index)
    layout.check(moe_layers=layout.moe_layers, num_experts=4, hidden=32)
    for layer in layout.moe_layers:
        weights = load_experts(index, layout, layer, range(4))
        gate, up, down = weights.gate, weights.up, weights.down
        experts = reference.model.layers[layer].mlp.experts
        assert torch.equal(torch.cat((gate, up), 1), experts.gate_up_proj)
        assert torch.equal(down, experts.down_proj)


def test_another_dtype_keeps_the_correction_bias_in_float32(tmp_path: Path, make_model: Make) -> None:
    path = saved(tmp_path, make_model("deepseek_v3"))
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model = meta_model(path, torch.float32)  # built in another type than asked for
    load_non_experts(CheckpointIndex.open(path), model, layers=(0, 3), dtype=torch.bfloat16, device="cpu")
    state = model.state_dict()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert state[bias].dtype == torch.float32
    for name, value in reference.state_dict().items():
        if ".experts." not in name:
            assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral"])
def test_one_stage_loads_its_own_layers_only(tmp_path: Path, make_model: Make, family: str) -> None:
    path = saved(tmp_path, make_model(family))
    index = CheckpointIndex.open(path)
    model = meta_model(path, torch.float32)
    report = load_non_experts(
        index, model, layers=(1, 2), dtype=torch.float32, device="cpu", need_embedding=False, need_head=False
    )
    on_cpu = {n for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}
    assert on_cpu == {n for n in model.state_dict() if n.startswith("model.layers.1.")}
    assert report.unexpected == []

    def loaded_outside_layers(model: Any) -> set[str]:
        state = model.state_dict(keep_vars=True)
        return {n for n, t in state.items() if not t.is_meta and "layers" not in n}

    last = meta_model(path, torch.float32)
    load_non_experts(index, last, layers=(2, 3), dtype=torch.float32, device="cpu", need_embedding=False)
    assert loaded_outside_layers(last) == {"lm_head.weight", "model.norm.weight"}
    first = meta_model(path, torch.float32)
    load_non_experts(index, first, layers=(0, 1), dtype=torch.float32, device="cpu", need_head=False)
    assert loaded_outside_layers(first) == {"model.embed_tokens.weight"}


def test_streamed_layers_and_their_embedding_stay_on_the_cpu(tmp_path: Path, make_model: Make) -> None:
    """`meta` stands for a GPU. A layer is filled when it is said to be, in the order of layers."""
    path = saved(tmp_path, make_model("deepseek_v3"))
    model = meta_model(path, torch.float32)
    ready: list[int] = []

    def on_cpu() -> set[str]:
        return {n for n, t in model.state_dict(keep_vars=True).items() if not t.is_meta}

    def look(layer: int) -> None:
        ready.append(layer)
        own = {
            n for n in model.state_dict() if n.startswith(f"model.layers.{layer}.") and ".experts." not in n
        }
        assert own <= on_cpu()

    load_non_experts(
        CheckpointIndex.open(path),
        model,
        layers=(0, 3),
        dtype=torch.float32,
        device="meta",
        on_host=(0, 2),
        embedding_on_host=True,
        ready=look,
    )
    assert ready == [0, 2]
    own = ("model.layers.0.", "model.layers.2.", "model.embed_tokens.")
    assert on_cpu() == {n for n in model.state_dict() if n.startswith(own) and ".experts." not in n}


def test_tied_embeddings_share_one_tensor(tmp_path: Path, make_model: Make) -> None:
    path = saved(tmp_path, make_model("qwen3_moe", tie_word_embeddings=True))
    index = CheckpointIndex.open(path)
    assert "lm_head.weight" not in index.tensors
    model = meta_model(path, torch.float32)
    check_non_experts(index, model)
    load_non_experts(index, model, layers=(0, 3), dtype=torch.float32, device="cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    last = meta_model(path, torch.float32)
    load_non_experts(index, last, layers=(2, 3), dtype=torch.float32, device="cpu", need_embedding=False)
    assert torch.equal(last.lm_head.weight, index.read("model.embed_tokens.weight"))


def _edit(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_keys_that_the_family_ignores_and_keys_nobody_knows(tmp_path: Path, make_model: Make) -> None:
    path = saved(tmp_path, make_model("deepseek_v3"))

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(2)  # multi-token prediction
        tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(2)
        tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)
        tensors["model.layers.1.surprise"] = torch.zeros(2)

    _edit(path, add)
    model = meta_model(path, torch.float32)
    report = load_non_experts(
        CheckpointIndex.open(path), model, layers=(0, 2), dtype=torch.float32, device="cpu"
    )
    assert report.unexpected == ["model.layers.1.surprise"]
    assert report.ignored == [
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.mlp.experts.0.up_proj.weight",
    ]


def test_converters_of_the_family_are_applied(
    tmp_path: Path, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that stores gate and up of the dense layer as one tensor, as some families do."""
    original = make_model("deepseek_v3")
    path = saved(tmp_path, original)
    gate, up = (f"model.layers.0.mlp.{leaf}.weight" for leaf in ("gate_proj", "up_proj"))

    def join(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.mlp.both.weight"] = torch.cat((tensors.pop(gate), tensors.pop(up)))

    _edit(path, join)
    split = WeightConverter("mlp.both.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], [Chunk(dim=0)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [split])
    model = meta_model(path, torch.float32)
    check_non_experts(CheckpointIndex.open(path), model)
    report = load_non_experts(
        CheckpointIndex.open(path), model, layers=(0, 1), dtype=torch.float32, device="cpu"
    )
    assert report.unexpected == []
    state = original.state_dict()
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in (gate, up))


NORM = "model.layers.1.input_layernorm.weight"
REFUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(NORM), f"missing: {NORM}"),
    "missing head": (lambda t: t.pop("lm_head.weight"), "missing: lm_head.weight"),
    "shape": (lambda t: t.update({NORM: torch.ones(31)}), "found [31]; required [32]"),
    "fp8": (lambda t: t.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)}), "F8_E4M3 without scales"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_remedy(tmp_path: Path, make_model: Make, case: str) -> None:
    change, message = REFUSED[case]
    path = saved(tmp_path, make_model("deepseek_v3"))
    _edit(path, change)
    model, index = meta_model(path, torch.float32), CheckpointIndex.open(path)
    with pytest.raises(UserError) as early:  # from the headers alone
        check_non_experts(index, model)
    with pytest.raises(UserError) as caught:
        load_non_experts(index, model, layers=(0, 3), dtype=torch.float32, device="cpu")
    assert message in str(caught.value) and caught.value.remedy
    assert str(early.value) == str(caught.value)


@pytest.mark.parametrize("in_checkpoint", [False, True])
def test_biases_of_experts_in_one_place_only(
    tmp_path: Path, write: Make, make_experts: Make, in_checkpoint: bool
) -> None:
    tensors = make_experts()
    if in_checkpoint:
        tensors |= {n.replace("weight", "bias"): torch.zeros(t.shape[0]) for n, t in tensors.items()}
    model: Any = torch.nn.Module()
    model.experts = torch.nn.Module()
    leaf = "down_proj" if in_checkpoint else "down_proj_bias"
    model.experts.register_parameter(leaf, torch.nn.Parameter(torch.zeros(4, 8)))
    with pytest.raises(UserError, match="no place for" if in_checkpoint else "lacks the biases"):
        check_non_experts(CheckpointIndex.open(write(tmp_path / "m", tensors)), model)


def test_experts_without_a_gate(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(write_config(tmp_path / "config", "nemotron_h"))
    index = CheckpointIndex.open(saved(tmp_path, AutoModelForCausalLM.from_config(config)))
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    layout = ExpertLayout.detect(index)
    assert check_non_experts(index, whole, layout=layout).unexpected == []
    assert layout.names(1, 3) == {
        "up": "model.layers.1.mixer.experts.3.up_proj",
        "down": "model.layers.1.mixer.experts.3.down_proj",
    }


def test_scaled_rotary_table(tmp_path: Path, make_model: Make) -> None:
    """A scaled rotary embedding, whose table differs from the default one, comes out as from_pretrained's."""
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    path = saved(tmp_path, make_model("qwen3_moe", rope_parameters=rope))
    assert json.loads((path / "config.json").read_text())["rope_parameters"]["rope_type"] == "yarn"
    reference = AutoModelForCausalLM.from_pretrained(path)
    model = meta_model(path, torch.float32)
    assert materialize_buffers(model, "cpu") == [
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    ]
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)
