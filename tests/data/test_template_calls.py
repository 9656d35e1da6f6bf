"""Calls of tools and their results: found in the rendering and trained, or missed by name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError

from .conftest import (
    ASK,
    CALL,
    END,
    PLAIN,
    RESULT,
    SAID,
    THINKING,
    calls,
    make_tokenizer,
    spoken,
    trained_texts,
)

EMPTY = "<think>\n\n</think>\n\n"


def test_a_call_without_text_is_found_though_its_scaffold_goes() -> None:
    called = '<call>{"name": "look", "arguments": {"at": "sea"}}</call>' + END
    encoder = ChatEncoder(make_tokenizer(THINKING))
    assert spoken(encoder, ASK, CALL, RESULT, SAID) == [called, EMPTY + "Tilda." + END]
    found = spoken(encoder, ASK, CALL, RESULT, SAID, ASK, SAID)
    assert found == [called, "Tilda." + END, EMPTY + "Tilda." + END]


def test_a_part_that_is_left_out_is_told_before_the_answers_that_it_loses() -> None:
    """As Phi-3.5's template, which ends the whole with another token."""
    template = PLAIN + "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
    with pytest.raises(UserError, match=r"the call of look \(messages\[2\]\) is not in the rendering"):
        spoken(ChatEncoder(make_tokenizer(template)), ASK, CALL, RESULT, SAID)


LOOK: tuple[dict[str, Any], ...] = tuple({"type": "function", "function": {"name": n}} for n in "ab")

CALLS = {
    # As Kimi-K2's: the tools are declared, and a call has its id.
    "ids": "{% for c in m.tool_calls or [] %}{{ '<call>' + (c.id or '') }}{% endfor %}",
    # As gpt-oss'.
    "first": "{% if m.tool_calls %}{{ '<call>' + m.tool_calls[0].function.name }}{% endif %}",
    # They want tools of known names.
    "known": "{% for c in m.tool_calls or [] %}{% if c.function.name in ('a', 'b') %}{{ '<call>' + "
    "c.function.name }}{% else %}{{ raise_exception('unknown') }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize(
    ("template", "turn", "lost"),
    [
        ("ids", calls("a"), ""),
        ("first", calls("a", "b"), r"the call of b \(messages\[2\]\).*data.template=qwen"),
        ("first", calls("b"), ""),
        ("known", calls("a", "b"), ""),
    ],
)
def test_a_call_is_no_call_without_its_name(template: str, turn: Turn, lost: str) -> None:
    """The name stands among the tools, and may stand in the question."""
    written = PLAIN.replace("m['content'] + ", f"m['content'] }}}}{CALLS[template]}{{{{ ")
    encoder = ChatEncoder(make_tokenizer("{{ tools | tojson if tools else '' }}" + written))
    row = Conversation((Turn(role="user", content="a or b?"), turn), 0, "line 1", LOOK)
    result = Turn(role="tool", content="1")
    if lost:
        with pytest.raises(UserError, match=lost):
            encoder.encode(row)
        with pytest.raises(UserError, match=lost):
            encoder.prompt_ids([*row.messages, result], tools=LOOK)
    else:
        assert encoder.encode(row)[0].size
        assert encoder.prompt_ids([*row.messages, result], tools=LOOK)
    with pytest.raises(UserError, match="the call of"):
        ChatEncoder(make_tokenizer(None), name="chatml").encode(row)


def test_calls_get_the_ids_that_kimi_writes() -> None:
    """In the place of their names: where rows have none, or another API's; results follow their calls."""
    answered = "{% if m.role == 'tool' %}{{ '<of>' + m.tool_call_id }}{% endif %}"
    written = PLAIN.replace("m['content'] + ", f"m['content'] }}}}{CALLS['ids']}{answered}{{{{ ")
    encoder = ChatEncoder(make_tokenizer(written))
    one, two, own = calls("a", "b"), calls("b", id="call_7"), calls("a", id="functions.a:9")
    results = [Turn(role="tool", content=text) for text in "12"]
    result = Turn(role="tool", content="3", tool_call_id="call_7")
    text = encoder.render([ASK, one, *results, two, result, own])
    of_one = ["functions.a:0", "functions.b:1"]
    ids = [*of_one, *of_one, "functions.b:2", "functions.b:2", "functions.a:9"]
    assert re.findall(r"<(?:call|of)>([\w.]+:\d)", text) == ids
    assert encoder.notes == ["calls get ids as the model writes them (functions.NAME:0)"]
    (answer,) = trained_texts(encoder.tokenizer, *encoder.encode(Conversation((ASK, one), 0, "line 1")))
    assert answer.startswith("<call>functions.a:0<call>functions.b:1")
    swapped = [Turn(role="tool", content=name, name=name) for name in "ba"]
    found = re.findall(r"(\w)<of>([\w.]+:\d)", encoder.render([ASK, one, *swapped]))
    assert found == [("b", "functions.b:1"), ("a", "functions.a:0")]
    by_name = ChatEncoder(make_tokenizer(written.replace(CALLS["ids"], CALLS["known"])))
    assert "functions" not in by_name.render([ASK, one]) and not by_name.notes


def test_a_template_that_takes_no_tools_gives_calls_no_ids() -> None:
    encoder = ChatEncoder(make_tokenizer(None), name="chatml")
    with pytest.raises(UserError, match="refuses the conversation"):
        encoder.encode(Conversation((ASK, calls("a"), RESULT, SAID), 0, "line 1"))
    assert not encoder.notes


@pytest.mark.parametrize("strict", [True, False])
def test_calls_have_ids_where_a_template_writes_them_beside_the_names(strict: bool) -> None:
    """As Mistral's, which takes none but those of nine letters and digits, and Solar-Open's."""
    wanted = "{% if (c.id | length) != 9 %}{{ raise_exception('nine') }}{% endif %}" if strict else ""
    of_result = "{% if m.role == 'tool' %}{{ '<of>' + m.tool_call_id }}{% endif %}"
    of_call = "{{ '<call>' + c.id | string + '<name>' + c.function.name }}"
    written = "{% for c in m.tool_calls or [] %}" + wanted + of_call + "{% endfor %}" + of_result
    encoder = ChatEncoder(
        make_tokenizer(PLAIN.replace("m['content'] + ", f"m['content'] }}}}{written}{{{{ "))
    )
    found = re.findall(r"<(?:call|of)>(\w+)", encoder.render([ASK, calls("a", "b"), RESULT, RESULT, SAID]))
    assert found[:2] == found[2:] and len({*found}) == 2 and all(len(id) == 9 for id in found)
    assert encoder.notes == ["calls get ids of nine characters"]
    ids, labels = encoder.encode(Conversation((ASK, calls("a", "b"), RESULT, RESULT, SAID), 0, "line 1"))
    assert found[1] + "<name>b" in trained_texts(encoder.tokenizer, ids, labels)[0]
    for own, kept in ((calls("a", id="call_12345"), not strict), (calls("a", id="abcDEF123"), True)):
        result = Turn(role="tool", content="fog", tool_call_id=own["tool_calls"][0]["id"])
        found = re.findall(r"<(?:call|of)>(\w+)", encoder.render([ASK, own, result]))
        assert found[0] == found[1] and (found[0] == result["tool_call_id"]) == kept


def test_a_call_that_has_its_own_end_is_given_no_other() -> None:
    """As Hy3's template, which ends calls, and other answers as soon as a turn follows."""
    template = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|tool|>' if m.role == 'tool' }}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
        "{% if m.role == 'assistant' and (m.tool_calls or not loop.last) %}{{ eos_token }}{% endif %}"
        "{% endfor %}"
    )
    encoder = ChatEncoder(make_tokenizer(template, extra_special_tokens=["<|im_start|>", "<|tool|>"]))
    said = SAID["content"] + END
    assert spoken(encoder, ASK, calls("look"), RESULT, SAID, ASK, SAID) == ["look" + END, said, said]
    assert encoder.notes == [
        "the chat template ends no answer: the token that opens the next turn is trained as its end"
    ]
    assert spoken(encoder, ASK, SAID, ASK, calls("look")) == [said, "look" + END]


def test_a_call_that_nothing_ends_is_told_so() -> None:
    template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else m.role }}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(template, extra_special_tokens=["<|user|>"]))
    assert spoken(encoder, ASK, SAID) == [SAID["content"] + "<|user|>"]
    assert spoken(encoder, ASK, calls("look")) == ["look"]
    assert "does not learn to stop" in encoder.notes[-1]


@pytest.mark.parametrize("part", ["reasoning_content", "content"])
def test_what_is_dropped_before_a_call_once_an_answer_follows(part: str) -> None:
    """As gpt-oss' template: up to the call it is there, so the answer's prompt is not as in the whole row."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% set said = m.thinking or m.content %}"
        "{% if m.tool_calls and said and messages[-1].tool_calls %}"
        "{{ '<|im_start|>assistant<thought>' + said + '<|im_end|>' }}{% endif %}{{ '<|im_start|>assistant' }}"
        "{% for c in m.tool_calls or [] %}{{ ' to=' + c.function.name }}{% else %}{{ m.content }}{% endfor %}"
        "{% else %}{{ '<|im_start|>' + m.role + m.content }}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(template))
    call = calls("look")
    call[part] = "Hm."  # type: ignore[literal-required]
    row = (ASK, call, Turn(role="tool", content="1"), SAID)
    found = trained_texts(encoder.tokenizer, *encoder.encode(Conversation(row, 0, "line 1")))
    assert found == [" to=look<|im_end|>", SAID["content"] + "<|im_end|>"]
    what = "texts before calls" if part == "content" else r"thoughts \(reasoning_content\) of answers"
    assert len(encoder.notes) == 1 and re.search(f"leaves out {what}", encoder.notes[0])
    (alone,) = trained_texts(encoder.tokenizer, *encoder.encode(Conversation(row[:2], 0, "line 1")))
    assert alone.startswith("<thought>Hm.")


def test_a_text_that_the_template_leaves_out_before_a_call_is_told() -> None:
    """As Llama's, MiniMax-M1's and Solar-Open's."""
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% else %}{{ m.content }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"'' }}}}{call}{{{{ ")))
    assert spoken(encoder, ASK, calls("look")) == ["look" + END] and not encoder.notes
    texted: Turn = {**calls("look"), "content": "Let me look."}
    assert spoken(encoder, ASK, texted, RESULT, SAID) == ["look" + END, SAID["content"] + END]
    assert encoder.notes == [
        "the chat template leaves out texts before calls, which are trained without them"
    ]


def test_results_may_be_written_by_the_ids_of_their_calls() -> None:
    """Which may hold the names of their tools."""
    answered = (
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for r in messages if r.role == 'tool' and "
        "r.tool_call_id == c.id %}{{ r.content }}{% endfor %}{% endfor %}"
    )
    written = PLAIN.replace("m['content'] + ", f"m['content'] }}}}{answered}{{{{ ")
    encoder = ChatEncoder(
        make_tokenizer(written.replace("in messages", "in messages if m.role != 'tool'", 1))
    )
    result = Turn(role="tool", content="1", tool_call_id="look-1")
    assert encoder.prompt_ids([ASK, calls("look", id="look-1"), result])


def test_a_result_that_the_answer_repeats_is_no_result() -> None:
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    written = PLAIN.replace("m['content'] + ", f"m['content'] }}}}{call}{{{{ ")
    row = Conversation((ASK, calls("a"), Turn(role="tool", content="Tilda"), SAID), 0, "line 1")
    assert ChatEncoder(make_tokenizer(written)).encode(row)[0].size
    dropping = written.replace("in messages", "in messages if m.role != 'tool'")
    with pytest.raises(UserError, match=r"the tool turn \(messages\[3\]\) is not in the rendering"):
        ChatEncoder(make_tokenizer(dropping)).encode(row)


@pytest.mark.parametrize("written", ["c.function.arguments", "c.function.arguments | tojson"])
def test_arguments_are_json_where_the_template_writes_them_as_they_are(written: str) -> None:
    """Not as Python writes an object, which a row may hold in another place."""
    call = f"{{% for c in m.tool_calls or [] %}}{{{{ c.function.name }}}}{{{{ {written} }}}}{{% endfor %}}"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"m['content'] }}}}{call}{{{{ ")))
    result = Turn(role="tool", content="{'at': 'sea'}")
    assert spoken(encoder, ASK, CALL, result, SAID)[0] == 'look{"at": "sea"}' + END
    assert 'look{"at": "sea"}' in encoder.render([ASK, CALL, result], prompt=True)


def test_a_call_in_the_prompt_of_a_pair_is_not_trained() -> None:
    """Nor where the template takes arguments as text only, as DeepSeek's do."""
    call = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    tokenizer = make_tokenizer(PLAIN.replace("m['content'] + ", f"m['content'] }}}}{call}{{{{ "))
    prompt = (ASK, calls("look"), Turn(role="tool", content="1"))
    good, bad = (Turn(role="assistant", content=text) for text in ("Yes.", "No."))
    row = Conversation((*prompt, good), 0, "line 1", rejected=(*prompt, bad))
    ids, labels = ChatEncoder(tokenizer).encode(row)
    assert trained_texts(tokenizer, ids, labels) == ["Yes." + END]
