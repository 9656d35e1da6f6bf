"""What the engine keeps of gate and up for backward: bytes, seconds and errors of each way to keep them.

    python benchmarks/kept_activations.py --json out.json

One layer's experts of DeepSeek-V3's size in FP8 with LoRA of rank 8, forward and backward, as
`benchmarks/lane_products.py` makes them. Errors are relative in norm, against float64 on the same stored
weights; "adapters" is the worst of the six matrices. Seconds are the best of several calls in turn.
docs/numerics.md has the figures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine, write_json
from benchmarks.lane_products import RANK, Results, activations, adapters, errors, exact, parsed, stored
from kt_ray.native import Engine, ExpertLora, ExpertWeights

WAYS = (True, "int8", "recompute")
ROUNDS = 5


def main() -> None:
    args = parsed(__doc__, hidden=7168, inter=2048)
    rng = torch.Generator().manual_seed(0)
    e, h, i, t = args.experts, args.hidden, args.inter, args.tokens
    shapes = ((i, h), (i, h), (h, i))
    weights = ExpertWeights(*(stored(e, *shape, rng) for shape in shapes))
    inputs, dy, routing = activations(args, rng)
    records: list[dict[str, Any]] = []
    with Engine(threads=args.threads) as engine:
        print(f"{engine.isa}, {args.threads} threads, {e} experts of {h} x {i}, {t} tokens, rank {RANK}")
        for kind, x in inputs.items():
            lora, rows = adapters(e, h, i, False, rng), x.bfloat16()
            wanted = exact(weights, rows, routing, lora, dy)
            made: dict[bool | str, dict[str, Any]] = {}
            for _ in range(ROUNDS):  # in turn, so that all meet the same neighbours
                for save in WAYS:
                    found, record = on_engine(engine, weights, rows, routing, lora, dy, save)
                    best = made.setdefault(save, {**record, "errors": errors(found, wanted)})
                    best |= {way: min(best[way], record[way]) for way in ("forward_s", "backward_s")}
            for save, record in made.items():
                what = {"impl": str(save), "model": f"{h}x{i}", "tokens": t, "x": kind, "isa": engine.isa}
                records.append(what | record)
                of_adapters = max(v for n, v in record["errors"].items() if n not in ("y", "dx", "dw"))
                shown = ", ".join(f"{n} {record['errors'][n]:.2%}" for n in ("y", "dx", "dw"))
                took = ", ".join(f"{w} {record[f'{w}_s'] * 1e3:.0f} ms" for w in ("forward", "backward"))
                kept = f"{record['bytes'] / t / 1024:.1f} KiB per token"
                print(
                    f"x {kind}, save={save}: {kept}; {took}; {shown}, adapters {of_adapters:.2%}", flush=True
                )
    if args.json:
        write_json(args.json, records, machine())


def on_engine(
    engine: Engine,
    weights: ExpertWeights,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    lora: ExpertLora,
    dy: Tensor,
    save: Any = True,
) -> tuple[Results, Mapping[str, Any]]:
    """Forward and backward: results, and what they took."""
    grads = lora.zeros_like()
    begun = time.perf_counter()
    y, saved = engine.forward(weights, x, *routing, lora=lora, save=save)
    between = time.perf_counter()
    assert saved is not None
    dx, dw = engine.backward(weights, saved, dy, lora=lora, lora_grads=grads)
    seconds = {"forward_s": between - begun, "backward_s": time.perf_counter() - between}
    return {"y": y, "dx": dx, "dw": dw, **grads.named()}, {"bytes": saved.bytes, **seconds}


if __name__ == "__main__":
    main()
