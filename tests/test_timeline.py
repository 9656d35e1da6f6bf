"""Spans: their own time, and the CPU time of an actor's threads."""

from __future__ import annotations

import threading
import time

import pytest

from kt_ray.timeline import SpanRecorder, name_thread, team_cpu_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still; tests move it."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_inner_spans_are_taken_out_of_outer_ones(clock: list[float]) -> None:
    recorder = SpanRecorder(full=True)
    with recorder.span("join", "compute", 3, 1):
        clock[0] += 1.0
        with recorder.span("add", "transfer", 3, 1):
            clock[0] += 0.5
            with recorder.span("experts", "wait", 3, 1):
                clock[0] += 4.0
        clock[0] += 2.0
    with recorder.span("loss", "compute"):
        clock[0] += 0.25
    assert recorder.seconds == {"compute": 3.25, "transfer": 0.5, "wait": 4.0}
    activity = recorder.activity("worker-0", "here", 2)
    assert sum(activity.seconds.values()) == activity.end - activity.start
    assert [e.name for e in activity.spans] == ["experts", "add", "join", "loss"]
    assert activity.spans[0][1:] == ("wait", 101.5, 105.5, 3, 1)


def test_sums_need_no_events_and_survive_errors(clock: list[float]) -> None:
    recorder = SpanRecorder()
    with pytest.raises(KeyError), recorder.span("outer", "compute"), recorder.span("inner", "wait"):
        clock[0] += 2.0
        raise KeyError
    with recorder.span("next", "compute"):
        clock[0] += 1.0
    assert recorder.seconds == {"compute": 1.0, "transfer": 0.0, "wait": 2.0}
    assert recorder.activity("worker-0", "here", 1).spans == ()


def test_queue_depth() -> None:
    recorder = SpanRecorder()
    assert recorder.activity("experts-0", "here", 1).queue_max == 0
    for depth in (0, 1, 2, 3):
        recorder.note_queue(depth)
    activity = recorder.activity("experts-0", "here", 1)
    assert (activity.queue_mean, activity.queue_max) == (1.5, 3)


def _burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_time_is_that_of_the_thread_and_those_it_started() -> None:
    found: dict[str, float] = {}

    def actor(name: str, own: float, helper: float) -> None:
        name_thread(name)
        before = team_cpu_seconds()
        stay = threading.Event()

        def work() -> None:
            _burn(helper)
            worked.set()
            stay.wait(20)

        worked = threading.Event()
        started = threading.Thread(target=work)  # inherits the name, as a thread of an OpenMP team does
        started.start()
        _burn(own)
        worked.wait(20)
        found[name] = team_cpu_seconds() - before
        stay.set()
        started.join()

    threads = [threading.Thread(target=actor, args=args) for args in (("a-0", 0.1, 0.2), ("a-1", 0.05, 0.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.28 < found["a-0"] < 0.6
    assert 0.045 < found["a-1"] < 0.28
