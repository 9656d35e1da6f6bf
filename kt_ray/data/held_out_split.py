"""Held-out rows: a function of the seed; rows that share a prompt stay on one side."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

from kt_ray.data.row_types import Conversation
from kt_ray.errors import UserError


def split(
    rows: Sequence[Conversation], fraction: float, seed: int
) -> tuple[list[Conversation], list[Conversation]]:
    """(train, held out), both in source order.

    Prompts count as equal if they differ only in case, spacing or Unicode form. Groups of rows with one
    prompt are held out in the order of hash(seed, prompt) while they fit, so the choice does not depend on
    the order of rows in the file. At least one row is held out.

    Args:
        fraction: share to hold out, 0 <= fraction < 1; 0 = none.

    Raises:
        UserError: no group can be held out without emptying the other side.
    """
    if fraction == 0:
        return list(rows), []
    groups = _groups(rows)
    if len(groups) < 2:
        raise UserError(
            "no rows can be held out: all rows ask the same question",
            where="data.eval_fraction",
            observed=f"{len(rows)} rows, {len(groups)} prompt",
            required="at least two different prompts",
            remedy="set data.eval_fraction=0, or give data.eval_path a file of its own",
        )
    target = max(1, round(fraction * len(rows)))
    order = sorted(groups, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt}".encode()).digest())
    held_out: set[int] = set()
    for prompt in order:
        if len(held_out) + len(groups[prompt]) <= min(target, len(rows) - 1):
            held_out.update(groups[prompt])
    if not held_out:  # every group is larger than the share asked for: the smallest is nearest to it
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
