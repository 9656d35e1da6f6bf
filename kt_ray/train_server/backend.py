"""What the service needs of a cluster: LoRA trainings by name, samplers of their weights by name.

A *model* is one LoRA training: parameters, optimizer state, gradients that wait for a step. A *sampler* is a
copy of a model's parameters that no longer changes. One thread calls a backend.

Legend: n tokens of a datum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kt_ray.batch import LoraPart, TokenLoss
from kt_ray.errors import UserError
from kt_ray.generate.requests import Request


class NoRoomYet(UserError):
    """A model that waits on disk cannot come back before another can be written there; nothing has changed,
    and the same call may go on later."""


@dataclass(frozen=True)
class Datum:
    """One row of a pass."""

    tokens: np.ndarray  # int64 [n] input
    targets: np.ndarray  # int64 [n] what each position is to predict; any ids, not only the next input
    # float32 [n] each: "weights", "advantages", "logprobs" ..., as the loss wants them
    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Pass:
    """Forward and backward over all rows, for one model."""

    model: str
    data: Sequence[Datum]
    loss: TokenLoss


@dataclass(frozen=True)
class PassResult:
    """What a forward pass, or forward and backward, found."""

    logprobs: list[np.ndarray]  # per datum: float32 [n] log-probabilities of the targets
    loss: float  # sum over all positions
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class AdamParams:
    """Of one step, as torch.optim.AdamW has them."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float  # 0 = no clipping


@dataclass(frozen=True)
class Scores:
    """A prompt's tokens under a sampler's weights."""

    logprobs: np.ndarray  # float32 [n - 1]: of every token but the first
    top_ids: np.ndarray  # int64 [n - 1, k] most probable tokens there, falling
    top_logprobs: np.ndarray  # float32 [n - 1, k]


class SamplingSession(Protocol):
    """kt_ray.generate.generator.Generator."""

    def submit_all(
        self, requests: Sequence[Request], listeners: Sequence[Callable[[Any], None] | None] | None = None
    ) -> list[Any]: ...


class Backend(Protocol):
    """All names are the service's own; every call raises UserError for what a client can mend, ActorLost for
    a death; those for a model that there is raise NoRoomYet.

    Attributes:
        busy: models with work that waits; they stay in memory if they can. The service's to set.
    """

    busy: Callable[[], AbstractSet[str]]

    @property
    def base_model(self) -> str:
        """Its name to clients."""

    @property
    def tokenizer(self) -> str:
        """Where clients find it."""

    @property
    def rank(self) -> int:
        """The largest of a LoRA that is trained here."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a training's state depends on, by configuration key: JSON values."""

    @property
    def max_length(self) -> int:
        """Tokens of a datum at most; of prompt and answer together, too."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end an answer where a request names no stop."""

    @property
    def slots(self) -> int:
        """Models that there may be, in memory or on disk."""

    def create(self, model: str, seed: int, part: LoraPart) -> None:
        """A new training from initial LoRA, of which it changes a part."""

    def forget(self, model: str) -> None: ...

    def take_up(self, model: str) -> None:
        """Have a model in memory, where the next call for it finds it."""

    def run(self, model: str, data: Sequence[Datum], loss: TokenLoss, *, backward: bool) -> PassResult:
        """One pass over all rows; `backward` adds to the model's gradients."""

    def held(self, model: str) -> bool:
        """Whether it is in memory, so that its passes can be joined."""

    def join(self, passes: Sequence[Pass]) -> list[PassResult]:
        """Backward passes of models that are held, each as `run` makes it. An error changes nothing."""

    def discard(self, model: str) -> None:
        """Throw away the gradients that wait for a step."""

    def step(self, model: str, params: AdamParams) -> dict[str, float]:
        """Apply the model's gradients and zero them; returns metrics (`grad_norm` ...)."""

    def save_state(self, model: str, directory: Path) -> None:
        """Parameters and optimizer state into a new directory."""

    def load_state(self, model: str, directory: Path, *, optimizer: bool) -> None:
        """What `save_state` wrote; without `optimizer` moments and step count begin anew."""

    def save_adapter(self, model: str, directory: Path) -> None:
        """A PEFT adapter into a new directory."""

    def keep(self, model: str, sampler: str) -> None:
        """A sampler of the model's weights as they are now."""

    def load_sampler(self, sampler: str, find: Callable[[], Path]) -> None:
        """A sampler of what `save_adapter` wrote.

        Args:
            find: where; asked before each reading, and raises ApiError where it is gone.
        """

    def put_aside(self, sampler: str) -> Path:
        """Write a nameless sampler's weights into a directory of its own, for `load_sampler`; it stays until
        `drop`. Who no longer needs the directory removes it."""

    def drop(self, sampler: str) -> None: ...

    def score(self, sampler: str | bool, prompts: Sequence[np.ndarray], top: int) -> list[Scores]:
        """Log-probabilities of prompts; sampler False = the base model.

        Args:
            top: most probable tokens to name, 0 to 20.
        """

    def sampling(self) -> AbstractContextManager[SamplingSession]:
        """A session of generation: inside it nothing else may be called."""
