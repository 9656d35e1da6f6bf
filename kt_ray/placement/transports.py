"""How tensors travel between actors: what rule.transport comes to."""

from __future__ import annotations

from typing import NamedTuple

from kt_ray.config.schema import RuleConfig
from kt_ray.errors import UserError

FASTER = "gloo"  # of "ray" and "gloo" between nodes (docs/decisions/009-between-nodes.md)


class Transport(NamedTuple):
    """How a message gets to an actor.

    near: on the same node: "arena" (shared memory), "ray" (bytes inside the Ray call) or "gloo".
    far: on another node: "ray", "gloo", or "" where actors on several nodes are refused.
    """

    near: str = "arena"
    far: str = FASTER


DEFAULT = Transport()  # rule.transport=auto


def choose_transport(rule: RuleConfig) -> Transport:
    """What rule.transport comes to.

    Raises:
        UserError: shared memory is forced for several nodes.
    """
    if rule.transport == "auto":
        return DEFAULT
    if rule.transport == "arena":
        if rule.nodes > 1:
            raise several_nodes(rule.nodes)
        return Transport("arena", "")
    return Transport(rule.transport, rule.transport)


def several_nodes(nodes: int) -> UserError:
    """Shared memory does not reach another node."""
    return UserError(
        "shared memory cannot carry tensors between nodes",
        where="rule.transport=arena",
        observed=f"actors on {nodes} nodes",
        required="all actors on one node",
        remedy="set rule.transport=auto (shared memory within a node), or put all actors on one node "
        "(rule.nodes=1, rule.ray.strategy=STRICT_PACK)",
    )
