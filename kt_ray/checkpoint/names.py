"""What a tensor of a checkpoint, an adapter or a model is, by its name; and which layouts of experts exist.

    one by one   model.layers.3.mlp.experts.5.gate_proj.weight          up_proj, down_proj; .bias
                 model.layers.3.block_sparse_moe.experts.5.w1.weight     w1, w3, w2: Mixtral, MiniMax, PhiMoE
                 layers.3.ffn.experts.5.w1.weight                        DeepSeek-V4
    fused        model.layers.3.mlp.experts.gate_up_proj, down_proj      also .weight; _bias or .bias
                 model.layers.3.mlp.experts.up_proj, down_proj           without a gate
                 model.layers.3.moe.gate_proj.weight, up_proj, down_proj Step-3.7
                 ...mlp.experts.fc1.weight, fc2                          Aria
                 ...block_sparse_moe.input_linear.weight, output_linear  Granite
    GGUF         blk.3.ffn_gate_exps.weight, ffn_up_, ffn_down_, ffn_gate_up_; .bias

A fused tensor holds all E experts: gate_up [E, 2I, H] (rows of gate, then rows of up; or alternating) and
down [E, H, I]; or with the last two axes swapped. Multi-token prediction is in "mtp.", or in layers beyond
the last.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# model_type in released files -> the same architecture's in transformers.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_m3": "minimax_m3_vl_text",
}
PROJECTIONS = ("gate", "up", "down")
LEAVES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}  # transformers' and PEFT's names
# Last parts of the names, by what the tensor holds.
MAGNITUDE = ".lora_magnitude_vector"  # how the name of a DoRA magnitude [out] ends
ONE_BY_ONE = (LEAVES, {"gate": "w1", "up": "w3", "down": "w2"})
FUSED = (
    {"gate_up": "gate_up_proj", "down": "down_proj"},
    {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"},
    {"gate_up": "fc1", "down": "fc2"},
    {"gate_up": "input_linear", "down": "output_linear"},
)
_ROLE_OF_ONE = {leaf: role for leaves in ONE_BY_ONE for role, leaf in leaves.items()}
_ROLE_OF_ALL = {leaf: role for leaves in FUSED for role, leaf in leaves.items()}
_EXPERT = re.compile(
    # Granite's and Step's experts have no level of their own in the file, but one in transformers; Step's MoE
    # has another name there, too.
    r"^(?P<prefix>.*?(?:\bexperts|\bblock_sparse_moe(?=\.(?:in|out)put_linear\b)"
    r"|\bmoe(?=\.(?:gate|up|down)_proj\b)))\.(?:(?P<expert>\d+)\.)?"
    rf"(?P<leaf>{'|'.join(_ROLE_OF_ONE | _ROLE_OF_ALL)})(?P<end>|\.weight|\.bias|_bias)$"
)
_BELOW_EXPERTS = re.compile(r"\bexperts\.(?P<rest>[\w.]+)$")
_GGUF = re.compile(r"^blk\.(?P<layer>\d+)\.ffn_(?P<role>\w+)_exps\.(?P<end>[\w.]+)$")
_GGUF_OLD = re.compile(r"^blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight$")
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_MTP = re.compile(r"(^|\.)(mtp|mtp_layers|nextn|eh_proj)\b|^talker\.")  # talker: Qwen3-Omni's speech model
_OTHER_MODALITY = re.compile(
    r"(^|\.)(visual|vision_\w+|audio_\w+|mm_projector|multi_modal_projector|talker|code2wav"
    r"|vit_large_projector)\."
)
# Projections that DeepSeek's quantised releases keep plain, and servers read as such: of the sparse
# attention's indexer, and the entry of a multi-token prediction layer.
_KEPT_PLAIN = frozenset({"weights_proj", "eh_proj"})
_LINEAR = ("w1", "w2", "w3", "wq_a", "wq_b", "wkv", "wo_a", "wo_b", "out_proj", "query_key_value", "dense")


@dataclass(frozen=True)
class FusedRelease:
    """How a family's fused experts are released."""

    transposed: bool = False  # [E, H, 2I] and [E, I, H], where they are not quantised
    interleaved: bool = False  # rows of gate and up alternate
    # Quantised, they stay fused, as X_blocks and X_scales; other families' are then released one by one.
    mxfp4_blocks: bool = False
    apart: bool = False  # gate and up in a stack each, FP8 ones likewise ("moe.gate_proj.weight")


# The families (model_type without "_text") whose plain releases are fused. Names and shapes of tensors
# show everything else; these facts must be known before there is a tensor, or show in none.
_FUSED_RELEASES = {
    "gpt_oss": FusedRelease(transposed=True, interleaved=True, mxfp4_blocks=True),
    "llama4": FusedRelease(transposed=True),
    "qwen3_5_moe": FusedRelease(),
    "qwen3_vl_moe": FusedRelease(transposed=True),
    **dict.fromkeys(("step3p5", "step3p7"), FusedRelease(apart=True)),
}


def fused_release(family: str) -> FusedRelease | None:
    """How a family (model_type) is released with fused experts; None = one by one."""
    return _FUSED_RELEASES.get(family.removesuffix("_text"))


def apart_name(prefix: str, role: str) -> str:
    """The released name of a stack in a family that holds gate and up apart; the inverse of `expert_name`."""
    block = re.sub(r"\b(mlp|moe)\.experts$", "moe", prefix)
    return f"{block}.{LEAVES[role]}.weight"


def is_interleaved(family: str) -> bool:
    """Whether rows of gate and up alternate in a family's fused parameters."""
    release = fused_release(family)
    return release is not None and release.interleaved


def gate_up_rows(intermediate: int, interleaved: bool) -> tuple[slice, slice]:
    """The rows of gate and the rows of up among the 2I rows that hold both."""
    if interleaved:
        return slice(0, 2 * intermediate, 2), slice(1, 2 * intermediate, 2)
    return slice(0, intermediate), slice(intermediate, 2 * intermediate)


@dataclass(frozen=True)
class ExpertName:
    """A parameter of routed experts."""

    prefix: str  # "...experts" (GGUF: "blk.3")
    layer: int | None  # of the decoder
    expert: int | None  # None = all of them in one tensor
    role: str  # "gate", "up", "down" or "gate_up"
    leaf: str  # as released ("w1")
    bias: bool


def expert_name(name: str) -> ExpertName | None:
    """The routed experts that a parameter or a module belongs to; None = it belongs to none."""
    match = _EXPERT.match(name)
    if match is None:
        return None
    prefix, leaf = match["prefix"], match["leaf"]
    expert = None if match["expert"] is None else int(match["expert"])
    role = (_ROLE_OF_ALL if expert is None else _ROLE_OF_ONE).get(leaf)
    if role is None or "shared" in prefix.rpartition("layers.")[2]:
        return None
    if prefix.endswith(".moe"):
        prefix = prefix.removesuffix("moe") + "mlp.experts"
    elif not prefix.endswith("experts"):
        prefix += ".experts"
    return ExpertName(prefix, layer_of(name), expert, role, leaf, match["end"].endswith("bias"))


def layers_key(config: Mapping[str, Any]) -> str:
    """The key that counts decoder layers; dims/layer_params.py says why LongCat-Flash has its own."""
    first, other = "num_hidden_layers", "num_layers"
    if family(config) == "longcat_flash":
        first, other = other, first
    return other if config.get(first) is None and config.get(other) is not None else first


def zero_experts(config: Mapping[str, Any]) -> range:
    """Numbers of a layer's experts that have no weights (LongCat-Flash)."""
    if family(config) != "longcat_flash":
        return range(0)
    routed = config.get("n_routed_experts", config.get("num_local_experts"))
    counts = (routed, config.get("zero_expert_num", 256))  # as transformers has it where it is not said
    routed, zero = (value if isinstance(value, int) else 0 for value in counts)
    return range(routed, routed + zero)


def one_expert(name: str) -> ExpertName | None:
    """As `expert_name`, where the name is one expert's."""
    parts = expert_name(name)
    return None if parts is None or parts.expert is None else parts


def is_unknown_expert_tensor(name: str) -> bool:
    """Whether a name lies below "experts." and is of none of the layouts above."""
    match = _BELOW_EXPERTS.search(name)
    if match is None or expert_name(name) is not None or layer_of(name) is None:
        return False
    # Laguna keeps the router's correction there.
    return "shared" not in name.rpartition("layers.")[2] and match["rest"] != "e_score_correction_bias"


def gguf_expert_name(name: str) -> ExpertName | None:
    """As `expert_name`, of a tensor of a GGUF file.

    Raises:
        ValueError: a tensor of routed experts that is not known.
    """
    match = _GGUF.match(name)
    if match is None:
        return None
    layer, role, end = match["layer"], match["role"], match["end"]
    if role not in (*PROJECTIONS, "gate_up") or end not in ("weight", "bias"):
        raise ValueError(name)
    return ExpertName(f"blk.{layer}", int(layer), None, role, f"ffn_{role}_exps", end == "bias")


def is_old_gguf_expert(name: str) -> bool:
    """Whether a tensor of a GGUF file is one expert's, as llama.cpp once wrote them."""
    return _GGUF_OLD.match(name) is not None


def layer_of(name: str) -> int | None:
    """Number of the decoder layer in a name."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_mtp(name: str, layers: int | None) -> bool:
    """Whether a parameter serves multi-token prediction ("mtp.", or a layer beyond the last) or speech."""
    layer = layer_of(name)
    return _MTP.search(name) is not None or (layer is not None and layers is not None and layer >= layers)


def is_other_modality(name: str) -> bool:
    """Whether a parameter's name says that it serves pictures or sound."""
    return _OTHER_MODALITY.search(name) is not None


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Weights that servers quantise with `--all-linear`: projections, not routers, embeddings or heads."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if len(shape) != 2 or not name.endswith(".weight") or leaf in _KEPT_PLAIN:
        return False
    if part_of(name, None) in ("router", "other modalities"):
        return False
    return leaf in _LINEAR or leaf.endswith(("_proj", "_proj_with_mqa", "_proj_qkvz"))


def part_of(name: str, layers: int | None) -> str:
    """The part of the model that a parameter belongs to, for tables."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    leaf = re.sub(r"\.\d+$", "", module).rpartition(".")[2]  # of several (LongCat-Flash)
    if is_other_modality(name):
        return "other modalities"
    if is_mtp(name, layers):
        return "multi-token prediction"
    if expert_name(name) is not None:
        return "routed experts"
    if "shared_expert" in name or ".share_expert." in name:  # Step-3.7's
        return "shared experts"
    if "norm" in leaf:
        return "norms"
    if leaf in ("gate", "router", "router_bias", "e_score_correction_bias", "tid2eid") or ".router." in name:
        return "router"
    if leaf in ("embed_tokens", "embed", "wte") or ".ngram_embedding." in name:
        return "embedding"
    if leaf in ("lm_head", "head"):
        return "head"
    if re.search(r"\.(self_attn|attn|attention|linear_attn|mamba|conv)\.", name):
        return "attention"
    if re.search(r"\.(mlps?|ffn|feed_forward|block_sparse_moe)\.", name):
        return "dense MLP"
    return "other"


def family(config: Mapping[str, Any]) -> str:
    """model_type of the language model, as transformers calls it."""
    text = config.get("text_config")
    own = text.get("model_type") if isinstance(text, Mapping) else None
    named = str(own or config.get("model_type") or "unknown")
    return ALIASES.get(named, named)
