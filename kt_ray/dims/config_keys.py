"""A config.json's keys, read with errors that name the file and the key; the counts of one decoder layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kt_ray.dims.model_dims import CacheWidth, Compression, StateValues
from kt_ray.errors import UserError

# Other names that checkpoints give the same architecture.
ALIASES = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen4_exp_text": "qwen4_exp",
    "kimi_k25": "deepseek_v3",
    "minimax_m3": "minimax_m3_vl_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
}

MOST = 1 << 24  # of a width, a vocabulary, a number of experts
MOST_LAYERS = 4096

# Families whose counts equal transformers' own, parameter for parameter (tests/dims/test_config_json.py).
EXACT = frozenset(
    (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "glm4_moe", "gpt_oss"),
        *("minimax_m2", "minimax_m3_vl_text", "mixtral", "olmoe", "phimoe", "kimi_linear", "nemotron_h"),
        *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "hunyuan_v1_moe", "gemma4_text", "hy_v4"),
        *("llama4_text", "longcat_flash", "mistral_large4_text", "qwen4_exp", "step3p5"),
    )
)
# Families whose head is the embedding where config.json does not say.
TIED = frozenset(
    (
        "cohere2_moe",
        "diffusion_gemma_text",
        "ernie4_5_moe",
        "ernie4_5_vl_moe_text",
        "gemma4_text",
        "lfm2_moe",
        "zaya",
    )
)
# Keys of releases that go beyond transformers' class of the family.
_BEYOND = ("routed_expert_hidden_size", "mla_use_output_gate", "attn_res_block_size", "num_kv_shared_layers")

# Of Inkling's layers with a window, where config.json does not say.
_INKLING_HEADS = (("num_attention_heads", 64), ("num_key_value_heads", 16), ("head_dim", 128))


class Keys:
    """config.json with errors that name the file and the key."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where
        model_type = str(config.get("model_type", ""))
        self.family = ALIASES.get(model_type, model_type)

    @property
    def exact(self) -> bool:
        """Whether counts equal transformers' own, parameter for parameter."""
        return self.family in EXACT and not any(self.config.get(key) for key in _BEYOND)

    def of_layer(self, layer: int) -> Keys:
        """The keys with those that transformers saved for one layer alone (per_layer_config)."""
        if self.family == "inkling_text":
            return self._of_inkling(layer)
        layers = self.config.get("per_layer_config")
        for name, own in layers.items() if isinstance(layers, Mapping) else ():
            if str(name).isdigit() and int(name) == layer and isinstance(own, Mapping):
                return Keys({**self.config, **own}, f"{self.where}, per_layer_config.{name}")
        types = self.listed("layer_types") or []
        if self.family != "step3p5" or types[layer : layer + 1] != ["sliding_attention"]:
            return self
        # As transformers, which takes nothing else of attention_other_setting.
        heads = self.config.get("num_sliding_attention_heads")
        heads = heads or self.inner("attention_other_setting").config.get("num_attention_heads")
        return Keys({**self.config, "num_attention_heads": heads}, self.where) if heads else self

    def _of_inkling(self, layer: int) -> Keys:
        """Layers with a window have heads of their own, and a bias as far as they see."""
        local, types = self.config.get("local_layer_ids"), self.listed("layer_types")
        if types is not None:
            slides = types[layer : layer + 1] == ["hybrid_sliding"]
        else:
            slides = layer in local if isinstance(local, list) else (layer + 1) % 6 != 0
        if not slides:
            return self
        window = self.size("sliding_window_size", "sliding_window", default=512)
        heads = {name: self.size(f"swa_{name}", default=value) for name, value in _INKLING_HEADS}
        alike = ["sliding_attention"] * (layer + 1)
        own = {"sliding_window": window, "rel_extent": window, "layer_types": alike}
        return Keys({**self.config, **heads, **own}, self.where)

    def size(self, *names: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """The first of `names` that is present and not null, as an integer of `least` to `most`."""
        for name in names:
            value = self.config.get(name)
            if isinstance(value, list | tuple) and value:  # one value per modality (ernie): text comes first
                value = value[0]
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise UserError(
                    f"{name} in the model's config.json is not usable",
                    where=self.where,
                    observed=repr(value)[:80],
                    required=f"an integer of at least {least}"
                    + (f", at most {most}" if isinstance(value, int) and value > most else ""),
                    remedy="download config.json again, or correct the key",
                )
            return value
        if default is not None:
            return default
        raise UserError(
            f"the model's config.json lacks {' or '.join(names)}",
            where=self.where,
            required="the dimensions of a decoder-only MoE language model",
            remedy="point model.path at a Hugging Face MoE checkpoint with its released config.json",
        )

    def inner(self, name: str) -> Keys:
        """The keys of a mapping inside; none where there is no mapping."""
        value = self.config.get(name)
        return Keys(value if isinstance(value, Mapping) else {}, f"{self.where}, {name}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.config.get(name)
        return default if value is None else bool(value)

    def listed(self, name: str) -> list[Any] | None:
        value = self.config.get(name)
        return list(value) if isinstance(value, list | tuple) and value else None


@dataclass
class LayerParts:
    """Counts of one decoder layer; `modules` are the linear ones without routers: (name, in, out)."""

    attention: int = 0
    dense: int = 0
    modules: list[tuple[str, int, int]] = field(default_factory=list)
    width: int = 0  # elements per token of expanded queries, keys and values
    normed: int = 0  # of queries and keys that pass norms of their own
    pair: int = 0  # elements of keys and values that a query multiplies for each key it meets
    window: int = 0  # keys that a query meets at most; 0 = all before it
    # heads of the index that chooses a query's keys, 0 without one; whether query heads choose apart
    index: tuple[int, bool] = (0, False)
    mapped: int = 0  # parameters of a table that is looked up in its files
    cache: CacheWidth = field(default_factory=CacheWidth)  # what generation keeps of a row
    compression: Compression = field(default_factory=Compression)
    bias: int = 0  # values per token of a learned bias, one for each distance and head
    state: StateValues | None = None  # what it keeps of a state that goes from token to token

    def project(self, name: str, n_in: int, n_out: int, bias: bool = False) -> None:
        """An attention projection."""
        self.attention += n_in * n_out + (n_out if bias else 0)
        self.modules.append((name, n_in, n_out))

    def linear(self, name: str, n_in: int, n_out: int) -> None:
        """A linear module outside attention."""
        self.dense += n_in * n_out
        self.modules.append((name, n_in, n_out))
