"""Rows: alpaca and messages to conversations, and how each bad row is named."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import pytest

from kt_ray.data.formats import Parser
from kt_ray.errors import UserError
from tests.helpers.conversations import conversations

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
    assert turns({**GOOD, "system": " "}, system="default")[0][0] == ("system", "default")
    empty = chat(("system", " "), ("user", "q"), ("assistant", "a"))
    assert turns(empty) == [[("user", "q"), ("assistant", "a")]]
    assert turns({**empty, "system": "own"}, system="default")[0][0] == ("system", "own")


@pytest.mark.parametrize("nothing", [None, math.nan, False, [], {}, 0])
def test_what_stands_for_nothing_is_no_system_prompt_and_no_thought(nothing: Any) -> None:
    row = chat(("user", "q"), ("assistant", "a"))
    row["messages"][1]["reasoning"] = nothing
    assert turns({**row, "system": nothing}) == [[("user", "q"), ("assistant", "a")]]


@pytest.mark.parametrize("answer", ['[{"value": 3, "unit": "m"}]', '[{"from": "Lyon", "to": "Bonn"}]'])
def test_json_of_other_things_is_an_answer(answer: str) -> None:
    assert turns({"prompt": "q", "completion": answer}) == [[("user", "q"), ("assistant", answer)]]


def test_turns_as_text_in_a_column_that_is_not_read_are_no_fault() -> None:
    row = chat(("user", "q"), ("assistant", "a"))
    assert turns({**row, "prompt": str(row["messages"][:1])}) == [[("user", "q"), ("assistant", "a")]]


def test_rows_are_numbered_in_source_order() -> None:
    found = list(conversations([("x", GOOD), ("y", GOOD)]))
    assert [(c.sample_id, c.where) for c in found] == [(0, "x"), (1, "y")]


BAD: dict[str, tuple[Any, list[str]]] = {
    "a list": ([1, 2], ["not an object", "a list [1, 2]"]),
    "a string": ("text", ["not an object", "a string 'text'"]),
    "no known key": ({"question": "q", "answer": "a"}, ["unknown data format", "keys question, answer"]),
    "no key": ({}, ["unknown data format", "(none)"]),
    "sharegpt": ({"conversations": []}, ["conversations has the wrong type", "a list []"]),
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
    "parts": (chat(("user", [{"type": "image_url"}])), ["a part that is not text", "found image_url"]),
    "no parts": (chat(("user", [])), ["messages[1].content has the wrong type", "a list []"]),
    "answer first": (chat(("assistant", "a")), ["roles are out of order", "messages[1]", "system or user"]),
    "two questions": (chat(("user", "q"), ("user", "q")), ["roles are out of order", "messages[2]"]),
    "late system": (chat(("user", "q"), ("system", "s")), ["roles are out of order", "found system"]),
    "two systems": (chat(("system", "s"), ("system", "s")), ["roles are out of order", "required user"]),
    "a tool": (chat(("user", "q"), ("tool", "t")), ["roles are out of order", "found tool"]),
    "a stranger": (chat(("user", "q"), ("narrator", "t")), ["unknown role", "found narrator"]),
    "an empty system prompt": (chat(("system", "")), ["does not end with an answer", "last role system"]),
    "no answer": (chat(("user", "q")), ["does not end with an answer", "last role user"]),
    "trailing question": (
        chat(("user", "q"), ("assistant", "a"), ("user", "q")),
        ["does not end with an answer"],
    ),
    "blank answer": (chat(("user", "q"), ("assistant", "")), ["answer is empty", "messages[2]"]),
    "an answer behind an answer": (
        {"prompt": chat(("user", "q"), ("assistant", "a"))["messages"], "completion": "b"},
        ["roles are out of order", "completion; found an answer; required user"],
    ),
    "an answer to no question": (
        {"prompt": chat(("system", "s"))["messages"], "completion": "b"},
        ["roles are out of order", "completion; found an answer; required user"],
    ),
    "a list of thoughts": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "a", "thinking": ["t"]},
            ]
        },
        ["messages[2].thinking has the wrong type", "a list ['t']"],
    ),
    "a list of system prompts": (
        {**chat(("user", "q"), ("assistant", "a")), "system": ["s"]},
        ["system has the wrong type", "a list ['s']"],
    ),
    "turns in a cell": (
        {"prompt": "q", "chosen": '[{"role": "assistant", "content": "a"}]', "rejected": "b"},
        ["chosen is a text that holds turns", "make it the content of a message"],
    ),
    "turns as Python prints them": (
        {"prompt": "[{'from': 'human', 'value': 'q'}]", "completion": "a"},
        ["prompt is a text that holds turns"],
    ),
    "a key twice in a cell": (
        {"messages": '[{"role": "user", "content": "q", "content": "r"}]'},
        ["messages is not valid JSON", "key 'content' appears twice"],
    ),
    "tools in a turn": (
        {
            "messages": [
                {"role": "system", "content": "", "tools": [{"name": "f"}]},
                *chat(("user", "q"))["messages"],
            ]
        },
        ["messages[1].tools would be left out", '{"tools": […], "messages": […]}'],
    ),
    "tool calls": (
        {
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "", "tool_calls": [1]},
            ]
        },
        ["messages[2].tool_calls has the wrong type", "a number 1"],
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
    with pytest.raises(
        UserError,
        match=r"another format.*line 2; found messages.*required alpaca, as f\.jsonl, line 1 has it",
    ):
        turns(GOOD, chat(("user", "q"), ("assistant", "a")))
    with pytest.raises(
        UserError, match=r"line 2; found alpaca \(keys instruction, output\); required messages"
    ):
        turns(chat(("user", "q"), ("assistant", "a")), GOOD)
    with pytest.raises(UserError, match=r"output is missing.*line 2"):
        turns(GOOD, {"input": "fits no format"})


def test_unwanted_answers_are_not_taken_for_answers_because_the_first_row_has_no_verdict() -> None:
    rows = [{**PROMPT, "label": label} for label in (None, False, True)]
    message = r"line 2; found kto.*required prompt_completion.*set data\.format=prompt_completion or data\."
    with pytest.raises(UserError, match=message):
        turns(*rows)
    assert turns(*rows, format="prompt_completion") == [QA] * 3
    assert turns(*rows[:1], {**PROMPT, "label": 3}) == [QA] * 2, (
        "a label that is no verdict is another column"
    )


def test_a_named_format_is_not_guessed() -> None:
    with pytest.raises(UserError, match=r"messages is missing"):
        turns(GOOD, format="messages")


PROMPT = {"prompt": "q", "completion": "a"}
SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
QA = [("user", "q"), ("assistant", "a")]


def parse(row: Any, format: str = "auto", **options: Any) -> Any:
    parser = Parser(format, **options)
    return parser(row, "f.jsonl, line 1", 0), parser.format


@pytest.mark.parametrize(
    ("row", "format"),
    [
        (SHAREGPT, "sharegpt"),
        ({"conversations": chat(*QA)["messages"]}, "sharegpt"),
        (PROMPT, "prompt_completion"),
        ({"prompt": [{"role": "user", "content": "q"}], "completion": "a"}, "prompt_completion"),
        ({**chat(*QA), "prompt": "kept by some sets", "label": 3}, "messages"),
        ({"question": "ignored", "instruction": "q", "output": "a", "text": None}, "alpaca"),
    ],
)
def test_formats_of_answers_are_told_by_their_keys(row: Any, format: str) -> None:
    found, name = parse(row)
    assert name == format
    assert [(m["role"], m["content"]) for m in found.messages] == QA
    assert found.kind == "sft"


def test_sharegpt_system_prompts() -> None:
    found, _ = parse({**SHAREGPT, "system": "own"}, system="default")
    assert found.messages[0] == {"role": "system", "content": "own"}
    found, _ = parse(SHAREGPT, system="default")
    assert found.messages[0] == {"role": "system", "content": "default"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
        {"prompt": "q", "completion": chat(*QA)["messages"]},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "a", "label": True},
        {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"},
        {"chosen": chat(*QA)["messages"], "rejected": chat(("user", "q"), ("assistant", "b"))["messages"]},
        {"prompt": "q", "chosen": chat(*QA)["messages"], "rejected": "b"},
    ],
)
def test_a_rows_system_prompt_goes_before_lists_of_turns(row: Any) -> None:
    found, _ = parse({**row, "system": "own"}, system="default")
    assert [(m["role"], m["content"]) for m in found.messages] == [("system", "own"), *QA]
    assert found.rejected is None or found.rejected[:2] == found.messages[:2]


def test_a_system_prompt_beside_another_one_is_told() -> None:
    parser = Parser("auto", "default")
    told = ["system, where turns begin with another one"]
    for own, unread in (("own", []), ("own\n", []), ("other", told)):
        row = {"system": own, **chat(("system", "own"), *QA)}
        assert parser(row, "", 0).messages[0]["content"] == "own" and [*parser.unread] == unread


def test_raw_text() -> None:
    found, name = parse({"text": " Once.\n"})
    assert (name, found.text, found.messages, found.kind) == ("text", " Once.\n", (), "sft")
    assert found.prompt_key == "Once."
    with pytest.raises(UserError, match="the text is empty"):
        parse({"text": " "}, "text")


@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"instruction": "q", "chosen": "good", "rejected": "bad"},
        {"messages": [{"role": "user", "content": "q"}], "chosen": "good", "rejected": "bad"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {
            "prompt": "q",  # beside whole conversations, as ultrafeedback has it
            "chosen": chat(("user", "q"), ("assistant", "good"))["messages"],
            "rejected": chat(("user", "q"), ("assistant", "bad"))["messages"],
        },
    ],
)
def test_preference_pairs(row: Any) -> None:
    found, name = parse(row)
    assert (name, found.kind) == ("preference", "pairs")
    assert [m["content"] for m in found.messages] == ["q", "good"]
    assert [m["content"] for m in found.rejected] == ["q", "bad"]


def test_pairs_that_are_none() -> None:
    with pytest.raises(UserError, match=r"chosen and rejected are the same.*line 1"):
        parse({**PAIR, "rejected": "good"})
    with pytest.raises(UserError, match="answer different questions"):
        parse(
            {
                "chosen": chat(("user", "p"), ("assistant", "a"))["messages"],
                "rejected": chat(("user", "q"), ("assistant", "b"))["messages"],
            }
        )
    with pytest.raises(UserError, match="prompt is missing"):
        parse({"chosen": "a", "rejected": "b"})


@pytest.mark.parametrize(
    ("row", "label"),
    [
        ({**PROMPT, "label": True}, True),
        ({**chat(*QA), "label": False}, False),
        ({"instruction": "q", "output": "a", "kto_tag": True}, True),
        ({**SHAREGPT, "label": "False"}, False),  # csv has no booleans
    ],
)
def test_verdicts(row: Any, label: bool) -> None:
    found, name = parse(row)
    assert (name, found.kind, found.label) == ("kto", "kto", label)
    assert [(m["role"], m["content"]) for m in found.messages] == QA
    with pytest.raises(UserError, match=r"label has the wrong type.*a number 2"):
        parse({**PROMPT, "label": 2}, "kto")


@pytest.mark.parametrize("label", [0, 1.0, "0", "1"])
def test_a_number_that_may_be_a_verdict_is_not_guessed(label: Any) -> None:
    """An unwanted answer with label 0 would be trained as a wanted one."""
    with pytest.raises(UserError, match=r"fits several data formats.*kto, prompt_completion"):
        parse({**PROMPT, "label": label})
    assert parse({**PROMPT, "label": label}, "kto")[0].label is (label in (1, "1"))
    assert parse({**PROMPT, "label": label}, "prompt_completion")[0].kind == "sft"
    assert parse({"text": "t", "label": label})[1] == "text"
    assert parse({**PROMPT, "kto_tag": label})[1] == "kto"


@pytest.mark.parametrize(
    ("row", "formats"),
    [
        ({**GOOD, "text": "### q a"}, ["alpaca", "text"]),
        ({**chat(*QA), **SHAREGPT}, ["messages", "sharegpt"]),
        ({**PROMPT, **GOOD}, ["alpaca", "prompt_completion"]),
        ({**PAIR, "completion": "a"}, ["preference", "prompt_completion"]),
        (
            {
                "chosen": chat(*QA)["messages"],
                "rejected": chat(QA[0], ("assistant", "b"))["messages"],
                **chat(*QA),
            },
            ["preference", "messages"],
        ),
        ({**PAIR, "label": True}, ["preference", "kto"]),
    ],
)
def test_ambiguous_rows_are_refused_by_number_until_a_format_is_named(row: Any, formats: list[str]) -> None:
    with pytest.raises(UserError, match=r"fits several data formats.*line 1") as caught:
        parse(row)
    for name in formats:
        assert name in str(caught.value)
    assert parse(row, formats[0])[1] == formats[0]
    with pytest.raises(UserError, match="line 2"):
        turns({key: value for key, value in row.items() if key in GOOD} or GOOD, row)


def test_blanks_around_the_names_of_columns_are_seen() -> None:
    with pytest.raises(UserError, match="found keys instruction, ' output';"):
        parse({"instruction": "q", " output": "a"}, "alpaca")


def test_columns_of_other_names() -> None:
    row = {"question": "q", "answer": "a", "text": "q a"}
    columns = {"instruction": "question", "output": "answer"}
    found, _ = parse(row, "alpaca", columns=columns)
    assert [m["content"] for m in found.messages] == ["q", "a"]
    row = {"dialog": [{"who": "human", "says": "q"}, {"who": "bot", "says": "a"}]}
    found, name = parse(row, columns={"messages": "dialog", "role": "who", "content": "says"})
    assert name == "messages"
    assert [(m["role"], m["content"]) for m in found.messages] == QA
    row = {"prompt": [{"who": "human", "says": "q"}], "completion": [{"who": "bot", "says": "a"}]}
    found, name = parse(row, columns={"role": "who", "content": "says"})
    assert name == "prompt_completion"
    assert [(m["role"], m["content"]) for m in found.messages] == QA
    with pytest.raises(UserError, match=r"data\.columns is not in the row.*keys question.*required frage"):
        parse({"question": "q"}, columns={"instruction": "frage"})
    with pytest.raises(UserError, match=r"unknown column name.*data\.columns\.instructions"):
        parse(row, columns={"instructions": "q"})


def test_the_answer_that_a_reward_reads_may_be_called_otherwise() -> None:
    row = {"question": "q", "solution": "3", "answer": "in words"}
    found, _ = parse(row, "prompts", columns={"prompt": "question", "answer": "solution"})
    assert found.columns == {**row, "answer": "3"} and found.messages[0]["content"] == "q"
    assert parse(row, "prompts", columns={"prompt": "question"})[0].columns == row


def test_lists_kept_as_json_text() -> None:
    found, _ = parse(
        {"messages": '[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]'}
    )
    assert [(m["role"], m["content"]) for m in found.messages] == QA


CALL = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "sum", "parameters": {}}}]


@pytest.mark.parametrize("prompt", ["Q1", [{"role": "system", "content": "Be kind."}]])
def test_a_prompt_beside_a_whole_conversation_is_not_left_out(prompt: Any) -> None:
    asked, good, bad = chat(("user", "Q2"), ("assistant", "A"), ("assistant", "B"))["messages"]
    row = {"prompt": prompt, "completion": [asked, good]}
    with pytest.raises(UserError, match=r"completion is .* prompt of the row says.*completion,prompt:null"):
        parse(row)
    assert (
        Parser("auto", None, {"conversations": "completion", "prompt": None})(row, "", 0).messages[1] == good
    )
    pair = {"prompt": prompt, "chosen": [asked, good], "rejected": [asked, bad]}
    with pytest.raises(UserError, match=r"chosen is a conversation.*data\.columns=\{prompt:null\}"):
        parse(pair)
    for same in ("Q2 ", "user: Q1 assistant: A1 user: Q2", [asked], ""):
        parse(pair | {"prompt": same})
    first = {"role": "system", "content": "S"}
    found, _ = parse(pair | {"prompt": [first, asked], "system": "S"})
    assert found.messages[0] == first


def test_a_prompt_beside_a_conversation_may_have_other_white_space() -> None:
    turns = chat(("user", "One  line,\nanother"), ("assistant", "A"), ("assistant", "B"))
    asked, good, bad = turns["messages"]
    for same in ("One line, another", "One  line,\r\nanother\n", "Human: One line,\n\nanother Assistant:"):
        found, _ = parse({"prompt": same, "chosen": [asked, good], "rejected": [asked, bad]})
        assert found.messages[0] == asked


def test_an_older_call_is_not_left_out() -> None:
    call = {"role": "assistant", "content": "I add.", "function_call": {"name": "sum", "arguments": "{}"}}
    with pytest.raises(UserError, match=r"messages\[2\]\.function_call is OpenAI's older form.*line 1"):
        parse({"messages": [{"role": "user", "content": "1 + 2?"}, call]})
    parse({"messages": [{"role": "user", "content": "q"}, {**call, "function_call": None}]})
    parse({"messages": [{"role": "user", "content": "q"}, {**call, "function_call": {"name": None}}]})


def test_a_picture_of_a_turn_is_not_left_out() -> None:
    asked = {"role": "user", "content": "What is this?", "images": ["a.png"]}
    with pytest.raises(UserError, match=r"messages\[1\] has images: only text is trained.*line 1"):
        parse({"messages": [asked, {"role": "assistant", "content": "A cat."}]})
    parse({"messages": [asked | {"images": []}, {"role": "assistant", "content": "A cat.", "audio": None}]})


def test_a_date_in_a_table_is_no_text_of_a_call() -> None:
    """pyarrow's reader of JSON makes one of "2024-05-01", and so does `datasets`."""
    day = datetime.datetime(2024, 5, 1)
    call = {"function": {"name": "sum", "arguments": {"day": day}}}
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(
        UserError, match=r"messages\[2\]\.tool_calls\.arguments holds a value.*line 1.*datetime"
    ):
        parse({"messages": turns})
    offered = [{"name": "sum", "parameters": {"default": day}}]
    with pytest.raises(UserError, match=r"tools\[1\] holds a value that JSON has no form for.*line 1"):
        parse({"instruction": "q", "output": "a", "tools": offered})


@pytest.mark.parametrize(
    ("marks", "weight"),
    [
        ({"loss": False}, 0),
        ({"train": False, "weight": None}, 0),
        ({"training": True}, 1),
        ({"loss": 0.0}, 0),
        ({"train": 1, "loss": None, "training": ""}, 1),
        ({"loss_scale": 0.0}, 0),
        ({"loss_scale": 1, "weight": math.nan}, 1),
        ({"loss_scale": 1.0, "loss": False}, 0),
        ({"train_detail": [], "training_detail": None}, None),
    ],
)
def test_an_answer_that_other_programs_do_not_train(marks: dict[str, Any], weight: int | None) -> None:
    answer = {"from": "gpt", "value": "a", **marks}
    found, _ = parse({"conversations": [{"from": "human", "value": "q", "loss": True}, answer]})
    assert found.messages[1].get("weight") == weight and "weight" not in found.messages[0]


def test_marks_that_train_a_part_of_an_answer_are_refused() -> None:
    for marks, message in (
        ({"loss_scale": 0.5}, r"messages\[2\]\.loss_scale says neither.*a number 0\.5; required 0 or false"),
        ({"loss": 0.37}, r"messages\[2\]\.loss says neither.*a number 0\.37.*or delete it"),
        ({"train": "no"}, r"messages\[2\]\.train says neither.*a string 'no'"),
        (
            {"train_detail": [{"begin_offset": 0, "train": False}]},
            r"train_detail says which characters.*line 1",
        ),
    ):
        question, answer = chat(("user", "q"))["messages"][0], {"role": "assistant", "content": "a", **marks}
        with pytest.raises(UserError, match=message):
            parse({"messages": [question, answer]})


@pytest.mark.parametrize("row", [SHAREGPT, PROMPT, PAIR, {**GOOD, "label": True}])
def test_rows_with_images_are_refused_unless_the_column_is_hidden(row: Any) -> None:
    """Else "<image> Who is this?" would be trained as it stands there."""
    message = r"the row has images: only text.*line 1.*data\.columns=\{images:null\}"
    with pytest.raises(UserError, match=message):
        parse({**row, "images": ["a.jpg"]})
    parse({**row, "images": ["a.jpg"]}, columns={"images": None})
    parse({**row, "images": [], "video": None, "chat_template_kwargs": {}})
    with pytest.raises(UserError, match=r"has chat_template_kwargs: a chat template writes all rows alike"):
        parse({**row, "chat_template_kwargs": {"enable_thinking": False}})
    parse({"text": "A light.", "image": "a.jpg"}, "text")


def test_pairs_of_ms_swift_are_read_as_pairs_or_refused() -> None:
    """Else the better answer would be trained as if there were no other."""
    row = {**chat(*QA), "rejected_response": "b"}
    other = {**chat(*QA), "rejected_messages": chat(("user", "q"), ("assistant", "b"))["messages"]}
    for given, name in ((row, "rejected_response"), (other, "rejected_messages")):
        columns: dict[str, str | None] = {"chosen": "messages", "rejected": name}
        with pytest.raises(UserError, match=rf"the row has {name}: .*\{{chosen:messages,rejected:{name}\}}"):
            parse(given)
        assert parse(given, columns={name: None})[0].kind == "sft"
        found, _ = parse({**given, "system": "own"}, columns=columns)
        assert [(m["role"], m["content"]) for m in found.messages] == [("system", "own"), *QA]
        assert found.rejected == (*found.messages[:2], {"role": "assistant", "content": "b"})
        table = {key: value if isinstance(value, str) else json.dumps(value) for key, value in given.items()}
        assert parse(table, columns=columns)[0].rejected == found.rejected[1:]
    assert parse(row, "prompts")[0].kind == "prompts"
    columns = {"chosen": "messages", "rejected": "rejected_response"}
    assert parse({**row, "rejected_response": "[b"}, columns=columns)[0].rejected[1]["content"] == "[b"
    alpaca = {"instruction": "q", "output": "a", "rejected_response": "b"}
    with pytest.raises(UserError, match=r"\{chosen:output,rejected:rejected_response\}"):
        parse(alpaca)
    found, _ = parse(alpaca, columns={"chosen": "output", "rejected": "rejected_response"})
    assert found.rejected == (*found.messages[:1], {"role": "assistant", "content": "b"})
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "rejected_response": "c"}
    assert parse(pair)[0].kind == "pairs"  # which has its other answer


def test_tool_turns() -> None:
    row = {
        "messages": [
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "content": [{"type": "text", "text": "Three."}], "weight": 1},
        ],
        "tools": TOOLS,
    }
    found, _ = parse(row)
    assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1]["tool_calls"][0]["function"] == {"name": "sum", "arguments": {"a": 1}}
    assert found.messages[3]["content"] == "Three."
    assert found.tools == tuple(TOOLS)
    for call, answer in (("function_call", "observation"), ("tool_call", "tool_response")):
        sharegpt = {
            "conversations": [
                {"from": "human", "value": "1 + 2?"},
                {"from": call, "value": '{"name": "sum", "arguments": {"a": 1}}'},
                {"from": answer, "value": "3"},
                {"from": "gpt", "value": "Three."},
            ],
            "tools": '[{"name": "sum", "parameters": {}}]',
        }
        same, _ = parse(sharegpt)
        assert same.tools == found.tools
        assert same.messages[1]["tool_calls"][0]["function"] == found.messages[1]["tool_calls"][0]["function"]
    row["messages"][1]["tool_calls"] = [{"function": {"name": "sum", "arguments": ""}}]  # type: ignore[index]
    assert parse(row)[0].messages[1]["tool_calls"][0]["function"] == {"name": "sum", "arguments": {}}
    row["messages"][1]["tool_calls"] = [{"function": {"name": "sum", "arguments": "{"}}]  # type: ignore[index]
    with pytest.raises(UserError, match=r"messages\[2\]\.tool_calls is not valid JSON.*line 1"):
        parse(row)


def test_calls_in_a_row_are_one_answer() -> None:
    """As in ms-swift's files."""
    call = '{"name": "sum", "arguments": {"a": 1}}'
    asked, ended = [("user", "q")], [("tool_response", "3"), ("tool_response", "3"), ("assistant", "a")]
    calls = [("tool_call", call)] * 2
    for said, turns in (("", calls), ("I add.", [("assistant", "I add."), *calls])):
        found, _ = parse(chat(*asked, *turns, *ended))
        assert [m["role"] for m in found.messages] == ["user", "assistant", "tool", "tool", "assistant"]
        answer = found.messages[1]
        assert answer["content"] == said
        assert [one["function"]["arguments"] for one in answer["tool_calls"]] == [{"a": 1}] * 2
    row = chat(*asked, *calls, *ended)
    row["messages"][1]["loss"] = False
    with pytest.raises(UserError, match=r"messages\[3\] is a part of the answer before it.* weight"):
        parse(row)
