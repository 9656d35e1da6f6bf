"""Variables that torch and its libraries read once: set before torch is imported, in every process with it.

Idle OpenMP threads: by default libgomp's threads spin for 3 ms after every parallel region, on cores that the
engine's threads want; asleep at once (OMP_WAIT_POLICY=PASSIVE) they are woken for each of the small
operations of a layer, which more than doubles a small model's step. Some 10 us bridge the kernels of one
operation and leave the cores to the engine otherwise. Measured in docs/performance.md.

CUDA's allocator: blocks of a layer's many sizes leave gaps in segments of fixed size, which the plan does not
count; segments that grow leave hardly any.

CUDA's numbers: the plan numbers GPUs as nvidia-smi does, by bus; by itself CUDA begins with the fastest.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

# ACTIVE is what makes libgomp spin at all where a process has more threads than CPUs (one process for all
# actors); the counts bound it. Intel's and LLVM's OpenMP take milliseconds.
OPENMP = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
# The older of two names: every torch reads it, 2.6 does not know PYTORCH_ALLOC_CONF, and 2.9 ignores that for
# CUDA (pytorch issue 183387).
ALLOCATOR = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
DEVICES = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}

# What is set together, and the names of which any keeps it out when the user has set it.
GROUPS: tuple[tuple[dict[str, str], tuple[str, ...]], ...] = (
    (OPENMP, tuple(OPENMP)),
    (ALLOCATOR, ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")),
    (DEVICES, tuple(DEVICES)),
)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for a process with torch: of each group `environment`'s own where it has any of them."""
    found: dict[str, str] = {}
    for ours, names in GROUPS:
        found |= {name: environment[name] for name in names if name in environment} or ours
    return found


def apply(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set them for this process and those that it starts; they count until torch is imported."""
    environment.update(settings(environment))
