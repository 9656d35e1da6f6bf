"""An in-process cluster whose actors die when a test says so: fast, and at an exact place."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.local_cluster import ComputeThread, LocalCluster, LocalHandle
from kt_ray.actors.watch import ActorDied
from kt_ray.transport.messages import Address, Message, Tag


@dataclass
class Death:
    """An actor dies in the `call`-th call (from 1) of a method.

    when: "before" it does anything, "after" all of it, or in it, when it wants its n-th message (after it, if
        it wants fewer).
    """

    address: Address
    method: str
    call: int
    when: str | int = "before"


class MortalHandle(LocalHandle):
    """A handle that counts calls, and knows when the actor behind it dies."""

    def __init__(self, handle: LocalHandle, cluster: MortalCluster) -> None:
        super().__init__(handle.address, handle.actor, handle.compute)
        self.cluster = cluster
        self.dead = False

    def start(self, method: str, *args: Any) -> Future[Any]:
        return self.compute.submit(self._call, method, args)

    def control(self, method: str, *args: Any) -> Future[Any]:
        if not self.dead:
            return super().control(method, *args)
        future: Future[Any] = Future()
        future.set_exception(ActorDied("killed"))
        return future

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        if self.dead:
            raise ActorDied("killed")
        death = self.cluster.due(self.address, method)
        if death is None:
            return getattr(self.actor, method)(*args)
        if death.when == "after":
            getattr(self.actor, method)(*args)
        elif isinstance(death.when, int):
            take, left = self.actor.mailbox.take, [death.when]

            def mortal(tag: Tag, **options: Any) -> Message:
                left[0] -= 1
                if left[0] <= 0:
                    self.die()
                return take(tag, **options)

            self.actor.mailbox.take = mortal  # type: ignore[method-assign]
            getattr(self.actor, method)(*args)
        return self.die()

    def die(self) -> None:
        self.dead = True
        self.cluster.happened += 1
        raise ActorDied("killed")


class MortalCluster(LocalCluster):
    """`deaths` happen once each; `happened` counts them."""

    deaths: Sequence[Death] = ()
    happened = 0
    _look = ActorCluster._look  # a death is one, not a thread that is stuck

    def _spawn(self) -> None:
        super()._spawn()
        self._calls: dict[tuple[Address, str], int] = {}
        self._lock = threading.Lock()
        first = self.workers[0]
        assert isinstance(first, LocalHandle)
        self._port: Any = first.actor.port
        for handles in (self.workers, self.experts):
            for rank, handle in enumerate(handles):
                assert isinstance(handle, LocalHandle)
                handles[rank] = MortalHandle(handle, self)

    def due(self, address: Address, method: str) -> Death | None:
        with self._lock:
            call = self._calls[address, method] = self._calls.get((address, method), 0) + 1
        here = [d for d in self.deaths if (d.address, d.method, d.call) == (address, method, call)]
        return here[0] if here else None

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        specs = self.specs
        for kind, rank in lost:
            handles = self.workers if kind == "worker" else self.experts
            old = handles[rank]
            assert isinstance(old, MortalHandle)
            old.dead = True  # as under Ray, what only seemed dead is let go
            compute = ComputeThread(f"{kind}-{rank}")
            if kind == "worker":
                build = (AttentionWorker, self.plan, rank, specs.stages[rank], specs.optim, specs.timeout)
            else:
                build = (ExpertActor, self.plan, specs.experts[rank], specs.timeout)
            old.compute.submit(old.actor.close)
            old.compute.end()
            actor = compute.submit(*build).result()
            actor.port = self._port
            self._port._deliver[kind, rank] = actor.deliver
            handles[rank] = MortalHandle(LocalHandle((kind, rank), actor, compute), self)
