"""How weights are stored, read from a config.json: format, block that shares a scale, bytes of a scale.

Sources: the `quantization_config` conventions of transformers (fp8, fbgemm_fp8, mxfp4, gptq, awq,
bitsandbytes), of ModelOpt (`quant_algo`), compressed-tensors (`config_groups`, `ignore`) and AMD Quark
(`global_quant_config`, `exclude`), and DeepSeek-V4's `expert_dtype`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import regex

from kt_ray import integer_packing, rotations
from kt_ray.errors import UserError
from kt_ray.parse import matches

# What expert actors read from checkpoints, and so train. "fp8_block" is the engine's fp8 with blocks.
TRAINABLE_FORMATS = ("bf16", "f32", "fp8", "fp8_block", "mxfp4", "nvfp4", "int8", "int4", "uint4")

_BITS = {"f32": 32, "bf16": 16, "f16": 16}
_BITS |= {"fp8_block": 8, "fp8": 8, "int8": 8, "mxfp4": 4, "nvfp4": 4, "int4": 4, "uint4": 4, "nf4": 4}
_PLAIN = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

# Layers' names differ from family to family and from release to release: an excluded module is one
# that a pattern finds under any of these names.
MODEL_ROOTS = ("model.", "model.language_model.", "language_model.model.", "")
_EXPERT_NAMES = (
    *("mlp.experts.0.gate_proj", "mlp.experts.gate_up_proj", "mlp.experts"),
    *("block_sparse_moe.experts.0.w1", "ffn.experts.0.w1"),
    *("feed_forward.experts.0.gate_proj", "feed_forward.experts.0.w1"),
    *("feed_forward.experts.gate_up_proj", "feed_forward.experts"),
)


def _experts_of(layer: int) -> list[str]:
    """Names that the experts of a layer may have."""
    return [f"{p}layers.{layer}.{name}" for p in MODEL_ROOTS for name in _EXPERT_NAMES]


@dataclass(frozen=True)
class Storage:
    """How one kind of weights is stored."""

    # "bf16", "f32", "f16", "fp8_block", "fp8", "mxfp4", "nvfp4", "int8", "int4", "uint4" (with zero points),
    # or a method's name; an unknown one counts as bf16, the largest of those that checkpoints quantise from
    format: str
    block: tuple[int, int] = (0, 0)  # rows and columns that share a scale; 0 = all of them
    scale_bytes: float = 0  # bytes of a scale (with its zero point); 0 = there are none

    def matrix_bytes(self, rows: int, columns: int) -> float:
        """Bytes of one matrix [rows, columns] with its scales."""
        high, wide = self.block[0] or rows, self.block[1] or columns
        scales = -(-rows // high) * -(-columns // wide)
        return rows * columns * _BITS.get(self.format, 16) / 8 + scales * self.scale_bytes

    def dividing(self, columns: int) -> Storage:
        """With groups halved until they divide a row of `columns`, as weights are quantised while read."""
        wide = self.block[1]
        while wide and columns % wide:
            wide //= 2
        return replace(self, block=(self.block[0], wide))


_EXCLUDED = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude")
_GLOB, _PART = "glob:", "part:"  # before a pattern, as "re:" is
_MOST = 1 << 24  # rows or columns that share a scale
MXFP4 = Storage("mxfp4", (1, 32), 1)
_MXFP8, _NVFP4 = Storage("fp8_block", (1, 32), 1), Storage("nvfp4", (1, 16), 1)
# ModelOpt's quant_algo
_OF_MODELOPT = {
    "fp8": Storage("fp8", (0, 0), 4),
    "fp8_per_channel_per_token": Storage("fp8", (1, 0), 4),
    "fp8_pb_wo": Storage("fp8_block", (128, 128), 4),
    "mxfp8": _MXFP8,
    "nvfp4": _NVFP4,
    "w4a16_nvfp4": _NVFP4,
}
_PLAIN_NAME = re.compile(r"[\w.-]+")
_ROUTED = re.compile(r"^(?!mtp\.)(?:.*\.)?layers\.(?P<layer>[\d*]+)\.(?:\w+\.)*experts(?:[.*]|$)")
# Experts quantised while they stream in.
BACKEND_STORAGE = {
    "AMXINT8": Storage("int8", (1, 0), 2),
    "AMXINT4": Storage("int4", (1, 128), 2),
    "W4A8": Storage("int4", (1, 128), 2),
}


def plain_storage(dtype: str) -> Storage:
    """Unquantised weights in `dtype`: "bfloat16", "float32" or "float16"."""
    return Storage(_PLAIN[dtype])


def expert_storage(config: Mapping[str, Any], dtype: str, moe_layers: Iterable[int]) -> Storage:
    """Storage of the routed experts that are quantised; where layers have several, the largest.

    Args:
        config: the language model's keys, `quantization_config` among them.
        dtype: type of what is not quantised.
    """
    if str(config.get("expert_dtype", "")).lower() in ("fp4", "mxfp4"):
        return MXFP4
    if _is_mixed(_quantization(config)):
        each = _expert_algorithms(config, moe_layers).values()
        found = [_of_modelopt(algorithm) for algorithm in sorted(set[str]().union(*each))]
        # Of what is not read nobody knows the size: it counts as the largest.
        return max(found, key=lambda s: s.matrix_bytes(_MOST, _MOST), default=plain_storage(dtype))
    excluded = _excluded(config)
    quantised = (layer for layer in moe_layers if not _names_match(excluded, layer, _EXPERT_NAMES))
    stored = {_storage(config, dtype, _experts_of(layer)) for layer in quantised} - {plain_storage(dtype)}
    return max(stored, key=lambda s: s.matrix_bytes(_MOST, _MOST), default=plain_storage(dtype))


def plain_expert_layers(config: Mapping[str, Any], dtype: str, moe_layers: Iterable[int]) -> tuple[int, ...]:
    """MoE layers whose experts quantization_config excludes, or does not name: stored in the plain type."""
    quantization = _quantization(config)
    if _is_mixed(quantization):
        return tuple(n for n, own in _expert_algorithms(config, moe_layers).items() if not own)
    patterns, plain = _excluded(config), plain_storage(dtype)
    return tuple(
        layer
        for layer in moe_layers
        if _names_match(patterns, layer, _EXPERT_NAMES)
        or (quantization and _storage(config, dtype, _experts_of(layer)) == plain)
    )


def linear_storage(config: Mapping[str, Any], dtype: str, layer: int, module: str) -> Storage:
    """Storage of a linear module outside the routed experts, e.g. "self_attn.q_proj".

    MXFP4 (gpt-oss, DeepSeek-V4's `expert_dtype`) is the routed experts' alone.
    """
    quantization = _quantization(config)
    if (
        not quantization
        or _method(quantization) == "mxfp4"
        or _names_match(_excluded(config), layer, (module,))
    ):
        return plain_storage(dtype)
    return _storage(config, dtype, [f"{p}layers.{layer}.{module}" for p in MODEL_ROOTS])


def missing_for_training(
    config: Mapping[str, Any], storage: Storage, moe_layers: Iterable[int]
) -> str | None:
    """Why experts of a storage cannot be trained, with what to do; None = they can.

    Args:
        config: the language model's keys, `quantization_config` among them.
        storage: what `expert_storage` says of them.
    """
    quantization = _quantization(config)
    method, fmt = _method(quantization), storage.format
    if fmt == "f16":
        return (
            "routed experts stored as f16 are not read: the engine computes in bfloat16; convert them first: "
            "python -m kt_ray.tools convert MODEL OUT --to bf16"
        )
    weights: Mapping[str, Any] = {}
    if method == "compressed-tensors":
        groups = [_group_of(quantization, _experts_of(layer)) for layer in moe_layers]
        own = (g["weights"] for g in groups if g and _compressed_tensors(quantization, g) == storage)
        weights = next(own, weights)
    stored, whole_numbers = fmt, fmt in ("int8", "int4", "uint4")
    unread = integer_packing.unread(quantization) if method in integer_packing.METHODS else None
    if rotated := rotations.unread(quantization):
        stored += f" {rotated}"
    elif unread:
        stored += f" {unread}"
    elif method == "bitsandbytes":
        stored += f" in the packing of {method}"
    elif fmt not in TRAINABLE_FORMATS:
        stored += f" as {method} packs them" if method and method != fmt else ""
    elif fmt == "int8" and weights.get("symmetric") is False:
        stored = f"asymmetric {fmt} (with zero points)"
    elif whole_numbers and weights and (bits := _whole(weights, "num_bits", default=8)) not in (4, 8):
        stored += f" of {bits} bits"
    elif whole_numbers and weights.get("actorder") in ("group", "dynamic"):
        stored += " in an order of their own (actorder)"
    elif whole_numbers and storage.block[1] % 32:
        stored += f" in groups of {storage.block[1]} (no multiple of 32)"
    else:
        return None
    return (
        f"routed experts stored as {stored} are not read; use the model's BF16 checkpoint, or one in FP8 "
        "(per block, row or tensor), MXFP4, NVFP4, symmetric INT8 or INT4 (compressed-tensors, GPTQ, AWQ)"
    )


def _storage(config: Mapping[str, Any], dtype: str, names: list[str]) -> Storage:
    """Storage of modules of these names, exclusions aside."""
    quantization = _quantization(config)
    if not quantization:
        return plain_storage(dtype)
    method = _method(quantization)
    if method in ("fp8", "finegrained_fp8"):
        block = quantization.get("weight_block_size")
        if not block:
            return Storage("fp8", (0, 0), 4)
        # DeepSeek-V4 stores its powers of two as bytes; others of scale_fmt ue8m0 store them as float32.
        power = quantization.get("scale_fmt") == "ue8m0" and "o_lora_rank" in config
        return Storage("fp8_block", _pair(block), 1 if power else 4)
    if method == "fbgemm_fp8":
        return Storage("fp8", (1, 0), 4)
    if method == "mxfp4":
        return MXFP4
    if method == "compressed-tensors":
        group = _group_of(quantization, names)
        if group is None and _group_of(quantization, None) is not None:
            return plain_storage(dtype)  # its groups name other modules
        return _compressed_tensors(quantization, group)
    if method == "bitsandbytes":
        return Storage("nf4", (1, 64), 4) if quantization.get("load_in_4bit") else Storage("int8", (1, 0), 4)
    if method in integer_packing.METHODS:
        only = _modules_in_block(quantization)
        if only and not _one_matches(only, names):
            return plain_storage(dtype)
        bits = _whole(quantization, "bits", "w_bit", default=4)
        columns = max(0, _whole(quantization, "group_size", "q_group_size", default=128))
        return _integers(bits, (1, columns), integer_packing.has_zeros(quantization))
    if method == "quark":
        return _of_quark(_quark_weights(quantization, names)) or Storage(method)
    if method == "modelopt":
        if not _is_mixed(quantization):
            own = str(quantization.get("quant_algo") or "")
            return _of_modelopt(own) if own else plain_storage(dtype)
        algorithms = _stated_algorithms(*_quantized_layers(quantization), names)
        return _of_modelopt(algorithms[0]) if algorithms else plain_storage(dtype)
    return {"mxfp8": _MXFP8, "nvfp4": _NVFP4}.get(method, Storage(method))


def _of_modelopt(algorithm: str) -> Storage:
    """ModelOpt's quant_algo."""
    return _OF_MODELOPT.get(algorithm.lower(), Storage(algorithm.lower()))


def _is_mixed(quantization: Mapping[str, Any]) -> bool:
    """Whether ModelOpt chose a quant_algo for each module."""
    own = str(quantization.get("quant_algo") or "").lower()
    return _method(quantization) == "modelopt" and own == "mixed_precision"


def _quantized_layers(quantization: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """What ModelOpt says of modules by their names, tens of thousands of experts' among them, and those of
    the names that have a "*"."""
    layers = quantization.get("quantized_layers")
    layers = layers if isinstance(layers, Mapping) else {}
    return layers, [name for name in layers if "*" in name]


def _algorithms(said: Iterable[Any]) -> list[str]:
    """The quant_algo of each of them that states one."""
    found = (own.get("quant_algo") for own in said if isinstance(own, Mapping))
    return [str(algorithm) for algorithm in found if algorithm]


def _stated_algorithms(layers: Mapping[str, Any], patterns: list[str], names: list[str]) -> list[str]:
    """Of modules of these names, or of what they lie in: by name, then by patterns."""
    parts = [name.split(".") for name in names]
    modules = [".".join(part[:n]) for part in parts for n in range(len(part), 0, -1)]
    modules += [key for key in patterns if any(fnmatchcase(name, key) for name in names)]
    return _algorithms(layers[name] for name in modules if name in layers)


def _expert_algorithms(config: Mapping[str, Any], moe_layers: Iterable[int]) -> dict[int, set[str]]:
    """Of each layer's routed experts, named as one or one by one; empty where they are excluded."""
    (layers, patterns), excluded = _quantized_layers(_quantization(config)), _excluded(config)
    routed: dict[str, set[str]] = {}  # by number of the layer, or a pattern of it
    for name, said in layers.items():
        if match := _ROUTED.search(name):
            routed.setdefault(match["layer"], set()).update(_algorithms([said]))
    found: dict[int, set[str]] = {}
    for layer in moe_layers:
        found[layer] = set()
        if not _names_match(excluded, layer, _EXPERT_NAMES):
            found[layer].update(_stated_algorithms(layers, patterns, _experts_of(layer)))
            found[layer].update(*(own for number, own in routed.items() if fnmatchcase(str(layer), number)))
    return found


def _modules_in_block(quantization: Mapping[str, Any]) -> list[str]:
    """The only modules of a layer that GPTQ quantised; empty = all."""
    listed = quantization.get("modules_in_block_to_quantize")
    modules: list[str] = []
    for group in listed if isinstance(listed, list) else ():
        modules += [m for m in (group if isinstance(group, list) else [group]) if isinstance(m, str)]
    return modules


def _of_quark(weights: Mapping[str, Any]) -> Storage | None:
    """AMD Quark's; None = of a type that is not read."""
    dtype, scheme = str(weights.get("dtype")), str(weights.get("qscheme"))
    if dtype == "fp4" and weights.get("group_size") == 32 and weights.get("scale_format") == "e8m0":
        return MXFP4
    if dtype != "fp8_e4m3":
        return None
    if scheme == "per_block":
        return Storage("fp8_block", _pair(weights.get("block_size")), 4)
    block = {"per_tensor": (0, 0), "per_channel": (1, 0)}.get(scheme)
    return None if block is None else Storage("fp8", block, 4)


def _quark_weights(quantization: Mapping[str, Any], names: list[str]) -> Mapping[str, Any]:
    """What AMD Quark says of the weights of modules of these names."""
    own = quantization.get("global_quant_config")
    if isinstance(layers := quantization.get("layer_quant_config"), Mapping):
        matching = (config for p, config in layers.items() if any(fnmatchcase(name, p) for name in names))
        own = next(matching, own)
    weights = own.get("weight") if isinstance(own, Mapping) else None
    return weights if isinstance(weights, Mapping) else {}


def _compressed_tensors(quantization: Mapping[str, Any], group: Mapping[str, Any] | None) -> Storage:
    if group is None:
        return Storage("compressed-tensors")
    weights = group["weights"]
    bits, packing = _whole(weights, "num_bits", default=8), _packing(quantization, group)
    columns = _whole(weights, "group_size", default=0)
    if str(weights.get("type")) == "float" and bits == 4:
        return _NVFP4 if "nvfp4" in packing or columns == 16 else MXFP4
    strategy = str(weights.get("strategy") or ("group" if columns > 0 else "channel"))
    if weights.get("block_structure"):
        strategy = "block"
    block = {
        "tensor": (0, 0),
        "block": _pair(weights.get("block_structure") or (128, 128)),
        "group": (1, max(0, columns)),
    }.get(strategy, (1, 0))
    if str(weights.get("type")) == "float":
        if "mxfp8" in packing:
            return _MXFP8
        return Storage("fp8_block" if strategy in ("block", "group") else "fp8", block, 2)
    return _integers(bits, block, weights.get("symmetric") is False)


def _integers(bits: int, block: tuple[int, int], zeros: bool) -> Storage:
    """Zero points are held as numbers of the scales' type."""
    kind = "int8" if bits > 4 else "uint4" if zeros else "int4"
    return Storage(kind, block, 4 if zeros else 2)


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    quantization = config.get("quantization_config")
    return quantization if isinstance(quantization, Mapping) else {}


def _method(quantization: Mapping[str, Any]) -> str:
    """quant_method in one spelling; "" without quantisation."""
    if not quantization:
        return ""
    named = str(quantization.get("quant_method", "unknown")).lower().replace("compressed_", "compressed-")
    return "modelopt" if named in ("modelopt_fp8", "modelopt_fp4", "modelopt_mixed") else named


def _packing(quantization: Mapping[str, Any], group: Mapping[str, Any] | None) -> str:
    return str((group or {}).get("format") or quantization.get("format") or "").lower()


def _group_of(quantization: Mapping[str, Any], names: list[str] | None) -> Mapping[str, Any] | None:
    """The group of compressed-tensors whose targets match one of `names` (None = the first group)."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
            continue
        targets = [str(target) for target in group.get("targets") or ["Linear"]]
        if names is None or "Linear" in targets or _one_matches(targets, names):
            return group
    return None


def _excluded(config: Mapping[str, Any]) -> list[str]:
    """Patterns of the modules that are not quantised."""
    quantization = _quantization(config)
    listed = [quantization.get(key) for key in _EXCLUDED]
    patterns = [str(pattern) for some in listed if isinstance(some, list) for pattern in some]
    if _method(quantization) in ("modelopt", "quark"):  # of layers.1.* others take the dots for any character
        patterns = [_GLOB + p if "*" in p and not p.startswith("re:") else p for p in patterns]
    if _method(quantization) == "awq":  # AutoAWQ's are parts of names: self_attn, model.layers.0.
        patterns += [_PART + p for p in patterns]
    # GPTQModel's and AutoRound's: by module, "-:" or other bits.
    for key in ("dynamic", "extra_config"):
        own = quantization.get(key)
        for pattern, changes in own.items() if isinstance(own, Mapping) else ():
            bits = changes.get("bits") if isinstance(changes, Mapping) else None
            if pattern.startswith("-:"):
                patterns.append(f"re:{pattern[2:]}")
            elif isinstance(bits, int) and bits >= 16:
                patterns.append(pattern)
    return patterns


def _names_match(patterns: Sequence[str], layer: int, names: Iterable[str]) -> bool:
    return _one_matches(patterns, [f"{root}layers.{layer}.{name}" for root in MODEL_ROOTS for name in names])


def _one_matches(patterns: Sequence[str], names: Iterable[str]) -> bool:
    """Whether a pattern matches one of the names: as compressed-tensors ("re:...") and transformers match,
    from the start to a dot, or the end; or as ModelOpt and Quark do ("glob:..."), or AutoAWQ ("part:...")."""
    plain, parts, others = _sorted_out(tuple(patterns))
    return any(
        _is_named(name, plain, parts) or any(_matches(pattern, name) for pattern in others) for name in names
    )


@functools.lru_cache(maxsize=8)
def _sorted_out(patterns: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], tuple[str, ...]]:
    """Names without wildcards, parts of names, and the other patterns: releases list thousands of names."""
    parts = frozenset(p.removeprefix(_PART).strip(".") for p in patterns if p.startswith(_PART))
    others = [p for p in patterns if not p.startswith(_PART)]
    plain = frozenset(p for p in others if _PLAIN_NAME.fullmatch(p))
    return plain, parts, tuple(p for p in others if p not in plain)


def _is_named(name: str, plain: frozenset[str], parts: frozenset[str]) -> bool:
    """Whether a name is one of `plain`, lies in it or ends with it; or has one of `parts`, in whole words: a
    router is called gate, a projection gate_proj."""
    words = name.split(".")
    starts = [".".join(words[:n]) for n in range(1, len(words))]
    ends = [".".join(words[n:]) for n in range(len(words))]
    if any(part in plain for part in (*starts, *ends, *(f"{start}." for start in starts))):
        return True
    return bool(parts) and any(
        ".".join(words[a:b]) in parts for a in range(len(words)) for b in range(a + 1, len(words) + 1)
    )


def _matches(pattern: str, name: str) -> bool:
    """A pattern with wildcards."""
    if pattern.startswith(_GLOB):
        glob = pattern.removeprefix(_GLOB)
        return fnmatchcase(name, glob) or fnmatchcase(name, f"{glob}.*")
    own = pattern.removeprefix("re:")
    whole = own if pattern.startswith("re:") else rf"(?:{own})(?:(?<=\.)|(?=\.|$))"
    try:
        if matches(whole, name, where="quantization_config in the model's config.json"):
            return True
    except regex.error:  # "*self_attn*"
        if fnmatchcase(name, pattern):
            return True
    return name == pattern or name.endswith(f".{pattern}")


def _pair(value: Any) -> tuple[int, int]:
    """[128, 128] or "128x128" as (rows, columns)."""
    parts = re.split(r"\D+", value) if isinstance(value, str) else value
    try:
        rows, columns = (int(part) for part in parts)
    except (TypeError, ValueError, OverflowError):
        rows = columns = 0
    if not (0 < rows <= _MOST and 0 < columns <= _MOST):
        raise _unusable("a block size", value, "[rows, columns]")
    return rows, columns


def _whole(mapping: Mapping[str, Any], *names: str, default: int) -> int:
    """The first of `names` that is there and not null or 0."""
    for name in names:
        value = mapping.get(name)
        if not value:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _MOST:
            raise _unusable(name, value, "a whole number")
        return value
    return default


def _unusable(what: str, value: Any, required: str) -> UserError:
    return UserError(
        f"{what} in the model's quantization_config is not usable",
        where="config.json",
        observed=repr(value),
        required=required,
        remedy="download config.json again, or correct the key",
    )
