"""What several tests of the engine share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kt_ray.native import Engine
from tests.helpers.native import ISAS


@pytest.fixture(scope="module")
def engine_of() -> Iterator[dict[str, Engine]]:
    """Engines with two threads by instruction set."""
    engines = {isa: Engine(isa, threads=2) for isa in ISAS}
    yield engines
    for engine in engines.values():
        engine.close()
