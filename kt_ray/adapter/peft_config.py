"""adapter_config.json and README.md of an adapter: under which settings PEFT loads every tensor.

PEFT >= 0.19 turns per-expert keys into the fused parameters of transformers v5 while it loads, and
rewrites `target_modules` for the families it knows. Four consequences, each checked by a test
against PEFT itself:

* Beside per-expert keys, a shared expert or dense MLP (gate_proj, up_proj, down_proj) named under
  `target_modules` is taken for the experts and dropped without a word. They are named, in full,
  under `target_parameters` ("...shared_experts.gate_proj.weight") instead.
* For families whose configuration PEFT rewrites, the experts' leaf names stand in `target_modules`
  (which is also where SGLang looks), and rank and alpha are single numbers.
* For families whose keys PEFT converts but whose configuration it does not (qwen2_moe), the fused
  parameters are named under `target_parameters`, with the doubled rank of gate beside up.
* Experts' leaf names, and ends of parameters' names, mean those of every layer. Where some layers' experts
  are not adapted (lora.layers), the fused parameters of the others are named in full.

Families whose keys PEFT cannot convert get the fused form (fused.py).

PEFT also renames keys as transformers renames a checkpoint's. Where that changes a module's own name, the
file has the released name, from which it is made (`stored_name`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kt_ray.checkpoint.names import ONE_BY_ONE, layer_of, one_expert
from kt_ray.config.lora_patterns import shortest_patterns

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
TEMPLATE = "chat_template.jinja"  # that the adapter was trained with
_SUFFIX = re.compile(r"\.lora_([AB]\.weight|magnitude_vector)$")
# Leaf names that PEFT may take for the experts' or the router's.
AMBIGUOUS = frozenset({"gate"}.union(*(leaves.values() for leaves in ONE_BY_ONE)))
EXPERT_LEAVES = AMBIGUOUS | {"gate_up_proj"}  # the fused parameters', too
_GATE_UP, _UP, _DOWN = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
# family -> beginnings of modules' names (regular expressions), and of the same names as released
_INSIDE = (r"^model\.language_model\.", "model.", r"^model\.(?!language_model\.)", "model.language_model.")
_RENAMED: dict[str, tuple[str, str, str, str]] = {
    "deepseek_ocr2": _INSIDE,
    "laguna": (r"\.shared_experts\.", ".shared_expert.", r"\.shared_expert\.", ".shared_experts."),
    "mistral_large4": (
        *(r"\.mlp\.shared_experts\.", ".shared_experts."),
        *(r"(?<!\.mlp)\.shared_experts\.", ".mlp.shared_experts."),
    ),
    "unlimited_ocr": _INSIDE,
}
# Families that train as the text model alone, from the files of the multimodal one.
TEXT_ALONE = ("dots3_note", "llama4", "qwen3_5_moe", "qwen4_exp")


@dataclass(frozen=True)
class AdapterInfo:
    """What the file does not say by itself; rank, alpha, rslora and dropout as trained, of the routed experts
    if they are adapted."""

    base_model: str  # directory or name of the model the adapter belongs to
    model_type: str  # of its language model, as transformers names it (Kimi-K2 is deepseek_v3)
    rank: int
    alpha: float
    rslora: bool = False
    dora: bool = False
    dropout: float = 0.0
    notes: tuple[str, ...] = ()  # lines added to the README (data, steps, loss, ...)
    whole_type: str = ""  # model_type of the multimodal model around it, or ""
    auto: str = "AutoModelForCausalLM"  # class of transformers that loads the base with the trained names
    # module outside the routed experts -> its rank and plain alpha, where they are others
    others: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    # modules of the routed experts that are adapted ("...layers.3.mlp.experts"), where others' are not
    expert_modules: tuple[str, ...] = ()
    released_type: str = ""  # model_type of the base, where transformers has another name for it ("kimi_k2")
    zero_experts: int = 0  # that transformers' fused gate and up have besides (LongCat-Flash)
    revision: str | None = None  # commit of the base model, where base_model is its name on the hub

    @property
    def plain_alpha(self) -> float | int:
        """alpha' with alpha' / r equal to the trained scale: rsLoRA folded in."""
        return plain_number(self.alpha * self.rank**0.5 if self.rslora else self.alpha)


def plain_number(value: float) -> float | int:
    """As PEFT writes it: 16, not 16.0."""
    return int(value) if float(value).is_integer() else float(value)


def module_of(name: str) -> str:
    """The module that a LoRA tensor adapts: "...q_proj.lora_A.weight" -> "...q_proj"."""
    return _SUFFIX.sub("", name)


def stored_name(name: str, model_type: str) -> str:
    """A tensor's name in the file, out of its module's name (both without "base_model.model.")."""
    own, released, _, _ = _RENAMED.get(model_type.removesuffix("_text"), ("^", "", "", ""))
    return re.sub(own, released, name, count=1)


def module_name(stored: str, model_type: str) -> str:
    """The reverse of `stored_name`; a name that is a module's own already stays as it is."""
    _, _, released, own = _RENAMED.get(model_type.removesuffix("_text"), ("", "", "^", ""))
    return re.sub(released, own, stored, count=1)


def outside(module: str) -> str:
    """A module's name in the text model alone, out of its name in the multimodal model around it."""
    return re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", module)


def peft_expert_leaves(model_type: str) -> frozenset[str]:
    """Leaf names in `target_modules` that the installed PEFT rewrites to fused experts; empty = none."""
    try:
        from peft.utils import transformers_weight_conversion as conversion

        base = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type, "")
        mapping: Mapping[str, str] = conversion._MOE_TARGET_MODULE_MAPPING.get(base, {})
    except (ImportError, AttributeError):  # another PEFT: the explicit form works with any
        return frozenset()
    return frozenset(old for old, new in mapping.items() if new in ("gate_up_proj", "down_proj"))


def converts_keys(model_type: str) -> bool:
    """Whether transformers (and so PEFT) merges per-expert keys of this family into fused parameters; not
    where these hold more experts than have keys (LongCat-Flash's zero experts)."""
    if model_type == "longcat_flash":
        return False
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from transformers.core_model_loading import MergeModulelist, WeightConverter

    return any(
        isinstance(transform, WeightConverter)
        and transform.target_patterns[0].endswith("gate_up_proj")
        and any(isinstance(op, MergeModulelist) for op in transform.operations)
        for transform in get_checkpoint_conversion_mapping(model_type) or ()
    )


def adapter_form(names: Iterable[str], info: AdapterInfo) -> str:
    """How experts are written and named: "none", "modules", "parameters" or "fused" (see the module)."""
    names = list(names)
    leaves = {expert.leaf for expert in map(one_expert, {module_of(n) for n in names}) if expert}
    if not leaves:
        return "none"
    if not converts_keys(info.model_type):
        return "fused"
    # PEFT rewrites the configuration by the type of the model that it is given.
    given = info.whole_type if any("language_model." in name for name in names) else info.model_type
    return "modules" if leaves <= peft_expert_leaves(given) else "parameters"


def adapter_config(
    names: Iterable[str], info: AdapterInfo, modules: Iterable[str] | None = None
) -> dict[str, Any]:
    """adapter_config.json for these tensors.

    Args:
        names: of the trained tensors, without "base_model.model.".
        info: see AdapterInfo.
        modules: all modules of the model that carry a 2-D weight. With them, leaf names stand for
            modules that are adapted wherever they occur; without, every module is named in full.
    """
    names = list(names)
    trained = {module_of(name) for name in names}
    experts = {m: expert for m in trained if (expert := one_expert(m))}
    others = trained - experts.keys()
    # PEFT refuses DoRA on parameters, and then there are no experts to confuse them with (see load_limits).
    as_parameters = {m for m in others if m.rpartition(".")[2] in AMBIGUOUS and not info.dora}
    targets = _shortened(others - as_parameters, modules)
    parameters = [f"{m}.weight" for m in sorted(as_parameters)]
    form = adapter_form(names, info)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": info.base_model,
        **({"revision": info.revision} if info.revision else {}),
        "r": info.rank,
        "lora_alpha": info.plain_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": False,
        "use_dora": info.dora,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    if form == "modules" and not info.expert_modules:
        targets += sorted({expert.leaf for expert in experts.values()})
    elif form != "none":
        roles = {expert.role for expert in experts.values()}
        gated = "gate" in roles
        adapted = {_GATE_UP: gated, _UP: "up" in roles and not gated, _DOWN: "down" in roles}
        parameters += in_full([end for end in adapted if adapted[end]], info)
        if gated:
            # Not of every gate_up_proj: MiniMax-M3's dense layers and shared experts have one, too.
            config["rank_pattern"] = {r".*\.experts\.gate_up_proj": 2 * info.rank}
            config["alpha_pattern"] = {r".*\.experts\.gate_up_proj": 2 * info.plain_alpha}
    config |= {"target_modules": targets, "target_parameters": parameters or None}
    usual = info.rank, info.plain_alpha
    for i, key in enumerate(("rank_pattern", "alpha_pattern")):
        of_all = {module: info.others.get(module, usual)[i] for module in others}
        patterns = shortest_patterns(of_all, usual[i], EXPERT_LEAVES)
        # PEFT compares patterns with the parameter where that is what is targeted.
        ends = {end: any(f"{m}.weight" in parameters for m in others if m.endswith(end)) for end in patterns}
        own = {f"{end}.weight" if ends[end] else end: plain_number(value) for end, value in patterns.items()}
        config[key] = own | config[key]
    return config


def in_full(ends: Iterable[str], info: AdapterInfo) -> list[str]:
    """Fused parameters ("experts.down_proj") as target_parameters name them: PEFT takes an end for every
    layer's, whatever layers_to_transform says."""
    leaves = [end.rpartition(".")[2] for end in ends]
    return [f"{module}.{leaf}" for module in info.expert_modules for leaf in leaves] or list(ends)


def expert_modules(config: Mapping[str, Any]) -> tuple[str, ...]:
    """`AdapterInfo.expert_modules` of an adapter, by its adapter_config.json."""
    ends = tuple(f".{end}" for end in (_GATE_UP, _UP, _DOWN))
    named = (p for p in config.get("target_parameters") or () if p.endswith(ends) and layer_of(p) is not None)
    return tuple(dict.fromkeys(p.rpartition(".")[0] for p in named))


def _shortened(modules: set[str], everything: Iterable[str] | None) -> list[str]:
    if everything is None:
        return sorted(modules)
    everywhere: dict[str, set[str]] = {}
    for name in everything:
        # and what is around it: PEFT takes a q_proj that holds its matrix in a "linear" (Gemma 4's towers)
        while name and one_expert(name) is None:
            above, _, leaf = name.rpartition(".")
            everywhere.setdefault(leaf, set()).add(name)
            name = above
    result: set[str] = set()
    for module in modules:
        leaf = module.rpartition(".")[2]
        result.add(leaf if leaf in everywhere and everywhere[leaf] <= modules else module)
    return sorted(result)


# Families (model_type of the language model) whose adapters the tests load with PEFT, compare with kt_ray's
# logits, merge and export: tests/adapter/test_every_family.py.
TESTED = frozenset(
    (
        *(
            "afmoe",
            "aria_text",
            "axk1",
            "axk2",
            "bailing_hybrid",
            "beam",
            "cohere2_moe",
            "deepseek_ocr2_text",
        ),
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "dots1", "dots3_note_text"),
        *("ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text"),
        *("glm5_next_text", "glm_moe_dsa", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
        *("gemma4_text", "hy_v4", "longcat_flash", "mistral_large4_text"),
        *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "inkling_text", "jamba", "kimi_linear", "kolibri1"),
        "llama4_text",
        *("laguna", "lfm2_moe", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl_text"),
        *(
            "mistral4",
            "mixtral",
            "nemotron_h",
            "olmoe",
            "phimoe",
            "qwen2_moe",
            "qwen3_5_moe_text",
            "qwen4_exp_text",
            "step3p5",
            "qwen3_moe",
        ),
        *("qwen3_next", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "solar_open", "unlimited_ocr_text"),
    )
)


_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that its --max-lora-rank may be
_MERGE = "merge it (python -m kt_ray.tools merge)"


def load_limits(names: Iterable[str], info: AdapterInfo) -> list[str]:
    """Where the adapter will not load as it is written, one line each.

    Args:
        names: of trained tensors or modules; one layer's are enough.
    """
    names = list(names)
    lines = []
    if info.model_type not in TESTED:
        lines.append(f"PEFT: not tested with {info.model_type}; compare a few answers with kt_ray's")
    if info.zero_experts:
        lines.append(
            "PEFT: not on the release, which transformers does not load (its class wants gate and up of zero "
            "experts); on a checkpoint that transformers saved"
        )
    inside = any("language_model." in name for name in names)
    if info.whole_type and not inside:
        lines.append(
            f"PEFT: only in AutoModelForCausalLM; in the class of {info.whole_type}, which servers "
            "build, its names are others and it has no effect: merge it"
        )
    if info.dora:
        lines.append(f"vLLM and SGLang: not as it is, they do not read DoRA: {_MERGE}")
        given = info.whole_type if inside else info.model_type
        leaves = {module_of(name).rpartition(".")[2] for name in names} & peft_expert_leaves(given)
        if leaves:
            lines.append(
                f"PEFT: not as it is, in this family it takes {', '.join(sorted(leaves))} for the routed "
                f"experts': {_MERGE}, or train attention alone (lora.target_modules)"
            )
    elif info.others:
        lines.append(f"vLLM and SGLang: not as it is, they read one rank and one alpha: {_MERGE}")
    if adapter_form(names, info) == "fused":
        lines.append(
            "vLLM and SGLang: not as it is, they read routed experts one by one "
            "(python -m kt_ray.tools export --form peft-per-expert)"
        )
    return lines


_ONE_BY_ONE = "Routed experts are stored one by one under the family's released names; PEFT merges them."
_HOW_EXPERTS = {
    "none": "No routed expert is adapted.",
    "modules": _ONE_BY_ONE,
    "parameters": _ONE_BY_ONE,
    "fused": "Routed experts are stored as PEFT stores adapters of fused parameters (gate and up together).",
}


def adapter_readme(names: Iterable[str], info: AdapterInfo) -> str:
    """README.md of the adapter's directory."""
    names = list(names)
    form = adapter_form(names, info)
    scale = "alpha / sqrt(r), folded into lora_alpha" if info.rslora else "alpha / r"
    ranks = sorted({info.rank, *(rank for rank, _ in info.others.values())})
    others = f"; ranks {', '.join(map(str, ranks))} (rank_pattern, alpha_pattern)" if info.others else ""
    largest = ranks[-1]
    for_vllm = next((rank for rank in _VLLM_RANKS if rank >= largest), largest)
    kind = "DoRA" if info.dora else "LoRA"
    leaves = sorted({module_of(name).rpartition(".")[2] for name in names})
    notes = "".join(f"- {line}\n" for line in info.notes)
    limits = "".join(f"- {line}\n" for line in load_limits(names, info))
    limits = f"\n## Will not load\n{limits}" if limits else ""
    base, loaded = shlex.quote(info.base_model), json.dumps(info.base_model)
    if info.revision:
        base += f" --revision {info.revision}"
        loaded += f', revision="{info.revision}"'
    renamed = ""
    if info.released_type:
        renamed = (
            f"# transformers has no {info.released_type}: first write "
            f'"model_type": "{info.model_type}" into config.json of the base (or of a copy of it)\n'
        )
    tested = f"tested with tiny models of {info.model_type}" if info.model_type in TESTED else "untested here"
    return f"""---
base_model: {json.dumps(info.base_model)}
library_name: peft
tags: [lora, mixture-of-experts]
---
# {kind} adapter for {info.base_model}

- model type: {info.model_type}
- rank {info.rank}, alpha {info.alpha:g}, scale {scale}{others}
- trained with dropout {info.dropout:g} (lora_dropout is 0 here: PEFT has none for parameters)
- {len(names)} tensors on: {", ".join(leaves)}
{notes}
{_HOW_EXPERTS[form]}
{limits}
## PEFT ({tested})
```python
from peft import PeftModel
from transformers import {info.auto}

{renamed}model = {info.auto}.from_pretrained({loaded})
model = PeftModel.from_pretrained(model, "<this directory>")
```
Needs transformers v5 and PEFT 0.21. Its warning that `rank_pattern` or `alpha_pattern` keys
"did not match any targeted module" is harmless here: the tensors are loaded.

## vLLM (untested: written after its documented key names)
```
vllm serve {base} --enable-lora --max-lora-rank {for_vllm} --lora-modules tuned=<this directory>
```
## SGLang (untested: written after its documented key names)
```
python -m sglang.launch_server --model-path {base} --enable-lora --max-lora-rank {largest} \\
    --lora-target-modules {" ".join(leaves)} --lora-paths tuned=<this directory>
```
Both apply an adapter to the modules they know for this family. Compare a few answers with PEFT's first.
"""
