"""Under Ray: what an actor is made from, and a new one in the place of one that died."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.util import placement_group_table

from kt_ray.errors import UserError
from kt_ray.transport.mailbox import Address

T = TypeVar("T")


@dataclass(frozen=True)
class Wanted:
    """One actor: CPUs that it may use (ids), its arguments, CPUs and GPUs that it reserves."""

    address: Address
    cpu_ids: tuple[int, ...]
    arguments: tuple[Any, ...]
    cpus: float
    gpus: float

    @property
    def name(self) -> str:
        return f"{self.address[0]}-{self.address[1]}"

    @property
    def bundle(self) -> dict[str, float]:
        """What it takes of a node."""
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


def let_go(actor: Any) -> None:
    """End what may be left of an actor: one that only seemed dead must not come back beside its successor."""
    with contextlib.suppress(Exception):  # it is gone already
        ray.kill(actor, no_restart=True)


def when_free(make: Callable[[], T], timeout: float) -> T:
    """`make()`, again while it raises ValueError: a dead actor's name is taken until Ray has noticed.

    Raises:
        UserError: still taken after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return make()
        except ValueError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Ray did not give a dead actor's name free within {timeout:.0f} s",
                    observed=error,
                    remedy="raise cluster.start_timeout",
                ) from error
            time.sleep(0.2)


def not_started(name: str, group: Any, bundle: dict[str, float], timeout: float) -> UserError:
    """Why an actor did not start in time: no node has room for it, or it is merely slow."""
    if placement_group_table(group).get("state") == "CREATED":
        return UserError(
            f"{name} did not start within {timeout:.0f} s",
            remedy="raise cluster.start_timeout, or look into /tmp/ray/session_latest/logs",
        )
    free = ray.available_resources()
    alive = sum(1 for node in ray.nodes() if node["Alive"])
    return UserError(
        f"no node has room for {name}, and none came within {timeout:.0f} s",
        observed=f"{alive} nodes; free now: CPU {free.get('CPU', 0):g}, GPU {free.get('GPU', 0):g}",
        required=", ".join(f"{kind} {count:g}" for kind, count in bundle.items()) + " on one node",
        remedy="start a node with these resources (cluster.start_timeout is how long is waited for one)",
    )
