"""The safetensors container, as far as reading straight into place and pre-laid-out writing need it.

A file is an 8-byte little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}
and the tensors back to back (https://huggingface.co/docs/safetensors). The safetensors package
reads whole tensors through a memory map; experts are read by byte range into memory that is already
bound to a socket, and an adapter is written by several processes into one file, so the offsets are
needed here.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kt_ray.checkpoint.random_values import Fill
from kt_ray.disk import content_of
from kt_ray.errors import UserError
from kt_ray.parse import kind_of_file, parse_json
from kt_ray.pulse import beat

_TYPES = (
    *("F4", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"),
    *("U16", "I16", "F16", "BF16", "U32", "I32", "F32", "U64", "I64", "F64", "C64"),
)
# Bits per element, by the dtype names of the format.
BITS = {"BOOL": 8} | {name: int(name.partition("_")[0].lstrip("BCFIU")) for name in _TYPES}
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Types without a torch type in every version, or of less than a byte: read as their bytes.
RAW_BYTES = frozenset({"F8_E8M0", "F4"})
_MAX_HEADER = 1 << 30  # a longer one is not a header but a damaged file
_DOWNLOAD = "download the checkpoint again, or check that config.json belongs to it"
_SPACE = "free space, or set run.root to another disk"


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: bytes [start, end) of `file`, counted from the beginning of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    fill: Fill | None = None  # of a hole: the random values that a reader puts there

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def place(self) -> str:
        """For messages."""
        return f"{self.file}, tensor {self.name}"

    def rows(self, start: int, stop: int) -> TensorInfo:
        """Indices [start, stop) of the first dimension."""
        width = self.nbytes // self.shape[0]
        place = self.start + start * width, self.start + stop * width
        return replace(self, shape=(stop - start, *self.shape[1:]), start=place[0], end=place[1])

    def one(self, index: int) -> TensorInfo:
        """One index of the first dimension, without that dimension."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])


def damaged(
    what: str, where: object, observed: object = None, required: object = None, remedy: str = _DOWNLOAD
) -> UserError:
    """A damaged file, or one that does not belong: by default with its config.json."""
    return UserError(what, where=str(where), observed=observed, required=required, remedy=remedy)


@contextmanager
def writing(what: str, where: Path, size: int | None = None, remedy: str = _SPACE) -> Iterator[None]:
    """A full or unwritable disk in the block is the user's error; `size`: bytes that are needed."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        required = f"{size} bytes of free space" if full and size is not None else None
        fault = f"{what} cannot be written"
        if error.errno == errno.EFBIG:  # room is not what lacks
            remedy = "raise the limit (ulimit -f), or write to a file system that takes files this large"
        elif error.errno in (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST):
            remedy = "move away what lies there under that name: a file needs its place, or a directory"
        raise UserError(fault, where=str(where), observed=error, required=required, remedy=remedy) from error


def read_header(path: Path, *, remedy: str = "download or copy this file again") -> dict[str, TensorInfo]:
    """The tensors of a file by its header, checked against the file's size.

    Raises:
        UserError: absent, truncated or damaged file; names the file, its bytes and the bytes required.
    """
    size, length, raw = _raw_header(path, remedy)
    try:
        entries = parse_json(raw.decode("utf-8"), unique=True)
        entries.pop("__metadata__", None)
        tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fault = f"no key {error}" if isinstance(error, KeyError) else error
        required_entries = "a JSON object with dtype, shape and data_offsets of every tensor"
        raise damaged("safetensors header is damaged", path, fault, required_entries, remedy) from error
    required = 8 + length
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if info.start != required:
            what = "safetensors header is damaged (tensors overlap or leave gaps)"
            raise damaged(what, info.place, f"offset {info.start}", f"offset {required}", remedy)
        required = info.end
    if size != required:
        what = "is truncated" if size < required else "has bytes after its tensors"
        raise damaged(f"safetensors file {what}", path, f"{size} bytes", f"{required} bytes", remedy)
    return tensors


def _raw_header(path: Path, remedy: str) -> tuple[int, int, bytes]:
    """Bytes of the file, bytes of its header, and the header."""
    try:
        if kind := kind_of_file(path):
            raise OSError(f"{kind}, no file")
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if 2 <= length <= min(_MAX_HEADER, size - 8):
                return size, length, file.read(length)
            content = content_of(prefix + file.read(56), size)
    except OSError as error:
        raise damaged("safetensors file cannot be read", path, error, remedy=remedy) from error
    plausible = len(prefix) == 8 and 2 <= length <= _MAX_HEADER
    raise damaged(
        "safetensors file is truncated or no safetensors file (its header is incomplete)",
        path,
        f"{size} bytes" + (f", {content}" if content else ""),
        f"{8 + length} bytes at least" if plausible else "a safetensors header",
        remedy,
    )


def _entry(path: Path, name: str, entry: dict[str, Any], data_start: int) -> TensorInfo:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    start, end = entry["data_offsets"]
    # (type, not isinstance: true and false are no sizes)
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or end < start:
        raise ValueError(f"tensor {name}: shape {list(shape)}, offsets [{start}, {end})")
    bits = BITS.get(dtype)
    if bits is None:
        raise ValueError(f"tensor {name}: unknown type {dtype!r}")
    if (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"tensor {name}: {end - start} bytes for shape {list(shape)} of {dtype}")
    place = data_start + start, data_start + end
    fill = Fill.parse(entry["fill"], place[0]) if "fill" in entry else None
    return TensorInfo(name, path, dtype, shape, *place, fill)


def build_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]],
) -> tuple[bytes, dict[str, tuple[int, int]], int]:
    """Lay a file out before any tensor exists: (name, dtype of the format, shape) in file order.

    Returns:
        The file's first bytes (length and header, padded to 8), each tensor's absolute byte range,
        and the file's size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ranges: dict[str, tuple[int, int]] = {}
    offset = 0
    for name, dtype, shape in tensors:
        nbytes = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        ranges[name] = (offset, offset + nbytes)
        offset += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    base = 8 + len(raw)
    return (
        struct.pack("<Q", len(raw)) + raw,
        {n: (base + a, base + b) for n, (a, b) in ranges.items()},
        base + offset,
    )


def write_safetensors(
    path: Path, entries: Iterable[tuple[str, str, Sequence[int]]], values: Iterable[torch.Tensor]
) -> tuple[int, int]:
    """Write a file from values that come one after another, flushed to the disk.

    Args:
        entries: (name, dtype of the format, shape) in file order.
        values: of the entries, in their order; each is needed only until the next.

    Returns:
        The file's bytes, and the CRC-32 of all of them.

    Raises:
        ValueError: a value of another type or shape than its entry. OSError: as of writing.
    """
    layout = list(entries)
    head, _, size = build_header(layout)
    crc = zlib.crc32(head)
    with path.open("wb") as file:
        file.write(head)
        for (name, dtype, shape), value in zip(layout, values, strict=True):
            given = NAMES.get(value.dtype), list(value.shape)
            if given != (dtype, list(shape)):
                raise ValueError(f"{name}: {given[0]} {given[1]}, laid out as {dtype} {list(shape)}")
            contiguous = value.detach().cpu().contiguous()  # keeps the bytes of the view
            view = tensor_bytes(contiguous)
            crc = zlib.crc32(view, crc)
            file.write(view)
            beat()
        file.flush()
        os.fsync(file.fileno())
    return size, crc


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, writable, without a copy. The caller keeps the tensor alive."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "contiguous CPU tensor required"
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


def read_into(fd: int, view: memoryview, info: TensorInfo) -> None:
    """Fill `view` with a tensor's bytes; a short read is the user's error (the file shrank)."""
    if info.fill is not None:
        info.fill.into(view, info.name, max(1, BITS[info.dtype] // 8), info.start)
        return
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], info.start + done)
        if count == 0:
            raise damaged(
                "checkpoint file ended while it was read",
                info.file,
                f"{info.start + done} bytes",
                f"{info.start + len(view)} bytes",
                "download or copy this file again, and do not change it during a run",
            )
        done += count
        beat()


def write_from(fd: int, view: memoryview, offset: int) -> None:
    """Write all of `view` at `offset`."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
        beat()


def read_dtype(dtype: str) -> torch.dtype:
    """The torch type that a type of the format is read as. Raises KeyError for those that are not read."""
    return torch.uint8 if dtype in RAW_BYTES else TORCH_DTYPES[dtype]


def read_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the tensor that a tensor of the format is read as."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """Read one tensor to the CPU in its stored type; types that torch lacks as bytes."""
    if info.dtype not in RAW_BYTES and info.dtype not in TORCH_DTYPES:
        raise damaged(
            f"tensor type {info.dtype} cannot be read",
            info.place,
            info.dtype,
            ", ".join(sorted(TORCH_DTYPES)),
            "use a checkpoint in bfloat16 or float32",
        )
    tensor = torch.empty(read_shape(info.dtype, info.shape), dtype=read_dtype(info.dtype))
    fd = os.open(info.file, os.O_RDONLY)
    try:
        read_into(fd, tensor_bytes(tensor), info)
    finally:
        os.close(fd)
    return tensor
