"""A conversation's turns as chat templates take them, and what to find of them in a rendering."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from kt_ray.data.row_types import Conversation, Turn

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


def plain_turns(messages: Sequence[Turn], in_parts: bool = False) -> list[dict[str, Any]]:
    """Messages as templates take them: a thought under each name that they read, or in the content."""
    return [_with_names(message, in_parts) for message in messages]


def _with_names(message: Turn, in_parts: bool) -> dict[str, Any]:
    plain: dict[str, Any] = {key: value for key, value in message.items() if key != "weight"}
    thought = plain.get("reasoning_content")
    if thought is None:
        return plain
    if in_parts:
        text = [{"type": "text", "text": plain["content"]}] if plain["content"] else []
        plain["content"] = [{"type": "thinking", "thinking": thought}, *text]
    return {**dict.fromkeys(("thinking", "reasoning"), thought), **plain}


def forms(messages: Sequence[Turn]) -> list[Sequence[Turn]]:
    """Most templates write a call's arguments with tojson; some expect them written already."""
    called = any(message.get("tool_calls") for message in messages)
    return [messages, arguments_as_text(messages)] if called else [messages]


def arguments_as_text(messages: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same messages with the arguments of tool calls as JSON text."""

    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return tuple(
        {**m, "tool_calls": [as_text(call) for call in m["tool_calls"]]} if "tool_calls" in m else m
        for m in messages
    )


def with_thought(message: Turn) -> Turn:
    """The same with a thought that an answer begins with in <think> as its reasoning_content."""
    if message["role"] != "assistant" or message.get("reasoning_content"):
        return message
    found = _THOUGHT.match(message["content"])
    if found is None:
        return message
    return {**message, "content": message["content"][found.end() :], "reasoning_content": found[1].strip()}


def call_of(name: str, id: str) -> dict[str, Any]:
    """A call without arguments, to try a template with."""
    return {"type": "function", "id": id, "function": {"name": name, "arguments": {}}}


def with_ids(messages: Sequence[Turn], id_of: Callable[[dict[str, Any], int], str]) -> list[Turn]:
    """The same with the ids of calls that `id_of` gives for each and its number in the conversation, and with
    its call's in each result. Results follow their calls."""
    turns: list[Turn] = []
    new: dict[str, str] = {}
    asked: list[str] = []  # ids of calls that have no result yet
    names: dict[str, str] = {}
    numbers = itertools.count()
    for message in messages:
        if calls := message.get("tool_calls"):
            asked = []
            for call, number in zip(calls, numbers, strict=False):
                asked.append(id_of(call, number))
                new[call.get("id", "")] = asked[-1]
                names[asked[-1]] = call["function"]["name"]
            named = [{**call, "id": id} for call, id in zip(calls, asked, strict=True)]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            own, name = message.get("tool_call_id", ""), message.get("name", "")
            by_name = [id for id in asked if names[id] == name]
            id = new.get(own, own) if own else next(iter([*by_name, *asked]), "")
            asked = [other for other in asked if other != id]
            message = {**message, "tool_call_id": id} if id else message
        turns.append(message)
    return turns


def naming_id(call: dict[str, Any], number: int) -> str:
    """For templates that write ids in the place of calls' names, as Kimi's does: functions.NAME:0, as the
    model has it, unless the call's own has the name in it."""
    own, name = call.get("id", ""), call["function"]["name"]
    return own if re.search(_word(name), own) else f"functions.{name}:{number}"


def short_id(call: dict[str, Any], number: int) -> str:
    """Nine letters and digits, which look drawn but are a function of the call, unless its own id is such."""
    if re.fullmatch("[A-Za-z0-9]{9}", call.get("id", "")):
        return str(call["id"])
    digest = hashlib.sha256(json.dumps([number, call["function"]], ensure_ascii=False).encode()).digest()
    letters = string.ascii_letters + string.digits
    return "".join(letters[byte % len(letters)] for byte in digest[:9])


def some_id(call: dict[str, Any], number: int) -> str:
    """The call's own id, or a short one."""
    return str(call.get("id") or short_id(call, number))


def with_marks(
    messages: Sequence[Turn], tools: Sequence[dict[str, Any]] | None
) -> tuple[list[tuple[str, str, str]], list[Turn], list[dict[str, Any]] | None]:
    """The same with other names of tools and calls, and other results: their own may stand anywhere in a row.

    Returns:
        ((the name or result there, the one here, what it is) of each, messages, tools).
    """
    marks: list[tuple[str, str, str]] = []
    ids: dict[str, str] = {}

    def marked(function: dict[str, Any], what: str, place: str) -> dict[str, Any]:
        name = function["name"]
        marks.append((f"mark_{len(marks)}_of_a_row", name, f"the {what} {name}{place}"))
        return {**function, "name": marks[-1][0]}

    def marked_call(call: dict[str, Any], number: int) -> dict[str, Any]:
        call = {**call, "function": marked(call["function"], "call of", f" (messages[{number}])")}
        mark, name, _ = marks[-1]
        if name and "id" in call:  # which may be written in the name's place
            ids[call["id"]] = re.sub(_word(name), mark, call["id"])
            call["id"] = ids[call["id"]]
        return call

    turns: list[Turn] = []
    for number, message in enumerate(messages, start=1):
        calls = [marked_call(call, number) for call in message.get("tool_calls", ())]
        turns.append({**message, "tool_calls": calls} if calls else message)
        if message["role"] == "tool":
            marks.append(
                (f"mark_{len(marks)}_of_a_row", message["content"], f"the tool turn (messages[{number}])")
            )
            turns[-1] = {**message, "content": marks[-1][0]}
            if (own := message.get("tool_call_id")) in ids:
                turns[-1]["tool_call_id"] = ids[own]
    offered = [{**tool, "function": marked(tool["function"], "tool", "")} for tool in tools or ()]
    return marks, turns, offered or None


def _word(name: str) -> str:
    """A pattern that finds the name as a word of its own."""
    return rf"(?<!\w){re.escape(name)}(?!\w)"


def is_written(part: str, text: str) -> bool:
    """Whether a rendering holds a text, as it is or within JSON."""
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def answers_wanted(conversation: Conversation, train_on: str) -> list[bool]:
    """For each answer of a conversation, in order, whether it is trained.

    Of pairs and verdicts only what follows the prompt is: the rest is the same in both, or not judged.
    """
    messages = conversation.messages
    questions = [i for i, m in enumerate(messages) if m["role"] == "user"]
    after = -1
    if train_on == "last" or conversation.kind != "sft":
        after = questions[-1]
    if conversation.rejected is not None:
        same = zip(messages, conversation.rejected, strict=False)
        after = next((i for i, (a, b) in enumerate(same) if a != b), len(messages)) - 1
    return [i > after and m.get("weight", 1) != 0 for i, m in enumerate(messages) if m["role"] == "assistant"]
