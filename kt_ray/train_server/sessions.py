"""What a train server knows of its clients and of their trainings."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from kt_ray.train_server.saved_models import Run


@dataclass
class Session:
    """One client process."""

    name: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    heard: float = field(default_factory=time.monotonic)
    models: list[str] = field(default_factory=list)
    samplers: list[str] = field(default_factory=list)


@dataclass
class Model:
    """One LoRA training."""

    run: Run
    session: Session
    heard: datetime = field(default_factory=lambda: datetime.now(UTC))
    made: bool = False  # whether the backend has it
    failed: int | None = None  # number of a backward pass that failed since the last optimizer step

    @property
    def name(self) -> str:
        return self.run.run
