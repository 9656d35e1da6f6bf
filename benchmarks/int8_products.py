"""How far the engine is from float64 with its int8 products and with its own.

    python benchmarks/int8_products.py --json out.json

One layer's experts of DeepSeek-V2-Lite's size with LoRA of rank 8, forward and backward. Weights are
normal, stored as int8 with a scale per row and as int4 with a scale per 32. x is normal, or has one column
in 256 twenty times as large, as trained models have; adapters are as after initialisation (B = 0), or their
branches are as large as the frozen ones. Errors are relative in norm, against float64 on the same stored
weights. No time is measured. docs/numerics.md has the figures.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine, write_json
from benchmarks.kept_activations import on_engine
from benchmarks.lane_products import activations, adapters, errors, exact, parsed
from kt_ray.native import Engine, ExpertWeights, quantize

FORMATS = {"int8": None, "int4": 32}  # columns per scale


def main() -> None:
    args = parsed(__doc__, hidden=2048, inter=1408)
    rng = torch.Generator().manual_seed(0)
    e, h, i, t = args.experts, args.hidden, args.inter, args.tokens
    plain = [
        torch.randn(e, *shape, generator=rng) / math.sqrt(shape[1]) for shape in ((i, h), (i, h), (h, i))
    ]
    inputs, dy, routing = activations(args, rng)
    loras = {fresh: adapters(e, h, i, fresh, rng) for fresh in (True, False)}
    records: list[dict[str, Any]] = []
    with (
        Engine(threads=args.threads) as own,
        Engine(own.isa, args.threads, int8_products=True) as integers,
    ):
        for format, group in FORMATS.items():
            matrices = [quantize(format, matrix, group=group) for matrix in plain]
            weights = ExpertWeights(*matrices, layer=0, expert_ids=tuple(range(e)))
            for kind, x in inputs.items():
                for fresh, lora in loras.items():
                    rows = x.bfloat16()
                    wanted = exact(weights, rows, routing, lora, dy)
                    for engine in (integers, own):
                        found = errors(on_engine(engine, weights, rows, routing, lora, dy)[0], wanted)
                        what = {"impl": engine.compute, "isa": engine.isa, "format": format}
                        what |= {"model": f"{h}x{i}", "tokens": t, "x": kind, "fresh": fresh}
                        records.append(what | {"errors": found})
                        shown = ", ".join(f"{name} {value:.2%}" for name, value in found.items())
                        case = f"{format}, x {kind}, {'B = 0' if fresh else 'large adapters'}"
                        print(f"{case}, {engine.compute}: {shown}", flush=True)
    if args.json:
        write_json(args.json, records, machine())


if __name__ == "__main__":
    main()
