"""Turns of a row: messages in OpenAI's or sharegpt's form, checked and normalised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from kt_ray.data.row_types import Turn
from kt_ray.errors import UserError
from kt_ray.parse import parse_json

JSON_KINDS = {
    bool: "a boolean",
    int: "a number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
}
# Names that files use for the four roles.
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
# How turns begin that a table holds as text, JSON's or what Python prints of them, and what is in them.
_TURNS_BEGIN = re.compile(r"""\s*\[\s*\{\s*(["'])(?:role|content|from|value)\1\s*:""")
_TURN_OF = re.compile(rf"""(["'])(?:role|from)\1\s*:\s*(["'])(?:{"|".join(ROLES)})\2""")
FILL = "fill or delete that row"
# names that files use for what the model thought before an answer
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# Names under which files of OpenAI, ms-swift and Axolotl say whether an answer is trained.
_MARKS = ("weight", "loss_scale", "loss", "train", "training")
_PARTS = ("train_detail", "training_detail")  # Axolotl's names of which characters of a turn are trained
MEDIA = ("images", "image", "videos", "video", "audios", "audio")  # names of what is not text
# Keys of a turn that are read, or refused, beside its role and its text: of any turn, and of a role's.
_READ = {*MEDIA, *_PARTS, "tool_calls", "function_call", "tools"}
_READ_OF = {"assistant": (*_THOUGHTS, *_MARKS), "tool": ("name", "tool_call_id")}
# key of the role, key of the text
OPENAI = ("role", "content")
SHAREGPT = ("from", "value")


def turns(given: Any, where: str, name: str, keys: tuple[str, str] = OPENAI) -> list[Turn]:
    """Checked turns of one conversation: [system,] user, assistant[, tool, assistant], user, …

    Args:
        given: a list of objects.
        where: file and line. name: the list's key in the row.
        keys: names of role and text in each object.

    Raises:
        UserError: a turn of the wrong shape, role or place; the message names it.
    """
    if not isinstance(given, list) or not given:
        raise wrong(name, given, where, f'a non-empty list of {{"{keys[0]}", "{keys[1]}"}} objects')
    result: list[Turn] = []
    for number, message in enumerate(given, start=1):
        _append(result, message, where, f"{name}[{number}]", keys)
    return result


def answer_of(given: Any, prompt: Sequence[Turn], where: str, name: str) -> list[Turn]:
    """`prompt` continued by an answer: a string, one message, or a list of messages.

    A list that begins with a question is taken as the whole conversation, prompt included.
    """
    if isinstance(given, dict):
        given = [given]
    if isinstance(given, list) and given and isinstance(given[0], dict):
        keys = SHAREGPT if SHAREGPT[0] in given[0] else OPENAI
        result = [] if role_of(given, 0) in ("system", "user") else list(prompt)
        for number, message in enumerate(given, start=1):
            _append(result, message, where, f"{name}[{number}]", keys)
    else:
        if not isinstance(given, str):
            raise wrong(name, given, where, "a string or a list of messages")
        refuse_turns(given, where, name)
        _check_place("assistant", "an answer", prompt, where, name)
        result = [*prompt, turn("assistant", given, where, name)]
    require_answer(result, where)
    return result


def unread_keys(given: Any, name: str) -> Iterator[str]:
    """Keys inside the turns of the list `name` that hold something and are not read, for the report."""
    for message in given if isinstance(given, list) else (given,):
        if isinstance(message, dict):
            role = role_of([message], 0) or ""
            own = _READ_OF.get(role, ())
            text = SHAREGPT if name not in ("messages", "prompt") and SHAREGPT[0] in message else OPENAI
            for key, value in message.items():
                if key not in _READ and key not in own and key not in text and is_there(value):
                    others = any(key in read for read in _READ_OF.values())
                    yield f"{name}.{key} of the {role}" if others else f"{name}.{key}"


def role_of(given: Any, index: int) -> str | None:
    """The role of one message of an unchecked list of them; None = there is none, or it has no known one."""
    message = given[index] if isinstance(given, list) and given else None
    if not isinstance(message, dict):
        return None
    return ROLES.get(str(message.get(SHAREGPT[0], message.get(OPENAI[0]))))


def refuse_turns(text: str, where: str, name: str) -> None:
    """Refuse a question or an answer that is a list of turns written as text."""
    if _TURNS_BEGIN.match(text) and _TURN_OF.search(text):
        raise bad_row(
            f"{name} is a text that holds turns: they would be read as they are written there",
            where,
            kind(text),
            "a text, or a list of turns",
            "write the rows as .jsonl with a list there; where a text is meant, make it the content "
            "of a message",
        )


def require_answer(messages: Sequence[Turn], where: str) -> None:
    """Refuse a conversation without a question, or whose last turn is no answer."""
    last = messages[-1]["role"] if messages else "system"  # an empty one
    if last != "assistant":
        raise UserError(
            "a conversation does not end with an answer",
            where=where,
            observed=f"last role {last}",
            required="assistant",
            remedy="add the answer, or delete the trailing question",
        )


def _append(before: list[Turn], message: Any, where: str, place: str, keys: tuple[str, str]) -> None:
    role_key, text_key = keys
    if not isinstance(message, dict):
        raise wrong(place, message, where, f'an object with "{role_key}" and "{text_key}"')
    calls = message.get("tool_calls") or None
    older = message.get("function_call")  # which would be left out without a word
    if any(older.values()) if isinstance(older, dict) else older:  # tables fill it in with nulls
        required = (
            '"tool_calls": [{"function": {"name": …, "arguments": …}}], and "tools" beside the messages'
        )
        what = f"{place}.function_call is OpenAI's older form of a call"
        raise bad_row(what, where, kind(older), required, "write such calls as tool_calls, or delete the key")
    if is_there(message.get("tools")):  # as GLM-4's files have them in the system prompt
        what = f"{place}.tools would be left out: tools stand beside the turns"
        remedy = f'move them to the row: {{"tools": […], "{place.partition("[")[0]}": […]}}'
        raise bad_row(what, where, kind(message["tools"]), '"tools" as a key of the row', remedy)
    for key in MEDIA:
        if is_there(message.get(key)):
            what = f"{place} has {key}: only text is trained"
            remedy = "delete that row, or the key to train the turn without it"
            raise bad_row(what, where, kind(message[key]), "a turn of text alone", remedy)
    for key in keys:
        if key not in message and not (calls and key == text_key):
            raise missing(f"{place}.{key}", message, where, f'{{"{role_key}": …, "{text_key}": …}}')
    given = message[role_key]
    role = ROLES.get(given, "") if isinstance(given, str) else ""
    joins = given == "tool_call" and bool(before) and before[-1]["role"] == "assistant"
    if not joins:
        _check_place(role, given, before, where, place)
    content = _content(message.get(text_key), where, f"{place}.{text_key}", empty=bool(calls))
    if given in ("function_call", "tool_call"):
        calls, content = decoded(content, where, place), ""
    if role == "system" and not content.strip():
        return  # as an empty "system" of the row
    result = turn(role, content, where, place, calls=calls is not None)
    if calls is not None:
        if role != "assistant":
            raise wrong(f"{place}.tool_calls", calls, where, "tool calls in assistant turns only")
        result["tool_calls"] = [_call(call, where, place) for call in _listed(calls, where, place)]
    for key in ("name", "tool_call_id"):
        if role == "tool" and isinstance(message.get(key), str):
            result[key] = message[key]  # type: ignore[literal-required]
    for key in _THOUGHTS if role == "assistant" else ():
        thought = message.get(key)
        if is_there(thought) and not isinstance(thought, str | bool):  # a switch is none
            raise wrong(f"{place}.{key}", thought, where, "a string")
        if isinstance(thought, str) and thought.strip():
            result.setdefault("reasoning_content", thought)
    for key in _PARTS:
        if is_there(message.get(key)):
            what = f"{place}.{key} says which characters are trained: answers are trained whole here"
            remedy = 'delete the key, or give answers that are context only "weight": 0'
            raise bad_row(what, where, kind(message[key]), "answers that are trained whole or not", remedy)
    marks = []
    for key in _MARKS if role == "assistant" else ():
        mark = message.get(key)
        if not is_there(mark) and mark != 0:
            continue
        if mark not in (0, 1):
            what = f"{place}.{key} says neither that the answer is trained nor that it is not"
            required = "0 or false (not trained), 1 or true"
            raise bad_row(what, where, kind(mark), required, "correct the key, or delete it")
        marks.append(bool(mark))
    if marks:
        result["weight"] = int(all(marks))
    before.append(_joined(before.pop(), result, where, place) if joins else result)


def _joined(answer: Turn, called: Turn, where: str, place: str) -> Turn:
    """An answer and a call behind it: ms-swift writes each call of an answer as a turn of its own."""
    both = answer.get("reasoning_content") and called.get("reasoning_content")
    if both or answer.get("weight", 1) != called.get("weight", 1):
        what = f"{place} is a part of the answer before it, and has another {'thought' if both else 'weight'}"
        raise bad_row(what, where, called["tool_calls"][0]["function"]["name"], "one for both")
    return {**called, **answer, "tool_calls": [*answer.get("tool_calls", ()), *called["tool_calls"]]}


def _check_place(role: str, given: object, before: Sequence[Turn], where: str, place: str) -> None:
    """Refuse a turn that may not follow those before it. `given`: its role as the row has it."""
    expected = _expected(before)
    if role not in expected:
        raise UserError(
            "roles are out of order" if role else "unknown role",
            where=f"{where}, {place}",
            observed=given,
            required=" or ".join(expected),
            remedy="reorder, merge or delete messages: a row is [system,] user, assistant, user, …; "
            "tool turns follow an answer that calls tools",
        )


def _expected(before: Sequence[Turn]) -> tuple[str, ...]:
    if not before:
        return ("system", "user")
    last = before[-1]
    if last["role"] == "assistant":
        return ("tool",) if last.get("tool_calls") else ("user",)
    return {"system": ("user",), "user": ("assistant",), "tool": ("assistant", "tool")}[last["role"]]


def _content(value: Any, where: str, label: str, *, empty: bool) -> str:
    if value is None and empty:
        return ""
    if isinstance(value, list) and value:
        # OpenAI's content parts; only text can be trained
        for part in value:
            if not (
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            ):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise UserError(
                    f"{label} holds a part that is not text",
                    where=where,
                    observed=kind,
                    required='{"type": "text", "text": …}',
                    remedy="delete that row: only text is trained",
                )
        return "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise wrong(label, value, where, "a string")
    return value


def turn(role: str, content: str, where: str, place: str, *, calls: bool = False) -> Turn:
    """A message; a question or an answer may not be empty, unless it calls tools."""
    if role in ("user", "assistant") and not calls and not content.strip():
        answer = "an answer is empty: nothing in it can be trained"
        what = answer if role == "assistant" else "a question is empty"
        raise bad_row(what, f"{where}, {place}", repr(content), "text", FILL)
    return Turn(role=role, content=content)


def _listed(calls: Any, where: str, place: str) -> list[Any]:
    if isinstance(calls, str):
        calls = decoded(calls, where, f"{place}.tool_calls")
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise wrong(f"{place}.tool_calls", calls, where, "a list of calls")
    return calls


def _call(call: Any, where: str, place: str) -> dict[str, Any]:
    """{"type": "function", "id"?, "function": {"name", "arguments": object}}."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise wrong(f"{place}.tool_calls", call, where, '{"function": {"name": …, "arguments": …}}')
    arguments = inner.get("arguments", inner.get("parameters"))
    if isinstance(arguments, str):  # OpenAI's API has "" where there are none
        arguments = decoded(arguments, where, f"{place}.tool_calls") if arguments.strip() else None
    if arguments is not None and not isinstance(arguments, dict):
        raise wrong(f"{place}.tool_calls.arguments", arguments, where, "an object")
    _check_json(arguments, where, f"{place}.tool_calls.arguments")
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": inner["name"], "arguments": arguments or {}},
    }
    if isinstance(call.get("id"), str):
        result["id"] = call["id"]
    return result


def tools_of(given: Any, where: str) -> tuple[dict[str, Any], ...] | None:
    """The functions a row offers, each {"type": "function", "function": {...}}; None = none."""
    if isinstance(given, str):
        given = decoded(given, where, "tools") if given.strip() else None
    if not given:
        return None
    if not isinstance(given, list):
        raise wrong("tools", given, where, "a list of functions")
    result = []
    for number, tool in enumerate(given, start=1):
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise wrong(f"tools[{number}]", tool, where, '{"type": "function", "function": {"name": …}}')
        _check_json(inner, where, f"tools[{number}]")
        result.append({"type": "function", "function": inner})
    return tuple(result)


def _check_json(value: Any, where: str, place: str) -> None:
    """Refuse a value of a table that no template can write: some take a text like 2024-05-01 for a date."""
    try:
        json.dumps(value)
    except TypeError as error:
        raise bad_row(
            f"{place} holds a value that JSON has no form for",
            where,
            error,
            "texts, numbers, booleans, lists and objects",
            "write that column as JSON text, or the rows as .jsonl",
        ) from error


def decoded(text: str, where: str, place: str) -> Any:
    """What a row holds as JSON text."""
    try:
        return parse_json(text, unique=True)
    except ValueError as error:
        raise bad_row(f"{place} is not valid JSON", where, f"{error}: {text[:60]}", "JSON") from error


def bad_row(
    what: str, where: str, observed: object, required: str, remedy: str = "correct or delete that row"
) -> UserError:
    """A fault of one row."""
    return UserError(what, where=where, observed=observed, required=required, remedy=remedy)


def missing(key: str, row: dict[str, Any], where: str, required: str) -> UserError:
    """A key that the format needs is not there."""
    return UserError(
        f"{key} is missing",
        where=where,
        observed=keys_of(row),
        required=required,
        remedy="add the key, name its column in data.columns, or set data.format if another format was meant",
    )


def keys_of(row: Iterable[Any]) -> str:
    """A row's keys in a message; blanks around one, which CSV files have, are seen."""
    names = [name if (name := str(key)) == name.strip() else repr(name) for key in row]
    return "keys " + (", ".join(names) or "(none)")


def is_there(value: Any) -> bool:
    """Whether a row holds something there: null, NaN, false and what is empty stand for nothing."""
    return bool(value) and value == value


def wrong(key: str, value: Any, where: str, required: str) -> UserError:
    """A value of the wrong type."""
    return bad_row(f"{key} has the wrong type", where, kind(value), required)


def kind(value: Any) -> str:
    """A value in a message: what it is and how it begins."""
    if value is None:
        return "null"
    text = repr(value)
    name = JSON_KINDS.get(type(value), type(value).__name__)
    return f"{name} {text if len(text) <= 60 else text[:59] + '…'}"
