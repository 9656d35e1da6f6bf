"""A GGUF model's headers: metadata and the place of every tensor.

A model is one file, or the files NAME-00001-of-0000N.gguf of a split set, each with its own header. A file
is a little-endian header (magic, version, counts), key-value metadata, one entry per tensor (name, sizes
with the fastest first, type, offset) and the tensors, each on a multiple of the alignment
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The gguf package's reader makes several numpy
views of every token of a vocabulary (seconds) and takes what lies beyond a truncated file's end for empty,
hence this one: it skips arrays and checks every size against the file's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import BinaryIO

from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged
from kt_ray.errors import UserError

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")
Scalar = int | float | bool | str
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_MAX_NAME = 1 << 16  # of a key; llama.cpp's tensor names have at most 64 bytes
_AGAIN = "download or copy this file again"
_CHOOSE = "set model.experts_path to a GGUF file, to a file of a split set, or to a directory that holds one"


@cache
def ggml_types() -> dict[int, tuple[str, int, int]]:
    """Number of a type in the file -> its name, values in a block, bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES  # loads numpy

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


@dataclass(frozen=True)
class GgufHeader:
    """What one file, or all files of a split set, say about themselves.

    The dtype of a tensor is the name of its type ("Q4_K"), or "type N" of one that is not known here; its
    shape has the slowest dimension first, as torch has it (the file, last).
    """

    path: Path  # of the first file
    metadata: dict[str, Scalar]  # numbers, truth values and strings; arrays are left out
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]  # in order

    @property
    def architecture(self) -> str:
        """`general.architecture`, "" if there is none."""
        return str(self.metadata.get("general.architecture", ""))


def open_gguf(path: str | Path) -> GgufHeader:
    """Read and check the headers of a GGUF model.

    Args:
        path: a file; any file of a split set; or a directory with one model (files mmproj*, the image
            encoders of multimodal models, do not count).

    Raises:
        UserError: absent, truncated or damaged files; parts of a split set that are absent or of another
            model; several models in the directory.
    """
    files = _files_of(Path(path).expanduser())
    headers = [read_gguf_header(file) for file in files]
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if count != len(files) and not (count == 0 and len(files) == 1):
        raise damaged(
            "GGUF file is part of a split set, but its name does not say which",
            first.path,
            f"split.count {count}",
            f"NAME-00001-of-{int(count):05d}.gguf" if isinstance(count, int) else "a whole number",
            "give all parts the names under which they were released",
        )
    tensors = dict(first.tensors)
    for number, header in enumerate(headers[1:], start=1):
        for key, required in (("split.no", number), ("split.count", len(files))):
            if header.metadata.get(key) != required:
                what = "GGUF file is not the part of the split set that its name says"
                observed = f"{key} {header.metadata.get(key, 'missing')}"
                raise damaged(what, header.path, observed, f"{key} {required}", _AGAIN)
        twice = sorted(tensors.keys() & header.tensors.keys())
        if twice:
            where = f"{header.path} and {tensors[twice[0]].file.name}"
            raise damaged(
                "GGUF split set holds tensors twice", where, some(twice), "parts of one model", _AGAIN
            )
        tensors |= header.tensors
    total = first.metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise damaged(
            "GGUF split set does not hold all its tensors",
            first.path,
            f"{len(tensors)} tensors in {len(files)} files",
            f"{total} (split.tensors.count)",
            "download all files of the set again",
        )
    return GgufHeader(first.path, first.metadata, tensors, files)


def _files_of(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        path = _model_in(path)
    if not path.is_file():
        raise damaged("no such GGUF file", path, remedy=_CHOOSE)
    match = _SPLIT.match(path.name)
    if match is None:
        return _finished((path,))
    count = int(match["count"])
    files = tuple(path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))
    absent = [file.name for file in files if not file.is_file()]
    if absent or path not in files:
        observed = f"missing: {some(absent)}" if absent else f"part {int(match['part'])}"
        remedy = "download the missing files beside it"
        raise damaged("GGUF split set is not complete", path, observed, f"{count} files", remedy)
    return _finished(files)


def _finished(files: tuple[Path, ...]) -> tuple[Path, ...]:
    """aria2 writes into the file itself, of its full size from the beginning."""
    beside = [left.name for file in files if (left := Path(f"{file}.aria2")).exists()]
    if beside:
        what, remedy = "GGUF file is an unfinished download", "let aria2c finish, or download the file again"
        raise damaged(what, files[0], f"{some(beside)} beside it", "the whole file", remedy)
    return files


def _model_in(folder: Path) -> Path:
    """The file, or the first of the split set, that a directory holds."""
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if file.name.startswith("mmproj"):
            continue
        match = _SPLIT.match(file.name)
        models.setdefault(f"{match['stem']} {match['count']}" if match else file.name, file)
    if len(models) == 1:
        return next(iter(models.values()))
    what = f"directory holds {'several GGUF models' if models else 'no GGUF model'}"
    names = some([file.name for file in models.values()]) or "no *.gguf"
    raise damaged(what, folder, names, "one file, or one split set", _CHOOSE)


# -- one file


def read_gguf_header(path: Path) -> GgufHeader:
    """Parse and check one file's header against the file's size, without reading tensors.

    Raises:
        UserError: absent, truncated or damaged file; names the file and what was found and required.
    """
    try:
        with path.open("rb", buffering=1 << 20) as stream:
            return _parse(path, _Reader(stream, path, path.stat().st_size))
    except OSError as error:
        raise damaged("GGUF file cannot be read", path, error, remedy=_AGAIN) from error


class _Reader:
    """Little-endian values in a row, never beyond the end of the file."""

    def __init__(self, stream: BinaryIO, path: Path, size: int) -> None:
        self._stream, self._path, self.size, self.at = stream, path, size, 0

    def take(self, count: int) -> bytes:
        self._advance(count)
        raw = self._stream.read(count)
        if len(raw) != count:  # it shrank since its size was asked for
            raise self._truncated(self.at)
        return raw

    def skip(self, count: int) -> None:
        self._advance(count)
        self._stream.seek(count, 1)

    def _advance(self, count: int) -> None:
        if count > self.size - self.at:
            raise self._truncated(self.at + count)
        self.at += count

    def _truncated(self, required: int) -> UserError:
        what = "GGUF file is truncated or damaged (its header is incomplete)"
        return damaged(what, self._path, f"{self.size} bytes", f"{required} bytes at least", _AGAIN)

    def number(self, code: str) -> int:
        return int(self.value(code))

    def value(self, code: str) -> int | float | bool:
        value: int | float | bool
        (value,) = struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))
        return value

    def name(self, what: str) -> str:
        return self.text(f"{what} at byte {self.at}", _MAX_NAME)

    def text(self, what: str, most: int | None = None) -> str:
        length = self.number("Q")
        if most is not None and length > most:
            raise self.damaged(what, f"a name of {length} bytes", f"at most {most} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(what, error, "UTF-8") from error

    def damaged(self, what: str, observed: object, required: object) -> UserError:
        return damaged("GGUF header is damaged", f"{self._path}, {what}", observed, required, _AGAIN)


def _parse(path: Path, reader: _Reader) -> GgufHeader:
    magic = reader.take(4)
    if magic != b"GGUF":
        raise damaged("not a GGUF file", path, f"first bytes {magic!r}", "b'GGUF'", _CHOOSE)
    version = reader.number("I")
    if version not in _VERSIONS:
        swapped = int.from_bytes(struct.pack("<I", version), "big") in _VERSIONS
        raise damaged(
            "GGUF file is big-endian" if swapped else "GGUF file has a version that is not read",
            path,
            f"version {version:#x}" if swapped else f"version {version}",
            f"version {' or '.join(map(str, _VERSIONS))}, little-endian",
            "convert the model again with a current llama.cpp",
        )
    tensor_count, pairs = reader.number("Q"), reader.number("Q")
    metadata = _metadata(reader, pairs)
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise reader.damaged("general.alignment", alignment, "a power of two")
    entries = [_entry(reader) for _ in range(tensor_count)]  # a count of nonsense ends with the file
    base = -(-reader.at // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise reader.damaged(f"tensor {name}", "the name twice", "names that differ")
        if offset % alignment:
            required = f"a multiple of the alignment, {alignment}"
            raise reader.damaged(f"tensor {name}", f"offset {offset}", required)
        # 0 bytes of a type that is not known here, which nobody reads
        dtype, values, nbytes = ggml_types().get(kind, (f"type {kind}", 1, 0))
        if shape[-1] % values:
            required = f"a multiple of {values}, for {dtype}"
            raise reader.damaged(f"tensor {name}", f"rows of {shape[-1]}", required)
        end = base + offset + math.prod(shape) // values * nbytes
        tensors[name] = TensorInfo(name, path, dtype, shape, base + offset, end)
    _check_places(path, reader, tensors.values())
    return GgufHeader(path, metadata, tensors, (path,))


def _metadata(reader: _Reader, pairs: int) -> dict[str, Scalar]:
    metadata: dict[str, Scalar] = {}
    seen: set[str] = set()
    for _ in range(pairs):
        key = reader.name("key")
        if key in seen:
            raise reader.damaged(f"key {key}", "the key twice", "keys that differ")
        seen.add(key)
        kind = reader.number("I")
        if kind in _SCALARS:
            metadata[key] = reader.value(_SCALARS[kind])
        elif kind == _STRING:
            metadata[key] = reader.text(f"key {key}")
        elif kind != _ARRAY:
            raise reader.damaged(f"key {key}", f"a value of type {kind}", "one of 0 .. 12")
        else:
            kind, count = reader.number("I"), reader.number("Q")
            if kind in _SCALARS:
                reader.skip(count * struct.calcsize("<" + _SCALARS[kind]))
            elif kind == _STRING:
                for _ in range(count):
                    reader.skip(reader.number("Q"))
            else:
                required = "numbers, truth values or strings"
                raise reader.damaged(f"key {key}", f"an array of type {kind}", required)
    return metadata


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape (slowest first), type and offset of one tensor."""
    name = reader.name("tensor")
    dims = reader.number("I")
    if not 1 <= dims <= _MAX_DIMS:
        raise reader.damaged(f"tensor {name}", f"{dims} dimensions", f"1 .. {_MAX_DIMS}")
    sizes = tuple(reader.number("Q") for _ in range(dims))
    if 0 in sizes:
        raise reader.damaged(f"tensor {name}", f"sizes {list(sizes)}", "sizes above 0")
    return name, sizes[::-1], reader.number("I"), reader.number("Q")


def _check_places(path: Path, reader: _Reader, tensors: Iterable[TensorInfo]) -> None:
    end = reader.at
    for tensor in sorted(tensors, key=lambda t: (t.start, t.end)):
        if tensor.start < end:
            observed = f"bytes from {tensor.start}"
            raise reader.damaged(f"tensor {tensor.name}", observed, f"from {end} or later")
        end = tensor.end
    if end > reader.size:
        raise damaged("GGUF file is truncated", path, f"{reader.size} bytes", f"{end} bytes", _AGAIN)
