"""The trace: one clock over processes and hosts, a lane per actor, arrows between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kt_ray.timeline import Activity, Span
from kt_ray.tracking.chrome_trace import chrome_trace, write_timeline


def activity(actor: str, host: str, offset: float, *events: Span) -> Activity:
    return Activity(actor, host, events[0].start, events[-1].end, offset, {}, spans=events)


WORKER = activity(
    "worker-0",
    "a",
    1000.0,
    Span("forward", "compute", 10.0, 11.0, 2, 0),
    Span("submit forward", "transfer", 10.5, 10.6, 2, 0),
    Span("experts-0 forward", "wait", 11.0, 12.2, 2, 0),
    Span("experts-1 forward", "wait", 12.2, 13.0, 2, 0),
)
NEAR = activity(
    "experts-0",
    "a",
    1000.4,  # wall clocks are read a moment apart; on one host they do not matter
    Span("forward", "compute", 10.6, 12.0, 2, 0),
    Span("reply forward", "transfer", 12.0, 12.1, 2, 0),
)
FAR = activity(
    "experts-1",
    "b",
    905.0,
    Span("forward", "compute", 106.0, 107.5, 2, 0),
    Span("reply forward", "transfer", 107.5, 107.75, 2, 0),
)


def test_one_clock_and_a_lane_per_actor() -> None:
    trace = chrome_trace([WORKER, NEAR, FAR])["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    assert len(spans) == 8 and all(e["ts"] >= 0 and e["dur"] > 0 for e in spans)
    by_lane = {lane: [e for e in spans if e["tid"] == lane] for lane in range(3)}
    assert by_lane[0][0]["ts"] == 0 and by_lane[0][0]["args"] == {"layer": 2, "group": 0}
    assert by_lane[1][0]["ts"] == pytest.approx(0.6e6)
    assert by_lane[2][0]["ts"] == pytest.approx(1.0e6)  # 106 + 905 against 10 + 1000
    assert [by_lane[lane][0]["pid"] for lane in range(3)] == [0, 0, 1]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert names == {0: "worker-0", 1: "experts-0", 2: "experts-1"}
    assert {e["cat"] for e in spans} == {"compute", "wait", "transfer"}


def test_arrows_lead_from_submission_to_call_and_from_reply_to_join() -> None:
    trace = chrome_trace([WORKER, NEAR, FAR])["traceEvents"]
    starts = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert len(starts) == len(ends) == 4 and starts.keys() == ends.keys()
    found = {(starts[i]["name"], starts[i]["tid"], ends[i]["tid"]) for i in starts}
    assert found == {("request", 0, 1), ("request", 0, 2), ("reply", 1, 0), ("reply", 2, 0)}
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)


def test_arrows_stay_within_their_wave() -> None:
    """Two replicas, two waves: the same layer and group four times at the expert actor's door."""

    def worker(rank: int) -> Activity:
        later = 0.1 * rank
        events = []
        for start in (10.0, 20.0):
            events.append(Span("submit forward", "transfer", start + later, start + later + 0.01, 2, 0))
            events.append(Span("experts-0 forward", "wait", start + 1, start + 5 + later, 2, 0))
        return activity(f"worker-{rank}", "a", 0.0, *events)

    events = []
    for start in (11.0, 21.0):
        events.append(Span("forward", "compute", start, start + 2, 2, 0))
        events += [Span("reply forward", "transfer", start + r, start + r + 0.1, 2, 0) for r in (2, 3)]
    trace = chrome_trace([worker(0), worker(1), activity("experts-0", "a", 0.0, *events)])["traceEvents"]
    starts = {e["id"]: e for e in trace if e["ph"] == "s"}
    ends = {e["id"]: e for e in trace if e["ph"] == "f"}
    assert len(starts) == len(ends) == 8
    found = sorted(
        (starts[i]["name"], starts[i]["tid"], ends[i]["tid"], ends[i]["ts"] - starts[i]["ts"]) for i in starts
    )
    assert [arrow[:3] for arrow in found] == [
        *([("reply", 2, 0)] * 2 + [("reply", 2, 1)] * 2),
        *([("request", 0, 2)] * 2 + [("request", 1, 2)] * 2),
    ]
    assert all(0 < arrow[3] < 3e6 for arrow in found)


def test_a_written_timeline_loads(tmp_path: Path) -> None:
    file = write_timeline(tmp_path / "timelines", 10, [WORKER, NEAR], {"run": "x"})
    assert file.name == "step_000010.json"
    trace = json.loads(file.read_text(encoding="utf-8"))
    assert trace["otherData"] == {"run": "x"} and len(trace["traceEvents"]) > 5
