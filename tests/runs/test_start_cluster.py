"""A cluster ends with its mode, whatever arrives meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from kt_ray.runs import start_cluster
from tests.helpers.runs import config_for


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_actors_are_stopped_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """By its default action it would end the driver there and then, and leave the rest of the actors. A job
    manager that signals a group, and a parent that passes it on, make two of one; so does a second Ctrl-C in
    haste, when the first has ended the block."""
    before, told = signal.getsignal(number), []

    def shutdown() -> None:
        os.kill(os.getpid(), number)
        told.append("stopping")
        monkeypatch.setattr(start_cluster, "SAME", 0.0)  # a second has passed
        try:
            os.kill(os.getpid(), number)
        finally:
            monkeypatch.setattr(start_cluster, "SAME", 1.0)
            os.kill(os.getpid(), number)
            told.append("stopped")

    def unheard(*_: object) -> None:
        told.append("the handler of before")

    cluster = SimpleNamespace(connect=list, start=list, shutdown=shutdown)
    monkeypatch.setattr(start_cluster, "make_cluster", lambda *_: cluster)
    signal.signal(number, unheard)
    try:
        model = SimpleNamespace(config=config_for(tmp_path))
        with pytest.raises(KeyboardInterrupt), start_cluster.started(model, "name"):  # type: ignore[arg-type]
            pass
        assert told == ["stopping", "stopped"] and signal.getsignal(number) is unheard
    finally:
        signal.signal(number, before)


def test_what_actors_note_is_told_by_every_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = [{"actor": "worker-0", "notes": []}, {"actor": "experts-0", "notes": ["weights are slow"]}, {}]
    cluster = SimpleNamespace(connect=list, start=lambda: facts, shutdown=lambda: None)
    monkeypatch.setattr(start_cluster, "make_cluster", lambda *_: cluster)
    with start_cluster.started(SimpleNamespace(config=config_for(tmp_path)), "name"):  # type: ignore[arg-type]
        assert "weights are slow\n" in capsys.readouterr().out


def test_a_hang_up_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with start_cluster._interrupted():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
