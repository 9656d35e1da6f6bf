"""Checkpoints shared by this folder's tests (tiny, random, built once)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.hf_reference import build_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(family, **build_checkpoint's arguments) -> directory, cached by arguments."""
    made: dict[str, Path] = {}

    def get(family: str, **kwargs: Any) -> Path:
        key = repr((family, sorted(kwargs.items(), key=str)))
        if key not in made:
            made[key] = build_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, **kwargs)
        return made[key]

    return get


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
