"""A train server that answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.train_server import Raw, Running, running


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "saved") as made:
        yield made


@pytest.fixture
def raw(server: Running) -> Iterator[Raw]:
    made = Raw(server)
    yield made
    made.http.close()
