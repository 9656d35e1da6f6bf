"""Saving and resuming: shards by name, a manifest last, and every damage named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_ray.checkpoint.manifest import Manifest, ShardInfo
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.checkpoint.training import begin_checkpoint, commit_checkpoint, read_named_into, write_shard
from kt_ray.checkpoint_dirs import list_checkpoints
from kt_ray.errors import UserError

FIELDS = {"lora.rank": 8, "lora.experts": True, "lora.target_modules": ["q_proj"], "seed": 3}


def tensors_of(step: int, actor: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 10 + actor)
    names = [f"model.layers.{actor}.x.lora_{half}.weight" for half in "AB"]
    return {
        f"{what}/{name}": torch.randn(2, 3 + actor, generator=generator)
        for what in ("param", "exp_avg", "exp_avg_sq")
        for name in names
    }


def save(run: Path, step: int) -> Path:
    root = run / "checkpoints"
    partial = begin_checkpoint(root, step)
    shards = (
        write_shard(partial, "worker-0.safetensors", tensors_of(step, 0)),
        write_shard(partial, "experts-0.safetensors", tensors_of(step, 1)),
    )
    manifest = Manifest(step, 3, {"epoch": 1, "row": 7}, "abc" * 10, FIELDS, shards, {"lr": 0.5})
    return commit_checkpoint(partial, root / f"step_{step:06d}", manifest)


def test_round_trip_by_name_from_any_shard(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    manifest = Manifest.load(path)
    assert (manifest.step, manifest.data, manifest.state) == (10, {"epoch": 1, "row": 7}, {"lr": 0.5})
    manifest.require(model="abc" * 10, fields={**FIELDS, "lora.target_modules": ("q_proj",)})
    everything = tensors_of(10, 0) | tensors_of(10, 1)
    targets = {name: torch.empty_like(everything[name]) for name in list(everything)[::-2]}
    read_named_into(path, targets)
    assert all(torch.equal(target, everything[name]) for name, target in targets.items())


def test_what_needs_no_conversion_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may hold 100,000 tensors: no copy of each, and no opening of the file for each."""
    path = save(tmp_path, 10)
    everything = tensors_of(10, 0) | tensors_of(10, 1)
    targets = {name: torch.empty_like(tensor) for name, tensor in everything.items()}
    doubles = {name: torch.empty_like(tensor, dtype=torch.float64) for name, tensor in everything.items()}
    read_named_into(path, doubles)
    monkeypatch.setattr("kt_ray.checkpoint.training.read_tensor", None)
    read_named_into(path, targets)
    assert all(torch.equal(targets[name], everything[name]) for name in everything)
    assert all(torch.equal(doubles[name], everything[name].double()) for name in everything)


def test_an_interrupted_write_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 10)
    partial = begin_checkpoint(tmp_path / "checkpoints", 20)
    write_shard(partial, "worker-0.safetensors", tensors_of(20, 0))
    assert [p.name for p in list_checkpoints(tmp_path / "checkpoints")] == ["step_000010"]
    assert begin_checkpoint(tmp_path / "checkpoints", 20) == partial and not list(partial.iterdir())


def test_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    first = save(tmp_path, 10)
    inode = (first / "manifest.json").stat().st_ino
    second = save(tmp_path, 10)
    assert second == first and (second / "manifest.json").stat().st_ino != inode
    assert Manifest.load(second).step == 10
    assert sorted(p.name for p in first.parent.iterdir()) == ["latest", "step_000010"]


def test_only_float32_and_no_lost_shard(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float32: a"):
        write_shard(tmp_path, "x.safetensors", {"a": torch.zeros(2).bfloat16()})
    partial = begin_checkpoint(tmp_path, 1)
    manifest = Manifest(1, 0, {}, "m", {}, (ShardInfo("experts-1.safetensors", 5, 0, 1),))
    with pytest.raises(UserError, match="all nodes share"):
        commit_checkpoint(partial, tmp_path / "step_000001", manifest)
    assert not (tmp_path / "step_000001").exists()


def test_unwritable_directory(tmp_path: Path) -> None:
    """Space is missing only where the disk is full, the driver's directory where none is shared."""
    with pytest.raises(UserError, match=r"cannot be written; .*absent; .*To fix: .*all nodes share"):
        write_shard(tmp_path / "absent", "x.safetensors", {"a": torch.zeros(2)})
    for code in (errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EISDIR):
        with pytest.raises(UserError, match="cannot be written") as raised, writing("x", tmp_path, 8):
            raise OSError(code, os.strerror(code))
        space = code in (errno.ENOSPC, errno.EDQUOT)
        assert (raised.value.required == "8 bytes of free space") == space
        assert ("move away what lies there" in raised.value.remedy) == (code == errno.EISDIR)
        assert ("ulimit -f" in raised.value.remedy) == (code == errno.EFBIG)
        assert ("run.root" in raised.value.remedy) == (
            code not in (errno.EFBIG, errno.EISDIR)
        )  # tools have none


def _flip(path: Path) -> None:
    file = path / "experts-0.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)


def _cut(path: Path) -> None:
    file = path / "worker-0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _edit(path: Path, **changes: Any) -> None:
    value = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**value, **changes}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "bit flipped": (_flip, "required checksum"),
    "truncated": (_cut, "bytes; required"),
    "shard absent": (lambda p: (p / "worker-0.safetensors").unlink(), "found no such file"),
    "manifest absent": (lambda p: (p / "manifest.json").unlink(), "found no manifest.json"),
    "manifest damaged": (lambda p: (p / "manifest.json").write_text("{"), "manifest cannot be read"),
    "manifest incomplete": (
        lambda p: (p / "manifest.json").write_text('{"version": 1}'),
        "manifest is damaged",
    ),
    "other version": (lambda p: _edit(p, version=99), "found version 99"),
    "unknown field": (lambda p: _edit(p, surprise=1), "manifest is damaged"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_names_the_previous_good_checkpoint(tmp_path: Path, case: str) -> None:
    damage, message = DAMAGE[case]
    good, bad, newest = (save(tmp_path, step) for step in (10, 20, 30))
    damage(newest)
    _flip(bad)
    with pytest.raises(UserError) as caught:
        Manifest.load(newest)
    assert message in str(caught.value)
    assert f"trainer.resume={good}" in caught.value.remedy


@pytest.mark.parametrize(("call", "error"), [("open", errno.EACCES), ("stat", errno.ESTALE)])
def test_what_cannot_be_read_names_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    good, newest = (save(tmp_path, step) for step in (10, 20))
    before = getattr(Path, call)

    def refused(path: Path, *given: Any, **options: Any) -> Any:
        if path == newest / "experts-0.safetensors":
            raise OSError(error, os.strerror(error))
        return before(path, *given, **options)

    monkeypatch.setattr(Path, call, refused)
    with pytest.raises(
        UserError, match=f"checkpoint cannot be read.*experts-0.*{os.strerror(error)}"
    ) as caught:
        Manifest.load(newest)
    assert f"trainer.resume={good}" in caught.value.remedy


def test_damage_without_an_earlier_checkpoint(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    _flip(path)
    with pytest.raises(UserError) as caught:
        Manifest.load(path)
    assert "choose another checkpoint" in caught.value.remedy
    assert Manifest.read(path).step == 10


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"lora.rank": 16}, "found lora.rank=16; required lora.rank=8"),
        ({"lora.experts": False}, "required lora.experts=True"),
        ({"seed": 4, "lora.target_modules": ["k_proj"]}, "found lora.target_modules=['k_proj'], seed=4"),
        ({"lora.new": 1}, "required lora.new=None"),
    ],
)
def test_other_settings_are_refused(tmp_path: Path, now: dict[str, Any], message: str) -> None:
    manifest = Manifest.load(save(tmp_path, 10))
    with pytest.raises(UserError) as caught:
        manifest.require(model=manifest.model, fields={**FIELDS, **now})
    assert message in str(caught.value) and caught.value.remedy


def test_another_model_is_refused(tmp_path: Path) -> None:
    manifest = Manifest.load(save(tmp_path, 10))
    with pytest.raises(UserError, match="belongs to another model"):
        manifest.require(model="other", fields=FIELDS)
    manifest.require(model=manifest.model + "what later versions add", fields=FIELDS)


def test_missing_and_double_parameters(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    with pytest.raises(UserError, match="missing: param/absent"):
        read_named_into(path, {"param/absent": torch.empty(1)})
    write_shard(path, "worker-1.safetensors", tensors_of(10, 0))
    with pytest.raises(UserError, match="holds a parameter twice"):
        read_named_into(path, {"param/absent": torch.empty(1)})


def test_values_that_are_not_finite_are_not_restored(tmp_path: Path) -> None:
    checkpoint = save(tmp_path, 1)
    name = "exp_avg/model.layers.1.x.lora_B.weight"
    (file,) = [f for f in checkpoint.glob("*.safetensors") if name in load_file(f)]
    tensors = load_file(file)
    tensors[name][-1, -1] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UserError, match="not finite") as caught:
        read_named_into(checkpoint, {n: torch.zeros_like(t) for n, t in tensors.items()})
    assert caught.value.where == str(file) and caught.value.observed == name


def test_manifest_is_plain_json(tmp_path: Path) -> None:
    path = save(tmp_path, 10)
    value = json.loads((path / "manifest.json").read_text())
    assert value["fields"] == FIELDS and {s["file"] for s in value["shards"]} == {
        "worker-0.safetensors",
        "experts-0.safetensors",
    }
    assert replace(Manifest.load(path), step=11).step == 11
