"""What the training loop and its checkpoints need of a cluster (kt_ray.actors.cluster.ActorCluster)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kt_ray.batch import PassSpec
from kt_ray.errors import TryAgain
from kt_ray.placement.plan_types import Plan
from kt_ray.train.reports import PassReport


class ActorLost(TryAgain):
    """An actor is gone, or as good as gone, and what it had trained with it. `Cluster.recover` replaces it.

    The remedy says what to look at; how the user goes on afterwards, `kt_ray.train.recovery` knows.
    """


class GivenUp(Exception):
    """A pass or a phase that was not waited for, because `Cluster.give_up` said so; `discard` comes next."""


class Cluster(Protocol):
    """Attention workers and expert actors of one plan, called as a whole.

    Every method returns when all actors are done, or raises the first actor's error after the
    others were told to stop: `ActorLost` when it died.
    """

    plan: Plan
    # asked while a pass, `prepare` or a new actor's load is waited for: why to give it up; "" = wait on
    give_up: Callable[[], str]
    recoveries: int  # how often actors were replaced

    def run_pass(self, spec: PassSpec) -> PassReport:
        """All micro-batches through all layers; in training passes gradients accumulate in the actors."""
        ...

    def prepare(self, step: int) -> float:
        """Phase one of a step: reduce gradients; returns the squared global norm (float64)."""
        ...

    def commit(self, step: int, lr: float, clip: float) -> float:
        """Phase two, idempotent: scale by `clip`, a step at `lr`, weights back. Returns seconds."""
        ...

    def discard(self) -> None:
        """Give a step up: gradients to zero, messages forgotten."""
        ...

    def skip(self, step: int) -> None:
        """As `discard`, and the step counts as taken: nothing of it is applied."""
        ...

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        """After `prepare`: norm and parameter name of the largest gradients, not finite ones first."""
        ...

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]: ...

    def save_shards(self, directory: str) -> list[Any]:
        """Every actor writes its shard of a checkpoint; returns their ShardInfo."""
        ...

    def restore(self, directory: str, step: int) -> None:
        """Every actor reads its parameters by name from a checkpoint taken after `step` updates."""
        ...

    def committed(self) -> int | None:
        """Number of updates that all actors have behind them; None = they differ, or one's state is lost."""
        ...

    def recover(self) -> int | None:
        """After `ActorLost`: start lost actors again, load their weights, give up what the others began.

        Returns:
            The number of updates that all actors have behind them, when none of those that died held
            trained state and the others agree: then the cluster is ready for the next step. Else None:
            `restore` or `restart` comes next, and nothing computes before.
        """
        ...

    def restart(self) -> None:
        """Every actor goes back to the state before the first step: initial LoRA, no moments."""
        ...

    def write_adapter(self, directory: str, layout: Any, which: bool | str = True) -> int:
        """Every actor writes its byte ranges of the adapter, or of one that was kept under a name; returns
        the number of tensors."""
        ...
