"""mode=accept: proves a machine. Tests, measures and trains on it, and writes everything down as it goes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from rich.console import Console

from kt_ray.accept import fast, here, right, whole_runs
from kt_ray.accept.accept_page import verdict, write_archive, write_pages
from kt_ray.accept.items import FAIL, QUICK, REPO, SHARES, Directory, Item, Result, do
from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.hardware.describe import this_host
from kt_ray.hardware.machine import Hardware
from kt_ray.modes.doctor import examine
from kt_ray.runs.environment import environment

LATEST = "latest"
DONE = ("pass", "warn", "fail", "skip")  # not again when an acceptance is resumed; what was cut is


def run(config: Config) -> int:
    """Returns 0, or 1 where a claim fails.

    Raises:
        UserError: no checkout (tests/ and benchmarks/ are needed), nothing to resume.
    """
    for folder in ("tests", "benchmarks"):
        if not (REPO / folder).is_dir():
            raise UserError(
                "mode=accept runs the tests and benchmarks of a checkout",
                where=str(REPO),
                required=f"{folder}/ beside kt_ray/",
                remedy="clone the repository, install it there (make demo), and start this command from it",
            )
    directory = Directory(_directory(config))
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"acceptance {directory.path}", markup=False)
    hardware = this_host()
    write_about(directory.path, hardware)
    quick = config.accept.only == [QUICK]
    items = list(planned(config, hardware, quick))
    results = _run_all(config, items, directory, console)
    archive = write_archive(directory.path)
    console.print(f"{verdict(results)}", markup=False)
    for claim in (c for r in results for c in r.claims if c.status == FAIL):
        console.print(f"FAIL {claim.text}: {claim.found} (required: {claim.required})", markup=False)
    console.print(f"page       {directory.path / 'page.html'}", markup=False)
    console.print(f"to send    {archive}", markup=False)
    if any(r.status == "cut" for r in results):
        console.print(f"the rest   python launch.py mode=accept accept.resume={LATEST}", markup=False)
    return 1 if any(r.status == FAIL for r in results) else 0


def planned(config: Config, hardware: Hardware, quick: bool) -> Iterator[Item]:
    """Items of the chosen sections, in order of worth."""
    free = psutil.virtual_memory().available
    others = [
        *right.items(hardware, quick),
        *fast.items(config, hardware, free, quick),
        *whole_runs.items(config, hardware, free, quick),
    ]
    only = set(SHARES) if quick or not config.accept.only else set(config.accept.only)
    everything = [here.item(config, hardware, others, examine), *others]
    yield from (item for item in everything if item.section in only)


def _run_all(config: Config, items: list[Item], directory: Directory, console: Console) -> list[Result]:
    """Every item within its section's part of the minutes; the page after each."""
    about = json.loads((directory.path / "machine.json").read_text(encoding="utf-8"))
    sections = list(dict.fromkeys(item.section for item in items))
    whole = sum(SHARES[name] for name in sections)
    now = time.monotonic()
    ends, share = {}, 0.0
    for name in sections:
        share += SHARES[name] / whole
        ends[name] = now + 60 * config.accept.minutes * share
    results: list[Result] = []
    for number, item in enumerate(items):
        old = directory.read(item.section, item.name) if config.accept.resume else None
        if old is not None and old.status in DONE:
            result = old
        else:
            console.print(f"{item.section:6} {item.title} …", markup=False, end="")
            # Twice an equal part of what its section has left: what it leaves is the others'.
            others = sum(other.section == item.section for other in items[number + 1 :])
            result = do(item, directory, (ends[item.section] - time.monotonic()) * 2 / (others + 2))
            console.print(f" {result.status} ({result.seconds:.0f} s)", markup=False)
        results.append(result)
        write_pages(directory.path, results, about)
    return results


def write_about(path: Path, hardware: Hardware) -> None:
    """machine.json: what env.json of a run says of the machine, without its name, and the GPUs."""
    about = environment()
    for key in ("hostname", "pid", "argv"):
        del about[key]
    about["gpus"] = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in hardware.gpus]
    about["isas"] = list(hardware.isas)
    write_atomic(path / "machine.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")


def _directory(config: Config) -> Path:
    """The acceptance's directory: a new one, or the one that accept.resume means."""
    root = Path(config.accept.root)
    if config.accept.resume is None:
        host = re.sub(r"[^\w.-]", "-", socket.gethostname()) or "host"
        path = root / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}"
        _make(path)
        return path
    if config.accept.resume != LATEST:
        chosen = Path(config.accept.resume)
        known = [chosen] if (chosen / "machine.json").is_file() else []
    else:
        known = sorted(root.glob("*/machine.json"), key=lambda file: file.stat().st_mtime_ns)
        known = [file.parent for file in known]
    if not known:
        raise UserError(
            f"accept.resume={config.accept.resume}: there is no acceptance to go on with",
            where=str(root),
            required="a directory that mode=accept has written",
            remedy="leave accept.resume out, or set accept.root=<where acceptances are kept>",
        )
    return known[-1].resolve()


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            "the acceptance's directory cannot be made",
            where=str(path),
            observed=error.strerror or os.strerror(error.errno or 0),
            remedy="set accept.root=<a directory you may write to>",
        ) from error
