"""One expert layer, forward and backward: the native engine against factored LoRA in torch.

    python benchmarks/moe_layer.py --shape deepseek_v2_lite --tokens 512 --rank 8 --threads 2 --json out.json

Both sides get the same weights, routing and adapters, take turns round by round, and report the median.
The torch side is what a careful user would write without this project: per expert, frozen bfloat16
matrices, LoRA as two thin products (never W + BA), autograd for the rest. FLOPs count the frozen
matrices only, 6 K T H I per direction.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import frame, machine, write_json
from torch.nn.functional import linear, silu

from kt_ray.native import Engine, ExpertLora, ExpertWeights

SHAPES = {  # hidden, intermediate, experts, experts per token
    "deepseek_v2_lite": (2048, 1408, 64, 6),
    "qwen3_30b_a3b": (2048, 768, 128, 8),
    "mixtral_8x7b": (4096, 14336, 8, 2),
    "tiny": (256, 128, 8, 2),
}


@dataclass
class Layer:
    """Inputs of one layer, the same for every implementation."""

    weights: ExpertWeights
    lora: ExpertLora | None
    x: torch.Tensor
    ids: torch.Tensor
    router: torch.Tensor
    dy: torch.Tensor


def make_layer(shape: str, tokens: int, rank: int, dtype: torch.dtype) -> Layer:
    """Random weights and an even random routing."""
    h, i, e, k = SHAPES[shape]
    torch.manual_seed(0)

    def weight(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype).uniform_(-1, 1) * size[-1] ** -0.5

    def adapter(out: int, features: int) -> torch.Tensor:
        return torch.randn(e, out, features) * features**-0.5

    lora = None
    if rank:
        gate_up = adapter(rank, h), adapter(i, rank), adapter(rank, h), adapter(i, rank)
        lora = ExpertLora(*gate_up, adapter(rank, i), adapter(h, rank), scale=1.0)
    return Layer(
        ExpertWeights(weight(e, i, h), weight(e, i, h), weight(e, h, i), layer=0, expert_ids=tuple(range(e))),
        lora,
        torch.randn(tokens, h).to(dtype),
        torch.rand(tokens, e).topk(k, dim=1).indices,
        torch.rand(tokens, k),
        torch.randn(tokens, h),
    )


Step = tuple[Callable[[], Any], Callable[[Any], Any]]


def native_step(layer: Layer, engine: Engine) -> Step:
    """Forward and backward on the engine."""
    grads = layer.lora.zeros_like() if layer.lora else None

    def forward() -> Any:
        return engine.forward(layer.weights, layer.x, layer.ids, layer.router, lora=layer.lora)[1]

    def backward(saved: Any) -> Any:
        result = engine.backward(layer.weights, saved, layer.dy, lora=layer.lora, lora_grads=grads)
        saved.release()
        return result

    return forward, backward


def torch_step(layer: Layer) -> Step:
    """Forward and backward as factored LoRA in torch, adapters in the weights' dtype."""
    w, dtype = layer.weights, layer.weights.gate.dtype
    x, router = layer.x.clone().requires_grad_(), layer.router.clone().requires_grad_()
    adapters = [t.to(dtype).requires_grad_() for t in layer.lora.tensors()] if layer.lora else None
    dy = layer.dy.to(dtype)

    def project(z: torch.Tensor, matrix: torch.Tensor, projection: int, e: int) -> torch.Tensor:
        out = linear(z, matrix[e])
        if adapters is None:
            return out
        a, b = adapters[2 * projection][e], adapters[2 * projection + 1][e]
        return out + linear(linear(z, a), b)

    def forward() -> Any:
        y = torch.zeros(x.shape, dtype=dtype)
        for e in range(w.gate.shape[0]):
            token, slot = torch.where(layer.ids == e)
            z = x[token]
            act = silu(project(z, w.gate, 0, e)) * project(z, w.up, 1, e)
            y = y.index_add(0, token, project(act, w.down, 2, e) * router[token, slot, None].to(dtype))
        return y

    def backward(y: Any) -> Any:
        y.backward(dy)

    return forward, backward


def measure(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, float]]:
    """Median seconds of forward and backward of each, taking turns; the first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(rounds + 1):
        for name, (forward, backward) in steps.items():
            start = time.perf_counter()
            state = forward()
            middle = time.perf_counter()
            backward(state)
            times[name].append((middle - start, time.perf_counter() - middle))
    return {
        name: (statistics.median(f for f, _ in t[1:]), statistics.median(b for _, b in t[1:]))
        for name, t in times.items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and print or write its JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="deepseek_v2_lite")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rank", type=int, default=8, help="0: no adapter")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write; standard output otherwise")
    args = parser.parse_args(arguments)

    about = machine()
    torch.set_num_threads(args.threads)
    layer = make_layer(args.shape, args.tokens, args.rank, getattr(torch, args.dtype))
    h, i, _, k = SHAPES[args.shape]
    flops = 6 * k * args.tokens * h * i
    with Engine(args.isa, threads=args.threads) as engine:
        ours = f"kt_ray {engine.isa}"
        medians = measure(
            {ours: native_step(layer, engine), "torch factored LoRA": torch_step(layer)}, args.rounds
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    records = [
        {
            "impl": name,
            "model": args.shape,
            "tokens": args.tokens,
            "rank": args.rank,
            "dtype": args.dtype,
            "threads": args.threads,
            "forward_s": round(forward, 5),
            "backward_s": round(backward, 5),
            "forward_gflops": round(flops / forward / 1e9, 1),
            "backward_gflops": round(flops / backward / 1e9, 1),
            "median_s": round(forward + backward, 5),
            "tokens_per_s": round(args.tokens / (forward + backward), 1),
            "peak_rss_bytes": peak,  # of the process, both implementations together
        }
        for name, (forward, backward) in medians.items()
    ]
    if args.json is None:
        sys.stdout.write(frame(records, about))
    else:
        write_json(args.json, records, about)
        for r in records:
            print(
                f"{r['impl']}: forward {r['forward_s'] * 1e3:.0f} ms, backward {r['backward_s'] * 1e3:.0f} ms"
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
