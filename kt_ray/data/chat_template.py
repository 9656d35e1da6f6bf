"""A chat template: what it writes of a conversation, and what it leaves out.

Templates take turns in many forms. What one of them takes is found by rendering a question and an answer with
marks in them, never by its name.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kt_ray.data.bounded_template import TOO_MANY, bounded, broken
from kt_ray.data.named_templates import TOKENS, default_template, named_template
from kt_ray.data.row_types import Turn
from kt_ray.data.template_turns import (
    call_of,
    forms,
    is_written,
    naming_id,
    plain_turns,
    short_id,
    some_id,
    with_ids,
    with_marks,
    with_thought,
)
from kt_ray.errors import UserError
from kt_ray.evaluate.choice import opens_thought
from kt_ray.parse import read_text
from kt_ray.terminal import shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_DATE_CALL = re.compile(r"""strftime_now\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANOTHER_TEMPLATE = "give model.chat_template a template that works, or name one in data.template"
_EFFORT = "reasoning_effort"
# Of Nemotron-Nano-v2's and SmolLM3's templates.
_SWITCHES = ("/no_think", "/think", "/system_override")

# What every template of a chat model renders.
SIMPLEST: tuple[Turn, ...] = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


class ChatTemplate:
    """A tokenizer's template, or one in its place.

    Args:
        tokenizer: a fast tokenizer.
        template: file of a Jinja chat template instead of the tokenizer's own; None = its own, or
            templates/default.jinja when it has none: plain role headers, each turn ended by the
            end-of-sequence token.
        name: a template of TOKENS instead of either.
        date: YYYY-MM-DD, the day that strftime_now of the template is given; None = the day of the call.

    Attributes:
        template: as saved beside the adapter. rendered: as used, with its date fixed.
        source: where the template comes from, in words.
        marked: whether it has {% generation %} blocks.
        notes: what a user should know about the choices made (at most one line each).

    Raises:
        UserError: the template file is missing, is no template or takes too many steps; or the default one is
            needed and there is no EOS token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None = None,
        *,
        name: str | None = None,
        date: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.source = "the tokenizer's own"
        self.notes: list[str] = []
        added = {id: str(token) for id, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._special = sorted({*tokenizer.all_special_tokens, *added.values()}, key=len, reverse=True)
        self._special_ids = [*added]
        self.template = named_template(name, tokenizer) if name else self._choose(template)
        if name:
            self.source = f"{name} (data.template)"
        tokenizer.chat_template = self.template  # what was trained with is what is saved and served
        self.rendered = self.template if date is None else with_date(self.template, date)
        self.marked = _GENERATION.search(self.template) is not None
        self._bounded = bounded(self.rendered, self.source)
        self._usual = self._takes_the_simplest()
        self._special += self._plain_endings()

    def _choose(self, template: str | None) -> str:
        if template is not None:
            path = Path(template).expanduser()
            if not path.is_file():
                raise UserError(
                    "the chat template file does not exist",
                    where=f"model.chat_template={path}",
                    remedy="correct model.chat_template, or leave it out for the tokenizer's own template",
                )
            self.source = f"{path} (model.chat_template)"
            return read_text(path, "the chat template file", "correct model.chat_template")
        if self.tokenizer.chat_template:
            try:
                return str(self.tokenizer.get_chat_template())
            except Exception as error:  # of several templates none is the default one, or they are no texts
                raise broken("the tokenizer's own", error) from error
        if self.tokenizer.eos_token is None:
            raise UserError(
                "the tokenizer has neither a chat template nor an end-of-sequence token",
                where="model.tokenizer",
                remedy="give model.chat_template a Jinja template, or add eos_token to tokenizer_config.json",
            )
        self.source = "kt_ray's default"
        self.notes.append("the tokenizer has no chat template: kt_ray's default one is used (docs/data.md)")
        return default_template()

    def render(
        self,
        messages: Sequence[Turn],
        *,
        prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        effort: str | None = None,
        where: str = "this conversation",
    ) -> str:
        """The conversation as text; `prompt` adds the header of the answer to come.

        Args:
            effort: how much the answer shall think, if the template `reads_effort`; None = its default.
            where: whose it is, for the error.

        Raises:
            UserError: the template refuses it, or leaves a part of a prompt out.
        """
        messages = self._with_thoughts(self._with_marks_of_prompts(messages) if prompt else messages)
        refusal: Exception | None = None
        for form in self._forms(messages):
            try:
                text = self._render(form, prompt, tools, effort)
                break
            except Exception as error:  # what a template does, and so what it raises, is anybody's
                refusal = refusal or error
        else:
            raise self._refused(where, refusal) from refusal
        self._note_ids(messages, form)
        if prompt:
            self._check_rendered(text, form, tools, where, prompt=True)
        return text

    def _forms(self, messages: Sequence[Turn]) -> Iterator[Sequence[Turn]]:
        """The forms in which the template may take them, the likeliest first."""
        found = forms(messages)
        if len(found) > 1 and self._prints_arguments:
            found = found[::-1]
        yield from found
        if len(found) > 1:  # the template may refuse the ids of the row's calls, or want some
            yield from (with_ids(form, short_id) for form in found)

    def _refused(self, where: str, refusal: Exception | None) -> UserError:
        remedy = "correct that row, or give model.chat_template a template that takes it"
        observed = f"{type(refusal).__name__}: {refusal}"
        if not self._usual:  # then it is not the row's fault
            observed += f"; the template ({self.source}) refuses a plain question and answer, too"
            remedy = _ANOTHER_TEMPLATE
        return UserError(
            "the chat template refuses the conversation", where=where, observed=observed, remedy=remedy
        )

    @property
    def reads_effort(self) -> bool:
        """Whether the template asks how much an answer shall think, as gpt-oss's and Mistral's do."""
        return _EFFORT in self.template

    def _render(
        self,
        messages: Sequence[Turn],
        prompt: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        effort: str | None = None,
    ) -> str:
        return self._rendered(self._with_ids(messages), prompt, tools, effort)

    def _rendered(
        self,
        messages: Sequence[Turn],
        prompt: bool,
        tools: Sequence[dict[str, Any]] | None,
        effort: str | None = None,
    ) -> str:
        more: dict[str, Any] = {} if effort is None else {_EFFORT: effort}
        text = self.tokenizer.apply_chat_template(
            self._plain(messages),
            chat_template=self._bounded,
            tools=list(tools) if tools else None,
            tokenize=False,
            add_generation_prompt=prompt,
            **more,
        )
        str(text).encode("utf-8")  # raises on half a surrogate pair, which no tokenizer takes
        return str(text)

    def _plain(self, messages: Sequence[Turn]) -> list[dict[str, Any]]:
        thought = any("reasoning_content" in message for message in messages)
        return plain_turns(messages, in_parts=thought and self._thoughts_in_parts)

    def _takes_the_simplest(self) -> bool:
        """Whether it renders a plain question and answer.

        Raises:
            UserError: it is no template at all, leaves out the question, or takes too many steps for that.
        """
        from jinja2 import TemplateSyntaxError

        try:
            text, other = (self._render([{**SIMPLEST[0], "content": q}, SIMPLEST[1]]) for q in "ac")
        except TemplateSyntaxError as error:
            raise broken(self.source, f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # the template may want other turns than these
            if TOO_MANY in str(error):  # no row is shorter, and each would take as long
                raise UserError(
                    "the chat template refuses a plain question and answer",
                    where=self.source,
                    observed=TOO_MANY,
                    remedy=_ANOTHER_TEMPLATE,
                ) from error
            return False
        if text == other:
            raise broken(self.source, f"whatever the question is, it renders {shortened(text, 60)!r}")
        return True

    def _plain_endings(self) -> list[str]:
        """A token of the tokenizer's, not marked as special, that the template ends answers with."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        with contextlib.suppress(Exception):  # it may want other turns than these
            text = self._render(SIMPLEST).rstrip()
            for token in self._special:  # the conversation's end may follow, as in Phi-3.5's
                text = text.removesuffix(token).rstrip() if text.endswith(token) else text
            found = {token for token in added if len(token) > 1 and text.endswith(token)}  # "b" is the answer
            return sorted(found.difference(self._special), key=len)[-1:]
        return []

    def _with_thoughts(self, messages: Sequence[Turn]) -> tuple[Turn, ...]:
        """Where the template writes thoughts otherwise, one that an answer begins with in <think> is taken
        out of it, for the place that it belongs into. Other templates know <think> themselves."""
        written = any("<think>" in m["content"] for m in messages if m["role"] == "assistant")
        return tuple(map(with_thought, messages) if written and self._thoughts_apart else messages)

    def _with_marks_of_prompts(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """Where prompts open a thought, an answer begins amid it, and clients send it back so: with only the
        mark that ends it."""
        amid = [
            m["role"] == "assistant" and "</think>" in m["content"].partition("<think>")[0] for m in messages
        ]
        if not (any(amid) and self._thoughts_apart and self._opens_thought):
            return messages
        return [
            {**m, "content": f"<think>{m['content']}"} if begins else m
            for m, begins in zip(messages, amid, strict=True)
        ]

    @cached_property
    def _opens_thought(self) -> bool:
        """Whether a prompt ends with <think> or a mark like it."""
        with contextlib.suppress(Exception):  # it may want other turns than this
            return opens_thought(self._render([SIMPLEST[0]], prompt=True))
        return False

    @cached_property
    def _thoughts_apart(self) -> bool:
        """Whether the template writes a thought otherwise than an answer with <think> in it: in marks of its
        own (a channel), or with <think> where it would leave an empty one before such an answer."""
        answer: Turn = {**SIMPLEST[1], "content": "<think>\nmark_of_a_thought\n</think>\n\nb"}
        with contextlib.suppress(Exception):  # it may want other turns than these
            turns: list[list[Turn]] = [[], [answer], [with_thought(answer)]]
            texts = [self._render([SIMPLEST[0], *more]) for more in turns]
            asked, written, apart = ((text.count("<think>"), text.count("</think>")) for text in texts)
            empty = apart[0] > asked[0] and apart[1] > asked[1]
            return written != apart and (empty or "mark_of_a_thought" in texts[2])
        return False

    @cached_property
    def _thoughts_in_parts(self) -> bool:
        """Whether the template reads thoughts as parts of an answer's content (Mistral's), not beside it."""
        answer: Turn = {**SIMPLEST[1], "reasoning_content": "mark_of_a_thought"}
        for in_parts in (False, True):
            turns = plain_turns([SIMPLEST[0], answer], in_parts)
            with contextlib.suppress(Exception):  # it may want other turns than these
                text = self.tokenizer.apply_chat_template(turns, chat_template=self._bounded, tokenize=False)
                printed = re.search("""["']type["']""", str(text))  # as they are given
                if "mark_of_a_thought" in text and not printed:
                    return in_parts
        return False

    def ends_thoughts(self, token: int) -> bool:
        """Whether the template writes this token between a thought and its answer."""
        answer: Turn = {
            **SIMPLEST[1],
            "content": "mark_of_an_answer",
            "reasoning_content": "mark_of_a_thought",
        }
        with contextlib.suppress(Exception):  # it may want other turns than these
            text = self._render([SIMPLEST[0], answer])
            between, answered, _ = text.partition("mark_of_a_thought")[2].partition("mark_of_an_answer")
            return bool(answered) and str(self.tokenizer.decode([token])) in between
        return False

    @cached_property
    def _prints_arguments(self) -> bool:
        """Whether the template writes the arguments of calls as they are, which of an object is no JSON."""
        arguments = {"a": "mark_of_an_argument"}
        call = call_of("a", "functions.a:0")
        call["function"]["arguments"] = arguments
        with contextlib.suppress(Exception):  # it may want other turns than these
            return str(arguments) in self._render([SIMPLEST[0], {**SIMPLEST[1], "tool_calls": [call]}])
        return False

    def _with_ids(self, messages: Sequence[Turn]) -> Sequence[Turn]:
        """The same with the ids that a template wants which writes those of calls."""
        if not any(message.get("tool_calls") for message in messages) or not self._written_ids:
            return messages
        return self._identified(messages, naming_id if self._written_ids == "as names" else some_id)

    def _identified(
        self, messages: Sequence[Turn], id_of: Callable[[dict[str, Any], int], str]
    ) -> Sequence[Turn]:
        turns = with_ids(messages, id_of)
        self._note_ids(messages, turns, named=id_of is naming_id)
        return turns

    def _note_ids(self, given: Sequence[Turn], taken: Sequence[Turn], named: bool = False) -> None:
        """Note that calls have other ids now. `named`: those that hold the calls' names."""
        own, new = (
            [call.get("id") for turn in turns for call in turn.get("tool_calls", ())]
            for turns in (given, taken)
        )
        if own != new:
            what = "as the model writes them (functions.NAME:0)" if named else "of nine characters"
            self._note(f"calls get ids {what}")

    @cached_property
    def _written_ids(self) -> str:
        """How the template writes the ids of calls: "as names", in their place, "beside" them, "" = not."""
        for id in ("mark_of_an_id", "mark0f1id"):  # some take no other than nine letters and digits
            called: Turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [call_of("mark_of_a_name", id)],
            }
            for form in forms([SIMPLEST[0], called]):
                with contextlib.suppress(Exception):  # it may want other turns than these
                    text = self._rendered(form, prompt=False, tools=None)
                    return "" if id not in text else "beside" if "mark_of_a_name" in text else "as names"
        return ""

    def _check_rendered(
        self,
        text: str,
        messages: Sequence[Turn],
        tools: Sequence[dict[str, Any]] | None,
        where: str,
        *,
        prompt: bool = False,
    ) -> None:
        """Refuse a template that leaves out, without a word, what the answers depend on."""
        lost = [
            f"the system turn (messages[{number}])"
            for number, message in enumerate(messages, start=1)
            if message["role"] == "system"
            and not all(is_written(part.strip(), text) for part in self._without_switches(message["content"]))
        ]
        marks, turns, offered = with_marks(messages, tools)
        if marks:
            try:
                text = self._render(turns, prompt, offered)
            except Exception:  # it takes no others than these
                marks = [(own.strip(), own, what) for _, own, what in marks]
            lost += [what for mark, _, what in marks if not is_written(mark, text)]
        if not lost:
            return
        chatml = set(TOKENS["qwen"]) <= set(self._special)
        remedy = "set data.template=qwen (ChatML with tools), " if chatml else ""
        remedy += "give model.chat_template one that does, or delete such rows"
        if lost[0].startswith("the tool ") and not lost[0].startswith("the tool turn"):
            remedy += "; or write the tools into the system prompt, and leave `tools` away"
        raise UserError(
            "the chat template leaves a part of the row out",
            where=where,
            observed=f"{lost[0]} is not in the rendering",
            required="a template that renders system prompts, tools and their results if there are any",
            remedy=remedy,
        )

    def _without_switches(self, system: str) -> list[str]:
        """A system prompt around what the template reads as a switch, and does not write."""
        switches = [
            word for word in _SWITCHES if f"'{word}'" in self.template or f'"{word}"' in self.template
        ]
        return re.split("|".join(switches), system) if switches else [system]

    def _note(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


def with_date(template: str, day: str) -> str:
    """A template in which every strftime_now("...") is what it gives at 0:00 of a day, YYYY-MM-DD.

    Without a fixed day the tokens of the same rows would be others after midnight, and a run could not be
    resumed. Calls with a format that is no literal stay as they are.
    """
    at = datetime.datetime.fromisoformat(day)  # 0:00
    return _DATE_CALL.sub(lambda call: json.dumps(at.strftime(call[1] or call[2] or "")), template)


def dated(template: str) -> bool:
    """Whether a template depends on the date."""
    return "strftime_now(" in template
