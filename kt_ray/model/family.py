"""Which class of transformers a config.json asks for, and which part of it is the language model.

No remote code: a released model_type that transformers knows under another name is translated here, and
one that it does not know is refused by name. Of a multimodal checkpoint the text part is trained: as the
family's text-only class where transformers loads that from the same files, else inside the multimodal class,
whose other towers are never given weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kt_ray.checkpoint.names import ALIASES
from kt_ray.errors import UserError
from kt_ray.model import attention, layer_calls, llama4, longcat, qwen4, step3p7
from kt_ray.parse import read_json

_NESTED = ("text_config", "thinker_config")  # of multimodal configurations, outermost last
# Families whose experts transformers does not dispatch, and what does.
DISPATCHED = {
    "llama4_text": llama4.dispatch,
    "longcat_flash": longcat.dispatch,
    "step3p5": step3p7.dispatch,
}
_OTHER = "set model.path to a model of a family that the installed transformers knows"


@dataclass(frozen=True)
class Family:
    """What a config.json describes."""

    model_type: str  # as config.json says it, of the whole model
    text_type: str  # transformers' name of the language model's family
    config: Any  # of the language model
    whole: Any | None  # configuration of the multimodal model that holds it, or None

    @property
    def label(self) -> str:
        """For messages: the released name, and what it stands for."""
        return (
            self.model_type if self.text_type == self.model_type else f"{self.model_type} ({self.text_type})"
        )

    @property
    def auto(self) -> str:
        """Name of the auto class of transformers that loads the checkpoint's directory."""
        from transformers import AutoModelForCausalLM

        alone = type(self.whole or self.config) in AutoModelForCausalLM._model_mapping
        return "AutoModelForCausalLM" if alone else "AutoModelForImageTextToText"


def read_family(model_dir: str | Path) -> Family:
    """The family of a checkpoint directory.

    Raises:
        UserError: no readable config.json, or a model_type unknown to transformers.
    """
    where = Path(model_dir) / "config.json"
    raw = dict(read_json(where, "config.json", "set model.path to a Hugging Face directory"))
    model_type = str(raw.get("model_type"))
    for name in _NESTED[::-1]:
        nested = raw.get(name)
        if isinstance(nested, dict) and _known(raw) is None:
            raw = nested  # unknown around a known text model: Kimi-K2.5
    config = _config(raw, model_type, where)
    config = getattr(config, "thinker_config", None) or config
    text = config.get_text_config()
    return Family(model_type, text.model_type, text, None if text is config else config)


def build_causal(
    family: Family, dtype: torch.dtype, attn_implementation: str, device: str = "meta"
) -> tuple[Any, Any, str]:
    """The model on `device`, its experts dispatched to the hook of layer_calls.

    "sdpa" is that of attention.py for some families, and "eager" for some without one (DeepSeek-V4).

    Returns:
        the ...ForCausalLM (or multimodal ...ForConditionalGeneration), its inner language model, and the
        inner model's module name ("model", "model.language_model").

    Raises:
        UserError: no class for text generation, an option that the family does not have.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    layer_calls.register()
    attention.register()
    candidates = [(AutoModelForCausalLM, family.config), (AutoModelForImageTextToText, family.config)]
    if family.whole is not None:
        inside = (AutoModelForImageTextToText, family.whole)
        # The text class only where transformers loads it from the same files: the adapter has its names.
        # Gemma 4's is the multimodal one under both.
        alone = family.auto == "AutoModelForCausalLM" and _class_of(
            AutoModelForCausalLM, family.whole
        ).__name__.endswith("ForCausalLM")
        candidates = [*candidates, inside] if alone or not _generates(*inside) else [inside]
    chosen = next((c for c in candidates if _generates(*c)), None)
    if chosen is None:
        raise UserError(
            f"transformers cannot build {family.label} for text generation",
            where="config.json",
            observed=f"no ...ForCausalLM or ...ForConditionalGeneration for {type(family.config).__name__}",
            remedy="choose another model: a decoder-only language model, or a multimodal one around it",
        )
    auto, config = chosen
    chosen_attention: str | dict[str, str] = attn_implementation
    if attn_implementation == "sdpa":
        has_sdpa = _class_of(auto, config)._supports_sdpa
        attn_implementation = attention.implementation(family.config, has_sdpa)
        # Of a multimodal model the language model's alone: towers may know transformers' names only.
        towers = {"": "sdpa" if has_sdpa else "eager", "text_config": attn_implementation}
        chosen_attention = attn_implementation if config is family.config else towers
    try:
        with torch.device(device):
            causal = auto.from_config(
                config,
                trust_remote_code=False,
                dtype=dtype,
                attn_implementation=chosen_attention,
                experts_implementation=layer_calls.NAME,
            )
    except Exception as error:  # of whichever family's code met the value that it did not expect
        raise UserError(
            f"transformers cannot build {family.label} for text generation",
            where="config.json",
            observed=first_line(error),
            remedy="set model.attn_implementation=eager, or choose another model"
            if "attention" in str(error).lower() or attn_implementation in str(error)
            else "correct config.json (take it from the model's release), or choose another model",
        ) from error
    if family.text_type in DISPATCHED:
        DISPATCHED[family.text_type](causal, family.config)
    if family.text_type == "qwen4_exp_text":
        qwen4.index_at_once(causal)
    prefix, modules = causal.base_model_prefix, dict(causal.named_modules())
    # Llama 4's text class has the multimodal one's prefix.
    if config is not family.config or prefix not in modules:
        prefix = _decoder(causal)
    return causal, modules.get(prefix) if prefix else None, prefix


def drop_towers(causal: Any, prefix: str) -> None:
    """Empty everything of a multimodal model that text does not pass through: no weights are loaded there."""
    head = causal.get_output_embeddings()
    path = prefix.split(".")
    for depth in range(len(path)):
        owner = causal.get_submodule(".".join(path[:depth]))
        for name, child in list(owner.named_children()):
            if name != path[depth] and child is not head and any(True for _ in child.parameters()):
                setattr(owner, name, nn.Module())


def _known(raw: dict[str, Any]) -> str | None:
    """transformers' name of a configuration's family, or None."""
    from transformers import CONFIG_MAPPING

    name = str(raw.get("model_type"))
    name = ALIASES.get(name, name)
    return name if name in CONFIG_MAPPING else None


def _config(raw: dict[str, Any], model_type: str, where: Path) -> Any:
    from transformers import CONFIG_MAPPING

    name = _known(raw)
    if name is None:
        raise UserError(
            "transformers cannot read this model's configuration",
            where=str(where),
            observed=f"model_type {model_type!r}, which the installed transformers does not know",
            required="a family of transformers (remote code is never run)",
            remedy=_OTHER,
        )
    # A quantization_config would make transformers look for a quantiser; weights are read by us.
    values = _without_quantization(raw) | {"model_type": name}
    if name == "longcat_flash" and values.get("num_layers") is not None:
        values.pop("num_hidden_layers", None)  # which transformers would halve, whatever it counts
    for key in _NESTED:
        if isinstance(values.get(key), dict):
            values[key] = _without_quantization(values[key])
    try:
        kind = CONFIG_MAPPING[name]
        # save_pretrained writes an infinity as {"__float__": "Infinity"}
        return kind.from_dict(kind._decode_special_floats(values))
    except Exception as error:  # whatever a configuration class raises about its values
        raise UserError(
            "transformers cannot read this model's configuration",
            where=str(where),
            observed=f"{model_type}: {first_line(error)}",
            remedy="download config.json again, or " + _OTHER,
        ) from error


def _without_quantization(raw: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in ("quantization_config", "auto_map")}


def _generates(auto: Any, config: Any) -> bool:
    """Whether an auto class has a left-to-right language model of text for this very configuration."""
    try:
        name = _class_of(auto, config).__name__
    except KeyError:
        return False
    text = config.get_text_config() is config
    return bool(name.endswith("ForCausalLM") if text else name.endswith("ForConditionalGeneration"))


def _class_of(auto: Any, config: Any) -> Any:
    """The class that an auto class makes of a configuration. Raises KeyError: it has none."""
    kind = auto._model_mapping[type(config)]
    return kind[0] if isinstance(kind, tuple) else kind


def _decoder(causal: Any) -> str:
    """Module name of the language model inside a multimodal one: its text embedding's owner."""
    embedding = causal.get_input_embeddings()
    for name, module in causal.named_modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and any(
            child is embedding for child in module.children()
        ):
            return str(name)
    return ""


def first_line(error: Exception) -> str:
    """What an error says in short."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):  # a heading: the reason follows
        return " ".join(lines[:2])
    return lines[0].split(". Please ")[0] if lines else type(error).__name__
