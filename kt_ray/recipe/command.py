"""The command line with recipe=FILE replaced by what the recipe says."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TextIO

from kt_ray.config.compose import keys_given
from kt_ray.errors import UserError
from kt_ray.recipe.llamafactory import read
from kt_ray.recipe.override_text import override
from kt_ray.recipe.peer_options import refuse_peer_recipe
from kt_ray.recipe.reading import Override, Reading
from kt_ray.terminal import visible

OWN_KEYS = ("recipe", "recipe.devices", "recipe.accelerate")
_ROWS = (
    "data.path",
    "data.sources",
    "data.split",
    "data.subset",
    "data.format",
    "data.columns",
    "data.limit",
)
# The recipe's options that a command-line key overrides, besides its own ("rule." = everything below).
REPLACES: dict[str, tuple[str, ...]] = {
    "model": ("model.path",),
    "data": (*_ROWS, "data.eval_path", "data.eval_split"),
    "data.path": _ROWS[:-1],
    "data.sources": _ROWS,
    "data.builtin": _ROWS[:-1],
    "data.template": ("model.chat_template",),
    "model.chat_template": ("data.template",),
    "data.eval_path": ("data.eval_split",),
    "data.eval_fraction": ("data.eval_path", "data.eval_split"),
    "rule": ("rule.",),
    "rule.layers": ("rule.stages",),
    "rule.stages": ("rule.layers",),
    "trainer.resume": ("run.overwrite",),
    "trainer.epochs": ("trainer.max_steps",),
    "optim": ("optim.betas",),
    "optim.name": ("optim",),
    "lora": ("lora.experts",),
    "tracking": ("tracking.name",),
}


def with_recipe(keys: Sequence[str], out: TextIO | None = None) -> list[str]:
    """Command-line keys with recipe=FILE replaced by the overrides it becomes.

    Args:
        keys: KEY=VALUE arguments, no flags.
        out: where the mapping is printed; None = standard output.

    Returns:
        The recipe's overrides, then the other keys as given; `keys` where there is no recipe.

    Raises:
        UserError: the recipe cannot be read, is another program's, or has fields that are not mapped (all are
            listed).
    """
    own: dict[str, str] = {}
    rest: list[str] = []
    for key in keys:
        name, equals, value = key.partition("=")
        if name.startswith("recipe") and name.lstrip("+~") in OWN_KEYS and equals:
            own[name] = os.path.expanduser(value.strip("'\""))  # which few shells do behind the equals sign
        elif name.split(".")[0] == "recipe":
            raise UserError(
                f"malformed argument {key}",
                required="recipe=FILE, recipe.devices=N or recipe.accelerate=FILE",
                remedy="write recipe=<LLaMA-Factory training YAML>",
            )
        else:
            rest.append(key)
    if not own:
        return list(keys)
    if not own.get("recipe"):
        raise UserError(
            f"{next(iter(own))} has no meaning without a recipe",
            required="recipe=FILE",
            remedy="write recipe=<LLaMA-Factory training YAML>",
        )
    given = [name for key in rest for name in keys_given(key)]
    if "experiment" in given:
        raise UserError(
            "recipe and experiment both choose everything",
            observed=f"recipe={own['recipe']} experiment=…",
            required="one of the two",
            remedy="leave one out",
        )
    reading = read(own["recipe"], _devices(own.get("recipe.devices")), own.get("recipe.accelerate"))
    refuse_peer_recipe(reading)
    _refuse(reading, given)
    chosen, overruled = _chosen(reading, given)
    _print(reading, chosen, overruled, out or sys.stdout)
    return [override(o.key, o.value) for o in chosen] + rest


def _devices(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdigit() or int(text) < 1:
        raise UserError(
            f"recipe.devices={text} is no number of devices",
            required="a whole number, at least 1: data-parallel workers of LLaMA-Factory",
            remedy="set recipe.devices=1",
        )
    return int(text)


def _refuse(reading: Reading, given: Sequence[str]) -> None:
    """One error that lists every field without a mapping, except where the command line gives the option."""
    refusals = [r for r in reading.refused if not set(r.keys) & set(given)]
    if not refusals:
        return
    lifting = sorted({key for r in refusals for key in r.keys[:2]})
    remedy = "delete or change these fields"
    if lifting:
        remedy += f", or say on the command line what kt_ray should do instead ({', '.join(lifting)})"
    raise UserError(
        f"{len(refusals)} field{'s' * (len(refusals) > 1)} of the recipe cannot be mapped: "
        + "; ".join(f"{r.field} ({r.reason})" for r in refusals),
        where=str(reading.path),
        remedy=f"{remedy}; docs/recipes.md lists what is mapped",
    )


def _chosen(reading: Reading, given: Sequence[str]) -> tuple[list[Override], list[Override]]:
    """(overrides of the recipe, groups' options first; those that the command line overrules)."""
    replaced = set(given)
    for key in given:
        replaced |= set(REPLACES.get(key, ()))
    chosen: list[Override] = []
    overruled: list[Override] = []
    for o in reading.overrides.values():
        below = any(prefix.endswith(".") and o.key.startswith(prefix) for prefix in replaced)
        (overruled if o.key in replaced or below else chosen).append(o)
    if any(o.key.startswith("data.") for o in chosen) and "data" not in given:
        chosen.insert(0, Override("data", "jsonl", "recipe"))
    return sorted(chosen, key=lambda o: "." in o.key), overruled


def _print(reading: Reading, chosen: list[Override], overruled: list[Override], out: TextIO) -> None:
    lines = [f"recipe {reading.path} becomes:"]
    texts = [override(o.key, o.value) for o in chosen]
    width = min(48, max(map(len, texts), default=0))
    for o, text in zip(chosen, texts, strict=True):
        note = f"  ({o.note})" if o.note else ""
        lines.append(f"  {text:<{width}}  ← {o.source}{note}")
    if overruled:
        lines.append("the command line overrules the recipe:")
        lines += [f"  {override(o.key, o.value)}  ← {o.source}" for o in overruled]
    if reading.ignored:
        lines.append("ignored:")
        by_reason: dict[str, list[str]] = {}
        for field, reason in reading.ignored:
            by_reason.setdefault(reason, []).append(field)
        lines += [f"  {', '.join(fields)}: {reason}" for reason, fields in by_reason.items()]
    print(visible("\n".join(lines)), file=out, flush=True)
