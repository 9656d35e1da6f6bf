"""mode=accept: proves a machine. Tests, measures and trains on it, and writes everything down as it goes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from kt_ray.accept import fast, here, right, whole_runs
from kt_ray.accept.accept_page import ARCHIVE, verdict, write_archive, write_pages
from kt_ray.accept.items import FAIL, QUICK, REPO, SHARES, Directory, Item, complete
from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.hardware.describe import memory_free, this_host
from kt_ray.hardware.machine import Hardware
from kt_ray.modes.doctor import examine
from kt_ray.runs.environment import environment
from kt_ray.terminal import screen_console

LATEST = "latest"


def run(config: Config) -> int:
    """Returns 0, or 1 where a claim fails.

    Raises:
        UserError: no checkout (tests/ and benchmarks/ are needed), nothing to resume, nothing at accept.kt.
    """
    _check(config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs is ended, what is there is kept
    directory, hardware = Directory(_directory(config)), this_host()
    console = screen_console(file=sys.stdout, highlight=False, soft_wrap=True)
    console.print(f"acceptance {directory.path}", markup=False)
    about = _about(directory.path, hardware)
    _run_all(config, list(planned(config, hardware)), directory, about, console)
    results = directory.results()
    console.print(verdict(results), markup=False)
    for claim in (c for r in results for c in r.claims if c.status == FAIL):
        console.print(f"FAIL {claim.text}: {claim.found} (required: {claim.required})", markup=False)
    console.print(f"page       {directory.path / 'page.html'}", markup=False)
    console.print(f"to send    {directory.path / ARCHIVE}", markup=False)
    if any(result.cut for result in results):
        console.print(f"the rest   python launch.py mode=accept accept.resume={LATEST}", markup=False)
    return 1 if any(result.status == FAIL for result in results) else 0


def _check(config: Config) -> None:
    for folder in ("tests", "benchmarks"):
        if not (REPO / folder).is_dir():
            raise UserError(
                "mode=accept runs the tests and benchmarks of a checkout",
                where=str(REPO),
                required=f"{folder}/ beside kt_ray/",
                remedy="clone the repository, install it there (make check), and start this command from it",
            )
    if config.accept.kt is not None and not Path(config.accept.kt).exists():
        raise UserError(
            "there is no kt-kernel",
            where=f"accept.kt={config.accept.kt}",
            required="an environment's directory or a wheel",
            remedy="correct accept.kt, or leave it out to take kt-kernel from PyPI",
        )


def planned(config: Config, hardware: Hardware) -> Iterator[Item]:
    """Items of the chosen sections, in order of worth."""
    free, quick = memory_free(), config.accept.only == [QUICK]
    others = [
        *right.items(config, hardware, quick),
        *fast.items(config, hardware, free, quick),
        *whole_runs.items(config, hardware, free, quick),
    ]
    only = set(SHARES) if quick or not config.accept.only else set(config.accept.only)
    everything = [here.item(config, hardware, others, examine), *others]
    yield from (item for item in everything if item.section in only)


def _run_all(
    config: Config, items: list[Item], directory: Directory, about: dict[str, Any], console: Console
) -> None:
    """Every item that has no result yet, within its section's part of the minutes; the page after each."""
    old = {item: directory.read(item.section, item.name) for item in items}
    pending = [item for item in items if not (result := old[item]) or not result.counts_for(item)]
    deadline, ends = time.monotonic() + 60 * config.accept.minutes, dict[str, float]()
    for number, item in enumerate(pending):
        console.print(f"{item.section:6} {item.title} …", markup=False, end="")
        seconds = _seconds(item, pending[number + 1 :], deadline - time.monotonic(), ends)
        try:
            result = complete(item, directory, seconds, str(about["git_commit"] or ""))
            write_pages(directory.path, directory.results(), about)
            write_archive(directory.path)
        except OSError as error:
            raise UserError(
                "the acceptance's results cannot be written",
                where=str(directory.path),
                observed=error.strerror or error,
                remedy=f"free space, then go on with accept.resume={LATEST}",
            ) from error
        console.print(f" {result.status} ({result.seconds:.0f} s)", markup=False)


def _seconds(item: Item, others: Sequence[Item], left: float, ends: dict[str, float]) -> float:
    """What an item gets of the seconds that are left.

    Twice an equal part of what its section has: what it leaves is the others'.

    Args:
        ends: when each section is over, by time.monotonic(). Filled in when its first item begins.
    """
    possible, now = [other for other in others if not other.missing], time.monotonic()
    sections = {item.section, *(other.section for other in possible)}
    share = SHARES[item.section] / sum(SHARES[name] for name in sections)
    own = max(0.0, ends.setdefault(item.section, now + left * share) - now)
    beside = sum(other.section == item.section for other in possible)
    return min(left, max(own * 2 / (beside + 2), item.least))


def _about(path: Path, hardware: Hardware) -> dict[str, Any]:
    """machine.json: what env.json of a run says of the machine, without its name, and the GPUs."""
    about = environment()
    for key in ("hostname", "pid", "argv"):
        del about[key]
    about["gpus"] = [f"{gpu.name}, {gpu.memory_bytes / 2**30:.1f} GiB" for gpu in hardware.gpus]
    about["isas"] = list(hardware.isas)
    write_atomic(path / "machine.json", json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return about


def _directory(config: Config) -> Path:
    """The acceptance's directory: a new one, or the one that accept.resume means."""
    root = Path(config.accept.root)
    host = re.sub(r"[^\w.-]", "-", socket.gethostname()) or "host"
    if config.accept.resume is None:
        path = root / f"{host}-{time.strftime('%Y%m%d-%H%M%S')}"
        _make(path)
        return path
    if config.accept.resume != LATEST:
        chosen = Path(config.accept.resume)
        known = [chosen] if (chosen / "machine.json").is_file() else []
    else:
        # "node-2" is another host than "node".
        own = re.compile(rf"{re.escape(host)}-\d{{8}}-\d{{6}}")
        files = [file for file in root.glob("*/machine.json") if own.fullmatch(file.parent.name)]
        known = [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]
    if not known:
        raise UserError(
            f"accept.resume={config.accept.resume}: there is no acceptance to go on with",
            where=str(root),
            required="a directory that mode=accept has written on this host",
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
