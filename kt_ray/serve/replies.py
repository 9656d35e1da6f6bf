"""Response bodies. One accumulator serves streams and whole answers, so a stream adds up to the answer."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kt_ray.generate.generator import Piece
from kt_ray.generate.requests import Token
from kt_ray.serve.completions import now

_UNFINISHED = "�"
_LEAST = -9999.0  # what an impossible token's log-probability is called: JSON has no infinity


@dataclass(frozen=True)
class Scored:
    """A token with its log-probability; `at`: characters of the answer before it."""

    token: Token
    at: int


@dataclass(frozen=True)
class Delta:
    """What one piece added to an answer: text and tokens that are certain now; finish "" = more follow."""

    text: str
    scored: tuple[Scored, ...]
    finish: str


class Choice:
    """One answer, piece by piece.

    Args:
        eos: token ids that end an answer and are no part of it.

    Attributes:
        text, scored, finish: so far. tokens: generated, the ending one included.
    """

    def __init__(self, eos: Sequence[int]) -> None:
        self.text = ""
        self.scored: list[Scored] = []
        self.finish = ""
        self.tokens = 0
        self._eos = frozenset(eos)
        self._held: list[Scored] = []
        self._last = -1

    def add(self, piece: Piece) -> Delta:
        """What it adds. Tokens are given out once their text is: a stop string takes both back."""
        token = piece.token
        self.text += piece.text
        if token.token >= 0:
            self.tokens += 1
            if token.logprob is not None and token.token not in self._eos:
                self._held.append(Scored(token, piece.at))
        self.finish = token.finish
        out = [one for one in self._held if one.at < len(self.text)]
        if self.finish and (self.finish == "length" or token.token in self._eos):
            out = self._held  # no stop string ended it: tokens without text of their own count, too
        self._held = [] if self.finish else self._held[len(out) :]
        self.scored += out
        return Delta(piece.text, tuple(out), self.finish)


class Replies(ABC):
    """The bodies of one HTTP request's answer.

    Args:
        tokenizer: shows tokens.
        number: unique, for the id. model: as the client named it. fingerprint: of the weights.
        prompt_tokens: of all prompts.
    """

    kind = ""
    prefix = ""

    def __init__(
        self, tokenizer: Any, number: str, model: str, fingerprint: str, prompt_tokens: int, logprobs: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._logprobs = logprobs
        self._head = {
            "id": f"{self.prefix}-{number}",
            "created": now(),
            "model": model,
            "system_fingerprint": f"kt_{fingerprint[:12]}",
        }

    def usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        completion = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    @abstractmethod
    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream that counts tokens."""

    def _spelled(self, token: int) -> tuple[str, list[int] | None]:
        """A token's text, and its bytes (None = it stands for none)."""
        return spell(self._tokenizer, token)


class ChatReplies(Replies):
    """Of POST /v1/chat/completions."""

    prefix = "chatcmpl"

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        parts = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._scores(choice.scored),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._body("chat.completion", parts), "usage": self.usage(choices)}

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that says who speaks."""
        return self._chunk(index, {"role": "assistant", "content": "", "refusal": None})

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.scored:
            chunks.append(self._chunk(index, {"content": delta.text}, self._scores(delta.scored)))
        if delta.finish:
            chunks.append(self._chunk(index, {}, finish=delta.finish))
        return chunks

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._body("chat.completion.chunk", []), "usage": self.usage(choices)}

    def _chunk(
        self, index: int, delta: dict[str, Any], scores: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        part = {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}
        return self._body("chat.completion.chunk", [part])

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for one in scored:
            top = [self._score(token, logprob) for token, logprob in one.token.top]
            assert one.token.logprob is not None
            content.append({**self._score(one.token.token, one.token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _score(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._spelled(token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": raw}


class CompletionReplies(Replies):
    """Of POST /v1/completions.

    Attributes:
        echoes: texts that stand before the answers, one per answer.
    """

    prefix = "cmpl"
    echoes: Sequence[str] = ()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        parts = []
        for index, choice in enumerate(choices):
            scores = self._scores(choice.scored)
            parts.append(self._part(index, self._echo(index) + choice.text, scores, choice.finish))
        return {**self._body("text_completion", parts), "usage": self.usage(choices)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with the prompt, if it is wanted."""
        echo = self._echo(index)
        return self._body("text_completion", [self._part(index, echo, None, None)]) if echo else None

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not (delta.text or delta.scored or delta.finish):
            return []
        part = self._part(index, delta.text, self._scores(delta.scored), delta.finish or None)
        return [self._body("text_completion", [part])]

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._body("text_completion", []), "usage": self.usage(choices)}

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    @staticmethod
    def _part(index: int, text: str, scores: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _scores(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        scores: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for one in scored:
            assert one.token.logprob is not None
            text, own = self._shown(one.token.token), max(one.token.logprob, _LEAST)
            top = {self._shown(token): max(logprob, _LEAST) for token, logprob in one.token.top}
            scores["tokens"].append(text)
            scores["token_logprobs"].append(own)
            scores["top_logprobs"].append({**top, text: own})
            scores["text_offset"].append(one.at)
        return scores

    def _shown(self, token: int) -> str:
        """A token as a key: parts of characters as their bytes, which would look alike otherwise."""
        text, raw = self._spelled(token)
        if _UNFINISHED in text and raw is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text


def spell(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """A token's text, and its bytes (None = it stands for none).

    Args:
        tokenizer: a fast tokenizer. Parts of characters have bytes where it is byte-level.
    """
    text = str(tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False))
    if _UNFINISHED not in text:
        return text, list(text.encode())
    spelling = str(tokenizer.convert_ids_to_tokens(token))
    if all(letter in _byte_letters() for letter in spelling):
        return text, [_byte_letters()[letter] for letter in spelling]
    if spelling.startswith("<0x") and spelling.endswith(">"):  # SentencePiece's byte tokens
        return text, [int(spelling[3:-1], 16)]
    return text, None


@functools.cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
