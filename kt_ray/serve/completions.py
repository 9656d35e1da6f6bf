"""API requests become generator requests; the generated pieces come back onto the event loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kt_ray.data.row_types import Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer, Generator, Piece
from kt_ray.generate.requests import Request, Sampling
from kt_ray.serve.api_errors import ApiError, engine_stopped, of_user_error, shutting_down
from kt_ray.serve.schemas import ChatMessage, ChatRequest, CompletionRequest

FAREWELL = 5.0  # seconds that running answers get when the server is stopped
_LONG = 20_000  # characters from which on tokenizing does not hold the event loop up
_COMPLETION_TOKENS = 16  # of a completion that names no limit, as in OpenAI's API


@dataclass(frozen=True)
class Served:
    """What is served; travels to the process that answers."""

    name: str  # of the base model
    adapters: tuple[str, ...]  # names of the others
    tokenizer: str  # directory
    template: str | None  # file of a chat template, or None
    template_name: str | None  # see DataConfig
    eos: tuple[int, ...]  # token ids that end an answer
    context: int  # tokens that prompt and answer may have together
    max_tokens: int | None  # of one answer; None = what the context leaves
    running: int  # answers that are generated at the same time, over all replicas
    max_queue: int  # answers that wait
    session: Mapping[str, Any]  # arguments of the Generator: max_rows, prefill_tokens, cache_tokens
    max_body: int  # bytes of a request
    key: bytes | None  # digest of the clients' key, or None
    fingerprint: str  # of the model's weights
    created: int  # seconds since 1970


class Job:
    """The answers to one HTTP request, as one stream of (number of the answer, piece)."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self._queue: asyncio.Queue[tuple[int, Piece | BaseException]] = asyncio.Queue()

    def put(self, number: int, piece: Piece | BaseException) -> None:
        """On the event loop."""
        self._queue.put_nowait((number, piece))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Until every answer has ended.

        Raises:
            ApiError: the service failed, or is being shut down.
        """
        running = len(self.answers)
        while running:
            number, piece = await self._queue.get()
            if isinstance(piece, BaseException):
                raise engine_stopped(piece)
            if piece.token.finish == "error":
                raise ApiError(500, f"this answer failed: {piece.token.error}", code="answer_failed")
            if piece.token.finish == "cancelled":
                raise shutting_down()
            if piece.token.finish:
                running -= 1
            yield number, piece

    def cancel(self) -> None:
        """Nobody waits for what has not ended: its rows leave the batch."""
        for answer in self.answers:
            if not answer.finish:
                answer.cancel()


class CompletionService:
    """Checks requests and hands them to a generator.

    Attributes:
        outstanding: answers that run or wait.
    """

    def __init__(self, served: Served, encoder: ChatEncoder, generator: Generator) -> None:
        self.served = served
        self.encoder = encoder
        self.generator = generator
        self.vocabulary = len(encoder.tokenizer)
        self._adapters: dict[str, bool | str] = {served.name: False, **{n: n for n in served.adapters}}
        self.outstanding = 0
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def models(self) -> tuple[str, ...]:
        """Names in requests, the base model's first."""
        return tuple(self._adapters)

    @property
    def healthy(self) -> bool:
        return self.generator.error is None and not self._stopping

    def adapter_of(self, model: str) -> bool | str:
        """Raises ApiError: there is no such model."""
        if model not in self._adapters:
            raise ApiError(
                404,
                f"the model '{model}' does not exist; there are {', '.join(self._adapters)}",
                param="model",
                code="model_not_found",
            )
        return self._adapters[model]

    def stop(self) -> None:
        """No further requests."""
        self._stopping = True

    def close(self) -> None:
        """No further requests; those that run get a moment; then the session ends. Blocks."""
        self.stop()
        deadline = time.monotonic() + FAREWELL
        while self.outstanding and time.monotonic() < deadline:
            time.sleep(0.05)
        self.generator.close()

    # -- prompts ----------------------------------------------------------------------------

    async def chat_prompt(self, messages: Sequence[ChatMessage]) -> tuple[int, ...]:
        """Token ids of a conversation with the header of the answer to come."""
        roles = {"developer": "system"}
        turns: list[Turn] = [{"role": roles.get(m.role, m.role), "content": m.text} for m in messages]
        try:
            text = self.encoder.render(tuple(turns), prompt=True)
        except UserError:
            raise
        except Exception as error:  # a template's own raise_exception, or what it cannot do
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return await self._tokens(text, special=False)

    async def completion_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer begins texts with."""
        if isinstance(prompt, str):
            ids = await self._tokens(prompt, special=True)
        else:
            ids = tuple(prompt)
            wrong = next((i for i in ids if not 0 <= i < self.vocabulary), None)
            if wrong is not None:
                raise ApiError(
                    400, f"token id {wrong} is not one of 0 to {self.vocabulary - 1}", param="prompt"
                )
        if not ids:
            raise ApiError(400, "the prompt has no tokens", param="prompt")
        return ids

    async def _tokens(self, text: str, *, special: bool) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            encoding = self.encoder.tokenizer(text, add_special_tokens=special, verbose=False)
            return tuple(encoding["input_ids"])

        return encode() if len(text) < _LONG else await asyncio.to_thread(encode)

    # -- requests ---------------------------------------------------------------------------

    def requests(
        self, body: ChatRequest | CompletionRequest, prompts: Sequence[tuple[int, ...]]
    ) -> list[Request]:
        """n requests per prompt, each with a seed of its own."""
        adapter = self.adapter_of(body.model)
        seed = (secrets.randbits(62) if body.seed is None else body.seed) % 2**63
        requests: list[Request] = []
        for prompt in prompts:
            limit = self._limit(body, len(prompt))
            for _ in range(body.n):
                sampling = Sampling(
                    max_new_tokens=limit,
                    min_new_tokens=body.min_tokens,
                    temperature=body.temperature,
                    top_p=body.top_p,
                    top_k=body.top_k,
                    min_p=body.min_p,
                    repetition_penalty=body.repetition_penalty,
                    seed=(seed + len(requests)) % 2**63,
                    eos=self.served.eos,
                    logprobs=body.top,
                )
                requests.append(Request(prompt, sampling, adapter, body.stops))
        return requests

    def _limit(self, body: ChatRequest | CompletionRequest, prompt: int) -> int:
        """Tokens of an answer at the most."""
        context, most, asked = self.served.context, self.served.max_tokens, body.limit
        room = context - prompt
        if room < (asked or 1):
            field = "messages" if isinstance(body, ChatRequest) else "prompt"
            completion = f" and {asked} in the completion" if asked is not None else ""
            raise ApiError(
                400,
                f"this model's maximum context length is {context} tokens, but {prompt + (asked or 1)} were "
                f"requested ({prompt} in the {field}{completion}); shorten the {field} or lower max_tokens",
                param=field,
                code="context_length_exceeded",
            )
        if asked is None:
            usual = _COMPLETION_TOKENS if isinstance(body, CompletionRequest) else room
            return min(room, usual, most or room)
        if most is not None and asked > most:
            raise ApiError(
                400,
                f"max_tokens={asked} is more than one answer can have here: {most} (serve.max_tokens)",
                param="max_tokens",
                code="invalid_value",
            )
        return asked

    def check_room(self, answers: int) -> None:
        """Before work is put into a request for so many answers: refuse it if it could not be taken now.

        Raises:
            ApiError: too many wait already, or there are never so many (429); generation has stopped (503).
        """
        if self._stopping:
            raise shutting_down()
        if self.generator.error is not None:
            raise engine_stopped(self.generator.error)
        most = self.served.running + self.served.max_queue
        if self.outstanding + answers > most:
            raise ApiError(
                429,
                f"too many requests: {self.outstanding} answers are running or waiting, {most} can"
                + (f"; this request asks for {answers}" if answers > 1 else ""),
                code="queue_full",
                headers={"retry-after": "1"},
            )

    # -- running ----------------------------------------------------------------------------

    def start(self, requests: Sequence[Request]) -> Job:
        """Hand requests in, all or none. On the event loop that will read the answers.

        Raises:
            ApiError: too many wait already (429), the generator refuses one (400), or the service has
                stopped (503).
        """
        with self._lock:
            self.check_room(len(requests))
            self.outstanding += len(requests)
        job, loop = Job(), asyncio.get_running_loop()
        try:
            for number, request in enumerate(requests):
                job.answers.append(self.generator.submit(request, self._listener(job, loop, number)))
        except BaseException as error:
            with self._lock:
                self.outstanding -= len(requests) - len(job.answers)
            job.cancel()
            if not isinstance(error, UserError):
                raise
            stopped = self.generator.error is not None or self._stopping
            raise (engine_stopped(error) if stopped else of_user_error(error)) from error
        return job

    def _listener(self, job: Job, loop: asyncio.AbstractEventLoop, number: int) -> Any:
        def take(piece: Piece | BaseException) -> None:
            if isinstance(piece, BaseException) or piece.token.finish:
                with self._lock:
                    self.outstanding -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(job.put, number, piece)

        return take
