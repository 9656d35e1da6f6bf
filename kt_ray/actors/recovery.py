"""After a death: which actors are gone, new ones in their places, the others ready to begin again.

A part of `ActorCluster` in a file of its own. All of it may fail because one more actor dies; it is then
begun again from the start, since an actor counts as lost until its weights are loaded.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from kt_ray.transport.mailbox import Address

if TYPE_CHECKING:
    from kt_ray.actors.cluster import ActorCluster

logger = logging.getLogger(__name__)

NOTICE = 60.0  # seconds in which the death of an actor, or of its node, becomes known


class ActorDied(RuntimeError):
    """An actor's process is gone."""


def bring_back(cluster: ActorCluster) -> int | None:
    """Start lost actors again and load their weights; `Cluster.recover` says what it returns."""
    lost = find_lost(cluster)
    logger.info("lost: %s", ", ".join(f"{kind}-{rank}" for kind, rank in sorted(lost)))
    patience = cluster.patience
    # Queued behind whatever an actor still computes, so afterwards none of them is in the old pass.
    cluster._gather([(h, "discard", ()) for h in cluster.handles if h.address not in lost], patience)
    cluster._respawn(lost)
    lost = frozenset(cluster._lost)  # more may have died meanwhile, and were replaced as well
    for fact in cluster._load([h for h in cluster.handles if h.address in lost], "load_again"):
        logger.info("%s is back, process %d", fact["actor"], fact["pid"])
        for note in fact.get("notes", ()):  # which a run says at its start otherwise
            logger.warning("%s: %s", fact["actor"], note)
    cluster._lost -= lost
    holders = [cluster.workers[0], *cluster.experts]
    states = set(cluster._gather([(h, "committed", ()) for h in holders], patience))
    if None not in states and len(states) == 1:
        # The other workers hold nothing but what worker 0 hands out.
        cluster._publish()
        return int(states.pop())
    cluster._make_masters()
    return None


def find_lost(cluster: ActorCluster) -> frozenset[Address]:
    """All actors that are gone: whose calls said so, and who do not answer any more."""
    deadline = time.monotonic() + NOTICE
    asked = [(h.address, h.control("status")) for h in cluster.handles if h.address not in cluster._lost]
    cluster._lost |= {address for address, future in asked if not _answers(cluster, future, deadline)}
    settle_aborts(cluster, deadline)
    return frozenset(cluster._lost)


def settle_aborts(cluster: ActorCluster, deadline: float | None = None) -> None:
    """Wait for aborts on their way: one that came after the next `discard` would end the next pass."""
    if deadline is None:
        deadline = time.monotonic() + NOTICE
    for future in cluster._aborts:
        _answers(cluster, future, deadline)
    cluster._aborts.clear()


def _answers(cluster: ActorCluster, future: Any, deadline: float) -> bool:
    if not cluster._wait([future], max(0.0, deadline - time.monotonic())):
        return False
    try:
        cluster._result(future)
    except ActorDied:
        return False
    except Exception:
        logger.exception("an actor answers with an error")
    return True
