"""torch's bfloat16 products on this CPU: torch's own, widened (kt_ray/cpu_products.py), and in float32.

    python benchmarks/cpu_products.py --json out.json

x Wᵀ as a linear layer's forward, dy W as its backward, W [hidden, hidden]. GFLOP/s of the median of rounds in
which all take turns. A round of torch's own dy W of 512 rows takes 14 s where torch has no such products.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import add_common_arguments, quiet_machine, write_json
from kt_ray import cpu_products


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    here = quiet_machine(args.wait_quiet)
    torch.manual_seed(0)
    weight = torch.randn(args.hidden, args.hidden)
    halved = weight.bfloat16()
    records: list[dict[str, Any]] = []
    for rows in args.rows:
        x = torch.randn(rows, args.hidden)
        short = x.bfloat16()
        for name, w, w32 in (("x W^T", halved.t(), weight.t()), ("dy W", halved, weight)):
            calls: dict[str, Callable[[], object]] = {
                "torch": partial(torch.mm, short, w),
                "widened": partial(cpu_products.mm, short, w),
                "float32": partial(torch.mm, x, w32),
            }
            seconds = rounds(calls, args.rounds)
            rates = {kind: 2 * rows * args.hidden**2 / took / 1e9 for kind, took in seconds.items()}
            records.append({"product": name, "rows": rows, "hidden": args.hidden, "gflops": rates})
            shown = ", ".join(f"{kind} {rate:.1f}" for kind, rate in rates.items())
            print(f"{name}, {rows} rows: {shown} GFLOP/s", flush=True)
    if args.json:
        about = {"threads": args.threads, "multiplies_bfloat16": cpu_products.multiplies_bfloat16()}
        write_json(args.json, records, here | about)


def rounds(calls: dict[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Median seconds of each; the first round only warms up, unless it takes seconds."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count + 1):
        for name, call in calls.items():
            if sum(took[name]) > 2:
                continue
            begun = time.perf_counter()
            call()
            took[name].append(time.perf_counter() - begun)
    return {name: statistics.median(t[1:] or t) for name, t in took.items()}


if __name__ == "__main__":
    main()
