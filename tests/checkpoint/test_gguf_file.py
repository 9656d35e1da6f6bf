"""GGUF headers: what the gguf package's writer writes is found again, and damage is named."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest
import torch

from kt_ray.checkpoint.gguf_file import ggml_types, open_gguf, read_gguf_header
from kt_ray.errors import UserError
from kt_ray.native.matrix import GGUF_BLOCKS
from tests.helpers.gguf_files import Stacks, entry, header, pair, stack, text, write_gguf

U32, STRING, ARRAY = 4, 8, 9


def some_tensors() -> Stacks:
    generator = torch.Generator().manual_seed(0)
    kinds = ("F32", "Q8_0", "F16", "Q4_0", "BF16")
    return {
        f"blk.{i}.x": stack(kind, torch.randn(2, 3 + i, 32, generator=generator))
        for i, kind in enumerate(kinds)
    }


def test_the_engines_blocks_are_those_of_ggml() -> None:
    sizes = {name.lower(): block for name, *block in ggml_types().values()}
    assert {name: tuple(sizes[name]) for name in GGUF_BLOCKS} == GGUF_BLOCKS


@pytest.mark.parametrize("alignment", [None, 128])
def test_places_and_metadata(tmp_path: Path, alignment: int | None) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", "qwen3moe", some_tensors(), metadata={"expert_count": 4}, alignment=alignment
    )
    found, raw = open_gguf(path), path.read_bytes()
    assert found.architecture == "qwen3moe" and found.metadata["qwen3moe.expert_count"] == 4
    assert "tokenizer.ggml.tokens" not in found.metadata and found.files == (path,)
    expected = gguf.GGUFReader(path)
    assert [t.name for t in expected.tensors] == list(found.tensors)
    for tensor in expected.tensors:
        place = found.tensors[tensor.name]
        assert (place.dtype, place.shape) == (tensor.tensor_type.name, tuple(tensor.shape.tolist())[::-1])
        assert (place.start, place.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert raw[place.start : place.end] == tensor.data.tobytes()


def test_split_sets(tmp_path: Path) -> None:
    tensors = some_tensors()
    whole = open_gguf(write_gguf(tmp_path / "whole.gguf", "qwen3moe", tensors))
    folder = tmp_path / "set"
    folder.mkdir()
    first = write_gguf(folder / "m.gguf", "qwen3moe", tensors, split=2)
    (folder / "mmproj-F16.gguf").write_bytes(b"")
    assert first.name == "m-00001-of-00003.gguf"
    for path in (first, folder / "m-00003-of-00003.gguf", folder):
        found = open_gguf(path)
        assert len(found.files) == 3 and found.architecture == "qwen3moe"
        assert {t.name: (t.dtype, t.shape) for t in found.tensors.values()} == {
            t.name: (t.dtype, t.shape) for t in whole.tensors.values()
        }
        assert found.tensors["blk.4.x"].file.name == "m-00003-of-00003.gguf"


def test_every_truncation_is_named(tmp_path: Path) -> None:
    raw = write_gguf(tmp_path / "m.gguf", "qwen3moe", some_tensors()).read_bytes()
    last = max(t.end for t in open_gguf(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "cut.gguf"
    for length in [*range(0, last, 7), last - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(UserError, match="truncated") as caught:
            read_gguf_header(path)
        assert str(path) in str(caught.value)
    path.write_bytes(raw[:last])
    assert read_gguf_header(path).tensors


def test_nonsense_bytes_give_one_error(tmp_path: Path) -> None:
    """Bytes of the header turned round: read, or refused as the user's error, and quickly."""
    raw = write_gguf(tmp_path / "m.gguf", "qwen3moe", some_tensors()).read_bytes()
    start = min(t.start for t in open_gguf(tmp_path / "m.gguf").tensors.values())
    path = tmp_path / "bad.gguf"
    refused = 0
    for at in range(0, start, 5):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0xFF]) + raw[at + 1 :])
        try:
            read_gguf_header(path)
        except UserError:
            refused += 1
    assert refused > start // 20


TENSOR = entry("t", (32, 2), 0, 0)
DAMAGE = {
    "magic": (header(magic=b"GGML"), "not a GGUF file.*GGML"),
    "version": (header(version=struct.pack("<I", 1)), "a version that is not read.*version 1"),
    "big-endian": (header(version=struct.pack(">I", 3)), "big-endian"),
    "tensor count": (header([], [TENSOR], counts=(1 << 60, 0), data=256), "truncated or damaged|damaged"),
    "key count": (header(counts=(0, 1 << 63)), "truncated or damaged"),
    "key twice": (header([pair("a", U32, bytes(4))] * 2), "key a; found the key twice"),
    "key of nonsense": (header([pair(b"\xff\xfe", U32, bytes(4))]), "UTF-8"),
    "long key": (header([struct.pack("<Q", 1 << 40)]), "a name of 1099511627776 bytes"),
    "value type": (header([pair("a", 13, bytes(4))]), "key a; found a value of type 13"),
    "array of arrays": (header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of type 9"),
    "endless array": (header([pair("a", ARRAY, struct.pack("<IQ", U32, 1 << 62))]), "truncated or damaged"),
    "endless text": (header([pair("a", STRING, struct.pack("<Q", 1 << 62))]), "truncated or damaged"),
    "alignment 0": (header([pair("general.alignment", U32, bytes(4))]), "general.alignment; found 0"),
    "alignment 48": (
        header([pair("general.alignment", U32, struct.pack("<I", 48))]),
        "alignment; found 48; required a power",
    ),
    "alignment text": (header([pair("general.alignment", STRING, text("32"))]), "required a power of two"),
    "dimensions": (header([], [entry("t", (1, 1, 1, 1, 1), 0, 0)], data=64), "tensor t; found 5 dimensions"),
    "size 0": (header([], [entry("t", (32, 0), 0, 0)], data=64), "sizes above 0"),
    "cut block": (header([], [entry("t", (40, 2), 8, 0)], data=640), "rows of 40; required a multiple of 32"),
    "offset": (header([], [entry("t", (32, 2), 0, 16)], data=640), "offset 16; required a multiple of"),
    "name twice": (header([], [TENSOR, TENSOR], data=640), "tensor t; found the name twice"),
    "overlap": (header([], [TENSOR, entry("u", (32, 2), 0, 32)], data=640), "tensor u; found bytes from"),
    "data": (header([], [TENSOR], data=255), "GGUF file is truncated"),
    "huge tensor": (header([], [entry("t", (1 << 63, 1 << 63), 0, 0)], data=640), "GGUF file is truncated"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named(tmp_path: Path, case: str) -> None:
    raw, message = DAMAGE[case]
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    with pytest.raises(UserError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value) and caught.value.remedy


def test_types_of_the_future_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(header([], [entry("t", (7, 3), 99, 0), entry("u", (32, 2), 0, 32)], data=288))
    found = open_gguf(path).tensors
    assert found["t"].dtype == "type 99" and found["u"].nbytes == 256


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such GGUF file"):
        open_gguf(tmp_path / "absent.gguf")
    with pytest.raises(UserError, match="holds no GGUF model"):
        open_gguf(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(header())
    with pytest.raises(UserError, match=r"several GGUF models.*a\.gguf, b\.gguf"):
        open_gguf(tmp_path)


@pytest.mark.parametrize("split", [0, 2])
def test_unfinished_downloads(tmp_path: Path, split: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", some_tensors(), split=split)
    last = max(tmp_path.glob("*.gguf"))
    last.with_name(f"{last.name}.aria2").write_bytes(b"")
    with pytest.raises(UserError, match=rf"unfinished download.*{last.name}\.aria2"):
        open_gguf(path)


def test_split_sets_that_do_not_fit(tmp_path: Path) -> None:
    tensors = some_tensors()
    first = write_gguf(tmp_path / "m.gguf", "qwen3moe", tensors, split=2)
    second, third = (tmp_path / f"m-{n:05d}-of-00003.gguf" for n in (2, 3))
    raw = second.read_bytes()

    second.unlink()
    with pytest.raises(UserError, match=r"not complete.*m-00002-of-00003\.gguf"):
        open_gguf(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(UserError, match=r"not the part.*m-00002.*split\.no 2; required split\.no 1"):
        open_gguf(first)
    second.write_bytes(raw.replace(b"blk.2.x", b"blk.0.x"))
    with pytest.raises(UserError, match=r"tensors twice.*blk\.0\.x"):
        open_gguf(first)
    second.write_bytes(raw)
    (tmp_path / "alone.gguf").write_bytes(first.read_bytes())
    with pytest.raises(UserError, match=r"its name does not say.*split\.count 3"):
        open_gguf(tmp_path / "alone.gguf")
    counted = first.read_bytes()
    at = counted.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    first.write_bytes(counted[:at] + struct.pack("<i", 6) + counted[at + 4 :])
    with pytest.raises(UserError, match="5 tensors in 3 files; required 6"):
        open_gguf(first)
