"""Rows: alpaca and messages to conversations, and how each bad row is named."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.data.formats import conversations
from kt_ray.errors import UserError

GOOD = {"instruction": "q", "output": "a"}


def turns(*rows: Any, format: str = "auto", system: str | None = None) -> list[list[tuple[str, str]]]:
    numbered = [(f"f.jsonl, line {i}", row) for i, row in enumerate(rows, start=1)]
    return [[(m["role"], m["content"]) for m in c.messages] for c in conversations(numbered, format, system)]


def chat(*pairs: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_alpaca() -> None:
    row = {"instruction": "Sum up.", "input": "A text.", "output": "Done.", "system": "Be brief.", "id": 7}
    assert turns(row) == [[("system", "Be brief."), ("user", "Sum up.\nA text."), ("assistant", "Done.")]]
    assert turns({"instruction": "q", "input": "", "output": "a"}) == [[("user", "q"), ("assistant", "a")]]
    assert turns({"instruction": "q", "input": None, "output": "a"}) == [[("user", "q"), ("assistant", "a")]]
    assert turns({"instruction": "", "input": "i", "output": "a"}) == [[("user", "i"), ("assistant", "a")]]


def test_alpaca_history_comes_before_the_question() -> None:
    row = {"instruction": "q2", "output": "a2", "history": [["q1", "a1"]]}
    assert turns(row) == [[("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]]


def test_messages() -> None:
    pairs = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2")]
    assert turns(chat(*pairs)) == [pairs]
    assert turns(chat(*pairs), format="messages") == [pairs]


def test_a_default_system_prompt_goes_where_there_is_none() -> None:
    rows = chat(("user", "q"), ("assistant", "a")), chat(("system", "own"), ("user", "q"), ("assistant", "a"))
    assert [row[0] for row in turns(*rows, system="default")] == [("system", "default"), ("system", "own")]


def test_rows_are_numbered_in_source_order() -> None:
    found = list(conversations([("x", GOOD), ("y", GOOD)]))
    assert [(c.sample_id, c.where) for c in found] == [(0, "x"), (1, "y")]


BAD: dict[str, tuple[Any, list[str]]] = {
    "a list": ([1, 2], ["not an object", "a list [1, 2]"]),
    "a string": ("text", ["not an object", "a string 'text'"]),
    "no known key": ({"question": "q", "answer": "a"}, ["unknown data format", "keys question, answer"]),
    "no key": ({}, ["unknown data format", "(none)"]),
    "sharegpt": ({"conversations": []}, ["unknown data format", 'rename "conversations" to "messages"']),
    "no output": ({"instruction": "q"}, ["output is missing", "keys instruction"]),
    "no instruction": ({"output": "a"}, ["instruction is missing"]),
    "null output": ({"instruction": "q", "output": None}, ["output has the wrong type", "null", "a string"]),
    "number output": ({"instruction": "q", "output": 3}, ["output has the wrong type", "a number 3"]),
    "list instruction": ({"instruction": ["q"], "output": "a"}, ["instruction has the wrong type", "a list"]),
    "empty question": ({"instruction": " ", "output": "a"}, ["the question is empty"]),
    "empty answer": ({"instruction": "q", "output": " \n"}, ["answer is empty", "line 1, output"]),
    "history text": ({**GOOD, "history": "q1"}, ["history has the wrong type", "pairs"]),
    "history triple": ({**GOOD, "history": [["a", "b", "c"]]}, ["history[1] has the wrong type"]),
    "history null": ({**GOOD, "history": [["a", None]]}, ["history[1] has the wrong type"]),
    "messages text": ({"messages": "hi"}, ["messages has the wrong type", "a string 'hi'"]),
    "no messages": ({"messages": []}, ["messages has the wrong type"]),
    "message text": ({"messages": ["hi"]}, ["messages[1] has the wrong type"]),
    "no role": ({"messages": [{"content": "q"}]}, ["messages[1].role is missing"]),
    "no content": ({"messages": [{"role": "user"}]}, ["messages[1].content is missing"]),
    "parts": (chat(("user", [{"type": "text"}])), ["messages[1].content has the wrong type"]),
    "answer first": (chat(("assistant", "a")), ["roles are out of order", "messages[1]", "system or user"]),
    "two questions": (chat(("user", "q"), ("user", "q")), ["roles are out of order", "messages[2]"]),
    "late system": (chat(("user", "q"), ("system", "s")), ["roles are out of order", "found system"]),
    "two systems": (chat(("system", "s"), ("system", "s")), ["roles are out of order", "required user"]),
    "a tool": (chat(("user", "q"), ("tool", "t")), ["unknown role", "found tool"]),
    "no answer": (chat(("user", "q")), ["does not end with an answer", "last role user"]),
    "trailing question": (
        chat(("user", "q"), ("assistant", "a"), ("user", "q")),
        ["does not end with an answer"],
    ),
    "blank answer": (chat(("user", "q"), ("assistant", "")), ["answer is empty", "messages[2]"]),
    "tool calls": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [1]},
            ]
        },
        ["tool calls are not supported", "messages[2]"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows(case: str) -> None:
    row, expected = BAD[case]
    with pytest.raises(UserError) as caught:
        turns(row)
    assert "f.jsonl, line 1" in str(caught.value)
    for part in expected:
        assert part in str(caught.value)
    assert caught.value.remedy


def test_the_first_row_decides_and_the_rest_must_agree() -> None:
    with pytest.raises(UserError, match=r"instruction is missing.*line 2"):
        turns(GOOD, chat(("user", "q"), ("assistant", "a")))
    with pytest.raises(UserError, match=r"messages is missing.*line 2"):
        turns(chat(("user", "q"), ("assistant", "a")), GOOD)


def test_a_named_format_is_not_guessed() -> None:
    with pytest.raises(UserError, match=r"messages is missing"):
        turns(GOOD, format="messages")
    with pytest.raises(UserError, match=r"unknown data format.*data\.format.*found sharegpt"):
        turns(GOOD, format="sharegpt")
