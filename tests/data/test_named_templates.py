"""Templates by name, answers that are trained, tools: what each rendering and each mask holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kt_ray.config.limits import WORDS
from kt_ray.data.named_templates import TOKENS
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError
from tests.data.conftest import MARKED, PLAIN, TEMPLATES, make_tokenizer, trained_texts

TURNS = (
    Turn(role="system", content="Be brief."),
    Turn(role="user", content="One?"),
    Turn(role="assistant", content="First."),
    Turn(role="user", content="Two?"),
    Turn(role="assistant", content="Second."),
)
TALK = Conversation(TURNS, 0, "f.jsonl, line 1")
ONE = replace(TALK, messages=TURNS[:3])

# The whole rendering of TURNS, from each family's published format.
EXPECTED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n"
    "<|im_start|>assistant\nFirst.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n"
    "<|im_start|>assistant\nSecond.<|im_end|>\n",
    "deepseek3": "<s>Be brief.<｜User｜>One?<｜Assistant｜>First.<｜end▁of▁sentence｜><｜User｜>Two?"
    "<｜Assistant｜>Second.<｜end▁of▁sentence｜>",
    "kimi": "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>One?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>First.<|im_end|><|im_user|>user<|im_middle|>Two?<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>Second.<|im_end|>",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nOne?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nFirst.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nTwo?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nSecond.<|eot_id|>",
    "mistral": "<s> [INST] Be brief.\n\nOne? [/INST] First.</s> [INST] Two? [/INST] Second.</s>",
    "olmoe": "<s><|system|>\nBe brief.\n<|user|>\nOne?\n<|assistant|>\nFirst.</s>\n<|user|>\nTwo?\n"
    "<|assistant|>\nSecond.</s>\n",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nOne?<|end|>\n<|assistant|>\nFirst.<|end|>\n"
    "<|user|>\nTwo?<|end|>\n<|assistant|>\nSecond.<|end|>\n",
}
EXPECTED["qwen"] = EXPECTED["chatml"]
ENDS = {
    "chatml": "<|im_end|>",
    "deepseek3": "<｜end▁of▁sentence｜>",
    "kimi": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "olmoe": "</s>",
    "phi3": "<|end|>",
    "qwen": "<|im_end|>",
}


def tokenizer_for(name: str) -> Any:
    return make_tokenizer(
        template=None, eos_token="</s>", bos_token="<s>", extra_special_tokens=list(TOKENS[name])
    )


def test_reasoning_is_trained_by_name_where_the_released_template_leaves_it_out() -> None:
    """DeepSeek-R1's own opens <think> in the prompt and drops it from answers; R1-0528's opens none."""
    dropping = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{{ '<｜Assistant｜>' + (m['content'].split('</think>') | last) + '<｜end▁of▁sentence｜>' }}"
        "{% else %}{{ '<｜User｜>' + m['content'] }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
    )
    thought = "<think>\nSo.\n</think>\n\n"
    turns = [Turn(role=t["role"], content=thought * (t["role"] == "assistant") + t["content"]) for t in TURNS]
    row = replace(TALK, messages=tuple(turns))
    tokenizer = tokenizer_for("deepseek3")

    def said(template: str | None) -> list[str]:
        tokenizer.chat_template = template
        encoder = ChatEncoder(tokenizer, name=None if template else "deepseek3")
        return trained_texts(tokenizer, *encoder.encode(row))

    end = ENDS["deepseek3"]
    assert said(None) == [turn["content"] + end for turn in turns if turn["role"] == "assistant"]
    assert said(dropping) == ["\n\nFirst." + end, "\n\nSecond." + end]
    with pytest.raises(UserError, match=r"the prompt before messages\[3\] is no prefix"):
        said(dropping.replace("{{ '<｜Assistant｜>' }}", "{{ '<｜Assistant｜><think>\n' }}"))


def test_the_configuration_knows_every_template() -> None:
    assert set(WORDS["data.template"]) == set(TOKENS) == {*EXPECTED, "plain"}


@pytest.mark.parametrize("name", EXPECTED)
def test_named_templates(name: str) -> None:
    tokenizer = tokenizer_for(name)
    encoder = ChatEncoder(tokenizer, name=name)
    ids, labels = encoder.encode(TALK)
    assert tokenizer.decode(ids) == EXPECTED[name] == encoder.render(TURNS)
    end = ENDS[name]
    space = " " if name == "mistral" else ""  # no prompt ends with it: the model has to say it
    assert trained_texts(tokenizer, ids, labels) == [f"{space}First.{end}", f"{space}Second.{end}"]
    assert EXPECTED[name].startswith(encoder.render(TURNS[:2], prompt=True).rstrip(" "))
    assert tokenizer.chat_template == encoder.template, "what was trained with is saved"
    assert name in encoder.source


def test_the_plain_template_is_one_text() -> None:
    tokenizer = tokenizer_for("plain")
    encoder = ChatEncoder(tokenizer, name="plain")
    ids, labels = encoder.encode(replace(TALK, messages=TURNS[1:3]))
    assert tokenizer.decode(ids) == "<s>One?First.</s>"
    assert trained_texts(tokenizer, ids, labels) == ["First.</s>"]
    with pytest.raises(UserError, match=r"refuses the conversation.*one question and one answer"):
        encoder.encode(TALK)


def test_a_tokenizer_without_the_templates_tokens_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.template=llama3.*missing <\|start_header_id\|>"):
        ChatEncoder(tokenizer_for("chatml"), name="llama3")
    with pytest.raises(UserError, match="an end-of-sequence token"):
        ChatEncoder(make_tokenizer(template=None, eos_token=None), name="mistral")


@pytest.mark.parametrize("template", TEMPLATES)
def test_loss_on_the_last_answer_only(template: str) -> None:
    tokenizer = make_tokenizer(TEMPLATES[template])
    ids, labels = ChatEncoder(tokenizer, train_on="last").encode(TALK)
    assert trained_texts(tokenizer, ids, labels) == ["Second.<|im_end|>"]
    every = ChatEncoder(make_tokenizer(TEMPLATES[template])).encode(TALK)
    assert (every[0] == ids).all(), "the text is the same"


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_an_answer_of_weight_zero_is_context(template: str) -> None:
    tokenizer = make_tokenizer(template)
    silent = Turn(role="assistant", content="First.", weight=0)
    talk = replace(TALK, messages=(*TURNS[:2], silent, *TURNS[3:]))
    ids, labels = ChatEncoder(tokenizer).encode(talk)
    assert "First." in tokenizer.decode(ids)
    assert trained_texts(tokenizer, ids, labels) == ["Second.<|im_end|>"]


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_of_pairs_and_verdicts_only_what_follows_the_prompt_is_trained(template: str) -> None:
    worse = (*TURNS[:4], Turn(role="assistant", content="Worse."))
    tokenizer = make_tokenizer(template)
    encoder = ChatEncoder(tokenizer)
    pair = replace(TALK, rejected=worse)
    assert trained_texts(tokenizer, *encoder.encode(pair)) == ["Second.<|im_end|>"]
    other = replace(TALK, messages=worse, rejected=TURNS)
    assert trained_texts(tokenizer, *encoder.encode(other)) == ["Worse.<|im_end|>"]
    assert trained_texts(tokenizer, *encoder.encode(replace(TALK, label=False))) == ["Second.<|im_end|>"]


def test_raw_text_is_trained_whole_and_ended() -> None:
    tokenizer = make_tokenizer()
    ids, labels = ChatEncoder(tokenizer).encode(Conversation((), 0, "f", text="Once."))
    assert tokenizer.decode(ids) == "Once.<|im_end|>"
    assert (ids == labels).all()


CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = ({"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}},)
TOOL_TALK = Conversation(
    (
        Turn(role="user", content="1 + 2?"),
        Turn(role="assistant", content="", tool_calls=[CALL]),
        Turn(role="tool", content="3", name="add"),
        Turn(role="assistant", content="Three."),
    ),
    0,
    "f.jsonl, line 4",
    TOOLS,
)


def test_tool_calls_are_trained_and_results_are_not() -> None:
    tokenizer = tokenizer_for("qwen")
    ids, labels = ChatEncoder(tokenizer, name="qwen").encode(TOOL_TALK)
    text = tokenizer.decode(ids)
    assert '"description": "Adds."' in text and "<tool_response>\n3\n</tool_response>" in text
    assert trained_texts(tokenizer, ids, labels) == [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "Three.<|im_end|>",
    ]
    last = ChatEncoder(tokenizer_for("qwen"), name="qwen", train_on="last").encode(TOOL_TALK)[1]
    assert (last == labels).all(), "call and answer both follow the last question"


# A template without blocks that joins a call's arguments as text, as some do.
AS_TEXT = PLAIN.replace(
    "m['content'] +",
    "m['content'] + (m['tool_calls'][0]['function']['name'] + "
    "m['tool_calls'][0]['function']['arguments'] if m['tool_calls'] else '') +",
).replace("{% for m in messages %}", "{{ tools | tojson }}{% for m in messages %}", 1)


def test_arguments_as_text_where_the_template_wants_them_so() -> None:
    tokenizer = make_tokenizer(AS_TEXT)
    ids, labels = ChatEncoder(tokenizer).encode(TOOL_TALK)
    assert trained_texts(tokenizer, ids, labels) == ['add{"a": 1}<|im_end|>', "Three.<|im_end|>"]
    prompt = ChatEncoder(tokenizer).render(TOOL_TALK.messages[:-1], prompt=True, tools=TOOLS)
    assert 'add{"a": 1}' in prompt, "what is asked behind the call, too"


def test_a_template_that_drops_tools_or_system_prompts_is_refused() -> None:
    with pytest.raises(UserError, match=r"leaves a part of the row out.*line 4.*the call of add"):
        ChatEncoder(make_tokenizer(PLAIN)).encode(TOOL_TALK)
    alone = replace(ONE, tools=TOOLS)
    spaced = ({**TOOLS[0], "function": {**TOOLS[0]["function"], "name": "add "}},)
    trims = PLAIN.replace(
        "{% for m in messages %}", "{{ tools[0].function.name | trim }}{% for m in messages %}", 1
    )
    ChatEncoder(make_tokenizer(trims)).encode(replace(ONE, tools=spaced))
    with pytest.raises(UserError, match="the tool add is not in the rendering"):
        ChatEncoder(make_tokenizer(PLAIN)).encode(alone)
    deaf = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}", 1)
    with pytest.raises(UserError, match=r"the system turn \(messages\[1\]\)"):
        ChatEncoder(make_tokenizer(deaf)).encode(ONE)
