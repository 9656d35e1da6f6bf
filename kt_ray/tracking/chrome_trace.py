"""Activities of all actors as one Chrome trace: chrome://tracing and https://ui.perfetto.dev load it.

One process per host, one lane per actor, times in microseconds since the earliest start. Arrows go from
a submission to its engine call and from a reply to the join that waited for it.
Format: "Trace Event Format" of the Chromium project (complete events "X", flow events "s" and "f",
metadata "M").
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kt_ray.disk import write_atomic
from kt_ray.timeline import Activity, Span

_Item = dict[str, Any]  # one entry of the trace
_COLOURS = {"compute": "good", "wait": "terrible", "transfer": "bad"}  # names of Chrome's palette


def chrome_trace(activities: Sequence[Activity], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as a JSON tree.

    Args:
        activities: with events. Clocks of different hosts are brought together by their wall clocks.
        about: further facts, kept under "otherData".
    """
    offsets: dict[str, float] = {}
    for activity in activities:
        offsets.setdefault(activity.host, activity.wall_offset)
    base = min((a.start + offsets[a.host] for a in activities), default=0.0)
    hosts = list(offsets)
    trace: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": host}}
        for pid, host in enumerate(hosts)
    ]
    placed: list[tuple[Activity, Span, dict[str, Any]]] = []
    for lane, activity in enumerate(activities):
        pid, shift = hosts.index(activity.host), offsets[activity.host] - base
        where = {"pid": pid, "tid": lane}
        trace.append({"ph": "M", "name": "thread_name", **where, "args": {"name": activity.actor}})
        trace.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": lane}})
        for event in activity.spans:
            item = {
                "ph": "X",
                "name": event.name,
                "cat": event.category,
                "cname": _COLOURS[event.category],
                "ts": (event.start + shift) * 1e6,
                "dur": (event.end - event.start) * 1e6,
                **where,
                "args": {k: v for k, v in (("layer", event.layer), ("group", event.group)) if v >= 0},
            }
            trace.append(item)
            placed.append((activity, event, item))
    trace += _arrows(placed)
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": about or {}}


def _arrows(placed: Iterable[tuple[Activity, Span, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Flow events: every submission to every engine call of its layer, group and direction; replies in order.

    What has the same layer, group and direction once more belongs to the step's next wave. An expert actor
    answers replicas in their order, which is also the workers' order here.
    """
    ends: dict[tuple[str, ...], dict[str, dict[str, list[_Item]]]] = {}
    for activity, event, item in placed:
        side, what = _end_of_message(activity.actor, event)
        if side:
            key = (*what, str(event.layer), str(event.group))
            of_side = ends.setdefault(key, {"from": {}, "to": {}})[side]
            of_side.setdefault(activity.actor, []).append(item)
    arrows: list[dict[str, Any]] = []
    for key, sides in ends.items():
        for start, end in _pairs(key[0], list(sides["from"].values()), list(sides["to"].values())):
            common = {"name": key[0], "cat": "message", "id": len(arrows) // 2}
            leaves = start["ts"] + start["dur"] / 2
            # A call begins with its request; a wait ends with its reply.
            arrives = end["ts"] + (end["dur"] if key[0] == "reply" else 0.0)
            arrows.append({"ph": "s", **common, "ts": leaves, "pid": start["pid"], "tid": start["tid"]})
            arrows.append(
                {"ph": "f", "bp": "e", **common, "ts": arrives, "pid": end["pid"], "tid": end["tid"]}
            )
    return arrows


def _pairs(
    what: str, senders: Sequence[Sequence[_Item]], receivers: Sequence[Sequence[_Item]]
) -> Iterator[tuple[_Item, _Item]]:
    """(start, end) of every message of one kind; each inner list is one actor's, wave after wave."""
    if what == "request":
        for requests, calls in itertools.product(senders, receivers):
            yield from zip(requests, calls, strict=False)
        return
    for replies in senders:
        for replica, waits in enumerate(receivers):
            yield from zip(replies[replica :: len(receivers)], waits, strict=False)


def _end_of_message(actor: str, event: Span) -> tuple[str, tuple[str, ...]]:
    """("from" or "to", what the message is) for spans that send or receive one; ("", ()) for others."""
    first, _, direction = event.name.partition(" ")
    if first == "submit":
        return "from", ("request", direction)
    if first == "reply":
        return "from", ("reply", direction, actor)
    if event.category == "wait" and first.startswith("experts-"):
        return "to", ("reply", direction, first)
    if actor.startswith("experts-") and event.name in ("forward", "backward"):
        return "to", ("request", event.name)
    return "", ()


def write_timeline(
    directory: Path, step: int, activities: Sequence[Activity], about: dict[str, Any] | None = None
) -> Path:
    """`step_000010.json` under `directory`, which is made. `step` counts from 1. Returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"step_{step:06d}.json"
    write_atomic(file, json.dumps(chrome_trace(activities, about)) + "\n")
    return file
