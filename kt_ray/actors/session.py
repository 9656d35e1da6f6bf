"""A session of generation on a cluster: started, ended, and what an error leaves behind.

A part of `ActorCluster` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kt_ray.actors.recovery import find_lost
from kt_ray.actors.serving import ServeReport
from kt_ray.generate.requests import SessionSpec
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.transport.inbox import Found

if TYPE_CHECKING:
    from kt_ray.actors.cluster import ActorCluster

_ANEW = (
    "look for the kernel's out-of-memory killer (dmesg) and the actor's log, then start the same command "
    "again: mode=predict goes on where it stopped"
)


def serve_session(cluster: ActorCluster, spec: SessionSpec, opened: Callable[[], None]) -> list[ServeReport]:
    """`ActorCluster.serve`."""
    try:
        if cluster._broken:
            _mend(cluster)
        cluster._broken = True
        if cluster._inbox is not None:
            cluster._inbox.close()
        cluster._inbox = inbox = cluster._make_inbox()
        address = None if inbox is None else inbox.address
        rings = cluster._gather([(h, "open_outbox", (address,)) for h in cluster.workers], cluster.patience)
        for rank in (rank for rank, ring in enumerate(rings) if ring):
            assert inbox is not None
            inbox.expect(rank)
        opened()
        reports: list[ServeReport] = cluster._gather([(h, "serve", (spec,)) for h in cluster.handles], None)
    except ActorLost as error:
        raise ActorLost(error.what, where=error.where, observed=error.observed, remedy=_ANEW) from error
    cluster._broken = False
    return reports


def take_tokens(cluster: ActorCluster, rank: int, timeout: float) -> Found:
    """`ActorCluster.tokens`."""

    def fetch(wait: float) -> Found:
        future = cluster.workers[rank].listen("tokens", wait)
        if not cluster._wait([future], wait + cluster.specs.timeout):
            return [], True
        found: Found = cluster._result(future)
        return found

    inbox = cluster._inbox
    if inbox is None or not inbox.has(rank):
        return fetch(timeout)
    return inbox.take(rank, timeout, lambda: fetch(0.0))


def _mend(cluster: ActorCluster) -> None:
    """After a session that an error ended: mailboxes are emptied of what belongs to it."""
    lost = find_lost(cluster)  # aborts that are on their way have come then
    if lost:
        names = ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost))
        raise ActorLost("the last session of generation ended with a death", observed=names)
    cluster.discard()
