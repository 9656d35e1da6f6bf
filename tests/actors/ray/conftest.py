"""One local Ray for the tests of a module, joined by this process before the first of them; an address."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from tests.helpers.ray_place import connected


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with connected():
        yield


@pytest.fixture
def listening() -> Iterator[str]:
    """An address that this process listens on."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"
