"""Templates by name against those of released tokenizers, token by token, and masks against known spans.

KT_RAY_TEST_DATA names the folder with the tokenizers; skipped without it. Known spans are written down as
pieces of text, tokenised one by one: neither the template nor the code that finds answers has a part in them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kt_ray.batch import IGNORE
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.tokenizer_files import load_tokenizer as from_files
from kt_ray.errors import UserError

Piece = tuple[str, bool]  # text, is it trained
END = "<|im_end|>"
ANSWER = f"{END}\n<|im_start|>assistant\n"
THOUGHT = "<think>\n\n</think>\n\n"  # the empty one that minimind's template puts before every answer


def load_tokenizer(directory: str) -> Any:
    """One of its own: an encoder sets its template. The vocabulary, half a second's work, is read once."""
    return copy.copy(_read(directory))


@cache
def _read(directory: str) -> Any:
    return from_files(directory)


def turns(*contents: str, system: str | None = None) -> tuple[Turn, ...]:
    """User and assistant in turn."""
    found = [Turn(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(contents)]
    return (*([] if system is None else [Turn(role="system", content=system)]), *found)


def pieces_of(messages: Sequence[Turn], thought: str = "") -> list[Piece]:
    """ChatML of plain turns: each answer and the token that ends it are trained; `thought` stands before."""
    pieces: list[Piece] = []
    for message in messages:
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        if message["role"] == "assistant":
            pieces += [(thought, False), (message["content"] + END, True), ("\n", False)]
        else:
            pieces.append((message["content"] + END + "\n", False))
    return pieces


def tokens_of(tokenizer: Any, pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """(ids, labels) of pieces tokenised one by one."""
    ids: list[int] = []
    labels: list[int] = []
    for text, trained in pieces:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += part if trained else [IGNORE] * len(part)
    return ids, labels


def encoded(encoder: ChatEncoder, conversation: Conversation) -> tuple[list[int], list[int]]:
    ids, labels = encoder.encode(conversation)
    return ids.tolist(), labels.tolist()


def released(folder: Path, name: str, messages: Sequence[Turn], tools: Any = None) -> list[int]:
    """The ids that the tokenizer's own template gives, by nothing but transformers."""
    tokenizer = load_tokenizer(str(folder / "tokenizers" / name))
    plain = [dict(message) for message in messages]
    given: Any = tokenizer.apply_chat_template(
        plain, tools=None if tools is None else list(tools), tokenize=True, return_dict=True
    )
    return list(given["input_ids"])


TALKS = {
    "one turn": turns("Who are you?", "I keep the light.", system="Be brief."),
    "multi-turn": turns(
        "你好", "喵呜~", "Where?", "On the\n\nrock. 🪨", "再见", "See you!", system="你是猫娘。"
    ),
    "an echo": turns("yes", "yes", "yes", "yes", system="yes"),
    "code": turns("Write it.", "```py\nif x:\n    y = 1\n```", system="Two lines:\n - one\n - two"),
}


@pytest.mark.parametrize("talk", TALKS)
@pytest.mark.parametrize("name", ["chatml", "qwen"])
def test_qwen2(name: str, talk: str, shared_data: Path) -> None:
    messages = TALKS[talk]
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen2"))
    expected = tokens_of(tokenizer, pieces_of(messages))
    assert expected[0] == released(shared_data, "qwen2", messages)
    row = Conversation(messages, 0, "here")
    assert encoded(ChatEncoder(tokenizer, name=name), row) == expected
    own = load_tokenizer(str(shared_data / "tokenizers" / "qwen2"))
    assert encoded(ChatEncoder(own), row) == expected, "the tokenizer's own template, without blocks"


@pytest.mark.parametrize("name", ["chatml", "qwen"])
def test_a_named_template_adds_no_system_prompt(name: str, shared_data: Path) -> None:
    """Qwen2's own does: data.system of those words gives the same tokens."""
    tokenizer = load_tokenizer(str(shared_data / "tokenizers" / "qwen2"))
    bare = turns("Who?", "Me.")
    filled = turns("Who?", "Me.", system="You are a helpful assistant.")
    encoder = ChatEncoder(tokenizer, name=name)
    assert encoded(encoder, Conversation(bare, 0, "here")) == tokens_of(tokenizer, pieces_of(bare))
    assert encoded(encoder, Conversation(filled, 0, "here"))[0] == released(shared_data, "qwen2", bare)


def thinking(messages: Sequence[Turn]) -> tuple[Turn, ...]:
    """The same turns with the empty thought written into the answers."""
    return tuple(
        Turn(**{**message, "content": THOUGHT + message["content"]})
        if message["role"] == "assistant"
        else message
        for message in messages
    )


@pytest.mark.parametrize("talk", [*TALKS, "no system"])
def test_minimind(talk: str, shared_data: Path) -> None:
    """Its template is Qwen 3's with an empty thought before every answer, which it counts to the prompt."""
    messages = TALKS.get(talk, turns("Who?", "Me.", "Why?", "No idea."))
    path = str(shared_data / "tokenizers" / "minimind")
    tokenizer = load_tokenizer(path)
    expected = tokens_of(tokenizer, pieces_of(messages, THOUGHT))
    assert expected[0] == released(shared_data, "minimind", messages)
    assert encoded(ChatEncoder(tokenizer), Conversation(messages, 0, "here")) == expected
    thoughts = Conversation(thinking(messages), 0, "here")
    for name in ("chatml", "qwen"):
        # by name nothing is added: a thought in the data is an answer's part, and trained
        ids, labels = encoded(ChatEncoder(load_tokenizer(path), name=name), thoughts)
        assert ids == expected[0]
        assert (ids, labels) == tokens_of(tokenizer, pieces_of(thoughts.messages))


TOOLS: tuple[dict[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "天气 of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


SUNNY = '{"city": "北京", "days": 2}'
TOOL_TALK = Conversation(
    (
        Turn(role="system", content="Use the tools."),
        Turn(role="user", content="北京?"),
        Turn(role="assistant", content="Let me see.", tool_calls=[call("weather", city="北京", days=2)]),
        Turn(role="tool", content="sunny", name="weather"),
        Turn(role="assistant", content="Sunny."),
        Turn(role="user", content="Both?"),
        Turn(role="assistant", content="", tool_calls=[call("weather", city="北京", days=2), call("now")]),
        Turn(role="tool", content="sunny", name="weather"),
        Turn(role="tool", content="12:00", name="now"),
        Turn(role="assistant", content="Sunny, noon."),
    ),
    0,
    "here",
    TOOLS,
)


def tool_pieces(before: str, thought: str, trained: bool) -> list[Piece]:
    """TOOL_TALK after its system turn; `thought` is trained where the answers hold it."""

    def answer(text: str, then: str) -> list[Piece]:
        return [(thought, trained), (text + END, True), (then, False)]

    weather = f'<tool_call>\n{{"name": "weather", "arguments": {SUNNY}}}\n</tool_call>'
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    sunny, noon = (f"\n<tool_response>\n{text}\n</tool_response>" for text in ("sunny", "12:00"))
    asked = f"\n<|im_start|>user{sunny}"
    return [
        (f"{before}<|im_start|>user\n北京?{ANSWER}", False),
        *answer(f"Let me see.\n{weather}", asked + ANSWER),
        *answer("Sunny.", f"\n<|im_start|>user\nBoth?{ANSWER}"),
        *answer(f"{weather}\n{now}", asked + noon + ANSWER),
        *answer("Sunny, noon.", "\n"),
    ]


def test_tools(shared_data: Path) -> None:
    """The tools as Qwen's templates write them: calls are trained, results are not."""
    path = str(shared_data / "tokenizers" / "minimind")
    tokenizer = load_tokenizer(path)
    reference = released(shared_data, "minimind", TOOL_TALK.messages, TOOLS)
    text = str(tokenizer.decode(reference))
    before = text[: text.index("<|im_start|>user")]
    assert before.startswith("<|im_start|>system\nUse the tools.\n\n# Tools") and "天气" in before
    expected = tokens_of(tokenizer, tool_pieces(before, THOUGHT, False))
    assert expected[0] == reference
    assert encoded(ChatEncoder(tokenizer), TOOL_TALK) == expected

    named = encoded(ChatEncoder(load_tokenizer(path), name="qwen"), TOOL_TALK)
    assert named == tokens_of(tokenizer, tool_pieces(before, "", False))
    thoughts = replace(TOOL_TALK, messages=thinking(TOOL_TALK.messages))
    named = encoded(ChatEncoder(load_tokenizer(path), name="qwen"), thoughts)
    assert named == tokens_of(tokenizer, tool_pieces(before, THOUGHT, True))
    assert named[0] == reference

    last = ChatEncoder(load_tokenizer(path), name="qwen", train_on="last").encode(TOOL_TALK)[1]
    pieces = tool_pieces(before, "", False)
    quiet = [(text, marked and i > 6) for i, (text, marked) in enumerate(pieces)]
    assert last.tolist() == tokens_of(tokenizer, quiet)[1], "both answers after the last question"


def test_tools_in_qwen2s_tokens(shared_data: Path) -> None:
    """Its own template leaves them out, which is refused; by name the row is whole."""
    path = str(shared_data / "tokenizers" / "qwen2")
    with pytest.raises(UserError, match=r"leaves a part of the row out.*data\.template=qwen"):
        ChatEncoder(load_tokenizer(path)).encode(TOOL_TALK)
    tokenizer = load_tokenizer(path)
    encoder = ChatEncoder(tokenizer, name="qwen")
    text = encoder.render(TOOL_TALK.messages, tools=TOOLS)
    before = text[: text.index("<|im_start|>user")]
    assert encoded(encoder, TOOL_TALK) == tokens_of(tokenizer, tool_pieces(before, "", False))


@pytest.mark.parametrize(("tokenizer", "scaffold"), [("qwen2", ""), ("minimind", THOUGHT)])
@pytest.mark.parametrize("name", ["chatml", "qwen"])
def test_prompts_to_generate_from(tokenizer: str, scaffold: str, name: str, shared_data: Path) -> None:
    path = str(shared_data / "tokenizers" / tokenizer)
    asked = turns("Who?", "Me.", "Why?", system="Be brief.")
    own = load_tokenizer(path).apply_chat_template(
        [dict(m) for m in asked], tokenize=False, add_generation_prompt=True
    )
    prompt = ChatEncoder(load_tokenizer(path), name=name).render(asked, prompt=True)
    history = f"Why?{ANSWER}"
    assert prompt.endswith(history) and str(own).endswith(history + scaffold)
    if not scaffold:
        assert prompt == own
