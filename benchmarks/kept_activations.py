"""What the engine keeps of gate and up for backward: bytes, seconds and errors of each way to keep them.

    python benchmarks/kept_activations.py --json out.json

One layer's experts of DeepSeek-V3's size in FP8 with LoRA of rank 8, forward and backward, as
`benchmarks/lane_products.py` makes them. Errors are relative in norm, against float64 on the same stored
weights; "adapters" is the worst of the six matrices. Seconds are the best of several calls in turn.
docs/numerics.md has the figures.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import add_common_arguments, machine, write_json
from benchmarks.lane_products import RANK, Results, adapters, errors, exact, stored
from kt_ray.native import Engine, ExpertLora, ExpertWeights

WAYS = (True, "int8", "recompute")
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--inter", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="each of which has two experts")
    add_common_arguments(parser)
    args = parser.parse_args()
    rng = torch.Generator().manual_seed(0)
    e, h, i, t = args.experts, args.hidden, args.inter, args.tokens
    shapes = ((i, h), (i, h), (h, i))
    weights = ExpertWeights(*(stored(e, *shape, rng) for shape in shapes))
    normal, dy = torch.randn(t, h, generator=rng), torch.randn(t, h, generator=rng)
    outliers = torch.where(torch.arange(h) % 256 == 0, 20.0, 1.0)
    routing = torch.rand(t, e, generator=rng).topk(2).indices, torch.rand(t, 2, generator=rng) + 0.1
    records: list[dict[str, Any]] = []
    with Engine(threads=args.threads) as engine:
        print(f"{engine.isa}, {args.threads} threads, {e} experts of {h} x {i}, {t} tokens, rank {RANK}")
        for kind, x in (("normal", normal), ("outliers", normal * outliers)):
            lora, rows = adapters(e, h, i, False, rng), x.bfloat16()
            wanted = exact(weights, rows, routing, lora, dy)
            made: dict[bool | str, dict[str, Any]] = {}
            for _ in range(ROUNDS):  # in turn, so that all meet the same neighbours
                for save in WAYS:
                    found, record = one(engine, weights, rows, routing, lora, dy, save)
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


def one(
    engine: Engine,
    weights: ExpertWeights,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    lora: ExpertLora,
    dy: Tensor,
    save: Any,
) -> tuple[Results, Mapping[str, Any]]:
    """Results, and what they took."""
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
