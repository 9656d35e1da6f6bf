"""Training checkpoints: one shard per actor, keyed by parameter name, so another rule can resume them.

    checkpoints/step_000300/  worker-0.safetensors  experts-0.safetensors ...  expert_load.json  manifest.json
    checkpoints/latest -> step_000300
    checkpoints/best -> step_000200            with trainer.save_best

Every actor writes its shard into a hidden directory; the driver writes the manifest last and renames
the directory. A directory without manifest.json is therefore never a checkpoint. Shard keys are
"param/<name>", "exp_avg/<name>" and "exp_avg_sq/<name>", all float32; which shard holds a name is
read from the shards' own headers, so no second index can disagree with them. expert_load.json: see
kt_ray/placement/expert_load.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import torch

from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.manifest import BEST, CHOOSE, MANIFEST, Manifest, ShardInfo, list_checkpoints, unusable
from kt_ray.checkpoint.safetensors_file import (
    TORCH_DTYPES,
    TensorInfo,
    build_header,
    damaged,
    read_header,
    read_into,
    read_tensor,
    tensor_bytes,
    write_safetensors,
    writing,
)
from kt_ray.disk import write_atomic

LATEST = "latest"


def step_name(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"step_{step:06d}"


def begin_checkpoint(root: str | os.PathLike[str], step: int) -> Path:
    """An empty hidden directory beside the checkpoints, for the actors to write their shards into."""
    path = Path(root) / f".{step_name(step)}.partial"
    with writing("checkpoint", path):
        if path.exists():
            shutil.rmtree(path)
        path.mkdir(parents=True)
    return path


def write_shard(
    directory: str | os.PathLike[str], filename: str, tensors: Mapping[str, torch.Tensor]
) -> ShardInfo:
    """Write one actor's tensors to `directory/filename`, flushed to the disk.

    Raises:
        ValueError: a tensor that is not float32.
        UserError: the disk is full or not writable.
    """
    other = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if other:
        raise ValueError(f"checkpoint tensors must be float32: {some(other)}")
    path = Path(directory) / filename
    entries = [(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    with writing("checkpoint", path, build_header(entries)[2]):
        size, crc = write_safetensors(path, entries, tensors.values())
    return ShardInfo(filename, size, crc, len(tensors))


def commit_checkpoint(partial: Path, final: Path, manifest: Manifest) -> Path:
    """Write the manifest, rename `partial` to `final` and point `latest` at it.

    Raises:
        UserError: a shard is absent or short (an actor on another node wrote elsewhere).
        OSError: the disk is full or not writable.
    """
    for shard in manifest.shards:
        remedy = "set run.root to a directory that all nodes share"
        shard.check_size(partial, "an actor's shard did not arrive in the run directory", remedy)
    write_atomic(partial / MANIFEST, json.dumps(asdict(manifest), indent=1) + "\n")
    _fsync_dir(partial)
    if final.exists():  # the same step again, after a replay: equal by construction, the newer one stays
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)
    _link(final.parent, LATEST, final.name)
    _fsync_dir(final.parent)
    return final


def prune_checkpoints(root: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints (0 keeps all), the best one, and what interrupted
    writes left.

    Returns:
        The checkpoints that were removed.
    """
    for pattern in (".step_*.partial", ".step_*.old"):
        for path in Path(root).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
    complete, best = list_checkpoints(root), best_checkpoint(root)
    removed = [path for path in complete[:-keep] if path != best] if keep > 0 else []
    for path in removed:
        (path / MANIFEST).unlink()  # first: what is half removed is no checkpoint any more
        shutil.rmtree(path)
    return removed


def mark_best(root: str | os.PathLike[str], step: int) -> None:
    """Point `best` at a step's checkpoint, which then outlives newer ones.

    Raises:
        UserError: the disk is full or not writable.
    """
    with writing("checkpoint", Path(root) / BEST):
        _link(Path(root), BEST, step_name(step))


def best_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint that `mark_best` named last, if there is one."""
    link = Path(root) / BEST
    if not (link / MANIFEST).is_file():
        return None
    return Path(root) / link.resolve().name


def _link(root: Path, name: str, target: str) -> None:
    beside = root / f".{name}.partial"
    beside.unlink(missing_ok=True)
    beside.symlink_to(target)
    os.replace(beside, root / name)


def set_aside_later(root: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename checkpoints beyond `step` to superseded_step_...: a run that went back to `step` left them.

    Otherwise the abandoned ones would count as the newest: kept when pruning, and taken by resume=latest.

    Returns:
        Their new paths.
    """
    renamed: list[Path] = []
    for path in list_checkpoints(root):
        if int(path.name.removeprefix("step_")) > step:
            target = path.with_name(f"superseded_{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            renamed.append(path.rename(target))
    if renamed:
        _link(Path(root), LATEST, step_name(step))
    return renamed


def read_named_into(checkpoint: str | os.PathLike[str], targets: Mapping[str, torch.Tensor]) -> None:
    """Read tensors by key ("param/<name>", ...), from whichever shards hold them, into live tensors.

    Contiguous float32 on the CPU needs no copy. Each shard is opened once: there may be 100,000 tensors in
    it, and a network file system asks its server at each opening.

    Raises:
        UserError: the checkpoint does not hold some of them, holds one twice, in another shape, or with
            values that are not finite.
    """
    places = _locate(Path(checkpoint), list(targets))
    for name, info in places.items():
        if tuple(info.shape) != tuple(targets[name].shape):
            raise damaged(
                "checkpoint holds a parameter of another shape",
                info.file,
                f"{name} {tuple(info.shape)}",
                tuple(targets[name].shape),
                "set lora.rank and the model as in the run that wrote it",
            )
    for file, entries in groupby(
        sorted(places.items(), key=lambda item: (item[1].file, item[1].start)), lambda item: item[1].file
    ):
        with file.open("rb", buffering=0) as shard, torch.no_grad():
            for name, info in entries:
                target = targets[name]
                stored = TORCH_DTYPES[info.dtype]
                if target.device.type == "cpu" and target.is_contiguous() and target.dtype == stored:
                    read_into(shard.fileno(), tensor_bytes(target), info)
                else:
                    target.copy_(read_tensor(info))
                if not bool(torch.isfinite(target).all()):
                    what = "checkpoint holds values that are not finite"
                    raise damaged(what, info.file, name, "finite values", CHOOSE)


def _locate(path: Path, names: list[str]) -> dict[str, TensorInfo]:
    places: dict[str, TensorInfo] = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, info in read_header(file, remedy=CHOOSE).items():
            if name in places:
                where = f"{file} and {places[name].file.name}"
                raise unusable("checkpoint holds a parameter twice", where, name)
            places[name] = info
    missing = sorted(name for name in names if name not in places)
    if missing:
        remedy = "set lora.target_modules and lora.experts as in the run that wrote it"
        observed = f"missing: {some(missing)}"
        raise damaged(
            "checkpoint lacks parameters of this run", path, observed, f"{len(names)} tensors", remedy
        )
    return {name: places[name] for name in names}


def _fsync_dir(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
