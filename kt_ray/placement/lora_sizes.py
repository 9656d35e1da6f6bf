"""Ranks and parameters of the LoRA of a model of which only the dimensions are known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from kt_ray.config.lora_patterns import expert_lora, module_lora
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.model_dims import ModelDims


def lora_params(dims: ModelDims, lora: LoraConfig, layer: int) -> int:
    """LoRA parameters of layer `layer` outside the routed experts."""
    return _params(adapted(dims, lora, layer), lora.dora)


@cache
def _params(sizes: tuple[tuple[int, int, int], ...], dora: bool) -> int:
    return sum(rank * (n_in + n_out) + dora * n_out for n_in, n_out, rank in sizes)


def adapted(dims: ModelDims, lora: LoraConfig, layer: int) -> tuple[tuple[int, int, int], ...]:
    """(inputs, outputs, rank) of every module of layer `layer` that has LoRA, routed experts aside."""
    modules, alike = dims.lora_in_out[layer], lora.target_modules == "auto" and not lora.rank_pattern
    if alike:  # a plan asks for every layer of every layout that it compares
        return _alike(modules, lora.rank)
    ranks = module_ranks(dims, lora, layer)
    return tuple((n_in, n_out, r) for (_, n_in, n_out), r in zip(modules, ranks, strict=True) if r)


@cache
def _alike(modules: tuple[tuple[str, int, int], ...], rank: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((n_in, n_out, rank) for _, n_in, n_out in modules) if rank else ()


def adapted_names(dims: ModelDims, lora: LoraConfig) -> list[str]:
    """Names of all modules that have LoRA, routed experts aside."""
    return [
        f"model.layers.{layer}.{name}"
        for layer in range(dims.num_layers)
        for (name, _, _), rank in zip(dims.lora_in_out[layer], module_ranks(dims, lora, layer), strict=True)
        if rank
    ]


def module_ranks(dims: ModelDims, lora: LoraConfig, layer: int) -> tuple[int, ...]:
    """Rank of the LoRA of every module in `dims.lora_in_out` of a layer; 0 = it has none."""
    targets, patterns = lora.target_modules, tuple((lora.rank_pattern or {}).items())
    names = tuple(name for name, _, _ in dims.lora_in_out[layer])
    return _ranks(names, targets if isinstance(targets, str) else tuple(targets), lora.rank, patterns, layer)


@cache
def _ranks(
    modules: tuple[str, ...],
    targets: str | tuple[str, ...],
    rank: int,
    patterns: tuple[tuple[str, int], ...],
    layer: int,
) -> tuple[int, ...]:
    lora = LoraConfig(rank=rank, rank_pattern=dict(patterns))
    names = ((f"model.layers.{layer}.{module}", _adapts(targets, layer, module)) for module in modules)
    return tuple(module_lora(lora, name).rank if has_lora else 0 for name, has_lora in names)


def _adapts(targets: str | Sequence[str], layer: int, module: str) -> bool:
    """Whether lora.target_modules name a module of a layer outside its routed experts."""
    name = f"model.layers.{layer}.{module}"
    below = f".layers.{layer}.{module}"  # of a name in full, whatever the language model is called
    if isinstance(targets, str):
        return targets == "auto" or (targets != "none" and re.fullmatch(targets, name) is not None)
    return any(f".{target}".endswith(below) or name.endswith(f".{target}") for target in targets)


def expert_lora_params(dims: ModelDims, lora: LoraConfig) -> int:
    """LoRA parameters of one routed expert: gate if there is one, up and down."""
    matrices = 3 if dims.gated else 2
    return matrices * expert_rank(dims, lora) * (dims.expert_width + dims.expert_intermediate)


def expert_rank(dims: ModelDims, lora: LoraConfig) -> int:
    """Rank of the routed experts' LoRA; 0 = they have none.

    Raises:
        UserError: patterns give them several.
    """
    return expert_lora(lora, dims.moe_layers, dims.num_experts).rank if lora.experts else 0


def trained_params(dims: ModelDims, lora: LoraConfig) -> int:
    """LoRA parameters of the whole model."""
    outside = sum(lora_params(dims, lora, layer) for layer in range(dims.num_layers))
    return outside + len(dims.moe_layers) * dims.num_experts * expert_lora_params(dims, lora)


def in_parts(lora: LoraConfig, dtype: str, *, gpu: bool) -> bool:
    """Whether LoRA outside the routed experts takes the path of kt_ray/model/lora_linear.py."""
    return gpu and dtype == "bfloat16" and not lora.dropout and not lora.dora
