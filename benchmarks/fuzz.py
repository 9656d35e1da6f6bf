"""Damaged input, by the thousand: is every fault named, in time and in bounded memory?

    python benchmarks/fuzz.py --mutations 10000 --seed 0 --json out.json     # make fuzz
    python benchmarks/fuzz.py --only recipe:17                       # one mutation again, with its traceback

Good files of every kind that kt_ray reads, or has read for it, are damaged in one place each: bits flip, ends
go, fields change their type, numbers grow, lists nest, encodings change. What reads them must succeed or
raise one short `UserError`. Anything else (another exception, a signal, more than SECONDS, more than MEMORY)
is a fault and printed with the number that repeats it; the exit code is then 1.

Mutations run in a forked child, one after the other; a child that dies or hangs is replaced.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import common
import psutil
from fuzz_damage import mutate
from fuzz_targets import Target, targets, write_files

sys.path.insert(0, str(common.REPO))

SECONDS = 10.0  # of a core that one mutation may take; a good file takes well under one
WAIT = 120.0  # seconds by the clock: what only waits takes no core
MEMORY = 4 << 30  # bytes of address space beyond what the child begins with


def attempt(target: Target, name: str, number: int, seed: int, place: Path) -> tuple[str, str]:
    """("read" | "refused" | "fault", what): mutation `number` of a target."""
    from kt_ray.errors import UserError

    chance = random.Random(f"{seed} {name} {number}")
    damaged = chance.choice(list(target.damaged))
    changed = mutate(chance, damaged, target.files[damaged])
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(place.parent / "good" / name, place, copy_function=os.link)
    (place / damaged).unlink()
    (place / damaged).write_bytes(changed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            target.read(place)
    except UserError as error:
        line = error.line()
        return (
            ("fault", f"{damaged}: an error line of {len(line)} characters")
            if len(line) > 5000
            else ("refused", line)
        )
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "kt_ray/" in f.filename]
        at = f"{frames[-1].filename.rpartition('kt_ray/')[2]}:{frames[-1].lineno}" if frames else "?"
        return "fault", f"{damaged}: {type(error).__name__} at {at}: {str(error)[:200]}"
    return "read", ""


def _child(found: dict[str, Target], jobs: list[tuple[str, int]], seed: int, pipe: Any, place: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of libraries
    for name, number in jobs:
        pipe.send(attempt(found[name], name, number, seed, place))
    pipe.close()


def _answers_in_time(pipe: Any, pid: int | None) -> bool:
    def used() -> float:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0  # it has ended, and the pipe says so
        return float(times.user + times.system)

    begun, before = time.monotonic(), used()
    while not pipe.poll(0.5):
        if used() - before > SECONDS or time.monotonic() - begun > WAIT:
            return False
    return True


def run(
    found: dict[str, Target], mutations: int, seed: int, root: Path
) -> Iterator[tuple[str, int, str, str]]:
    """(target, number, outcome, what) of every mutation; a child that dies or hangs is replaced."""
    total = sum(target.weight for target in found.values())
    jobs = [
        (name, number)
        for name, target in found.items()
        for number in range(max(1, round(mutations * target.weight / total)))
    ]
    context = multiprocessing.get_context("fork")
    while jobs:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(found, jobs, seed, theirs, root / "place"))
        child.start()
        theirs.close()
        try:
            while jobs:
                if not _answers_in_time(ours, child.pid):
                    outcome = "fault", f"no end after {SECONDS:g} s of a core, or {WAIT:g} s"
                else:
                    outcome = ours.recv()
                (name, number), jobs = jobs[0], jobs[1:]
                yield name, number, *outcome
                if outcome[1].startswith("no end"):
                    break
        except EOFError:
            child.join()
            (name, number), jobs = jobs[0], jobs[1:]
            code = child.exitcode or 0
            died = signal.Signals(-code).name if code < 0 else code
            yield name, number, "fault", f"the process ended with {died}"
        finally:
            if child.is_alive() and jobs:
                child.kill()
            child.join()
            ours.close()


def summary(results: Sequence[tuple[str, int, str, str]]) -> list[dict[str, Any]]:
    """Per target: mutations, read, refused, faults with the numbers that repeat them."""
    records: dict[str, dict[str, Any]] = {}
    for name, number, outcome, what in results:
        counts: dict[str, Any] = {"mutations": 0, "read": 0, "refused": 0, "faults": {}}
        record = records.setdefault(name, {"target": name, **counts})
        record["mutations"] += 1
        if outcome == "fault":
            record["faults"][f"{name}:{number}"] = what
        else:
            record[outcome] += 1
    return list(records.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", help="names, with commas; default: all")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="one mutation, in this process")
    parser.add_argument("--json", metavar="FILE", help="write the records here")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    about, begun = common.machine(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = targets(root)
        for name, target in found.items():
            write_files(root / "good" / name, target.files)
        if given.only:
            name, _, number = given.only.rpartition(":")
            print(attempt(found[name], name, int(number), given.seed, root / "place"))
            found[name].read(root / "place")
            return 0
        if given.targets:
            found = {name: found[name] for name in given.targets.split(",")}
        for name, target in found.items():  # good files are read
            with contextlib.redirect_stdout(io.StringIO()):
                target.read(root / "good" / name)
        results = []
        for result in run(found, given.mutations, given.seed, root):
            results.append(result)
            if result[2] == "fault":
                print(f"{result[0]}:{result[1]}  {result[3]}", flush=True)
    records = summary(results)
    faults = sum(len(record["faults"]) for record in records)
    outcomes = collections.Counter(outcome for _, _, outcome, _ in results)
    seconds = time.monotonic() - begun
    print(f"{len(results)} mutations in {seconds:.0f} s: {dict(outcomes)}, {faults} faults")
    if given.json:
        common.write_json(given.json, [{"seed": given.seed, "seconds": round(seconds)}, *records], about)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
