"""The KTransformers part of a recipe: optimize rules (old) and kt_config (new) as rule and backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import regex
import yaml

from kt_ray.config.files import conf_dir
from kt_ray.dims.config_keys import MOST_LAYERS
from kt_ray.parse import check_shape, finds, read_json, read_yaml
from kt_ray.recipe.field_table import field_table
from kt_ray.recipe.reading import Reading

BACKENDS = {
    "auto": "auto",
    "amxbf16": "AMXBF16",
    "amxint8": "AMXINT8",
    "int8": "AMXINT8",
    "amxint4": "AMXINT4",
    "amxfp8": "auto",
    "fp8": "auto",
    "llamafile": "llamafile",
}
FORMATS = {"bf16": "AMXBF16", "int8": "AMXINT8", "fp8": "auto"}
_BY_NAME = re.compile(r".*-sft(-amx)?(-multi-gpu(-(\d+))?)?\.ya?ml")
_PLACEMENT = ("rule", "rule.layers", "rule.stages")


def merge_kt_config(reading: Reading, accelerate: Mapping[str, Any]) -> None:
    """Puts the entries of kt_config, of the recipe and of an accelerate file, among the fields."""
    for origin, mapping in (
        ("kt_config of the accelerate file", accelerate.get("kt_config")),
        ("kt_config", reading.fields.get("kt_config")),
    ):
        if mapping is None:
            continue
        if not isinstance(mapping, Mapping):
            reading.refuse("kt_config", "is no mapping", value=mapping)
            continue
        for key, value in mapping.items():
            known = key != "config" and f"kt_{key}" in field_table()
            name = f"kt_{key}" if known else str(key)
            if reading.given(name) and value is not None and reading.fields[name] != value:
                reading.refuse(name, f"stands in {origin} with another value", value=value)
            elif value is not None:
                reading.fields[name] = value


def map_kt(reading: Reading, model_dir: Path | None, option: str | None) -> None:
    """Rule, backend and placement.

    Args:
        model_dir: the checkpoint, where it is there; option: the option of conf/model, where one is meant.
            Their number of layers turns a rule's patterns into ranges.
    """
    if reading.given("enabled") and not reading.flag("enabled", True):
        reading.refuse("enabled", "kt_ray is always on")
    backend = (
        _rule_file(reading, _layers_of(model_dir, option)) if reading.given("kt_optimize_rule") else None
    )
    backend = _backend(reading, backend)
    if backend is not None:
        names = [n for n in ("kt_backend", "kt_expert_weight_format", "kt_optimize_rule") if reading.given(n)]
        reading.set("rule.experts.backend", backend, *names)
    if reading.given("kt_threadpool_count") or reading.given("kt_tp_enabled"):
        count = reading.integer("kt_threadpool_count", 1) if reading.flag("kt_tp_enabled") else 1
        reading.set("rule.experts.sockets", count, "kt_tp_enabled", "kt_threadpool_count")
    if reading.integer("kt_num_gpu_experts", 0):
        reading.set(
            "rule.experts.gpu_resident", reading.integer("kt_num_gpu_experts", 0), "kt_num_gpu_experts"
        )
    _activations(reading)
    for name, own in (("kt_lora_rank", "lora_rank"), ("kt_lora_alpha", "lora_alpha")):
        if reading.given(name) and reading.given(own) and reading.fields[name] != reading.fields[own]:
            reading.refuse(name, f"differs from {own}={reading.fields[own]}")
        elif reading.given(name):
            reading.fields[own] = reading.fields[name]


def _backend(reading: Reading, of_rule: str | None) -> str | None:
    name = str(reading.get("kt_backend", ""))
    skips = name.lower().endswith("_skiplora")
    key = name.lower().removesuffix("_skiplora")
    if skips or reading.flag("kt_freeze_experts"):
        reading.frozen_experts = "kt_backend" if skips else "kt_freeze_experts"
    if name and key not in BACKENDS:
        reading.refuse(
            "kt_backend", "is no backend of kt_ray (AMXBF16, AMXINT8, AMXINT4, auto)", "rule.experts.backend"
        )
        return None
    if name and key != "auto":
        return BACKENDS[key]
    if reading.given("kt_expert_weight_format"):
        return str(reading.word("kt_expert_weight_format", FORMATS, "bf16", "rule.experts.backend"))
    return "auto" if name else of_rule


def _activations(reading: Reading) -> None:
    for name in ("kt_cpu_activation", "activation_policy", "kt_activation_policy"):
        value = reading.get(name)
        if isinstance(value, Mapping):
            value = value.get("cpu")
        if value is None:
            continue
        if value not in ("retain", "recompute"):
            reading.refuse(name, "is neither retain nor recompute", "rule.experts.activations")
        else:
            reading.set("rule.experts.activations", value, name)


def _layers_of(model_dir: Path | None, option: str | None) -> int | None:
    """The model's number of layers, where it can be known without loading anything."""
    if model_dir is not None and (model_dir / "config.json").is_file():
        file = model_dir / "config.json"
        config = read_json(file, "the model's config.json", "download config.json again")
    elif option is not None:
        file = conf_dir() / "model" / f"{option}.yaml"
        config = yaml.safe_load(file.read_text(encoding="utf-8")).get("config") or {}
    else:
        return None
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    return layers if isinstance(layers, int) and 0 < layers <= MOST_LAYERS else None


def _rule_file(reading: Reading, layers: int | None) -> str | None:
    """The backend of an optimize rule; its placement goes to `reading`."""
    path = reading.existing(str(reading.fields["kt_optimize_rule"]))
    if not path.is_file():
        return _by_name(reading, path)
    entries = read_yaml(path, "the optimize rule", "correct kt_optimize_rule")
    if not isinstance(entries, list) or not all(isinstance(e, Mapping) for e in entries):
        reading.refuse("kt_optimize_rule", "is no list of match and replace", *_PLACEMENT)
        return None
    shape = {"match?": {"name?": str}, "replace?": {"class?": str, "kwargs?": dict}}
    check_shape(entries, [shape], path, "the optimize rule", "correct kt_optimize_rule")
    backends = set()
    for entry in entries:
        replace = entry.get("replace") or {}
        if str(replace.get("class", "")).endswith("KTransformersExperts"):
            kwargs = replace.get("kwargs") or {}
            if kwargs.get("generate_device", "cpu") != "cpu":
                reading.refuse("kt_optimize_rule", "computes experts on a GPU", "rule")
            backends.add(str(kwargs.get("backend", "llamafile")).lower())
    _devices(reading, entries, layers)
    if len(backends) != 1 or not backends <= set(BACKENDS):
        names = ", ".join(sorted(backends)) or "no"
        reading.refuse("kt_optimize_rule", f"has {names} expert backend", "rule", "rule.experts.backend")
        return None
    return BACKENDS[backends.pop()]


def _by_name(reading: Reading, path: Path) -> str | None:
    match = _BY_NAME.fullmatch(path.name)
    if not match:
        reading.refuse("kt_optimize_rule", "is not there", "rule", "rule.experts.backend")
        return None
    stages = int(match[4]) if match[4] else 2 if match[2] else 1
    note = "the file is not there: by its name"
    reading.set("rule.stages", stages, "kt_optimize_rule", note=note)
    return "AMXBF16" if match[1] else "llamafile"


def _devices(reading: Reading, entries: list[Any], layers: int | None) -> None:
    """Layers per device, as the first pattern says that a layer's attention matches."""
    rules: list[tuple[str, str]] = []
    where = f"kt_optimize_rule={reading.fields['kt_optimize_rule']}"
    for entry in entries:
        match = entry.get("match") or {}
        kwargs = (entry.get("replace") or {}).get("kwargs") or {}
        device = kwargs.get("generate_device")
        if match.get("name") and device and "class" not in match:
            try:
                finds(match["name"], "", where=where)
            except regex.error as error:
                reading.refuse("kt_optimize_rule", f"has the pattern {match['name']}: {error}", *_PLACEMENT)
                return
            rules.append((match["name"], str(device)))
    rules = [(pattern, device) for pattern, device in rules if device.startswith("cuda")]
    named = sorted({device for _, device in rules})
    if len(named) <= 1:
        reading.set("rule.stages", 1, "kt_optimize_rule")
        return
    if layers is None:
        reading.refuse(
            "kt_optimize_rule",
            "divides layers between devices, and the model's number of layers is not known here",
            *_PLACEMENT,
        )
        return
    devices: list[str | None] = []
    for layer in range(layers):
        name = f"model.layers.{layer}.self_attn"
        devices.append(next((d for pattern, d in rules if finds(pattern, name, where=where)), None))
    starts = [i for i in range(layers) if i == 0 or devices[i] != devices[i - 1]]
    if None in devices or len({devices[i] for i in starts}) != len(starts):
        reading.refuse("kt_optimize_rule", "does not give each device one run of layers", *_PLACEMENT)
        return
    if len(starts) == 1:
        reading.set("rule.stages", 1, "kt_optimize_rule", note="all layers of this model on one device")
        return
    stops = [*starts[1:], layers]
    ranges = [f"{start}-{stop - 1}" for start, stop in zip(starts, stops, strict=True)]
    reading.set("rule.layers", ranges, "kt_optimize_rule")
