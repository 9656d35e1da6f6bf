"""LLaMA-Factory's chat template names and what stands for them here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kt_ray.recipe.reading import Reading

OWN = "the tokenizer's own template, which the model's authors publish"


@dataclass(frozen=True)
class Template:
    """What a name becomes."""

    name: str | None = None  # data.template; None = the tokenizer's own (or `file`)
    file: str | None = None  # Jinja file beside this module, for model.chat_template
    system: str | None = None  # system prompt of rows without one
    note: str = ""  # what differs


TEMPLATES: dict[str, Template] = {
    "chatml": Template("chatml"),
    "deepseek": Template(note=f"DeepSeek-V2: {OWN}"),
    "deepseek3": Template("deepseek3"),
    "default": Template(file="default.jinja"),
    "empty": Template(
        "plain", note="one question and one answer, from BOS to EOS; there turns without either token"
    ),
    "glm4_moe": Template(note=OWN),
    "gpt": Template(note=OWN),
    "gpt_oss": Template(note=OWN),
    "llama3": Template("llama3"),
    "minimax2": Template(note=OWN),
    "mistral": Template(note=OWN),
    "moonlight": Template("kimi", system="You are a helpful assistant provided by Moonshot-AI."),
    "olmo": Template("olmoe", note="begins with BOS, turns end in a line break; there with EOS, and none"),
    "phi": Template("phi3"),
    "qwen": Template("qwen", system="You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "qwen3": Template(note=f"{OWN}; its empty thoughts before answers are trained where it writes them"),
    "qwen3_5": Template(note=OWN),
    "qwen3_nothink": Template("qwen"),
}


def map_template(reading: Reading) -> None:
    """data.template, model.chat_template and data.system."""
    system = reading.get("default_system")
    if not reading.given("template"):
        reading.set("data.template", None, "template", note=OWN)
    elif (name := str(reading.fields["template"])) not in TEMPLATES:
        reading.refuse(
            "template",
            "has no counterpart here (data.template=null takes the tokenizer's own)",
            *("data.template", "model.chat_template"),
        )
    else:
        template = TEMPLATES[name]
        if template.file is not None:
            path = Path(__file__).resolve().parent / template.file
            reading.set("model.chat_template", str(path), "template")
        else:
            reading.set("data.template", template.name, "template", note=template.note)
        system = template.system if system is None else system
    if system:
        reading.set(
            "data.system", system, "default_system" if reading.given("default_system") else "template"
        )
