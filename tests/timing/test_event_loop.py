"""The order of what happens at once, and what a loop says that cannot go on."""

from __future__ import annotations

import pytest

from kt_ray.native._native import Resource
from kt_ray.timing.event_loop import Actor, Busy, Carriage, Leg, Program, Seat, Send, Wait, play


def test_messages_that_arrive_at_once_do_so_in_the_order_in_which_they_began_to_wait() -> None:
    """One by a link, whose end is due, one that has only latency: at the same second."""

    def sender() -> Program:
        yield Send(("by link",), Carriage((Leg("link", 1.0),)))
        yield Send(("late",), Carriage((), 1.0))
        yield Busy("work", "work", 0.5)

    def waiter(tag: str) -> Program:
        yield Wait((tag,), "other")
        yield Busy(tag, "work", 1.0)

    actors = [Actor("sender", Seat("core"), sender())]
    actors += [Actor(tag, Seat(f"core of {tag}"), waiter(tag)) for tag in ("by link", "late")]
    played = play(actors, {}, ending="end", events=True)
    assert list(played.used) == ["link", "core", "core of late", "core of by link"]
    assert [(e.actor, e.name, e.kind, e.start, e.end) for e in played.events if e.kind == "transfer"] == [
        ("link", "by link", "transfer", 0.0, 1.0)
    ]


def test_tasks_that_end_at_once_do_so_in_the_order_in_which_they_began() -> None:
    def program(name: str, seconds: float) -> Program:
        yield Busy(f"{name} waits", "work", seconds)
        yield Busy(name, "work", 2.0 - seconds)

    begun = {"late": 1.0, "later": 1.5, "early": 0.5}
    actors = [Actor(name, Seat("cores"), program(name, seconds)) for name, seconds in begun.items()]
    played = play(actors, {"cores": 3.0}, ending="end", events=True)
    assert [event.name for event in played.events if event.name in begun] == ["early", "late", "later"]
    assert {event.end for event in played.events if event.name in begun} == {2.0}


def test_programs_that_wait_for_each_other_are_named() -> None:
    actors = [Actor("one", Seat("core"), iter([Wait(("never", 3), "other")]))]
    with pytest.raises(RuntimeError, match=r"wait for each other: \[\"\('never', 3\)\"\]"):
        play(actors, {}, ending="end")


def test_what_is_done_under_one_name_is_added_up() -> None:
    """A kind, a link and the driver's own seconds."""

    def program() -> Program:
        yield Busy("a", "core", 1.0)
        yield Send(("there",), Carriage((Leg("core", 2.0),)))
        yield Wait(("there",), "other")
        yield Busy("b", "driver", 4.0)

    played = play([Actor("one", Seat("core"), program())], {}, ending="end", overhead=8.0)
    assert played.path == {"driver": 12.0, "core": 3.0} and played.seconds == 15.0


@pytest.mark.parametrize(
    "item", [("tag", ("legs",)), (("tag",), ((("link",),), 0.0)), ("name", "kind", "x"), "no", ()]
)
def test_what_is_no_item_is_refused(item: object) -> None:
    with pytest.raises(TypeError):
        play([Actor("one", Seat("core"), iter([item]))], {}, ending="end")  # type: ignore[list-item]


def test_a_resource_without_tasks_has_no_end() -> None:
    idle = Resource(1.0)
    with pytest.raises(IndexError, match="no task is left"):
        idle.foresee()
    with pytest.raises(IndexError, match="no task is left"):
        idle.end(1.0)
    assert idle.begin(7, 2.0, 1.0, 0.5) and not idle.idle
    assert idle.foresee() == 2.5 and idle.end(2.5) == 7 and idle.idle
