"""Which saved checkpoints a server can load: those of its own model, settings and ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from kt_ray.serve.api_errors import ApiError
from kt_ray.train_server.backend import Backend
from kt_ray.train_server.saved_models import SAMPLER, TRAINING, Saved, SavedModels
from kt_ray.train_server.wire import bad


class FittingCheckpoints:
    """Each call raises ApiError where there is none, or one that does not fit."""

    def __init__(self, backend: Backend, saved: SavedModels) -> None:
        self._backend = backend
        self._saved = saved

    def _find(self, path: str) -> Saved:
        """Of this server's base model, of a rank that it can hold."""
        saved = self._saved.find(path)
        base, rank = self._backend.base_model, self._backend.rank
        if saved.base_model != base or saved.rank > rank:
            raise bad(
                f"{saved.path} is of {saved.base_model} with LoRA of rank {saved.rank}; this server has "
                f"{base} with ranks up to {rank}",
                "path",
            )
        weights = str(self._backend.settings.get("model"))
        if weights.startswith(str(saved.settings.get("model"))):  # an earlier version's: the first half
            saved = replace(saved, settings={**saved.settings, "model": self._backend.settings.get("model")})
        return saved

    def training(self, path: str) -> Saved:
        """What a training may go on from."""
        saved = self._find(path)
        if saved.kind != TRAINING:
            raise bad(f"{saved.path} is for sampling; train on what save_state wrote", "path")
        ours, theirs = self._backend.settings, saved.settings
        differing = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
        if differing:
            was = ", ".join(f"{key}={theirs.get(key)} (this server: {ours.get(key)})" for key in differing)
            raise bad(f"{saved.path} was trained with {was}. To fix: start the server with the same", "path")
        return saved

    def sampler(self, path: str) -> Saved:
        """What a sampler may have."""
        saved = self._find(path)
        if saved.kind != SAMPLER:
            raise bad(
                f"{saved.path} is a training's state; sample from what save_weights_for_sampler wrote",
                "model_path",
            )
        if saved.settings.get("model") != self._backend.settings.get("model"):
            raise bad(
                f"{saved.path} was trained over other weights of the name {saved.base_model}. To fix: "
                "start the server with those",
                "model_path",
            )
        return saved

    def weights(self, saved: Saved) -> Path:
        """Where they lie, as long as they are the same."""
        with contextlib.suppress(ApiError):
            if self._saved.find(saved.path).created == saved.created:
                return self._saved.data(saved)
        raise bad(f"{saved.path} was deleted or written again; make another sampler", "model_path")
