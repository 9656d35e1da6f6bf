"""torch.profiler around one pass of an attention worker (trainer.profile_steps)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kt_ray.batch import PassSpec

# torch has one profiler per process: in one process the first worker gets it
_one_at_a_time = threading.Lock()


@contextmanager
def profiled(spec: PassSpec, rank: int, gpu: bool) -> Iterator[None]:
    """Write DIRECTORY/step_000003_pass_7_worker-0.json (Chrome trace) of what runs inside, if `spec.profile`.

    CUDA activities are recorded where the worker computes on a GPU (untested on hardware).
    """
    if spec.profile is None or not _one_at_a_time.acquire(blocking=False):
        yield
        return
    try:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if gpu:
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds, record_shapes=True) as trace:
            yield
        directory = Path(spec.profile)
        directory.mkdir(parents=True, exist_ok=True)
        name = f"step_{spec.step + 1:06d}_pass_{spec.number}_worker-{rank}.json"
        trace.export_chrome_trace(str(directory / name))
    finally:
        _one_at_a_time.release()
