"""What is done around valid checkpoints: old ones go, names point at the newest and the best.

The checkpoint is safe before any of this begins, so no fault in here ends a run: it is a warning. What is
removed is renamed first (".step_000100.old"): half removed it is no checkpoint any more, and the next
checkpoint takes what an interrupted one left (`remove_leftovers`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path

from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.checkpoint_dirs import MANIFEST, SUPERSEDED, list_checkpoints, step_name, step_of
from kt_ray.disk import only_warned, write_atomic
from kt_ray.errors import UserError

logger = logging.getLogger(__name__)

LATEST, BEST = "latest", "best"  # links beside the checkpoints
PARTIAL, OLD = ".partial", ".old"  # endings of what is being written, and of what is being removed


def prune_checkpoints(root: str | os.PathLike[str], keep: int) -> list[Path]:
    """Remove all but the `keep` newest checkpoints (0 keeps all) and the best one.

    Returns:
        The checkpoints that were removed.
    """
    root = Path(root)
    complete, best = list_checkpoints(root), best_checkpoint(root)
    removed = []
    for path in complete[:-keep] if keep > 0 else []:
        if path != best:
            with only_warned(f"an old checkpoint stays: {path}"):
                remove(set_aside(path))
                removed.append(path)
    return removed


def remove_leftovers(root: Path) -> None:
    """Remove what processes that died were writing or removing: it only takes room."""
    for left in root.glob(f".step_*{PARTIAL}"):
        try:
            set_aside(left)
        except OSError:  # of a container's image: what lies in it can be removed, and not be renamed
            remove(left)
    for left in root.glob(f".step_*{OLD}"):
        remove(left)


def set_aside(path: Path) -> Path:
    """Rename what is to be removed to a hidden name that no other reader looks at; returns the new path."""
    old = path.with_name(f".{path.name.lstrip('.')}{OLD}")
    remove(old)
    return path.rename(old)


def remove(path: Path) -> None:
    """Remove a directory, or the link to one: what a link points at belongs to somebody else."""
    with only_warned(f"this stays, and takes room: {path}"):
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)


def mark_best(root: str | os.PathLike[str], step: int, loss: float, rows: str) -> None:
    """Point `best` at a step's checkpoint, which then outlives newer ones; its manifest holds the loss and
    the digest of the held-out rows.

    Raises:
        UserError: the disk is full or not writable; `best` names another one.
    """
    path = Path(root) / step_name(step)
    with writing("checkpoint", path):
        manifest = Manifest.read(path)
        manifest = replace(manifest, state={**manifest.state, "eval_loss": loss, "eval_digest": rows})
        write_atomic(path / MANIFEST, manifest.to_json())
    point(Path(root), BEST, path.name)
    if best_step(root) != step:
        raise UserError(
            "the best checkpoint cannot be named",
            where=str(Path(root) / BEST),
            observed=_target(Path(root), BEST) or "something else of that name",
            required=path.name,
            remedy="rename or remove it, and let this process write there",
        )


def best_step(root: str | os.PathLike[str]) -> int | None:
    """The step that `mark_best` named last, whether its checkpoint is still there or not."""
    if _is_copy(best := Path(root) / BEST):
        with contextlib.suppress(UserError):  # of any other directory
            return Manifest.read(best).step
    return step_of(_target(Path(root), BEST))


def best_checkpoint(root: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint that `mark_best` named last, if there is one."""
    step = best_step(root)
    path = Path(root) / step_name(step or 0)
    return path if step is not None and (path / MANIFEST).is_file() else None


def point(root: Path, name: str, target: str) -> None:
    """Let `name` point at a checkpoint beside it: a link, or a file with its name where links cannot be."""
    beside = root / f".{name}{PARTIAL}"
    with only_warned(f"{root / name} does not name {target}"):
        _rename_copy(root / name)
        beside.unlink(missing_ok=True)
        try:
            beside.symlink_to(target)
        except OSError:  # exFAT, some network file systems
            beside.write_text(f"{target}\n", encoding="utf-8")
        os.replace(beside, root / name)


def set_aside_later(root: str | os.PathLike[str], step: int) -> list[Path]:
    """Rename checkpoints beyond `step` to superseded_step_...: a run that went back to `step` left them.
    Those of an earlier time stay as well. `latest` names the step's.

    Otherwise the abandoned ones would count as the newest: kept when pruning, and taken by resume=latest.

    Returns:
        Their new paths.

    Raises:
        OSError: the directory is not writable.
    """
    renamed: list[Path] = []
    for path in list_checkpoints(root):
        if (step_of(path.name) or 0) > step:
            target = _free(path.with_name(f"{SUPERSEDED}{path.name}"))
            renamed.append(path.rename(target))
    # A process that died between a checkpoint and its link leaves an older one named.
    own = Path(root) / step_name(step)
    if renamed or (own.is_dir() and _target(Path(root), LATEST) != own.name):
        point(Path(root), LATEST, own.name)
    if (best_step(root) or 0) > step:
        forget_best(root)
    return renamed


def forget_best(root: str | os.PathLike[str]) -> None:
    """No checkpoint is the best any more."""
    with only_warned(f"{Path(root) / BEST} names a checkpoint that is not the best"):
        _rename_copy(Path(root) / BEST)
        (Path(root) / BEST).unlink(missing_ok=True)


def flush_directory(path: Path) -> None:
    """Names in a directory to the disk, where the file system can: some network ones refuse."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _is_copy(path: Path) -> bool:
    """Whether a link's name holds a directory: the run was copied with its links followed."""
    return path.is_dir() and not path.is_symlink()


def _rename_copy(path: Path) -> None:
    """It may be the only copy of its checkpoint, as an earlier one of that name may be."""
    if _is_copy(path):
        target = _free(path.with_name(f"copied_{path.name}"))
        logger.warning("%s is no link: renamed to %s", path, target.name)
        path.rename(target)


def _free(path: Path) -> Path:
    """The path, or the first of NAME_2, NAME_3, ... where there is nothing."""
    paths = itertools.chain([path], (path.with_name(f"{path.name}_{n}") for n in itertools.count(2)))
    return next(path for path in paths if not os.path.lexists(path))


def _target(root: Path, name: str) -> str:
    """What `name` points at; "" = nothing, or something else of that name."""
    path = root / name
    try:
        return os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
