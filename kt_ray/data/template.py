"""The tokenizer and its chat template: from a conversation to token ids with the trained ones marked.

Trained is what the model itself must say: every answer and the token that ends it. Which characters
those are comes from the template's own {% generation %} blocks where it has them. Where it has none,
the conversation is rendered up to each answer and through it; the difference is the answer's span.
Characters become tokens by the tokenizer's offsets over the one full rendering, so what is trained on is
what apply_chat_template gives, and the mask never depends on which ids stand for pad or end. Only where a
token would hold a prompt's end and its answer's beginning are the two tokenized apart, as generation does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kt_ray.batch import IGNORE
from kt_ray.data.chat_template import SIMPLEST, ChatTemplate
from kt_ray.data.named_templates import TOKENS
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.data.template_turns import answers_wanted, call_of, forms, is_written, with_thought
from kt_ray.errors import UserError
from kt_ray.evaluate.choice import opens_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ENDLESS = "the chat template ends no answer with a special token: the model does not learn to stop"
_OPENED = "the chat template ends no answer: the token that opens the next turn is trained as its end"
_AMID = (
    "some answers begin amid a token that holds the end of their prompt, too (a blank, say): in generation "
    "the prompt is tokenized alone, so that they begin otherwise; let such prompts end without it"
)
_MARKED = "texts of rows hold what the chat template parts turns with, as if they were rendered before: "
Span = tuple[int, int]  # characters of the rendering, half-open


class ChatEncoder(ChatTemplate):
    """Encode conversations with one tokenizer and one template.

    Args:
        tokenizer, template, name, date: as `ChatTemplate` has them.
        train_on: "all" answers, or the "last" ones: those after the last question.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template: str | None = None,
        *,
        name: str | None = None,
        date: str | None = None,
        train_on: str = "all",
    ) -> None:
        super().__init__(tokenizer, template, name=name, date=date)
        self.train_on = train_on

    def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids, labels), both int64 [s]; labels are IGNORE outside the answers to be trained.

        Raw text is trained whole, ended by the end-of-sequence token where the tokenizer has one. Of a
        preference pair this is the chosen side.

        Raises:
            UserError: the template refuses the conversation, or no answer can be located in it.
        """
        if conversation.text is not None:
            return self._encode_text(conversation.text, conversation.where)
        conversation = self._conversation(conversation)
        text, spans = self._spans(conversation)
        ids, begin, end = self._located(text, conversation.where)
        starts = [start for start, _ in spans]
        joined = [start for start in starts if ((begin < start) & (end > start)).any()]
        if joined and not self._splits_anywhere and _AMID not in self.notes:
            alone = self._located(text[: joined[0]], conversation.where)[0]
            if not np.array_equal(alone, ids[: len(alone)]):
                self._note(_AMID)
        if joined and self._splits_anywhere:
            borders = [0, *joined, len(text)]
            parts = [self._located(text[a:b], conversation.where, a) for a, b in itertools.pairwise(borders)]
            ids, begin, end = (np.concatenate(each) for each in zip(*parts, strict=True))
        trained = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            # Overlap, not containment: "▁word" may reach back over the space before an answer. A token of
            # whitespace may have been trimmed to no width; it then sits at its end.
            trained |= np.where(
                end > begin, (end > start) & (begin < stop), (begin > start) & (begin <= stop)
            )
        if joined:  # a special token may take in the space behind it; it is the prompt's all the same
            reaching = (begin[:, None] < joined) & (end[:, None] > joined)
            trained &= ~(reaching.any(axis=1) & np.isin(ids, self._special_ids))
        return ids, np.where(trained, ids, IGNORE)

    def _conversation(self, given: Conversation) -> Conversation:
        rejected = None if given.rejected is None else self._with_thoughts(given.rejected)
        return replace(given, messages=self._with_thoughts(given.messages), rejected=rejected)

    def _located(self, text: str, where: str, at: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(ids, begin, end) int64 [s] each: tokens and their characters, counted from `at`."""
        options = {"add_special_tokens": False, "return_offsets_mapping": True}
        encoding = self._tokenized(text, where, **options)
        offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2) + at
        return np.asarray(encoding["input_ids"], dtype=np.int64), offsets[:, 0], offsets[:, 1]

    @cached_property
    def _splits_anywhere(self) -> bool:
        """Whether texts tokenized apart stay one text: the tokenizer begins none with a space of its own."""
        ids = self._tokenized("a", "model.tokenizer", add_special_tokens=False)["input_ids"]
        return str(self.tokenizer.decode([*ids, *ids])) == "aa"

    def prompt_ids(
        self,
        messages: Sequence[Turn],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        where: str = "this conversation",
    ) -> list[int]:
        """Token ids of a conversation with the header of the answer to come; `where` is for the error.

        Raises:
            UserError: the template refuses it, or leaves a part out.
        """
        text = self.render(messages, prompt=True, tools=tools, where=where)
        return list(self._tokenized(text, where, add_special_tokens=False)["input_ids"])

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with `<think>` or a mark like it: answers begin amid reasoning."""
        return opens_thought(str(self.tokenizer.decode(list(prompt[-8:]))))

    def _tokenized(self, text: str, where: str, **options: bool) -> Any:
        try:
            return self.tokenizer(text, verbose=False, **options)
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise UserError(
                "the tokenizer fails",
                where=where,
                observed=f"{type(error).__name__}: {error}",
                required="a tokenizer that takes every text",
                remedy="copy the model's tokenizer files again, or point model.tokenizer at them",
            ) from error

    def _encode_text(self, text: str, where: str) -> tuple[np.ndarray, np.ndarray]:
        ids = list(self._tokenized(text, where)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and (not ids or ids[-1] != end):
            ids.append(int(end))
        array = np.asarray(ids, dtype=np.int64)
        return array, array.copy()

    def _spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        trained = answers_wanted(conversation, self.train_on)
        refusal: Exception | None = None
        for messages in self._forms(conversation.messages):
            form = replace(conversation, messages=tuple(messages))
            try:
                text, spans = self._marked_spans(form) if self.marked else self._rendered_spans(form, trained)
                if self.marked and self._marks_headers:
                    spans = self._without_headers(form, text, spans)
                break
            except UserError:  # then perhaps because a part is left out
                text = self._render(messages, tools=conversation.tools)
                self._check_rendered(text, messages, conversation.tools, conversation.where)
                raise
            except Exception as error:  # what a template does, and so what it raises, is anybody's
                refusal = refusal or error
        else:
            raise self._refused(conversation.where, refusal) from refusal
        self._note_ids(conversation.messages, messages)
        self._check_rendered(text, messages, conversation.tools, conversation.where)
        text, spans = self._with_end(text, spans, messages)
        if any(trained) and not any(stop > start for start, stop in spans):
            raise self._lost(conversation, "no character of the rendering is marked as an answer")
        if self.marked and not all(trained):
            if len(spans) != len(trained):
                raise self._lost(conversation, f"{len(spans)} marked spans for {len(trained)} answers")
            spans = [span for span, keep in zip(spans, trained, strict=True) if keep]
        self._note_left_out(conversation, trained, "".join(text[start:stop] for start, stop in spans))
        return text, spans

    def note_marks(self, conversation: Conversation) -> None:
        """Note the first row whose own text holds a token that parts turns: it is taken for the real one.
        The note names the row, so it is no part of what a cache keeps: other files may hold the same rows."""
        if self._marks and not any(note.startswith(_MARKED) for note in self.notes):
            for message in conversation.messages:
                if found := next((mark for mark in self._marks if mark in message["content"]), None):
                    self.notes.append(f"{_MARKED}{found} in {conversation.where}")
                    break

    @cached_property
    def _marks(self) -> list[str]:
        """The special tokens that the template writes itself."""
        with contextlib.suppress(Exception):  # it may want other turns than these
            text = self._render(SIMPLEST)
            return [token for token in self._special if len(token) > 1 and token in text]
        return []

    def _note_left_out(self, conversation: Conversation, trained: Sequence[bool], said: str) -> None:
        """Note a template that leaves out of trained answers what was thought or said, or changes it."""
        answers = [with_thought(m) for m in conversation.messages if m["role"] == "assistant"]
        for answer, wanted in zip(answers, trained, strict=True):
            if wanted and not is_written(answer.get("reasoning_content", "").strip(), said):
                self._note(
                    "the chat template leaves out thoughts (reasoning_content) of answers, which are trained "
                    "without them"
                )
            if wanted and not is_written(answer["content"].strip(), said):
                self._note(
                    "the chat template leaves out texts before calls, which are trained without them"
                    if answer.get("tool_calls")
                    else "the chat template writes answers otherwise than their rows, or a part of them "
                    "only: look at them in mode=preview"
                )

    def _marked_spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Spans as the template's {% generation %} blocks give them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        names: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        rendered: Any = render_jinja_template(
            conversations=[self._plain(self._with_ids(conversation.messages))],
            tools=list(conversation.tools) if conversation.tools else None,
            chat_template=self._bounded,
            return_assistant_tokens_mask=True,
            **names,
        )
        texts, marks = rendered
        return texts[0], [(int(start), int(stop)) for start, stop in marks[0]]

    @cached_property
    def _marks_headers(self) -> bool:
        """Whether the {% generation %} blocks take in the header that prompts end with, as Laguna's do."""
        with contextlib.suppress(Exception):  # it may want other turns than these
            _, spans = self._marked_spans(Conversation(SIMPLEST, 0, ""))
            return spans[0][0] < len(self._render(SIMPLEST[:1], prompt=True))
        return False

    def _without_headers(self, conversation: Conversation, text: str, spans: Sequence[Span]) -> list[Span]:
        """Spans that begin where the prompt before each answer ends."""
        messages = conversation.messages
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(answers) != len(spans):
            return [*spans]
        result: list[Span] = []
        for i, (start, stop) in zip(answers, spans, strict=True):
            before = self._render(messages[:i], prompt=True, tools=conversation.tools)
            begins = text.startswith(before) and start <= len(before) <= stop
            if not begins:
                self._note(
                    "the chat template's prompts, as predict and chat have them, end otherwise than rows "
                    "before some of their answers"
                )
            result.append((len(before) if begins else start, stop))
        return result

    def _rendered_spans(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[str, list[Span]]:
        """Spans by rendering up to each answer and through it, of those answers that are trained."""
        try:
            return self._found_spans(conversation, trained)
        except UserError:
            written = self._asis_written(conversation)
            if written == conversation:
                raise
            return self._found_spans(written, trained)

    def _asis_written(self, conversation: Conversation) -> Conversation:
        """The same without what the template leaves out of it: thoughts, and texts before calls. It may write
        them as long as no other answer follows, as gpt-oss' does; then prompts are not as in the whole."""
        turns, tools = list(conversation.messages), conversation.tools
        text = self._render(turns, tools=tools)
        for i, message in enumerate(turns[:-1]):
            if message["role"] != "assistant":
                continue
            without = [{key: value for key, value in message.items() if key != "reasoning_content"}]
            if message.get("tool_calls"):
                without.insert(0, {**without[0], "content": ""})
            for turn in cast("list[Turn]", without):
                with contextlib.suppress(Exception):  # the template may want what it leaves out
                    if self._render([*turns[:i], turn, *turns[i + 1 :]], tools=tools) == text:
                        turns[i] = turn
                        break
        return replace(conversation, messages=tuple(turns))

    def _found_spans(self, conversation: Conversation, trained: Sequence[bool]) -> tuple[str, list[Span]]:
        messages = conversation.messages
        tools = conversation.tools
        text = self._render(messages, tools=tools)
        wanted = iter(trained)
        spans: list[Span] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant" or not next(wanted):
                continue
            before = self._render(messages[:i], prompt=True, tools=tools)
            last = i == len(messages) - 1
            through = text if last else self._render(messages[: i + 1], tools=tools)
            if not (through.startswith(before) and text.startswith(before)):
                why = f"the prompt before messages[{i + 1}] is no prefix of what is rendered with it"
                if self._wants_another_thought(messages, i, tools, before):
                    raise _wrong_thought(conversation.where, why, messages[i])
                raise self._lost(conversation, why, i)
            answer = through[len(before) :]
            stop = len(before) + len(answer)
            if text[len(before) : stop] != answer:
                stop = self._later(text, len(before), answer, message)
                if stop < 0:
                    raise self._lost(
                        conversation,
                        f"the answer in messages[{i + 1}] is rendered differently once others follow",
                        i,
                    )
            spans.append((len(before), stop))
        return text, spans

    def _later(self, text: str, start: int, answer: str, message: Turn) -> int:
        """Where an answer ends of which something changed as turns followed; -1: that cannot be told.

        What stood before it may go (a channel, a <think> block or what was in it), or behind it, and another
        special token may end it, which then is none of the model's.
        """
        kept, ending = answer, self._ending(answer)
        if ending:
            kept = answer.rstrip().removesuffix(ending)
        said = [with_thought(message)["content"].strip()]
        said += [call["function"]["name"] for call in message.get("tool_calls", ())]
        later = text[start : start + len(kept)]
        same = next((i for i, (a, b) in enumerate(zip(kept, later, strict=False)) if a != b), len(later))
        rest = (i for i in range(same, len(kept)) if text.startswith(kept[i:], start + same))
        first = start + same + len(kept) - next(rest, len(kept))
        # Something behind the text may have gone, too, which begins as the token that follows now.
        longest = max(map(len, self._special), default=0)
        for stop in (first, *range(start + same, max(start, start + same - longest), -1)):
            there = [text.count(part, start, stop) for part in said]
            if all(there) and (stop == first or there == [kept.count(part) for part in said]):
                if text.startswith(ending, stop):
                    return stop + len(ending)
                if any(text.startswith(token, stop) for token in self._special):
                    return stop
        return -1

    def _ending(self, answer: str) -> str:
        """The special token that ends an answer; "" = none."""
        answer = answer.rstrip()
        return next((token for token in self._special if answer.endswith(token)), "")

    def _with_end(self, text: str, spans: list[Span], messages: Sequence[Turn]) -> tuple[str, list[Span]]:
        """Let each span end with the special token that ends the turn: taken in, and nothing after it.

        What ends a turn is what stands after the last answer. {% generation %} blocks may leave it out;
        rendered spans hold the line break behind it, which nobody ever generates. Where nothing ends one, the
        token that opens the next turn does, as the model says it (GLM's); it comes behind a last answer, too.
        """
        if not spans:
            return text, spans
        start, stop = spans[-1]
        if not self.marked and stop == len(text) and text.endswith(self._closing):
            stop -= len(self._closing)
            spans = [*spans[:-1], (start, stop)]
        ending = "" if self._marks_no_end else self._ending(text[start:stop])
        if not ending and self.marked:
            follows = text[stop:].lstrip()
            ending = next((token for token in self._special if follows.startswith(token)), "")
            ending = ending or self._ending(text[start:stop])
        # There no text ends with a token but with one of the row's own; calls may.
        if self.openings and not (ending and messages[-1].get("tool_calls")):
            return self._with_opening(text, spans, "tool" if messages[-1].get("tool_calls") else "user")
        if not ending:
            self._note(_ENDLESS)
            return text, spans
        result: list[Span] = []
        for start, stop in spans:
            answer = text[start:stop].rstrip()
            inside = answer.endswith(ending)
            gap = len(text[stop:]) - len(text[stop:].lstrip())
            if text.startswith(ending, stop + gap) and (self._marks_no_end or not inside):
                stop += gap + len(ending)
            elif inside:
                stop = start + len(answer)
            result.append((start, stop))
        return text, result

    @cached_property
    def _marks_no_end(self) -> bool:
        """Whether the {% generation %} blocks leave out the token that ends an answer: one that they end with
        is then the row's own."""
        if self.marked:
            with contextlib.suppress(Exception):  # it may want other turns than these
                text, spans = self._marked_spans(Conversation(SIMPLEST, 0, ""))
                return not self._ending(text[slice(*spans[-1])])
        return False

    def _with_opening(self, text: str, spans: list[Span], role: str) -> tuple[str, list[Span]]:
        """role: who speaks after the last answer."""
        tokens = self.openings
        if spans[-1][1] == len(text):
            text += tokens.get(role, "")
        result: list[Span] = []
        for start, stop in spans:
            if not text[start:stop].endswith(tuple(tokens.values())):  # as a call may, where no text does
                token = next((token for token in tokens.values() if text.startswith(token, stop)), "")
                self._note(_OPENED if token else _ENDLESS)
                stop += len(token)
            result.append((start, stop))
        return text, result

    @cached_property
    def _closing(self) -> str:
        """A special token that the template puts behind a last answer's end, as Phi-3.5's; "" = none."""
        with contextlib.suppress(Exception):  # it may want other turns than these
            text, longer = self._render(SIMPLEST), self._render([*SIMPLEST, SIMPLEST[0]])
            token = self._ending(text)
            before = text.rstrip().removesuffix(token)
            if token and self._ending(before) and longer.startswith(before):
                return "" if longer.startswith(before + token) else text[len(before) :]
        return ""

    @cached_property
    def openings(self) -> dict[str, str]:
        """The special token that begins the turn after an answer, by that turn's role; {} where the template
        ends answers with one."""
        id = "functions.a:0"  # as Kimi's
        called: Turn = {**SIMPLEST[1], "tool_calls": [call_of("a", id)]}
        result: Turn = {"role": "tool", "content": "a", "tool_call_id": id}
        found: dict[str, str] = {}
        with contextlib.suppress(Exception):  # here and below: it may want other turns than these
            if self.marked or self._ending(self._render(SIMPLEST)):
                return found
        for turns in ([*SIMPLEST, SIMPLEST[0]], [SIMPLEST[0], called, result]):
            for form in forms(turns):
                with contextlib.suppress(Exception):
                    before, whole = self._render(form[:-1]), self._render(form)
                    follows = whole.removeprefix(before) if whole.startswith(before) else ""
                    if token := next((token for token in self._special if follows.startswith(token)), ""):
                        found.setdefault(turns[-1]["role"], token)
        return found

    def _wants_another_thought(
        self, messages: Sequence[Turn], i: int, tools: Sequence[dict[str, Any]] | None, before: str
    ) -> bool:
        """Whether the answer messages[i] would follow the prompt `before` if it had a thought, or none."""
        other: Turn = {**with_thought(messages[i])}
        if not other.pop("reasoning_content", None):
            other["reasoning_content"] = "a"
        try:
            return self._render([*messages[:i], other, *messages[i + 1 :]], tools=tools).startswith(before)
        except Exception:  # then it is told what the template does with the answer as it is
            return False

    def _lost(self, conversation: Conversation, why: str, i: int | None = None) -> UserError:
        """i: the answer that is lost; None = any of them."""
        remedy = "give model.chat_template a template with {% generation %} blocks around answers"
        if name := self._named(conversation):
            remedy += f", or set data.template={name}"
        wanted = [answers_wanted(conversation, which) for which in (self.train_on, "last")]
        number = sum(m["role"] == "assistant" for m in conversation.messages[:i])
        if wanted[0] != wanted[1] and not self.marked and (i is None or not wanted[1][number]):
            remedy += ", or set data.train_on=last: answers before the last question are not looked for then"
        return UserError(
            "the answers cannot be located in the rendered conversation",
            where=conversation.where,
            observed=why,
            required="a template whose rendering grows with the conversation, or {% generation %} blocks",
            remedy=remedy,
        )

    def _named(self, conversation: Conversation) -> str:
        """A template of TOKENS that takes the conversation, with tokens of this tokenizer; "" = none."""
        called = conversation.tools or any(m.get("tool_calls") for m in conversation.messages)
        names = ("qwen",) if called else ("qwen", *TOKENS)
        known = self.tokenizer.added_tokens_encoder.keys()
        return next((name for name in names if TOKENS[name] and known >= {*TOKENS[name]}), "")


def _wrong_thought(where: str, why: str, answer: Turn) -> UserError:
    if with_thought(answer).get("reasoning_content"):
        return UserError(
            "the chat template closes the thought before an answer that has one",
            where=where,
            observed=why,
            required="answers without reasoning_content, and without <think> in their content",
            remedy="delete that, or give model.chat_template or data.template one that leaves thoughts open",
        )
    return UserError(
        "the chat template opens a thought before an answer that has none",
        where=where,
        observed=why,
        required="what the model thought before the answer, as reasoning_content beside its content",
        remedy="add that, or give model.chat_template or data.template one that opens no thought",
    )
