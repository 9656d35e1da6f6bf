"""The formats of rows by their keys: which one a row is of, or why that cannot be said."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kt_ray.data.turns import ROLES
from kt_ray.errors import UserError

ALPACA = '{"instruction": …, "output": …[, "input", "system", "history"]}'
MESSAGES = '{"messages": [{"role": …, "content": …}, …][, "tools"]}'
# What a row of each format looks like, for messages and documentation.
FORMATS: dict[str, str] = {
    "alpaca": ALPACA,
    "sharegpt": '{"conversations": [{"from": …, "value": …}, …][, "system", "tools"]}',
    "messages": MESSAGES,
    "prompt_completion": '{"prompt": …, "completion": …}',
    "preference": '{"chosen": …, "rejected": …, "prompt" or "messages" or "instruction": …}',
    "kto": '{"label": true or false, "prompt": …, "completion": …} (or messages)',
    "text": '{"text": …}',
}
# Columns that data.columns may name. "role" and "content" are the keys inside a list of turns.
COLUMNS = (
    *("instruction", "input", "output", "system", "history", "messages", "conversations", "tools"),
    *("prompt", "completion", "chosen", "rejected", "label", "text", "role", "content"),
)


def detect(row: Mapping[str, Any]) -> list[str]:
    """The formats that the keys of a row fit: one, or the row is unknown (none) or ambiguous."""

    def has(*names: str) -> bool:
        return all(row.get(name) not in (None, "") for name in names)

    plain = [
        name
        for name, fits in (
            ("messages", has("messages")),
            ("sharegpt", has("conversations")),
            ("alpaca", "instruction" in row or "output" in row),
            ("prompt_completion", has("prompt", "completion")),
            ("text", isinstance(row.get("text"), str) and has("text")),
        )
        if fits
    ]
    judged = verdict(row) is not None
    if has("chosen", "rejected"):
        # the rest of the row is the prompt, unless it holds an answer of its own
        answered = [
            name
            for name in plain
            if name in ("prompt_completion", "text")
            or (name == "alpaca" and has("output"))
            or (name in ("messages", "sharegpt") and _answered(row))
        ]
        return ["preference", *answered, *(["kto"] if judged else [])]
    if judged and plain and plain != ["text"]:
        return ["kto"] if len(plain) == 1 else ["kto", *plain]
    return plain


def _answered(row: Mapping[str, Any]) -> bool:
    given = row.get("messages") or row.get("conversations")
    last = given[-1] if isinstance(given, list) and given else {}
    return isinstance(last, dict) and ROLES.get(str(last.get("role", last.get("from")))) == "assistant"


def verdict(row: Mapping[str, Any]) -> bool | None:
    """true or false of a KTO row; None = none."""
    value = row.get("label", row.get("kto_tag"))
    if isinstance(value, str) and value.lower() in ("true", "false"):  # csv has no booleans
        return value.lower() == "true"
    return value if isinstance(value, bool) else None


def unknown(row: Mapping[str, Any], where: str) -> UserError:
    """The row fits no format."""
    return UserError(
        "unknown data format",
        where=where,
        observed="keys " + (", ".join(map(str, row)) or "(none)"),
        required=" or ".join(f"{name} {shape}" for name, shape in FORMATS.items()),
        remedy="name the columns in data.columns (data.columns={instruction: question, output: answer}), "
        "rename the keys, or convert the file to one of these formats",
    )


def ambiguous(row: Mapping[str, Any], found: list[str], where: str) -> UserError:
    """The row fits several formats."""
    return UserError(
        "the row fits several data formats",
        where=where,
        observed="keys " + ", ".join(map(str, row)),
        required=f"one of {', '.join(found)}",
        remedy=f"set data.format={found[0]} (or {', '.join(found[1:])})",
    )
