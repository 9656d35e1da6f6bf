"""What a Hugging Face checkpoint directory holds, from its headers alone.

`CheckpointIndex.open` checks everything that can be checked without reading tensors (config.json,
the index, every shard's presence, header and size), so that a damaged 600 GB checkpoint is refused
in seconds and not at layer 44.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kt_ray.checkpoint.safetensors_file import Header, TensorInfo, read_header, read_json, read_tensor
from kt_ray.checkpoint.stored import StoredMatrix, find_matrices, is_auxiliary
from kt_ray.errors import UserError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FETCH = "set model.path to a complete Hugging Face directory (config.json and *.safetensors)"
_AGAIN = "download the checkpoint again, or copy the missing files beside the others"
# Keys of config.json that change without the model changing.
_VOLATILE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
_SAMPLES, _SAMPLE_BYTES = 64, 64


def some(names: list[str], limit: int = 5) -> str:
    """The first few names and how many there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


@dataclass(frozen=True)
class CheckpointIndex:
    """A checkpoint's configuration and the place of every tensor.

    Attributes:
        path: the directory.
        config: config.json as parsed.
        tensors: name -> place, dtype ("BF16", "F32", ...) and shape.
        files: the shards, sorted.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, model_dir: str | os.PathLike[str]) -> CheckpointIndex:
        """Read and check config, index and headers.

        Raises:
            UserError: absent or damaged config.json, index or shard; a shard whose size disagrees with
                its header; an index that names an absent shard or tensor; a tensor in two shards.
        """
        path = Path(model_dir)
        if not path.is_dir():
            raise UserError("no such checkpoint directory", where=str(path), remedy=_FETCH)
        if not (path / "config.json").is_file():
            raise UserError(
                "checkpoint has no config.json", where=str(path), required="config.json", remedy=_FETCH
            )
        config = read_json(path / "config.json", "config.json", _FETCH)
        if (path / _SINGLE).is_file():
            file = path / _SINGLE
            return cls(path, config, read_header(file, remedy=_AGAIN).tensors, (file,))
        if (path / _INDEX).is_file():
            tensors, files = _open_sharded(path)
            return cls(path, config, tensors, files)
        other = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.gguf", "*.safetensors") for p in path.glob(pattern)
        )
        raise UserError(
            "checkpoint has no safetensors weights",
            where=str(path),
            observed=some(other) or "no weight files",
            required=f"{_SINGLE} or {_INDEX}",
            remedy="save it with save_pretrained, or download its safetensors files",
        )

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration (nested in multimodal checkpoints)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in its stored type."""
        return read_tensor(self.tensors[name])

    @cached_property
    def matrices(self) -> dict[str, StoredMatrix]:
        """Quantised weights by the parameter they stand for.

        Raises:
            UserError: a format that is not read, or scales that do not fit their weights.
        """
        return find_matrices(self.path, self.tensors, self.config)

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters as the model knows them: plain tensors and quantised weights, without their parts."""
        parts = {key for matrix in self.matrices.values() for key in matrix.keys}
        plain = {name for name in self.tensors if name not in parts and not is_auxiliary(name)}
        return frozenset(plain | set(self.matrices))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter of `names`."""
        matrix = self.matrices.get(name)
        return self.tensors[name].shape if matrix is None else matrix.shape

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter of `names` on the CPU; quantised ones dequantised.

        Args:
            name: of the parameter.
            dtype: the result's type; None = as stored, quantised ones float32.
        """
        matrix = self.matrices.get(name)
        if matrix is not None:
            return matrix.dequantize(dtype or torch.float32)
        value = self.read(name)
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Names, shapes, dtypes, configuration and sampled bytes, hashed: the same whatever the sharding.

        A few bytes from the middle of tensors spread over the model tell two models of one
        architecture apart without reading them.
        """
        names = sorted(self.tensors)
        digest = hashlib.sha256()
        kept = {key: value for key, value in self.config.items() if key not in _VOLATILE}
        digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
        for name in names:
            info = self.tensors[name]
            digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        step = max(1, len(names) // _SAMPLES)
        for name in names[::step]:
            info = self.tensors[name]
            middle = info.start + max(0, info.nbytes - _SAMPLE_BYTES) // 2
            fd = os.open(info.file, os.O_RDONLY)
            try:
                digest.update(os.pread(fd, min(_SAMPLE_BYTES, info.nbytes), middle))
            finally:
                os.close(fd)
        return digest.hexdigest()


def _open_sharded(path: Path) -> tuple[dict[str, TensorInfo], tuple[Path, ...]]:
    index_file = path / _INDEX
    weight_map = read_json(index_file, "checkpoint index", _AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(
            "checkpoint index has no weight_map",
            where=str(index_file),
            required='a "weight_map" from tensor to file',
            remedy=_AGAIN,
        )
    shards = sorted({str(file) for file in weight_map.values()})
    absent = [shard for shard in shards if not (path / shard).is_file()]
    if absent:
        raise UserError(
            "checkpoint index names shards that are absent",
            where=str(index_file),
            observed=some(absent),
            required=f"{len(shards)} shards",
            remedy=_AGAIN,
        )

    def parse(shard: str) -> Header:
        return read_header(path / shard, remedy=_AGAIN)

    with ThreadPoolExecutor(max_workers=8) as pool:
        headers = dict(zip(shards, pool.map(parse, shards), strict=True))
    holders: dict[str, str] = {}
    twice: list[str] = []
    for shard, header in headers.items():
        for name in header.tensors:
            if name in holders:
                twice.append(f"{name} ({holders[name]} and {shard})")
            holders[name] = shard
    if twice:
        raise UserError(
            "checkpoint holds tensors twice",
            where=str(path),
            observed=some(sorted(twice)),
            required="each tensor in one shard",
            remedy="remove files left from another checkpoint and download it again",
        )
    lost = sorted(name for name, shard in weight_map.items() if name not in headers[shard].tensors)
    if lost:
        raise UserError(
            "checkpoint index names tensors that their shard does not hold",
            where=str(index_file),
            observed=some([f"{name} in {weight_map[name]}" for name in lost]),
            required="index and shards of one checkpoint",
            remedy=_AGAIN,
        )
    tensors = {name: headers[shard].tensors[name] for name, shard in weight_map.items()}
    return tensors, tuple(path / shard for shard in shards)
