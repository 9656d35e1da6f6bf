"""Tokens to text as they come, and where stop strings end it."""

from __future__ import annotations

from typing import Any

_UNFINISHED = "�"  # what a tokenizer makes of bytes that are no whole character, or none yet

# Numbers of tokens of the text before an answer that its first one is decoded behind: of bytes that begin
# amid a character of up to four, some tokenizers decode none.
_BEFORE = (8, 9, 10, 11)

_LONGEST_CONTEXT = 64  # tokens that are decoded again for the next one, if none of them has text

# Harmony's tokens (gpt-oss): a message is <|start|>ROLE<|channel|>CHANNEL<|message|>TEXT.
CHANNEL = "<|channel|>"
_START, _CONSTRAIN, _MESSAGE = "<|start|>", "<|constrain|>", "<|message|>"
_LONGEST_HEADER = 64  # tokens; what goes on is no header


class TextStream:
    """The text of one answer, piece by piece, in whole characters: bytes that make none are left out.

    Of Harmony's messages the headers are no text, and those of the channel `analysis` stand in <think>, as
    other models write what they think. A header that names a tool stays: it is part of the call.

    Args:
        tokenizer: of the model; None = there is no text.
        stop: strings that end the answer; neither they nor what comes after them is given out.
        skip: token ids that are no text (eos).
        before: tokens of a text that this one goes on.

    Attributes:
        text: given out so far.
        stopped: whether a stop string was found.
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
        self._marks = _marks(tokenizer)  # token id -> one of Harmony's tokens
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
        if mark == _MESSAGE and self._header is not None:
            return self._end_header(self._header)
        if mark in (_START, CHANNEL) and self._header is None:
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

    def _end_message(self) -> str:
        """The rest of a message's text: what follows is decoded apart from it."""
        rest, thinking = self._unsettled(), self._thinking
        self._ids, self._settled, self._context, self._thinking = [], 0, 0, False
        so_far = f"{self.text}{self._held}{rest}"
        self._addressed, self._first = self._first and so_far.lstrip().startswith("to="), False
        return self._give(rest + ("</think>" if thinking else ""))

    def _end_header(self, header: list[int]) -> str:
        """What a header adds to the text."""
        self._header = None
        role, _, channel = self._decode(header, special=True).partition(CHANNEL)
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

    def _decode(self, ids: list[int], special: bool = False) -> str:
        if self._tokenizer is None or not ids:
            return ""
        return str(
            self._tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )


def _special(tokenizer: Any, stop: tuple[str, ...]) -> frozenset[int]:
    """The stop strings that are special tokens, as ids: these are no text, in which they could be found."""
    if not stop or tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(id for id, token in added.items() if token.special and token.content in stop)


def _marks(tokenizer: Any) -> dict[int, str]:
    """Token id -> Harmony's token, if the tokenizer has all of them."""
    names = (_START, CHANNEL, _MESSAGE)
    if tokenizer is None:
        return {}
    ids = [tokenizer.convert_tokens_to_ids(name) for name in names]
    known = all(id is not None and id != tokenizer.unk_token_id for id in ids)
    return dict(zip(ids, names, strict=True)) if known else {}
