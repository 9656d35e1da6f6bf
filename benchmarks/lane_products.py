"""How far experts computed on GPUs are from float64, with bfloat16 and with FP8 products, on the stand-in.

    python benchmarks/lane_products.py --json out.json

One layer's experts of DeepSeek-V3's size with LoRA of rank 8, forward and backward. Weights are normal,
stored as releases store them: E4M3 with a scale per 128 x 128. x is normal, or has one column in 256 twenty
times as large, as trained models have; adapters are as after initialisation (B = 0), or their branches are as
large as the frozen ones. Errors are relative in norm, against float64 on the same stored weights. No time is
measured. docs/numerics.md has the figures.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import add_common_arguments, machine, write_json
from kt_ray.experts.device_lane import LaneInput
from kt_ray.experts.lane import Lane
from kt_ray.native import ExpertLora, ExpertMatrix, ExpertWeights
from kt_ray.native.reference import moe_reference
from kt_ray.placement.plan_types import LanePlan

BLOCK, RANK = 128, 8
Results = dict[str, Tensor]


def stored(experts: int, n: int, k: int, rng: torch.Generator) -> ExpertMatrix:
    """Normal weights [E, N, K] of variance 1 / K in FP8, n and k multiples of 128."""
    values = torch.randn(experts, n, k, generator=rng) / math.sqrt(k)
    blocks = values.view(experts, n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)) / 448
    data = (blocks / scales[:, :, None, :, None]).view(experts, n, k).to(torch.float8_e4m3fn)
    return ExpertMatrix("fp8", data, (experts, n, k), scales, (BLOCK, BLOCK))


def adapters(experts: int, hidden: int, inter: int, fresh: bool, rng: torch.Generator) -> ExpertLora:
    def matrix(out: int, features: int) -> Tensor:
        made = torch.randn(experts, out, features, generator=rng) / math.sqrt(features)
        return torch.zeros_like(made) if fresh and features == RANK else made

    inward = (matrix(RANK, hidden), matrix(inter, RANK))
    return ExpertLora(
        *inward, matrix(RANK, hidden), matrix(inter, RANK), matrix(RANK, inter), matrix(hidden, RANK), 1.0
    )


def exact(
    weights: ExpertWeights, x: Tensor, routing: tuple[Tensor, Tensor], lora: ExpertLora, dy: Tensor
) -> Results:
    """By float64 and autograd."""
    ids, router = routing
    double = lora.map(lambda t: t.double().requires_grad_())
    leaves = [x.double().requires_grad_(), router.double().requires_grad_(), *double.tensors()]
    y = moe_reference(weights, leaves[0], ids, leaves[1], lora=[double])
    grads = torch.autograd.grad((y * dy).sum(), leaves)
    return {"y": y.detach(), **dict(zip(["dx", "dw", *double.named()], grads, strict=True))}


def on_lane(
    weights: ExpertWeights,
    x: Tensor,
    routing: tuple[Tensor, Tensor],
    lora: ExpertLora,
    dy: Tensor,
    products: str,
) -> Results:
    """All experts streamed to the stand-in."""
    ids, router = routing
    lane = Lane(
        LanePlan(("cpu",), (), ((0, 1.0),), float8=products == "float8"),
        torch.get_num_threads(),
        recompute=False,
    )
    try:
        lane.add_layer(0, weights.expert_ids, [weights])
        counts = torch.bincount(ids.flatten(), minlength=weights.E).tolist()
        call = LaneInput([x], ids, router, lora, None, torch.arange(len(x)), x, counts)
        (forward,) = (f.result() for f in lane.forward(0, lane.choose(0, counts, len(x)), call))
        assert forward.saved is not None
        (back,) = (f.result() for f in lane.backward(0, [forward.saved], [dy], lora))
    finally:
        lane.close()
    found = {"y": torch.zeros_like(dy), "dx": torch.zeros_like(dy), "dw": torch.zeros(ids.shape)}
    found["y"][forward.tokens], found["dx"][back.tokens] = forward.y, back.dx
    found["dw"].view(-1)[back.slots] = back.dw
    grads = lora.zeros_like().named()
    for experts, own in back.lora:
        for name, gradient in own.items():
            grads[name].index_add_(0, experts, gradient)
    return found | grads


def errors(found: Results, wanted: Results) -> dict[str, float]:
    """Relative in norm; of zeros, as A's gradients are while B = 0, none."""
    sizes = {name: float(value.norm()) for name, value in wanted.items()}
    return {
        name: float((found[name].double() - wanted[name]).norm()) / sizes[name]
        for name in wanted
        if sizes[name]
    }


def parsed(description: str | None, hidden: int, inter: int) -> argparse.Namespace:
    """The command line of a script about one layer: its size, threads and output; torch has the threads."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--inter", type=int, default=inter)
    parser.add_argument("--experts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="each of which has two experts")
    add_common_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def activations(
    args: argparse.Namespace, rng: torch.Generator
) -> tuple[dict[str, Tensor], Tensor, tuple[Tensor, Tensor]]:
    """x [T, H] by kind, "outliers" with every 256th channel 20 times as large; dy [T, H]; ids and router
    weights [T, 2]."""
    h, t = args.hidden, args.tokens
    normal, dy = torch.randn(t, h, generator=rng), torch.randn(t, h, generator=rng)
    outliers = normal * torch.where(torch.arange(h) % 256 == 0, 20.0, 1.0)
    ids = torch.rand(t, args.experts, generator=rng).topk(2).indices
    return {"normal": normal, "outliers": outliers}, dy, (ids, torch.rand(t, 2, generator=rng) + 0.1)


def main() -> None:
    args = parsed(__doc__, hidden=7168, inter=2048)
    rng = torch.Generator().manual_seed(0)
    e, h, i, t = args.experts, args.hidden, args.inter, args.tokens
    shapes = ((i, h), (i, h), (h, i))
    weights = ExpertWeights(
        *(stored(e, *shape, rng) for shape in shapes), layer=0, expert_ids=tuple(range(e))
    )
    inputs, dy, routing = activations(args, rng)
    records: list[dict[str, Any]] = []
    for kind, x in inputs.items():
        for fresh in (True, False):
            lora, rows = adapters(e, h, i, fresh, rng), x.bfloat16()
            wanted = exact(weights, rows, routing, lora, dy)
            for products in ("bfloat16", "float8"):
                found = errors(on_lane(weights, rows, routing, lora, dy, products), wanted)
                what = {"impl": products, "model": f"{h}x{i}", "tokens": t, "x": kind, "fresh": fresh}
                records.append(what | {"errors": found})
                shown = ", ".join(f"{name} {value:.2%}" for name, value in found.items())
                print(f"x {kind}, {'B = 0' if fresh else 'large adapters'}, {products}: {shown}", flush=True)
    if args.json:
        write_json(args.json, records, machine())


if __name__ == "__main__":
    main()
