"""A backend of a train server without a model: one weight per training, log-probabilities by arithmetic."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kt_ray.batch import LoraPart, TokenLoss
from kt_ray.errors import TryAgain, UserError
from kt_ray.generate.generator import Answer
from kt_ray.generate.requests import Request, Token
from kt_ray.train_server.backend import AdamParams, Datum, Pass, PassResult, Scores

VOCAB = 50
EOS = 1


@dataclass
class Weight:
    """One training."""

    value: float
    gradient: float = 0.0
    steps: int = 0


class Letters:
    """Token n is the n-th letter from "A" on."""

    pad_token_id = 0
    unk_token_id = None

    def convert_tokens_to_ids(self, _: str) -> None:
        return None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(65 + i) for i in ids)


def token_after(prompt: Sequence[int], place: int, shift: int, seed: int) -> int:
    """Of an answer: never EOS."""
    return 2 + (sum(prompt) + place + shift + seed) % (VOCAB - 2)


class FakeSession:
    """Answers when `backend.gate` is open; each in a thread of its own."""

    def __init__(self, backend: FakeBackend) -> None:
        self._backend = backend
        self.dying = backend.deaths > 0
        backend.deaths -= self.dying
        self.threads: list[threading.Thread] = []

    def submit_all(self, requests: Sequence[Request], listeners: Sequence[Any] | None = None) -> list[Answer]:
        return list(map(self._submit, requests, listeners or [None] * len(requests)))

    def _submit(self, request: Request, listener: Callable[[Any], None] | None) -> Answer:
        cancelled = threading.Event()
        answer = Answer(len(self.threads), request, Letters(), cancelled.set, listener)
        self._backend.calls.append(("submit", request.adapter))
        self._backend.requests.append(request)
        self.threads.append(threading.Thread(target=self._say, args=(answer, cancelled), daemon=True))
        self.threads[-1].start()
        return answer

    def _say(self, answer: Answer, cancelled: threading.Event) -> None:
        request = answer.request
        shift = self._backend.shift(request.adapter)
        most = request.sampling.max_new_tokens
        seed = request.sampling.seed if request.sampling.temperature > 0 else 0
        for place in range(most):
            while not self._backend.gate.wait(0.01) and not cancelled.is_set():
                pass
            if cancelled.is_set():
                break
            token = token_after(request.prompt, place, shift, seed)
            finish = "stop" if token in request.sampling.eos else "length" if place == most - 1 else ""
            top = tuple((token + n, -0.5 - n) for n in range(request.sampling.logprobs or 0))
            answer.take(Token(answer.number, token, -0.5 - place, top, finish))
            if answer.finish:
                return
            if self.dying:
                answer.fail(TryAgain("an actor died"))
                return
        answer.take(Token(answer.number, -1, finish="cancelled"))


class FakeBackend:
    """
    Attributes:
        calls: in their order. gate: closed, answers and passes wait. faults: call -> error it raises once.
        deaths: sessions to come in which an actor dies after a sample's first token. on_disk: models there.
        aside: where samplers are put.
    """

    base_model = "demo/model"
    tokenizer = "demo/tokenizer"
    rank = 8
    max_length = 64
    vocab_size = VOCAB
    eos = (EOS,)

    def __init__(self, slots: int = 4, alpha: float = 16.0) -> None:
        self.slots = slots
        self.settings: dict[str, Any] = {"lora.alpha": alpha}
        self.calls: list[tuple[Any, ...]] = []
        self.requests: list[Request] = []
        self.faults: dict[str, Exception] = {}
        self.deaths = 0
        self.on_disk: set[str] = set()
        self.aside = Path()
        self.gate = threading.Event()
        self.gate.set()
        self.models: dict[str, Weight] = {}
        self.busy: Callable[[], AbstractSet[str]] = frozenset
        self.parts: dict[str, LoraPart] = {}
        self.samplers: dict[str, float] = {}
        self._sampling = False
        self._thread: threading.Thread | None = None

    def create(self, model: str, seed: int, part: LoraPart) -> None:
        self._call("create", model)
        self.parts[model] = part
        assert len(self.models) < self.slots and model not in self.models
        self.models[model] = Weight(seed % 7)

    def forget(self, model: str) -> None:
        self._call("forget", model)
        del self.models[model]

    def take_up(self, model: str) -> None:
        self._call("take_up", model)

    def run(self, model: str, data: Sequence[Datum], loss: TokenLoss, *, backward: bool) -> PassResult:
        self._call("backward" if backward else "forward", model, len(data))
        self.gate.wait()
        weight = self.models[model]
        logprobs = [-0.1 * datum.targets.astype(np.float32) - weight.value for datum in data]
        if loss.name == "cross_entropy":
            slopes = [-datum.inputs["weights"] for datum in data]
        else:
            slopes = [
                -datum.inputs["advantages"] * np.exp(row - datum.inputs["logprobs"])
                for datum, row in zip(data, logprobs, strict=True)
            ]
        total = sum(float((slope * row).sum()) for slope, row in zip(slopes, logprobs, strict=True))
        if backward:
            weight.gradient += sum(float(slope.sum()) for slope in slopes)
        return PassResult(logprobs, total, {"tokens:sum": float(sum(len(datum.tokens) for datum in data))})

    def held(self, model: str) -> bool:
        return model not in self.on_disk

    def join(self, passes: Sequence[Pass]) -> list[PassResult]:
        self._call("join", *(work.model for work in passes))
        return [self.run(work.model, work.data, work.loss, backward=True) for work in passes]

    def discard(self, model: str) -> None:
        self._call("discard", model)
        self.models[model].gradient = 0.0

    def step(self, model: str, params: AdamParams) -> dict[str, float]:
        self._call("step", model)
        weight = self.models[model]
        norm = abs(weight.gradient)
        weight.value += params.learning_rate * np.sign(weight.gradient)
        weight.gradient, weight.steps = 0.0, weight.steps + 1
        return {"grad_norm": norm}

    def save_state(self, model: str, directory: Path) -> None:
        self._call("save_state", model)
        directory.mkdir()
        (directory / "state.json").write_text(
            json.dumps([self.models[model].value, self.models[model].steps])
        )

    def load_state(self, model: str, directory: Path, *, optimizer: bool) -> None:
        self._call("load_state", model, optimizer)
        value, steps = json.loads((directory / "state.json").read_text())
        self.models[model] = Weight(value, 0.0, steps if optimizer else 0)

    def save_adapter(self, model: str, directory: Path) -> None:
        self._call("save_adapter", model)
        directory.mkdir()
        (directory / "adapter_config.json").write_text("{}")
        (directory / "adapter_model.json").write_text(json.dumps(self.models[model].value))

    def keep(self, model: str, sampler: str) -> None:
        self._call("keep", model, sampler)
        self.samplers[sampler] = self.models[model].value

    def load_sampler(self, sampler: str, find: Callable[[], Path]) -> None:
        self._call("load_sampler", sampler)
        self.samplers[sampler] = json.loads((find() / "adapter_model.json").read_text())

    def put_aside(self, sampler: str) -> Path:
        self._call("put_aside", sampler)
        directory = self.aside / sampler.replace(":", "-")
        directory.mkdir(parents=True)
        (directory / "adapter_model.json").write_text(json.dumps(self.samplers[sampler]))
        return directory

    def drop(self, sampler: str) -> None:
        self._call("drop", sampler)
        del self.samplers[sampler]

    def score(self, sampler: str | bool, prompts: Sequence[np.ndarray], top: int) -> list[Scores]:
        self._call("score", sampler, len(prompts))
        made = []
        for prompt in prompts:
            n = len(prompt) - 1
            ids = np.tile(np.arange(top), (n, 1))
            logprobs = -0.1 * prompt[1:].astype(np.float32) - self.shift(sampler)
            made.append(Scores(logprobs, ids, -0.1 * ids.astype(np.float32)))
        return made

    @contextlib.contextmanager
    def sampling(self) -> Iterator[FakeSession]:
        self._call("sampling")
        session = FakeSession(self)
        self._sampling = True
        try:
            yield session
        finally:
            for thread in session.threads:
                thread.join(10)
                assert not thread.is_alive()
            self._sampling = False
            self.calls.append(("sampled",))

    def shift(self, sampler: str | bool) -> int:
        return round(self.samplers[sampler]) if isinstance(sampler, str) else 0

    def _call(self, *call: Any) -> None:
        self._thread = self._thread or threading.current_thread()
        assert threading.current_thread() is self._thread, "one thread calls a backend"
        assert not self._sampling, f"{call} inside a session of generation"
        self.calls.append(call)
        fault = self.faults.pop(call[0], None)
        if fault is not None:
            raise fault


def wrong(what: str) -> UserError:
    return UserError(what, remedy="mend it")
