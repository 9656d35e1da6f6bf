"""Training checkpoints: one shard per actor, keyed by parameter name, so another rule can resume them.

    checkpoints/step_000300/  worker-0.safetensors  experts-0.safetensors ...  expert_load.json  manifest.json
    checkpoints/latest -> step_000300
    checkpoints/best -> step_000200            with trainer.save_best

`kt_ray.checkpoint.housekeeping` has all that comes after a valid checkpoint: links, and what is removed.

Every actor writes its shard into a hidden directory; the driver writes the manifest last and renames
the directory. A directory without manifest.json is therefore never a checkpoint. Shard keys are
"param/<name>", "exp_avg/<name>" and "exp_avg_sq/<name>", all float32; which shard holds a name is
read from the shards' own headers, so no second index can disagree with them. expert_load.json: see
kt_ray/placement/expert_load.py.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch

from kt_ray.checkpoint.housekeeping import (
    LATEST,
    PARTIAL,
    flush_directory,
    point,
    remove,
    remove_leftovers,
    set_aside,
)
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.manifest import CHOOSE, Manifest, ShardInfo, unusable
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
from kt_ray.checkpoint_dirs import MANIFEST, step_name
from kt_ray.disk import write_atomic

_SHARE = "set run.root to a directory that all nodes share"


def begin_checkpoint(root: str | os.PathLike[str], step: int) -> Path:
    """An empty hidden directory beside the checkpoints, for the actors to write their shards into."""
    path = Path(root) / f".{step_name(step)}{PARTIAL}"
    with writing("checkpoint", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(Path(root))
        path.mkdir()
    return path


def write_shard(
    directory: str | os.PathLike[str], filename: str, tensors: Mapping[str, torch.Tensor]
) -> ShardInfo:
    """Write one actor's tensors to `directory/filename`, flushed to the disk.

    Raises:
        ValueError: a tensor that is not float32.
        UserError: the disk is full or not writable, or not the driver's.
    """
    other = sorted(name for name, tensor in tensors.items() if tensor.dtype != torch.float32)
    if other:
        raise ValueError(f"checkpoint tensors must be float32: {some(other)}")
    path = Path(directory) / filename
    if not path.parent.is_dir():
        what, found = (
            "checkpoint cannot be written",
            "no such directory on this node: the driver made it on its own",
        )
        raise damaged(what, path.parent, found, "one run directory for all nodes", _SHARE)
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
        shard.check_size(partial, "an actor's shard did not arrive in the run directory", _SHARE)
    write_atomic(partial / MANIFEST, manifest.to_json())
    flush_directory(partial)
    # The same step may be there, after a replay: equal by construction, the newer one stays.
    old = set_aside(final) if os.path.lexists(final) else None
    partial.rename(final)
    flush_directory(final.parent)
    if old is not None:
        remove(old)
    point(final.parent, LATEST, final.name)
    return final


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
                "set lora.rank, lora.rank_pattern and the model as in the run that wrote it",
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
        remedy = "set lora.target_modules, lora.experts and lora.layers as in the run that wrote it"
        observed = f"missing: {some(missing)}"
        raise damaged(
            "checkpoint lacks parameters of this run", path, observed, f"{len(names)} tensors", remedy
        )
    return {name: places[name] for name in names}
