"""How the driver watches the deployment: by its reports, which wait behind nobody's request."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray.actors.ray import serve_app
from kt_ray.actors.ray.serve_app import PATIENCE, Report
from kt_ray.errors import UserError
from kt_ray.train.cluster_protocol import ActorLost

LOST = ActorLost("expert actor 1 died", observed="killed")


class Watched:
    """A deployment by its reports, one for each look of the driver; then the test is over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reports: list[Report | None]) -> None:
        self.reports = iter(reports)
        self.now = 0.0
        self.happened: list[Any] = []
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        monkeypatch.setattr(serve_app, "time", clock)
        monkeypatch.setattr(Report, "last", staticmethod(lambda namespace: next(self.reports, None)))
        monkeypatch.setattr(serve_app.AttachedCluster, "parts", staticmethod(lambda cluster: "parts"))
        self.handle = SimpleNamespace(renew=SimpleNamespace(remote=self._renew))

    def _sleep(self, seconds: float) -> None:
        self.now += seconds

    def _renew(self, parts: str) -> Any:
        self.happened.append(parts)
        return SimpleNamespace(result=lambda timeout_s: None)

    def watch(self) -> str:
        cluster: Any = SimpleNamespace(namespace="of a test")
        with pytest.raises(UserError) as error:
            serve_app._watch(self.handle, cluster, self.happened.append)
        return error.value.line()


def test_an_error_is_mended_and_the_session_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report | None] = [None, Report("a", 0, None), Report("a", 1, LOST), Report("a", 2, None)]
    watched = Watched(monkeypatch, reports)
    assert "no report" in watched.watch()
    assert watched.happened == [LOST, "parts"]


def test_silence_is_the_end_and_a_late_report_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [report for number in range(4) for report in [Report("a", number, None)] * int(PATIENCE - 5)]
    watched = Watched(monkeypatch, [*late, *[late[-1]] * 200])
    assert "is gone; found no report" in watched.watch()
    assert watched.now > 4 * (PATIENCE - 5) and watched.happened == []


def test_time_in_which_all_were_stopped_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Report | None] = [Report("a", 0, None), *[Report("a", 1, None)] * 3, Report("a", 2, LOST)]
    watched = Watched(monkeypatch, reports)
    stops = iter([0.0, 0.0, 3600.0])  # the driver looks before the deployment reports again

    def sleep(seconds: float) -> None:
        watched.now += seconds + next(stops, 0.0)

    monkeypatch.setattr(serve_app.time, "sleep", sleep)
    assert "no report" in watched.watch() and watched.happened == [LOST, "parts"]


def test_another_process_has_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, [Report("a", 0, None), Report("b", 0, None)])
    assert "it has been replaced" in watched.watch()


def test_a_deployment_that_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, [Report("a", 0, LOST)])

    def fails(parts: str) -> Any:
        raise RuntimeError("no memory")

    watched.handle.renew.remote = fails
    assert "found RuntimeError: no memory" in watched.watch() and watched.happened == [LOST]


def test_an_error_that_does_not_travel_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(Exception):  # a class that no other process finds
        pass

    stored: dict[str, bytes] = {}
    monkeypatch.setattr(serve_app, "_internal_kv_put", stored.__setitem__)
    monkeypatch.setattr(serve_app, "_internal_kv_get", stored.get)
    assert Report.last("x") is None
    Report("a", 3, LOST).publish("x")
    found = Report.last("x")
    assert found is not None and isinstance(found.error, ActorLost) and found.error.what == LOST.what
    Report("a", 4, Local("odd")).publish("x")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(Local("odd"))
    found = Report.last("x")
    assert found is not None and str(found.error) == "Local: odd" and found.number == 4
