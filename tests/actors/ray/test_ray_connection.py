"""The start of a Ray of this run's own: what is tried again, what is said, and signals meanwhile."""

import contextlib
import errno
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray.actors.ray import ray_connection
from kt_ray.actors.ray.ray_connection import RayConnection
from kt_ray.config.schema import ClusterConfig
from kt_ray.errors import TryAgain, UserError
from kt_ray.runs.start_cluster import Ended, _interrupted

LATE = "The last 20 lines of dashboard.log:\nTraceback\nOSError: [Errno 98] address already in use\n"


def starts(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], **config: Any
) -> tuple[list[tuple[bool, int | None]], list[str], Any]:
    """A local start where the first attempts raise `errors`: (dashboard, port) of each attempt, what was
    cleaned up, and how to start."""
    connection = RayConnection(ClusterConfig(dashboard_port=9000, **config), "starts")
    asked: list[tuple[bool, int | None]] = []
    cleaned: list[str] = []
    monkeypatch.setattr(ray_connection.ray, "shutdown", lambda: cleaned.append("shutdown"))

    def init(**how: Any) -> str:
        asked.append((how["include_dashboard"], how["dashboard_port"]))
        if len(asked) <= len(errors):
            raise errors[len(asked) - 1]
        return "context"

    monkeypatch.setattr(connection, "_init", init)
    guard: Any = SimpleNamespace(own_ray=contextlib.nullcontext, sweep=lambda: cleaned.append("sweep"))
    return asked, cleaned, lambda: connection._attempts(guard)


def test_a_start_that_fails_is_tried_on_another_port_and_then_without_the_dashboard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between our look at the port and Ray's there is time for another program. Ray's errors are plain."""
    monkeypatch.setattr(ray_connection, "free_port", lambda host, first: first)
    asked, cleaned, start = starts(monkeypatch, [ValueError("9000 is already occupied"), Exception(LATE)])
    assert start() == "context"
    assert asked == [(True, 9000), (True, 9001), (False, None)]
    assert cleaned == ["shutdown", "sweep"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "Ray did not start, once more: 9000 is already occupied",
        "Ray did not start, once more without its dashboard: OSError: [Errno 98] address already in use",
    ]


def test_a_host_too_busy_for_ray_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = Exception("The current node timed out during startup.\n")
    asked, cleaned, start = starts(monkeypatch, [late] * 3, dashboard=False)
    with pytest.raises(TryAgain) as raised:
        start()
    line = "Ray cannot be started on this host; found The current node timed out during startup.; required"
    assert raised.value.line().startswith(line) and "cluster=local" in raised.value.remedy
    assert asked == [(False, None)] * 3 and cleaned == ["shutdown", "sweep"] * 3
    assert caplog.text.count("once more: The current node timed out") == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOENT])
def test_a_directory_that_ray_cannot_write_is_no_matter_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    place = tmp_path / "scratch"
    place.symlink_to(tmp_path if code == errno.ENOSPC else "/nowhere")
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    fault = OSError(code, why := os.strerror(code), f"{place}/ray")
    asked, cleaned, start = starts(monkeypatch, [fault], dashboard=False)
    with pytest.raises(
        UserError, match=rf"its directory; at .*/scratch; found .*{why}.*RAY_TMPDIR"
    ) as raised:
        start()
    assert not isinstance(raised.value, TryAgain)
    assert len(asked) == 1 and cleaned == ["shutdown", "sweep"]


def test_without_a_free_port_there_is_no_dashboard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_connection, "free_port", lambda host, first: None)
    asked, _, start = starts(monkeypatch, [])
    assert start() == "context" and asked == [(False, None)]
    assert "ports 9000 to 9049 are taken: no dashboard" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_ray_starts_ends_the_run_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ray's handler of SIGTERM, which it has while it starts, ends the process with code 15. A hang-up is
    hidden from what is started then, not from the driver."""
    connection, blocked = RayConnection(ClusterConfig(dashboard=False), "signals"), set()

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.raise_signal(number)

    monkeypatch.setattr(ray_connection.ray, "init", init)
    guard: Any = SimpleNamespace(own_ray=contextlib.nullcontext)
    hup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which these tests may run under, ignores it
    try:
        with _interrupted():
            before = signal.getsignal(signal.SIGTERM)
            with pytest.raises(Ended):
                connection._attempts(guard)
            assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, hup)
    assert signal.SIGHUP in blocked and signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
