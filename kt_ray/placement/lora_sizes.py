"""Ranks and parameters of the LoRA of a model of which only the dimensions are known."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

from kt_ray.config.fields import show
from kt_ray.config.lora_patterns import expert_lora, module_lora
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import MODEL_ROOTS
from kt_ray.errors import UserError
from kt_ray.placement.generation_memory import generates
from kt_ray.placement.plan_types import BackwardPart


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
        return _alike(modules, lora.rank if lora.reaches(layer) else 0)
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


def strange_targets(dims: ModelDims, lora: LoraConfig) -> list[str]:
    """Entries of lora.target_modules (or the expression) that name nothing outside the routed experts."""
    targets = lora.target_modules
    if isinstance(targets, str):
        return [] if targets in ("auto", "none") or adapted_names(dims, lora) else [targets]
    return [one for one in targets if not adapted_names(dims, replace(lora, target_modules=[one]))]


def module_ranks(dims: ModelDims, lora: LoraConfig, layer: int) -> tuple[int, ...]:
    """Rank of the LoRA of every module in `dims.lora_in_out` of a layer; 0 = it has none."""
    targets, patterns = lora.target_modules, tuple((lora.rank_pattern or {}).items())
    names = tuple(name for name, _, _ in dims.lora_in_out[layer])
    chosen = targets if isinstance(targets, str) else tuple(targets)
    return _ranks(names, chosen, lora.rank, patterns, layer, lora.reaches(layer))


@cache
def _ranks(
    modules: tuple[str, ...],
    targets: str | tuple[str, ...],
    rank: int,
    patterns: tuple[tuple[str, int], ...],
    layer: int,
    reached: bool,
) -> tuple[int, ...]:
    lora = LoraConfig(rank=rank, rank_pattern=dict(patterns))
    has = [_adapts(targets, layer, module, reached) for module in modules]
    names = [f"model.layers.{layer}.{module}" for module in modules]
    return tuple(module_lora(lora, name).rank if own else 0 for name, own in zip(names, has, strict=True))


def _adapts(targets: str | Sequence[str], layer: int, module: str, reached: bool) -> bool:
    """Whether lora.target_modules name a module of a layer outside its routed experts. reached: whether
    lora.layers has the layer."""
    name = f"model.layers.{layer}.{module}"
    below = f".layers.{layer}.{module}"  # of a name in full, whatever the language model is called
    if isinstance(targets, str):
        if targets == "auto":
            return reached
        names = (f"{root}layers.{layer}.{module}" for root in MODEL_ROOTS)
        return targets != "none" and any(re.fullmatch(targets, name) for name in names)
    return any(
        f".{target}".endswith(below)
        or (name.endswith(f".{target}") and (reached or len(target) > len(module)))
        for target in targets
    )


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


def expert_lora_layers(dims: ModelDims, lora: LoraConfig) -> tuple[int, ...]:
    """MoE layers whose routed experts have LoRA."""
    return tuple(filter(lora.reaches, dims.moe_layers)) if lora.experts else ()


def trained_params(dims: ModelDims, lora: LoraConfig) -> int:
    """LoRA parameters of the whole model."""
    outside = sum(lora_params(dims, lora, layer) for layer in range(dims.num_layers))
    experts = len(expert_lora_layers(dims, lora)) * dims.num_experts
    return outside + experts * expert_lora_params(dims, lora)


def expert_lora_share(dims: ModelDims, lora: LoraConfig) -> float:
    """Part of the MoE layers whose routed experts have LoRA."""
    return len(expert_lora_layers(dims, lora)) / len(dims.moe_layers)


def backward_of(dims: ModelDims, lora: LoraConfig, outside: Collection[int] | None = None) -> BackwardPart:
    """Where backward ends. outside: layers with LoRA outside their experts; None = by the dimensions."""

    def has(layer: int) -> bool:
        return bool(adapted(dims, lora, layer)) if outside is None else layer in outside

    experts = expert_lora_layers(dims, lora)
    lowest = next((layer for layer in range(dims.num_layers) if has(layer) or layer in experts), 0)
    return BackwardPart(lowest, lowest + (lowest in experts and not has(lowest)))


def lowest_kept(dims: ModelDims, config: Config) -> int:
    """The lowest layer that keeps something for backward. None does without one: answers, losses of
    mode=eval."""
    forward = generates(config) or config.mode == "eval"
    return dims.num_layers if forward else backward_of(dims, config.lora).lowest


def check_layers(dims: ModelDims, lora: LoraConfig) -> None:
    """Raises UserError where lora.layers has a layer that the model lacks, or leaves nothing to train."""
    if lora.layers is None:
        return
    strange = sorted(layer for layer in lora.layers if layer >= dims.num_layers)
    required = f"0 to {dims.num_layers - 1}"
    if not strange and not trained_params(dims, lora):
        required = f"a layer with LoRA by lora.target_modules={show(lora.target_modules)}"
        required += f", or with experts: {show(list(dims.moe_layers))}" if lora.experts else ""
    elif not strange:
        return
    raise UserError(
        "lora.layers has layers that this model lacks" if strange else "lora.layers leaves nothing to train",
        observed=show(strange or lora.layers),
        required=required,
        remedy="correct lora.layers, or set lora.layers=null for all",
    )


def in_parts(lora: LoraConfig, dtype: str, *, gpu: bool) -> bool:
    """Whether LoRA outside the routed experts takes the path in parts (kt_ray/model/lora_linear.py)."""
    return gpu and dtype == "bfloat16" and not lora.dropout and not lora.dora
