"""A checkpoint of a real model's size that takes no space: true headers, holes instead of weights.

    python -m tests.helpers.sparse OUT CONFIG.json [--shards 163] [--layers N]

For measuring how long the checks take before anything is read, and for mode=plan. CONFIG.json is a
released configuration of a family with experts "...mlp.experts.N.{gate,up,down}_proj"; with block FP8 in
its quantization_config every linear weight is F8_E4M3 with scales, as DeepSeek releases them. The layers
for multi-token prediction that it names come after the others, under the released names.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kt_ray.checkpoint.safetensors_file import build_header

INDEX = "model.safetensors.index.json"
Entry = tuple[str, str, tuple[int, ...]]  # name, type, shape
_PLAIN = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight")


def write_sparse(out: Path, config: dict[str, Any], shards: int) -> int:
    """Write configuration, index and shards.

    Args:
        out: directory. config: contents of config.json. shards: number of files.

    Returns:
        The number of tensors.
    """
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    entries = [stored for entry in released(out, config) for stored in quantised(entry, config)]
    weight_map: dict[str, str] = {}
    total = 0
    per_shard = -(-len(entries) // shards)
    for n, first in enumerate(range(0, len(entries), per_shard)):
        part = entries[first : first + per_shard]
        file = f"model-{n + 1:05d}-of-{-(-len(entries) // per_shard):06d}.safetensors"
        head, ranges, size = build_header(part)
        with (out / file).open("wb") as stream:
            stream.write(head)
            stream.truncate(size)
        total += sum(end - start for start, end in ranges.values())
        weight_map |= dict.fromkeys(ranges, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / INDEX).write_text(json.dumps(index))
    return len(entries)


def released(directory: Path, config: dict[str, Any]) -> Iterator[Entry]:
    """Every parameter under its released name, in BF16 (router biases F32)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    model_config = AutoConfig.for_model(**plain)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(
            model_config, trust_remote_code=False, dtype=torch.bfloat16
        ).state_dict()
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last = f"model.layers.{layers - 1}."
    for name, tensor in state.items():
        yield from _released(name, tuple(tensor.shape))
    for n in range(config.get("num_nextn_predict_layers") or 0):
        prefix = f"model.layers.{layers + n}."
        for name, tensor in state.items():
            if name.startswith(last):
                yield from _released(prefix + name.removeprefix(last), tuple(tensor.shape))
        yield f"{prefix}embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
        yield f"{prefix}enorm.weight", "BF16", (hidden,)
        yield f"{prefix}hnorm.weight", "BF16", (hidden,)
        yield f"{prefix}eh_proj.weight", "BF16", (hidden, 2 * hidden)
        yield f"{prefix}shared_head.norm.weight", "BF16", (hidden,)
        yield f"{prefix}shared_head.head.weight", "BF16", (config["vocab_size"], hidden)


def _released(name: str, shape: tuple[int, ...]) -> Iterator[Entry]:
    """A parameter of transformers under released names: fused experts become one key each."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        for expert in range(shape[0]):
            for half in ("gate_proj", "up_proj"):
                yield f"{prefix}.{expert}.{half}.weight", "BF16", (shape[1] // 2, shape[2])
    elif leaf == "down_proj":
        for expert in range(shape[0]):
            yield f"{prefix}.{expert}.down_proj.weight", "BF16", shape[1:]
    else:
        yield name, "F32" if leaf == "e_score_correction_bias" else "BF16", shape


def quantised(entry: Entry, config: dict[str, Any]) -> Iterator[Entry]:
    """An entry as it is stored: linear weights in FP8 with their scales where the configuration says so."""
    name, _, shape = entry
    block = (config.get("quantization_config") or {}).get("weight_block_size")
    if block is None or len(shape) != 2 or name.endswith((*_PLAIN, "shared_head.head.weight")):
        yield entry
        return
    yield name, "F8_E4M3", shape
    yield f"{name}_scale_inv", "F32", (-(-shape[0] // block[0]), -(-shape[1] // block[1]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("config", type=Path, help="a released config.json")
    parser.add_argument("--shards", type=int, default=163)
    parser.add_argument("--layers", type=int, help="keep the first N decoder layers only")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    print(f"{write_sparse(args.out, config, args.shards)} tensors at {args.out}")


if __name__ == "__main__":
    main()
