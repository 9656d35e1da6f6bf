"""The order of what happens at once."""

from __future__ import annotations

from kt_ray.timing.event_loop import Actor, Busy, Carriage, EventLoop, Leg, Program, Seat, Wait


def test_messages_that_arrive_at_once_do_so_in_the_order_in_which_they_began_to_wait() -> None:
    """One by a link, whose end is due, one that has only latency: at the same second."""
    loop, seen = EventLoop({}, events=False), list[str]()

    def sender() -> Program:
        loop.send(("by link",), Carriage((Leg("link", 1.0),)))
        loop.send(("late",), Carriage((), 1.0))
        yield Busy("work", "work", 0.5)

    def waiter(tag: str) -> Program:
        yield Wait((tag,), "other")
        seen.append(tag)

    actors = [Actor("sender", Seat("core"), sender())]
    actors += [Actor(tag, Seat("core"), waiter(tag)) for tag in ("by link", "late")]
    loop.play(actors, 0.0, 0.0, "end")
    assert seen == ["late", "by link"]
