#!/usr/bin/env python
"""Simulated against recorded passes: is the simulator's schedule that of a real run?

    python benchmarks/simulator_check.py --scratch DIR --json out.json
    python benchmarks/simulator_check.py --scratch DIR --cases demo.local_1x1,v2lite_2_bf16.ray_2experts
    python benchmarks/simulator_check.py --run runs/NAME          # a run with trainer.timeline_every

Each case runs in a process of its own, twice: as it is, and with rule.overlap=false. Every measured step's
timeline is taken apart (recorded.py) and its passes simulated (replay.py) with recorded durations in place
of rates:

    each     every pass with its own durations, every actor on cores of its own (what others took of its cores
             is in the recording): only order and waiting are simulated
    mean     the same with the mean durations of all steps, against the mean pass
    serial   median durations of the run without overlap, actors on the plan's seats (kt_ray.timing.seats):
             order, waiting and the sharing of cores are simulated, against the median step with overlap. The
             two runs follow each other, so this one wants a quiet machine

    flipped  `each` under the schedule of the other rule.overlap: how far off a wrong schedule would be

"driver" is the driver's part of a pass beyond the actors' spans; "unread" what expert actors did between an
answer's leaving and their next wait, "late" by how much the last actor began after the first: none of them is
simulated. "guessed" is the share of messages whose way the recording does not tell.

--run checks `each` and `mean` of the timelines that a run directory holds. Aim: the makespan within 5 % where
every actor has a core, within 10 % elsewhere.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import JobFailed, add_common_arguments, quiet_machine, write_json
from prediction import MODELS, _options
from recorded import Recorded, lanes_of_trace, passes_of, read_pass
from replay import Replayed, replay, typical_terms
from step_timeline import run_job
from step_timeline_child import Job

AIM, AIM_SHARED = 0.05, 0.10
ONE = ("rule.worker_threads=1", "rule.experts.threads=1")
LOCAL, RAY = ("cluster=local",), ("cluster=ray", "cluster.address=local", "cluster.dashboard=false")
TWO_EXPERTS = ("rule.experts.sockets=2",)
# Options of each, and whether actors have to share cores on a machine of two.
LAYOUTS: dict[str, tuple[tuple[str, ...], bool]] = {
    "local_1x1": ((*LOCAL, *ONE), False),
    "ray_1x1": ((*RAY, *ONE), False),
    "local_1x1_wave1": ((*LOCAL, *ONE, "rule.wave=1"), False),
    "local_2experts": ((*LOCAL, *ONE, *TWO_EXPERTS), True),
    "ray_2experts": ((*RAY, *ONE, *TWO_EXPERTS), True),
    "local_2stages": ((*LOCAL, *ONE, "rule.stages=2"), True),
    "ray_2stages": ((*RAY, *ONE, "rule.stages=2"), True),
    "local_2replicas": ((*LOCAL, *ONE, "rule.replicas=2"), True),
    "ray_2replicas": ((*RAY, *ONE, "rule.replicas=2"), True),
    "local": (LOCAL, True),
    "ray": (RAY, True),
}
RULE = ("rule=auto", "rule.device=cpu")
CASES = [f"{model}.{layout}" for model in ("demo", "v2lite_2_bf16") for layout in LAYOUTS]


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    about = quiet_machine(args.wait_quiet)
    records: list[dict[str, Any]] = []
    if args.run:
        records.append({"case": args.run.name, **check_run(args.run)})
        _show(records[-1])
    else:
        args.scratch.mkdir(parents=True, exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
        for case in args.cases:
            try:
                records.append(_case(args, case))
            except JobFailed as error:
                records.append({"case": case, "failed": str(error)})
            _show(records[-1])
    if args.json:
        write_json(args.json, records, about)
    return 0 if all(r.get("within_aim") for r in records) else 1


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scratch", type=Path, help="for checkpoints and rows, as of prediction.py")
    parser.add_argument("--run", type=Path, help="a run directory with timelines, instead of own runs")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated model.layout")
    parser.add_argument("--steps", type=int, default=4, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--spare-gb", type=float, default=0.8, help="memory that must stay available")
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for a run")
    parser.add_argument("--keep", type=Path, help="directory to keep the traces in")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    if (args.scratch is None) == (args.run is None):
        parser.error("give --scratch or --run")
    args.cases = [case for case in args.cases.split(",") if case]
    for case in args.cases:
        model, _, layout = case.partition(".")
        if model not in MODELS or layout not in LAYOUTS:
            parser.error(f"unknown case {case}: models {', '.join(MODELS)}; layouts {', '.join(LAYOUTS)}")
    return args


def _case(args: argparse.Namespace, case: str) -> dict[str, Any]:
    """Both runs of a case and what the simulator makes of them."""
    from kt_ray.timing.seats import machine_of

    model, _, layout = case.partition(".")
    further, shared = LAYOUTS[layout]
    overrides = [*_options(MODELS[model], model, args), *RULE, *further]
    plan = _plan(overrides)
    # The same calls of the experts without overlap, whatever the plan would choose then.
    kept = plan.experts[0].activations
    fixed = [f"rule.groups={plan.groups}", f"rule.wave={plan.wave}", f"rule.experts.activations={kept}"]
    fixed += [f"rule.activations={plan.activations}"]
    runs, others = {}, 0.0
    for name, more in (("overlap", []), ("serial", [*fixed, "rule.overlap=false"])):
        with tempfile.TemporaryDirectory() as scratch:
            traces = Path(scratch) / "traces" if args.keep is None else args.keep / f"{case}.{name}"
            job = Job(case, [*overrides, *more], args.steps, args.warmup, args.threads, traces=str(traces))
            result = run_job(job, Path(scratch), args.spare_gb, args.timeout)
            others = max(others, result["cpus_used_by_others"])
            runs[name] = recorded_steps(_plan([*overrides, *more]), traces)
    waiting = _plan([*overrides, *fixed, "rule.overlap=false"])
    record = {
        "case": case,
        "overrides": overrides,
        "groups": plan.groups,
        "waves": len(runs["overlap"][0]),
        "shared_cores": shared,
        "cpus_used_by_others": others,
        "overlap": compare(plan, runs["overlap"]),
        "without_overlap": compare(waiting, runs["serial"]),
    }
    record["serial_terms"] = from_serial(plan, machine_of(plan), runs["serial"], runs["overlap"])
    return record | _within(record, AIM_SHARED if shared else AIM)


def _plan(overrides: Sequence[str]) -> Any:
    from kt_ray.config.compose import compose
    from kt_ray.runs.prepare import prepare

    return prepare(compose([*overrides])).plan


def check_run(run: Path) -> dict[str, Any]:
    """`compare` for the timelines of a run directory, whose plan is made again with the choices it kept."""
    import yaml

    from kt_ray.config.mapping import REMOVED, load
    from kt_ray.runs.prepare import prepare

    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for group, _, name in (key.partition(".") for key in REMOVED):
        settings.get(group, {}).pop(name, None)
    made = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    settings["rule"] |= {key: made[key] for key in ("groups", "wave")}
    settings["rule"]["activations"] = made.get("activations", "group")  # earlier runs had no other
    settings["rule"]["experts"]["activations"] = made["experts"][0]["activations"]
    if not settings["rule"]["layers"]:
        settings["rule"] |= {key: made[key] for key in ("stages", "replicas")}
    plan = prepare(load(settings)).plan
    record = {"overlap": compare(plan, recorded_steps(plan, run / "timelines"))}
    return record | _within(record, AIM_SHARED)


def recorded_steps(plan: Any, directory: Path) -> list[list[Recorded]]:
    """Every step's passes of the traces in a directory."""
    steps = []
    for file in sorted(directory.glob("step_*.json")):
        lanes = lanes_of_trace(json.loads(file.read_text(encoding="utf-8")))
        steps.append([read_pass(plan, one) for one in passes_of(lanes)])
    if not steps:
        raise ValueError(f"{directory} holds no timeline (trainer.timeline_every)")
    return steps


def compare(plan: Any, steps: Sequence[Sequence[Recorded]]) -> dict[str, Any]:
    """`each` and `mean` of recorded steps."""
    each = [[replay(plan, one.terms) for one in step] for step in steps]
    errors = [
        sum(p.seconds for p in ours) / sum(p.makespan for p in step) - 1
        for ours, step in zip(each, steps, strict=True)
    ]
    alike = [list(passes) for passes in zip(*steps, strict=True)]
    every = [p for step in steps for p in step]
    flipped = dataclasses.replace(plan, overlap=not plan.overlap)
    return {
        "each": {
            "error": statistics.median(errors),
            "worst": max(errors, key=abs),
            "errors": errors,
            **_sums([p for step in each for p in step], every, len(steps)),
        },
        "mean": summed([(replay(plan, typical_terms([p.terms for p in a])), a) for a in alike]),
        "flipped": sum(replay(flipped, p.terms).seconds for p in every) / sum(p.makespan for p in every) - 1,
        "driver_s": sum(p.driver for p in every) / len(steps),
        "late_s": max(p.late for p in every),
        "unread_s": sum(p.unread for p in every) / len(steps),
        "guessed": statistics.fmean(p.guessed for p in every),
        "pass_s": sum(p.makespan for p in every) / len(steps),
        "ways_s": _ways(every),
    }


def _ways(passes: Sequence[Recorded]) -> dict[str, float]:
    """Median seconds of a message, by what it is."""
    found: dict[str, list[float]] = {}
    for one in passes:
        for key, value in one.terms.ways.items():
            found.setdefault(key[0], []).append(value)
    return {kind: statistics.median(values) for kind, values in found.items()}


def from_serial(
    plan: Any, machine: Any, serial: Sequence[Sequence[Recorded]], steps: Sequence[Sequence[Recorded]]
) -> dict[str, Any]:
    """A step with overlap, simulated on `machine` with what the run without overlap took."""
    alike = zip(*serial, strict=True)
    passes = [
        replay(plan, typical_terms([p.terms for p in one], statistics.median), machine) for one in alike
    ]
    recorded = statistics.median(sum(p.makespan for p in step) for step in steps)
    simulated = sum(p.seconds for p in passes)
    return {
        "error": simulated / recorded - 1,
        "recorded_s": recorded,
        "simulated_s": simulated,
        "busy_recorded": {
            name: statistics.median(sum(p.busy[name] for p in step) for step in steps)
            for name in passes[0].busy
        },
        "busy_simulated": {name: sum(p.busy[name] for p in passes) for name in passes[0].busy},
    }


def summed(passes: Sequence[tuple[Replayed, Sequence[Recorded]]]) -> dict[str, Any]:
    """Simulated passes of one step against the means of the recorded ones of every step."""
    steps = len(passes[0][1])
    recorded = [p for _, alike in passes for p in alike]
    simulated = [p for p, alike in passes for _ in alike]
    sums = _sums(simulated, recorded, steps)
    return {"error": sums["simulated_s"] / sums["recorded_s"] - 1, **sums}


def _sums(simulated: Sequence[Replayed], recorded: Sequence[Recorded], steps: int) -> dict[str, Any]:
    """Seconds per step on both sides: makespans, work and waits of every actor, waits by kind."""

    def busy(parts: Sequence[Any]) -> dict[str, float]:
        return {name: sum(p.busy[name] for p in parts) / steps for name in recorded[0].busy}

    def waits(parts: Sequence[Any]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in parts:
            for actor, kinds in part.waited.items():
                for kind, value in kinds.items():
                    name = f"{actor} {kind}"
                    total[name] = total.get(name, 0.0) + value / steps
        return total

    ours, theirs = waits(simulated), waits(recorded)
    gaps = {name: ours.get(name, 0.0) - theirs.get(name, 0.0) for name in {*ours, *theirs}}
    return {
        "recorded_s": sum(p.makespan for p in recorded) / steps,
        "simulated_s": sum(p.seconds for p in simulated) / steps,
        "busy_recorded": busy(recorded),
        "busy_simulated": busy(simulated),
        "waited_recorded": dict(sorted(theirs.items())),
        "waited_simulated": dict(sorted(ours.items())),
        "gaps": dict(sorted(gaps.items(), key=lambda item: -abs(item[1]))),
    }


def _within(record: Mapping[str, Any], aim: float) -> dict[str, Any]:
    errors = [part["each"]["error"] for key in ("overlap", "without_overlap") if (part := record.get(key))]
    return {"aim": aim, "within_aim": all(abs(e) <= aim for e in errors)}


def _show(record: Mapping[str, Any]) -> None:
    if "failed" in record:
        print(f"{record['case']:<32} {record['failed'].splitlines()[0]}", flush=True)
        return
    for key in ("overlap", "without_overlap"):
        part = record.get(key)
        if part is None:
            continue
        each, mean = part["each"], part["mean"]
        gaps = ", ".join(f"{name} {value * 1e3:+.1f} ms" for name, value in list(each["gaps"].items())[:3])
        serial = record.get("serial_terms") if key == "overlap" else None
        print(
            f"{record['case']:<32}{'' if key == 'overlap' else 'serial':<8}{part['pass_s']:8.3f} s  "
            f"each {each['error']:+6.1%} (worst {each['worst']:+6.1%})  mean {mean['error']:+6.1%}  "
            f"flipped {part['flipped']:+5.0%}  "
            + (f"serial {serial['error']:+6.1%}  " if serial else " " * 16)
            + f"driver {part['driver_s'] * 1e3:.1f} ms, unread {part['unread_s'] * 1e3:.1f} ms, late "
            f"{part['late_s'] * 1e3:.1f} ms, guessed {part['guessed']:.0%}; {gaps}",
            flush=True,
        )
    if "cpus_used_by_others" in record:
        print(f"{'':<32}others {record['cpus_used_by_others']:.2f} CPUs", flush=True)


if __name__ == "__main__":
    sys.exit(main())
