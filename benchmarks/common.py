"""What the benchmarks share: the machine, the commit, the JSON frame, jobs in processes, and looks at /proc.

Every benchmark writes {"machine": {...}, "commit": "...", "records": [{...}, ...]}.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

REPO = Path(__file__).resolve().parents[1]
_PACKAGES = ("torch", "transformers", "peft", "ray", "numpy")
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


def machine() -> dict[str, Any]:
    """The machine without its name: CPU, cores this process may use, memory, versions, load now."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info) if value}
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "cpu": fields.get("model name") or platform.processor() or platform.machine(),
        "cpu_family": fields.get("cpu family", ""),
        "cpu_model": fields.get("model", ""),
        "isa": [flag for flag in _FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "load_before": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def applied_steps(run: Path) -> list[dict[str, Any]]:
    """The records of a run's steps but those that it skipped, which have no figures of time or memory."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line and not line.get("skipped")]


def commit() -> str:
    """The checkout's commit, "+" behind it when tracked files are changed; "" outside a checkout."""
    from kt_ray.runs.environment import git_commit

    return git_commit() or ""


def frame(records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """The JSON text of every benchmark. `about` is `machine()` as it was before the measurements."""
    whole = {"machine": dict(about), "commit": commit(), "records": [dict(r) for r in records]}
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def write_json(path: str | Path, records: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> None:
    """`frame` into a file, whole or not at all; its directories are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}.partial")
    beside.write_text(frame(records, about), encoding="utf-8")
    beside.replace(target)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """--json, --threads and --wait-quiet, which every benchmark has."""
    cpus = len(os.sched_getaffinity(0))
    parser.add_argument("--json", metavar="FILE", help="write the records here")
    parser.add_argument("--threads", type=int, default=cpus, help="CPUs that a run may use (default: all)")
    parser.add_argument(
        "--wait-quiet",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait up to this long for an idle machine before measuring",
    )


def wait_quiet(seconds: float, below: float = 0.2, window: float = 20.0) -> bool:
    """Wait, `seconds` at the most, for a `window` in which others use less than `below` CPUs.

    Not by the load average: it counts what only waits, and remembers for minutes.
    """
    deadline = time.monotonic() + seconds
    while True:
        if psutil.cpu_percent(interval=window) / 100 * (os.cpu_count() or 1) < below:
            return True
        if time.monotonic() >= deadline:
            return False


def quiet_machine(seconds: float) -> dict[str, Any]:
    """`machine()`, after waiting up to `seconds` for an idle one (--wait-quiet; 0 = at once)."""
    if seconds and not wait_quiet(seconds):
        print("the machine did not get quiet: see load_before", file=sys.stderr)
    return machine()


def tree() -> list[psutil.Process]:
    """This process and all its descendants."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> tuple[float, float]:
    """(CPU seconds of this process tree, busy CPU seconds of the whole machine) so far."""
    own = 0.0
    for process in tree():
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        own += times.user + times.system
    total = psutil.cpu_times()
    return own, sum(total) - total.idle - total.iowait - getattr(total, "guest", 0.0)


def memory() -> dict[str, int]:
    """Memory of this process tree.

    Returns:
        peak_rss_bytes: sum of each process's own peak of resident memory (shared pages count in every
            process that maps them); pss_bytes: now, shared pages divided among those that map them.
    """
    peak = pss = 0
    for process in tree():
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii", errors="replace")
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii", errors="replace")
        except OSError:  # ended meanwhile
            continue
        peak += kilobytes(status, "VmHWM")
        pss += kilobytes(rollup, "Pss")
    return {"peak_rss_bytes": peak, "pss_bytes": pss}


def kilobytes(text: str, key: str) -> int:
    """Bytes of a "Key:  123 kB" line of /proc; 0 without one."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0


class JobFailed(RuntimeError):
    """A child did not get to its end; says why."""


def run_child(
    program: str, job: Any, name: str, scratch: Path, spare_bytes: int, timeout: float
) -> dict[str, Any]:
    """What a program beside this file, in a process of its own, makes of a job.

    Args:
        program: takes the file of the job and the file for the result.
        job: a dataclass.
        spare_bytes: memory of the machine that must stay available; below it the process is ended, before
            the kernel ends one of its own choice.
        timeout: seconds.

    Raises:
        JobFailed: it failed, took too long, or too much memory; with the end of what it said.
    """
    job_file, result_file, log_file = scratch / "job.json", scratch / "result.json", scratch / "log"
    job_file.write_text(json.dumps(dataclasses.asdict(job)), encoding="utf-8")
    result_file.unlink(missing_ok=True)
    command = [sys.executable, str(Path(__file__).with_name(program)), str(job_file), str(result_file)]
    with log_file.open("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            why = _watch(process, spare_bytes, timeout)
        finally:
            if process.poll() is None:
                _end(process)
    if why or process.returncode or not result_file.is_file():
        tail = "\n".join(log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-30:])
        raise JobFailed(f"{name}: {why or f'exit code {process.returncode}'}\n{tail}")
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def _watch(process: subprocess.Popen[bytes], spare_bytes: int, timeout: float) -> str:
    """Wait for the end. Returns why it must not be waited for, "" when it ended by itself."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            process.wait(0.25)
            return ""
        except subprocess.TimeoutExpired:
            pass
        if time.monotonic() > deadline:
            return f"not done within {timeout:.0f} s"
        if (available := psutil.virtual_memory().available) < spare_bytes:
            return f"out of memory: {available / 1e9:.1f} GB available, {spare_bytes / 1e9:.1f} GB must stay"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()
