"""All actors in one process, one thread each, without Ray. Same classes, same plan, same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import ActorCluster, Handle
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.placement.transports import DEFAULT
from kt_ray.transport.messages import Address, LocalPort, Message


class LocalHandle(Handle):
    """A plain actor and its one compute thread."""

    def __init__(
        self, address: Address, actor: AttentionWorker | ExpertActor, compute: ThreadPoolExecutor
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
            compute = ThreadPoolExecutor(1, thread_name_prefix=f"{kind}-{address[1]}")
            build: Callable[..., AttentionWorker | ExpertActor] = (
                AttentionWorker if kind == "worker" else ExpertActor
            )
            actor = compute.submit(build, *arguments).result()
            actor.port = port
            deliver[address] = actor.deliver
            (self.workers if kind == "worker" else self.experts).append(LocalHandle(address, actor, compute))

    def _respawn(self, lost: AbstractSet[Address]) -> None:
        raise AssertionError("actors in the driver's own process do not die by themselves")

    def _wait(self, futures: Sequence[Future[Any]], timeout: float) -> list[Future[Any]]:
        return list(wait(futures, timeout=timeout, return_when=FIRST_COMPLETED).done)

    def _result(self, future: Future[Any]) -> Any:
        return future.result()

    def _close(self) -> None:
        for handle in self.handles:
            assert isinstance(handle, LocalHandle)
            handle.actor.abort("the cluster was shut down")
            handle.compute.submit(handle.actor.close)
            handle.compute.shutdown(wait=True)
