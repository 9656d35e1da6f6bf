"""Write a tiny random checkpoint twice: as its family is released, and as plain float32 values.

built = build_released(tmp_path, Case("deepseek_v3", "fp8"))
built.released      # directory: released keys, format and config.json
built.values        # directory that transformers loads: the same model, dequantised, float32
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.released.families import Config, Sizes, released_config, text_config
from tests.helpers.released.formats import (
    Encode,
    awq,
    fp4_scale,
    fp8_block,
    fp8_row,
    gptq,
    gptq_zeros,
    int4_packed,
    int4_zeros,
    int8_row,
    mxfp4_blocks,
    mxfp4_packed,
    nvfp4,
    nvfp4_stack,
    plain,
)

_EXPERT = re.compile(r"\bexperts\.(\d+\.|gate_up_proj$|down_proj$|input_linear|output_linear)")
# Linears that no release quantises.
_KEPT = re.compile(
    r"(embed|lm_head|^head\.|norm|\bgate\.|router|_gate\.|in_proj_ba|weights_proj|conv1d|compressor|hc_|\.eh_proj)"
)
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}


def _group(
    bits: int, kind: str, strategy: str, group: int | None = None, *, symmetric: bool = True
) -> Config:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "group_size": group}
    return {
        "group_0": {"targets": ["Linear"], "weights": {**weights, "symmetric": symmetric, "dynamic": False}}
    }


def _compressed(fmt: str, groups: Config, ignore: list[str]) -> Config:
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": groups,
        "ignore": ["lm_head", *ignore],
        "quantization_status": "compressed",
    }


_EXPERTS_ONLY = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@dataclass(frozen=True)
class Format:
    """How a release stores its linears.

    Attributes:
        experts, linears: of routed experts and of the other linears (None: as everything else).
        quantization: quantization_config.
        sizes: widths that the format allows, off its blocks where it can be.
    """

    experts: Encode
    linears: Encode | None = None
    quantization: Config | None = None
    sizes: Sizes = field(default_factory=Sizes)


_BLOCKED = Sizes(144, 136, 168, 2)
_GROUPED = Sizes(96, 160, 72, 2)
FORMATS: dict[str, Format] = {
    "f32": Format(plain(torch.float32)),
    "bf16": Format(plain(torch.bfloat16), sizes=Sizes(layers=2)),
    "fp8": Format(fp8_block(), fp8_block(), _FP8, _BLOCKED),
    "fp8_channel": Format(
        fp8_row,
        fp8_row,
        _compressed("float-quantized", _group(8, "float", "channel"), ["re:.*mlp.gate$"]),
        Sizes(layers=2),
    ),
    "int8": Format(
        int8_row,
        int8_row,
        _compressed("int-quantized", _group(8, "int", "channel"), ["re:.*mlp.gate$"]),
        Sizes(layers=2),
    ),
    "int4": Format(
        int4_packed,
        None,
        _compressed("pack-quantized", _group(4, "int", "group", 32), _EXPERTS_ONLY),
        _GROUPED,
    ),
    "gptq": Format(
        gptq,
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
        Sizes(96, 160, 64, 2),
    ),
    "gptq_zeros": Format(
        gptq_zeros,
        gptq_zeros,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        Sizes(96, 160, 64, 2),
    ),
    "awq": Format(
        awq,
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
        Sizes(96, 160, 64, 2),
    ),
    "int4_zeros": Format(
        int4_zeros,
        None,
        _compressed("pack-quantized", _group(4, "int", "group", 32, symmetric=False), _EXPERTS_ONLY),
        _GROUPED,
    ),
    "nvfp4": Format(
        nvfp4(("", "_scale", "_scale_2"), False),
        None,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]},
        _GROUPED,
    ),
    "nvfp4_stack": Format(
        nvfp4_stack,
        None,
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*self_attn*"]},
        _GROUPED,
    ),
    "nvfp4_packed": Format(
        nvfp4(("_packed", "_scale", "_global_scale"), True),
        None,
        _compressed("nvfp4-pack-quantized", _group(4, "float", "tensor_group", 16), _EXPERTS_ONLY),
        _GROUPED,
    ),
    "mxfp4": Format(
        mxfp4_packed,
        None,
        _compressed("mxfp4-pack-quantized", _group(4, "float", "group", 32), _EXPERTS_ONLY),
        _GROUPED,
    ),
    "mxfp4_blocks": Format(
        mxfp4_blocks,
        None,
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        _GROUPED,
    ),
    "v4_fp4": Format(
        fp4_scale, fp8_block("scale", powers=True), {**_FP8, "scale_fmt": "ue8m0"}, Sizes(160, 96, 72, 2)
    ),
    "v4_fp8": Format(
        fp8_block("scale", powers=True),
        fp8_block("scale", powers=True),
        {**_FP8, "scale_fmt": "ue8m0"},
        _BLOCKED,
    ),
}


@dataclass(frozen=True)
class Case:
    """One family in one stored format."""

    family: str
    format: str
    overrides: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.family}-{self.format}"


@dataclass(frozen=True)
class Built:
    """Two directories of one model; `skipped`: keys of the release that no text model has."""

    released: Path
    values: Path
    skipped: frozenset[str]


def build_released(root: Path, case: Case, *, seed: int = 0) -> Built:
    """Write `root/released` and `root/values`.

    Float32 cases have three layers and weights of full size; the others two, with what writes into the
    residual stream scaled down, as rounding errors compound on random weights.
    """
    fmt = FORMATS[case.format]
    text = text_config(case.family, fmt.sizes, **dict(case.overrides))
    released, values = root / "released", root / "values"
    state = _random_state(values, text, seed, 1.0 if case.format == "f32" else 0.25)
    float32 = case.format == "f32"
    everything = plain(torch.float32 if float32 else torch.bfloat16)
    stored: dict[str, Tensor] = {}
    exact: dict[str, Tensor] = {}
    for key, value in state.items():
        if not value.is_floating_point():
            encode = plain(value.dtype)
        elif _EXPERT.search(key) and not key.endswith("_bias"):
            encode = fmt.experts
        elif fmt.linears is not None and value.dim() == 2 and not _KEPT.search(key):
            encode = fmt.linears
        elif re.search(r"correction_bias|A_log|hc_|gate\.bias", key):
            encode = plain(torch.float32)
        else:
            encode = everything
        tensors, exact_value = encode(key, value)
        stored |= tensors
        exact[key] = exact_value if value.is_floating_point() else value
    save_file({k: v.contiguous() for k, v in exact.items()}, values / "model.safetensors", {"format": "pt"})
    final = dict(_released_keys(case.family, stored))
    extra = _beside(case.family, text, final)
    released.mkdir()
    _save_in_shards(released, {**final, **extra})
    dtype = "float32" if float32 else "bfloat16"
    config = released_config(case.family, text, dtype, fmt.quantization)
    (released / "config.json").write_text(json.dumps(config, indent=2))
    return Built(released, values, frozenset(extra))


def _random_state(path: Path, text: Config, seed: int, residual: float) -> dict[str, Tensor]:
    """Save a random model with transformers; its tensors under the keys it was saved with."""
    arguments = {k: v for k, v in text.items() if k != "model_type"}
    config = AutoConfig.for_model(text["model_type"], **arguments)
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            _fill(name, tensor, residual)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.05 * torch.randn_like(buffer))
            elif name.endswith("tid2eid"):
                rows = [torch.randperm(text["n_routed_experts"])[: buffer.shape[1]] for _ in buffer]
                buffer.copy_(torch.stack(rows))
    logging.getLogger("transformers").setLevel(logging.ERROR)
    model.save_pretrained(path)
    return load_file(path / "model.safetensors")


def _fill(name: str, tensor: Tensor, residual: float) -> None:
    if name.endswith(("A_log", "dt_bias")):
        return  # the family's own initialisation: decay rates
    if "norm" in name and name.endswith("weight"):
        tensor.add_(0.1 * torch.randn_like(tensor))  # some families count from one, others from zero
    elif tensor.dim() == 1 or name.endswith("bias"):
        tensor.copy_(0.1 * torch.randn_like(tensor))
    else:  # wide enough for distinct routing and gradients of order one
        tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
        if re.search(r"\b(o_proj|o_b_proj|out_proj|down_proj)\b", name):
            tensor.mul_(residual)


# -- keys as released ----------------------------------------------------------------------------

_ZERO_EXPERT = re.compile(r"\.experts\.(8|9|\d\d+)\.")  # whose gate and up transformers saves
_V4_ROOT = {
    "model.embed_tokens.": "embed.",
    "model.norm.": "norm.",
    "model.hc_head.hc_": "hc_head_",
    "model.layers.": "layers.",
}


def _released_keys(family: str, stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What `save_pretrained` names otherwise than the release does."""
    if family == "qwen3_5_moe":
        yield from _fused(stored)
        return
    for key, value in stored.items():
        name = key
        if family == "longcat_flash" and _ZERO_EXPERT.search(key):
            continue
        if family == "deepseek_v4":
            for old, new in _V4_ROOT.items():
                if key.startswith(old):
                    name = new + key.removeprefix(old)
            name = name.replace(".attn.norm.", ".attn.kv_norm.")
        yield name, value


def _fused(stored: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Qwen3.5: experts as [E, 2I, H] and [E, H, I], the language model under its own prefix."""
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for key, value in stored.items():
        match = re.fullmatch(r"model\.(.*\.experts)\.(\d+)\.(\w+)\.weight", key)
        if match:
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = value
        else:
            yield (
                key.replace("model.", "model.language_model.", 1) if key.startswith("model.") else key,
                value,
            )
    for path, held in experts.items():
        count = 1 + max(expert for expert, _ in held)
        both = [torch.cat((held[e, "gate_proj"], held[e, "up_proj"])) for e in range(count)]
        yield f"model.language_model.{path}.gate_up_proj", torch.stack(both)
        yield (
            f"model.language_model.{path}.down_proj",
            torch.stack([held[e, "down_proj"] for e in range(count)]),
        )


def _beside(family: str, text: Config, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keys of the release that the language model has no place for: next-token layers, the vision tower."""
    hidden, extra = text["hidden_size"], {}
    last = text.get("num_hidden_layers", text.get("num_layers")) - 1
    if family in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe"):
        for key, value in stored.items():
            if key.startswith(f"model.layers.{last}."):
                extra[key.replace(f"layers.{last}.", f"layers.{last + 1}.", 1)] = value.clone()
        for name in ("enorm", "hnorm", "shared_head.norm"):
            extra[f"model.layers.{last + 1}.{name}.weight"] = torch.ones(hidden)
        extra[f"model.layers.{last + 1}.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
        extra[f"model.layers.{last + 1}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
        extra[f"model.layers.{last + 1}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
    if family == "deepseek_v4":
        for key, value in stored.items():
            if key.startswith(f"layers.{last}."):
                extra[key.replace(f"layers.{last}.", "mtp.0.", 1)] = value.clone()
        extra |= {f"mtp.0.{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "norm")}
    if family == "longcat_flash":
        extra["model.mtp.layers.0.eh_proj.weight"] = torch.ones(hidden, 2 * hidden)
        extra["model.mtp.layers.0.self_attn.q_a_proj.weight"] = torch.ones(20, hidden)
        extra["model.mtp.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    if family in ("qwen3_next", "qwen3_5_moe"):
        extra["mtp.fc.weight"] = torch.ones(hidden, 2 * hidden)
        extra["mtp.norm.weight"] = torch.ones(hidden)
        extra["mtp.layers.0.mlp.gate.weight"] = torch.ones(8, hidden)
        if family == "qwen3_next":
            extra["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.ones(
                text["moe_intermediate_size"], hidden
            )
        else:
            extra["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(
                8, 2 * text["moe_intermediate_size"], hidden
            )
    if family == "qwen3_5_moe":
        extra["model.visual.patch_embed.proj.weight"] = torch.ones(16, 3, 2, 4, 4)
        extra["model.visual.blocks.0.attn.qkv.weight"] = torch.ones(48, 16)
        extra["model.visual.merger.norm.weight"] = torch.ones(16)
    return extra


def _save_in_shards(path: Path, tensors: dict[str, Tensor]) -> None:
    """Two shards and an index, as releases have them."""
    names = sorted(tensors)
    where: dict[str, str] = {}
    for i in range(2):
        shard = f"model-{i + 1:05d}-of-00002.safetensors"
        mine = names[i::2]
        save_file({name: tensors[name].contiguous() for name in mine}, path / shard, {"format": "pt"})
        where |= dict.fromkeys(mine, shard)
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
