"""Replicas on other hosts than the driver's share the weights of streamed layers through a keeper there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from kt_ray.actors.ray.ray_placement import Seats
from kt_ray.actors.specs import ActorSpecs, shares_files, weights_files, with_weights_files
from kt_ray.placement.plan_types import Plan


class WeightsKeeper:
    """Holds files in memory, one per stage, for the processes of its host, for as long as it lives."""

    def __init__(self, count: int) -> None:
        self._files, self._paths = weights_files(count)

    def paths(self) -> list[tuple[str, str]]:
        return self._paths


def share_on_hosts(
    plan: Plan, specs: ActorSpecs, groups: Mapping[int, Any], chosen: Seats, timeout: float
) -> tuple[list[Any], ActorSpecs]:
    """Keepers, one on every other host with attention, and specs with which the workers there share weights.

    None where nothing is shared. When a host is lost, its keeper is, too: workers that are started again
    elsewhere then have weights of their own, and say so.

    Args:
        groups: placement group of the actors by host. chosen: their bundles. timeout: seconds to start in.
    """
    if not shares_files(plan, specs):
        return [], specs
    keeper: Any = ray.remote(num_cpus=0)(WeightsKeeper)
    keepers: list[Any] = []
    for worker in plan.workers:
        if worker.host == len(keepers) + 1:
            where = chosen.place(groups, chosen.of["worker", worker.rank])
            keepers.append(keeper.options(scheduling_strategy=where).remote(plan.stages))
    answers = ray.get([keeper.paths.remote() for keeper in keepers], timeout=timeout)
    for host, paths in enumerate(answers, 1):
        specs = with_weights_files(plan, specs, host, paths)
    return keepers, specs
