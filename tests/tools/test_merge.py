"""merge: the base plus the adapter, in every format and layout; equal to PEFT's own merge."""

from __future__ import annotations

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from kt_ray.adapter.peft_config import TEMPLATE, AdapterInfo, adapter_config
from kt_ray.checkpoint import CheckpointIndex, ExpertLayout
from kt_ray.checkpoint.expert_groups import expert_groups
from kt_ray.errors import UserError
from kt_ray.tools.convert import Options, convert
from kt_ray.tools.merge import merge, show
from tests.helpers.released.formats import (
    Encode,
    awq,
    fp8_block_modelopt,
    gptq,
    gptq_bytes,
    gptq_zeros,
    int4_zeros,
    int8_packed,
    nvfp4,
    nvfp4_stack,
)
from tests.helpers.tiny_families import tiny_family
from tests.helpers.tiny_moe import (
    E,
    H,
    I,
    encoded,
    encoding_of,
    expert_modules,
    fused,
    granite,
    lora,
    per_expert,
    save,
    save_adapter,
    values,
)


def released(encode: Encode, plain: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for key, value in (plain or per_expert()).items():
        matrices = ".experts." in key and not key.endswith("_bias")
        tensors |= encode(key, value.float()).tensors if matrices else {key: value}
    return tensors


MIXTRAL: dict[str, Any] = {"moe": "block_sparse_moe", "leaves": ("w1", "w3", "w2")}
SCALE = 6 / 4
# Largest relative error of what was quantised again.
BOUNDS = {"fp8": 0.03, "int8": 0.01, "int4": 0.11, "mxfp4": 0.14, "nvfp4": 0.13, "plain": 0.004}
GPT_OSS = {"model_type": "gpt_oss"}
PACKED_8 = {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 8}}}}
NOT_SYMMETRIC = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
BASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bf16": ("plain", per_expert(), {}),
    "float32": ("plain", per_expert(torch.float32), {}),
    "mixtral": ("plain", per_expert(**MIXTRAL), {"model_type": "mixtral"}),
    "fused": ("plain", fused(), {"model_type": "qwen3_5_moe_text"}),
    "granite": ("plain", granite(), {"model_type": "granitemoe"}),
    "transposed": ("plain", fused(transposed=True), {"model_type": "qwen3_vl_moe_text"}),
    "gpt_oss": ("mxfp4", encoded(fused(interleaved=True, biases=True), "mxfp4-blocks"), GPT_OSS),
    "gpt_oss bf16": ("plain", fused(interleaved=True, biases=True, transposed=True), GPT_OSS),
    "gpt_oss nvfp4": (
        "nvfp4",
        released(nvfp4_stack, fused(interleaved=True, biases=True, transposed=True)),
        GPT_OSS,
    ),
    "fp8": ("fp8", encoded(per_expert(), "fp8"), {}),
    "fp8 of ModelOpt": ("fp8", released(fp8_block_modelopt), {}),
    "fp8 rows": ("fp8", encoded(per_expert(), "fp8-row"), {}),
    "fp8 fused": ("fp8", encoded(fused(), "fp8-fused"), {}),
    "int8": ("int8", encoded(per_expert(), "int8"), {}),
    "int4": ("int4", encoded(per_expert(), "int4", group=32), {}),
    "gptq": ("int4", released(gptq), {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "gptq, 8 bits": (
        "int8",
        released(gptq_bytes),
        {"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": 32}},
    ),
    "int8 in words": ("int8", released(int8_packed), {"quantization_config": PACKED_8}),
    "gptq, zero points": ("int4", released(gptq_zeros), {"quantization_config": NOT_SYMMETRIC}),
    "awq": ("int4", released(awq), {"quantization_config": {"quant_method": "awq", "group_size": 32}}),
    "int4, zero points": ("int4", released(int4_zeros), {}),
    "nvfp4": ("nvfp4", released(nvfp4(("", "_scale", "_scale_2"), False)), {}),
    "nvfp4 packed": ("nvfp4", released(nvfp4(("_packed", "_scale", "_global_scale"), True)), {}),
    "mxfp4": ("mxfp4", encoded(per_expert(), "mxfp4"), {}),
    "fp4": ("mxfp4", encoded(per_expert(), "fp4"), {}),
}


def matrices(path: Path) -> dict[tuple[int, int, str], torch.Tensor]:
    """(layer, expert, projection) -> values."""
    return {
        (group.layer, e, p): group.read(e, p)
        for group in expert_groups(CheckpointIndex.open(path)).values()
        for e in range(E)
        for p in ("gate", "up", "down")
    }


def deltas(
    adapter: dict[str, torch.Tensor], moe: str, leaves: tuple[str, str, str]
) -> dict[tuple[int, int, str], torch.Tensor]:
    result = {}
    for layer in range(2):
        for e in range(E):
            for p, leaf in zip(("gate", "up", "down"), leaves, strict=True):
                module = f"model.layers.{layer}.{moe}.experts.{e}.{leaf}"
                if f"{module}.lora_A.weight" in adapter:
                    result[layer, e, p] = (
                        SCALE * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
                    )
    return result


@pytest.mark.parametrize("bf16", [False, True], ids=["same", "bf16"])
@pytest.mark.parametrize("name", BASES)
def test_base_plus_adapter(tmp_path: Path, name: str, bf16: bool) -> None:
    kind, tensors, config = BASES[name]
    names = MIXTRAL if name == "mixtral" else {"moe": "mlp", "leaves": ("gate_proj", "up_proj", "down_proj")}
    adapter = lora(expert_modules(**names))
    base = save(tmp_path / "base", tensors, config)
    path = save_adapter(tmp_path / "adapter", adapter)
    report = merge(base, path, tmp_path / "out", bf16=bf16, shard_bytes=50_000)
    assert report["experts"] == 2 * E * 3 and report["linear"] == 2
    before, after, change = matrices(base), matrices(tmp_path / "out"), deltas(adapter, **names)
    bound = BOUNDS["plain" if bf16 else kind]
    for key, value in before.items():
        expected = value + change[key]
        assert float((after[key] - expected).norm() / expected.norm()) < bound, key
        assert float((after[key] - value).norm() / change[key].norm()) > 0.5
    source, out = CheckpointIndex.open(base), CheckpointIndex.open(tmp_path / "out")
    q = "model.layers.0.self_attn.q_proj.weight"
    delta = (
        SCALE * adapter[q.replace("weight", "lora_B.weight")] @ adapter[q.replace("weight", "lora_A.weight")]
    )
    expected, ulp = source.read(q).float() + delta, 2**-8 if source.read(q).dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out.read(q).float(), expected, rtol=ulp, atol=1e-7)
    if bf16:
        assert not out.matrices and "quantization_config" not in out.config
        return
    assert out.tensors.keys() == source.tensors.keys() and out.config == source.config
    for key, info in source.tensors.items():
        assert (out.tensors[key].dtype, out.tensors[key].shape) == (info.dtype, info.shape)
        if not any(part in key for part in (".experts.", "_linear.", "q_proj")):
            assert torch.equal(out.read(key), source.read(key)), key


@pytest.mark.parametrize("to", ["same", "bf16", "convert"])
def test_biases_of_zeros_beside_gptq(tmp_path: Path, to: str) -> None:
    """AutoGPTQ's modules had them, the model's have none: they end with the packing."""
    _, tensors, config = BASES["gptq"]
    biases = {k.replace("qweight", "bias"): v.shape[1] for k, v in tensors.items() if k.endswith("qweight")}
    base = save(tmp_path / "base", tensors | {k: torch.zeros(n).half() for k, n in biases.items()}, config)
    if to == "convert":
        convert(base, tmp_path / "out", Options("int8"))
    else:
        adapter = save_adapter(tmp_path / "adapter", lora(expert_modules()))
        merge(base, adapter, tmp_path / "out", bf16=to == "bf16")
    out = CheckpointIndex.open(tmp_path / "out")
    assert out.names & biases.keys() == (biases.keys() if to == "same" else set())
    assert not ExpertLayout.detect(out).biased


@pytest.mark.parametrize("name", ["bf16", "fused", "gpt_oss", "gpt_oss nvfp4", "int4", "fp8 fused"])
def test_untouched_experts_keep_their_bytes(tmp_path: Path, name: str) -> None:
    _, tensors, config = BASES[name]
    modules = {"model.layers.1.mlp.experts.2.up_proj": (I, H)}
    base = save(tmp_path / "base", tensors, config)
    report = merge(base, save_adapter(tmp_path / "adapter", lora(modules)), tmp_path / "out")
    assert report["touched"] == 1
    before, after = matrices(base), matrices(tmp_path / "out")
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    # fused: gate shares no rows with up, yet FP8 blocks of 128 rows span both
    assert (1, 2, "up") in changed and changed <= {(1, 2, "up"), (1, 2, "gate")}
    if name != "fp8 fused":
        assert changed == {(1, 2, "up")}


def fused_adapter(
    interleaved: bool,
) -> tuple[dict[str, torch.Tensor], dict[tuple[int, int, str], torch.Tensor]]:
    """PEFT's form with a gate_up whose B is not block-diagonal, and what it adds."""
    rank, tensors, change = 4, {}, {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        a, b = values(E * rank, H, seed=layer), values(2 * I, rank * E, seed=layer + 5)
        a2, b2 = values(E * rank, I, seed=layer + 9), values(H, rank * E, seed=layer + 13)
        tensors |= {f"{prefix}.base_layer.lora_A.weight": a, f"{prefix}.base_layer.lora_B.weight": b}
        tensors |= {f"{prefix}.lora_A.weight": a2, f"{prefix}.lora_B.weight": b2}
        for e in range(E):
            both = SCALE * b.view(2 * I, rank, E)[:, :, e] @ a.view(E, rank, H)[e]
            gate, up = (both[0::2], both[1::2]) if interleaved else both.chunk(2)
            change |= {(layer, e, "gate"): gate, (layer, e, "up"): up}
            change[layer, e, "down"] = SCALE * b2.view(H, rank, E)[:, :, e] @ a2.view(E, rank, I)[e]
    return tensors, change


@pytest.mark.parametrize("name", ["bf16", "fused", "transposed", "gpt_oss", "gpt_oss bf16", "int8"])
def test_fused_adapters(tmp_path: Path, name: str) -> None:
    kind, tensors, config = BASES[name]
    adapter, change = fused_adapter(name.startswith("gpt_oss"))
    base = save(tmp_path / "base", tensors, config)
    merge(base, save_adapter(tmp_path / "adapter", adapter), tmp_path / "out")
    before, after = matrices(base), matrices(tmp_path / "out")
    for key, value in before.items():
        expected = value + change[key]
        assert float((after[key] - expected).norm() / expected.norm()) < BOUNDS[kind], key


def test_patterns_and_rslora(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert(torch.float32))
    q = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    adapter = lora({q[0]: (H, H)}, rank=2) | lora({q[1]: (H, H)}, rank=4)
    options = {"rank_pattern": {r"layers\.0.*q_proj": 2}, "alpha_pattern": {"q_proj": 5}, "use_rslora": True}
    merge(base, save_adapter(tmp_path / "adapter", adapter, **options), tmp_path / "out")
    source, out = CheckpointIndex.open(base), CheckpointIndex.open(tmp_path / "out")
    for module, rank in zip(q, (2, 4), strict=True):
        delta = 5 / rank**0.5 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        torch.testing.assert_close(out.read(f"{module}.weight"), source.read(f"{module}.weight") + delta)


def test_patterns_of_named_parameters(tmp_path: Path) -> None:
    """PEFT compares patterns with "...weight" where target_parameters names a linear module's weight."""
    base = save(tmp_path / "base", per_expert(torch.float32))
    q = [f"model.layers.{i}.self_attn.q_proj" for i in range(2)]
    adapter = lora(dict.fromkeys(q, (H, H)))
    options = {"target_parameters": [f"{q[0]}.weight"], "alpha_pattern": {r"q_proj\.weight": 5, "q_proj": 7}}
    merge(base, save_adapter(tmp_path / "adapter", adapter, **options), tmp_path / "out")
    source, out = CheckpointIndex.open(base), CheckpointIndex.open(tmp_path / "out")
    for module, alpha in zip(q, (5, 7), strict=True):
        delta = alpha / 4 * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        torch.testing.assert_close(out.read(f"{module}.weight"), source.read(f"{module}.weight") + delta)


# -- PEFT's own merge --------------------------------------------------------------------------


def peft_merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        return PeftModel.from_pretrained(model, str(adapter)).merge_and_unload().state_dict()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe"])
def test_peft_merges_the_same(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    base = tiny_family(tmp_path, family)
    shapes = {
        name.removesuffix(".weight"): tuple(value.shape)
        for name, value in load_file(base / "model.safetensors").items()
        if name.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "mqa.weight"))
    }
    adapter = lora(shapes)
    info = AdapterInfo(str(base), family, 4, 6.0)
    path = save_adapter(tmp_path / "adapter", adapter, **adapter_config(adapter, info))
    report = merge(base, path, tmp_path / "out", shard_bytes=100_000)
    assert report["experts"] + report["linear"] == len(shapes)
    expected = peft_merged(base, path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).state_dict()
    assert merged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6, msg=name)
    assert sum(not torch.equal(plain[n], v) for n, v in merged.items()) > len(plain) // 3


@pytest.mark.parametrize("targets", [("gate_up", "down"), ("gate_up",), ("down",)], ids="+".join)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "longcat_flash"])
def test_adapters_that_peft_trained_on_fused_experts(
    tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    """LongCat-Flash's gate_up has rows of zero experts, which nothing reads."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = tiny_family(tmp_path, family)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["o_proj"],
        target_parameters=[f"experts.{t}_proj" for t in targets],
        rank_pattern={"experts.gate_up_proj": 2},
        init_lora_weights=False,
    )
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of saving without the hub, and of patterns as elsewhere
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
        model.save_pretrained(tmp_path / "adapter")
    expected = model.merge_and_unload().state_dict()
    merge(base, tmp_path / "adapter", tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, value in expected.items():
        used = len(value)
        if name.endswith("experts.gate_up_proj"):
            used = len(expected[name.replace("gate_up", "down")])
        torch.testing.assert_close(merged[name][:used], value[:used], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", ["deepseek_v4", "qwen3_5_moe_text", "minimax_m2", "phimoe", "qwen3_next"])
def test_every_linear_module_of_families_that_rename(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    base = tiny_family(tmp_path, family)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    adapter = lora({n: (m.out_features, m.in_features) for n, m in linear.items()})
    report = merge(base, save_adapter(tmp_path / "adapter", adapter), tmp_path / "out")
    assert report["linear"] == len(linear)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    for name, value in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in linear:
            value = value + SCALE * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("stored", [False, True])
def test_a_head_that_was_tied_to_the_embedding(tmp_path: Path, stored: bool) -> None:
    """Servers that tie them by config.json would read no head."""
    base = tiny_family(tmp_path, "qwen3_moe")
    tensors = load_file(base / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    tensors |= {"lm_head.weight": head}
    save_file(
        {k: v for k, v in tensors.items() if stored or k != "lm_head.weight"}, base / "model.safetensors"
    )
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": True}
    (base / "config.json").write_text(json.dumps(config))
    adapter = lora({"lm_head": (head.shape[0], head.shape[1])})
    report = merge(base, save_adapter(tmp_path / "adapter", adapter), tmp_path / "out")
    out = CheckpointIndex.open(tmp_path / "out")
    change = SCALE * adapter["lm_head.lora_B.weight"] @ adapter["lm_head.lora_A.weight"]
    torch.testing.assert_close(out.read("lm_head.weight"), (head.float() + change).to(head.dtype))
    assert torch.equal(out.read("model.embed_tokens.weight"), head) and report["linear"] == 1
    assert out.config == config | {"tie_word_embeddings": False}


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Keys under "model.language_model.", an adapter that names the text model alone."""
    text = tiny_family(tmp_path, "qwen3_5_moe_text")
    inner = json.loads((text / "config.json").read_text())
    base = tmp_path / "base"
    base.mkdir()
    config = {"model_type": "qwen3_5_moe", "text_config": inner, "architectures": ["x"]}
    (base / "config.json").write_text(json.dumps(config))
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in load_file(text / "model.safetensors").items()
    }
    tensors["model.visual.blocks.0.attn.proj.weight"] = torch.ones(3, 3)
    save_file(tensors, base / "model.safetensors")
    expert = "model.layers.1.mlp.experts.3.down_proj"
    linear = ("model.layers.1.mlp.shared_expert.up_proj", "model.layers.0.linear_attn.out_proj", "lm_head")
    shapes = {m: tuple(load_file(text / "model.safetensors")[f"{m}.weight"].shape) for m in linear}
    adapter = save_adapter(tmp_path / "adapter", lora(shapes | {expert: (48, 24)}))
    report = merge(base, adapter, tmp_path / "out")
    assert (report["linear"], report["experts"]) == (3, 1)
    merge(text, adapter, tmp_path / "text")
    merged, alone = (load_file(tmp_path / n / "model.safetensors") for n in ("out", "text"))
    for name, value in alone.items():
        key = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        assert torch.equal(merged[key], value), name


def test_experts_of_multi_token_prediction_are_not_those_of_the_layer(tmp_path: Path) -> None:
    base = per_expert()
    inner = [name for name in base if name.startswith("model.layers.0.mlp.experts.")]
    predicting = {name.replace("model.", "mtp.", 1): base[name].clone() for name in inner}
    config = {"num_hidden_layers": 2}
    target = {"mtp.layers.0.mlp.experts.0.up_proj": (I, H)}
    source = save(tmp_path / "base", base | predicting, config)
    adapter = save_adapter(tmp_path / "adapter", lora(target))
    merge(source, adapter, tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    changed = [name for name, value in (base | predicting).items() if not torch.equal(merged[name], value)]
    assert changed == ["mtp.layers.0.mlp.experts.0.up_proj.weight"]
    with pytest.raises(UserError, match=r"mtp\.layers\.0"):
        merge(save(tmp_path / "without", base, config), adapter, tmp_path / "none")


def test_two_sets_of_experts_in_a_layer(tmp_path: Path) -> None:
    """A tower's and the language model's: the name tells which."""
    base = per_expert()
    inner = [name for name in base if name.startswith("model.layers.0.mlp.experts.")]
    tower = {name.replace("model.", "vision_tower.", 1): base[name].clone() for name in inner}
    source = save(tmp_path / "base", base | tower)
    expert = "layers.0.mlp.experts.0.up_proj"
    merge(source, save_adapter(tmp_path / "a", lora({f"model.{expert}": (I, H)})), tmp_path / "out")
    merged = load_file(tmp_path / "out" / "model.safetensors")
    changed = [name for name, value in (base | tower).items() if not torch.equal(merged[name], value)]
    assert changed == [f"model.{expert}.weight"]
    unclear = save_adapter(tmp_path / "b", lora({f"text.{expert}": (I, H)}))
    with pytest.raises(UserError, match=r"several sets.*model\.layers\.0.*vision_tower\.layers\.0"):
        merge(source, unclear, tmp_path / "none")


def test_a_job_that_was_stopped_before_it_began(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", lora({"model.layers.0.self_attn.q_proj": (H, H)}))
    job = tmp_path / "out" / ".job"
    job.mkdir(parents=True)
    (job / ".job.json.1.partial").write_text("{")
    merge(base, path, tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file() and not job.exists()


def test_the_chat_template_of_the_adapter(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", lora({"model.layers.0.self_attn.q_proj": (H, H)}))
    (base / TEMPLATE).write_text("the base's")
    (base / "chat_template.json").write_text("{}")  # which would count before the other
    assert not merge(base, path, tmp_path / "one")["template"]
    (path / TEMPLATE).write_text("its own")
    assert merge(base, path, tmp_path / "two")["template"]
    found = [(tmp_path / out / TEMPLATE).read_text() for out in ("one", "two")]
    assert found == ["the base's", "its own"]
    assert [(tmp_path / out / "chat_template.json").exists() for out in ("one", "two")] == [True, False]


def test_files_of_the_quantisation_that_is_gone(tmp_path: Path) -> None:
    """Servers would take plain weights for quantised ones."""
    config = {"compression_config": {"quant_method": "compressed-tensors"}}
    base = save(tmp_path / "base", encoded(per_expert(), "fp8-row"), config)
    path = save_adapter(tmp_path / "adapter", lora(expert_modules()))
    (base / "hf_quant_config.json").write_text("{}")
    merge(base, path, tmp_path / "same")
    merge(base, path, tmp_path / "bf16", bf16=True)
    convert(base, tmp_path / "int4", Options("int4"))
    for out, kept in (("same", True), ("bf16", False), ("int4", False)):
        assert (tmp_path / out / "hf_quant_config.json").exists() == kept
        assert ("compression_config" in CheckpointIndex.open(tmp_path / out).config) == kept
        assert (tmp_path / out / "tokenizer.json").is_file()


@pytest.mark.parametrize("name", [name for name, (kind, _, _) in BASES.items() if kind != "plain"])
def test_an_update_of_zero_moves_nothing_and_a_small_one_is_not_drowned(tmp_path: Path, name: str) -> None:
    """Scales chosen anew would round every INT4 and MXFP4 weight once more, by several per cent."""
    _, tensors, config = BASES[name]
    names: dict[str, Any] = {"moe": "mlp", "leaves": ("gate_proj", "up_proj", "down_proj")}
    base, adapter = save(tmp_path / "base", tensors, config), lora(expert_modules(**names))
    before = matrices(base)
    for factor in (0.0, 0.13):  # the latter changes weights by 2 %
        update = {key: factor * v if "lora_B" in key else v for key, v in adapter.items()}
        out = tmp_path / f"out {factor}"
        report = merge(base, save_adapter(tmp_path / f"adapter {factor}", update), out)
        after, change = matrices(out), deltas(update, **names)
        for key, value in before.items():
            size, error = change[key].norm(), float((after[key] - value - change[key]).norm())
            assert error <= 1.1 * float(size), key
            assert not factor or 0.015 < float(size / value.norm()) < 0.025, key
        assert_left(report, [(after[key] - before[key], change[key]) for key in before])
        if factor:  # BF16 holds it
            assert (
                0.97
                < merge(base, tmp_path / "adapter 0.13", tmp_path / "bf16", bf16=True)["left_of_plain"]
                < 1.01
            )


def assert_left(report: dict[str, Any], moves: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Of how the weights moved, and should have: the share, and what is said where it is small."""
    along = sum(float((move * update).sum()) for move, update in moves)
    whole = sum(float(update.square().sum()) for _, update in moves)
    assert report["left"] == (pytest.approx(along / whole, abs=1e-3) if whole else None)
    show(report, Console(file=(text := io.StringIO())))
    asked = "(to keep more, merge with --dtype bf16)" in " ".join(text.getvalue().split())
    assert asked == (along < 0.9 * whole)


def test_bf16_of_families_whose_release_transposes_fused_experts(tmp_path: Path) -> None:
    """Experts one by one would have to become fused; other quantised weights are written as they lie."""
    names = {"model_type": "qwen3_vl_moe_text"}
    path = save_adapter(tmp_path / "adapter", lora({"model.layers.0.self_attn.q_proj": (H, H)}))
    experts = save_adapter(tmp_path / "experts", lora(expert_modules()))
    apart = save(tmp_path / "apart", encoded(per_expert(), "fp8"), names)
    for adapter in (path, experts):
        with pytest.raises(UserError, match=r"one by one have no BF16 form.*convert BASE DIR --to bf16"):
            merge(apart, adapter, tmp_path / "one", bf16=True)
    tensors: dict[str, Any] = fused(transposed=True)
    key = "model.layers.0.self_attn.q_proj.weight"
    encoding = encoding_of("fp8", key, (H, H))
    for entry, value in zip(encoding.entries, encoding.encode(tensors.pop(key))[:2], strict=True):
        tensors[entry.key] = (entry.dtype, value)
    base = save(tmp_path / "base", tensors, names)
    source = CheckpointIndex.open(base)
    assert key in source.matrices
    merge(base, path, tmp_path / "two", bf16=True)
    out = CheckpointIndex.open(tmp_path / "two")
    assert not out.matrices and all(out.shape(name) == source.shape(name) for name in source.names)


@pytest.mark.parametrize(
    ("targets", "roles"),
    [
        (["down_proj"], {0: "down", 1: "down"}),  # as PEFT saves target_modules=["down_proj"]
        (
            ["model.layers.0.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"],
            {0: "gate_up", 1: "down"},
        ),
    ],
)
def test_one_fused_parameter_a_layer(tmp_path: Path, targets: list[str], roles: dict[int, str]) -> None:
    tensors = {}
    for layer, role in roles.items():
        columns, rows = (H, 2 * I) if role == "gate_up" else (I, H)
        prefix = f"model.layers.{layer}.mlp.experts"
        tensors[f"{prefix}.lora_A.weight"] = values(E * 4, columns, seed=layer)
        tensors[f"{prefix}.lora_B.weight"] = values(rows, 4 * E, seed=layer + 5)
    base = save(tmp_path / "base", per_expert(torch.float32))
    report = merge(base, save_adapter(tmp_path / "a", tensors, target_parameters=targets), tmp_path / "out")
    assert report["experts"] == sum(2 * E if role == "gate_up" else E for role in roles.values())
