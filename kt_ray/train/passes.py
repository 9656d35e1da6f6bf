"""Passes of the training loop: numbered, with the run's settings, over the present parameters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kt_ray.batch import PassSpec, TokenLoss, Wave, trained_tokens
from kt_ray.config.schema import Config
from kt_ray.model.routing import balance
from kt_ray.train.cluster_protocol import Cluster
from kt_ray.train.reports import PassReport


class Passes:
    """Args: directory: of the run, if it has one; its `profile` gets the traces of trainer.profile_steps."""

    def __init__(self, config: Config, cluster: Cluster, directory: Path | None) -> None:
        self._config = config
        self._cluster = cluster
        self._profile = None if directory is None else directory / "profile"
        self.number = 0  # of the last one

    def run(
        self, step: int, kind: str, wave: Wave, loss_tokens: int, timeline: bool = False, **more: Any
    ) -> tuple[PassSpec, PassReport]:
        self.number += 1
        traced = kind == "train" and step + 1 in self._config.trainer.profile_steps
        spec = PassSpec(
            number=self.number,
            step=step,
            kind=kind,
            seed=self._config.seed,
            wave=wave,
            loss_tokens=loss_tokens,
            noise_alpha=self._config.trainer.neftune_noise_alpha,
            samples_per_row=self._config.samples_per_row,
            timeline=timeline,
            profile=str(self._profile) if self._profile is not None and traced else None,
            **more,
        )
        return spec, self._cluster.run_pass(spec)

    def router_balance(self, step: int, waves: Sequence[Wave]) -> tuple[float, tuple[float, ...]]:
        """The routers' load-balancing loss over the whole step, and its slopes for the training passes."""
        total = np.zeros((2, self._cluster.plan.dims.num_experts))
        for wave in waves:
            _, report = self.run(step, "eval", wave, trained_tokens(wave), routing=True)
            for worker in report.workers:
                if worker.routing is not None:
                    total += worker.routing
        return balance(
            total[0], total[1], self._cluster.plan.dims.experts_per_token, self._config.trainer.aux_loss
        )

    def log_probabilities(self, step: int, wave: Wave, adapters: bool | str) -> PassReport:
        """A forward pass, of the policy or of the reference."""
        tokens = trained_tokens(wave)
        return self.run(step, "eval", wave, tokens, adapters=adapters, return_logps=True)[1]

    def token_log_probabilities(self, step: int, wave: Wave, adapters: bool | str) -> PassReport:
        """The same of every label."""
        loss = TokenLoss("cross_entropy")
        return self.run(step, "eval", wave, 1, adapters=adapters, objective=loss)[1]
