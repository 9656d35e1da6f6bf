"""Thoughts in answers: where a template writes them, what is trained of them, what is told."""

from __future__ import annotations

from typing import cast

import pytest

from kt_ray.data.row_types import Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.turns import turns
from kt_ray.errors import UserError

from .conftest import (
    ASK,
    CHANNELS,
    END,
    PLAIN,
    SAID,
    THINKING,
    calls,
    make_tokenizer,
    spoken,
)

# As Qwen3's, which finds <think> in the text of an answer itself.
SPLITTING = THINKING.replace(
    "{{ m['content'] }}",
    "{{ m['content'] if loop.last else m['content'].split('</think>') | last | trim }}",
).replace("and (loop.last or m.reasoning_content)", "and false")

WRITTEN = Turn(role="assistant", content="<think>\nWho?\n</think>\n\nTilda.")


def test_a_thought_written_into_an_earlier_answer_may_go() -> None:
    encoder = ChatEncoder(make_tokenizer(SPLITTING))
    assert spoken(encoder, ASK, WRITTEN, ASK, SAID) == ["Tilda." + END, SAID["content"] + END]
    assert [note for note in encoder.notes if "leaves out thoughts" in note]


@pytest.mark.parametrize("given", [{"reasoning_content": "Who?"}, {"content": "<think>Who?</think>Tilda."}])
def test_a_thought_may_be_a_part_of_the_content(given: dict[str, str]) -> None:
    """As Mistral's templates read it, and no other."""
    parts = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}{% else %}"
        "{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    )
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"'' }}}}{parts}{{{{ ")))
    thought = cast(Turn, {**SAID, **given})
    assert spoken(encoder, ASK, thought) == [f"[THINK]Who?[/THINK]{SAID['content']}{END}"]
    assert not encoder.notes


@pytest.mark.parametrize("printed", ["tojson", "string"])
def test_a_template_that_prints_what_is_no_text_gets_no_parts(printed: str) -> None:
    content = f"{{{{ m.content if m.content is string else m.content | {printed} }}}}"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"'' }}}}{content}{{{{ ")))
    thought = cast(Turn, {**SAID, "reasoning_content": "Who?"})
    assert spoken(encoder, ASK, thought) == [f"{SAID['content']}{END}"]


def test_the_block_of_a_thought_may_stay_without_it() -> None:
    """As GLM-4.5's template has it; a thought may begin as the block ends."""
    kept = "(m.reasoning_content or '' if loop.last else '')"
    template = PLAIN.replace("m['content']", f"'<think>' + {kept} + '</think>' + m['content']")
    thought: Turn = {**SAID, "reasoning_content": "</th? Who?"}
    spoken_texts = spoken(ChatEncoder(make_tokenizer(template)), ASK, thought, ASK, thought)
    empty, last = (f"<think>{text}</think>{SAID['content']}{END}" for text in ("", "</th? Who?"))
    assert spoken_texts == [empty, last]


def test_an_answer_without_the_thought_that_its_prompt_opens_is_told_so() -> None:
    """As MiniMax-M2's template has it."""
    opening = THINKING.replace("assistant\\n' }}{% endif %}", "assistant\\n<think>\\n' }}{% endif %}")
    opening = opening.replace("(loop.last or m.reasoning_content)", "m.reasoning_content")
    encoder = ChatEncoder(make_tokenizer(opening))
    with pytest.raises(UserError, match=r"opens a thought before an answer that has none.*reasoning_content"):
        spoken(encoder, ASK, SAID)
    empty: Turn = {**SAID, "content": "<think></think>Tilda."}
    with pytest.raises(UserError, match=r"opens a thought before an answer that has none.*reasoning_content"):
        spoken(encoder, ASK, empty)
    with pytest.raises(UserError, match=r"opens a thought before an answer.*before messages\[2\]"):
        spoken(encoder, ASK, calls("look"), Turn(role="tool", content="1"), SAID)
    last = r"cannot be located.*data\.template=qwen, or set data\.train_on=last"
    with pytest.raises(UserError, match=last):  # a thought is no help
        spoken(encoder, ASK, SAID, ASK, SAID)
    thought: Turn = {**SAID, "reasoning_content": "Who?"}
    assert spoken(encoder, ASK, thought) == ["Who?\n</think>\n\n" + SAID["content"] + END]


def test_an_answer_with_a_thought_that_its_prompt_has_closed_is_told_so() -> None:
    """As Hy3's template has it."""
    block = "'<think>' + (m.reasoning_content or '') + '</think>'"
    closing = PLAIN.replace("m['content']", f"({block} if m.role == 'assistant' else '') + m['content']")
    closing = closing.replace("assistant\\n' }}{% endif %}", "assistant\\n<think></think>' }}{% endif %}")
    encoder = ChatEncoder(make_tokenizer(closing))
    assert spoken(encoder, ASK, SAID) == [SAID["content"] + END]
    closed = r"closes the thought before an answer that has one.*delete that"
    for thought in ({**SAID, "reasoning_content": "Who?"}, WRITTEN):
        with pytest.raises(UserError, match=closed):
            spoken(encoder, ASK, thought)


def test_answers_that_are_not_trained_need_not_be_found() -> None:
    template = SPLITTING.replace("| last | trim", "| last | trim | replace('Tilda', 'T')")
    with pytest.raises(UserError, match=r"messages\[2\] is rendered differently.*data\.train_on=last"):
        spoken(ChatEncoder(make_tokenizer(template)), ASK, WRITTEN, ASK, WRITTEN)
    last = ChatEncoder(make_tokenizer(template), train_on="last")
    assert spoken(last, ASK, WRITTEN, ASK, WRITTEN) == [WRITTEN["content"] + END]
    quiet = Turn(role="assistant", content=WRITTEN["content"], weight=0)
    assert spoken(ChatEncoder(make_tokenizer(template)), ASK, quiet, ASK, WRITTEN) == [
        WRITTEN["content"] + END
    ]


@pytest.mark.parametrize(
    "template",
    [THINKING, CHANNELS, THINKING.replace("reasoning_content", "reasoning")],  # the last as Solar-Open's
    ids=["reasoning_content", "thinking", "reasoning"],
)
@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_are_trained_where_the_template_writes_them(key: str, template: str) -> None:
    tokenizer = make_tokenizer(template, extra_special_tokens=["<|im_start|>", "<|return|>", "<|end|>"])
    question, answer = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Tilda."}
    row = [question, {**answer, key: "Who\nkeeps it? "}]

    def said(given: list[dict[str, str]]) -> tuple[list[str], list[str]]:
        encoder = ChatEncoder(tokenizer)
        return spoken(encoder, *turns(given, "here", "messages")), encoder.notes

    (first,), notes = said(row)
    assert "Who\nkeeps it? " in first and not notes
    (first, second), (note,) = said([question, {**answer, key: "Earlier."}, *row])
    assert "Earlier." not in first and "Who\nkeeps it? " in second
    assert "leaves out thoughts" in note
    blank = [{**question, key: "no thought of the model"}, {**answer, key: " "}]
    assert said(blank) == said([question, answer]) and not said(blank)[1]


def test_a_thought_written_into_an_answer_goes_into_its_channel() -> None:
    """As chat, serve and data made by other models have it; templates that know <think> are left alone."""
    tokens = ["<|im_start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer = make_tokenizer(CHANNELS, eos_token="<|return|>", extra_special_tokens=tokens)
    written = Turn(role="assistant", content="<think>\nWho keeps it?\n</think>\n\nTilda.")
    apart = Turn(role="assistant", content="Tilda.", reasoning_content="Who keeps it?")
    encoder = ChatEncoder(tokenizer)
    assert spoken(encoder, ASK, written) == spoken(encoder, ASK, apart)
    assert spoken(encoder, ASK, written, ASK, SAID) == spoken(encoder, ASK, SAID, ASK, SAID)
    assert encoder.render([ASK, written, ASK], prompt=True) == encoder.render([ASK, SAID, ASK], prompt=True)
    assert written["content"] in ChatEncoder(make_tokenizer(PLAIN)).render([ASK, written])


@pytest.mark.parametrize("opens", [True, False])
def test_an_answer_that_begins_amid_a_thought_is_taken_back(opens: bool) -> None:
    """As the server gave it out: the prompt had the mark that begins it."""
    mark = "('[THINK]' + m.thinking + '[/THINK]' if m.thinking else '')"
    template = PLAIN.replace("m['content']", f"{mark} + m['content']")
    if opens:
        template = template.replace("assistant\\n'", "assistant\\n[THINK]'")
    encoder = ChatEncoder(make_tokenizer(template))
    given = Turn(role="assistant", content="Who?\n</think>\nTilda.")
    apart: Turn = {**SAID, "reasoning_content": "Who?"}
    found = encoder.render([ASK, given, ASK], prompt=True)
    assert (found == encoder.render([ASK, apart, ASK], prompt=True)) == opens
    assert opens or given["content"] in found


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        # As MiniMax-M3's.
        (
            "{{ '<my:think>' if m.reasoning_content }}{{ (m.reasoning_content or '') + '</my:think>' }}",
            "kept",
        ),
        ("{{ '<think>' + (m.thinking or '') + '</think>' }}", "kept"),
        # As Kimi-K2-Thinking's, which leaves out the last one, too.
        ("{{ '<think></think>' }}", "left out"),
        # They have no place of their own for it: what the row says stays.
        ("{{ '</think>' }}", "stays"),
        ("{{ '<think>' if m.content.startswith('<think>') }}", "stays"),
    ],
)
def test_a_thought_written_into_an_answer_goes_into_the_templates_marks(marks: str, said: str) -> None:
    template = PLAIN.replace("{{ '<|im_start|>'", "{% set mark %}" + marks + "{% endset %}{{ '<|im_start|>'")
    template = template.replace("m['content']", "(mark if m.role == 'assistant' else '') + m['content']")
    encoder = ChatEncoder(make_tokenizer(template))
    apart: Turn = {**SAID, "reasoning_content": "Who?"}
    (found,) = spoken(encoder, ASK, WRITTEN)
    if said == "stays":
        assert found.endswith(WRITTEN["content"] + END)
    else:
        assert [found] == spoken(encoder, ASK, apart) and ("Who?" in found) == (said == "kept")
    assert bool(encoder.notes) == (said == "left out")
