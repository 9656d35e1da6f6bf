"""An embedding whose rows are looked up in the checkpoint's files, which are mapped into memory.

Qwen4-Exp's tables of n-grams have tens of GB, of which a token reads a few KB. So no process copies one: all
processes of a host share what the page cache holds of it, and it never goes to a GPU.
"""

from __future__ import annotations

import mmap
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kt_ray.checkpoint.safetensors_file import NAMES, TORCH_DTYPES, TensorInfo, damaged

_TABLE = re.compile(r"\.ngram_embedding\.weight$")
_REMEDY = "copy this file to a local disk, leave it alone during a run, or raise `ulimit -n`"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def is_mapped_table(name: str) -> bool:
    """Whether a model's parameter is such a table."""
    return _TABLE.search(name) is not None


def in_order(parts: Iterable[TensorInfo]) -> list[TensorInfo]:
    """A table's parts as its rows follow each other: shard_2 is before shard_10."""
    return sorted(parts, key=lambda part: [int(n) for n in re.findall(r"\d+", part.name)])


class MappedTable(nn.Module):
    """In the place of an `nn.Embedding`.

    Args:
        parts: of the table, in the rows' order. shape: of the table.
        dtype: of what a look-up gives. device: where the module is said to be.

    Raises:
        UserError: the parts are no table of that shape, or not in a plain floating-point type; a file that
            cannot be mapped. By a look-up: a number that no row has.
    """

    weight: Tensor  # none of the rows: its type is that of the module

    def __init__(
        self, parts: list[TensorInfo], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        check_parts(parts, shape)
        self.register_buffer("weight", torch.empty(0, shape[1], dtype=dtype, device=device), persistent=False)
        self._rows = _Rows(parts)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._rows.look_up(ids.reshape(-1).cpu())
        return rows.to(self.weight.device, self.weight.dtype).view(*ids.shape, self.weight.shape[1])


def check_parts(parts: list[TensorInfo], shape: tuple[int, ...]) -> None:
    """Raises UserError: the parts are no table of that shape, or not in a plain floating-point type."""
    known = [NAMES[dtype] for dtype in _DTYPES]
    kinds = {part.dtype for part in parts}
    for part in parts:
        if part.dtype not in known or len(kinds) > 1 or part.fill is not None:
            observed = ", ".join(sorted(kinds)) if part.fill is None else "values that are made while reading"
            raise damaged(
                "a table that is looked up in its files is stored in a format that is not supported",
                part.place,
                observed,
                f"one of {', '.join(known)}",
                "use a bfloat16 or float32 checkpoint of this model",
            )
        if len(part.shape) != 2 or part.shape[1] != shape[1]:
            what = "checkpoint and model disagree about a shape"
            raise damaged(what, part.place, list(part.shape), f"rows of {shape[1]}")
    rows = sum(part.shape[0] for part in parts)
    if rows != shape[0]:
        where = f"{parts[0].place}, and {len(parts) - 1} more parts of one table"
        raise damaged("checkpoint lacks parts of a table", where, f"{rows} rows", f"{shape[0]} rows")


class _Rows:
    """The parts' bytes, mapped."""

    def __init__(self, parts: list[TensorInfo]) -> None:
        needed = {part.file: max(p.end for p in parts if p.file == part.file) for part in parts}
        files = {file: _mapped(file, size) for file, size in needed.items()}
        self._place = parts[0].place
        self._dtype = TORCH_DTYPES[parts[0].dtype]
        self._parts = [files[part.file][part.start : part.end].view(part.shape[0], -1) for part in parts]
        self._starts = torch.tensor([0, *(part.shape[0] for part in parts)]).cumsum(0)

    def look_up(self, rows: Tensor) -> Tensor:
        """Rows of these numbers, in their stored type."""
        count = int(self._starts[-1])
        beyond = rows[(rows < 0) | (rows >= count)]
        if len(beyond):  # numbers of n-grams that a checkpoint stores may belong to another table
            fault = "a table of n-grams lacks a row that is looked up"
            raise damaged(fault, self._place, f"row {int(beyond[0])}", f"a number below {count}")
        found = torch.empty(len(rows), self._parts[0].shape[1], dtype=torch.uint8)
        number = torch.bucketize(rows, self._starts, right=True) - 1
        order = number.argsort()
        counts = torch.bincount(number, minlength=len(self._parts)).tolist()
        for part, start, own in zip(self._parts, self._starts.tolist(), order.split(counts), strict=False):
            if len(own):
                found[own] = part.index_select(0, rows[own] - start)
        return found.view(self._dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Rows:
        return self  # of a probe's float32 copy of the layer


def _mapped(path: Path, size: int) -> Tensor:
    """A file's bytes, `size` of them at least."""
    try:
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise damaged("file of a table cannot be mapped into memory", path, error, remedy=_REMEDY) from error
    if len(memory) < size:
        fault = "checkpoint file became shorter while it was opened"
        raise damaged(fault, path, f"{len(memory)} bytes", f"{size} bytes", _REMEDY)
    memory.madvise(mmap.MADV_RANDOM)  # a row is far smaller than what the system would read ahead
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
