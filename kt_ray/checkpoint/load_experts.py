"""Read routed experts from the checkpoint straight into the tensors the engine computes with.

No file is mapped: each expert's bytes go from it to their final place, in huge pages where the machine
has them, so that loading needs no second copy; the reading threads touch the memory first, so it comes
from the node that the caller's memory policy says. Legend: see experts.py; n is
the number of experts asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from kt_ray.checkpoint.experts import PROJECTIONS, ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.safetensors_file import read_into, tensor_bytes
from kt_ray.native import allocate

BytesRead = Callable[[int], None]


@dataclass(frozen=True)
class _Read:
    """Bytes of `file` from `offset` into `target`."""

    file: Path
    offset: int
    target: torch.Tensor  # contiguous; what is read
    place: Callable[[torch.Tensor], None] | None = None  # puts `target` where it belongs (fused, rearranged)

    @property
    def nbytes(self) -> int:
        return self.target.numel() * self.target.element_size()


def load_experts(
    index: CheckpointIndex,
    layout: ExpertLayout,
    layer: int,
    experts: Sequence[int],
    *,
    threads: int = 1,
    progress: BytesRead | None = None,
    drop_cache: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read some experts of one layer.

    Args:
        index: the checkpoint; layout: its expert layout.
        layer: a layer of `layout.moe_layers`.
        experts: global expert ids, in the order of the result.
        threads: readers; 1 reads in the calling thread. New threads inherit its memory policy.
        progress: called with the bytes of each finished read (from the reader's thread).
        drop_cache: tell the kernel that these bytes are not read again, so that the page cache of a
            checkpoint near the size of memory does not push out what was just loaded.

    Returns:
        gate [n, I, H], up [n, I, H], down [n, H, I] in `layout.dtype`.

    Raises:
        ValueError: a layer or expert the checkpoint does not have.
        UserError: the file ended early.
    """
    if layer not in layout.prefixes:
        raise ValueError(f"layer {layer} has no routed experts")
    if any(not 0 <= e < layout.num_experts for e in experts):
        raise ValueError(f"experts {list(experts)} outside 0..{layout.num_experts - 1}")
    n, I, H = len(experts), layout.intermediate, layout.hidden
    out = {
        "gate": allocate((n, I, H), layout.dtype),
        "up": allocate((n, I, H), layout.dtype),
        "down": allocate((n, H, I), layout.dtype),
    }
    build = _plain_reads if layout.kind == "per_expert" else _fused_reads
    jobs = build(index, layout, layer, experts, out)
    _run(sorted(jobs, key=lambda job: (job[0], job[1])), threads, progress, drop_cache)
    return out["gate"], out["up"], out["down"]


# A job is (file, offset, make): `make` allocates the target as late as possible, so that rearranged
# reads need scratch for one expert per thread only.
_Job = tuple[Path, int, Callable[[], _Read]]


def _run(jobs: list[_Job], threads: int, progress: BytesRead | None, drop_cache: bool) -> None:
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        for file, _, _ in jobs:
            if file not in fds:
                fds[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, fds[file])

        def run(job: _Job) -> None:
            read = job[2]()
            fd = fds[read.file]
            read_into(fd, tensor_bytes(read.target), read.offset, read.file)
            if read.place is not None:
                read.place(read.target)
            if drop_cache:
                os.posix_fadvise(fd, read.offset, read.nbytes, os.POSIX_FADV_DONTNEED)
            if progress is not None:
                progress(read.nbytes)

        if threads <= 1:
            for job in jobs:
                run(job)
        else:
            with ThreadPoolExecutor(max_workers=threads) as pool:
                list(pool.map(run, jobs))


def _direct(file: Path, offset: int, target: torch.Tensor) -> _Job:
    return file, offset, lambda: _Read(file, offset, target)


def _plain_reads(
    index: CheckpointIndex,
    layout: ExpertLayout,
    layer: int,
    experts: Sequence[int],
    out: dict[str, torch.Tensor],
) -> list[_Job]:
    jobs: list[_Job] = []
    for i, expert in enumerate(experts):
        for projection in PROJECTIONS:
            info = index.tensors[layout.key(layer, expert, projection)]
            jobs.append(_direct(info.file, info.start, out[projection][i]))
    return jobs


def _fused_reads(
    index: CheckpointIndex,
    layout: ExpertLayout,
    layer: int,
    experts: Sequence[int],
    out: dict[str, torch.Tensor],
) -> list[_Job]:
    H, I = layout.hidden, layout.intermediate
    both, down = (index.tensors[layout.key(layer, 0, p)] for p in ("gate", "down"))
    element = out["gate"].element_size()
    jobs: list[_Job] = []
    for i, expert in enumerate(experts):
        both_at = both.start + expert * 2 * I * H * element
        down_at = down.start + expert * I * H * element
        gate, up, target = out["gate"][i], out["up"][i], out["down"][i]
        if layout.transposed:
            jobs.append(_rearranged(both.file, both_at, (H, 2 * I), layout, _split(gate, up, layout)))
            jobs.append(_rearranged(down.file, down_at, (I, H), layout, _transpose_into(target)))
        elif layout.interleaved:
            jobs.append(_rearranged(both.file, both_at, (2 * I, H), layout, _split(gate, up, layout)))
            jobs.append(_direct(down.file, down_at, target))
        else:
            jobs.append(_direct(both.file, both_at, gate))
            jobs.append(_direct(both.file, both_at + I * H * element, up))
            jobs.append(_direct(down.file, down_at, target))
    return jobs


def _rearranged(
    file: Path,
    offset: int,
    shape: tuple[int, int],
    layout: ExpertLayout,
    place: Callable[[torch.Tensor], None],
) -> _Job:
    return file, offset, lambda: _Read(file, offset, torch.empty(shape, dtype=layout.dtype), place)


def _split(gate: torch.Tensor, up: torch.Tensor, layout: ExpertLayout) -> Callable[[torch.Tensor], None]:
    def place(both: torch.Tensor) -> None:
        rows = both.t() if layout.transposed else both  # [2I, H]
        half = layout.intermediate
        first, second = (rows[0::2], rows[1::2]) if layout.interleaved else (rows[:half], rows[half:])
        gate.copy_(first)
        up.copy_(second)

    return place


def _transpose_into(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def place(source: torch.Tensor) -> None:
        target.copy_(source.t())

    return place
