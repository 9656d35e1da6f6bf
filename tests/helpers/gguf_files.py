"""GGUF files for tests: whole ones by the gguf package's writer, headers byte by byte to damage them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor

from kt_ray.native import ExpertMatrix, quantize

_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
Stacks = Mapping[str, Tensor | ExpertMatrix | tuple[str, Tensor]]
"""A tuple names the type of bytes that are given as they are."""


def stack(kind: str, value: Tensor) -> Tensor | ExpertMatrix:
    """A stack [E, N, K] in a GGUF type: "F32", "F16", "BF16" or one that the engine quantises to."""
    plain = {name: dtype for dtype, name in _PLAIN.items()}
    return value.to(plain[kind]) if kind in plain else quantize(kind.lower(), value)


def write_gguf(
    path: Path,
    architecture: str,
    tensors: Stacks,
    *,
    metadata: Mapping[str, int | str] | None = None,
    split: int = 0,
    alignment: int | None = None,
) -> Path:
    """Write `path`, or with `split` (tensors of a file) the set path-00001-of-0000N.gguf; returns the first.

    There is a vocabulary in the metadata, as in every model.
    """
    writer = GGUFWriter(path, architecture, split_max_tensors=split)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(50)])
    writer.add_array("tokenizer.ggml.token_type", [1] * 50)
    for key, value in (metadata or {}).items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        raw, kind = _raw(tensor)
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.is_file() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _raw(tensor: Tensor | ExpertMatrix | tuple[str, Tensor]) -> tuple[np.ndarray[Any, Any], str]:
    if isinstance(tensor, tuple):
        return tensor[1].numpy(), tensor[0]
    if isinstance(tensor, ExpertMatrix):
        return tensor.data.contiguous().numpy(), tensor.format.upper()
    if tensor.dtype == torch.bfloat16:  # numpy has no such type: its bytes
        return tensor.contiguous().view(torch.uint8).numpy(), "BF16"
    return tensor.contiguous().numpy(), _PLAIN[tensor.dtype]


def values(tensor: Tensor | ExpertMatrix) -> Tensor:
    """In float32, as the gguf package decodes them."""
    return tensor.dequantize() if isinstance(tensor, ExpertMatrix) else tensor.float()


def text(value: str | bytes) -> bytes:
    """A string of a header."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    """A key and its value."""
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str | bytes, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's entry; sizes with the fastest first."""
    head = text(name) + struct.pack("<I", len(sizes))
    return head + struct.pack(f"<{len(sizes)}QIQ", *sizes, kind, offset)


def header(
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: bytes = struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    data: int = 0,
) -> bytes:
    """A whole file: header, padding to 32 and `data` zeros."""
    tensors, keys = counts or (len(entries), len(pairs))
    raw = magic + version + struct.pack("<QQ", tensors, keys) + b"".join(pairs) + b"".join(entries)
    return raw + bytes(-len(raw) % 32) + bytes(data)
