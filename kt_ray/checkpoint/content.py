"""Sample the shards before a run, for damage that headers do not show.

An interrupted download often has its full size: programs reserve the space first, and bytes that never
arrived read as zeros. A few kilobytes are read at several places of every shard, and the file system is
asked for holes. What is small and steers much is read whole: norms, biases, a router's correction. 163
shards take about a second on a local disk.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.safetensors_file import TORCH_DTYPES, TensorInfo, damaged, read_tensor
from kt_ray.checkpoint.stored import StoredMatrix

_PIECE = 4096  # bytes read at one place
_TENSORS = 6  # sampled in a shard, and as many of its scales
_GAP = 12  # matrices of zeros in a row: four experts, which nobody cuts out side by side
_EXPERTS = 16  # sampled in a stack
_WHOLE = 64 << 20  # a tensor is zero if this much of it is
_READERS = 16  # in flight: a network file system answers each in milliseconds
_HOLE_SHARE = 100  # holes of less than a 100th of a file may be zeros that a file system did not store
_SCALES = ("_scale", "_scale_inv", "_scale_2", ".scale")  # of activations and caches: never used here
_AGAIN = "download this file again (an interrupted download leaves zeros), or copy it again"


_unfinished = partial(damaged, remedy=_AGAIN)


def check_content(index: CheckpointIndex) -> None:
    """Sample every shard.

    Raises:
        UserError: holes or matrices of zeros (never written), weights or scales that are not finite,
            scales that are all zero, a stated shape that packed weights do not have; names file and tensors.
    """
    scales = {matrix.scales.name: matrix for matrix in index.matrices.values()}
    by_file: dict[Path, list[TensorInfo]] = defaultdict(list)
    for info in index.tensors.values():
        if info.fill is None:  # else a hole that is meant: `kt_ray.tools random --sparse`
            by_file[info.file].append(info)
    with ThreadPoolExecutor(max_workers=_READERS) as pool:
        jobs = [pool.submit(_check_file, index, file, by_file[file], scales) for file in sorted(by_file)]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def check_stacks(stacks: Iterable[TensorInfo]) -> None:
    """The same for stacks of experts in a GGUF file, all of them.

    Raises:
        UserError: holes, zeros in place of a stack or of several of its experts, values of plain types that
            are not finite.
    """
    by_file: dict[Path, list[TensorInfo]] = defaultdict(list)
    for info in stacks:
        by_file[info.file].append(info)
    for file, infos in by_file.items():
        try:
            with file.open("rb") as opened:
                fd = opened.fileno()
                _check_holes(fd, file, infos)
                zero = sorted(info.name for info in infos if _value_fault(fd, info) or _torn(fd, info))
        except OSError as error:
            raise _unfinished("GGUF file cannot be read", file, error) from error
        if zero:
            observed = f"zero throughout, or in several experts side by side: {some(zero)}"
            raise _unfinished("GGUF file holds zeros instead of weights", file, observed, "weights")


def _check_file(
    index: CheckpointIndex, file: Path, infos: list[TensorInfo], scales: Mapping[str, StoredMatrix]
) -> None:
    try:
        with file.open("rb") as opened:
            fd = opened.fileno()
            infos.sort(key=lambda info: info.start)
            _check_holes(fd, file, infos)
            values = [i for i in infos if i.name not in scales and len(i.shape) > 1 and "bias" not in i.name]
            sampled = _spread(values)
            zero = [i for i in sampled if _value_fault(fd, i)]
            # One matrix of zeros may be meant so (an expert that was cut out); most of a sample is not.
            if 2 * len(zero) > min(len(values), _TENSORS) or any(_in_gap(fd, values, i) for i in zero):
                observed = f"zero throughout: {some([i.name for i in zero])}"
                raise _unfinished("shard holds zeros instead of weights", file, observed, "weights")
            if torn := [i.name for i in sampled if len(i.shape) > 2 and "experts" in i.name and _torn(fd, i)]:
                observed = f"several experts side by side are zero: {some(torn)}"
                raise _unfinished("shard holds zeros instead of weights", file, observed, "weights")
            for info in infos:
                small = len(info.shape) == 1 and _is_floating(info)
                if small and info.name not in scales and not info.name.endswith(_SCALES):
                    _check_finite(info, os.pread(fd, info.nbytes, info.start))
            for info in _spread([i for i in infos if i.name in scales]):
                matrix = scales[info.name]
                _check_scales(fd, info, matrix)
                if matrix.packing is not None:
                    packing = matrix.packing.one(0) if len(matrix.shape) == 3 else matrix.packing
                    packing.check()
                for key in matrix.keys:
                    if key.endswith(".weight_shape"):
                        _check_stated_shape(index.tensors[key], matrix)
    except OSError as error:
        raise _unfinished("safetensors file cannot be read", file, error) from error


def _spread(infos: list[TensorInfo]) -> list[TensorInfo]:
    """Some of a list, the first and the last among them."""
    if len(infos) <= _TENSORS:
        return infos
    return [infos[n * (len(infos) - 1) // (_TENSORS - 1)] for n in range(_TENSORS)]


def _check_holes(fd: int, file: Path, infos: list[TensorInfo]) -> None:
    """Holes of the file, where its file system tells."""
    size = os.fstat(fd).st_size
    holes: list[tuple[int, int]] = []
    at = 0
    try:
        while (start := os.lseek(fd, at, os.SEEK_HOLE)) < size:
            holes.append((start, size))
            at = os.lseek(fd, start, os.SEEK_DATA)
            holes[-1] = (start, at)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a file system that does not tell
            return
        if error.errno != errno.ENXIO:  # a hole up to the end, or an empty file
            raise
    empty = sum(end - start for start, end in holes)
    hit = [i.name for i in infos if any(i.start < end and start < i.end for start, end in holes)]
    if empty * _HOLE_SHARE <= size or not hit:
        return
    what = "shard was not written completely (its file has holes)"
    raise _unfinished(what, file, f"{empty} of {size} bytes never written; in {some(hit)}", "no holes")


def _value_fault(fd: int, info: TensorInfo) -> bool:
    """Whether a matrix is zero throughout. Raises UserError for values that are not finite."""
    middle = info.start + info.nbytes // 2
    offset = max(info.start, middle - middle % 16 - _PIECE // 2)
    offset -= (offset - info.start) % 8
    piece = os.pread(fd, min(_PIECE, info.end - offset), offset)
    if not _zero(piece):
        _check_finite(info, piece)
        return False
    for at in range(info.start, min(info.end, info.start + _WHOLE), 1 << 20):
        if not _zero(os.pread(fd, min(1 << 20, info.end - at), at)):
            return False
    return info.nbytes > 0


def _in_gap(fd: int, values: list[TensorInfo], info: TensorInfo) -> bool:
    """Whether a matrix of zeros is one of many in a row, or all experts of a layer."""
    if len(info.shape) > 2 and "experts" in info.name:
        return True
    at, count = values.index(info), 1
    for side in (values[at + 1 : at + _GAP], values[max(0, at + 1 - _GAP) : at][::-1]):
        for neighbour in side:
            if not _value_fault(fd, neighbour):
                break
            count += 1
    return count >= _GAP


def _torn(fd: int, stack: TensorInfo) -> bool:
    """Whether a stack of experts has zeros in place of four of them in a row (see _GAP)."""
    count, wanted = stack.shape[0], _GAP // 3
    for e in range(0, count, max(1, count // _EXPERTS)):
        if not _value_fault(fd, stack.one(e)):
            continue
        first = last = e
        while first > 0 and last - first < wanted and _value_fault(fd, stack.one(first - 1)):
            first -= 1
        while last + 1 < count and last - first < wanted and _value_fault(fd, stack.one(last + 1)):
            last += 1
        if 1 + last - first >= wanted:
            return True
    return False


def _zero(piece: bytes) -> bool:
    return piece.count(0) == len(piece)


def _is_floating(info: TensorInfo) -> bool:
    return info.dtype in TORCH_DTYPES and TORCH_DTYPES[info.dtype].is_floating_point


def _check_finite(info: TensorInfo, piece: bytes) -> None:
    if not (_is_floating(info) and piece):
        return
    dtype = TORCH_DTYPES[info.dtype]
    whole = len(piece) - len(piece) % dtype.itemsize
    values = torch.frombuffer(bytearray(piece[:whole]), dtype=dtype).float()
    bad = int((~torch.isfinite(values)).sum())
    if bad:
        observed = f"{bad} of {values.numel()} values that were read are NaN or infinite"
        raise _unfinished("weights are not finite", info.place, observed, "finite values")


def _check_scales(fd: int, info: TensorInfo, matrix: StoredMatrix) -> None:
    piece = os.pread(fd, min(16 * _PIECE, info.nbytes), info.start)
    if info.dtype in ("U8", "F8_E8M0"):  # 2^(n - 127); 255 is NaN
        bad, zero, count = piece.count(255), _zero(piece), len(piece)
    else:
        values = torch.frombuffer(bytearray(piece), dtype=TORCH_DTYPES[info.dtype]).float()
        bad, zero, count = int((~torch.isfinite(values)).sum()), not bool(values.any()), values.numel()
    if count and (bad or zero):
        raise _unfinished(
            f"scales of quantised weights are {'not finite' if bad else 'zero'}",
            info.place,
            f"{bad} of {count} are NaN or infinite" if bad else f"{count} zeros",
            f"finite scales for {matrix.name} ({matrix.format})",
        )


def _check_stated_shape(info: TensorInfo, matrix: StoredMatrix) -> None:
    """compressed-tensors stores the shape before packing beside the packed words."""
    stated = tuple(read_tensor(info).flatten().tolist())
    if stated != matrix.shape:
        raise _unfinished(
            "packed weights and the shape stated beside them disagree",
            info.place,
            list(stated),
            f"{list(matrix.shape)} as {matrix.data.name} and its scales have",
        )
