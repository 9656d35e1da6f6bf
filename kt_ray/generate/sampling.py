"""From logits to tokens, row by row, with transformers' logits processors in `generate`'s order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kt_ray.generate.requests import Request, Token

NOT_FINITE = "the logits of its next token are not finite"


class RowSampler:
    """Chooses the tokens of one request. Runs on the CPU; its random numbers are its own.

    Attributes:
        tokens: chosen so far.
    """

    def __init__(self, number: int, request: Request) -> None:
        self.number = number
        self.request = request
        self.tokens: list[int] = []
        self._processors = _processors(request)
        self._seen = torch.tensor([request.prompt], dtype=torch.int64) if self._processors else None
        self._generator: torch.Generator | None = None
        if not request.sampling.greedy:
            self._generator = torch.Generator().manual_seed(request.sampling.seed)

    @property
    def plain(self) -> bool:
        """Whether the next token is simply the most probable one."""
        sampling = self.request.sampling
        return sampling.greedy and not self._processors and sampling.logprobs is None

    def next(self, logits_V: Tensor) -> Token:
        """Choose one token from float32 logits [V] of the last position."""
        sampling = self.request.sampling
        if not bool(torch.isfinite(logits_V).any()) or bool(torch.isnan(logits_V).any()):
            return failed(self.number, NOT_FINITE)
        scores = logits_V.unsqueeze(0)
        if self._processors:
            scores = self._processors(self._seen, scores.clone())
        if self._generator is None:
            token = int(scores.argmax(dim=-1))
        else:
            probabilities = torch.softmax(scores, dim=-1)
            token = int(torch.multinomial(probabilities, 1, generator=self._generator))
        if sampling.logprobs is None:
            return self.take(token)
        own = torch.log_softmax(logits_V, dim=-1)
        if sampling.candidates:
            ids = torch.tensor(sampling.candidates)
            values = own[ids]
        else:
            values, ids = own.topk(min(sampling.logprobs, own.numel()))
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return self.take(token, float(own[token]), top)

    def take(self, token: int, logprob: float | None = None, top: tuple[Any, ...] = ()) -> Token:
        """Note a chosen token; says whether it is the last one."""
        sampling = self.request.sampling
        self.tokens.append(token)
        if self._seen is not None:
            self._seen = torch.cat([self._seen, torch.tensor([[token]])], dim=1)
        finish = ""
        if token in sampling.eos:
            finish = "stop"
        elif len(self.tokens) >= sampling.max_new_tokens:
            finish = "length"
        return Token(self.number, token, logprob, top, finish)


def sample(rows: Sequence[RowSampler], logits_BV: Tensor) -> list[Token]:
    """One token for each row of a batch, from float32 logits [b, V] on any device."""
    if all(row.plain for row in rows):
        best = logits_BV.max(dim=-1)
        # A NaN among a row's logits is its maximum.
        bad = (~torch.isfinite(best.values)).tolist()
        return [
            failed(row.number, NOT_FINITE) if wrong else row.take(token)
            for row, token, wrong in zip(rows, best.indices.tolist(), bad, strict=True)
        ]
    tokens = []
    for row, logits_V in zip(rows, logits_BV.cpu(), strict=True):
        try:
            tokens.append(row.next(logits_V))
        except Exception as error:  # of this row's settings: the others of its batch go on
            tokens.append(failed(row.number, error))
    return tokens


def failed(number: int, error: object) -> Token:
    """The end of a request that went wrong."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error)
    return Token(number, -1, finish="error", error=text)


def _processors(request: Request) -> Any:
    """transformers' LogitsProcessorList for the settings; empty = the logits as they are."""
    from transformers.generation import logits_process as hf

    sampling = request.sampling
    processors = hf.LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.min_new_tokens > 0 and sampling.eos:
        limits = len(request.prompt), sampling.min_new_tokens, list(sampling.eos)
        processors.append(hf.MinNewTokensLengthLogitsProcessor(*limits, device="cpu"))
    if not sampling.greedy:
        if sampling.temperature != 1.0:
            processors.append(hf.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k > 0:
            processors.append(hf.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            processors.append(hf.TopPLogitsWarper(sampling.top_p))
        if sampling.min_p > 0.0:
            processors.append(hf.MinPLogitsWarper(sampling.min_p))
    return processors
