"""Read routed experts from the checkpoint straight into the memory the engine computes from.

No file is mapped and nothing is repacked but what packings.py takes apart: each expert's bytes go from
the file to their final place, in huge pages where the machine has them; the halves of fused projections are
views. An expert's matrices and scales lie one after the other, so that a GPU lane copies it in one piece. The
reading threads touch the memory first, so the caller's memory policy decides its NUMA node. Only a backend
with another format than the checkpoint's needs scratch memory, for one expert at a time.
Legend: E experts, I intermediate size of one expert, H hidden size; n is the number of experts asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import gate_up_rows
from kt_ray.checkpoint.safetensors_file import (
    TensorInfo,
    damaged,
    read_dtype,
    read_into,
    read_shape,
    tensor_bytes,
)
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.native import ExpertFormula, ExpertMatrix, ExpertWeights, allocate, quantize

Target = Literal["int8", "int4"]
_INT4_GROUP = 128  # columns per scale of the AMXINT4 and W4A8 backends, halved until it divides a row
_SCALES: Literal["bfloat16"] = "bfloat16"
_LINE = 64  # bytes: where a tensor may begin


@dataclass(frozen=True)
class ReadJob:
    """A tensor, or a part of one, into `target()`; then `done`, for what cannot be read in place."""

    place: TensorInfo
    target: Callable[[], Tensor]
    done: Callable[[Tensor], object] | None = None


def load_experts(
    index: CheckpointIndex,
    layout: ExpertLayout,
    layer: int,
    experts: Sequence[int],
    *,
    formula: ExpertFormula | None = None,
    target: Target | None = None,
    threads: int = 1,
    drop_cache: bool = False,
) -> ExpertWeights:
    """Read some experts of one layer.

    Args:
        layer: a layer of `layout.moe_layers`.
        experts: global expert ids, in the order of the result.
        formula: of the experts; None = plain SwiGLU.
        target: quantise while reading, unless the experts are stored so: int8 with a scale per row, int4
            with one per 128 columns. None = as stored.
        threads: readers; they inherit the memory policy of the calling thread.
        drop_cache: tell the kernel that these bytes are not read again, so that the page cache of a
            checkpoint near the size of memory does not push out what was just loaded.

    Returns:
        Weights of n experts, in the checkpoint's format or in `target`.

    Raises:
        ValueError: a layer or expert the checkpoint does not have.
        UserError: the file ended early; a width that `target` cannot hold.
    """
    check_experts_exist(layout, layer, experts)
    jobs: list[ReadJob] = []
    sources: dict[str, _Source] = {}
    for part, names in layout.sources[layer].items():
        stored = layout.formats[layer][part]
        if target is not None and not _is_stored_so(index, names[0], stored, target):
            sources[part] = _requantised(index, layout, names, experts, target, jobs)
        else:
            sources[part] = _as_stored(index, layout, names, experts, jobs)
    tensors = iter(side_by_side(len(experts), [own for s in sources.values() for own in s.tensors]))
    parts = {part: s.filled([next(tensors) for _ in s.tensors]) for part, s in sources.items()}
    for part, names in layout.biases[layer].items():
        infos = [index.tensors[n] for n in names]
        bias = allocate((len(experts), *index.shape(names[0])[-1:]), read_dtype(infos[0].dtype))
        _read(bias, infos, layout, experts, jobs)
        parts[f"{part}_bias"] = bias
    run_jobs(jobs, threads, drop_cache)
    return as_weights(parts, layout, formula, layer, experts)


def as_weights(
    parts: dict[str, Tensor | ExpertMatrix],
    layout: ExpertLayout,
    formula: ExpertFormula | None,
    layer: int,
    experts: Sequence[int],
) -> ExpertWeights:
    """Experts as the engine takes them: "gate", "up", "gate_up", "down" [n, out, in], and the same with
    "_bias" [n, out]; gate and up of what holds both become views. formula: None = plain SwiGLU.
    """
    formula = formula or ExpertFormula()
    for end in ("", "_bias"):
        both = parts.pop(f"gate_up{end}", None)
        if both is not None:
            for name, rows in zip(
                ("gate", "up"), gate_up_rows(layout.intermediate, layout.interleaved), strict=True
            ):
                cut = rows.start, rows.stop, rows.step or 1
                parts[name + end] = both[:, rows] if isinstance(both, Tensor) else both.rows(*cut)
    biases: dict[str, Any] = {
        part: value.float().contiguous()
        for part, value in parts.items()
        if part.endswith("_bias") and isinstance(value, Tensor)
    }
    return ExpertWeights(
        parts.get("gate"),
        parts["up"],
        parts["down"],
        **biases,
        activation=formula.activation,
        alpha=formula.alpha,
        limit=formula.limit,
        layer=layer,
        expert_ids=tuple(experts),
    )


def check_experts_exist(layout: ExpertLayout, layer: int, experts: Sequence[int]) -> None:
    """Raises ValueError: a layer or an expert that the layout does not have."""
    if layer not in layout.prefixes:
        raise ValueError(f"layer {layer} has no routed experts")
    if any(not 0 <= e < layout.num_experts for e in experts):
        raise ValueError(f"experts {list(experts)} outside 0..{layout.num_experts - 1}")


def _is_stored_so(index: CheckpointIndex, name: str, stored: str, target: Target) -> bool:
    """Whether experts need no quantising: products in int8 take one scale per row, not groups."""
    if stored != target or name not in index.matrices:
        return False
    matrix = index.matrices[name]
    return target != "int8" or matrix.block[1] >= matrix.shape[-1]


# -- reading ---------------------------------------------------------------------------------


def run_jobs(jobs: list[ReadJob], threads: int, drop_cache: bool) -> None:
    """Do all reads; the arguments are those of `load_experts`."""
    with ExitStack() as stack:
        fds: dict[Path, int] = {}
        jobs = sorted(jobs, key=lambda job: (job.place.file, job.place.start))
        for job in jobs:
            file = job.place.file
            if file not in fds:
                fds[file] = os.open(file, os.O_RDONLY)
                stack.callback(os.close, fds[file])

        def run(job: ReadJob) -> None:
            target, fd = job.target(), fds[job.place.file]
            read_into(fd, tensor_bytes(target), job.place)
            if job.done is not None:
                job.done(target)
            if drop_cache:
                os.posix_fadvise(fd, job.place.start, target.nbytes, os.POSIX_FADV_DONTNEED)

        with ThreadPoolExecutor(max_workers=threads) as pool:
            list(pool.map(run, jobs))


def _one(infos: Sequence[TensorInfo], layout: ExpertLayout, expert: int) -> TensorInfo:
    """Where one expert lies: in a tensor of its own, or in the one that holds all."""
    return infos[0].one(expert) if layout.kind == "fused" else infos[expert]


@dataclass(frozen=True)
class _Source:
    """A projection to be read.

    tensors: shape of one expert's part, and type, of each that it takes. filled: memory [n, *shape] for those
    -> the projection in it; adds the jobs that read it.
    """

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    filled: Callable[[list[Tensor]], Tensor | ExpertMatrix]


def side_by_side(count: int, tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Memory [count, *shape] for each (shape, type): an expert's parts one after the other, from multiples of
    64 bytes on."""
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in tensors]
    ends = list(itertools.accumulate((-(-size // _LINE) * _LINE for size in sizes), initial=0))
    memory = allocate((count, ends[-1]), torch.uint8)
    return [
        memory[:, start : start + size].view(dtype).view(count, *shape)
        for start, size, (shape, dtype) in zip(ends[:-1], sizes, tensors, strict=True)
    ]


def _read(
    slab: Tensor,
    infos: Sequence[TensorInfo],
    layout: ExpertLayout,
    experts: Sequence[int],
    jobs: list[ReadJob],
) -> None:
    """Adds the jobs that fill slab [n, ...]."""
    for i, expert in enumerate(experts):
        jobs.append(ReadJob(_one(infos, layout, expert), lambda i=i: slab[i]))  # type: ignore[misc]


def _read_packed(
    slab: Tensor,
    infos: Sequence[TensorInfo],
    matrices: Sequence[StoredMatrix],
    experts: Sequence[int],
    jobs: list[ReadJob],
) -> None:
    """The same where the file's packing is not the engine's."""

    def place(i: int, expert: int, raw: Tensor) -> None:
        matrix = matrices[expert]
        assert matrix.packing is not None
        is_data = infos[expert] is matrix.data
        value = matrix.packing.values(raw) if is_data else matrix.packing.scales(raw)
        slab[i].copy_(value.reshape(slab[i].shape))

    for i, expert in enumerate(experts):
        info = infos[expert]
        shape = read_shape(info.dtype, info.shape)
        scratch = functools.partial(torch.empty, shape, dtype=read_dtype(info.dtype))
        jobs.append(ReadJob(info, scratch, functools.partial(place, i, expert)))


def _as_stored(
    index: CheckpointIndex,
    layout: ExpertLayout,
    names: tuple[str, ...],
    experts: Sequence[int],
    jobs: list[ReadJob],
) -> _Source:
    matrices = [index.matrices[name] for name in names if name in index.matrices]
    if matrices and matrices[0].packing is not None and layout.kind == "fused":
        matrices = [matrices[0].one(expert) for expert in range(layout.num_experts)]
    if matrices:
        infos = [[m.data for m in matrices], [m.scales for m in matrices]]
        shapes = [matrices[0].data_shape, matrices[0].scales_shape]
    else:
        infos, shapes = [[index.tensors[name] for name in names]], [index.shape(names[0])[-2:]]

    def filled(tensors: list[Tensor]) -> Tensor | ExpertMatrix:
        for slab, own in zip(tensors, infos, strict=True):
            if matrices and matrices[0].packing is not None:
                _read_packed(slab, own, matrices, experts, jobs)
            else:
                _read(slab, own, layout, experts, jobs)
        if matrices:
            return matrices[0].matrix(*tensors)
        return tensors[0].transpose(1, 2) if layout.transposed else tensors[0]

    kinds = [read_dtype(own[0].dtype) for own in infos]
    if matrices:
        kinds[0] = matrices[0].data_type
    return _Source(tuple(zip(map(tuple, shapes), kinds, strict=True)), filled)


def _requantised(
    index: CheckpointIndex,
    layout: ExpertLayout,
    names: tuple[str, ...],
    experts: Sequence[int],
    target: Target,
    jobs: list[ReadJob],
) -> _Source:
    """Experts in another format than stored: read, quantised and placed one at a time."""
    shape = index.shape(names[0])[-2:]
    rows, columns = (shape[1], shape[0]) if layout.transposed else shape
    group = columns if target == "int8" else _int4_group(index, names[0], columns)
    width, kind = (columns, torch.int8) if target == "int8" else (columns // 8, torch.int32)
    matrices = [index.matrices[name] for name in names if name in index.matrices]
    infos = [m.data for m in matrices] or [index.tensors[name] for name in names]

    def place(data: Tensor, scales: Tensor, i: int, expert: int, raw: Tensor) -> None:
        value = raw.unsqueeze(0)
        if matrices:
            stored = matrices[0].one(expert) if layout.kind == "fused" else matrices[expert]
            value = stored.of(raw).dequantize()
        elif layout.transposed:
            value = value.transpose(1, 2)
        matrix = quantize(target, value, group=group, scale_type=_SCALES)
        assert matrix.scales is not None
        data[i].copy_(matrix.data[0])
        scales[i].copy_(matrix.scales[0])

    scratch = functools.partial(
        torch.empty, matrices[0].file_shape if matrices else shape, dtype=read_dtype(infos[0].dtype)
    )

    def filled(tensors: list[Tensor]) -> ExpertMatrix:
        data, scales = tensors
        for i, expert in enumerate(experts):
            done = functools.partial(place, data, scales, i, expert)
            jobs.append(ReadJob(_one(infos, layout, expert), scratch, done))
        block = None if group == columns else (1, group)
        return ExpertMatrix(target, data, (len(experts), rows, columns), scales, block)

    return _Source((((rows, width), kind), ((rows, columns // group), torch.bfloat16)), filled)


def _int4_group(index: CheckpointIndex, name: str, columns: int) -> int:
    group = math.gcd(columns, _INT4_GROUP)
    if group % 32:
        what, remedy = "the experts cannot be held as INT4", "set rule.experts.backend=AMXINT8 or AMXBF16"
        raise damaged(what, f"{index.path}, {name}", f"rows of {columns}", "a multiple of 32", remedy)
    return group
