"""Response bodies. One accumulator serves streams and whole answers, so a stream adds up to the answer."""

from __future__ import annotations

import functools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from kt_ray.generate.generator import Piece
from kt_ray.serve.completions import CompletionService
from kt_ray.serve.schemas import ChatRequest, CompletionRequest

_UNFINISHED = "�"
_LEAST = -9999.0  # what an impossible token's log-probability is called: JSON has no infinity


class Delta(NamedTuple):
    """What a piece added to an answer: text and tokens that are certain now; finish "" = more follow."""

    text: str
    scored: Sequence[Piece]
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
        self.scored: list[Piece] = []
        self.finish = ""
        self.tokens = 0
        self._eos = frozenset(eos)
        self._held: list[Piece] = []

    def add(self, piece: Piece) -> Delta:
        """What it adds. Tokens are given out once their text is: a stop string takes both back."""
        token = piece.token
        self.text += piece.text
        if token.token >= 0:
            self.tokens += 1
            if token.logprob is not None and token.token not in self._eos:
                self._held.append(piece)
        self.finish = token.finish
        out = [one for one in self._held if one.at < len(self.text)]
        if self.finish and (self.finish == "length" or token.token in self._eos):
            out = self._held  # no stop string ended it: tokens without text of their own count, too
        self._held = [] if self.finish else self._held[len(out) :]
        self.scored += out
        return Delta(piece.text, out, self.finish)


class Replies(ABC):
    """The bodies of one HTTP request's answer."""

    prefix: ClassVar[str]  # of the id
    kind: ClassVar[str]  # of a whole answer
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        service: CompletionService,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self._tokenizer = service.encoder.tokenizer
        self._prompt_tokens = sum(map(len, prompts))
        self._logprobs = body.top is not None
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": f"kt_{service.served.fingerprint[-12:]}",
        }

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer at once."""
        parts = [
            {
                "index": index,
                **self._content(index, choice.text),
                "logprobs": self._scores(choice.scored),
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._body(self.kind, parts), "usage": self._usage(choices)}

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of an answer, if it has one of its own."""

    @abstractmethod
    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """What a piece adds to a stream."""

    def usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The last chunk of a stream that counts tokens."""
        return {**self._body(self.chunk_kind, []), "usage": self._usage(choices)}

    @abstractmethod
    def _content(self, index: int, text: str) -> dict[str, Any]:
        """A whole answer's text."""

    @abstractmethod
    def _scores(self, scored: Sequence[Piece]) -> dict[str, Any] | None:
        """Log-probabilities, if they are asked for."""

    def _usage(self, choices: Sequence[Choice]) -> dict[str, int]:
        completion = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
        }

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _chunk(
        self, index: int, content: dict[str, Any], scores: Any = None, finish: str | None = None
    ) -> dict[str, Any]:
        part = {"index": index, **content, "logprobs": scores, "finish_reason": finish}
        return self._body(self.chunk_kind, [part])


class ChatReplies(Replies):
    """Of POST /v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any]:
        """The chunk that says who speaks."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": "", "refusal": None}})

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        chunks = []
        if delta.text or delta.scored:
            content = {"delta": {"content": delta.text}}
            chunks.append(self._chunk(index, content, self._scores(delta.scored)))
        if delta.finish:
            chunks.append(self._chunk(index, {"delta": {}}, finish=delta.finish))
        return chunks

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _scores(self, scored: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = []
        for token in (piece.token for piece in scored):
            assert token.logprob is not None
            top = [self._score(*each) for each in token.top]
            content.append({**self._score(token.token, token.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _score(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = spell(self._tokenizer, token)
        return {"token": text, "logprob": max(logprob, _LEAST), "bytes": raw}


class CompletionReplies(Replies):
    """Of POST /v1/completions. With `echo` the prompts stand before the answers."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, service: CompletionService, body: CompletionRequest, prompts: Sequence[tuple[int, ...]]
    ) -> None:
        super().__init__(service, body, prompts)
        shown = body.prompts if body.echo else [""] * len(prompts)
        texts = [p if isinstance(p, str) else str(self._tokenizer.decode(p)) for p in shown]
        self._echoes = [text for text in texts for _ in range(body.n)]

    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with the prompt, if it is wanted."""
        echo = self._echoes[index]
        return self._chunk(index, {"text": echo}) if echo else None

    def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        if not any(delta):
            return []
        scores = self._scores(delta.scored)
        return [self._chunk(index, {"text": delta.text}, scores, delta.finish or None)]

    def _content(self, index: int, text: str) -> dict[str, Any]:
        return {"text": self._echoes[index] + text}

    def _scores(self, scored: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        scores: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for piece in scored:
            assert piece.token.logprob is not None
            text, own = self._shown(piece.token.token), max(piece.token.logprob, _LEAST)
            top = {self._shown(token): max(logprob, _LEAST) for token, logprob in piece.token.top}
            scores["tokens"].append(text)
            scores["token_logprobs"].append(own)
            scores["top_logprobs"].append({**top, text: own})
            scores["text_offset"].append(piece.at)
        return scores

    def _shown(self, token: int) -> str:
        """A token as a key: parts of characters as their bytes, which would look alike otherwise."""
        text, raw = spell(self._tokenizer, token)
        if _UNFINISHED in text and raw is not None:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
        return text


def spell(tokenizer: Any, token: int) -> tuple[str, list[int] | None]:
    """A token's text, and its bytes (None = it stands for none).

    Args:
        tokenizer: a fast tokenizer. Parts of characters have bytes where it is byte-level.
    """
    spelling = str(tokenizer.convert_ids_to_tokens(token))
    text = _decoded(tokenizer, [token])
    if spelling.startswith("▁"):  # SentencePiece's space, which a text's first token loses
        text = _decoded(tokenizer, [token, token])[len(text) :]
    if _UNFINISHED not in text:
        return text, list(text.encode())
    if spelling.startswith("<0x") and spelling.endswith(">"):  # SentencePiece's byte tokens
        return text, [int(spelling[3:-1], 16)]
    if all(letter in _byte_letters() for letter in spelling):
        return text, [_byte_letters()[letter] for letter in spelling]
    return text, None


def _decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@functools.cache
def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {letter: byte for byte, letter in bytes_to_unicode().items()}
