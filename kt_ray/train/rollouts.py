"""Answers that the policy gave: what a round of trainer.stage=grpo learns from. numpy only."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kt_ray.data.row_types import Row
from kt_ray.errors import UserError

FILE = "rollouts.npz"  # in a checkpoint amid a round


@dataclass(frozen=True)
class Rollout:
    """One answer."""

    ids: np.ndarray  # int64 [n] its tokens
    logprobs: np.ndarray  # float32 [n] of each when it was drawn
    reward: float  # nan = none was given
    finished: bool  # False = it was cut off


class Rollouts(Protocol):
    """Where answers come from (kt_ray.runs.policy_rollouts)."""

    def sample(self, asked: Sequence[tuple[Row, int]], step: int) -> list[Rollout]:
        """An answer to each (prompt, seed), in order, drawn from the policy as it is now.

        Args:
            step: optimizer steps behind the policy.

        Raises:
            ActorLost: an actor died. UserError: a reward could not be computed.
        """
        ...

    def most_probable(self, prompts: Sequence[Row]) -> list[Rollout]:
        """The greedy answer to each prompt, without log-probabilities. Raises as `sample`."""
        ...


def save(rollouts: Sequence[Rollout], directory: Path) -> Path:
    """Write them all as one file of a checkpoint, flushed to the disk."""
    path = directory / FILE
    with path.open("wb") as file:
        np.savez(
            file,
            lengths=np.array([len(rollout.ids) for rollout in rollouts], dtype=np.int64),
            ids=np.concatenate([rollout.ids for rollout in rollouts]),
            logprobs=np.concatenate([rollout.logprobs for rollout in rollouts]),
            rewards=np.array([rollout.reward for rollout in rollouts], dtype=np.float64),
            finished=np.array([rollout.finished for rollout in rollouts]),
        )
        file.flush()
        os.fsync(file.fileno())
    return path


def load(directory: Path) -> list[Rollout]:
    """What `save` wrote, to the bit.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = directory / FILE
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("lengths", "ids", "logprobs", "rewards", "finished")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            "the answers of a checkpoint amid a round cannot be read",
            where=str(path),
            observed=f"{type(error).__name__}: {error}",
            remedy="resume an earlier checkpoint: trainer.resume=<directory>",
        ) from error
    ends = np.cumsum(arrays["lengths"])[:-1]
    return [
        Rollout(ids, logprobs, float(reward), bool(finished))
        for ids, logprobs, reward, finished in zip(
            np.split(arrays["ids"], ends),
            np.split(arrays["logprobs"], ends),
            arrays["rewards"],
            arrays["finished"],
            strict=True,
        )
    ]
