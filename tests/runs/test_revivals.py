"""A server's actors are brought back: what is done for which error, and how often."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray.errors import UserError
from kt_ray.runs import generation as module
from kt_ray.runs.generation import Revivals
from kt_ray.train.cluster_protocol import ActorLost

LOST = ActorLost("expert actor 1 died", observed="killed")


class Cluster:
    """Notes what is asked of it; `errors` come from `recover`, one each time."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: list[Exception | None] = []

    def recover(self) -> None:
        self.calls.append("recover")
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    def restart(self) -> None:
        self.calls.append("restart")

    def at_start(self, work: Callable[[], Any]) -> Any:
        return work()

    def discard(self) -> None:
        self.calls.append("discard")

    def load_adapter(self, directory: str) -> int:
        self.calls.append(f"adapter {directory}")
        return 1

    def load_adapters(self, adapters: dict[str, str]) -> int:
        self.calls.append(f"adapters {','.join(adapters)}")
        return 1


def revivals(cluster: Cluster, limit: int = 2, adapter: str = "/a") -> Revivals:
    generation: Any = SimpleNamespace(
        config=SimpleNamespace(trainer=SimpleNamespace(recoveries=limit)),
        adapter=None,
        adapters={"neko": adapter, "other": "/b"},
    )
    return Revivals(generation, cluster)  # type: ignore[arg-type]


def test_a_death_is_recovered_and_adapters_follow(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster()
    revivals(cluster).bring_back(LOST)
    assert cluster.calls == ["recover", "restart", "adapters neko,other"]
    shown = capsys.readouterr().out
    assert "expert actor 1 died: starting it again (recovery 1 of 2 in an hour)" in shown
    assert "back after" in shown


def test_an_error_that_killed_nobody_leaves_the_actors_as_they_are() -> None:
    cluster = Cluster()
    revivals(cluster).bring_back(RuntimeError("a row had no cache"))
    assert cluster.calls == ["discard"]


def test_another_death_meanwhile_counts(capsys: pytest.CaptureFixture[str]) -> None:
    cluster = Cluster()
    cluster.errors = [ActorLost("attention worker 0 died"), None]
    revivals(cluster).bring_back(LOST)
    assert cluster.calls[:3] == ["recover", "recover", "restart"]
    assert "attention worker 0 died: starting it again (recovery 2 of 2" in capsys.readouterr().out


def test_too_many_within_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    brought = revivals(Cluster())
    brought.bring_back(LOST)
    now[0] += 1800
    brought.bring_back(LOST)
    with pytest.raises(UserError, match="expert actor 1 died, and all recoveries are used up") as error:
        brought.bring_back(LOST)
    assert "at most 2 an hour (trainer.recoveries)" in error.value.line() and error.value.__cause__ is LOST
    now[0] += 1801  # the first one was more than an hour ago
    brought.bring_back(LOST)
    with pytest.raises(UserError, match="used up"):
        brought.bring_back(LOST)


def test_none_allowed() -> None:
    cluster = Cluster()
    with pytest.raises(UserError, match="used up"):
        revivals(cluster, 0).bring_back(LOST)
    assert cluster.calls == []


def test_what_cannot_be_done_ends_it() -> None:
    cluster = Cluster()
    cluster.errors = [UserError("no node has room for expert actor 1")]
    with pytest.raises(UserError, match="no node has room"):
        revivals(cluster).bring_back(LOST)


@pytest.mark.parametrize("late", [False, True])
def test_no_name_stands_for_other_weights_after_a_death(tmp_path: Path, late: bool) -> None:
    """A run that went on has written its adapter anew: before the death, or while the actors read it."""

    def write(weights: bytes) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        (tmp_path / "adapter_model.safetensors").write_bytes(weights)

    write(b"one")
    cluster = Cluster()
    brought = revivals(cluster, adapter=str(tmp_path))
    brought.bring_back(LOST)
    if late:
        cluster.at_start = lambda work: [work(), write(b"other")][0]  # type: ignore[method-assign]
    else:
        write(b"other")
    with pytest.raises(UserError, match=r"has changed since the server began.*files that were written anew"):
        brought.bring_back(LOST)
    assert cluster.calls.count("adapters neko,other") == (2 if late else 1)
