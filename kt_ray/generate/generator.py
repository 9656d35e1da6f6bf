"""The driver's side of generation: hand in requests, get tokens as they come.

    with Generator(cluster, tokenizer) as generator:
        answer = generator.submit(Request(prompt, Sampling(max_new_tokens=50)))
        for piece in answer:              # as it is generated
            print(piece.text, end="")
        answer.finish                     # "stop", "length", ...

Requests join the running batch between two tokens, and leave it when they end: submit as many as you like
from as many threads as you like. Several answers to one prompt belong into one `submit_all`, which computes
the prompt once.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from kt_ray.errors import UserError
from kt_ray.generate.detokenize import TextStream
from kt_ray.generate.requests import Request, SessionSpec, Token

logger = logging.getLogger(__name__)

_POLL = 1.0  # seconds that one question for tokens waits; nothing depends on it
_NOTICE = 60.0  # seconds that a session gets to end when its coordinator does not answer
_Listener = Callable[["Piece | BaseException"], None]  # takes every piece, or the error that ends them
# From anywhere: other processes may have had generators on the same cluster, whose messages are not ours.
_sessions = itertools.count(secrets.randbits(30))


class GenerationCluster(Protocol):
    """What a generator needs of a cluster (kt_ray.actors.cluster.ActorCluster)."""

    @property
    def coordinators(self) -> list[int]: ...

    @property
    def vocab_size(self) -> int: ...

    def generate(self, spec: SessionSpec, opened: Callable[[], None]) -> list[Any]: ...

    def instruct(
        self, rank: int, kind: str, session: int, number: int = -1, requests: Sequence[Request] = ()
    ) -> None: ...

    def tokens(self, rank: int, timeout: float) -> tuple[list[Token], bool]: ...


@dataclass(frozen=True)
class Piece:
    """What came at once: the token (-1: only the end), and the text that became certain with it.

    `at`: characters of the answer before this token, held back ones included.
    """

    token: Token
    text: str
    at: int = 0


class Answer:
    """One request on its way. Iterate over it once; `result` waits for all of it.

    Attributes:
        number: of the request in its session.
        tokens: chosen so far, eos included; text: so far. finish: "" while it runs.
    """

    def __init__(
        self,
        number: int,
        request: Request,
        tokenizer: Any,
        cancel: Callable[[], None],
        listener: _Listener | None = None,
    ) -> None:
        self.number = number
        self.request = request
        self.tokens: list[int] = []
        self.logprobs: list[Token] = []
        self.finish = ""
        self.cancel = cancel
        before = request.prompt if request.continues else ()
        self._stream = TextStream(tokenizer, request.stop, request.sampling.eos, before)
        self._pieces: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
        self._give = self._pieces.put if listener is None else listener
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._reason = ""

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def error(self) -> str:
        """What went wrong where `finish` is "error"."""
        return self._reason or ("" if self._error is None else str(self._error))

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._pieces.get()
            if isinstance(piece, BaseException):
                raise piece
            yield piece
            if piece.token.finish:
                return

    def result(self, timeout: float | None = None) -> Answer:
        """Wait for the end.

        Raises:
            TimeoutError: it did not come in `timeout` seconds. Otherwise what ended the session.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"request {self.number} has not ended after {timeout} s")
        if self._error is not None:
            raise self._error
        return self

    def take(self, token: Token) -> None:
        """The generator's side: one more token."""
        if self.finish:
            return
        text, finish, at = "", token.finish, self._stream.decoded
        if token.token >= 0:
            self.tokens.append(token.token)
            if token.logprob is not None:
                self.logprobs.append(token)
            text = self._stream.add(token.token)
        if finish:
            text += self._stream.end()
        if self._stream.stopped:
            if not finish:
                self.cancel()
            finish = "stop"
        self.finish, self._reason = finish, token.error
        self._give(Piece(replace(token, finish=finish), text, at))
        if finish:
            self._ended.set()

    def break_off(self, error: Exception) -> None:
        """The generator's side: `take` went wrong, so nothing more can be made of this answer."""
        if not self.finish:  # else its last piece has been given, or was what the listener failed at
            reason = f"{type(error).__name__}: {error}"
            self.finish, self._reason = "error", reason
            with contextlib.suppress(Exception):  # the listener may be what fails
                self._give(Piece(Token(self.number, -1, finish="error", error=reason), ""))
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """The generator's side: the session is over before the answer was."""
        if not self.finish:
            self.finish, self._error = "error", error
            with contextlib.suppress(Exception):  # a listener's trouble keeps no other answer from its end
                self._give(error)
            self._ended.set()


class Generator:
    """A session of generation on a started cluster, which does nothing else meanwhile.

    Args:
        cluster: started.
        tokenizer: for text and stop strings; None = token ids only.
        max_rows, prefill_tokens, cache_tokens, joined: see SessionSpec.

    Attributes:
        error: what ended the session before it was closed, or None.

    What is wrong with one request ends that request: `submit` refuses it, or its answer's `finish` is "error"
    and its `error` says why. An error of the session itself, in an actor, ends all of them; the cluster then
    serves another generator, unless an actor died.
    """

    def __init__(
        self,
        cluster: GenerationCluster,
        tokenizer: Any = None,
        *,
        max_rows: int = 32,
        prefill_tokens: int = 2048,
        cache_tokens: int | None = None,
        joined: bool = False,
    ) -> None:
        self.cluster = cluster
        self.tokenizer = tokenizer
        pad = getattr(tokenizer, "pad_token_id", None) or 0
        if pad >= cluster.vocab_size:  # padding is masked, but the embedding must have it
            pad = 0
        number = next(_sessions)
        self.spec = SessionSpec(number, max_rows, prefill_tokens, int(pad), cache_tokens, joined)
        self.reports: list[Any] = []
        self._numbers = itertools.count()
        self._answers: dict[int, tuple[int, Answer]] = {}  # number -> (rank of its coordinator, answer)
        self._lock = threading.Lock()
        self._opened = threading.Event()
        self.error: BaseException | None = None
        self._closed = False
        self._threads = [threading.Thread(target=self._run_session, name="kt-session", daemon=True)]
        self._threads += [
            threading.Thread(target=self._fetch, args=(rank,), name=f"kt-tokens-{rank}", daemon=True)
            for rank in cluster.coordinators
        ]
        for thread in self._threads:
            thread.start()
        self._opened.wait()

    def __enter__(self) -> Generator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def submit(self, request: Request, listener: _Listener | None = None) -> Answer:
        """Hand one request in, see `submit_all`."""
        return self.submit_all([request], [listener])[0]

    def submit_all(
        self, requests: Sequence[Request], listeners: Sequence[_Listener | None] | None = None
    ) -> list[Answer]:
        """Hand requests in, all or none. They go to the replica with the fewest; those with the same prompt
        and adapter to the same one, as many as it runs at the same time.

        Args:
            listeners: one for each, called on a thread of the generator's; must not wait. None = iterate over
                the answer.

        Raises:
            UserError: a request cannot be served: token ids out of range, longer than the caches, stop
                strings without a tokenizer; or the session is over.
        """
        for request in requests:
            self._check(request)
        heard = listeners or [None] * len(requests)
        answers: dict[int, Answer] = {}  # place -> answer
        with self._lock:
            if self.error is not None:
                raise UserError(
                    "this session of generation has ended with an error",
                    observed=f"{type(self.error).__name__}: {self.error}",
                    remedy="make another generator on the same cluster; if an actor died, another cluster",
                ) from self.error
            if self._closed:
                raise UserError("the generator is closed", remedy="make another one")
            for rank, places in self._divided(requests).items():
                numbers = [next(self._numbers) for _ in places]
                for number, place in zip(numbers, places, strict=True):
                    cancel = partial(self._instruct, rank, "cancel", number)
                    answer = Answer(number, requests[place], self.tokenizer, cancel, heard[place])
                    self._answers[number], answers[place] = (rank, answer), answer
                asked = [requests[place] for place in places]
                self.cluster.instruct(rank, "request", self.spec.number, numbers[0], asked)
        return [answers[place] for place in range(len(requests))]

    def _divided(self, requests: Sequence[Request]) -> dict[int, list[int]]:
        """Rank of a coordinator -> places in `requests`, those with the same prompt next to one another."""
        alike: dict[tuple[bool | str, tuple[int, ...]], list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault((request.adapter, request.prompt), []).append(place)
        load = Counter(rank for rank, _ in self._answers.values())
        divided: dict[int, list[int]] = {}
        for places in alike.values():
            for start in range(0, len(places), self.spec.max_rows):
                part = places[start : start + self.spec.max_rows]
                rank = min(self.cluster.coordinators, key=lambda r: (load[r], r))
                load[rank] += len(part)
                divided.setdefault(rank, []).extend(part)
        return divided

    def _check(self, request: Request) -> None:
        if request.stop and self.tokenizer is None:
            raise UserError(
                "stop strings need a tokenizer", observed=request.stop, remedy="give the generator one"
            )
        vocab, ids = self.cluster.vocab_size, request.prompt
        place = next((i for i, token in enumerate(ids) if not 0 <= token < vocab), None)
        if place is not None:
            raise UserError(
                "a token id of the prompt is not in the model's vocabulary",
                where=f"token {place} of {len(ids)}",
                observed=ids[place],
                required=f"0 to {vocab - 1}",
                remedy="make the prompt with the model's own tokenizer",
            )
        room = self.spec.cache_tokens
        if room is not None and request.longest > room:
            raise UserError(
                "prompt and answer are longer than the key-value caches",
                observed=f"{len(ids)} tokens and max_new_tokens={request.sampling.max_new_tokens}",
                required=f"at most {room} tokens together (generate.cache_tokens)",
                remedy="shorten the prompt, lower max_new_tokens, or raise generate.cache_tokens",
            )

    def close(self) -> None:
        """End the session: what still runs is cancelled."""
        with self._lock:
            first, self._closed = not self._closed, True
            outstanding = list(self._answers.items())
        # After an error of the fetching alone the session still runs, and would do so for ever.
        if first and self._threads[0].is_alive():
            for number, (rank, _) in outstanding:
                self._instruct(rank, "cancel", number)
            for rank in self.cluster.coordinators:
                self._instruct(rank, "stop")
        for thread in self._threads:
            thread.join()
        self._fail(UserError("the generator was closed before this answer ended", remedy="ask again"))

    def _instruct(self, rank: int, kind: str, number: int = -1) -> None:
        """An instruction where an error changes nothing: the session's own one is told."""
        try:
            self.cluster.instruct(rank, kind, self.spec.number, number)
        except Exception as error:
            logger.warning("coordinator %d could not be sent %r", rank, kind, exc_info=error)

    # -- threads ----------------------------------------------------------------------------

    def _run_session(self) -> None:
        try:
            self.reports = self.cluster.generate(self.spec, self._opened.set)
        except BaseException as error:
            self.error = error
            self._fail(error)
        finally:
            self._opened.set()

    def _fetch(self, rank: int) -> None:
        self._opened.wait()
        more = self.error is None
        while more and self.error is None:
            try:
                tokens, more = self.cluster.tokens(rank, _POLL)
            except BaseException as error:
                self._threads[0].join(_NOTICE)  # the session's own error says more
                if self.error is None:
                    self.error = error
                self._fail(self.error)
                return
            for token in tokens:
                with self._lock:
                    found = self._answers.get(token.request)
                if found is None:
                    continue  # ended here by a stop string
                self._take(*found, token)
                if found[1].finish:
                    with self._lock:
                        self._answers.pop(token.request, None)

    def _take(self, rank: int, answer: Answer, token: Token) -> None:
        try:
            answer.take(token)
        except Exception as error:  # of its tokenizer or listener: the others' tokens must still be fetched
            logger.warning("an answer was broken off", exc_info=error)
            answer.break_off(error)
            if not token.finish:
                self._instruct(rank, "cancel", token.request)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            answers = [answer for _, answer in self._answers.values()]
            self._answers.clear()
        for answer in answers:
            answer.fail(error)
