"""A cluster as a set of actor handles: everything that Ray and one process have in common.

Loading, steps, generation sessions, and recovery from a death. Recovery may fail because one more actor dies;
it then begins again from the start, since an actor counts as lost until its weights are loaded.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, TypeVar

import psutil
import torch

from kt_ray.actors.actor import title
from kt_ray.actors.actor_calls import NOTICE, ActorCalls
from kt_ray.actors.specs import ActorSpecs, lent_experts, share_weights
from kt_ray.actors.watch import ActorDied, Watch
from kt_ray.batch import WHOLE, LoraPart, PassSpec
from kt_ray.generate.requests import GenerationReport, Request, SessionSpec
from kt_ray.optim.optimizers import AdamStep, largest
from kt_ray.placement.plan_types import Budget, Plan
from kt_ray.placement.render import gib
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train.recovery import Recovery
from kt_ray.train.reports import PassReport
from kt_ray.transport.inbox import Inbox, TokenBatch
from kt_ray.transport.messages import Address, Message

logger = logging.getLogger(__name__)

T = TypeVar("T")
LoadNote = Callable[[str, int, int, int], None]  # (actor, layer, bytes done, bytes in total)


class ActorCluster(ActorCalls):
    """`kt_ray.train.cluster_protocol.Cluster` over handles.

    Attributes:
        recoveries: how often actors were replaced.
        say: lines for the user about deaths before the first step.
    """

    def __init__(self, plan: Plan, specs: ActorSpecs, on_load: LoadNote | None = None) -> None:
        super().__init__(specs)
        self.plan = plan
        self._weights_files: list[int] = []  # descriptors, see share_weights
        self._on_load = on_load
        self._load_noted: dict[str, tuple[int, int, int]] = {}
        self.recoveries = 0
        self.say: Callable[[str], None] = logger.warning
        self._tokens = itertools.count(1)  # of the rounds of messages that steps end in
        self._closed = False
        self._inbox: Inbox | None = None  # of the last session
        self._broken = False  # the last session of generation ended with an error

    # -- what a subclass provides -------------------------------------------------------------

    @abstractmethod
    def connect(self) -> list[str]:
        """Connect to or start the system that runs the actors; returns lines for the user."""

    @abstractmethod
    def _spawn(self) -> None:
        """Fill `workers` and `experts`, and connect their ports."""

    @abstractmethod
    def _respawn(self, lost: AbstractSet[Address]) -> None:
        """Put new actors, not loaded, in the places of those lost, and connect all ports again.

        Raises:
            ActorLost: another one died meanwhile.
            UserError: there is no place for one.
        """

    @abstractmethod
    def _kill(self, lost: AbstractSet[Address]) -> None:
        """End the processes of actors that may only seem dead."""

    @abstractmethod
    def _close(self) -> None:
        """Stop the actors and what was started for them."""

    # -- life ---------------------------------------------------------------------------------

    def start(self) -> list[dict[str, Any]]:
        """Spawn, load, connect. Returns one dict of facts per actor (pid, ISA, bytes, seconds).

        An actor that dies meanwhile is replaced, `trainer.recoveries` times; the others load on.

        Raises:
            UserError: what an actor says of the model or the machine; or all recoveries are used up.
        """
        recovery = Recovery(self, self.specs.recoveries, None, self.say)
        deaths: Counter[Address] = Counter()
        loading: dict[Address, Any] = {}
        facts: dict[Address, dict[str, Any]] = {}
        while True:
            try:
                if not self.handles:
                    self.specs, self._weights_files = share_weights(self.plan, self.specs)
                    self._spawn()
                for address in self._replaced():
                    loading.pop(address, None)
                    facts.pop(address, None)
                # Of those that a death after all were loaded has left, if any.
                self._lend_experts({h.address for h in self.handles} - facts.keys())
                self._load(loading, facts)
                if self.recoveries:
                    self._call(self.handles, "discard")  # of a beginning that a death ended
                self._begin()
                self._lend_experts()
                return self.info()  # now with what workers say of the memory that they have opened
            except ActorLost as lost:
                deaths.update(self._lost)
                recovery.count(self._short_of_memory(lost, deaths))

    def _replaced(self) -> frozenset[Address]:
        """New actors in the places of those lost, if any are; returns whose places these are."""
        if not self._lost:
            return frozenset()
        self._respawn(self._find_lost())
        lost = frozenset(self._lost)  # more may have died and been replaced meanwhile
        self._lost.clear()
        return lost

    def _load(self, calls: dict[Address, Any], facts: dict[Address, dict[str, Any]]) -> None:
        """Until every actor is loaded.

        Args:
            calls: load calls under way; those that are missing are added.
            facts: of the actors whose calls have ended.
        """
        for handle in self.handles:
            if handle.address not in calls:
                calls[handle.address] = handle.start("load")
        watch = self._watch(self.handles)
        while waiting := [i for i, handle in enumerate(self.handles) if handle.address not in facts]:
            done = self._wait([calls[self.handles[i].address] for i in waiting], watch.pause)
            for i in waiting:
                handle = self.handles[i]
                if any(calls[handle.address] is future for future in done):
                    try:
                        facts[handle.address] = self._result(calls[handle.address])
                    except ActorDied as error:
                        raise self._death(handle, error) from error
            if not watch.pause:
                for i, death in self._look(watch, waiting):
                    raise self._death(self.handles[i], death)
                self._note_load(watch)

    def _short_of_memory(self, lost: ActorLost, deaths: Mapping[Address, int]) -> ActorLost:
        """The same error; if an actor died again while it loaded, with what it needs and what there is."""
        again = [address for address, count in deaths.items() if count > 1]
        if not again:
            return lost
        of_host: dict[int, list[Budget]] = {}
        for budget in self.plan.budgets:
            if budget.is_socket:
                of_host.setdefault(budget.host, []).append(budget)
        free = (
            f", {gib(psutil.virtual_memory().available)} free on this machine now"
            if len(of_host) == 1
            else ""
        )
        hosts = [
            f"the plan needs {gib(sum(b.total for b in budgets))} of the memory of host {host}, which has "
            f"{gib(sum(b.capacity for b in budgets))}"
            for host, budgets in of_host.items()
        ]
        return ActorLost(
            f"{', '.join(map(title, sorted(again)))} died again while loading",
            observed=f"{lost.observed}; {'; '.join(hosts)}{free}",
            remedy=lost.remedy,
        )

    def at_start(self, work: Callable[[], T]) -> T:
        """`work()` on the state that `start` left, and again from that state whenever an actor is lost in it.

        Args:
            work: all that is done with the actors before they have something to lose.
        """
        recovery = Recovery(self, self.specs.recoveries, None, self.say)
        while True:
            try:
                return work()
            except ActorLost as lost:
                recovery.bring_back(lost, 0)

    def _begin(self) -> None:
        """Masters from the stages' initial LoRA, and everyone computes with them."""
        self._make_masters()
        self._call(self.workers, "start_masters", next(self._tokens))
        self._publish()

    def _make_masters(self) -> None:
        shapes = self._call(self.workers[: self.plan.stages], "parameter_shapes")  # of replica 0
        self._call(self.workers[:1], "hold_masters", shapes)

    def _note_load(self, watch: Watch) -> None:
        """One line per change: an actor that is done waits for the others without a word."""
        for handle, status in zip(self.handles, watch.statuses, strict=True):
            if self._on_load is None or status is None or handle.address[0] != "experts":
                continue
            if status.loaded[2] and self._load_noted.get(handle.name) != status.loaded:
                self._load_noted[handle.name] = status.loaded
                self._on_load(handle.name, *status.loaded)

    def _publish(self) -> None:
        self._call(self.handles, "publish", next(self._tokens))

    def info(self) -> list[dict[str, Any]]:
        """The facts of `start` as they are now (kernel calls so far)."""
        return self._all("info")

    def shutdown(self) -> None:
        """Stop all actors and whatever was started for them. Safe to call twice."""
        if not self._closed:
            self._closed = True
            self._close()
            for file in self._weights_files:
                os.close(file)
            if self._inbox is not None:
                self._inbox.close()

    # -- a step -------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> PassReport:
        self._tracing = spec.profile is not None
        try:
            reports = self._all("run_pass", spec)
        finally:
            self._tracing = False
        workers = tuple(reports[: len(self.workers)])
        loss = sum(w.loss_sum for w in workers) / max(1, spec.loss_tokens)
        micro = (tuple(workers[rank].losses for rank in self.coordinators),)
        return PassReport(loss, workers, tuple(reports[len(self.workers) :]), micro)

    def prepare(self, step: int) -> float:
        return float(sum(self._all("prepare", step, next(self._tokens))))

    def commit(self, step: int, lr: float, clip: float, adam: AdamStep | None = None) -> float:
        return float(max(self._all("commit", step, lr, clip, next(self._tokens), adam)))

    def discard(self) -> None:
        self._settle_aborts()
        self._all("discard")
        self._broken = False

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
            reports: list[GenerationReport] = self._all("generate", spec)
        except ActorLost as error:
            self._kill(self._lost)  # else whoever asks a frozen one for tokens waits for it
            raise ActorLost(
                error.what,
                where=error.where,
                observed=error.observed,
                remedy=f"{error.remedy}; then start the same command again (mode=predict continues "
                "where it stopped)",
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
        self, rank: int, kind: str, session: int, number: int = -1, requests: Sequence[Request] = ()
    ) -> None:
        """Send a coordinator a "request", "cancel" or "stop"; returns at once.

        Args:
            requests: that have the numbers from `number` on.
        """
        facts = {"requests": tuple(requests)} if requests else {}
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

    def load_adapter(self, directory: str, one_of_several: bool = False) -> int:
        """Every actor takes its own tensors of a PEFT adapter; returns how many there were.

        Args:
            one_of_several: modules that the adapter does not have get zeros.

        Raises:
            UserError: the file lacks one, or has another shape for it.
        """
        count = int(sum(self._all("load_adapter", directory, one_of_several)))
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
        self._lend_experts()
        return count

    def _lend_experts(self, lost: AbstractSet[Address] = frozenset()) -> None:
        """Workers with a lane open the memory of the expert actors that they read.

        Args:
            lost: not loaded again yet. The others let go of their memory: it would stay beside the new one.
        """
        present = [h for h in self.workers if h.address not in lost]
        readers = [h for h in present if lent_experts(self.plan, h.address[1])]
        lent = {rank for h in readers for rank in lent_experts(self.plan, h.address[1])}
        owners = [h for h in self.experts if h.address[1] in lent and h.address not in lost]
        if not readers:
            return
        exports = self._call(owners, "export_experts")
        try:
            self._call(readers, "take_experts", exports)
        except ActorLost:
            raise
        except Exception:
            self._call(owners, "export_experts")  # raises ActorLost where one is gone, and its memory with it
            raise

    # -- after a death ------------------------------------------------------------------------

    def recover(self) -> int | None:
        lost = self._find_lost()
        self._broken = False  # mailboxes are emptied here, once; later it would cost gradients
        logger.info("lost: %s", ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost)))
        # Queued behind an actor's present call, so afterwards no actor is in the old pass.
        self._call([h for h in self.handles if h.address not in lost], "discard")
        self._respawn(lost)
        lost = frozenset(self._lost)  # more may have died and been replaced meanwhile
        self._lend_experts(lost)
        again = [h for h in self.handles if h.address in lost]
        for fact in self._call(again, "load_again"):
            logger.info("%s is back, process %d", fact["actor"], fact["pid"])
        self._lost -= lost
        state = self.committed()
        if state is None:
            self._make_masters()
        else:
            self._publish()
        self._lend_experts()
        for fact in self._call(again, "info"):
            for note in fact.get("notes", ()):  # a run shows them at its start
                logger.warning("%s: %s", fact["actor"], note)
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
        self._kill(self._lost)  # else `_settle_aborts` waits a minute for a frozen one
        self._settle_aborts(deadline)
        return frozenset(self._lost)

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

    def restore(self, directory: str, step: int, optimizer: bool = True) -> None:
        self._all("restore", directory, step, optimizer)
        self._publish()

    # -- several trainings over one base ------------------------------------------------------

    def switch_training(
        self, name: str, before: str | None, seed: int | None = None, part: LoraPart = WHOLE
    ) -> None:
        """Put the present training aside under the name `before` (None = it ends), go on with another one.

        Args:
            seed: of a new one's initial LoRA; None = one that was put aside. part: that it is limited to.
        """
        self._all("switch_training", name, before, seed, part)
        if seed is not None:
            self._begin()

    def end_training(self, name: str) -> None:
        """Forget one that was put aside."""
        self._all("end_training", name)

    def keep_adapter(self, name: str) -> None:
        """Keep a copy of the present LoRA for passes and requests that name it."""
        self._all("keep_adapter", name, True)
        self._lend_experts()

    def drop_adapter(self, name: str) -> None:
        """Forget such a copy."""
        self._all("drop_adapter", name)

    def write_adapter(self, directory: str, layout: Any, which: bool | str = True) -> int:
        return int(sum(self._all("write_adapter", directory, layout, which)))
