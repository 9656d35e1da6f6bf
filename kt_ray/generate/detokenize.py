"""Tokens to text as they come, and where stop strings end it."""

from __future__ import annotations

import itertools
from typing import Any

_UNFINISHED = "�"  # what a tokenizer makes of bytes that are no whole character, or none yet

# Numbers of tokens of the text before an answer that its first one is decoded behind: of bytes that begin
# amid a character of up to four, some tokenizers decode none.
_BEFORE = (8, 9, 10, 11)

_LONGEST_CONTEXT = 64  # tokens that are decoded again for the next one, if none of them has text

# Harmony's tokens (gpt-oss): a message is <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT.
CHANNEL = "<|channel|>"
_START, _CONSTRAIN, _MESSAGE = "<|start|>", "<|constrain|>", "<|message|>"
# Kimi-K3's: <|open|>TAG<|sep|>TEXT<|close|>TAG<|sep|>.
_OPEN, _CLOSE, _SEP = "<|open|>", "<|close|>", "<|sep|>"
# Solar-Open's: <|begin|>ROLE<|think|>TEXT<|end|><|begin|>ROLE<|content|>TEXT.
_BEGIN, _THINK, _CONTENT, _CALLS, _END = "<|begin|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|end|>"
_DIALECTS = ((_START, CHANNEL, _MESSAGE), (_OPEN, _CLOSE, _SEP), (_BEGIN, _THINK, _CONTENT, _CALLS, _END))
_HEADERS_BEGIN = (_START, CHANNEL, _OPEN, _CLOSE, _BEGIN)
_HEADERS_END = (_MESSAGE, _SEP, _THINK, _CONTENT, _CALLS)
_LONGEST_HEADER = 64  # tokens; what goes on is no header

# What is given out for tokens that stand alone: those around thoughts of Mistral, Cohere and Gemma, and those
# around answers of Cohere.
_INSTEAD = {
    **dict.fromkeys(("<think>", "[THINK]", "<|START_THINKING|>", "<|channel>"), "<think>"),
    **dict.fromkeys(("</think>", "[/THINK]", "<|END_THINKING|>", "<channel|>"), "</think>"),
    **dict.fromkeys(("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"), ""),
}


class TextStream:
    """The text of one answer, piece by piece, in whole characters: bytes that make none are left out.

    What a model thinks stands in <think>, whatever its own marks are. Of Harmony's messages the headers are
    no text, and those of the channel `analysis` are thoughts. A header that names a tool stays: it is part of
    the call, as are Kimi-K3's tags of calls, which are given out as <TAG> and </TAG>.

    Args:
        tokenizer: of the model; None = there is no text.
        stop: strings that end the answer; neither they nor what comes after them is given out.
        skip: token ids that are no text (eos).
        before: tokens of a text that this one goes on.

    Attributes:
        text: given out so far.
        stopped: whether a stop string was found, or (of Solar-Open) another's message.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...] = (),
        skip: tuple[int, ...] = (),
        before: tuple[int, ...] = (),
    ) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._skip = frozenset(skip)
        self._ends = _special(tokenizer, stop)
        tails = (list(before[-size:]) for size in _BEFORE)
        # None: what completes the last character is not known apart.
        self._ids = next((ids for ids in tails if not self._decode(ids).endswith(_UNFINISHED)), [])
        self._settled = len(self._ids)  # tokens before this one are decoded for good
        self._context = 0  # decoding begins here: some tokenizers drop the first token's space
        self._held = ""  # decoded, but may be the beginning of a stop string
        self._marks = self._known_marks()  # token id -> one of _DIALECTS' tokens, or of _INSTEAD's
        self._header: list[int] | None = None  # tokens of the header that is being read
        self._thinking = False  # whether a <think> is open
        # The prompt holds the role of the first message, so a tool that is named behind it comes as text.
        self._first = True  # whether no header was read yet
        self._addressed = False  # whether the text before the header that is being read names a tool

    @property
    def decoded(self) -> int:
        """Characters so far, those held back included."""
        return len(self.text) + len(self._held)

    def add(self, token: int) -> str:
        """The text that can be given out after one more token; often "" or more than one character."""
        if self.stopped or token in self._skip:
            return ""
        if token in self._ends:  # what was held back is text of the answer
            piece, self.stopped = self.end(), True
            return piece
        mark = self._marks.get(token, "")
        if mark in _INSTEAD:
            return self._end_message(_INSTEAD[mark])
        # Of Solar-Open's first header the prompt holds the beginning.
        if mark in _HEADERS_END and (self._header is not None or mark not in (_MESSAGE, _SEP)):
            return self._end_header(self._header or [], mark)
        if mark == _END:
            return self._end_message()
        if mark in _HEADERS_BEGIN and self._header is None:
            self._header = [token]
            return self._end_message()
        if self._header is not None and len(self._header) < _LONGEST_HEADER:
            self._header.append(token)
            return ""
        if self._header is not None:
            self._ids, self._header = self._header, None
        self._ids.append(token)
        piece = self._unsettled()
        if piece.endswith(_UNFINISHED) and len(self._ids) - self._settled < 8:
            return ""
        if piece or len(self._ids) - self._context > _LONGEST_CONTEXT:
            self._context = self._settled  # tokens without text, as special ones, are no context
        self._settled = len(self._ids)
        return self._give(piece)

    def end(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        piece = self._give(self._unsettled())
        self._settled = len(self._ids)
        if not self.stopped:
            piece += self._held
            self.text += self._held
        self._held = ""
        return piece

    def _end_message(self, more: str = "") -> str:
        """The rest of a message's text and `more` behind it: what follows is decoded apart from it."""
        rest, thinking = self._unsettled(), self._thinking
        self._ids, self._settled, self._context, self._thinking = [], 0, 0, False
        so_far = f"{self.text}{self._held}{rest}"
        self._addressed, self._first = self._first and so_far.lstrip().startswith("to="), False
        return self._give(rest + ("</think>" if thinking else more))

    def _end_header(self, header: list[int], mark: str) -> str:
        """What a header adds to the text; `mark` ends it."""
        self._header = None
        role, _, channel = self._decode(header, special=True).partition(CHANNEL)
        if mark == _SEP:
            closes, tag = role.startswith(_CLOSE), role.removeprefix(_OPEN).removeprefix(_CLOSE)
            inside = tag.split(" ")[0] in ("message", "response")
            return "" if inside else self._give(f"</{tag}>" if closes else f"<{tag}>")
        if mark != _MESSAGE:
            rest, self._thinking = self._end_message(), mark == _THINK
            if role.removeprefix(_BEGIN).strip() not in ("", "assistant"):  # another speaks
                rest, self.stopped = rest + self.end(), True
                return rest
            return rest + self._give({_THINK: "<think>", _CALLS: _CALLS}.get(mark, ""))
        self._thinking = channel.startswith("analysis")
        # A call has one text, wherever its header names the tool.
        role, channel = role.removeprefix(_START).removeprefix("assistant"), channel.replace(_CONSTRAIN, "")
        words = f"{role} {channel}".split()
        if self._addressed:
            return self._give(f" {' '.join(words)}\n")
        if any(word.startswith("to=") for word in words):
            return self._give(" ".join(sorted(words, key=lambda word: not word.startswith("to="))) + "\n")
        return self._give("<think>" if self._thinking else "")

    def _give(self, piece: str) -> str:
        waiting = self._held + piece.replace(_UNFINISHED, "")
        places = [place for place in map(waiting.find, self._stop) if place >= 0]
        if places:
            self.stopped = True
            out, self._held = waiting[: min(places)], ""
        else:
            held = len(waiting)  # a stop string may be megabytes long
            beginnings = (stop[:size] for stop in self._stop for size in range(1, min(len(stop), held + 1)))
            self._held = max(filter(waiting.endswith, beginnings), key=len, default="")
            out = waiting.removesuffix(self._held)
        self.text += out
        return out

    def _unsettled(self) -> str:
        """Text of the tokens that are not decoded for good."""
        before = self._decode(self._ids[self._context : self._settled])
        return self._decode(self._ids[self._context :])[len(before) :]

    def _known_marks(self) -> dict[int, str]:
        """Token id -> mark: the dialects of which the tokenizer has all tokens, and what stands alone."""
        if self._tokenizer is None:
            return {}
        names, unknown = itertools.chain(_INSTEAD, *_DIALECTS), (None, self._tokenizer.unk_token_id)
        named = {name: self._tokenizer.convert_tokens_to_ids(name) for name in names}
        ids = {name: id for name, id in named.items() if id not in unknown}
        # <think> is text of itself in most tokenizers, and decoded with what stands before it.
        known = [name for name in _INSTEAD if name in ids and self._decode([ids[name]]) != _INSTEAD[name]]
        for dialect in _DIALECTS:
            known += dialect if ids.keys() >= {*dialect} else ()
        return {ids[name]: name for name in known}

    def _decode(self, ids: list[int], special: bool = False) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )


def _special(tokenizer: Any, stop: tuple[str, ...]) -> frozenset[int]:
    """The stop strings that are special tokens or marks, as ids: these are no text, in which they could be
    found."""
    if not stop or tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    stops = {id: token for id, token in added.items() if token.content in stop}
    marks = {*itertools.chain(_INSTEAD, *_DIALECTS)}
    return frozenset(id for id, token in stops.items() if token.special or token.content in marks)
