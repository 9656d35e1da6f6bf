"""What ends an answer, whose template it is, and a row's answer and options as the model sees them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.runs.generation import _end_tokens, _with_template
from kt_ray.runs.questions import _label, _options
from tests.data.conftest import PLAIN, THINKING, make_tokenizer
from tests.helpers.composing import compose

HEAD = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
TURNS = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\\n' }}{% endfor %}"
OPENS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
WANTS = "{% if messages[0]['role'] != 'system' %}{{ raise_exception('none') }}{% endif %}"
TEMPLATES = {
    "usual": TURNS + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "opens a thought": TURNS + OPENS,
    "wants a system prompt": WANTS + TURNS + OPENS,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_of_an_answer_is_found(tmp_path: Path, name: str) -> None:
    """MiniMax-M2's and DeepSeek-R1's prompts open a thought that an answer without one does not have."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    tokenizer.eos_token = None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert _end_tokens(str(tmp_path), ChatEncoder(tokenizer)) == (end,)


def test_a_token_that_ends_thoughts_ends_no_answer_where_another_does(tmp_path: Path) -> None:
    """As Solar-Open's, which ends each message: generation would end with the thought."""
    thought = "{% if m.reasoning_content %}{{ m.reasoning_content + '<|end|>' }}{% endif %}"
    template = (
        "{% for m in messages %}{{ '<|begin|>' }}" + thought + "{{ m.content + '<|end|>' }}{% endfor %}"
    )
    tokenizer = make_tokenizer(template, eos_token="<|flush|>", extra_special_tokens=["<|begin|>", "<|end|>"])
    assert _end_tokens(str(tmp_path), ChatEncoder(tokenizer)) == (tokenizer.eos_token_id,)
    tokenizer.eos_token = None
    ends = _end_tokens(str(tmp_path), ChatEncoder(tokenizer))
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|end|>"]


def test_what_opens_the_next_turn_ends_answers_that_the_template_does_not_end(tmp_path: Path) -> None:
    """As GLM's: `<|observation|>` after a call, which is what training taught."""
    template = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    tokens = ["<|user|>", "<|assistant|>", "<|tool|>"]
    tokenizer = make_tokenizer(template, extra_special_tokens=tokens)
    tokenizer.eos_token = None
    ends = _end_tokens(str(tmp_path), ChatEncoder(tokenizer))
    assert tokenizer.convert_ids_to_tokens(ends) == ["<|user|>", "<|tool|>"]


def test_options_are_not_seen_with_the_thoughts_behind_the_right_one() -> None:
    seen: list[tuple[Turn, ...]] = []

    def encode(row: Conversation) -> tuple[Any, None]:
        seen.append(row.messages)
        return SimpleNamespace(tolist=lambda: [1, ord(row.messages[-1]["content"])]), None

    config = SimpleNamespace(eval=SimpleNamespace(letters="AB"))
    generation = SimpleNamespace(config=config, encoder=SimpleNamespace(encode=encode))
    answer = Turn(role="assistant", content="B", reasoning_content="It is B.")
    row = Conversation((Turn(role="user", content="A or B?"), answer), 0, "row 1")
    assert _options(cast(Any, generation), row).tokens == {"A": ord("A"), "B": ord("B")}
    assert [messages[-1] for messages in seen] == [{"role": "assistant", "content": c} for c in "AB"]


def test_the_label_of_a_call_is_the_call_as_the_model_writes_it() -> None:
    tokenizer = make_tokenizer(THINKING)
    encoder = ChatEncoder(tokenizer)
    generation = cast(
        Any, SimpleNamespace(encoder=encoder, tokenizer=tokenizer, eos=(tokenizer.eos_token_id,))
    )
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    asked = Turn(role="user", content="1 + 2?")
    for thought in ({}, {"reasoning_content": "I have a tool."}):
        answer = cast(Turn, {"role": "assistant", "content": "", "tool_calls": [call], **thought})
        row = Conversation((asked, answer), 0, "row 1")
        assert _label(generation, row) == '<call>{"name": "add", "arguments": {"a": 1}}</call>'
    said = Conversation((asked, Turn(role="assistant", content=" 3 ")), 0, "row 2")
    assert _label(generation, said) == " 3 "


def test_a_prompt_that_opens_a_thought_stops_neither_labels_nor_options() -> None:
    """As MiniMax-M2's does, whose template writes a thought only where the row has one."""
    thought = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    calls = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}</call>{% endfor %}"
    answers = f"{{{{ '<|im_start|>assistant\n' }}}}{thought}{{{{ m.content }}}}{calls}<|im_end|>\n"
    others = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    turns = f"{{% if m.role == 'assistant' %}}{answers}{{% else %}}{others}{{% endif %}}"
    tokenizer = make_tokenizer(f"{{% for m in messages %}}{turns}{{% endfor %}}{OPENS}")
    config = SimpleNamespace(eval=SimpleNamespace(letters="AB"))
    encoder, eos = ChatEncoder(tokenizer), (tokenizer.eos_token_id,)
    generation: Any = SimpleNamespace(encoder=encoder, tokenizer=tokenizer, eos=eos, config=config)
    asked = Turn(role="user", content="A or B?")
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called = Turn(role="assistant", content="", tool_calls=[call], reasoning_content="It is B.")
    assert _label(generation, Conversation((asked, called), 0, "row 1")) == "<call>add</call>"
    chosen = Turn(role="assistant", content="B", reasoning_content="It is B.")
    assert _options(generation, Conversation((asked, chosen), 0, "row 2")).tokens.keys() == {"A", "B"}


def test_an_adapter_brings_the_template_it_was_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def used(*adapters: str, own: Any = PLAIN, **options: str) -> str | None:
        """model.chat_template where the tokenizer has `own`; adapters are named by their templates."""
        directories = []
        for text in adapters:
            directories.append(tmp_path / f"adapter{len(text)}")
            directories[-1].mkdir(exist_ok=True)
            if text:
                (directories[-1] / "chat_template.jinja").write_text(text)
        config = compose(
            ["mode=chat", f"model.path={tmp_path}", *(f"{key}={value}" for key, value in options.items())]
        )
        tokenizer = SimpleNamespace(chat_template=own)
        return _with_template(config, tokenizer, [*map(str, directories)]).chat_template

    assert used() is used("") is used(PLAIN) is used("", PLAIN) is None
    assert not capsys.readouterr().out
    other = str(tmp_path / "adapter3" / "chat_template.jinja")
    assert (
        used("abc")
        == used("abc", "")
        == used("abc", own=None)
        == used("abc", own={"default": PLAIN})
        == other
    )
    assert f"chat template: the adapter's ({other})" in capsys.readouterr().out
    assert used("abc", PLAIN) is None
    assert "differ, so the tokenizer's is used" in capsys.readouterr().out
    assert used("abc", **{"data.template": "qwen"}) is None
    assert used("abc", **{"model.chat_template": "/x.jinja"}) == "/x.jinja"
