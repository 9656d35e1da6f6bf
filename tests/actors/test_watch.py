"""Who is frozen, who is stuck, and who only waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kt_ray.actors.watch import ActorDied, Standstill, Status, Watch
from kt_ray.pulse import beat, beats


class Script:
    """An actor whose status a test sets; None = it does not answer."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status: Status | ActorDied | None = Status(0, "", f"{name}: idle")

    def control(self, method: str, *args: Any) -> Any:
        assert method == "status"
        return lambda: self.status


def answer(future: Callable[[], Status | ActorDied | None]) -> Status | None:
    value = future()
    if isinstance(value, ActorDied):
        raise value
    return value


class Scene:
    def __init__(self, *names: str, patience: float = 600.0, frozen: float = 90.0) -> None:
        self.now = 0.0
        self.actors = {name: Script(name) for name in names}
        self.watch = Watch(list(self.actors.values()), answer, patience, frozen, lambda: self.now)

    def look(self, seconds: float, working: tuple[int, ...] = (0, 1)) -> list[tuple[int, str]]:
        """One look per second, until somebody is found."""
        end = self.now + seconds
        while self.now < end:
            self.now += 1
            assert self.watch.pause == 0
            if found := self.watch.look(working):
                return [(i, death.how) for i, death in found]
        return []

    def set(self, name: str, what: int, waiting: Any = "", line: str = "works") -> None:
        self.actors[name].status = Status(what, waiting, f"{name}: {line}")


def test_who_waits_for_one_that_works_is_not_stuck_however_long_it_takes() -> None:
    scene = Scene("a", "b")
    scene.set("a", 7, "peer")
    for part in range(20):
        scene.set("b", part)
        assert scene.look(500) == []


def test_one_that_answers_but_gets_nothing_done_is_stuck() -> None:
    scene = Scene("a", "b")
    scene.set("a", 7, "peer", "waits for b")
    scene.set("b", 3, line="layer 5")
    assert scene.look(590) == []
    assert scene.look(20) == [(1, "made no progress for 600 s")]
    assert scene.watch.report() == "a: waits for b | b: layer 5"


def test_one_that_is_done_may_rest() -> None:
    scene = Scene("a", "b")
    scene.set("b", 3)
    for part in range(5):
        scene.set("a", part)
        assert scene.look(500, working=(0,)) == []


def test_one_that_does_not_answer_is_frozen_and_a_short_sleep_is_none() -> None:
    scene = Scene("a", "b")
    scene.set("a", 1, "peer")
    scene.look(5)
    scene.actors["b"].status = None
    assert scene.look(80) == []
    scene.set("b", 0)
    assert scene.look(30) == []
    scene.actors["b"].status = None
    assert scene.look(100) == [(1, "did not answer for 90 s")]
    assert "b: works (no answer for 90 s)" in scene.watch.report()


def test_one_that_has_ended_its_call_is_missed_too() -> None:
    scene = Scene("a", "b")
    scene.set("a", 1, "peer")
    scene.actors["b"].status = ActorDied("killed")
    assert scene.look(5, working=(0,)) == [(1, "died")]


def test_a_driver_that_was_stopped_itself_blames_nobody() -> None:
    scene = Scene("a", "b")
    scene.set("a", 1, "peer")
    scene.actors["b"].status = None
    scene.look(10)
    scene.now += 10_000
    assert scene.watch.look((0, 1)) == []
    assert scene.look(70) == []
    assert scene.look(20)[0][0] == 1


def test_a_lost_message_is_nobodys_fault() -> None:
    scene = Scene("a", "b")
    scene.set("a", 1, "peer", "waits for b")
    scene.set("b", 2, "peer", "waits for a")
    assert scene.look(590) == []
    with pytest.raises(Standstill, match=r"a: waits for b \| b: waits for a"):
        scene.look(20)


def test_actors_that_wait_for_a_request_may_do_so_for_ever() -> None:
    scene = Scene("a", "b")
    scene.set("a", 1, "idle")
    scene.set("b", 2, "idle")
    assert scene.look(5_000) == []
    scene.set("a", 1, "peer")  # a request came, and an answer of b's did not
    with pytest.raises(Standstill):
        scene.look(1_000)


def test_a_beat_changes_the_count() -> None:
    before = beats()
    beat()
    assert beats() != before
