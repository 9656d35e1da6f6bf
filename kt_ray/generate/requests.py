"""What travels between the driver and the attention workers during generation. numpy only.

A *session* is one stretch of generation on a cluster. In it every replica's last stage, its
*coordinator*, makes *steps*: in one step all rows that run get one token, and rows that were waiting
are read in (prefill). Rows that compute with the same adapter share a *cohort*: one batch with one cache.
Requests with the same prompt and adapter share its prefill.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kt_ray.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one request are chosen."""

    max_new_tokens: int = 256  # at most this many
    min_new_tokens: int = 0  # no token of `eos` before this many
    temperature: float = 0.0  # 0 = the most probable token always (greedy); so is less than 1e-5
    top_p: float = 1.0  # share of the probability that is kept, 1 = all
    top_k: int = 0  # most probable tokens kept, 0 = all
    min_p: float = 0.0  # least probability kept, relative to the most probable token's; 0 = all
    repetition_penalty: float = 1.0  # as in CTRL (Keskar et al. 2019); 1 = none
    seed: int = 0  # of this request's random draws; the batch that it runs in does not matter
    eos: tuple[int, ...] = ()  # token ids that end the answer (they are its last token)
    # None = no log-probabilities; n = the chosen token's and those of the n most probable, of the
    # model's own distribution (temperature 1, nothing cut off)
    logprobs: int | None = None
    # tokens whose log-probabilities are told instead of the most probable ones', in this order (with
    # logprobs=0)
    candidates: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, good, required in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, "0 to max_new_tokens"),
            ("temperature", 0 <= self.temperature < float("inf"), "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "more than 0"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2**63 - 1"),
            ("logprobs", self.logprobs is None or self.logprobs >= 0, "null or at least 0"),
            ("candidates", not self.candidates or self.logprobs == 0, "none, or logprobs=0 beside them"),
        ):
            if not good:
                raise UserError(
                    f"{name} is out of range",
                    observed=getattr(self, name),
                    required=required,
                    remedy=f"correct {name}",
                )

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # less overflows float32 logits, and means the same


@dataclass(frozen=True)
class Request:
    """A prompt to go on from."""

    prompt: tuple[int, ...]  # token ids, at least one
    sampling: Sampling = field(default_factory=Sampling)
    # False = the base model answers, as if there were no LoRA; True = with the LoRA that was loaded; a
    # name = with the adapter kept under it (`ActorCluster.load_adapters`)
    adapter: bool | str = True
    # strings that end the answer and are not part of it (the driver looks for them)
    stop: tuple[str, ...] = ()
    # whether the answer's text goes on the prompt's: some tokenizers take the space off a text's first word
    continues: bool = False

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer at the most."""
        return len(self.prompt) + self.sampling.max_new_tokens

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UserError(
                "a prompt has no tokens",
                required="at least one",
                remedy="write a prompt, or put the beginning-of-sequence token there",
            )
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty", observed=self.stop, remedy="leave it out")


@dataclass(frozen=True)
class Token:
    """One token of an answer, or its end."""

    request: int  # number that `submit` gave
    token: int  # the id; -1 where only the end is told (a cancelled request)
    logprob: float | None = None  # natural logarithm of its probability, where asked for
    # (id, logprob) of the most probable ones, falling, or of Sampling.candidates in their order
    top: tuple[tuple[int, float], ...] = ()
    finish: str = ""  # "" = more follow; "stop" (an eos token), "length", "cancelled" or "error"
    error: str = ""  # what went wrong, where finish is "error": of this request alone, others go on


@dataclass(frozen=True)
class SessionSpec:
    """One session, the same for all actors."""

    number: int  # another one for every session of a cluster: part of messages' tags
    max_rows: int = 32  # rows of one replica that run at the same time; others wait
    # tokens, padding included, that one step reads in at the most (a single prompt may be longer)
    prefill_tokens: int = 2048
    pad_id: int = 0  # an id to fill padding with: any that the embedding has
    # room in one replica's caches: a request is taken in when the longest that its batch's answers can
    # get, times their number, is not more; None = whenever a row is free
    cache_tokens: int | None = None
    # whether replicas that decode go through the layers together, so that their tokens share engine calls;
    # not in steps of so few rows that their sums would have another order then
    joined: bool = False

    def tag(self, step: int) -> int:
        """A number for a step's messages that no step of another session has."""
        return (self.number << 32) + step

    def holds(self, tag: int) -> bool:
        """Whether `tag` is of this session."""
        return tag >> 32 == self.number


@dataclass(frozen=True)
class Batch:
    """Rows that pass the layers together in one step."""

    cohort: str  # which cache they have
    adapter: bool | str  # whether LoRA takes part, or which (see Request)
    rows: tuple[int, ...]  # request numbers, in the order of the cache's rows
    ids: np.ndarray  # int64 [b, s] tokens, padded on the left; fresh: of different prompts
    lengths: np.ndarray  # int64 [b] valid ones of each
    fresh: bool  # rows without a cache so far: they join the cohort after the step
    prompts: tuple[int, ...] = ()  # fresh: the place in `ids` of each row's prompt
    keep: int | None = None  # fresh: the place of a prompt that is kept for requests that still wait


@dataclass(frozen=True)
class Resumed:
    """Rows that go on from the prompt that was kept: nothing of it is computed again."""

    cohort: str  # that they join
    rows: tuple[int, ...]  # request numbers
    length: int  # tokens of the prompt


@dataclass(frozen=True)
class Step:
    """What all stages of a replica do next."""

    number: int  # of the step in its session, from 0
    drop: tuple[int, ...] = ()  # rows that have ended: they leave their cohorts before anything is computed
    resumed: Resumed | None = None  # rows that join their cohort then
    forget: bool = False  # the kept prompt goes, once these rows have it
    batches: tuple[Batch, ...] = ()  # to compute
    last: bool = False  # the session is over; nothing is computed

    @property
    def decoded_rows(self) -> int:
        """Rows where all it does is one batch's next token; else 0."""
        batch, *others = self.batches or (None,)
        return 0 if batch is None or others or batch.fresh else len(batch.rows)

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Tokens of prompts that are computed, and those that further rows share."""
        fresh = [batch for batch in self.batches if batch.fresh]
        computed = sum(int(batch.lengths.sum()) for batch in fresh)
        asked = sum(int(batch.lengths[list(batch.prompts)].sum()) for batch in fresh)
        resumed = 0 if self.resumed is None else len(self.resumed.rows) * self.resumed.length
        return computed, asked - computed + resumed


@dataclass
class GenerationReport:
    """One actor's session: steps (an expert actor: engine calls), tokens chosen, seconds by what it did.

    Of a worker also tokens of prompts: computed, and taken over from another request with the same prompt.

    A worker's terms: "attention", "experts" (waiting for them), "head", "record" (call arguments, caches),
    "sample", "stages" (sending to and waiting for others), "idle" (no request). An expert actor's: "engine",
    "wait".
    """

    rank: int
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, term: str, seconds: float) -> None:
        self.seconds[term] = self.seconds.get(term, 0.0) + seconds

    @contextmanager
    def timed(self, term: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.add(term, time.monotonic() - start)
