"""A cluster as a set of actor handles: everything that Ray and one process have in common.

Calls of all actors, loading, steps, generation sessions, and recovery from a death. Recovery may fail because
one more actor dies; it then begins again from the start, since an actor counts as lost until its weights are
loaded.
"""

from __future__ import annotations

import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch

from kt_ray.actors.actor import title
from kt_ray.actors.generation_session import GenerationReport
from kt_ray.actors.specs import ActorSpecs
from kt_ray.batch import PassSpec
from kt_ray.errors import UserError
from kt_ray.generate.requests import Request, SessionSpec
from kt_ray.optim.optimizers import largest
from kt_ray.placement.plan_types import Plan
from kt_ray.train.cluster_protocol import ActorLost, GivenUp
from kt_ray.train.reports import PassReport
from kt_ray.transport.inbox import Inbox, TokenBatch
from kt_ray.transport.messages import Aborted, Address, Message

logger = logging.getLogger(__name__)

LoadNote = Callable[[str, int, int, int], None]  # (actor, layer, bytes done, bytes in total)
GRACE = 15.0  # seconds the other actors get to notice an abort
POLL = 0.5  # seconds between looks at load progress
NOTICE = 60.0  # seconds in which the death of an actor, or of its node, becomes known


class ActorDied(RuntimeError):
    """An actor's process is gone."""


class Handle(ABC):
    """One actor. `start` runs a method on its compute thread, `control` beside it."""

    address: Address

    @property
    def name(self) -> str:
        return title(self.address)

    @abstractmethod
    def start(self, method: str, *args: Any) -> Any:
        """Call on the compute thread; returns a future."""

    @abstractmethod
    def control(self, method: str, *args: Any) -> Any:
        """Call on the control thread; returns a future."""

    def listen(self, method: str, *args: Any) -> Any:
        """Call on the thread for calls that wait for something; returns a future."""
        return self.control(method, *args)


class ActorCluster(ABC):
    """`kt_ray.train.cluster_protocol.Cluster` over handles."""

    def __init__(self, plan: Plan, specs: ActorSpecs, on_load: LoadNote | None = None) -> None:
        self.plan = plan
        self.specs = specs
        self.workers: list[Handle] = []
        self.experts: list[Handle] = []
        self._on_load = on_load
        self._load_noted: dict[str, tuple[int, int, int]] = {}
        self._tokens = itertools.count(1)  # of the rounds of messages that steps end in
        self._closed = False
        self._inbox: Inbox | None = None  # of the last session
        self._broken = False  # the last session of generation ended with an error
        self._lost: set[Address] = set()  # actors that died since the last recovery
        self._aborts: list[Any] = []  # calls that may still be on their way
        self.give_up: Callable[[], str] = lambda: ""

    # -- what a subclass provides -------------------------------------------------------------

    @abstractmethod
    def connect(self) -> list[str]:
        """Connect to or start the system that runs the actors; returns lines for the user."""

    @abstractmethod
    def _spawn(self) -> None:
        """Fill `workers` and `experts`, and connect their ports."""

    @abstractmethod
    def _wait(self, futures: Sequence[Any], timeout: float) -> list[Any]:
        """Block until at least one is done or `timeout` seconds passed; returns those done."""

    @abstractmethod
    def _result(self, future: Any) -> Any:
        """A done future's value, or its error raised (`ActorDied` when the process is gone)."""

    @abstractmethod
    def _respawn(self, lost: AbstractSet[Address]) -> None:
        """Put new actors, not loaded, in the places of those lost, and connect all ports again.

        Raises:
            ActorLost: another one died meanwhile.
            UserError: there is no place for one.
        """

    @abstractmethod
    def _close(self) -> None:
        """Stop the actors and what was started for them."""

    # -- calling ------------------------------------------------------------------------------

    @property
    def handles(self) -> list[Handle]:
        return [*self.workers, *self.experts]

    def _gather(
        self,
        handles: Sequence[Handle],
        method: str,
        args: tuple[Any, ...] = (),
        timeout: float | None = None,
        while_waiting: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Call a method of some actors in parallel.

        Returns all results in order, or raises the error that caused the others.

        Args:
            timeout: seconds; None = the actors' own deadlines decide (each waits for a message at most
                `trainer.step_timeout`, so the actors that wait for a hanging one report it).
        """
        futures = [handle.start(method, *args) for handle in handles]
        position = {id(future): i for i, future in enumerate(futures)}
        results: list[Any] = [None] * len(futures)
        pending = list(futures)
        errors: list[tuple[Handle, BaseException]] = []
        deadline = time.monotonic() + timeout if timeout is not None else float("inf")
        # Nothing of a step is applied yet.
        may_give_up = method in ("run_pass", "prepare", "load_again")
        while pending:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break
            done = self._wait(pending, min(remaining, POLL))
            if may_give_up and not errors and (reason := self.give_up()):
                self._abort(reason)
                deadline = min(deadline, time.monotonic() + NOTICE)
                errors.append((handles[0], GivenUp(reason)))
            if while_waiting is not None and not errors:
                while_waiting()
            for future in done:
                i = position[id(future)]
                try:
                    results[i] = self._result(future)
                except Exception as error:
                    died = isinstance(error, ActorDied)
                    if not errors:
                        self._abort(f"{handles[i].name} failed in {method}: {type(error).__name__}: {error}")
                        # An actor may notice a peer's death before Ray does: then the cause comes after
                        # its error.
                        sure = died or isinstance(error, UserError)
                        deadline = min(deadline, time.monotonic() + (GRACE if sure else NOTICE))
                    if died:
                        deadline = min(deadline, time.monotonic() + GRACE)
                        self._lost.add(handles[i].address)
                    errors.append((handles[i], error))
            pending = [future for future in pending if not any(future is d for d in done)]
        if errors:
            raise self._cause(errors)
        if pending:
            states = self._states()
            self._abort("deadline passed")
            raise UserError(
                f"no answer to {method} within {timeout or GRACE:.0f} s",
                observed=" | ".join(states),
                remedy="if the work is only slow, raise trainer.step_timeout (loading: cluster.load_timeout)",
            )
        return results

    def _call(self, handles: Sequence[Handle], method: str, *args: Any) -> list[Any]:
        """`_gather` with a deadline later than the actors' own, whose errors say what was missing."""
        return self._gather(handles, method, args, self.specs.timeout + GRACE)

    def _all(self, method: str, *args: Any) -> list[Any]:
        return self._call(self.handles, method, *args)

    def _cause(self, errors: list[tuple[Handle, BaseException]]) -> BaseException:
        """The error that the others follow from: a user's error, then a death, then any but Aborted."""

        def place(item: tuple[Handle, BaseException]) -> int:
            error = item[1]
            if isinstance(error, UserError):
                return 0
            if isinstance(error, ActorDied):
                return 1
            return 3 if isinstance(error, Aborted) else 2

        handle, error = min(errors, key=place)
        return self._death(handle, error) if isinstance(error, ActorDied) else error

    def _death(self, handle: Handle, error: ActorDied) -> ActorLost:
        self._lost.add(handle.address)
        return ActorLost(
            f"{handle.name} died",
            observed=str(error),
            remedy="look for the kernel's out-of-memory killer (dmesg) and the actor's log, then "
            "continue from the last checkpoint with trainer.resume=latest",
        )

    def _states(self) -> list[str]:
        states = []
        for handle in self.handles:
            future = handle.control("status")
            done = self._wait([future], 5.0)
            try:
                states.append(self._result(future) if done else f"{handle.name}: does not answer")
            except Exception as error:
                states.append(f"{handle.name}: {error}")
        return states

    def _abort(self, reason: str) -> None:
        self._aborts += [handle.control("abort", reason) for handle in self.handles]

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> list[dict[str, Any]]:
        """Spawn, load, connect. Returns one dict of facts per actor (pid, ISA, bytes, seconds)."""
        self._spawn()
        facts = self._load(self.handles, "load")
        self._begin()
        return facts

    def _load(self, handles: Sequence[Handle], method: str) -> list[dict[str, Any]]:
        note = self._note_load if self._on_load else None
        return self._gather(handles, method, (), self.specs.load_timeout, note)

    def _begin(self) -> None:
        """Masters from the stages' initial LoRA, and everyone computes with them."""
        self._make_masters()
        self._call(self.workers, "start_masters", next(self._tokens))
        self._publish()

    def _make_masters(self) -> None:
        shapes = self._call(self.workers[: self.plan.stages], "parameter_shapes")  # of replica 0
        self._call(self.workers[:1], "hold_masters", shapes)

    def _note_load(self) -> None:
        assert self._on_load is not None
        futures = [(h, h.control("progress")) for h in self.experts]
        for handle, future in futures:
            if self._wait([future], 1.0):
                try:
                    layer, done, total = self._result(future)
                except Exception:
                    continue  # its load call carries the error
                # One line per change: an actor that is done waits for the others without a word.
                if total and self._load_noted.get(handle.name) != (layer, done, total):
                    self._load_noted[handle.name] = (layer, done, total)
                    self._on_load(handle.name, layer, done, total)

    def _publish(self) -> None:
        self._call(self.workers, "publish", next(self._tokens))

    def info(self) -> list[dict[str, Any]]:
        """The facts of `start` as they are now (kernel calls so far)."""
        return self._all("info")

    def shutdown(self) -> None:
        """Stop all actors and whatever was started for them. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._close()
            if self._inbox is not None:
                self._inbox.close()

    # -- a step -------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> PassReport:
        reports = self._gather(self.handles, "run_pass", (spec,))
        workers = tuple(reports[: len(self.workers)])
        loss = sum(w.loss_sum for w in workers) / max(1, spec.loss_tokens)
        micro = (tuple(workers[rank].losses for rank in self.coordinators),)
        return PassReport(loss, workers, tuple(reports[len(self.workers) :]), micro)

    def prepare(self, step: int) -> float:
        return float(sum(self._all("prepare", step, next(self._tokens))))

    def commit(self, step: int, lr: float, clip: float) -> float:
        return float(max(self._all("commit", step, lr, clip, next(self._tokens))))

    def discard(self) -> None:
        self._settle_aborts()
        self._all("discard")

    def skip(self, step: int) -> None:
        self._settle_aborts()
        self._all("skip", step)

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        norms = [item for part in self._all("largest_gradients", count) for item in part]
        return largest(norms, count)

    # -- generation ---------------------------------------------------------------------------

    def generate(self, spec: SessionSpec, opened: Callable[[], None]) -> list[GenerationReport]:
        """One session of generation: returns, or raises what an actor raised, when it is over.

        After an error the next session begins with the actors' mailboxes empty: the cluster stays usable
        as long as all of its actors are alive.

        Args:
            opened: called once requests can be sent.

        Raises:
            ActorLost: an actor died; generation then needs a new cluster.
        """
        try:
            if self._broken:
                self._empty_mailboxes()
            self._broken = True
            if self._inbox is not None:
                self._inbox.close()
            self._inbox = inbox = self._make_inbox()
            address = None if inbox is None else inbox.address
            for rank, rings in enumerate(self._call(self.workers, "open_outbox", address)):
                if inbox is not None and rings:
                    inbox.expect(rank)
            opened()
            reports: list[GenerationReport] = self._gather(self.handles, "generate", (spec,))
        except ActorLost as error:
            raise ActorLost(
                error.what,
                where=error.where,
                observed=error.observed,
                remedy="look for the kernel's out-of-memory killer (dmesg) and the actor's log, then start "
                "the same command again: mode=predict continues where it stopped",
            ) from error
        self._broken = False
        return reports

    def _empty_mailboxes(self) -> None:
        """After a session that an error ended."""
        lost = self._find_lost()  # also waits for aborts that are on their way
        if lost:
            names = ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost))
            raise ActorLost("the last session of generation ended with a death", observed=names)
        self.discard()

    @property
    def vocab_size(self) -> int:
        """Token ids of requests are less."""
        return self.plan.dims.vocab_size

    @property
    def coordinators(self) -> list[int]:
        """Rank of each replica's last stage: it has the head, and takes the replica's requests."""
        plan = self.plan
        return [plan.worker(replica, plan.stages - 1).rank for replica in range(plan.replicas)]

    def instruct(
        self, rank: int, kind: str, session: int, number: int = -1, request: Request | None = None
    ) -> None:
        """Send a coordinator a "request", "cancel" or "stop"; returns at once."""
        facts = {} if request is None else {"request": request}
        self.workers[rank].control("deliver", Message((kind, session, number), {}, facts))

    def tokens(self, rank: int, timeout: float) -> TokenBatch:
        """What a coordinator has generated since the last call, waiting up to `timeout` seconds for some.

        May be called beside `generate`, from one thread per coordinator.

        Returns:
            The tokens, and whether more can come.
        """

        def fetch(wait: float) -> TokenBatch:
            future = self.workers[rank].listen("tokens", wait)
            if not self._wait([future], wait + self.specs.timeout):
                return [], True
            batch: TokenBatch = self._result(future)
            return batch

        if self._inbox is None or not self._inbox.has(rank):
            return fetch(timeout)
        return self._inbox.take(rank, timeout, lambda: fetch(0.0))

    def _make_inbox(self) -> Inbox | None:
        """For the tokens of a session; None = the driver polls coordinators."""
        return None

    def load_adapter(self, directory: str) -> int:
        """Every actor takes its own tensors of a PEFT adapter; returns how many there were.

        Raises:
            UserError: the file lacks one, or has another shape for it.
        """
        count = int(sum(self._all("load_adapter", directory)))
        self._publish()
        return count

    def load_adapters(self, adapters: Mapping[str, str]) -> int:
        """Several PEFT adapters at once, each for the requests that name it; returns the number of tensors.

        Args:
            adapters: name -> directory. The LoRA settings of the actors cover all of them.

        Raises:
            UserError: as `load_adapter`.
        """
        count = 0
        for number, (name, directory) in enumerate(adapters.items(), 1):
            count += int(sum(self._all("load_adapter", directory, True)))
            self._publish()
            copy = number < len(adapters)  # the last one's memory is not needed again
            self._all("keep_adapter", name, copy)
        return count

    # -- after a death ------------------------------------------------------------------------

    def recover(self) -> int | None:
        lost = self._find_lost()
        logger.info("lost: %s", ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost)))
        # Queued behind an actor's present call, so afterwards no actor is in the old pass.
        self._call([h for h in self.handles if h.address not in lost], "discard")
        self._respawn(lost)
        lost = frozenset(self._lost)  # more may have died and been replaced meanwhile
        for fact in self._load([h for h in self.handles if h.address in lost], "load_again"):
            logger.info("%s is back, process %d", fact["actor"], fact["pid"])
            for note in fact.get("notes", ()):  # a run shows them at its start
                logger.warning("%s: %s", fact["actor"], note)
        self._lost -= lost
        state = self.committed()
        if state is None:
            self._make_masters()
        else:
            self._publish()
        return state

    def committed(self) -> int | None:
        # The other workers hold only what worker 0 sends them.
        states = set(self._call([self.workers[0], *self.experts], "committed"))
        return int(states.pop()) if len(states) == 1 and None not in states else None

    def _find_lost(self) -> frozenset[Address]:
        """All dead actors: a call of theirs failed, or they do not answer."""
        deadline = time.monotonic() + NOTICE
        pending = [(h.address, h.control("status")) for h in self.handles if h.address not in self._lost]
        self._lost |= {address for address, future in pending if not self._answers(future, deadline)}
        self._settle_aborts(deadline)
        return frozenset(self._lost)

    def _settle_aborts(self, deadline: float | None = None) -> None:
        """Wait for pending aborts: an abort that arrives after the next `discard` would end the next pass."""
        if deadline is None:
            deadline = time.monotonic() + NOTICE
        for future in self._aborts:
            self._answers(future, deadline)
        self._aborts.clear()

    def _answers(self, future: Any, deadline: float) -> bool:
        if not self._wait([future], max(0.0, deadline - time.monotonic())):
            return False
        try:
            self._result(future)
        except ActorDied:
            return False
        except Exception:
            logger.exception("an actor answers with an error")
        return True

    def restart(self) -> None:
        self._all("restart")
        self._begin()

    # -- by name ------------------------------------------------------------------------------

    def _merged(self, method: str) -> dict[str, Any]:
        return {name: value for part in self._all(method) for name, value in part.items()}

    def parameters(self) -> dict[str, torch.Tensor]:
        """All LoRA parameters by name (small models, tests)."""
        return self._merged("parameters")

    def gradients(self) -> dict[str, torch.Tensor]:
        """All LoRA gradients by name, summed over replicas (small models, tests)."""
        total: dict[str, torch.Tensor] = {}
        for values in self._all("gradients"):
            for name, value in values.items():
                total[name] = total[name] + value if name in total else value
        return total

    def set_parameters(self, values: dict[str, torch.Tensor]) -> None:
        """Overwrite LoRA parameters by name (tests)."""
        self._all("set_parameters", values)
        self._publish()

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return self._merged("parameter_shapes")

    def save_shards(self, directory: str) -> list[Any]:
        return [shard for shard in self._all("save_shard", directory) if shard is not None]

    def restore(self, directory: str, step: int) -> None:
        self._all("restore", directory, step)
        self._publish()

    def write_adapter(self, directory: str, layout: Any) -> int:
        return int(sum(self._all("write_adapter", directory, layout)))
