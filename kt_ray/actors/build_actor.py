"""An actor of the kind that is asked for, and no more loaded than it needs: PEFT takes seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kt_ray.actors.expert_actor import ExpertActor

if TYPE_CHECKING:
    from kt_ray.actors.attention_worker import AttentionWorker


def build_actor(kind: str, *args: Any) -> AttentionWorker | ExpertActor:
    """An attention worker (kind "worker") or an expert actor ("experts").

    Args:
        args: see `ActorSpecs.arguments`.
    """
    if kind == "experts":
        return ExpertActor(*args)
    from kt_ray.actors.attention_worker import AttentionWorker

    return AttentionWorker(*args)
