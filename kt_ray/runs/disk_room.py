"""Whether the disk has room for what a run will write: its checkpoints and its adapter. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from kt_ray.config.interval import SPANS, ends_until, seconds_of
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.disk import free_bytes, present
from kt_ray.errors import UserError
from kt_ray.placement.lora_sizes import trained_params
from kt_ray.placement.memory import checkpoint_bytes


@dataclass(frozen=True)
class DiskNeed:
    """Bytes that a run writes beside its logs."""

    checkpoint: int  # one of them
    checkpoints: int  # at once, while the newest is being written
    adapter: int

    @property
    def total(self) -> int:
        return self.checkpoint * self.checkpoints + self.adapter

    def __str__(self) -> str:
        many = self.checkpoints > 1
        checkpoints = f"{self.checkpoints} checkpoints at once" if many else "a checkpoint"
        each = " each" * many
        parts = [f"{checkpoints} of {gigabytes(self.checkpoint)}{each}"] if self.checkpoints else []
        parts += [f"the adapter {gigabytes(self.adapter)}"] if self.adapter else []
        return f"{gigabytes(self.total)}: {', '.join(parts)}"


def training_bytes(dims: ModelDims, config: Config) -> int:
    """What a training of a train server takes at most, beside what its client saves: its state and its latest
    sampler."""
    return checkpoint_bytes(dims, config) + 4 * trained_params(dims, config.lora)


def disk_need(
    dims: ModelDims, config: Config, steps: int | None, step_seconds: float, steps_per_epoch: int = 1
) -> DiskNeed:
    """What a run of `steps` steps (None = not known) of `step_seconds` each writes; at most that where the
    steps of an epoch are not known."""
    trainer = config.trainer
    kept = trainer.keep_checkpoints + trainer.save_best if trainer.keep_checkpoints else math.inf
    saves = math.inf
    if steps is not None:
        saves = _saves(trainer.save_every, steps, step_seconds, steps_per_epoch)
        every = trainer.eval_every
        if trainer.save_best:
            saves += SPANS if every == "auto" else ends_until(every, steps, steps_per_epoch)
    at_once = min(kept + 1, saves)
    wider = 2 if config.lora.init.startswith("pissa") else 1
    return DiskNeed(
        checkpoint=checkpoint_bytes(dims, config),
        checkpoints=int(at_once) if math.isfinite(at_once) else 1,
        adapter=4 * wider * trained_params(dims, config.lora),
    )


def _saves(every: int | str, steps: int, step_seconds: float, steps_per_epoch: int) -> int:
    """How often a run saves, the end included."""
    if isinstance(every, str) and (seconds := seconds_of(every)) is not None:
        return 1 + int(steps * step_seconds / seconds)
    return 1 + ends_until(every, steps - 1, steps_per_epoch)


def shortage(need: DiskNeed, place: Path, reused: int) -> UserError | None:
    """Why a run's checkpoints will not fit; None = they will.

    Args:
        place: the directory that the run writes; its checkpoints/ may be a link to another disk.
        reused: bytes of checkpoints there that go meanwhile.
    """
    checkpoints = place / "checkpoints"
    if present(checkpoints).stat().st_dev == present(place).stat().st_dev:
        return _shortage(need, place, free_bytes(place) + reused)
    return _shortage(replace(need, adapter=0), checkpoints, free_bytes(checkpoints) + reused) or _shortage(
        replace(need, checkpoints=0), place, free_bytes(place)
    )


def _shortage(need: DiskNeed, place: Path, free: float) -> UserError | None:
    if need.total <= free:
        return None
    fewer = need.checkpoint * 2 + need.adapter
    remedy = "free space, or set run.root to another disk"
    if need.checkpoints > 2 and fewer <= free:
        remedy = f"set trainer.keep_checkpoints=1 ({gigabytes(fewer)}), {remedy}"
    return UserError(
        "the disk has no room for this run's checkpoints",
        where=str(place),
        observed=f"{gigabytes(free)} free",
        required=str(need),
        remedy=remedy,
    )


def check_next(need: int, root: Path) -> None:
    """Refuse to begin a checkpoint of `need` bytes that will not fit; see `require_room`."""
    require_room("checkpoint cannot be written", need, root, "run.root to another disk")


def require_room(what: str, need: int, place: Path, other: str) -> None:
    """Refuse to write `need` bytes where there is less room.

    Args:
        what: the fault; other: what to set so that they go elsewhere.

    Raises:
        UserError: the disk has too little room.
    """
    free = free_bytes(place)
    if need > free:
        raise UserError(
            what,
            where=str(place),
            observed=f"{gigabytes(free)} free",
            required=f"{gigabytes(need)} of free space",
            remedy=f"free space, or set {other}",
        )


def gigabytes(size: float) -> str:
    """For people; small sizes in megabytes."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
