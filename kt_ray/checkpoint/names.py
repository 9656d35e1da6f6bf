"""What a tensor of a checkpoint or adapter is, by its name.

Names are as checkpoints release them: "model.layers.3.mlp.experts.5.gate_proj.weight", Mixtral's
"...block_sparse_moe.experts.5.w1.weight", fused "...experts.gate_up_proj", DeepSeek-V4's
"layers.3.ffn.experts.5.w1.weight", multi-token prediction in "mtp." or in layers beyond the last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PROJECTIONS = ("gate", "up", "down")
ROLES = {
    "gate_proj": "gate",
    "w1": "gate",
    "up_proj": "up",
    "w3": "up",
    "down_proj": "down",
    "w2": "down",
    "gate_up_proj": "gate_up",
}
LEAVES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_EXPERT = re.compile(
    r"^(?P<prefix>.*\bexperts)\.(?:(?P<expert>\d+)\.)?(?P<leaf>gate_up_proj|gate_proj|up_proj|down_proj|w[123])"
    r"(?P<end>|\.weight|\.bias|_bias)$"
)
_LAYER = re.compile(r"\blayers\.(\d+)\.")
_MTP = re.compile(r"(^|\.)(mtp|nextn|eh_proj)\b|^talker\.")  # talker: Qwen3-Omni's speech model
_OTHER_MODALITY = re.compile(
    r"(^|\.)(visual|vision_\w+|audio_\w+|mm_projector|multi_modal_projector|talker|code2wav)\."
)
# Released with the last two axes of the fused parameters swapped, and with gate and up rows alternating.
TRANSPOSED = frozenset({"gpt_oss", "qwen3_vl_moe", "qwen3_vl_moe_text", "llama4", "llama4_text"})
INTERLEAVED = frozenset({"gpt_oss"})
# Projections that DeepSeek's quantised releases keep plain, and servers read as such: of the sparse
# attention's indexer, and the entry of a multi-token prediction layer.
_KEPT_PLAIN = frozenset({"weights_proj", "eh_proj"})
# Released with fused experts when not quantised.
FUSED = TRANSPOSED | {"qwen3_5_moe", "qwen3_5_moe_text"}


@dataclass(frozen=True)
class ExpertName:
    """A routed-expert parameter.

    Attributes:
        prefix: "...experts".
        expert: its number; None = all of them in one tensor.
        role: "gate", "up", "down" or "gate_up".
        leaf: as released ("w1").
        bias: not a matrix.
    """

    prefix: str
    expert: int | None
    role: str
    leaf: str
    bias: bool


def expert_name(name: str) -> ExpertName | None:
    """The routed expert that a parameter belongs to; None = it belongs to none."""
    match = _EXPERT.match(name)
    if match is None:
        return None
    expert = None if match["expert"] is None else int(match["expert"])
    if expert is None and match["leaf"] not in ("gate_up_proj", "up_proj", "down_proj"):
        return None
    return ExpertName(match["prefix"], expert, ROLES[match["leaf"]], match["leaf"], "bias" in match["end"])


def layer_of(name: str) -> int | None:
    """Number of the decoder layer in a name."""
    match = _LAYER.search(name)
    return int(match[1]) if match else None


def is_mtp(name: str, layers: int | None) -> bool:
    """Whether a parameter serves multi-token prediction ("mtp.", or a layer beyond the last) or speech."""
    layer = layer_of(name)
    return _MTP.search(name) is not None or (layer is not None and layers is not None and layer >= layers)


def is_linear(name: str, shape: tuple[int, ...]) -> bool:
    """Weights that servers quantise with `--all-linear`: projections, not routers, embeddings or heads."""
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if (
        len(shape) != 2
        or not name.endswith(".weight")
        or leaf in _KEPT_PLAIN
        or part_of(name, None) in ("router", "other modalities")
    ):
        return False
    return leaf.endswith(("_proj", "_proj_with_mqa", "_proj_qkvz")) or leaf in (
        "w1",
        "w2",
        "w3",
        "wq_a",
        "wq_b",
        "wkv",
        "wo_a",
        "wo_b",
        "out_proj",
        "query_key_value",
        "dense",
    )


def part_of(name: str, layers: int | None) -> str:
    """The part of the model that a parameter belongs to, for tables."""
    module = name.removesuffix(".weight").removesuffix(".bias")
    leaf = module.rpartition(".")[2]
    if _OTHER_MODALITY.search(name):
        return "other modalities"
    if is_mtp(name, layers):
        return "multi-token prediction"
    if expert_name(name) is not None:
        return "routed experts"
    if "shared_expert" in name:
        return "shared experts"
    if "norm" in leaf:
        return "norms"
    if leaf in ("gate", "router", "e_score_correction_bias", "tid2eid") or ".router." in name:
        return "router"
    if leaf in ("embed_tokens", "embed", "wte"):
        return "embedding"
    if leaf in ("lm_head", "head"):
        return "head"
    if re.search(r"\.(self_attn|attn|attention|linear_attn|mamba|conv)\.", name):
        return "attention"
    if re.search(r"\.(mlp|ffn|feed_forward|block_sparse_moe)\.", name):
        return "dense MLP"
    return "other"


def family(config: Mapping[str, Any]) -> str:
    """model_type of the language model."""
    text = config.get("text_config")
    own = text.get("model_type") if isinstance(text, Mapping) else None
    return str(own or config.get("model_type") or "unknown")
