"""Turn source rows (alpaca or messages) into conversations, and refuse what is neither.

alpaca:   {"instruction", "input"?, "output", "system"?} are strings, "history"? is [[user, assistant], …]
messages: {"messages": [{"role": "system" | "user" | "assistant", "content": string}, …]}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kt_ray.data.types import Conversation, Message
from kt_ray.errors import UserError

FORMATS = ("alpaca", "messages")
ALPACA = '{"instruction": …, "output": …[, "input", "system", "history"]}'
MESSAGES = '{"messages": [{"role": …, "content": …}, …]}'
JSON_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def conversations(
    rows: Iterable[tuple[str, Any]], format: str = "auto", system: str | None = None
) -> Iterator[Conversation]:
    """Conversations in source order, numbered from 0.

    Args:
        rows: (where, row) pairs as `read_rows` yields them.
        format: "auto" (the first row decides, the rest must agree), "alpaca" or "messages".
        system: system prompt of rows that have none; None = none.

    Raises:
        UserError: a row that is not of the format; the message names file and line.
    """
    if format not in ("auto", *FORMATS):
        raise UserError(
            "unknown data format",
            where="data.format",
            observed=format,
            required="auto, alpaca or messages",
            remedy="set data.format=auto",
        )
    for index, (where, row) in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(
                "a row is not an object",
                where=where,
                observed=_kind(row),
                required=f"{ALPACA} or {MESSAGES}",
                remedy="write every row as a JSON object",
            )
        if format == "auto":
            format = _detect(row, where)
        turns = _alpaca(row, where) if format == "alpaca" else _messages(row, where)
        if system and turns[0]["role"] != "system":
            turns.insert(0, Message(role="system", content=system))
        yield Conversation(tuple(turns), index, where)


def _detect(row: dict[str, Any], where: str) -> str:
    if row.get("messages") is not None:
        return "messages"
    if "instruction" in row or "output" in row:
        return "alpaca"
    remedy = "rename the keys, or convert the file to one of these formats"
    if "conversations" in row:
        remedy = (
            'rename "conversations" to "messages", "from" and "value" to "role" and "content", '
            '"human" and "gpt" to "user" and "assistant"'
        )
    raise UserError(
        "unknown data format",
        where=where,
        observed="keys " + (", ".join(map(str, row)) or "(none)"),
        required=f"alpaca {ALPACA} or messages {MESSAGES}",
        remedy=remedy,
    )


def _alpaca(row: dict[str, Any], where: str) -> list[Message]:
    if "instruction" not in row and "input" not in row:
        raise _missing("instruction", row, where, ALPACA)
    if "output" not in row:
        raise _missing("output", row, where, ALPACA)
    instruction = _text(row, "instruction", where, optional=True)
    extra = _text(row, "input", where, optional=True)
    question = "\n".join(part for part in (instruction, extra) if part.strip())
    if not question.strip():
        raise UserError(
            "the question is empty",
            where=where,
            observed="instruction and input without text",
            required="text in one of them",
            remedy="fill or delete that row",
        )
    turns: list[Message] = []
    system = _text(row, "system", where, optional=True)
    if system:
        turns.append(Message(role="system", content=system))
    history = row.get("history")
    if not (history is None or isinstance(history, list)):
        raise _wrong("history", history, where, "a list of [user, assistant] pairs")
    for number, pair in enumerate(history or (), start=1):
        place = f"history[{number}]"
        strings = isinstance(pair, list) and all(isinstance(text, str) for text in pair)
        if not (strings and len(pair) == 2):
            raise _wrong(place, pair, where, "a [user, assistant] pair of strings")
        turns += [_turn("user", pair[0], where, place), _turn("assistant", pair[1], where, place)]
    turns.append(Message(role="user", content=question))
    turns.append(_turn("assistant", _text(row, "output", where), where, "output"))
    return turns


def _messages(row: dict[str, Any], where: str) -> list[Message]:
    if "messages" not in row:
        raise _missing("messages", row, where, MESSAGES)
    given = row["messages"]
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, where, 'a non-empty list of {"role", "content"} objects')
    turns: list[Message] = []
    for number, message in enumerate(given, start=1):
        place = f"messages[{number}]"
        if not isinstance(message, dict):
            raise _wrong(place, message, where, 'an object with "role" and "content"')
        for key in ("role", "content"):
            if key not in message:
                raise _missing(f"{place}.{key}", message, where, '{"role": …, "content": …}')
        if message.get("tool_calls"):
            raise UserError(
                "tool calls are not supported in training data",
                where=f"{where}, {place}",
                observed="tool_calls",
                required="text content",
                remedy="delete that row, or render the call into the content",
            )
        role, expected = message["role"], _expected(turns)
        if role not in expected:
            raise UserError(
                "roles are out of order" if role in ("system", "user", "assistant") else "unknown role",
                where=f"{where}, {place}",
                observed=role,
                required=" or ".join(expected),
                remedy="reorder, merge or delete messages: a row is [system,] user, assistant, user, …",
            )
        turns.append(_turn(role, _text(message, "content", where, label=f"{place}.content"), where, place))
    if turns[-1]["role"] != "assistant":
        raise UserError(
            "a conversation does not end with an answer",
            where=where,
            observed=f"last role {turns[-1]['role']}",
            required="assistant",
            remedy="add the answer, or delete the trailing question",
        )
    return turns


def _expected(turns: list[Message]) -> tuple[str, ...]:
    if not turns:
        return ("system", "user")
    return ("assistant",) if turns[-1]["role"] == "user" else ("user",)


def _turn(role: str, content: str, where: str, place: str) -> Message:
    if role != "system" and not content.strip():
        raise UserError(
            "an answer is empty: nothing in it can be trained"
            if role == "assistant"
            else "a question is empty",
            where=f"{where}, {place}",
            observed=repr(content),
            required="text",
            remedy="fill or delete that row",
        )
    return Message(role=role, content=content)


def _text(row: dict[str, Any], key: str, where: str, *, optional: bool = False, label: str = "") -> str:
    value = row.get(key)
    if value is None and optional:
        return ""
    if not isinstance(value, str):
        raise _wrong(label or key, value, where, "a string")
    return value


def _missing(key: str, row: dict[str, Any], where: str, required: str) -> UserError:
    return UserError(
        f"{key} is missing",
        where=where,
        observed="keys " + (", ".join(map(str, row)) or "(none)"),
        required=required,
        remedy="add the key, or set data.format if another format was meant",
    )


def _wrong(key: str, value: Any, where: str, required: str) -> UserError:
    return UserError(
        f"{key} has the wrong type",
        where=where,
        observed=_kind(value),
        required=required,
        remedy="correct or delete that row",
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    text = repr(value)
    name = JSON_KINDS.get(type(value), type(value).__name__)
    return f"{name} {text if len(text) <= 60 else text[:59] + '…'}"
