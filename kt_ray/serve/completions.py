"""API requests become generator requests; the generated pieces come back onto the event loop."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from kt_ray.data.row_types import Turn
from kt_ray.data.template import ChatEncoder
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer, Generator, Piece
from kt_ray.generate.requests import Request, Sampling
from kt_ray.serve.api_errors import ApiError, engine_stopped, of_user_error, shutting_down, what_stopped
from kt_ray.serve.schemas import ChatMessage, ChatRequest, CompletionRequest

FAREWELL = 2.0  # seconds that running answers get when the server is stopped
THREADS = 4  # that parse, render and tokenize, so that the event loop never does
T = TypeVar("T")
_COMPLETION_TOKENS = 16  # of a completion that names no limit, as in OpenAI's API


@dataclass(frozen=True)
class Served:
    """What is served; travels to the process that answers."""

    name: str  # of the base model
    adapters: tuple[str, ...]  # names of the others
    tokenizer: str  # directory
    template: str | None  # file of a chat template, or None
    template_name: str | None  # see DataConfig
    date: str | None  # that the template writes, YYYY-MM-DD; None = the day of the request
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


class Room:
    """The places of one HTTP request's answers, taken before anything is done for it. Use it in a `with`."""

    def __init__(self, service: CompletionService) -> None:
        self._service = service
        self._answers = 0

    def __enter__(self) -> Room:
        self.take(1)
        return self

    def __exit__(self, *error: object) -> None:
        self._service.give_back(self._answers)

    def take(self, answers: int) -> None:
        """So many places altogether.

        Raises:
            ApiError: see `CompletionService.reserve`.
        """
        self._service.reserve(answers, self._answers)
        self._answers = answers

    def hand_over(self) -> None:
        """From now on every answer gives its place back when it ends."""
        self._answers = 0


class CompletionService:
    """Checks requests and hands them to a generator.

    Attributes:
        outstanding: answers that run, wait, or are being prepared.
    """

    def __init__(self, served: Served, encoder: ChatEncoder, generator: Generator) -> None:
        self.served = served
        self.encoder = encoder
        self.generator = generator
        self.vocabulary = len(encoder.tokenizer)
        # Longer texts have more tokens than the context, whatever they say: they are not even tokenized.
        self.longest_text = served.context * max(map(len, encoder.tokenizer.get_vocab()), default=1)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="kt-prompts")
        self._adapters: dict[str, bool | str] = {served.name: False, **{n: n for n in served.adapters}}
        self.outstanding = 0
        self._lock = threading.Lock()
        self._stopping = False

    @property
    def models(self) -> tuple[str, ...]:
        """Names in requests, the base model's first."""
        return tuple(self._adapters)

    @property
    def health(self) -> dict[str, str]:
        """The status, and the reason where it is not "ok"."""
        error = self.generator.error
        if self._stopping:
            return {"status": "stopping"}
        return {"status": "ok"} if error is None else {"status": "recovering", "reason": what_stopped(error)}

    def fault(self) -> Exception | None:
        """What ended generation, if anything did. Blocks until nothing of that session runs."""
        error = self.generator.error
        if error is None:
            return None
        self.generator.close()
        return error if isinstance(error, Exception) else RuntimeError(repr(error))

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
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def work(self, action: Callable[..., T], *args: Any) -> T:
        """The result of something that takes time, which would hold all other requests up on the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, action, *args)

    # -- prompts ----------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[ChatMessage], effort: str | None = None) -> tuple[int, ...]:
        """Token ids of a conversation with the header of the answer to come. Takes time: see `work`.

        Args:
            effort: how much the answer shall think, as the template knows it; None = its default.
        """
        if not self.encoder.reads_effort:
            if effort not in (None, "none"):
                raise ApiError(
                    400,
                    "reasoning_effort is not read by this model's chat template; leave it out",
                    param="reasoning_effort",
                    code="unsupported_parameter",
                )
            effort = None
        if len(messages) > self.served.context:
            raise self._too_long(f"{len(messages)} messages", "messages")
        self._check_length(sum(len(message.text) for message in messages), "messages")
        roles = {"developer": "system"}
        turns: list[Turn] = [{"role": roles.get(m.role, m.role), "content": m.text} for m in messages]
        try:
            text = self.encoder.render(tuple(turns), prompt=True, effort=effort)
        except UserError:
            raise
        except Exception as error:  # a template's own raise_exception, or what it cannot do
            raise ApiError(
                400, f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self._tokens(text, "messages", special=False)

    def completion_prompt(self, prompt: str | list[int]) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer begins texts with. Takes time."""
        if isinstance(prompt, str):
            ids = self._tokens(prompt, "prompt", special=True)
        elif len(prompt) > self.served.context:
            raise self._too_long(f"{len(prompt)} tokens", "prompt")
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

    def _tokens(self, text: str, field: str, *, special: bool) -> tuple[int, ...]:
        self._check_length(len(text), field)
        encoding = self.encoder.tokenizer(text, add_special_tokens=special, verbose=False)
        return tuple(encoding["input_ids"])

    def _check_length(self, characters: int, field: str) -> None:
        if characters > self.longest_text:
            raise self._too_long(f"{characters} characters (at most {self.longest_text} can fit)", field)

    def _too_long(self, what: str, field: str) -> ApiError:
        return ApiError(
            400,
            f"this model's maximum context length is {self.served.context} tokens, but the {field} "
            f"{'has' if field == 'prompt' else 'have'} {what}; shorten the {field}",
            param=field,
            code="context_length_exceeded",
        )

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
            if body.min_tokens > limit:
                raise ApiError(
                    400,
                    f"min_tokens={body.min_tokens} is more than the {limit} tokens that the answer can have; "
                    "lower min_tokens or raise max_tokens",
                    param="min_tokens",
                    code="invalid_value",
                )
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
                continues = isinstance(body, CompletionRequest)
                requests.append(Request(prompt, sampling, adapter, body.stops, continues))
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

    def reserve(self, answers: int, had: int = 0) -> None:
        """Places for so many answers of one request, before work is put into it.

        Args:
            had: places that it has already.

        Raises:
            ApiError: there are never so many (400), too many wait (429), or generation has stopped (503).
        """
        if self._stopping:
            raise shutting_down()
        if self.generator.error is not None:
            raise engine_stopped(self.generator.error)
        most = self.served.running + self.served.max_queue
        if answers > most:  # which no waiting helps
            raise ApiError(
                400,
                f"this request asks for {answers} answers; this server takes at most {most} at a time "
                f"({self.served.running} that run, and serve.max_queue={self.served.max_queue}). To fix: ask "
                "for fewer at a time, or start the server with a larger serve.max_queue",
                code="too_many_answers",
            )
        with self._lock:
            others = self.outstanding - had
            if others + answers <= most:
                self.outstanding = others + answers
                return
        raise ApiError(
            429,
            f"too many requests: {others} answers are running or waiting, {most} can"
            + (f"; this request asks for {answers}" if answers > 1 else ""),
            code="queue_full",
            headers={"retry-after": "1"},
        )

    def give_back(self, answers: int) -> None:
        """Places of answers that have ended, or that nothing came of."""
        with self._lock:
            self.outstanding -= answers

    # -- running ----------------------------------------------------------------------------

    def start(self, requests: Sequence[Request], room: Room) -> Job:
        """Hand requests in, all or none. On the event loop that will read the answers.

        Args:
            room: places for just so many.

        Raises:
            ApiError: the generator refuses one (400), or the service has stopped (503).
        """
        job, loop = Job(), asyncio.get_running_loop()
        room.hand_over()
        try:
            listeners = [self._listener(job, loop, number) for number in range(len(requests))]
            job.answers += self.generator.submit_all(requests, listeners)
        except BaseException as error:
            self.give_back(len(requests))
            if not isinstance(error, UserError):
                raise
            stopped = self.generator.error is not None or self._stopping
            raise (engine_stopped(error) if stopped else of_user_error(error)) from error
        return job

    def _listener(self, job: Job, loop: asyncio.AbstractEventLoop, number: int) -> Any:
        def take(piece: Piece | BaseException) -> None:
            if isinstance(piece, BaseException) or piece.token.finish:
                self.give_back(1)
            if not loop.is_closed():
                loop.call_soon_threadsafe(job.put, number, piece)

        return take
