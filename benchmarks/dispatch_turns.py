"""Python threads that each tell a device many small operations: at once, and in turns (kt_ray/gpu_turns.py).

    python benchmarks/dispatch_turns.py --device cuda:0 --json out.json

Each thread calls a LoRA layer of small matrices, forward and backward, `--calls` times; in turns,
`--per-turn` at a time. `us_per_call` is the time until all have ended over all their calls: the same for any
number of threads where they do not hinder each other. Rounds take turns, the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import common

sys.path.insert(0, str(common.REPO))

import torch

from kt_ray import gpu_turns as turns
from kt_ray.model.lora_linear import Parts, with_adapters


def call(device: torch.device) -> None:
    """Some 30 operations, as a LoRA layer has them."""
    x = torch.ones(16, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    a, b = (torch.ones(shape, device=device, requires_grad=True) for shape in ((8, 64), (64, 8)))
    base = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16, device=device).requires_grad_(False)
    y = with_adapters(x, [(a, b, Parts.of(a, b, 1.0))], 1.0, base)
    torch.autograd.backward(y, torch.ones_like(y))


def seconds(device: torch.device, threads: int, calls: int, per_turn: int) -> float:
    """Until all threads have ended; per_turn: 0 = all at once."""
    begin = threading.Barrier(threads + 1)

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
            call(device)
            begin.wait()
            for _ in range(calls // max(per_turn, 1)):
                with turns.turn(device) if per_turn else nullcontext():
                    for _ in range(max(per_turn, 1)):
                        call(device)

    pool = [threading.Thread(target=work) for _ in range(threads)]
    for thread in pool:
        thread.start()
    begin.wait()
    start = time.perf_counter()
    for thread in pool:
        thread.join()
    return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 2, 3], help="threads that call")
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--per-turn", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    common.add_common_arguments(parser)
    args = parser.parse_args(arguments)
    turns.COMPUTES_LATER = frozenset({args.device.type})
    torch.set_num_threads(1)
    about = common.quiet_machine(args.wait_quiet)
    cases = [(number, in_turns) for number in args.callers for in_turns in (False, True)]
    took: dict[tuple[int, bool], list[float]] = {case: [] for case in cases}
    for _ in range(args.rounds):
        for number, in_turns in cases:
            taken = seconds(args.device, number, args.calls, args.per_turn if in_turns else 0)
            took[number, in_turns].append(taken / number / args.calls)
    records: list[dict[str, Any]] = [
        {
            "impl": "in turns" if in_turns else "at once",
            "device": str(args.device),
            "callers": number,
            "us_per_call": 1e6 * statistics.median(taken),
            "times_us": [1e6 * t for t in taken],
        }
        for (number, in_turns), taken in took.items()
    ]
    for r in records:
        print(f"{r['callers']} callers {r['impl']:8} {r['us_per_call']:7.1f} us per call", file=sys.stderr)
    if args.json:
        common.write_json(args.json, records, about)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
