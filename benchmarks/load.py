#!/usr/bin/env python
"""How fast expert actors load, and how much memory that takes, beside `cat shards > /dev/null`.

    python benchmarks/load.py DIR --json out.json
    python benchmarks/load.py DIR --actors 2 --rounds 3 --conditions cold

Every actor is a process of its own, as under Ray, and holds an equal share of the experts of every layer
(`LocalExperts.load`, without LoRA). Rounds alternate `cat` and the actors, each under the same condition:

    cold    the shards' pages are dropped from the page cache before
    warm    all of them are read before; what then lies in the cache is noted (`cached_before`): a checkpoint
            near the size of memory does not fit beside what is loaded, and "warm" then means cold

With several actors, GB/s counts from the first that begins to the last that is done.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from child import Child
from common import add_common_arguments, quiet_machine, write_json

Result = dict[str, Any]
CONDITIONS = ("cold", "warm")


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    from kt_ray.checkpoint import CheckpointIndex, ExpertLayout

    index = CheckpointIndex.open(args.model_dir)
    layout = ExpertLayout.detect(index)
    if args.actors > layout.num_experts:
        sys.exit(f"--actors {args.actors}: the checkpoint has {layout.num_experts} experts per layer")
    about = quiet_machine(args.wait_quiet)
    records = []
    for condition in args.conditions.split(","):
        prepare = drop if condition == "cold" else fill
        rounds = []
        for number in range(args.rounds):
            parts: list[Callable[[], Result]] = [
                lambda: _cat(index.files),
                lambda: _load(args, layout.num_experts),
            ]
            result: Result = {}
            for part in parts if number % 2 == 0 else reversed(parts):
                prepare(index.files)
                result |= {"cached_before": round(cached(index.files), 3), **part()}
            rounds.append(result)
            print(
                f"{condition} {number + 1}/{args.rounds}: {result['gb_per_s']:.2f} GB/s, cat "
                f"{result['cat_gb_per_s']:.2f}, above what stays {result['peak_over_resident'] / 1e6:.0f} MB",
                flush=True,
            )
        records.append(summary(args, condition, rounds, index.nbytes, str(index.config.get("model_type"))))
    if args.json:
        write_json(args.json, records, about)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, help="a Hugging Face directory")
    parser.add_argument("--actors", type=int, default=1, help="processes that share the experts")
    parser.add_argument("--backend", default="auto", help="as rule.experts.backend")
    parser.add_argument("--conditions", default="cold,warm", help="of cold, warm")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for one load")
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    for name in ("actors", "rounds", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if unknown := set(args.conditions.split(",")) - set(CONDITIONS):
        parser.error(f"--conditions: {', '.join(sorted(unknown))} is none of {', '.join(CONDITIONS)}")
    return args


def summary(
    args: argparse.Namespace, condition: str, rounds: Sequence[Result], total: int, model_type: str
) -> Result:
    """One record: speeds are medians over rounds, memory the worst actor of any round."""

    def median(key: str) -> float:
        return statistics.median(result[key] for result in rounds)

    worst = max(rounds, key=lambda result: result["peak_over_resident"])
    return {
        "impl": "kt_ray",
        "model": args.model_dir.resolve().name,
        "model_type": model_type,
        "condition": condition,
        "cached_before": min(result["cached_before"] for result in rounds),
        "actors": args.actors,
        "threads": args.threads,
        "backend": args.backend,
        "rounds": args.rounds,
        "checkpoint_bytes": total,
        "weight_bytes": worst["weight_bytes"],
        "seconds": median("seconds"),
        "gb_per_s": median("gb_per_s"),
        "cat_gb_per_s": median("cat_gb_per_s"),
        "ratio": statistics.median(result["gb_per_s"] / result["cat_gb_per_s"] for result in rounds),
        "peak_rss_bytes": worst["peak_rss_bytes"],
        "resident_bytes": worst["resident_bytes"],
        "baseline_bytes": worst["baseline_bytes"],
        "peak_over_resident": worst["peak_over_resident"],
        "all_gb_per_s": [result["gb_per_s"] for result in rounds],
        "all_cat_gb_per_s": [result["cat_gb_per_s"] for result in rounds],
    }


# -- page cache ---------------------------------------------------------------------------------


def drop(files: Sequence[Path]) -> None:
    """Out of the page cache: written back first, for dirty pages stay whatever the advice."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fill(files: Sequence[Path]) -> None:
    """Into the page cache, as far as it goes."""
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)


def cached(files: Sequence[Path]) -> float:
    """Share of the files' pages that lie in the page cache (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = present = 0
    for file in files:
        size = file.stat().st_size
        if not size:
            continue
        fd = os.open(file, os.O_RDONLY)
        try:
            address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        finally:
            os.close(fd)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), f"mmap of {file}")
        count = -(-size // mmap.PAGESIZE)
        seen = ctypes.create_string_buffer(count)
        try:
            if libc.mincore(address, size, seen):
                raise OSError(ctypes.get_errno(), f"mincore of {file}")
        finally:
            libc.munmap(address, size)
        pages += count
        present += sum(byte & 1 for byte in seen.raw)
    return present / pages if pages else 0.0


# -- what is measured ---------------------------------------------------------------------------


def _cat(files: Sequence[Path]) -> Result:
    begun = time.monotonic()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return {"cat_gb_per_s": sum(f.stat().st_size for f in files) / (time.monotonic() - begun) / 1e9}


def _load(args: argparse.Namespace, num_experts: int) -> Result:
    """All actors, each in its process; they begin together."""
    bounds = [num_experts * i // args.actors for i in range(args.actors + 1)]
    script = str(Path(__file__).with_name("load_child.py"))
    with tempfile.TemporaryDirectory() as scratch:
        children = [
            Child(
                [sys.executable, script],
                {"OMP_NUM_THREADS": str(max(1, args.threads // args.actors))},
                Path(scratch) / str(rank),
            )
            for rank in range(args.actors)
        ]
        try:
            for rank, child in enumerate(children):
                job = {
                    "rank": rank,
                    "model_dir": str(args.model_dir),
                    "experts": list(range(bounds[rank], bounds[rank + 1])),
                    "threads": max(1, args.threads // args.actors),
                    "backend": args.backend,
                }
                child.ask({"do": "prepare", **job}, args.timeout)
            for child in children:
                child.tell({"do": "load"})
            answers = [child.answer(args.timeout) for child in children]
        finally:
            for child in children:
                child.close()
    return joined(answers)


def joined(answers: Sequence[Result]) -> Result:
    """The actors as one: bytes together over the time from the first to the last; memory of the worst."""
    seconds = max(a["ended"] for a in answers) - min(a["begun"] for a in answers)
    weight_bytes = sum(a["weight_bytes"] for a in answers)
    over = [max(0, a["load_peak_bytes"] - a["resident_bytes"]) for a in answers]
    worst = answers[over.index(max(over))]
    return {
        "seconds": seconds,
        "weight_bytes": weight_bytes,
        "gb_per_s": weight_bytes / seconds / 1e9,
        "peak_rss_bytes": worst["load_peak_bytes"],
        "resident_bytes": worst["resident_bytes"],
        "baseline_bytes": worst["baseline_bytes"],
        "peak_over_resident": max(over),
    }


if __name__ == "__main__":
    sys.exit(main())
