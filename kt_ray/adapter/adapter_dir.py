"""Write an adapter directory that PEFT loads.

    adapter/  adapter_model.safetensors  adapter_config.json  README.md

The file is laid out before anything is written, from names and shapes alone; every actor then writes
its own tensors into their byte ranges, and the driver checks that none is missing and renames the
file. DeepSeek-V3 at rank 8 has 89,088 expert matrices, 13 GB: they never meet in one process.
"""

from __future__ import annotations

import contextlib
import errno
import filecmp
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kt_ray.adapter.adapter_file import is_turned
from kt_ray.adapter.fused import write_fused
from kt_ray.adapter.peft_config import (
    CONFIG,
    PREFIX,
    WEIGHTS,
    AdapterInfo,
    adapter_config,
    adapter_form,
    adapter_readme,
    stored_name,
)
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.names import is_interleaved
from kt_ray.checkpoint.safetensors_file import (
    build_header,
    damaged,
    read_header,
    tensor_bytes,
    write_from,
    writing,
)
from kt_ray.disk import write_atomic

_PARTIAL = f".{WEIGHTS}.partial"
_WRITTEN = ".written-"


@dataclass(frozen=True)
class AdapterLayout:
    """Where every tensor of an adapter file goes. Names are without "base_model.model."."""

    header: bytes  # the file's first
    ranges: dict[str, tuple[int, int]]  # name -> bytes [start, end) of the file
    shapes: dict[str, tuple[int, ...]]
    size: int  # bytes of the file


def adapter_layout(shapes: Mapping[str, Iterable[int]], model_type: str = "") -> AdapterLayout:
    """Lay the file out: parameter name ("model.layers.3.self_attn.q_proj.lora_A.weight") -> shape.

    Args:
        model_type: see AdapterInfo.
    """
    # Layer by layer and expert by expert in natural order, so that one actor's ranges lie together.
    sizes = {name: tuple(shapes[name]) for name in sorted(shapes, key=_natural)}
    keys = {name: PREFIX + stored_name(name, model_type) for name in sizes}
    header, ranges, size = build_header((keys[name], "F32", shape) for name, shape in sizes.items())
    return AdapterLayout(header, {name: ranges[key] for name, key in keys.items()}, sizes, size)


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def create_adapter(directory: str | os.PathLike[str], layout: AdapterLayout) -> None:
    """Reserve the file and write its header. The driver calls this before the actors write."""
    path = Path(directory)
    with writing("adapter", path, layout.size):
        path.mkdir(parents=True, exist_ok=True)
        for stale in path.glob(f"{_WRITTEN}*"):
            stale.unlink()
        with (path / _PARTIAL).open("wb") as file:
            _reserve(file.fileno(), layout.size)
            file.write(layout.header)


def discard_adapter(directory: str | os.PathLike[str]) -> None:
    """Remove what was written of an adapter that cannot be finished: a full disk needs the space."""
    for pattern in (f"{_PARTIAL}*", f"{_WRITTEN}*"):
        for file in Path(directory).glob(pattern):
            with contextlib.suppress(OSError):
                file.unlink()


def _reserve(fd: int, size: int) -> None:
    """Claim the blocks now, so that a full disk shows before training time is spent on writing."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(fd, size)


def write_tensors(
    directory: str | os.PathLike[str], layout: AdapterLayout, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write some tensors into their places. Safe from several processes at once.

    Raises:
        ValueError: a name or shape that the layout does not have.
        UserError: the run directory is not the one the driver made (nodes without a shared disk); values that
            are not finite.
    """
    for name, tensor in tensors.items():
        if layout.shapes.get(name) != tuple(tensor.shape):
            raise ValueError(f"{name}: shape {tuple(tensor.shape)}, laid out as {layout.shapes.get(name)}")
    path = Path(directory)
    try:
        fd = os.open(path / _PARTIAL, os.O_WRONLY)
    except FileNotFoundError as error:
        raise damaged(
            "adapter file is not where the driver made it",
            path / _PARTIAL,
            "no such file on this node",
            "one run directory for all nodes",
            "set run.root to a directory that all nodes share",
        ) from error
    try:
        for name, tensor in tensors.items():
            value = tensor.detach().to(device="cpu", dtype=torch.float32).contiguous()
            if not bool(torch.isfinite(value).all()):
                what = "adapter to be written holds values that are not finite"
                remedy = "resume from an earlier checkpoint: trainer.resume=PATH"
                raise damaged(what, directory, name, "finite values", remedy)
            write_from(fd, tensor_bytes(value), layout.ranges[name][0])
        os.fsync(fd)
    finally:
        os.close(fd)
    write_atomic(path / f"{_WRITTEN}{uuid.uuid4().hex}", "\n".join(tensors))


def finish_adapter(
    directory: str | os.PathLike[str],
    layout: AdapterLayout,
    info: AdapterInfo,
    *,
    modules: Iterable[str] | None = None,
) -> Path:
    """Check that every tensor was written, then publish weights, configuration and README.

    A file that already holds the same weights stays, and with it the answers that are known to be its own.

    Raises:
        ValueError: tensors that no actor wrote, or two actors wrote.
    """
    path = Path(directory)
    records = sorted(path.glob(f"{_WRITTEN}*"))
    written = [name for record in records for name in record.read_text(encoding="utf-8").split("\n") if name]
    lost = sorted(set(layout.shapes) - set(written))
    if lost:
        raise ValueError(f"adapter tensors that no actor wrote: {some(lost)}")
    if len(written) != len(set(written)):
        twice = sorted(name for name, count in Counter(written).items() if count > 1)
        raise ValueError(f"adapter tensors that two actors wrote: {some(twice)}")
    if adapter_form(layout.shapes, info) == "fused":
        source = {n.removeprefix(PREFIX): t for n, t in read_header(path / _PARTIAL).items()}
        write_fused(
            source,
            path / f"{_PARTIAL}.fused",
            PREFIX,
            interleaved=is_interleaved(info.model_type),
            turned=is_turned(info.model_type),
            zero_experts=info.zero_experts,
        )
        os.replace(path / f"{_PARTIAL}.fused", path / _PARTIAL)
    config = adapter_config(layout.shapes, info, modules)
    write_atomic(path / CONFIG, json.dumps(config, indent=2) + "\n")
    write_atomic(path / "README.md", adapter_readme(layout.shapes, info))
    if (path / WEIGHTS).is_file() and filecmp.cmp(path / _PARTIAL, path / WEIGHTS, shallow=False):
        (path / _PARTIAL).unlink()
    else:
        os.replace(path / _PARTIAL, path / WEIGHTS)
    for record in records:
        record.unlink()
    return path
