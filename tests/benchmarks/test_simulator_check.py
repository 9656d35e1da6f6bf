"""replay.py and its like: a recording with a known answer replays exactly; a real run is read."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from kt_ray.modes.train import run
from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.runs.prepare import prepare
from kt_ray.timeline import Activity, Span
from kt_ray.timing.event_loop import Carriage
from kt_ray.timing.simulate import ExpertCall, ExpertClass, Group, Phase, Simulated, simulate
from kt_ray.tracking.chrome_trace import chrome_trace
from tests.helpers.composing import compose
from tests.timing.test_simulate import RULES, apart, plan_of, small, wave_of

REPO = Path(__file__).resolve().parents[2]
REQUEST, REPLY, STAGE = 0.3, 0.2, 0.15
SLIVER = 1e-3  # of a span that sends


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module


class Given:
    """Every operation takes a while, so that it leaves an event."""

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        known = {"begin": (0.1, 0.0), "forward": (0.7, 0.4), "recompute": (0.2, 1.1), "backward": (0.0, 1.9)}
        return known.get(kind, (0.05, 0.03))

    def expert(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> ExpertCall:
        return ExpertCall(1.3 + 0.1 * actor, 0.0)

    def lane(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> tuple[()]:
        return ()

    def worker_lane(self, worker: int, layer: int, direction: str, tokens: int, *, call: int) -> None:
        return None

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        return Carriage((), REQUEST)

    def reply(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        return Carriage((), REPLY)

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        return Carriage((), STAGE)

    def pass_end(self) -> float:
        return 0.0

    def phases(self) -> tuple[Phase, ...]:
        return ()


def recording(plan: Plan, found: Simulated) -> dict[str, list[Span]]:
    """What actors that behave as simulated would have recorded."""
    ends = {(e.actor, e.name): e.end for e in found.events if e.kind == "experts"}
    lanes = {"driver": [Span("pass", "wait", -1.0, found.seconds + 1.0)]}
    for worker in plan.workers:
        lanes[f"worker-{worker.rank}"] = _worker(plan, found, ends, worker.rank)
    owners = {(w.replica, layer): w.rank for w in plan.workers for layer in range(*w.layers)}
    assert len(owners) == plan.replicas * plan.dims.num_layers
    for actor in plan.experts:
        events = [e for e in found.events if e.actor == f"experts {actor.rank}"]
        lane = lanes[f"experts-{actor.rank}"] = []
        now = 0.0
        for e, (layer, direction, group) in zip(events, expert_order(plan, "train"), strict=True):
            assert e.name == f"{direction} {layer}.{group}"
            lane.append(Span(f"wait {direction}", "wait", now, e.start, layer, group))
            lane.append(Span(direction, "compute", e.start, e.end - SLIVER, layer, group))
            lane += [
                Span(f"reply {direction}", "transfer", e.end - SLIVER, e.end, layer, group)
            ] * plan.replicas
            now = e.end
    return lanes


def _worker(plan: Plan, found: Simulated, ends: dict[tuple[str, str], float], rank: int) -> list[Span]:
    here = plan.workers[rank]
    events = [e for e in found.events if e.actor == f"worker {rank}"]
    begun, rest = events[: plan.groups], events[plan.groups :]
    lane = [Span("begin", "compute", 0.0, begun[-1].end)]
    now = begun[-1].end
    for kind, layer, group in worker_program(plan, here.replica, here.stage, "train"):
        mine = [e for e in rest if e.name == f"{kind} {layer}.{group}"]
        lane.append(Span(kind, "compute", now, mine[-1].end, layer, group))
        moe = layer in plan.dims.moe_layers
        direction = "forward" if kind in ("forward", "join") else "backward"
        first = mine[0]
        if kind.startswith("recv"):
            lane.append(Span(f"stage {kind[5:]}", "wait", now, first.start, -1, group))
        elif kind.startswith("send"):
            lane.append(Span(f"send {kind[5:]}", "transfer", first.end - SLIVER, first.end, -1, group))
        elif moe and kind in ("forward", "recompute"):
            lane.append(Span(f"submit {direction}", "transfer", first.end - SLIVER, first.end, layer, group))
        waits = first.end if moe and kind in ("forward", "recompute") and not plan.overlap else None
        if plan.overlap and (kind == "join" or (kind == "backward" and moe)):
            waits = now
        if waits is not None:
            for actor in plan.experts:
                arrival = ends[f"experts {actor.rank}", f"{direction} {layer}.{group}"] + REPLY
                until = max(waits, arrival)
                lane.append(Span(f"experts-{actor.rank} {direction}", "wait", waits, until, layer, group))
                waits = until
        now = mine[-1].end
    return lane


@pytest.mark.parametrize(
    ("rule", "groups", "overlap"), list(itertools.product(RULES, (1, 2, 3), (True, False)))
)
def test_a_recording_with_a_known_answer_replays_exactly(
    bench: Any, rule: dict[str, object], groups: int, overlap: bool
) -> None:
    tool = bench("replay")
    plan = plan_of(rule={**rule, "groups": groups, "overlap": overlap}, trainer={"batch_size": 8})
    found = simulate(plan, apart(plan), Given(), [wave_of(plan)], events=True)
    (one,) = bench("recorded").passes_of(recording(plan, found))
    read = bench("recorded").read_pass(plan, one)
    assert read.makespan == pytest.approx(found.seconds) and read.driver == pytest.approx(2.0)
    again = tool.replay(plan, read.terms)
    assert again.seconds == pytest.approx(found.seconds)
    for actor, work in found.work.items():
        name = actor.replace(" ", "-")
        assert again.busy[name] == pytest.approx(work) and read.busy[name] == pytest.approx(work)
        for kind, waited in again.waited.get(name, {}).items():
            assert read.waited[name].get(kind, 0.0) == pytest.approx(waited), (name, kind)


def test_terms_decide(bench: Any) -> None:
    """One group: the answer by hand, from the recording and after a call of the experts was made slower."""
    tool = bench("replay")
    plan = small(1)
    found = simulate(plan, apart(plan), Given(), [wave_of(plan)], events=True)
    terms = bench("recorded").read_pass(plan, bench("recorded").passes_of(recording(plan, found))[0]).terms
    forward = 0.7 + REQUEST + 1.3 + REPLY + 0.08  # the shared expert's 0.4 is over before the answer comes
    backward = 0.2 + max(1.1, REQUEST + 1.3 + REPLY) + 1.9
    assert found.seconds == pytest.approx(0.1 + 0.08 + 4 * forward + 0.08 + 4 * backward)
    terms.calls[0, 2, "forward", 0] += 5.0
    assert tool.replay(plan, terms).seconds == pytest.approx(found.seconds + 5.0)
    halves = tool.typical_terms([terms, dataclasses.replace(terms, calls=dict.fromkeys(terms.calls, 1.3))])
    assert tool.replay(plan, halves).seconds == pytest.approx(found.seconds + 2.5)


def test_another_schedule_is_noticed(bench: Any) -> None:
    """The same durations without overlap take longer: an error of the schedule would show."""
    tool = bench("replay")
    plan = small(2)
    found = simulate(plan, apart(plan), Given(), [wave_of(plan)], events=True)
    terms = bench("recorded").read_pass(plan, bench("recorded").passes_of(recording(plan, found))[0]).terms
    assert tool.replay(dataclasses.replace(plan, overlap=False), terms).seconds > 1.1 * found.seconds


def test_a_recording_of_another_plan_is_refused(bench: Any) -> None:
    plan = small(2)
    found = simulate(plan, apart(plan), Given(), [wave_of(plan)], events=True)
    (one,) = bench("recorded").passes_of(recording(plan, found))
    with pytest.raises(ValueError, match="another plan"):
        bench("recorded").read_pass(small(1), one)
    with pytest.raises(ValueError, match="no events of experts-0"):
        bench("recorded").read_pass(plan, {**one, "experts-0": []})


def test_lanes_of_a_trace_are_those_of_the_activities(bench: Any) -> None:
    events = (Span("begin", "compute", 10.0, 10.5), Span("forward", "compute", 10.5, 11.0, 3, 1))
    activities = [
        Activity("worker-0", "host", 10.0, 11.0, 5.0, {}, spans=events),
        Activity("driver", "host", 9.5, 11.5, 5.0, {}, spans=(Span("pass", "wait", 9.75, 11.25),)),
    ]
    lanes = bench("recorded").lanes_of_trace(chrome_trace(activities))
    for activity in activities:
        for ours, theirs in zip(activity.spans, lanes[activity.actor], strict=True):
            assert ours._replace(start=0, end=0) == theirs._replace(start=0, end=0)
            assert ours.start - 9.5 == pytest.approx(theirs.start)
            assert ours.end - ours.start == pytest.approx(theirs.end - theirs.start)


def test_a_real_run_is_checked(bench: Any, tmp_path: Path) -> None:
    """The demo as two stages with two expert actors, in process; two waves of a step."""
    tool, replay = bench("simulator_check"), bench("replay")
    config = compose(
        [
            "cluster=local",
            "rule=cpu_2workers_2sockets",
            "rule.wave=2",
            "trainer.max_steps=2",
            "trainer.eval_every=0",
            "trainer.timeline_every=1",
            "tracking.progress=false",
            "tracking.plot=false",
            f"run.root={tmp_path}",
            "run.name=traced",
        ]
    )
    assert run(config) == 0
    plan = prepare(config).plan
    steps = tool.recorded_steps(plan, tmp_path / "traced" / "timelines")
    assert len(steps) == 2
    passes = [one for step in steps for one in step]
    assert len(passes) > 2 and len(plan.workers) == len(plan.experts) == 2
    for one in passes:
        again = replay.replay(plan, one.terms)
        assert max(again.busy.values()) <= again.seconds + 1e-9
        assert again.seconds <= sum(again.busy.values()) + sum(one.terms.ways.values())
        assert 0.5 < again.seconds / one.makespan < 1.5
    out = tmp_path / "out.json"
    tool.main(["--run", str(tmp_path / "traced"), "--json", str(out)])
    (record,) = json.loads(out.read_text(encoding="utf-8"))["records"]
    assert record["overlap"]["pass_s"] == pytest.approx(sum(p.makespan for p in passes) / 2)
    assert len(record["overlap"]["each"]["errors"]) == 2
    assert record["within_aim"] == (abs(record["overlap"]["each"]["error"]) <= record["aim"])
    with (tmp_path / "traced" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "skipped": 1, "loss": 9.0, "grad_norm": null}\n')
    (made,) = [bench("run_record").record(tmp_path / "traced", "kt_ray_ray", "a note")]
    assert made["steps_measured"] == 1 and made["tokens_per_s"] > 0 and len(made["losses"]) == 2
