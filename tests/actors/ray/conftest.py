"""One local Ray for the tests of a module, joined by this process before the first of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.ray_place import connected


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    with connected():
        yield
