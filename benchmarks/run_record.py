"""Figures of a finished run (runs/<name>) in the benchmarks' JSON frame.

    python launch.py ... run.name=v2lite
    python benchmarks/run_record.py runs/v2lite --impl kt_ray_ray --json out.json

The first step is left out: it warms caches and allocators. Several run directories give several records.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import yaml
from common import applied_steps, frame, machine, write_json

TERMS = ("seconds_attention", "seconds_experts", "seconds_transport", "seconds_optimizer")
RATES = (
    "expert_tflops_forward",
    "expert_tflops_backward",
    "expert_tflops_forward_reference",
    "expert_tflops_backward_reference",
)


def record(run: Path, impl: str, note: str) -> dict[str, Any]:
    """One record: medians over steps 2..n."""
    steps = applied_steps(run)
    if not steps:
        raise SystemExit(f"{run / 'metrics.jsonl'}: the run applied no step, so there is nothing to record")
    measured = [line for line in steps[1:] if line["tokens"] == steps[-1]["tokens"]] or steps[1:] or steps
    config = yaml.safe_load((run / "config.yaml").read_text())
    actors = json.loads((run / "env.json").read_text())["actors"]
    median = {key: statistics.median(line[key] for line in measured) for key in ("seconds", "tokens")}
    return {
        "impl": impl,
        "model": config["model"]["name"],
        "note": note,
        "tokens": round(median["tokens"]),
        "median_s": median["seconds"],
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in measured),
        "peak_rss_bytes": max(
            sum(v for k, v in line.items() if k.startswith("host_rss_bytes_")) for line in steps
        ),
        "gpu_memory_bytes": {
            k.removeprefix("gpu_memory_bytes_"): max(line.get(k, 0) for line in steps)
            for k in steps[-1]
            if k.startswith("gpu_memory_bytes_")
        },
        "steps_measured": len(measured),
        **{key: statistics.median(line[key] for line in measured) for key in (*TERMS, *RATES)},
        "losses": [line["loss"] for line in steps],
        "isa": sorted({a["isa"] for a in actors if "isa" in a}),
        "load_seconds": max(a["load_seconds"] for a in actors),
        "expert_weight_bytes": sum(a["weight_bytes"] for a in actors if a["actor"].startswith("experts")),
        "rule": config["rule"]["name"],
        "lora_rank": config["lora"]["rank"],
    }


def main() -> None:
    """Collect runs into one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR[:IMPL[:NOTE]]")
    parser.add_argument("--impl", default="kt_ray_ray")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    about = machine()
    smi = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        gpus = subprocess.run(smi, capture_output=True, text=True, check=True, timeout=30)
        about["gpus"] = gpus.stdout.strip().splitlines()
    except (OSError, subprocess.SubprocessError):
        about["gpus"] = []
    records = []
    for item in args.runs:
        path, _, rest = str(item).partition(":")
        impl, _, note = rest.partition(":")
        records.append(record(Path(path), impl or args.impl, note))
    print(frame(records, about))
    if args.json:
        write_json(args.json, records, about)


if __name__ == "__main__":
    main()
