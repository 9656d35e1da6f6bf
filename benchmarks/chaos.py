"""Does a run survive? Faults at random moments of training, each run compared with an undisturbed one.

    python benchmarks/chaos.py --faults 20 --cluster ray --json out.json     real processes and signals
    python benchmarks/chaos.py --faults 1000 --inside --json out.json        deaths of actors in one process
    python benchmarks/chaos.py --faults 50 --serve --json out.json           a server whose clients ask on

Runs of the demo model under `trainer.restarts` follow one another until so many faults have happened. Every
step must then be recorded once with the undisturbed run's loss, the adapter must be the same file, no process
of the run and no half-written file may be left, and nobody may have helped. What a fault is and what it hits
are drawn from `--seed`; the moment is the machine's. Exit code 1: a run was not as it should be.

A run may end by itself only where a fault took away what its user alone can give (a disk, the model): with
exit code 2 and a line that says so. It is then started again, and the record keeps the line. Faults that
this machine does not allow (a disk that may be filled, a memory cgroup) are left out, and named.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from chaos_faults import TOLD, TRAINING, Faults, still_running
from chaos_server import serve

sys.path.insert(0, str(common.REPO))

STEPS = 60
SETTINGS = (
    *(
        "data=demo",
        "data.limit=60",
        "trainer.batch_size=4",
        "trainer.eval_every=20",
        f"trainer.max_steps={STEPS}",
    ),
    *("trainer.save_every=5", "trainer.restarts=1000", "trainer.recoveries=1000", "tracking.plot=false"),
    *("eval.after_training=2", "tracking.progress=false", "model.build=null"),
)
UNDER = {
    "ray": ("cluster.address=local", "cluster.dashboard=true", "rule=cpu_2workers_2sockets"),
    "local": ("cluster=local",),
}
BASE = common.REPO / "kt_ray" / "demo" / "assets" / "base"
RAY = ("actor", "raylet", "gcs", "dashboard")  # what is no process with cluster=local
DEEPSEEK = {"load_minutes": 5.7, "start_minutes": 1.0, "save_minutes": 30.0, "save_seconds": 20.0}


class Campaign:
    """Runs with faults in a directory of their own.

    Attributes:
        faults: one record each; runs: one record each; problems: what was not as it should be.
    """

    def __init__(self, work: Path, under: str, seed: int, every: float, own_disk: bool) -> None:
        self.work, self.under, self.every = work, under, every
        self.model = work / "model"
        shutil.copytree(BASE, self.model)
        kinds = {k: w for k, w in TRAINING.items() if under == "ray" or k[1] not in RAY}
        self.harm = Faults(work, self.model, seed, kinds, own_disk=own_disk)
        self.harm.second_driver = self._second
        self.faults: list[dict[str, Any]] = []
        self.missed: Counter[str] = Counter()  # faults that found nothing to hit
        self.runs: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def undisturbed(self) -> None:
        """The run that all others must equal."""
        start = time.monotonic()
        process = self._start("undisturbed", log="undisturbed")
        if process.wait() != 0:
            raise SystemExit((self.work / "undisturbed.log").read_text())
        self.calm_seconds = time.monotonic() - start
        self.expected = outcome(self.work / "runs" / "undisturbed")

    def go(self, faults: int, seconds: float) -> None:
        """Runs until so many faults have happened, or the time is over."""
        deadline = time.monotonic() + seconds
        while len(self.faults) < faults and time.monotonic() < deadline and not self.problems:
            self._run(f"run-{len(self.runs)}", faults, deadline)

    def _start(self, name: str, *more: str, log: str) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "launch.py", *SETTINGS, *UNDER[self.under], f"model.path={self.model}"),
            *(f"run.root={self.work / 'runs'}", f"run.name={name}", *more),
        ]
        with (self.work / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                command,
                cwd=common.REPO,
                env=self.harm.environment,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def _run(self, name: str, faults: int, deadline: float) -> None:
        """One run to its end. It may stop on the way only where it says what of the user's it lacks."""
        run, start = self.work / "runs" / name, time.monotonic()
        before, told = len(self.faults), []
        begun = before
        more: tuple[str, ...] = ()
        while True:
            code = self._hurt(run, self._start(name, *more, log=name), faults, deadline)
            line = self._lacking(run, code, self.faults[begun:])
            if not line:
                break
            told.append(line)
            print(f"  {name} told: {line}", flush=True)
            saved = any((run / "checkpoints").glob("step_*"))
            begun, more = len(self.faults), ("trainer.resume=latest" if saved else "run.overwrite=true",)
        wall = time.monotonic() - start
        self.problems += [f"{name}: {problem}" for problem in self._judge(run, code)]
        self.runs.append(
            {
                "run": name,
                "faults": len(self.faults) - before,
                "told": told,
                "seconds": wall,
                "goodput": self.calm_seconds / wall,
                "exit_code": code,
            }
        )
        print(f"{name}: {self.runs[-1]}", flush=True)

    def _hurt(self, run: Path, process: subprocess.Popen[bytes], faults: int, deadline: float) -> int:
        """Faults until the process ends; its exit code."""
        due = time.monotonic() + self.harm.random.uniform(0.2, 1.0) * self.every
        while process.poll() is None:
            time.sleep(0.05)
            if time.monotonic() > deadline + 600:
                self.problems.append(f"{run.name} did not end")
                process.kill()
            elif time.monotonic() > due and len(self.faults) < faults and time.monotonic() < deadline:
                phase = self._phase(run)
                what, target, hit = self.harm.strike(run)
                if not hit:
                    self.missed[f"{what} {target}"] += 1
                else:
                    self.faults.append(
                        {"run": run.name, "what": what, "target": target, "phase": phase, "hit": hit}
                    )
                    print(f"  {what} {target} in {phase}: {hit}", flush=True)
                due = time.monotonic() + self.harm.random.uniform(0.2, 1.8) * self.every
        return process.returncode

    def _lacking(self, run: Path, code: int, faults: list[dict[str, Any]]) -> str:
        """The line of a run that ended because a fault took away what only its user can give."""
        lines = (self.work / f"{run.name}.log").read_text(errors="replace").splitlines()
        last = next((line for line in reversed(lines) if line.startswith("error: ")), "")
        words = [word for fault in faults for word in TOLD.get(fault["what"], ())]
        return last if code == 2 and "To fix: " in last and any(word in last for word in words) else ""

    def _second(self, run: Path) -> str:
        # Near its end the first one may let go of the run; what overwrites it then does what it was told.
        early = self._phase(run) in ("loading", "steps")
        how = "run.overwrite=true" if early else "trainer.resume=latest"
        log = f"second-{len(self.faults)}"
        process = self._start(run.name, how, "trainer.restarts=0", log=log)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:  # the first one had just ended, and this one holds the run now
            process.terminate()
            return f"took over, ended with {process.wait()}"
        text = (self.work / f"{log}.log").read_text()
        if code != 2 or "another run writes this directory" not in text:
            self.problems.append(f"a second driver ended with {code}")
        return "refused"

    def _phase(self, run: Path) -> str:
        """What the run is at, as its files show."""
        if not self.harm.processes(run, "driver"):
            return "starting"
        if list((run / "checkpoints").glob(".*.partial")):
            return "checkpoint"
        if (run / "adapter" / "adapter_config.json").exists():
            return "answers"
        if (run / "adapter").exists():
            return "adapter"
        with contextlib.suppress(OSError):
            lines = (run / "train.log").read_text(errors="replace").splitlines()
            recent = [line for line in lines[-8:] if "trainer" in line or "cluster" in line or "load" in line]
            if recent and ("loading" in recent[-1] or "Ray:" in recent[-1]):
                return "loading"
            if recent and "lost:" in recent[-1]:
                return "recovery"
            if recent and (step := re.search(r" step (\d+)", recent[-1])):
                return "evaluation" if int(step[1]) % 20 == 0 else "steps"
        return "loading"

    # -- afterwards ---------------------------------------------------------------------------

    def _judge(self, run: Path, code: int) -> Iterator[str]:
        if code != 0:
            tail = (self.work / f"{run.name}.log").read_text(errors="replace").splitlines()[-5:]
            yield f"exit code {code}: {' | '.join(tail)}"
        else:
            losses, adapter = outcome(run)
            if losses != self.expected[0]:
                differ = [a for a, b in zip(losses, self.expected[0], strict=False) if a != b][:3]
                yield f"{len(losses)} losses, others than the undisturbed run's: {differ}"
            if adapter != self.expected[1]:
                yield "another adapter"
        left = [str(p.relative_to(run)) for p in run.rglob("*") if p.name.endswith((".partial", ".old"))]
        if left:
            yield f"left behind: {left}"
        yield from still_running(self.harm)


def outcome(run: Path) -> tuple[list[tuple[int, str, float]], bytes]:
    """(step, kind, loss) of every record with a loss or a held-out loss, and the adapter's bytes."""
    records = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    losses = [(r["step"], kind, r[kind]) for r in records for kind in ("loss", "eval_loss") if kind in r]
    losses.sort()
    return losses, (run / "adapter" / "adapter_model.safetensors").read_bytes()


@contextlib.contextmanager
def disk() -> Iterator[tuple[Path, bool]]:
    """A directory for a campaign, and whether its runs/ is a disk of its own, which may be filled."""
    work = Path(tempfile.mkdtemp(prefix="chaos-"))
    (work / "runs").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(work / "runs")]
    try:
        own = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        own = False
    try:
        yield work, own
    finally:
        if own:
            subprocess.run(["umount", "-l", str(work / "runs")], check=False)
        shutil.rmtree(work, ignore_errors=True)


def kept_logs(work: Path) -> Path:
    """A directory with the campaign's logs, which stays."""
    kept = Path(tempfile.mkdtemp(prefix="chaos-problem-"))
    for log in work.glob("*.log"):
        shutil.copy(log, kept)
    return kept


def inside(faults: int, seed: int) -> dict[str, Any]:
    """Deaths of actors of a tiny model in this process, at any message of any call; every run is compared."""
    from tests.helpers.hf_reference import build_checkpoint
    from tests.helpers.mortal import Death
    from tests.train.test_recovery import EXPERTS, WORKERS, Run, check

    draw, happened, runs, start = random.Random(seed), 0, 0, time.monotonic()
    methods = ("run_pass", "prepare", "commit", "save_shard", "publish", "restore", "load", "discard")
    seen: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        model = build_checkpoint(Path(folder, "model"), "deepseek_v3")
        calm = Run(model, Path(folder, "calm"), [], "rule=cpu_2workers_2sockets").go()
        while happened < faults:
            deaths = [
                Death(
                    draw.choice([*WORKERS, *EXPERTS]),
                    method,
                    draw.randint(1, 20),
                    draw.choice(
                        ["before", "after", *range(1, 12)] if method == "run_pass" else ["before", "after"]
                    ),
                )
                for method in draw.choices(methods, weights=(8, 2, 2, 2, 1, 1, 1, 1), k=draw.randint(8, 32))
            ]
            settings = ("rule=cpu_2workers_2sockets", f"trainer.save_every={draw.randint(0, 3)}")
            run = Run(model, Path(folder, f"run-{runs}"), deaths, *settings, "trainer.recoveries=1000").go()
            if run.cluster.happened:
                check(run, calm)
            seen.update(death.method for death in deaths)
            happened, runs = happened + run.cluster.happened, runs + 1
            shutil.rmtree(Path(folder, f"run-{runs - 1}"), ignore_errors=True)
    return {"faults": happened, "runs": runs, "seconds": time.monotonic() - start, "drawn": dict(seen)}


def deepseek_goodput() -> dict[str, Any]:
    """Computed, not measured: DeepSeek-V3 with one death of the driver per 30 minutes.

    A death costs the start, the load, and on average half of the time between two checkpoints. Load: the plan
    of rule amx_4gpu at 2 GB/s; a checkpoint of 40 GB at 2 GB/s.
    """
    d = DEEPSEEK
    saving = d["save_seconds"] / 60 / d["save_minutes"]
    result = {}
    for interval in (d["save_minutes"], 5.0):
        lost = d["load_minutes"] + d["start_minutes"] + interval / 2
        share = max(0.0, 1 - lost / 30.0) * (1 - saving * d["save_minutes"] / interval)
        result[f"saving every {interval:g} min"] = share
    return {**d, "deaths_per_hour": 2, "goodput": result}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=60.0, help="no new faults after these")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", choices=sorted(UNDER), default="ray")
    parser.add_argument("--inside", action="store_true")
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    about = common.machine()
    if given.inside:
        record = {"impl": "kt_ray", "kind": "inside", "seed": given.seed, **inside(given.faults, given.seed)}
        print(record)
        if given.json:
            common.write_json(given.json, [record], about)
        return 0
    with disk() as (work, own):
        if given.serve:
            record = serve(work, given.faults, 60 * given.minutes, given.every, given.seed)
            if record["problems"]:
                print(f"logs: {kept_logs(work)}")
            if given.json:
                common.write_json(given.json, [record], about)
            print("\n".join([str(record["answers"]), *record["problems"]]))
            return 1 if record["problems"] or not record["faults"] else 0
        campaign = Campaign(work, given.cluster, given.seed, given.every, own)
        campaign.undisturbed()
        campaign.go(given.faults, 60 * given.minutes)
        seconds = sum(run["seconds"] for run in campaign.runs)
        record = {
            "impl": "kt_ray",
            "kind": "processes",
            "cluster": given.cluster,
            "seed": given.seed,
            "every_seconds": given.every,
            "left_out": campaign.harm.left_out,
            "faults": len(campaign.faults),
            "by_kind": dict(Counter(f"{f['what']} {f['target']}" for f in campaign.faults)),
            "missed": dict(campaign.missed),
            "by_phase": dict(Counter(f["phase"] for f in campaign.faults)),
            "runs": campaign.runs,
            "calm_seconds": campaign.calm_seconds,
            "goodput": len(campaign.runs) * campaign.calm_seconds / max(seconds, 1e-9),
            "deepseek_v3": deepseek_goodput(),
            "problems": campaign.problems,
            "log": campaign.faults,
        }
        campaign.harm.close()
        if campaign.problems:
            kept = kept_logs(work)
            shutil.copytree(
                work / "runs", kept / "runs", symlinks=True, ignore=shutil.ignore_patterns("*.safetensors")
            )
            print(f"logs: {kept}")
    if given.json:
        common.write_json(given.json, [record], about)
    print(f"{record['faults']} faults in {len(record['runs'])} runs, goodput {record['goodput']:.2f}")
    print("\n".join(record["problems"]) or "every run as undisturbed; nothing left; no hand was needed")
    return 1 if record["problems"] or not record["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
