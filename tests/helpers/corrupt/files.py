"""Files that are absent, incomplete, or not what their names say."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.helpers.corrupt.case import Case
from tests.helpers.corrupt.folder import Folder

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 4302338544\n"
PAGE = b"<!DOCTYPE html>\n<html><head><title>429 Too Many Requests</title></head><body></body></html>\n"
FIRST, SECOND = (f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
_AGAIN = "download the checkpoint again"


def _replace(file: Path, content: bytes) -> None:
    file.unlink()
    file.write_bytes(content)


def _link(folder: Folder) -> None:
    folder.shard().unlink()
    folder.shard().symlink_to("../../blobs/4d7a2146")


def _directory(folder: Folder) -> None:
    folder.shard().unlink()
    folder.shard().mkdir()


def _unreadable(folder: Folder) -> None:
    # Root reads every file, but nobody reads this one's directory entry: a link to itself.
    folder.config_file.unlink()
    folder.config_file.symlink_to("config.json")


def _unfinished(folder: Folder) -> None:
    folder.shard().rename(folder.path / f"{FIRST}.incomplete")


def _aria2(folder: Folder) -> None:
    (folder.path / f"{FIRST}.aria2").write_bytes(bytes(16))


def _single_too(folder: Folder) -> None:
    save_file(folder.load(), folder.path / "model.safetensors")


def _single_absent(folder: Folder) -> None:
    for file in (folder.shard(1), folder.shard(2), folder.index):
        file.unlink()
    (folder.path / "model.safetensors").symlink_to("gone")


def _only_shards(folder: Folder) -> None:
    folder.index.unlink()


def _stray(folder: Folder) -> None:
    shutil.copy(folder.shard(), folder.path / "model-00003-of-00003.safetensors")


def _first_entry(header: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return next((name, entry) for name, entry in header.items() if name != "__metadata__")


def _entry(**changes: Any) -> Any:
    return lambda header: _first_entry(header)[1].update(changes)


def _overlap(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    a, b = (header[name] for name in names[:2])
    size = b["data_offsets"][1] - b["data_offsets"][0]
    start = a["data_offsets"][0]
    b["data_offsets"] = [start, start + size]


def _shape(header: dict[str, Any]) -> None:
    _, entry = _first_entry(header)
    entry["shape"] = [*entry["shape"][:-1], entry["shape"][-1] + 1]


def _index_twice(folder: Folder) -> None:
    text = folder.index.read_text()
    name = next(iter(json.loads(text)["weight_map"]))
    folder.index.write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "{FIRST}", '))


def _twice(folder: Folder) -> None:
    shutil.copy(folder.shard(1), folder.shard(2))


def _moved(weight_map: dict[str, Any]) -> None:
    weight_map["lm_head.weight"] = SECOND


FILES: list[Case] = [
    Case("config absent", "bf16", lambda f: f.config_file.unlink(), ["no config.json", "{model}"]),
    Case("config empty", "bf16", lambda f: f.config_file.write_bytes(b""), ["config.json cannot be read"]),
    Case("config a list", "bf16", lambda f: f.config_file.write_text("[]"), ["not a JSON object", "list"]),
    Case(
        "config binary",
        "bf16",
        lambda f: f.config_file.write_bytes(bytes(range(128, 256))),
        ["config.json cannot be read", "utf-8"],
    ),
    Case(
        "config a pointer",
        "bf16",
        lambda f: f.config_file.write_bytes(POINTER),
        ["config.json cannot be read", "Git LFS pointer", "git lfs pull"],
    ),
    Case("config a link to itself", "bf16", _unreadable, ["config.json", "{model}"]),
    Case(
        "index no JSON",
        "bf16",
        lambda f: f.index.write_text('{"weight_map": {'),
        ["checkpoint index cannot be read", "{model}/model.safetensors.index.json", _AGAIN],
    ),
    Case(
        "index a web page",
        "bf16",
        lambda f: f.index.write_bytes(PAGE),
        ["checkpoint index cannot be read", "a web page"],
    ),
    Case("index names a tensor twice", "bf16", _index_twice, ["index cannot be read", "appears twice"]),
    Case(
        "index without weight_map",
        "bf16",
        lambda f: f.index.write_text('{"metadata": {}}'),
        ["no weight_map", "index.json"],
    ),
    Case(
        "index names files elsewhere",
        "bf16",
        lambda f: f.mapping(lambda m: m.update({"lm_head.weight": "../other/x.safetensors"})),
        ["outside its directory", "lm_head.weight: '../other/x.safetensors'"],
    ),
    Case(
        "index names an absent tensor",
        "bf16",
        lambda f: f.mapping(lambda m: m.update({"model.extra.weight": FIRST})),
        ["their shard does not hold", f"model.extra.weight in {FIRST}"],
    ),
    Case(
        "index puts a tensor into another shard",
        "bf16",
        lambda f: f.mapping(_moved),
        ["their shard does not hold", f"lm_head.weight in {SECOND}"],
    ),
    Case(
        "shard holds a tensor that the index does not name",
        "bf16",
        lambda f: f.mapping(lambda m: m.pop("lm_head.weight")),
        ["index does not name", f"lm_head.weight in {FIRST}"],
    ),
    Case("tensor in two shards", "bf16", _twice, ["holds tensors twice", f"({FIRST} and {SECOND})"]),
    Case(
        "shard of another checkpoint",
        "bf16",
        _stray,
        ["shards that its index does not name", "model-00003-of-00003.safetensors", "remove files left"],
    ),
    Case("single file and shards", "bf16", _single_too, ["its weights twice", "model.safetensors beside"]),
    Case("single file a dangling link", "bf16", _single_absent, ["absent or incomplete", "link to gone"]),
    Case("shards without index", "bf16", _only_shards, ["index is absent", FIRST, "download model.safe"]),
    Case("shard missing", "bf16", lambda f: f.shard(2).unlink(), ["shards that are absent", SECOND, _AGAIN]),
    Case("shard a dangling link", "bf16", _link, [FIRST, "link to ../../blobs/4d7a2146", "does not exist"]),
    Case("shard a directory", "bf16", _directory, [FIRST, "(a directory)"]),
    Case("shard still downloading", "bf16", _unfinished, ["unfinished download", f"{FIRST}.incomplete"]),
    Case("shard with an aria2 file beside it", "bf16", _aria2, ["unfinished download", f"{FIRST}.aria2"]),
    Case(
        "shard empty",
        "bf16",
        lambda f: f.shard().write_bytes(b""),
        [f"{{model}}/{FIRST}", "found 0 bytes, an empty file"],
    ),
    Case("shard a pointer", "bf16", lambda f: _replace(f.shard(), POINTER), [FIRST, "Git LFS pointer"]),
    Case("shard a web page", "bf16", lambda f: _replace(f.shard(), PAGE), [FIRST, "a web page"]),
    Case(
        "shard a PyTorch file",
        "bf16",
        lambda f: _replace(f.shard(), b"PK\x03\x04" + bytes(range(256)) * 8),
        [FIRST, "a zip archive"],
    ),
    Case(
        "shard all zeros",
        "bf16",
        lambda f: _replace(f.shard(), bytes(f.shard().stat().st_size)),
        [FIRST, "reserved and never written"],
    ),
    Case("shard cut in its header", "bf16", lambda f: f.cut(300), [FIRST, "truncated", "300 bytes"]),
    Case("shard cut in its data", "bf16", lambda f: f.cut(-5000), [FIRST, "truncated", "bytes; required"]),
    Case("shard short of one byte", "bf16", lambda f: f.cut(-1), [FIRST, "truncated", "bytes; required"]),
    Case(
        "shard with a byte too much",
        "bf16",
        lambda f: _replace(f.shard(), f.shard().read_bytes() + b"\n"),
        [FIRST, "bytes after its tensors"],
    ),
    Case(
        "header length huge",
        "bf16",
        lambda f: _replace(f.shard(), struct.pack("<Q", 1 << 60) + f.shard().read_bytes()[8:]),
        [FIRST, "header is incomplete", "required a safetensors header"],
    ),
    Case(
        "header not JSON",
        "bf16",
        lambda f: _replace(f.shard(), f.shard().read_bytes()[:8] + b"not json" + f.shard().read_bytes()[16:]),
        [FIRST, "header is damaged"],
    ),
    Case("header with overlapping tensors", "bf16", lambda f: f.header(_overlap), [SECOND, "overlap"]),
    Case(
        "header with an unknown type",
        "bf16",
        lambda f: f.header(_entry(dtype="BF17")),
        [SECOND, "unknown type 'BF17'"],
    ),
    Case("header with another shape", "bf16", lambda f: f.header(_shape), [SECOND, "bytes for shape"]),
    Case(
        "header with a negative offset",
        "bf16",
        lambda f: f.header(_entry(data_offsets=[-8, 8])),
        [SECOND, "offsets [-8, 8)"],
    ),
    Case(
        "header entry without offsets",
        "bf16",
        lambda f: f.header(lambda h: _first_entry(h)[1].pop("data_offsets")),
        [SECOND, "no key 'data_offsets'"],
    ),
]
if os.geteuid() != 0:  # root reads everything
    FILES.append(Case("shard unreadable", "bf16", lambda f: f.shard().chmod(0), [FIRST, "Permission denied"]))
