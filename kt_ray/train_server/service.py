"""What a train server keeps and does for its clients: sessions, models, samplers, checkpoints.

A model's name is SESSION:train:N, a sampler's SESSION:sample:N, as the SDK counts them; a request's is its
model's or sampler's name and its own number. So a repeated request finds what the first one made.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from kt_ray.batch import LoraPart
from kt_ray.serve.api_errors import ApiError, shutting_down
from kt_ray.train_server.backend import AdamParams, Backend, Datum, NoRoomYet, Pass
from kt_ray.train_server.fitting_checkpoints import FittingCheckpoints
from kt_ray.train_server.futures import Failure, Promise, Promises, Reply
from kt_ray.train_server.sample_requests import sample_of
from kt_ray.train_server.sample_rounds import SampleJob, Sampler, SampleRounds
from kt_ray.train_server.saved_models import (
    SAMPLER,
    TRAINING,
    Run,
    Saved,
    SavedModels,
    checked_name,
    checkpoint_path,
    expiry,
    now,
)
from kt_ray.train_server.sessions import Model, Session
from kt_ray.train_server.wire import adam_of, bad, data_of, loss_of, metadata_of, pass_reply, plain
from kt_ray.train_server.work_queue import Work, WorkQueue
from kt_ray.train_server.work_thread import WorkThread

logger = logging.getLogger(__name__)

MOST_SESSIONS = 10_000
ENDS = "the server is shutting down"
GONE = 60.0  # seconds of silence, six of the SDK's heartbeats, after which a client may lose its room
_STILL = 10.0  # seconds without a `tick` after which the process stood still
_SWEEP = 1.0  # seconds between looks at what has expired
_SWEEP_DISK = 60.0  # the same, of checkpoints
UNEMBED = "train_unembed is accepted and changes nothing: this server trains no LoRA on the output layer"


class TrainService:
    """
    Args:
        directory: of the checkpoints.
        most_samplers: see SampleRounds.
        idle: seconds without a word from a client after which its session ends.
    """

    def __init__(
        self, backend: Backend, directory: Path, *, most_samplers: int = 16, idle: float = 600.0
    ) -> None:
        self.backend = backend
        self.saved = SavedModels(directory)
        self._fitting = FittingCheckpoints(backend, self.saved)
        self.promises = Promises()
        self._queue = WorkQueue(self.promises)
        self._rounds = SampleRounds(backend, self._queue, self.promises, most_samplers, self._sweep)
        self._idle = idle
        self._queue.on_gap = self._spoil
        self.saved.comes = self._comes
        backend.busy = self._queue.busy
        self._lock = self._queue.changed
        self._sessions: dict[str, Session] = {}
        self._models: dict[str, Model] = {}
        self._samplers: dict[str, Sampler] = {}
        self._saves: dict[str, Promise] = {}  # by the path that it will have, as long as it waits or runs
        self._closing = False
        self._swept = 0.0
        self._ticked = time.monotonic()
        self._worker = WorkThread(backend, self._queue, self._rounds, self.promises, self._sweep)
        self._worker.start()

    def end(self) -> None:
        """What runs comes to its end, samples are cancelled, what waits is dropped."""
        with self._lock:
            self._closing = self._rounds.closing = self._worker.closing = True
            for name in list(self._models):
                self._queue.remove_model(name, ENDS)
            self._rounds.cancel(lambda job: True, Failure(ENDS, "server"))
            self._lock.notify_all()

    def abandon(self) -> None:
        """Who waits for what still runs waits no longer."""
        self.promises.abandon(Failure(f"{ENDS} and does not wait for this request's result", "server"))

    def close(self) -> None:
        """`end`, and wait for what runs."""
        self.end()
        self._worker.join()

    # -- sessions ----------------------------------------------------------------------------------

    def create_session(self, request: Any) -> dict[str, Any]:
        with self._open():
            if len(self._sessions) >= MOST_SESSIONS:
                raise ApiError(429, f"{MOST_SESSIONS} sessions are open already")
            session = Session(secrets.token_hex(16), metadata_of(request), request.display_name)
            self._sessions[session.name] = session
        return {"type": "create_session", "session_id": session.name, "warning_message": UNEMBED}

    def hear(self, name: str) -> Session:
        """A word from a client: its session lives on.

        Raises:
            ApiError: there is no such session, or no longer.
        """
        with self._lock:
            session = self._sessions.get(name)
            if session is None:
                # 410 ends the SDK's heartbeats
                raise ApiError(410, f"session '{name[:100]}' has ended, or never was", code="session_ended")
            session.heard = time.monotonic()
            return session

    def tick(self) -> None:
        """Called all the time by who takes the requests: while the process is stopped, nobody is heard."""
        with self._lock:
            now = time.monotonic()
            still, self._ticked = now - self._ticked, now
            if still > _STILL:
                for session in self._sessions.values():
                    session.heard = min(now, session.heard + still)

    def finish(self, name: str) -> None:
        """End a session: its models and samplers go, its checkpoints stay."""
        with self._lock:
            session = self.hear(name)
            del self._sessions[name]
            for model in list(session.models):
                self._remove(model, "its session has ended")
            self._rounds.cancel(
                lambda job: job.sampler.session == name, Failure("the session of this sampler has ended")
            )
            for sampler in session.samplers:
                gone = self._samplers.pop(sampler)
                self.promises.drop_owner(sampler)
                self._queue.control(Work(None, partial(self._drop, gone)))

    def sessions(self) -> list[Session]:
        with self._lock:
            return sorted(self._sessions.values(), key=lambda session: session.heard, reverse=True)

    # -- models ------------------------------------------------------------------------------------

    def create_model(self, request: Any) -> Promise:
        config = request.lora_config
        if config is None:
            raise bad("lora_config is missing: this server trains LoRA only", "lora_config")
        self._check_base(request.base_model)
        self._check_optimizer(request.optimizer_config)
        most = self.backend.rank
        if not 1 <= config.rank <= most:
            raise bad(
                f"LoRA of rank {config.rank} is asked for; this server trains ranks 1 to {most}. To fix: ask "
                f"for rank={most}, or start the server with lora.rank={config.rank}",
                "lora_config.rank",
            )
        part = LoraPart(config.rank, config.train_attn, config.train_mlp)
        if config.seed is not None and not 0 <= config.seed < 2**63:
            raise bad(f"seed is {config.seed}, required 0 to 2**63 - 1", "lora_config.seed")
        seed = secrets.randbits(31) if config.seed is None else config.seed

        def create(model: Model) -> Reply:
            self.backend.create(model.name, seed, part)
            return plain({"type": "create_model", "model_id": model.name})

        return self._new_model(request, part, create)

    def load_weights(self, request: Any) -> Promise:
        """Into a new model, or into one that there is."""

        def check(foreign: tuple[str, ...], which: str) -> None:
            for key in foreign:
                if getattr(request, key) is not None:
                    raise bad(f"{key} has no meaning beside {which}; leave it out", key)
            if request.weights_access_token is not None:
                raise bad("weights_access_token is not supported: all clients see all checkpoints")
            if request.base_model is not None:
                self._check_base(request.base_model)
            if request.optimizer_config is not None:
                self._check_optimizer(request.optimizer_config)

        def load(model: Model, saved: Saved) -> Reply:
            self.saved.find(saved.path)  # it may have been deleted while this waited
            self.backend.load_state(model.name, self.saved.data(saved), optimizer=request.optimizer)
            model.failed = None  # no gradient waits any longer
            return plain({"type": "load_weights", "path": saved.path})

        def fitting(model: Model) -> Saved:
            saved = self._fitting.training(request.path)
            if saved.part != model.run.part:
                raise bad(
                    f"{saved.path} is of {saved.part}; this model is of {model.run.part}. To fix: make a "
                    "model from it (create_training_client_from_state), or one with the same LoraConfig",
                    "path",
                )
            return saved

        if request.session_id is None:
            model, number = self._ordered(request)
            with self._numbered(model, number, lambda: self._bar(model, number)):
                check(("model_seq_id", "user_metadata"), "model_id, a model that there is")
                # What is saved before this in the order of requests is there in its turn.
                saved = None if self._comes(request.path) else fitting(model)

            def run() -> Reply:
                try:
                    reply = load(model, saved or fitting(model))
                except NoRoomYet:
                    raise
                except Exception:
                    self._bar(model, number)
                    raise
                self._queue.bar(model.name, "")
                return reply

            return self._submit(model, number, run, loads=True)
        check(("model_id", "seq_id"), "session_id, which makes a model")
        if request.model_seq_id is None:
            raise bad("model_seq_id is missing beside session_id", "model_seq_id")
        saved = self._fitting.training(request.path)

        def create(model: Model) -> Reply:
            self.backend.create(model.name, 0, saved.part)
            try:
                return load(model, saved)
            except BaseException:
                self.backend.forget(model.name)
                raise

        return self._new_model(request, saved.part, create)

    def model(self, name: str | None) -> Model:
        """Raises ApiError: there is none of this name."""
        with self._lock:
            model = self._models.get(name or "")
            if model is None:
                state = self.saved.last_state(name or "")
                last = (
                    "no state of this one is saved"
                    if state is None
                    else f"its last saved state is {state.path}"
                )
                raise self._gone("model", name, f"make another; {last}")
            self.hear(model.session.name)
            model.heard = datetime.now(UTC)
            return model

    def models(self) -> list[Model]:
        with self._lock:
            return list(self._models.values())

    def unload_model(self, name: str) -> Promise:
        with self._open():
            request = f"{name}:unload"
            known = self.promises.get(request)
            if known is not None:
                return known
            model = self.model(name)
            promise = Promise(request, model.session.name)
            self.promises.add(promise)
            self._remove(name, "it was unloaded")
            self._queue.control(Work(promise, lambda: plain({"type": "unload_model", "model_id": name})))
            return promise

    def forward_backward(self, message: Any) -> Promise:
        model, number = self._ordered(message)
        backward = not message.forward_only

        def spoil() -> Reply:
            if backward:
                self._spoil(model.name, number)
            return plain({})

        with self._numbered(model, number, spoil):
            data, loss = data_of(message, self.backend), loss_of(message)

        def run(data: list[Datum] = data) -> Reply:
            try:
                return pass_reply(self.backend.run(model.name, data, loss, backward=backward))
            except NoRoomYet:
                raise
            except Exception:
                spoil()
                raise

        part = Pass(model.name, data, loss) if backward else None
        return self._submit(model, number, run, part=part)

    def refuse(self, name: Any, number: Any, *, load: bool) -> None:
        """A model's request of that number has a body that is wrong; of any other this is nobody's."""
        with self._lock:
            model = self._models.get(name) if isinstance(name, str) else None
            if model is not None and isinstance(number, int) and number >= 1:
                self._take_number(model, number, partial(self._bar, model, number) if load else None)

    def optim_step(self, request: Any) -> Promise:
        model, number = self._ordered(request)
        with self._numbered(model, number):
            params = adam_of(request.optim_params)

        def step(params: AdamParams = params) -> Reply:
            if model.failed is not None:
                self.backend.discard(model.name)
                failed, model.failed = model.failed, None
                raise bad(
                    f"no step was taken: request {failed} of a pass had failed, so all gradients "
                    "since the step before were thrown away. To fix: send that pass again, whole, and step"
                )
            return plain({"metrics": self.backend.step(model.name, params)})

        return self._submit(model, number, step, ends_turn=True)

    def save_weights(self, request: Any) -> Promise:
        return self._save(request, TRAINING, overwrite=request.overwrite)

    def save_weights_for_sampler(self, request: Any) -> Promise:
        model, number = self._ordered(request)
        with self._numbered(model, number):
            if request.kind != "snapshot":
                raise bad(f"kind='{request.kind}' is not supported by this server; use 'snapshot'", "kind")
            key = "sampling_session_seq_id"
            if request.path is not None and request.sampling_session_seq_id is not None:
                raise bad(f"{key} is of a sampler without a name; leave it out, or path", key)
        if request.path is not None or request.sampling_session_seq_id is None:
            return self._save(request, SAMPLER, overwrite=False)
        with self._numbered(model, number):
            for key in ("ttl_seconds", "user_metadata"):
                if getattr(request, key) is not None:
                    raise bad(
                        f"{key} is of a sampler without a name, which ends with its session and has no "
                        "record. To fix: leave it out, or name the sampler (path)",
                        key,
                    )
        name = f"{model.session.name}:sample:{request.sampling_session_seq_id}"

        def keep() -> Reply:
            if name in self._samplers:
                raise bad(f"there is a sampler {name}", "sampling_session_seq_id")
            sampler = Sampler(name, model.session.name, name, model=model.name)
            self.backend.take_up(model.name)  # while this waits, the sampler before it answers
            self._rounds.make_room(model.name)
            self.backend.keep(model.name, name)
            with self._lock:
                self._rounds.hold(sampler)
                if model.session.name not in self._sessions:  # it ended meanwhile
                    self._drop(sampler)
                else:
                    self._add_sampler(model.session, sampler)
            return plain({"type": "save_weights_for_sampler", "sampling_session_id": name})

        return self._submit(model, number, keep)

    # -- samplers ----------------------------------------------------------------------------------

    def create_sampler(self, request: Any) -> str:
        """Weights are loaded when they are first used."""
        with self._open():
            session = self.hear(request.session_id)
            name = f"{session.name}:sample:{request.sampling_session_seq_id}"
            if (known := self._samplers.get(name)) is not None:
                if known.model is not None or known.path != request.model_path:
                    raise bad(f"there is a sampler {name}, of other weights", "sampling_session_seq_id")
                return name
        if request.model_path is None or request.base_model is not None:
            self._check_base(request.base_model)
        if request.model_path is None:
            sampler = Sampler(name, session.name, False)
        else:
            saved = self._fitting.sampler(request.model_path)
            sampler = Sampler(name, session.name, name, saved.path, partial(self._fitting.weights, saved))
        with self._open():
            self._add_sampler(self.hear(session.name), sampler)
        return name

    def sampler(self, name: str | None) -> Sampler:
        """Raises ApiError: there is none of this name."""
        with self._lock:
            sampler = self._samplers.get(name or "")
            if sampler is None:
                raise self._gone("sampler", name, "make another")
            self.hear(sampler.session)
            return sampler

    def sample(self, request: Any) -> tuple[Promise, int]:
        """The promise, and how many samples it will have."""
        if request.sampling_session_id is None or request.seq_id is None:
            raise bad("sampling_session_id and seq_id are required", "sampling_session_id")
        sampler = self.sampler(request.sampling_session_id)
        if request.base_model is not None:
            self._check_base(request.base_model)
        if request.model_path not in (None, sampler.path):
            own = sampler.path or "weights without a path"
            raise bad(
                f"model_path is {request.model_path}, but this sampler has {own}; leave it out, or make a "
                "sampler of that path",
                "model_path",
            )
        asked = sample_of(request, self.backend, sampler.key)
        name = f"{sampler.name}:{request.seq_id}"
        with self._open():
            known = self.promises.get(name)
            if known is not None:
                return known, request.num_samples
            promise = Promise(name, sampler.name)
            self._rounds.submit(SampleJob(promise, sampler, asked))
            self.promises.add(promise)
        return promise, request.num_samples

    def promise(self, name: str) -> Promise:
        """
        Raises:
            ApiError: there is none, or no longer.
        """
        promise = self.promises.get(name)
        if promise is None:
            # the SDK repeats a sample whose promise is gone
            raise ApiError(410, f"there is no request '{name[:200]}', or no longer", code="request_gone")
        with self._lock:
            owner = self._models.get(promise.owner) or self._samplers.get(promise.owner)
            session = owner.session if owner is not None else None
            found = self._sessions.get(session) if isinstance(session, str) else session
            if found is not None:
                found.heard = time.monotonic()
        return promise

    def cancel(self, name: str) -> None:
        """Only samples end before their time."""
        self._rounds.cancel(lambda job: job.promise.name == name)

    def _sweep(self) -> None:
        now = time.monotonic()
        if now - self._swept < _SWEEP:
            return
        disk = now // _SWEEP_DISK > self._swept // _SWEEP_DISK
        self._swept = now
        self._queue.sweep()
        self.promises.sweep()
        with self._lock:
            self._saves = {path: save for path, save in self._saves.items() if save.outcome is None}
            silent = [s for s in self._sessions.values() if now - s.heard > self._idle]
            for session in silent if now - self._ticked < _STILL else []:
                logger.warning(
                    "session %s ends: nothing was heard of it for %.0f s", session.name, self._idle
                )
                self.finish(session.name)
        if disk:
            try:
                self.saved.sweep()
            except Exception:  # samples that run do not end for it
                logger.exception("checkpoints that have expired could not be looked at")

    def _spoil(self, name: str, number: int) -> None:
        """The step that follows would be of a part of what its client asked for."""
        model = self._models.get(name)
        if model is not None:
            model.failed = number

    def _bar(self, model: Model, number: int) -> Reply:
        """The model does not have the weights that its client means; the SDK sends on before it knows."""
        self._queue.bar(
            model.name,
            f"nothing was done: the load of a state before this, request {number}, had failed, so this "
            "training has other weights than asked for. To fix: load a state that fits, or make another "
            "training",
        )
        return plain({})

    def _drop(self, sampler: Sampler) -> Reply:
        self._rounds.drop(sampler)
        return plain({})

    def _remove(self, name: str, why: str) -> None:
        """A model leaves; its memory is free once the worker comes to it."""
        model = self._models.pop(name)
        model.session.models.remove(name)
        self._queue.remove_model(name, f"the model is gone: {why}")
        self.promises.drop_owner(name)

        def forget() -> Reply:
            if model.made:
                self.backend.forget(name)
            return plain({})

        self._queue.control(Work(None, forget))

    # -- parts -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """The lock, unless the server is closing."""
        with self._lock:
            if self._closing:
                raise shutting_down()
            yield

    def _gone(self, kind: str, name: str | None, remedy: str) -> ApiError:
        return ApiError(
            404,
            f"there is no {kind} '{(name or '')[:100]}', or no longer: it ends with its session (after "
            f"{self._idle:.0f} s without a word from its client, {min(GONE, self._idle):.0f} s where another "
            f"needs the room) and with the server. To fix: {remedy}",
            code=f"{kind}_not_found",
        )

    def _check_base(self, name: str | None) -> None:
        if name != self.backend.base_model:
            raise bad(
                f"base_model '{name}' is not served here; it is {self.backend.base_model}", "base_model"
            )

    def _check_optimizer(self, config: Any) -> None:
        if config.type != "adamw":
            raise bad(f"the optimizer '{config.type}' is not supported by this server; use adamw")

    def _new_model(self, request: Any, part: LoraPart, create: Callable[[Model], Reply]) -> Promise:
        notes = metadata_of(request)
        with self._open():
            session = self.hear(request.session_id)
            if request.model_seq_id < 0:
                raise bad(f"model_seq_id is {request.model_seq_id}, required at least 0", "model_seq_id")
            name = f"{session.name}:train:{request.model_seq_id}"
            known = self.promises.get(f"{name}:0")
            if known is not None:
                return known
            if name in self._models:
                raise bad(f"there is a model {name}", "model_seq_id")
            if len(self._models) >= self.backend.slots:
                self._make_slot()
            assert part.rank is not None
            about = (part.rank, now(), notes, part.attn, part.mlp)
            run = Run(name, self.backend.base_model, *about)
            model = self._models[name] = Model(run, session)
            session.models.append(name)
            self._queue.add_model(name)

        def first() -> Reply:
            try:
                reply = create(model)
                model.made = True
                return reply
            except Exception:
                with self._lock:
                    if name in self._models:
                        self._remove(name, "it could not be made")
                raise

        return self._submit(model, 0, first)

    def _make_slot(self) -> None:
        """End the session with a model that has been silent for longest, if its client seems to be gone.

        Raises:
            ApiError: all clients live.
        """
        self.tick()
        session = min((model.session for model in self._models.values()), key=lambda own: own.heard)
        silent = time.monotonic() - session.heard
        if silent < min(GONE, self._idle):
            raise ApiError(
                400,
                f"this server takes {self.backend.slots} model(s), and all their clients live (the "
                f"most silent was heard {silent:.0f} s ago; after {GONE:.0f} s it makes room). To fix: end "
                'one with ServiceClient.close("success"), or start the server with '
                f"train_server.trainings={self.backend.slots + 1}",
                code="no_slot",
            )
        logger.warning("session %s ends: silent for %.0f s, and another needs its room", session.name, silent)
        self.finish(session.name)

    def _ordered(self, request: Any) -> tuple[Model, int]:
        """A request's model and its number there."""
        model = self.model(request.model_id)
        number = request.seq_id
        if number is None or number < 1:
            raise bad(f"seq_id is {number}, required at least 1: a model's requests are numbered", "seq_id")
        return model, number

    @contextlib.contextmanager
    def _numbered(
        self, model: Model, number: int, refused: Callable[[], Reply] | None = None
    ) -> Iterator[None]:
        """A request that is refused inside holds its place: those after it must not wait for it.

        Args:
            refused: what happens then, in the order of the model's requests.
        """
        try:
            yield
        except ApiError:
            self._take_number(model, number, refused)
            raise

    def _take_number(self, model: Model, number: int, refused: Callable[[], Reply] | None) -> None:
        with self._lock:
            if model.name in self._models and not self._queue.passed(model.name, number):
                self._queue.submit(model.name, number, Work(None, refused))

    def _submit(
        self,
        model: Model,
        number: int,
        run: Callable[[], Reply],
        *,
        ends_turn: bool = False,
        part: Pass | None = None,
        loads: bool = False,
    ) -> Promise:
        name = f"{model.name}:{number}"
        with self._open():
            known = self.promises.get(name)
            if known is not None:
                return known
            self.model(model.name)
            promise = Promise(name, model.name)
            if self._queue.passed(model.name, number):
                told = Failure(f"request {number} of this model ended long ago, or was refused")
                self.promises.add(promise)
                self.promises.settle(promise, told)
            else:
                self._queue.submit(model.name, number, Work(promise, run, ends_turn, part, loads))
                self.promises.add(promise)
            return promise

    def _save(self, request: Any, kind: str, *, overwrite: bool) -> Promise:
        model, number = self._ordered(request)
        with self._numbered(model, number):
            name = f"{number:06d}" if request.path is None else checked_name(request.path)
            expires = expiry(request.ttl_seconds)

        def save() -> Reply:
            if not overwrite and self.saved.exists(model.name, kind, name):
                raise bad(
                    f"there is a checkpoint {checkpoint_path(model.name, kind, name)}; choose another name"
                    + (", or overwrite=True" if kind == TRAINING else ", or delete it")
                )
            write = self.backend.save_state if kind == TRAINING else self.backend.save_adapter
            run = model.run
            saved = Saved(
                run.run,
                kind,
                name,
                run.base_model,
                run.rank,
                self.backend.settings,
                expires=expires,
                user_metadata=request.user_metadata,
                train_attn=run.train_attn,
                train_mlp=run.train_mlp,
            )
            saved = self.saved.save(run, saved, lambda directory: write(model.name, directory))
            return plain({"path": saved.path})

        promise = self._submit(model, number, save)
        with self._lock:
            self._saves[checkpoint_path(model.name, kind, name)] = promise
        return promise

    def _comes(self, path: str) -> bool:
        """Whether a checkpoint's save waits or runs."""
        save = self._saves.get(path)
        return save is not None and save.outcome is None

    def _add_sampler(self, session: Session, sampler: Sampler) -> None:
        if sampler.name not in self._samplers:
            self._samplers[sampler.name] = sampler
            session.samplers.append(sampler.name)
