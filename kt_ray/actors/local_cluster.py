"""All actors in one process, one thread each, without Ray. Same classes, same plan, same bits."""

from __future__ import annotations

import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any, cast

from kt_ray.actors.actor_calls import GRACE, Handle
from kt_ray.actors.build_actor import build_actor
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.watch import ActorDied, Watch
from kt_ray.errors import UserError
from kt_ray.placement.transports import DEFAULT
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.transport.messages import Address, LocalPort, Message

if TYPE_CHECKING:
    from kt_ray.actors.attention_worker import AttentionWorker
    from kt_ray.actors.expert_actor import ExpertActor


class ComputeThread:
    """Runs calls one after another. A stuck one cannot be ended, but does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call, args = item
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
            del item, future, call, args  # else what they hold lives on while the thread waits

    def end(self, timeout: float | None = None) -> None:
        """After the calls so far; waits for that, `timeout` seconds at most."""
        self._calls.put(None)
        self._thread.join(timeout)

    def interrupt(self) -> None:
        """KeyboardInterrupt in the call under way, as soon as it runs Python again."""
        if self._thread.is_alive():
            ident = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(KeyboardInterrupt))


class LocalHandle(Handle):
    """A plain actor and its one compute thread."""

    def __init__(
        self, address: Address, actor: AttentionWorker | ExpertActor, compute: ComputeThread
    ) -> None:
        self.address = address
        self.actor = actor
        self.compute = compute

    def start(self, method: str, *args: Any) -> Future[Any]:
        return self.compute.submit(getattr(self.actor, method), *args)

    def control(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(self.actor, method)(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class LocalCluster(ActorCluster):
    """`cluster=local`."""

    _stuck = False  # an actor was given up, and its thread runs on

    def connect(self) -> list[str]:
        lines = ["cluster: all actors in this process, without Ray (cluster=local)"]
        if self.plan.transport != DEFAULT:
            lines.append("rule.transport changes nothing: within a process tensors do not travel")
        return lines

    def _spawn(self) -> None:
        deliver: dict[Address, Callable[[Message], None]] = {}
        port = LocalPort(deliver)
        for address, arguments in self.specs.arguments(self.plan).items():
            kind = address[0]
            # Built on its own thread: torch's thread count is a property of the calling thread.
            compute = ComputeThread(f"{kind}-{address[1]}")
            actor = compute.submit(build_actor, kind, *arguments).result()
            actor.port = port
            deliver[address] = actor.deliver
            (self.workers if kind == "worker" else self.experts).append(LocalHandle(address, actor, compute))

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        raise AssertionError("actors in the driver's own process do not die by themselves")

    def _kill(self, lost: AbstractSet[Address]) -> None:
        pass

    def _look(self, watch: Watch, working: Collection[int]) -> list[tuple[int, ActorDied]]:
        """Raises UserError: an actor is stuck. A thread cannot be replaced."""
        try:
            found = super()._look(watch, working)
        except ActorLost as lost:
            what, remedy = lost.what, lost.remedy
        else:
            if not found:
                return found
            ((i, death), *_) = found
            what, remedy = f"{self.handles[i].name} {death.how}", death.remedy
        self._stuck = True
        self._abort(what)
        raise UserError(
            what,
            observed=watch.report(),
            remedy=f"{remedy}; with cluster=ray the run replaces such an actor, a thread it cannot",
        )

    def _wait(self, futures: Sequence[Future[Any]], timeout: float) -> list[Future[Any]]:
        return list(wait(futures, timeout=timeout, return_when=FIRST_COMPLETED).done)

    def _result(self, future: Future[Any]) -> Any:
        return future.result()

    def _close(self) -> None:
        handles = cast(list[LocalHandle], self.handles)
        for handle in handles:
            handle.actor.abort("the cluster was shut down")
        # An error or a signal does not wait until a large model is loaded.
        hurried = self._stuck or sys.exc_info()[0] is not None
        deadline = time.monotonic() + GRACE
        for handle in handles:
            handle.compute.submit(handle.actor.close)
            handle.compute.end(max(0.0, deadline - time.monotonic()) if hurried else None)
        if hurried:
            # The end of the process would abort a thread amid torch, with another exit code.
            for handle in handles:
                handle.compute.interrupt()
            deadline = time.monotonic() + GRACE
            for handle in handles:
                handle.compute.end(max(0.0, deadline - time.monotonic()))
