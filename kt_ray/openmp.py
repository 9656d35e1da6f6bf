"""How long torch's idle OpenMP threads look for work before they sleep.

By default libgomp's threads spin for 3 ms after every parallel region, on cores that the engine's threads
want; asleep at once (OMP_WAIT_POLICY=PASSIVE) they are woken for each of the small operations of a layer,
which more than doubles a small model's step. Some 10 us bridge the kernels of one operation and
leave the cores to the engine otherwise. Measured in docs/performance.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# ACTIVE is what makes libgomp spin at all where a process has more threads than CPUs (one process for all
# actors); the counts bound it. Intel's and LLVM's OpenMP take milliseconds.
SETTINGS = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process with torch: `environment`'s own where it has any of them."""
    own = {name: environment[name] for name in SETTINGS if name in environment}
    return own or dict(SETTINGS)


def apply(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set them for this process and those that it starts; they count until torch is imported."""
    environment.update(settings(environment))
