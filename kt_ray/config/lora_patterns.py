"""lora.rank_pattern and lora.alpha_pattern: rank and alpha of single modules, chosen as PEFT chooses them.

A pattern means a module whose name it matches from a dot (or the beginning) to the end; the first that does
counts. Routed experts are `model.layers.3.mlp.experts.5.gate_proj` to patterns, whatever their family calls
them, and `model.layers.3.mlp.experts` together; the engine computes all of them with one rank and scale.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.parse import matches

_PLAIN = re.compile(r"(\w|\\?\.)+")  # a name, with its dots escaped or not
_ROLES = ("gate_proj", "up_proj", "down_proj")
_KEYS = ("rank_pattern", "alpha_pattern")


def means(pattern: str, module: str, *, where: str) -> bool:
    """Whether a pattern of rank_pattern or alpha_pattern means a module, as PEFT compares them.

    Args:
        where: the file and key that it comes from.

    Raises:
        UserError: it takes more than a second. regex.error: it is no regular expression.
    """
    # The end first: adapters may name hundreds of modules, and models have thousands of experts.
    return module.endswith(_end(pattern)) and matches(rf"(.*\.)?({pattern})$", module, where=where)


@cache
def _end(pattern: str) -> str:
    return re.split(r"\\?\.", pattern)[-1] if _PLAIN.fullmatch(pattern) else ""


def first_meaning(patterns: Iterable[str], names: Sequence[str], *, where: str) -> str | None:
    """The first pattern that means a module of these names. Raises as `means`."""
    return next((p for p in patterns if any(means(p, name, where=where) for name in names)), None)


def shortest_patterns(
    values: Mapping[str, float], default: float, of_experts: Collection[str]
) -> dict[str, float]:
    """Patterns that give modules these values: the shortest ends of their names that mean no other module.

    Args:
        values: full name of each module outside the routed experts -> its value.
        default: what needs no pattern.
        of_experts: last parts of names that routed experts have, too.
    """

    def ends(name: str) -> list[str]:
        parts = name.split(".")
        joined = [".".join(parts[-count:]) for count in range(1, len(parts) + 1)]
        unclear = 0 if parts[-1] not in of_experts else 2 if parts[-2:-1] and parts[-2].isdigit() else 1
        return joined[unclear:] or [name]

    found: dict[str, set[float]] = {}
    for name, value in values.items():
        for end in ends(name):
            found.setdefault(end, set()).add(value)
    own = ((name, value) for name, value in values.items() if value != default)
    return {next(end for end in ends(name) if len(found[end]) == 1): value for name, value in own}


def module_lora(lora: LoraConfig, module: str, *others: str) -> LoraConfig:
    """The settings of one module: its own rank and alpha, and no patterns.

    Args:
        others: more names of it.

    Raises:
        UserError: a pattern takes more than a second.
    """
    if not (lora.rank_pattern or lora.alpha_pattern):
        return lora
    values = [lora.rank, lora.alpha]
    for i, key in enumerate(_KEYS):
        patterns: Mapping[str, float] = getattr(lora, key) or {}
        match = first_meaning(patterns, (module, *others), where=f"lora.{key}")
        values[i] = values[i] if match is None else patterns[match]
    return replace(lora, rank=int(values[0]), alpha=float(values[1]), rank_pattern=None, alpha_pattern=None)


def expert_lora(lora: LoraConfig, layers: tuple[int, ...], experts: int) -> LoraConfig:
    """The settings of all routed experts.

    Args:
        layers: MoE layers. experts: of each.

    Raises:
        UserError: patterns give them several ranks or alphas.
    """
    if not (lora.rank_pattern or lora.alpha_pattern):
        return lora
    patterns = (tuple((getattr(lora, key) or {}).items()) for key in _KEYS)
    layers = tuple(filter(lora.reaches, layers))
    rank, alpha = _of_experts(lora.rank, lora.alpha, *patterns, layers, experts)
    return replace(lora, rank=rank, alpha=alpha, rank_pattern=None, alpha_pattern=None)


_Items = tuple[tuple[str, float], ...]


@cache  # a plan asks for every layout that it compares
def _of_experts(
    rank: int, alpha: float, ranks: _Items, alphas: _Items, layers: tuple[int, ...], experts: int
) -> tuple[int, float]:
    values: list[float] = [rank, alpha]
    for i, (key, items) in enumerate(zip(_KEYS, (ranks, alphas), strict=True)):
        # Those that end in another name mean none of them.
        own = {p: v for p, v in items if any(name.endswith(_end(p)) for name in ("experts", *_ROLES))}
        found: dict[float, str] = {}  # value -> an expert that has it
        for layer in layers if own else ():
            prefix = f"model.layers.{layer}.mlp.experts"
            for name in (f"{prefix}.{expert}.{role}" for expert in range(experts) for role in _ROLES):
                match = first_meaning(own, (name, prefix), where=f"lora.{key}")
                found.setdefault(values[i] if match is None else own[match], name)
        if len(found) > 1:
            raise UserError(
                f"lora.{key} gives routed experts different values",
                observed=", ".join(f"{name} {value:g}" for value, name in list(found.items())[:2]),
                required="one for all of them: they are computed together",
                remedy=f"begin lora.{key} with experts: {next(iter(found)):g}, or write patterns that mean "
                "no routed expert (shared_experts.down_proj)",
            )
        values[i] = next(iter(found), values[i])
    return int(values[0]), float(values[1])


def check_patterns(lora: LoraConfig, modules: Sequence[str], layers: tuple[int, ...], experts: int) -> None:
    """Check that every pattern means a module that has LoRA.

    Args:
        modules: that have it, outside the routed experts. layers, experts: as `expert_lora`.

    Raises:
        UserError: a pattern means none, or several values for routed experts.
    """
    names = list(modules)
    if lora.experts:
        expert_lora(lora, layers, experts)
        prefixes = [f"model.layers.{layer}.mlp.experts" for layer in filter(lora.reaches, layers)]
        names += prefixes + [f"{p}.{e}.{role}" for p in prefixes for e in range(experts) for role in _ROLES]
    for key in _KEYS:
        unused = [
            pattern
            for pattern in getattr(lora, key) or {}
            if not any(means(pattern, name, where=f"lora.{key}") for name in names)
        ]
        if unused:
            ends = sorted({name.rpartition(".")[2] for name in modules})
            raise UserError(
                f"lora.{key} has a pattern that means no module with LoRA",
                observed=", ".join(unused[:4]),
                required="names, or ends of names from a dot on (regular expressions); modules end in "
                + ", ".join([*ends, "experts"] if lora.experts else ends),
                remedy=f"correct lora.{key}, or lora.target_modules and lora.experts",
            )
