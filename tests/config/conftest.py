"""A place for commands that must leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory that stays empty, and no variable of the caller's."""
    monkeypatch.chdir(tmp_path)
    for name in ("KT_RAY_TEST_DATA", "KT_RAY_DEBUG", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    yield
    assert list(tmp_path.iterdir()) == [], "composing must not write into the working directory"
    assert "HYDRA_FULL_ERROR" not in os.environ
