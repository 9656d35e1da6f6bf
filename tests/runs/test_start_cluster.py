"""A cluster ends with its mode, whatever arrives meanwhile."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from kt_ray.runs import start_cluster
from tests.helpers.runs import config_for


def test_sigterm_while_the_actors_are_stopped_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its default action it would end the driver there and then, and leave the rest of the actors."""
    before, told = signal.getsignal(signal.SIGTERM), []

    def shutdown() -> None:
        told.append("stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    def unheard(*_: object) -> None:
        told.append("the handler of before")

    cluster = SimpleNamespace(connect=list, start=list, shutdown=shutdown)
    monkeypatch.setattr(start_cluster, "make_cluster", lambda *_: cluster)
    signal.signal(signal.SIGTERM, unheard)
    try:
        model = SimpleNamespace(config=config_for(tmp_path))
        with pytest.raises(KeyboardInterrupt), start_cluster.started(model, "name"):  # type: ignore[arg-type]
            pass
        assert told == ["stopping"] and signal.getsignal(signal.SIGTERM) is unheard
    finally:
        signal.signal(signal.SIGTERM, before)
