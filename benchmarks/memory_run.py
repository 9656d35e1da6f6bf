#!/usr/bin/env python
"""Memory of a whole run, all its processes together, beside its plan.

    python benchmarks/memory_run.py --json out.json -- python launch.py model=deepseek_v2_lite \
        model.path=DIR rule=auto cluster.address=local trainer.max_steps=5

Every --interval seconds the proportional memory (PSS: shared pages divided among those that map them, so that
the sum counts each once) of the command and of everything that it started is added up; Ray's processes are
among them, even those that leave their parent, as long as the run starts its own cluster
(cluster.address=local). Sampling takes at most a twentieth of a core: a large process' page tables take long
to walk, and samples then come less often (`interval_s`). What lies between two samples shows in
`own_peaks_bytes`: the sum of every process' own peak, which counts shared pages several times and peaks
that were not at the same time: a bound from above.

Groups: driver, attention worker, expert actor (as env.json names them), ray system, other. Beside them, when
the command is a training run: the plan's total, tokens/s and loading GB/s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import add_common_arguments, applied_steps, kilobytes, quiet_machine, write_json

DUTY = 0.05  # of a core, for sampling
RUN_LINE = "run directory"  # what launch.py prints before the path
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process


@dataclass
class Seen:
    """One process: how it was called, and its own peak of resident memory in bytes."""

    command: str
    peak: int = 0


@dataclass
class Samples:
    """PSS in bytes of every process, sample by sample.

    Attributes:
        times: seconds since the start. pss: per sample, process id -> bytes.
        processes: all that were seen. least_available: smallest MemAvailable of the machine, bytes.
    """

    times: list[float] = field(default_factory=list)
    pss: list[dict[int, int]] = field(default_factory=list)
    processes: dict[int, Seen] = field(default_factory=dict)
    least_available: int = 1 << 62

    def take(self, at: float, children: Sequence[psutil.Process]) -> None:
        """Look at every process once."""
        now: dict[int, int] = {}
        for process in children:
            root = Path(f"/proc/{process.pid}")
            try:
                now[process.pid] = kilobytes((root / "smaps_rollup").read_text(errors="replace"), "Pss")
                peak = kilobytes((root / "status").read_text(errors="replace"), "VmHWM")
                command = (
                    (root / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
            except OSError:  # ended meanwhile, or has no memory of its own any more
                continue
            seen = self.processes.setdefault(process.pid, Seen(command))
            # Ray renames its workers once they know what they are.
            seen.command, seen.peak = command or seen.command, max(seen.peak, peak)
        self.times.append(at)
        self.pss.append(now)
        self.least_available = min(self.least_available, psutil.virtual_memory().available)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C: the command ends what it started
    about = quiet_machine(args.wait_quiet)
    record = measure(args.command, args.interval, args.run_dir)
    record = {"impl": args.impl, "note": args.note, **record}
    print(json.dumps(record, indent=2))
    if args.json:
        write_json(args.json, [record], about)
    return int(record["exit_code"])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between samples, at least")
    parser.add_argument("--run-dir", type=Path, help="of the run (default: as the command prints it)")
    parser.add_argument("--impl", default="kt_ray_ray")
    parser.add_argument("--note", default="")
    add_common_arguments(parser)
    parser.add_argument("command", nargs="+", help="what to run, behind --")
    args = parser.parse_args(argv)
    if args.interval <= 0:
        parser.error("--interval must be above 0")
    return args


def measure(command: Sequence[str], interval: float, run_dir: Path | None = None) -> dict[str, Any]:
    """Run a command to its end, sampling; one record."""
    if ctypes.CDLL(None, use_errno=True).prctl(_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    before = psutil.virtual_memory().available
    printed: list[str] = []
    begun, cpu = time.monotonic(), time.process_time()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace")
    reader = threading.Thread(target=_echo, args=(process, printed), daemon=True)
    reader.start()
    samples = Samples()
    try:
        while process.poll() is None:
            start = time.monotonic()
            samples.take(start - begun, psutil.Process().children(recursive=True))
            cost = time.monotonic() - start
            time.sleep(max(interval, cost / DUTY - cost))
    except KeyboardInterrupt:
        process.terminate()  # not SIGINT, which whoever was started in the background ignores
        process.wait()
    seconds = time.monotonic() - begun
    reader.join(timeout=10)
    _reap()
    directory = run_dir or find_run_dir(printed)
    run = run_figures(directory) if directory is not None else {}
    return {
        # Without folders: the record is to be shown.
        "command": [re.sub(r"[^=\s]*/", "", part) for part in command],
        "exit_code": process.returncode,
        "seconds": round(seconds, 2),
        **memory_figures(samples, process.pid, run.get("actor_pids", {})),
        "available_before_bytes": before,
        "available_drop_bytes": before - samples.least_available,
        "sampler_cpu_seconds": round(time.process_time() - cpu, 2),
        **against_plan(samples, run),
    }


def _echo(process: subprocess.Popen[str], printed: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            sys.stderr.write(line)
            printed.append(line)


def _reap() -> None:
    """Take the exit status of orphans that became ours."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                return
        except ChildProcessError:
            return


def find_run_dir(lines: Sequence[str]) -> Path | None:
    """The directory that launch.py printed."""
    for line in lines:
        if line.startswith(RUN_LINE):
            path = Path(line.removeprefix(RUN_LINE).lstrip(":").strip())
            if path.is_dir():
                return path
    return None


def group(pid: int, command: str, driver: int, actors: Mapping[int, str]) -> str:
    """Which part of the run a process is; `actors` names those that env.json knows."""
    if pid == driver:
        return "driver"
    name = actors.get(pid, "")
    if name.startswith("experts"):
        return "expert actor"
    if name.startswith("worker"):
        return "attention worker"
    parts = ("gcs_server", "raylet", "ray::", "/ray/", "dashboard", "log_monitor", "ray-dashboard")
    return "ray system" if any(part in command for part in parts) else "other"


def memory_figures(samples: Samples, driver: int, actors: Mapping[int, str]) -> dict[str, Any]:
    """Peak of the sum, what made it up then, and each group's own peak."""

    def groups(pss: Mapping[int, int]) -> dict[str, int]:
        sums: dict[str, int] = {}
        for pid, size in pss.items():
            kind = group(pid, samples.processes[pid].command, driver, actors)
            sums[kind] = sums.get(kind, 0) + size
        return dict(sorted(sums.items()))

    sums = [sum(pss.values()) for pss in samples.pss]
    if not sums:
        return {"samples": 0}
    top = sums.index(max(sums))
    each = [groups(pss) for pss in samples.pss]
    steps = [b - a for a, b in zip(samples.times, samples.times[1:], strict=False)]
    return {
        "peak_pss_bytes": sums[top],
        "peak_at_s": round(samples.times[top], 2),
        "peak_by_group": each[top],
        "peak_of_group": {kind: max(e.get(kind, 0) for e in each) for kind in sorted(set().union(*each))},
        "own_peaks_bytes": sum(seen.peak for seen in samples.processes.values()),
        "processes": len(samples.pss[top]),
        "samples": len(sums),
        "interval_s": round(statistics.median(steps), 3) if steps else None,
    }


def run_figures(run: Path) -> dict[str, Any]:
    """What the run wrote about itself; what is missing (it failed early) is left out."""
    figures: dict[str, Any] = {"run": run.name}
    if (run / "plan.json").is_file():
        plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
        budgets = [b for b in plan["memory"] if b["device"].startswith("socket")]
        figures["plan_bytes"] = sum(budget["total"] for budget in budgets)
        figures["plan_items"] = [{"device": b["device"], **b["items"]} for b in budgets]
        figures["model"], figures["format"] = plan["model"]["model_type"], plan["model"]["expert_format"]
        figures["tokens_per_step"] = plan["tokens_per_step"]
        figures["activations"] = sorted({actor["activations"] for actor in plan["experts"]})
        if "prediction" in plan:
            figures["predicted_tokens_per_s"] = plan["prediction"]["tokens_per_s"]
    if (run / "env.json").is_file():
        actors = json.loads((run / "env.json").read_text(encoding="utf-8")).get("actors", [])
        figures["actor_pids"] = {int(actor["pid"]): str(actor["actor"]) for actor in actors}
        figures["load"] = {
            actor["actor"]: {
                "weight_bytes": actor["weight_bytes"],
                "seconds": actor["load_seconds"],
                "gb_per_s": actor["weight_bytes"] / actor["load_seconds"] / 1e9,
            }
            for actor in actors
            if actor.get("load_seconds")
        }
    if (run / "metrics.jsonl").is_file():
        steps = applied_steps(run)
        measured = steps[1:] or steps  # the first warms up
        if measured:
            figures["steps"] = len(steps)
            figures["tokens"] = statistics.median(step["tokens"] for step in measured)
            figures["median_s"] = statistics.median(step["seconds"] for step in measured)
            figures["tokens_per_s"] = statistics.median(step["tokens_per_s"] for step in measured)
            figures["losses"] = [step["loss"] for step in steps]
            figures["gpu"] = gpu_figures(plan["memory"] if "plan_bytes" in figures else [], steps)
    return figures


def gpu_figures(budgets: Sequence[Mapping[str, Any]], steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """By device: what torch allocated at most, and the plan without CUDA's own ("runtime"), in bytes."""
    found = {}
    for budget in budgets:
        key = f"gpu_memory_bytes_{budget['device'].replace(':', '')}"
        peak = max((step.get(key, 0) for step in steps), default=0)
        if peak:
            planned = budget["total"] - budget["items"].get("runtime", 0)
            found[budget["device"]] = {"peak_bytes": peak, "plan_bytes": planned}
    return found


def against_plan(samples: Samples, run: Mapping[str, Any]) -> dict[str, Any]:
    """The run's figures, and peak / plan where both are known."""
    figures = {key: value for key, value in run.items() if key != "actor_pids"}
    peak = max((sum(pss.values()) for pss in samples.pss), default=0)
    if peak and run.get("plan_bytes"):
        figures["peak_to_plan"] = round(peak / run["plan_bytes"], 4)
    return figures


if __name__ == "__main__":
    sys.exit(main())
