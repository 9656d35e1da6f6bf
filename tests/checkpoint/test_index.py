"""Reading a checkpoint's headers: what is there, and every way in which it can be damaged."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_ray.checkpoint import CheckpointIndex
from kt_ray.checkpoint.index import joined_digest
from kt_ray.checkpoint.safetensors_file import build_header, read_header, tensor_bytes, write_from
from kt_ray.errors import UserError

INDEX = "model.safetensors.index.json"


def test_reads_places_and_values(checkpoint: Path) -> None:
    index = CheckpointIndex.open(checkpoint)
    stored = {k: v for file in index.files for k, v in load_file(file).items()}
    assert set(index.tensors) == set(stored)
    assert len(index.files) == 2
    for name, value in stored.items():
        assert index.tensors[name].shape == tuple(value.shape)
        torch.testing.assert_close(index.read(name), value, rtol=0, atol=0)
    assert index.nbytes == sum(v.nbytes for v in stored.values())


def test_every_readable_type(tmp_path: Path, write: Callable[..., Path]) -> None:
    tensors = {
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
            torch.int64,
            torch.uint8,
            torch.float8_e4m3fn,
        )
    } | {"bool": torch.tensor([True, False]), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4)}
    index = CheckpointIndex.open(write(tmp_path / "m", tensors))
    for name, value in tensors.items():
        read = index.read(name)
        assert read.dtype == value.dtype and read.shape == value.shape
        assert torch.equal(read.float(), value.float())


def test_fingerprint_ignores_sharding_and_tells_models_apart(
    tmp_path: Path,
    write: Callable[..., Path],
    make_experts: Callable[..., dict[str, torch.Tensor]],
    make_config: Any,
) -> None:
    tensors = make_experts()
    one = CheckpointIndex.open(write(tmp_path / "one", tensors)).fingerprint
    assert CheckpointIndex.open(write(tmp_path / "three", tensors, shards=3)).fingerprint == one
    other = {name: value + 1 for name, value in tensors.items()}
    assert CheckpointIndex.open(write(tmp_path / "other", other)).fingerprint != one
    config = make_config(rope_theta=5.0)
    assert CheckpointIndex.open(write(tmp_path / "rope", tensors, config=config)).fingerprint != one


def test_fingerprint_sees_what_is_rare_among_many_experts(tmp_path: Path, write: Callable[..., Path]) -> None:
    """Its first half, which is all that earlier versions wrote, samples 64 of all tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layers.{layer}.{part}.weight": torch.randn(4, 4, generator=generator)
        for layer in range(4)
        for part in (
            "self_attn.q_proj",
            "self_attn.o_proj",
            *(f"mlp.experts.{n}.up_proj" for n in range(100)),
        )
    }
    one = CheckpointIndex.open(write(tmp_path / "one", tensors)).fingerprint
    other = {name: value + ("q_proj" in name) for name, value in tensors.items()}
    swapped = CheckpointIndex.open(write(tmp_path / "other", other)).fingerprint
    assert swapped != one and swapped[:64] == one[:64]
    joined = joined_digest(one, "g" * 128)
    assert joined[:64] == hashlib.sha256(f"{one[:64]} {'g' * 64}".encode()).hexdigest()
    assert joined != joined_digest(swapped, "g" * 128)


def test_built_header_is_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 5), "a": torch.randn(2).to(torch.bfloat16)}
    head, ranges, size = build_header([("b", "F32", (3, 5)), ("a", "BF16", (2,))])
    path = tmp_path / "x.safetensors"
    path.write_bytes(head + bytes(size - len(head)))
    with path.open("r+b") as file:
        for name, tensor in tensors.items():
            write_from(file.fileno(), tensor_bytes(tensor), ranges[name][0])
    loaded = load_file(path)
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())
    assert read_header(path).keys() == tensors.keys()


def _shard(path: Path, i: int = 0) -> Path:
    return sorted(path.glob("model-*.safetensors"))[i]


def _absent_dir(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def _truncate(path: Path) -> None:
    file = _shard(path)
    file.write_bytes(file.read_bytes()[:-7])


def _grow(path: Path) -> None:
    with _shard(path).open("ab") as file:
        file.write(b"xyz")


def _edit_index(path: Path, change: Callable[[dict[str, str]], None]) -> None:
    value = json.loads((path / INDEX).read_text())
    change(value["weight_map"])
    (path / INDEX).write_text(json.dumps(value))


def _header(path: Path, header: object) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    _shard(path).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(64))


def _twice(path: Path) -> None:
    extra = dict(load_file(_shard(path, 0)))
    save_file(load_file(_shard(path, 1)) | dict(list(extra.items())[:1]), _shard(path, 1))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no directory": (_absent_dir, "no such checkpoint directory"),
    "no config": (lambda p: (p / "config.json").unlink(), "no config.json"),
    "config not json": (lambda p: (p / "config.json").write_text("{"), "config.json cannot be read"),
    "config a list": (lambda p: (p / "config.json").write_text("[]"), "not a JSON object"),
    "config key twice": (lambda p: (p / "config.json").write_text('{"a": 1, "a": 2}'), "appears twice"),
    "no weights": (lambda p: [f.unlink() for f in p.glob("model*")], "no safetensors weights"),
    "pytorch weights only": (
        lambda p: [f.unlink() for f in p.glob("model*")] + [(p / "pytorch_model.bin").write_bytes(b"x")],
        "found pytorch_model.bin",
    ),
    "index damaged": (lambda p: (p / INDEX).write_text("nope"), "checkpoint index cannot be read"),
    "index empty": (lambda p: (p / INDEX).write_text("{}"), "no weight_map"),
    "absent index and shard": (
        lambda p: [f.unlink() for f in (p / "model.safetensors.index.json", _shard(p))],
        "not there: model-00001-of-00002.safetensors; required model.safetensors.index.json",
    ),
    "absent shard": (lambda p: _shard(p).unlink(), "names shards that are absent"),
    "index names absent tensor": (
        lambda p: _edit_index(p, lambda m: m.update({"model.extra": _shard(p).name})),
        "tensors that their shard does not hold; at",
    ),
    "tensor in two shards": (_twice, "holds tensors twice"),
    "truncated shard": (_truncate, "safetensors file is truncated"),
    "bytes after the tensors": (_grow, "bytes after its tensors"),
    "empty shard": (lambda p: _shard(p).write_bytes(b""), "its header is incomplete"),
    "header longer than file": (
        lambda p: _shard(p).write_bytes(struct.pack("<Q", 4096) + b"{}"),
        "4104 bytes at least",
    ),
    "not safetensors": (lambda p: _shard(p).write_bytes(b"PK\x03\x04" * 40), "its header is incomplete"),
    "header not json": (lambda p: _header(p, b"{abc"), "header is damaged"),
    "header entry incomplete": (lambda p: _header(p, {"a": {"dtype": "F32"}}), "header is damaged"),
    "shape and bytes disagree": (
        lambda p: _header(p, {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 64]}}),
        "64 bytes for shape [3]",
    ),
    "gap between tensors": (
        lambda p: _header(p, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [56, 64]}}),
        "overlap or leave gaps",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_with_a_remedy(checkpoint: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    damage(checkpoint)
    with pytest.raises(UserError) as caught:
        CheckpointIndex.open(checkpoint)
    line = str(caught.value)
    assert message in line and "\n" not in line
    assert caught.value.remedy


def test_truncation_names_file_and_bytes(checkpoint: Path) -> None:
    file = _shard(checkpoint)
    size = file.stat().st_size
    _truncate(checkpoint)
    with pytest.raises(UserError) as caught:
        CheckpointIndex.open(checkpoint)
    error = caught.value
    assert (
        file.name in error.where
        and error.observed == f"{size - 7} bytes"
        and error.required == f"{size} bytes"
    )


def test_file_that_shrinks_later_is_reported(checkpoint: Path) -> None:
    index = CheckpointIndex.open(checkpoint)
    last = max(index.tensors.values(), key=lambda t: (t.file, t.end))
    last.file.write_bytes(last.file.read_bytes()[:-4])
    with pytest.raises(UserError, match="ended while it was read"):
        index.read(last.name)
