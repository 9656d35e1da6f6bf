"""How one parameter of a checkpoint is written into another: copied, changed, or dequantised to BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_ray.checkpoint.encode_weights import Encoding, Entry
from kt_ray.checkpoint.expert_groups import read_one
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.safetensors_file import NAMES, TORCH_DTYPES, TensorInfo, read_tensor
from kt_ray.checkpoint.shard_writer import Notes, Piece, Unit, copied
from kt_ray.errors import UserError

_CHUNK = 16 << 20  # values computed at once
# (values [out, in], expert of a stack or first row of a plain matrix) -> new values.
Change = Callable[[Tensor, int], Tensor]
Touched = Callable[[int], bool]
Placed = tuple[tuple[str, int], Unit]  # a unit with where it begins on the disk, to read in order


def position(index: CheckpointIndex, name: str) -> tuple[str, int]:
    """Where a parameter begins on the disk."""
    info = index.first(name)
    return str(info.file), info.start


def raw_keys(index: CheckpointIndex, name: str) -> tuple[str, ...]:
    """The tensors that make a parameter."""
    matrix = index.matrices.get(name)
    return (name,) if matrix is None else matrix.keys


def as_stored(index: CheckpointIndex, keys: Iterable[str]) -> list[Placed]:
    """Tensors copied byte by byte."""
    infos = [index.tensors[key] for key in keys]
    return [((str(info.file), info.start), copied(info)) for info in infos]


def uses_powers(index: CheckpointIndex) -> bool:
    """The checkpoint's FP8 scales are powers of two in a wider type (DeepSeek-V3.1 and later)."""
    for config in (index.config, index.text_config):
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0":
            return True
    return False


def rewritten(
    index: CheckpointIndex,
    name: str,
    *,
    bf16: bool = False,
    transposed: tuple[bool, bool] = (False, False),
    change: Change | None = None,
    touched: Touched = lambda expert: True,
    note: Callable[[Notes, int, Tensor, Tensor], None] | None = None,
) -> Unit:
    """A parameter with new values, in its own format or in BF16.

    Args:
        name: of `index.names`; two or three dimensions.
        bf16: write BF16 instead of the parameter's own format.
        transposed: stacks only: [in, out] in the checkpoint, and in the result.
        change: see Change; None = the values stay.
        touched: experts whose values change; the others of a stack are copied where the format stays.
        note: called with notes, expert, values before writing (float32 [out, in]) and as written.
    """
    matrix, shape = index.matrices.get(name), index.shape(name)
    stack = len(shape) == 3
    if not stack and not bf16 and matrix is None:
        return _plain_rows(index.tensors[name], change)
    if stack and bf16 and transposed[0] != transposed[1]:
        shape = (shape[0], shape[2], shape[1])
    encoding = None
    if bf16:
        entries: tuple[Entry, ...] = (Entry(name, "BF16", shape),)
    elif matrix is not None:
        encoding = Encoding.like(matrix, powers=uses_powers(index))
        entries = encoding.entries
    else:
        entries = (Entry(name, index.tensors[name].dtype, shape),)
    kept = () if matrix is None or bf16 else matrix.keys[2:]
    shapes = [copied(index.tensors[key]) for key in kept]  # weight_shape

    def values(expert: int) -> Tensor:
        if not stack:
            return index.value(name, torch.float32)
        value = read_one(index, name, expert)
        return value.t() if transposed[0] else value

    def produce(notes: Notes) -> Iterator[Piece]:
        for expert in range(shape[0] if stack else 1):
            if stack and not bf16 and not touched(expert):
                for entry in entries:
                    yield Piece(entry.key, read_tensor(index.tensors[entry.key].one(expert)), expert)
                continue
            before = values(expert)
            if change is not None:
                before = change(before, expert)
            if encoding is None:
                written = before.to(TORCH_DTYPES[entries[0].dtype])
                stored = written.t() if stack and transposed[1] else written
                yield Piece(name, stored, expert)
                meant = written.float()
            else:
                oriented = before.t().contiguous() if stack and transposed[0] else before
                data, scales, meant = encoding.encode(oriented)
                meant = meant.t() if stack and transposed[0] else meant
                yield Piece(encoding.data.key, data, expert)
                yield Piece(encoding.scales.key, scales, expert)
            if note is not None:
                note(notes, expert, before, meant)
        for unit in shapes:
            yield from unit.produce(notes)

    return Unit((*entries, *(e for unit in shapes for e in unit.entries)), produce)


def _plain_rows(info: TensorInfo, change: Change | None) -> Unit:
    """A plain matrix, some rows at a time: the head of a large model has gigabytes."""
    if change is None:
        return copied(info)
    assert len(info.shape) == 2 and info.dtype in NAMES.values(), info.name
    rows = max(1, _CHUNK // info.shape[1])

    def produce(notes: Notes) -> Iterator[Piece]:
        for start in range(0, info.shape[0], rows):
            part = info.rows(start, min(start + rows, info.shape[0]))
            value = change(read_tensor(part).float(), start)
            yield Piece(info.name, value.to(TORCH_DTYPES[info.dtype]), start)

    return Unit((Entry(info.name, info.dtype, info.shape),), produce)


def encoded(
    encoding: Encoding, read: Callable[[], Tensor], note: Callable[[Notes, Tensor, Tensor], None]
) -> Unit:
    """A matrix quantised anew."""

    def produce(notes: Notes) -> Iterator[Piece]:
        before = read()
        data, scales, meant = encoding.encode(before)
        yield Piece(encoding.data.key, data)
        yield Piece(encoding.scales.key, scales)
        for key, value in encoding.extras().items():
            yield Piece(key, value)
        note(notes, before, meant)

    return Unit(encoding.entries, produce)


def add_error(notes: Notes, name: str, before: Tensor, after: Tensor) -> None:
    """Sums of squares for the relative Frobenius error of `name`."""
    notes.add(name, float((after - before).double().square().sum()), float(before.double().square().sum()))


def without_quantization(config: dict[str, Any], *, bf16: bool = True) -> dict[str, Any]:
    """config.json of the same model without quantised weights; in BF16, or in the types it states."""
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    for key in ("text_config", "language_config"):
        if isinstance(result.get(key), dict):
            result[key] = without_quantization(result[key], bf16=bf16)
    for key in ("dtype", "torch_dtype") if bf16 else ():
        if key in result:
            result[key] = "bfloat16"
    return result


def check_directories(source: CheckpointIndex, out: Path) -> None:
    """The result may not go into the checkpoint it is made from."""
    if out.resolve() == source.path.resolve():
        raise UserError(
            "output directory is the checkpoint itself", where=str(out), remedy="choose another directory"
        )
