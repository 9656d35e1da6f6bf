"""A session of generation on a cluster: started, ended, and what an error leaves behind.

A part of `ActorCluster` in a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kt_ray.actors.recovery import find_lost
from kt_ray.actors.serving import ServeReport
from kt_ray.generate.requests import SessionSpec
from kt_ray.train.cluster import ActorLost

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
        cluster._gather([(h, "open_outbox", ()) for h in cluster.workers], cluster.patience)
        opened()
        reports: list[ServeReport] = cluster._gather([(h, "serve", (spec,)) for h in cluster.handles], None)
    except ActorLost as error:
        raise ActorLost(error.what, where=error.where, observed=error.observed, remedy=_ANEW) from error
    cluster._broken = False
    return reports


def _mend(cluster: ActorCluster) -> None:
    """After a session that an error ended: mailboxes are emptied of what belongs to it."""
    lost = find_lost(cluster)  # aborts that are on their way have come then
    if lost:
        names = ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost))
        raise ActorLost("the last session of generation ended with a death", observed=names)
    cluster.discard()
