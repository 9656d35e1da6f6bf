"""Where a test's attention workers and lanes run: on the CPU, and on cards where there are some."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import torch

Test = TypeVar("Test")
CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# For parametrize. Sums on a card are others than on the CPU: tolerances depend on the device.
DEVICES = ("cpu", pytest.param("cuda", marks=CUDA))

CARD = "a card"  # of layouts by name, the one whose worker has a card


def by_name(layouts: Iterable[str]) -> list[Any]:
    """For parametrize: names of layouts, with the one on a card where there is one."""
    return [pytest.param(name, marks=CUDA) if name == CARD else name for name in layouts]


def on_cuda(test: Test) -> Test:
    """A test for cards alone."""
    for mark in CUDA:
        test = mark(test)
    return test


def layers_on(device: str, layers: int, stages: int = 1, replicas: int = 1) -> list[str]:
    """Options that divide so many layers between workers; cards are shared where there are fewer."""
    if device == "cpu":
        return ["rule.device=cpu", f"rule.stages={stages}", f"rule.replicas={replicas}"]
    cuts, ranges = [layers * stage // stages for stage in range(stages + 1)], []
    for stage, (start, stop) in enumerate(pairwise(cuts)):
        cards = [(replica * stages + stage) % torch.cuda.device_count() for replica in range(replicas)]
        devices = ",".join(f"'cuda:{card}'" for card in cards)
        ranges.append(f"{{layers: '{start}-{stop - 1}', device: [{devices}]}}")
    ranges = [entry.replace("[", "").replace("]", "") for entry in ranges] if replicas == 1 else ranges
    return ["rule.device=cuda", f"rule.layers=[{','.join(ranges)}]", f"rule.replicas={replicas}"]
