"""Held-out rows: a function of the seed; rows that share a prompt stay on one side."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from dataclasses import replace

from kt_ray.config.schema import Config, DataConfig
from kt_ray.data.row_types import Conversation
from kt_ray.errors import UserError

# data.eval_fraction=auto: more rows make evaluations longer and their mean hardly steadier; the mean of fewer
# than five says nothing, and a small set needs its rows.
AUTO_SHARE, AUTO_MOST, AUTO_FROM = 0.05, 128, 100


def as_split(config: Config) -> DataConfig:
    """config.data, which holds out no row at auto in training that evaluates nothing."""
    idle = not config.trainer.eval_every and not config.eval.after_training
    if idle and config.mode in ("train", "plan", "preview") and config.data.eval_fraction == "auto":
        return replace(config.data, eval_fraction=0.0)
    return config.data


def held_out_count(fraction: float | str, rows: int) -> int:
    """How many of `rows` rows data.eval_fraction holds out: a share below 1, a number from 1 on, or auto.

    Raises:
        UserError: it is a number, and no row would be left.
    """
    if isinstance(fraction, str):
        return min(AUTO_MOST, round(AUTO_SHARE * rows)) if rows >= AUTO_FROM else 0
    if fraction >= 1:
        if int(fraction) >= rows:
            raise UserError(
                "no row would be left to train on",
                where=f"data.eval_fraction={int(fraction)}",
                observed=f"{rows} rows",
                required="fewer held-out rows than there are rows",
                remedy="set data.eval_fraction=0.05, or to a smaller number of rows",
            )
        return int(fraction)
    return max(1, round(fraction * rows)) if fraction else 0


def nothing_held_out(data: DataConfig, rows: int, asked: str, instead: str) -> UserError:
    """Of `rows` rows none is held out, but `asked` (KEY=VALUE) needs some; `instead` (KEY=VALUE) does not."""
    return UserError(
        "no rows are held out",
        where=asked,
        observed=f"{rows} rows, data.eval_fraction={data.eval_fraction}",
        required=f"held-out rows (auto holds out none of fewer than {AUTO_FROM} rows)",
        remedy=f"set data.eval_fraction=0.1 or data.eval_path=<file>, or {instead}",
    )


def split(
    rows: Sequence[Conversation], fraction: float | str, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out), both in source order.

    Prompts count as equal if they differ only in case, spacing or Unicode form. Groups of rows with one
    prompt are held out in the order of hash(seed, prompt) while they fit, so the choice does not depend on
    the order of rows in the file. At least one row is held out, unless `fraction` says none or auto.

    Args:
        fraction: see `held_out_count`.

    Raises:
        UserError: no group can be held out without emptying the other side, or more rows than there are.
    """
    target, auto = held_out_count(fraction, len(rows)), fraction == "auto"
    if target == 0:
        return list(rows), []
    groups = _groups(rows)
    if len(groups) < 2 and not auto:
        raise UserError(
            "no rows can be held out: all rows ask the same question",
            where="data.eval_fraction",
            observed=f"{len(rows)} rows, {len(groups)} prompt",
            required="at least two different prompts",
            remedy="set data.eval_fraction=0, or give data.eval_path a file of its own",
        )
    order = sorted(groups, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt}".encode()).digest())
    held_out: set[int] = set()
    for prompt in order:
        if len(held_out) + len(groups[prompt]) <= min(target, len(rows) - 1):
            held_out.update(groups[prompt])
    if (
        not held_out and not auto
    ):  # every group is larger than the share asked for: the smallest is nearest to it
        held_out.update(groups[min(order, key=lambda prompt: len(groups[prompt]))])
    train = [row for index, row in enumerate(rows) if index not in held_out]
    return train, [row for index, row in enumerate(rows) if index in held_out]


def same_prompt(prompt: str) -> str:
    """A normal form that equal questions share."""
    return " ".join(unicodedata.normalize("NFKC", prompt).casefold().split())


def _groups(rows: Sequence[Conversation]) -> dict[str, list[int]]:
    """Indices of the rows of each prompt, under the least spelling of it in the rows."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(same_prompt(row.prompt_key), []).append(index)
    return {min(rows[i].prompt_key for i in indices): indices for indices in groups.values()}
