"""For tests of programs that take too long: their time is over when the test says so, not by a clock that a
busy machine outruns and an idle one waits for."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

from kt_ray.accept.items import GRACE
from tests.helpers.ray_place import until


@pytest.fixture
def over_when(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Takes what is true once a program's time is over."""

    def patch(over: Callable[[], object]) -> None:
        wait = subprocess.Popen.wait

        def waited(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
            if timeout is None or timeout <= GRACE:
                return wait(process, timeout)
            until(lambda: over() or process.poll() is not None, timeout, every=0.02)
            if process.poll() is None:
                raise subprocess.TimeoutExpired(process.args, timeout)
            return process.returncode

        monkeypatch.setattr(subprocess.Popen, "wait", waited)

    return patch
