"""The answer mask: right with and without {% generation %}, for every turn, whatever pad is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from kt_ray.batch import IGNORE
from kt_ray.data.cache import encoder_key
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.data.turns import turns
from kt_ray.errors import UserError

from .conftest import CHANNELS, MARKED, PLAIN, TEMPLATES, THINKING, make_tokenizer, trained_texts

END = "<|im_end|>"


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


def conversation(*contents: str, system: str | None = None) -> Conversation:
    messages = [Turn(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(contents)]
    if system is not None:
        messages.insert(0, Turn(role="system", content=system))
    return Conversation(tuple(messages), 5, "f.jsonl, line 6")


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


def spoken(encoder: ChatEncoder, *messages: Turn) -> list[str]:
    """What is trained of a conversation."""
    ids, labels = encoder.encode(Conversation(messages, 5, "f.jsonl, line 6"))
    return trained_texts(encoder.tokenizer, ids, labels)


ASK = Turn(role="user", content="Who?")
CALL = Turn(
    role="assistant",
    content="",
    tool_calls=[{"type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}],
)
RESULT = Turn(role="tool", content="fog")
SAID = Turn(role="assistant", content="Tilda.")
EMPTY = "<think>\n\n</think>\n\n"


def test_a_call_without_text_is_found_though_its_scaffold_goes() -> None:
    called = '<call>{"name": "look", "arguments": {"at": "sea"}}</call>' + END
    encoder = ChatEncoder(make_tokenizer(THINKING))
    assert spoken(encoder, ASK, CALL, RESULT, SAID) == [called, EMPTY + "Tilda." + END]
    found = spoken(encoder, ASK, CALL, RESULT, SAID, ASK, SAID)
    assert found == [called, "Tilda." + END, EMPTY + "Tilda." + END]


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


def test_a_part_that_is_left_out_is_told_before_the_answers_that_it_loses() -> None:
    """As Phi-3.5's template, which ends the whole with another token."""
    template = PLAIN + "{% if not add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
    with pytest.raises(UserError, match=r"the call of look \(messages\[2\]\) is not in the rendering"):
        spoken(ChatEncoder(make_tokenizer(template)), ASK, CALL, RESULT, SAID)


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


def calls(*names: str, **fields: str) -> Turn:
    found = [{"type": "function", "function": {"name": name, "arguments": {}}, **fields} for name in names]
    return Turn(role="assistant", content="", tool_calls=found)


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


def test_an_answer_that_the_template_writes_otherwise_is_told() -> None:
    """As those do that take what stands before a </think> for a thought."""
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content']", "m['content'].split('</think>')[-1]")))
    assert spoken(encoder, ASK, SAID) == [SAID["content"] + END] and not encoder.notes
    assert spoken(encoder, ASK, {**SAID, "content": "Why?</think>No."}) == ["No." + END]
    assert [note for note in encoder.notes if "writes answers otherwise than their rows" in note]


def test_what_a_template_writes_as_json_is_not_left_out() -> None:
    said = "{{ m.content | tojson }}{{ m.reasoning_content | tojson if m.reasoning_content }}"
    call = said + "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"
    encoder = ChatEncoder(make_tokenizer(PLAIN.replace("m['content'] + ", f"'' }}}}{call}{{{{ ")))
    texted: Turn = {**calls("look"), "content": "Let me\nlook.", "reasoning_content": "Who?\nWhere?"}
    (found,) = spoken(encoder, ASK, texted)
    assert r'"Let me\nlook.""Who?\nWhere?"look' in found and not encoder.notes


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
