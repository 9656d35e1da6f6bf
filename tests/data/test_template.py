"""The answer mask: right with and without {% generation %}, for every turn, whatever pad is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kt_ray.batch import IGNORE
from kt_ray.data.cache import encoder_key
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError

from .conftest import (
    ASK,
    CALL,
    CHANNELS,
    END,
    MARKED,
    PLAIN,
    RESULT,
    SAID,
    TEMPLATES,
    THINKING,
    calls,
    conversation,
    make_tokenizer,
    spoken,
    trained_texts,
)


@pytest.mark.parametrize("marked", [False, True])
def test_the_date_of_a_template_is_that_of_the_run(marked: bool) -> None:
    """Else the same rows would have other tokens after midnight, and no run could be resumed then."""
    mark = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    template = (
        "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}{% if m.role == 'assistant' %}"
        f"{mark[0]}{{{{ m.content + '<|im_end|>' }}}}{mark[1]}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )

    def ids(day: str) -> tuple[list[int], bytes]:
        encoder = ChatEncoder(make_tokenizer(template=template), date=day)
        assert encoder.tokenizer.chat_template == template  # saved as it was
        text = encoder.tokenizer.decode(encoder.encode(conversation("q", "a"))[0])
        assert day == "2026-01-02" or "03 Feb 2024" in text
        return encoder.encode(conversation("q", "a"))[0].tolist(), encoder_key(encoder)

    one, other = ids("2024-02-03"), ids("2026-01-02")
    assert one[0] != other[0] and one[1] != other[1] and ids("2024-02-03") == one


def trained(tokenizer: Any, row: Conversation, template: str | None = None) -> list[str]:
    encoder = ChatEncoder(tokenizer, template)
    ids, labels = encoder.encode(row)
    assert ids.dtype == labels.dtype == np.int64
    assert ((labels == ids) | (labels == IGNORE)).all()
    reference = tokenizer.apply_chat_template(
        [dict(m) for m in row.messages], tokenize=True, return_dict=True
    )
    assert ids.tolist() == reference["input_ids"]
    return trained_texts(tokenizer, ids, labels)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("pad", ["<|pad|>", END], ids=["own pad", "pad is eos"])
@pytest.mark.parametrize("system", [None, "Be kind."])
def test_every_answer_with_its_end_is_trained_and_nothing_else(
    template: str, pad: str, system: str | None
) -> None:
    tokenizer = make_tokenizer(TEMPLATES[template], pad)
    row = conversation("Who?", "Tilda.", "Where, 灯台?", " On the rock 🪨\n", system=system)
    assert trained(tokenizer, row) == ["Tilda." + END, " On the rock 🪨\n" + END]


@pytest.mark.parametrize("last", ["Here.<|im_start|>", "Here." + END])
def test_an_answer_that_ends_with_a_special_token_of_its_own_changes_no_other_end(last: str) -> None:
    for template in TEMPLATES.values():
        row = conversation("Who?", "Tilda.", "Where?", last)
        assert trained(make_tokenizer(template), row) == ["Tilda." + END, last + END]


def test_a_special_token_of_an_answers_own_is_no_end_where_the_next_turn_opens() -> None:
    tokenizer = make_tokenizer(PLAIN.replace("<|im_end|>\\n", ""))
    opening = "<|im_start|>"
    ids, labels = ChatEncoder(tokenizer).encode(conversation("Who?", "Tilda.", "Where?", "Here." + END))
    assert trained_texts(tokenizer, ids, labels) == ["Tilda." + opening, "Here." + END + opening]


def test_a_header_that_a_template_marks_is_not_trained() -> None:
    """As Laguna's template, whose blocks take in the header that its prompts end with."""
    header = "{{ '<|im_start|>' + m['role'] + '\\n' }}"
    template = MARKED.replace(header, "").replace("{% generation %}", "{% generation %}" + header)
    template = template.replace("{% else %}", "{% else %}" + header)
    row = conversation("Who?", "Tilda.", "Where?", "Here.")
    assert trained(make_tokenizer(template), row) == ["Tilda." + END, "Here." + END]
    closed = template.replace("assistant\\n' }}{% endif %}", "assistant\\n</think>' }}{% endif %}")
    encoder = ChatEncoder(make_tokenizer(closed))
    assert spoken(encoder, ASK, SAID) == [f"<|im_start|>assistant\n{SAID['content']}{END}"]
    assert [note for note in encoder.notes if "prompts" in note]
    # The block of an answer with calls begins behind the header.
    later = template.replace(
        "{% generation %}" + header,
        "{% if m.tool_calls %}" + header + "{% endif %}"
        "{% generation %}{% if not m.tool_calls %}" + header + "{% endif %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}",
    )
    encoder = ChatEncoder(make_tokenizer(later))
    assert spoken(encoder, ASK, calls("look"), RESULT, SAID) == ["look" + END, SAID["content"] + END]
    assert not encoder.notes


def test_an_answer_that_repeats_the_question_is_found_in_its_place() -> None:
    row = conversation("echo", "echo", "echo", "echo")
    ids, labels = ChatEncoder(make_tokenizer(PLAIN)).encode(row)
    text = "<|im_start|>user\necho<|im_end|>\n<|im_start|>assistant\n"
    first = len(make_tokenizer()(text, add_special_tokens=False)["input_ids"])
    assert (labels[:first] == IGNORE).all()
    assert (labels[first : first + 5] == ids[first : first + 5]).all()


def test_a_scaffold_that_goes_as_turns_follow_does_not_shift_the_mask() -> None:
    row = conversation("Who?", "Tilda.", "Where?", "The rock.", "When?", "Now.")
    assert trained(make_tokenizer(THINKING), row) == [
        "Tilda." + END,
        "The rock." + END,
        "<think>\n\n</think>\n\nNow." + END,
    ]


def test_another_token_that_ends_earlier_answers_is_not_the_models() -> None:
    tokens = ["<|im_start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer = make_tokenizer(CHANNELS, eos_token="<|return|>", extra_special_tokens=tokens)
    final = "<|channel|>final<|message|>Tilda."
    assert spoken(ChatEncoder(tokenizer), ASK, SAID, ASK, SAID) == [final, final + "<|return|>"]
    last = ChatEncoder(tokenizer, train_on="last")
    assert spoken(last, ASK, SAID, ASK, SAID) == [final + "<|return|>"]


def test_what_stands_behind_an_answer_may_go_once_others_follow() -> None:
    """Though it begins as the token does that then follows."""
    more = "('<more>' if loop.last and m['role'] == 'assistant' else '')"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("+ '<|im_end|>", f"+ {more} + '<|im_end|>")))
    assert spoken(encoder, ASK, SAID, ASK, SAID) == ["Tilda." + END, "Tilda.<more>" + END]


def test_a_remedy_for_a_lost_answer_is_one() -> None:
    """No named template that lacks tools or tokens, and no other answers where the last one is lost."""
    header = "'<|im_start|>' + ('assistant' if messages | length < 3 else 'bot') + '\\n'"
    template = PLAIN.replace("'<|im_start|>assistant\\n'", header)
    with pytest.raises(UserError, match=r"before messages\[4\]") as caught:
        spoken(ChatEncoder(make_tokenizer(template)), ASK, SAID, ASK, SAID)
    assert caught.value.remedy.endswith("or set data.template=qwen")
    tokens = ["<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
    called = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}"
    other = template.replace(" + '<|im_end|>\\n' }}", " }}" + called)
    encoder = ChatEncoder(make_tokenizer(other, eos_token=tokens[2], extra_special_tokens=tokens[:2]))
    for turns_of_row, named in ((ASK, SAID, ASK, SAID), True), ((ASK, CALL, RESULT, SAID), False):
        with pytest.raises(UserError, match="cannot be located") as caught:
            spoken(encoder, *turns_of_row)
        assert ("data.template=deepseek3" in caught.value.remedy) == named


def test_tokens_that_reach_over_the_border_belong_to_the_answer() -> None:
    """Words that carry the space before them: 'Answer: ▁yes' must train '▁yes'."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "▁Q:", "▁who", "▁A:", "▁yes", "▁sir"]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + ' A: ' }}"
        "{% else %}{{ m['content'] + eos_token }}{% endif %}{% endfor %}"
    )
    ids, labels = ChatEncoder(tokenizer).encode(conversation("who", "yes sir"))
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["▁Q:", "▁who", "▁A:", "▁yes", "▁sir", "</s>"]
    assert (labels != IGNORE).tolist() == [False] * 3 + [True] * 3


def test_an_answer_that_generation_begins_otherwise_is_told() -> None:
    """Where texts tokenized apart are no longer one text: two blanks are one token."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<s>": 0, "</s>": 1, "▁": 2, "▁▁": 3, "a": 4, "▁a": 5, "Q": 6}
    core = Tokenizer(models.BPE(vocabulary, [("▁", "▁"), ("▁", "a")]))
    parts = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    core.normalizer = normalizers.Sequence(parts)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    encoder = ChatEncoder(tokenizer, name="plain")
    for prompt, answer in (("Q", "a"), ("Q", " a")):
        encoder.encode(conversation(prompt, answer))
    assert not encoder.notes
    encoder.encode(conversation("Q ", " a"))
    assert [note for note in encoder.notes if "begin amid a token" in note]


def test_a_prompt_is_never_in_one_token_with_its_answer() -> None:
    """Qwen3-Thinking's prompt ends with a line break, and an answer without a thought begins with one."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<think>", "\n", "\n\n", "</think>", "Hi", "user", "assistant", "[", "]", "</s>", "?", "a"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(
        Regex(r"\n+|<think>|</think>|</s>|\[|\]|[^\n\[\]<]+"), "isolated"
    )
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    template = (
        "{% for m in messages %}{{ '[' + m.role + ']' }}{% if m.role == 'assistant' %}"
        "{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>' }}{% endif %}{{ m.content + '</s>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]<think>\n' }}{% endif %}"
    )
    tokenizer.chat_template = template
    encoder = ChatEncoder(tokenizer)
    ids, labels = encoder.encode(conversation("Hi", "Hi"))
    prompt = encoder.prompt_ids(conversation("Hi", "Hi").messages[:1])
    assert tokenizer.convert_ids_to_tokens(prompt)[-2:] == ["<think>", "\n"]
    assert ids[: len(prompt)].tolist() == prompt and (labels[: len(prompt)] == IGNORE).all()
    said = tokenizer.convert_ids_to_tokens(labels[len(prompt) :].tolist())
    assert said == ["\n", "</think>", "Hi", "</s>"]
    assert encoder.render(conversation("Hi", "Hi").messages) == "".join(tokenizer.convert_ids_to_tokens(ids))


def test_a_header_that_takes_in_the_space_behind_it_is_not_the_answers() -> None:
    """Phi-3's special tokens do, and its tokenizer begins each text with a space of its own."""
    from tokenizers import AddedToken, pre_tokenizers

    header = AddedToken("<|assistant|>", rstrip=True, special=True, normalized=False)
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content + '<|assistant|>' }}{% else %}"
        "{{ m.content + eos_token }}{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template, extra_special_tokens=[header])
    for spaced in (False, True):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
        ids, labels = ChatEncoder(tokenizer).encode(conversation("Hi", " yes"))
        (said,) = trained_texts(tokenizer, ids, labels)
        assert said.strip() == "yes" + END, "neither the header nor less than the answer"


def test_prompts_keep_what_their_answers_depend_on() -> None:
    """As training asks of rows: GRPO, mode=predict, chat and serve read prompts."""
    dropping = (
        "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.content + eos_token }}{% endfor %}"
    )
    encoder = ChatEncoder(make_tokenizer(dropping))
    system, tool = Turn(role="system", content="Be brief."), {"function": {"name": "look"}}
    assert encoder.prompt_ids([ASK])
    with pytest.raises(UserError, match=r"leaves a part of the row out; at line 3; found the system turn"):
        encoder.prompt_ids([system, ASK], where="line 3")
    with pytest.raises(UserError, match=r"the tool look is not in the rendering.*data\.template=qwen"):
        encoder.prompt_ids([ASK], tools=[tool])
    other = ChatEncoder(make_tokenizer(dropping, eos_token="</s>", extra_special_tokens=[]))
    with pytest.raises(
        UserError, match=r"fix: give model\.chat_template .*write the tools into the system prompt"
    ):
        other.prompt_ids([ASK], tools=[tool])


def test_a_switch_in_a_system_prompt_need_not_be_written() -> None:
    """As Nemotron-Nano-v2's and SmolLM3's templates, which take /no_think out of it."""
    read = "m['content'].replace('/no_think', '') if m.role == 'system' else m['content']"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content']", f"({read})")))
    for system in ("/no_think", "Be brief. /no_think Be kind."):
        assert "no_think" not in encoder.render([Turn(role="system", content=system), ASK], prompt=True)
    dropping = ChatEncoder(make_tokenizer(PLAIN.replace("m['content']", f"({read})[:9]")))
    with pytest.raises(UserError, match=r"the system turn"):
        dropping.prompt_ids([Turn(role="system", content="/no_think Be brief."), ASK])


def test_the_next_turn_ends_an_answer_that_nothing_else_ends() -> None:
    """As GLM's: the model says <|user|> when it has answered, and <|observation|> when it has called."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name }}{% endfor %}"
        "{% else %}{{ '<|user|>' if m.role == 'user' else '<|observation|>' }}{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    )
    tokens = ["<|user|>", "<|assistant|>", "<|observation|>"]
    tokenizer = make_tokenizer(template, extra_special_tokens=tokens)
    encoder = ChatEncoder(tokenizer)
    row = (ASK, calls("look"), Turn(role="tool", content="1"), SAID, ASK, SAID)
    ids, labels = encoder.encode(Conversation(row, 0, "line 1"))
    said = SAID["content"] + "<|user|>"
    assert trained_texts(tokenizer, ids, labels) == ["<call>look<|observation|>", said, said]
    assert (
        tokenizer.decode(ids)
        == tokenizer.apply_chat_template([dict(m) for m in row], tokenize=False) + "<|user|>"
    )
    (called,) = trained_texts(tokenizer, *encoder.encode(Conversation(row[:2], 0, "line 1")))
    assert called == "<call>look<|observation|>"
    assert encoder.notes == [
        "the chat template ends no answer: the token that opens the next turn is trained as its end"
    ]
    kept = (ASK, SAID, ASK, Turn(role="assistant", content="No.", weight=0))
    ids, labels = encoder.encode(Conversation(kept, 0, "line 1"))
    assert trained_texts(tokenizer, ids, labels) == [said] and tokenizer.decode(ids).endswith("No.")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("closing", ["<|endoftext|>", ""])
def test_what_ends_the_whole_conversation_ends_no_answer(closing: str, special: bool) -> None:
    """As Phi-3.5's template, whose answers end with another token; special: whether the tokenizer says so."""
    from tokenizers import AddedToken

    template = PLAIN + "{% if not add_generation_prompt %}{{ '" + closing + "' }}{% endif %}"
    tokenizer = make_tokenizer(template, eos_token="<|endoftext|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.add_tokens([AddedToken("<|im_end|>", special=special)])
    tokenizer.add_tokens(["b", "</think>"])
    encoder = ChatEncoder(tokenizer)
    said = SAID["content"] + END
    assert spoken(encoder, ASK, SAID) == [said]
    assert spoken(encoder, ASK, SAID, ASK, SAID) == [said, said]
    assert not encoder.notes


def test_an_answer_that_the_template_writes_otherwise_is_told() -> None:
    """As those do that take what stands before a </think> for a thought."""
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")))
    assert spoken(encoder, ASK, SAID) == [SAID["content"] + END] and not encoder.notes
    assert spoken(encoder, ASK, {**SAID, "content": "Why?</think>No."}) == ["No." + END]
    assert [note for note in encoder.notes if "writes answers otherwise than their rows" in note]


def test_a_row_that_was_rendered_before_is_told_once() -> None:
    encoder = ChatEncoder(make_tokenizer(PLAIN))
    encoder.note_marks(Conversation(({**ASK, "content": "What is <|pad|>?"}, SAID), 0, "line 1"))
    assert not encoder.notes
    rendered: Turn = {**ASK, "content": "<|im_start|>user\nWho?"}
    for where in ("line 2", "line 3"):
        encoder.note_marks(Conversation((rendered, SAID), 0, where))
    (note,) = encoder.notes
    assert note.startswith("texts of rows hold what") and note.endswith(": <|im_start|> in line 2")


def test_what_a_template_writes_as_json_is_not_left_out() -> None:
    said = "{{ m.content | tojson }}{{ m.reasoning_content | tojson if m.reasoning_content }}"
    call = said + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"'' }}}}{call}{{{{ ")))
    texted: Turn = {**calls("look"), "content": "Let me\nlook.", "reasoning_content": "Who?\nWhere?"}
    (found,) = spoken(encoder, ASK, texted)
    assert r'"Let me\nlook.""Who?\nWhere?"look' in found and not encoder.notes


def test_without_a_template_the_default_is_used_and_said_once() -> None:
    tokenizer = make_tokenizer(None)
    encoder = ChatEncoder(tokenizer)
    for _ in range(2):
        ids, labels = encoder.encode(conversation("Who?", "Tilda.", "Where?", "Here."))
        assert trained_texts(tokenizer, ids, labels) == ["Tilda." + END, "Here." + END]
    assert len(encoder.notes) == 1
    assert "no chat template" in encoder.notes[0]
    assert tokenizer.chat_template == encoder.template, "what was trained with is saved with the tokenizer"


def test_without_a_template_and_without_eos() -> None:
    with pytest.raises(UserError, match="neither a chat template nor an end-of-sequence token"):
        ChatEncoder(make_tokenizer(None, eos_token=None))


def test_a_template_file_overrides(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text(PLAIN.replace("<|im_start|>", "@"))
    tokenizer = make_tokenizer()
    row = conversation("Who?", "Tilda.")
    assert trained(tokenizer, row, str(tmp_path / "t.jinja")) == ["Tilda." + END]
    assert ChatEncoder(tokenizer).render(row.messages).startswith("@user")
    with pytest.raises(UserError, match=r"chat template file does not exist.*model\.chat_template"):
        ChatEncoder(tokenizer, str(tmp_path / "absent.jinja"))


@pytest.mark.parametrize("text", ["", "\n", "Tilda."])
def test_a_template_that_leaves_out_the_question_is_broken(tmp_path: Path, text: str) -> None:
    """Else mode=chat and mode=serve would answer each question alike."""
    (tmp_path / "t.jinja").write_text(text)
    message = rf"template is broken; at .*t\.jinja.*whatever the question is, it renders '{text.strip()}'"
    with pytest.raises(UserError, match=message):
        ChatEncoder(make_tokenizer(), str(tmp_path / "t.jinja"))


@pytest.mark.parametrize("behind", ["{%- if true %}", "{{- '' }}", "{#- #}"])
def test_a_brace_before_a_dash_stays_text(behind: str) -> None:
    """As Cohere's and Gemma's templates have it where they write JSON; loops and macros count their steps."""
    end = "{% endif %}" if "if" in behind else ""
    template = PLAIN.replace("{{ '<|im_start|>'", "{\n    " + behind + "}" + end + "{{ '<|im_start|>'", 1)
    tokenizer = make_tokenizer(template)
    messages = conversation("Who?", "Tilda.").messages
    text = ChatEncoder(tokenizer).render(messages)
    assert text == tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False)
    assert text.startswith("{}<|im_start|>user")


@pytest.mark.parametrize("before", ["", "\n\n", "  {#- a\n comment #}\n", "  {% if true %}\n\n{%- endif %}"])
def test_a_broken_template_is_told_by_its_line(before: str) -> None:
    """Whatever the dashes before it eat."""
    good = before + "\n{%- for m in messages %}\n\n  {{- m.content }}\n{%- endfor %}\n\n"
    bad = good + "{%- endif %}"
    with pytest.raises(UserError, match=f"line {bad.count(chr(10)) + 1}:"):
        ChatEncoder(make_tokenizer(bad))
    tokenizer = make_tokenizer(good)
    messages = conversation("Who?", "Tilda.").messages
    text = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False)
    assert ChatEncoder(tokenizer).render(messages) == text


def test_a_template_that_ends_no_turn_is_noted() -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer = make_tokenizer(template)
    encoder = ChatEncoder(tokenizer)
    ids, labels = encoder.encode(conversation("Who?", "Tilda."))
    assert trained_texts(tokenizer, ids, labels) == ["Tilda.\n"]
    assert [note for note in encoder.notes if "does not learn to stop" in note]


UNUSABLE = {
    # The header of the answer to come is not the header answers have.
    "other header": (PLAIN.replace("'<|im_start|>assistant\\n'", "'<|im_start|>bot\\n'"), "no prefix"),
    "only the last turn": (PLAIN.replace("in messages", "in messages[-2:]"), "no prefix"),
    "shortened history": (
        PLAIN.replace("m['content']", "(m['content'] if loop.last or m['role'] == 'user' else '…')"),
        "no prefix|rendered differently",
    ),
    "lengthened history": (
        PLAIN.replace(
            "m['content']", "m['content'] + ('' if loop.last or m['role'] == 'user' else ' (said)')"
        ),
        "rendered differently",
    ),
    "nothing marked": (
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + PLAIN,
        "no character",
    ),
    "refusal": ("{{ raise_exception('no system role') }}", "refuses the conversation.*no system role"),
    "broken": ("{{ messages[0].content + 3 }}", "refuses the conversation"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_templates_that_cannot_be_masked_are_refused_with_the_row(case: str) -> None:
    template, expected = UNUSABLE[case]
    with pytest.raises(UserError, match=expected) as caught:
        ChatEncoder(make_tokenizer(template)).encode(conversation("Who?", "Tilda.", "Where?", "Here."))
    assert "f.jsonl, line 6" in str(caught.value)
    assert "model.chat_template" in caught.value.remedy
