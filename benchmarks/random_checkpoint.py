"""A checkpoint with random weights at the real shapes of a `conf/model` entry, as the family releases it.

    python benchmarks/random_checkpoint.py --model deepseek_v2_lite --out DIR [--layers 8] [--device cuda]

For measuring memory and speed without the released weights: every tensor is N(0, 0.02) in BF16 (norms
are 1), routed experts have per-expert keys, one shard per layer. The tokenizer is the demo's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from kt_ray.config.compose import compose
from kt_ray.demo import ensure_demo_model

LEAVES = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
INDEX = "model.safetensors.index.json"


def main() -> None:
    """Write config.json, tokenizer, shards and index."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="an entry of conf/model with dimensions")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="keep the first N decoder layers only")
    parser.add_argument("--device", default="cpu", help="where random numbers are drawn")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    config = dict(compose([f"model={args.model}", "mode=plan"]).model.config or {})
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    demo = Path(ensure_demo_model("demo"))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (demo / name).is_file():
            shutil.copy(demo / name, args.out / name)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    begun = time.monotonic()
    weight_map: dict[str, str] = {}
    total = 0
    for shard, shapes in shards(args.out):
        tensors = {name: draw(name, shape, generator, args.device) for name, shape in shapes.items()}
        save_file(tensors, args.out / shard, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard))
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    (args.out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))
    print(f"{total / 1e9:.1f} GB in {time.monotonic() - begun:.0f} s at {args.out}")


def shards(directory: Path) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """(file, released name -> shape), one file per decoder layer and one for the rest."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict().items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        part = parts.setdefault(f"model-{layer}.safetensors", {})
        for released, shape in release(name, tuple(tensor.shape), config.model_type):
            part[released] = shape
    yield from parts.items()


def release(name: str, shape: tuple[int, ...], model_type: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A parameter of transformers under the family's released names: fused experts become one key each."""
    moe, gate, up, down = LEAVES.get(model_type, ("mlp", "gate_proj", "up_proj", "down_proj"))
    if name.endswith("experts.gate_up_proj"):
        prefix = name.removesuffix("gate_up_proj").replace(".mlp.", f".{moe}.")
        for expert in range(shape[0]):
            for leaf in (gate, up):
                yield f"{prefix}{expert}.{leaf}.weight", (shape[1] // 2, shape[2])
    elif name.endswith("experts.down_proj"):
        prefix = name.removesuffix("down_proj").replace(".mlp.", f".{moe}.")
        for expert in range(shape[0]):
            yield f"{prefix}{expert}.{down}.weight", shape[1:]
    else:
        yield name.replace(".mlp.gate.", f".{moe}.gate."), shape


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> torch.Tensor:
    """Random weights; norms are ones, router biases zeros (float32, as released)."""
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape)
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    value = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return value.normal_(0.0, 0.02, generator=generator).cpu()


if __name__ == "__main__":
    main()
