"""What a Hugging Face checkpoint directory holds, from its headers alone.

`CheckpointIndex.open` checks everything that can be checked without reading tensors (config.json,
the index, every shard's presence, header and size), so that a damaged 600 GB checkpoint is refused
within seconds, not at layer 44.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from kt_ray.checkpoint.names import family, layers_key, zero_experts
from kt_ray.checkpoint.packings import Gptq
from kt_ray.checkpoint.safetensors_file import (
    TensorInfo,
    damaged,
    read_header,
    read_tensor,
)
from kt_ray.checkpoint.stored import StoredMatrix, find_matrices, is_auxiliary
from kt_ray.disk import stays_inside
from kt_ray.parse import read_json

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FETCH = "set model.path to a complete Hugging Face directory (config.json and *.safetensors)"
_AGAIN = "download the checkpoint again, or copy the missing files beside the others"
# Keys of config.json that change without the model changing.
_VOLATILE = {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"}
_SAMPLES, _OF_KIND, _SAMPLE_BYTES = 64, 16, 64  # tensors of a model, and of one name but for numbers; bytes
_DIGEST = 64  # characters of a digest
_MOST_SHARDS = 10_000
# What browsers and download programs put beside, or in place of, a file that is not complete yet.
_UNFINISHED = (".aria2", ".incomplete", ".part", ".partial", ".crdownload", ".download", ".tmp")


def some(names: list[str], limit: int = 5) -> str:
    """The first few names and how many there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"


@dataclass(frozen=True)
class CheckpointIndex:
    """A checkpoint's configuration and the place of every tensor."""

    path: Path  # of the directory
    config: dict[str, Any]  # config.json
    tensors: dict[str, TensorInfo]
    files: tuple[Path, ...]  # the shards, sorted
    notes: tuple[str, ...] = ()  # harmless oddities, one line each

    @classmethod
    def open(cls, model_dir: str | os.PathLike[str]) -> CheckpointIndex:
        """Read and check config, index and headers.

        Raises:
            UserError: absent or damaged config.json, index or shard; a shard whose size disagrees with
                its header; an index that names an absent shard or tensor; a tensor in two shards.
        """
        path = Path(model_dir)
        if not path.is_dir():
            raise damaged("no such checkpoint directory", path, remedy=_FETCH)
        if not (path / "config.json").is_file():
            raise damaged("checkpoint has no config.json", path, required="config.json", remedy=_FETCH)
        config = read_json(path / "config.json", "config.json", _FETCH)
        file = path / _SINGLE
        if (path / _INDEX).exists():
            tensors, files, notes = _open_sharded(path)
            if file.exists() and file not in files:
                observed = f"{_SINGLE} beside {_INDEX}, which names {some([f.name for f in files], 2)}"
                remedy = "remove the one that belongs to another checkpoint"
                raise damaged("checkpoint holds its weights twice", path, observed, "one of them", remedy)
            return cls(path, config, tensors, files, notes)
        if os.path.lexists(file):
            _check_present(path, [_SINGLE], file)
            _check_stray(path, {_SINGLE})
            return cls(path, config, read_header(file, remedy=_AGAIN), (file,))
        other = sorted(
            p.name for pattern in ("*.bin", "*.pt", "*.gguf", "*.safetensors") for p in path.glob(pattern)
        )
        if shards := [name for name in other if re.search(r"-\d+-of-\d+\.safetensors$", name)]:
            absent = _absent(shards)
            observed = f"{some(shards)}; not there: {some(absent)}" if absent else some(shards)
            required = f"{_INDEX} beside its shards"
            remedy = f"download {_INDEX}{' and the shards that are not there' if absent else ', too'}"
            raise damaged("checkpoint's index is absent", path, observed, required, remedy)
        raise damaged(
            "checkpoint has no safetensors weights",
            path,
            some(other) or "no weight files",
            f"{_SINGLE} or {_INDEX}",
            "save it with save_pretrained, or download its safetensors files",
        )

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the configuration (nested in multimodal checkpoints)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @property
    def layer_count(self) -> int | None:
        """Decoder layers; None where config.json does not say."""
        text, key = self.text_config, layers_key(self.text_config)
        value = text.get(key)
        if not isinstance(value, int):
            return None
        halved = key == "num_hidden_layers" and family(text) == "longcat_flash"
        return max(1, value // 2) if halved else value

    @property
    def zero_experts(self) -> range:
        """`names.zero_experts` of the language model."""
        return zero_experts(self.text_config)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """One tensor on the CPU in its stored type."""
        return read_tensor(self.tensors[name])

    @cached_property
    def matrices(self) -> dict[str, StoredMatrix]:
        """Quantised weights by the parameter they stand for; raises as `find_matrices`."""
        return find_matrices(self.path, self.tensors, self.config)

    @cached_property
    def names(self) -> frozenset[str]:
        """Parameters as the model knows them: plain tensors and quantised weights, without their parts."""
        parts = {key for matrix in self.matrices.values() for key in matrix.keys}
        plain = {name for name in self.tensors if name not in parts and not is_auxiliary(name)}
        return frozenset(plain | set(self.matrices))

    def is_blank_bias(self, name: str) -> bool:
        """A bias of zeros beside GPTQ's integers: AutoGPTQ once gave one to every module."""
        matrix = self.matrices.get(name.removesuffix("bias") + "weight") if name.endswith(".bias") else None
        return matrix is not None and isinstance(matrix.packing, Gptq) and not bool(self.read(name).any())

    def first(self, name: str) -> TensorInfo:
        """Where the values of a parameter of `names` lie."""
        matrix = self.matrices.get(name)
        return self.tensors[name] if matrix is None else matrix.data

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter of `names`."""
        matrix = self.matrices.get(name)
        return self.tensors[name].shape if matrix is None else matrix.shape

    def value(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A parameter of `names` on the CPU, in `dtype` (None = as stored); quantised ones dequantised."""
        matrix = self.matrices.get(name)
        if matrix is not None:
            return matrix.dequantize(dtype or torch.float32)
        value = self.read(name)
        return value if dtype is None or not value.is_floating_point() else value.to(dtype)

    @cached_property
    def fingerprint(self) -> str:
        """Names, shapes, dtypes, configuration and sampled bytes, hashed: the same whatever the sharding.

        Files of earlier versions hold its first half alone: ours begins with one of the same weights.
        """
        kept = {key: value for key, value in self.config.items() if key not in _VOLATILE}
        about = json.dumps(kept, sort_keys=True, default=str)
        return tensors_digest([self.tensors[name] for name in sorted(self.tensors)], about)


def check_unchanged(fingerprint: str, expected: str, where: object) -> None:
    """Refuse weights that are not those with which the run began.

    Raises:
        UserError: another fingerprint.
    """
    if fingerprint != expected:
        raise damaged(
            "the model's files are not those that this run began with",
            f"{where} on {socket.gethostname()}",
            f"fingerprint {fingerprint[-12:]}",
            f"fingerprint {expected[-12:]}, as the driver found them",
            "put the files back, the same on every host",
        )


def tensors_digest(tensors: Sequence[TensorInfo], about: str = "") -> str:
    """Two SHA-256, one behind the other, of names, types, shapes and a few bytes from the middle of tensors:
    those tell apart what headers do not.

    The first samples tensors spread over the model, which are nearly all experts where there are many; the
    second tensors of every kind: the same name but for its numbers.
    """
    first = hashlib.sha256(about.encode())
    kinds: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        first.update(f"{info.name} {info.dtype} {info.shape}\n".encode())
        kinds.setdefault(re.sub(r"\d+", "#", info.name), []).append(info)
    second = first.copy()
    for digest, groups, samples in ((first, [tensors], _SAMPLES), (second, kinds.values(), _OF_KIND)):
        for group in groups:
            for info in group[:: max(1, len(group) // samples)]:
                with info.file.open("rb") as file:
                    file.seek(info.start + max(0, info.nbytes - _SAMPLE_BYTES) // 2)
                    digest.update(file.read(min(_SAMPLE_BYTES, info.nbytes)))
    return first.hexdigest() + second.hexdigest()


def joined_digest(one: str, other: str) -> str:
    """The `tensors_digest` of two parts of a model as one, half by half."""
    halves = ((text[:_DIGEST], text[_DIGEST:]) for text in (one, other))
    return "".join(hashlib.sha256(" ".join(pair).encode()).hexdigest() for pair in zip(*halves, strict=True))


def _open_sharded(path: Path) -> tuple[dict[str, TensorInfo], tuple[Path, ...], tuple[str, ...]]:
    index_file = path / _INDEX
    content = read_json(index_file, "checkpoint index", _AGAIN)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        required = 'a "weight_map" from tensor to file'
        raise damaged("checkpoint index has no weight_map", index_file, required=required, remedy=_AGAIN)
    odd = sorted(
        name
        for name, file in weight_map.items()
        if not (stays_inside(file) and file.endswith(".safetensors"))
    )
    if odd:
        raise damaged(
            "checkpoint index names files outside its directory",
            index_file,
            some([f"{name}: {weight_map[name]!r}" for name in odd]),
            "names of *.safetensors files beside the index",
            _AGAIN,
        )
    shards = sorted(set(weight_map.values()))
    _check_present(path, shards, index_file)
    _check_stray(path, set(shards))

    with ThreadPoolExecutor(max_workers=8) as pool:
        parsed = pool.map(lambda shard: read_header(path / shard, remedy=_AGAIN), shards)
        headers = dict(zip(shards, parsed, strict=True))
    _check_map(path, weight_map, headers)
    tensors = {name: headers[shard][name] for name, shard in weight_map.items()}
    return tensors, tuple(path / shard for shard in shards), _size_note(content, tensors)


def _size_note(content: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """A note where the index promises another size. Releases do, too; the headers are what counts."""
    metadata = content.get("metadata")
    promised = metadata.get("total_size") if isinstance(metadata, dict) else None
    size = sum(info.nbytes for info in tensors.values())
    if not isinstance(promised, int | float) or promised == size:
        return ()
    return (f"{_INDEX} says total_size {promised:.0f}, its tensors take {size} bytes",)


def _check_present(path: Path, shards: list[str], where: Path) -> None:
    """Every shard is a file, and none is still being downloaded."""
    absent: list[str] = []
    for shard in shards:
        file = path / shard
        unfinished = [f"{shard}{end}" for end in _UNFINISHED if (path / f"{shard}{end}").exists()]
        if file.is_file() and f"{shard}.aria2" not in unfinished:  # aria2 writes into the file itself
            continue
        state = f" (unfinished download: {unfinished[0]})" if unfinished else ""
        if file.is_symlink() and not file.exists():
            state += f" (a link to {os.readlink(file)}, which does not exist)"
        elif file.is_dir():
            state += " (a directory)"
        absent.append(shard + state)
    if absent:
        what, required = "checkpoint's weight file is absent or incomplete", "a file"
        if where.name == _INDEX:
            what = "checkpoint index names shards that are absent or incomplete"
            required = f"{len(shards)} shards"
        raise damaged(what, where, some(absent), required, _AGAIN)


def _absent(shards: list[str]) -> list[str]:
    """Shards whose number is missing among those of their name and count."""
    names: set[str] = set()
    for name in shards:
        if (match := re.match(r"(.*-)(\d+)(-of-(\d+)\..*)$", name)) and int(match[4]) <= _MOST_SHARDS:
            start, number, end, count = match.groups()
            names |= {f"{start}{n:0{len(number)}}{end}" for n in range(1, int(count) + 1)}
    return sorted(names - set(shards))


def _check_stray(path: Path, shards: set[str]) -> None:
    """Numbered shards that the index does not name come from another checkpoint."""
    stray = sorted(f.name for f in path.glob("model*-of-*.safetensors") if f.name not in shards)
    if stray:
        raise damaged(
            "checkpoint directory holds shards that its index does not name",
            path,
            some(stray),
            f"{len(shards)} shards: {some(sorted(shards), 2)}",
            "remove files left from another checkpoint, or download the checkpoint again",
        )


def _check_map(
    path: Path, weight_map: dict[str, str], headers: Mapping[str, Mapping[str, TensorInfo]]
) -> None:
    """Index and shards name the same tensors, each in one place."""
    holders: dict[str, str] = {}
    twice: list[str] = []
    for shard, header in headers.items():
        for name in header:
            if name in holders:
                twice.append(f"{name} ({holders[name]} and {shard})")
            holders[name] = shard
    if twice:
        remedy = "remove files left from another checkpoint and download it again"
        required = "each tensor in one shard"
        raise damaged("checkpoint holds tensors twice", path, some(sorted(twice)), required, remedy)
    lost = {name: shard for name, shard in weight_map.items() if name not in headers[shard]}
    unnamed = {name: shard for name, shard in holders.items() if name not in weight_map}
    for what, places in (
        ("checkpoint index names tensors that their shard does not hold", lost),
        ("shards hold tensors that the checkpoint index does not name", unnamed),
    ):
        if places:
            observed = some([f"{name} in {places[name]}" for name in sorted(places)])
            raise damaged(what, path / _INDEX, observed, "index and shards of one checkpoint", _AGAIN)
