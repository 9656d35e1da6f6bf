#!/usr/bin/env python
"""A checkpoint with random weights at the real shapes of a `conf/model` entry, as the family releases it.

    python benchmarks/random_checkpoint.py --model deepseek_v2_lite --format fp8 --out DIR
    python benchmarks/random_checkpoint.py --model deepseek_v2_lite --layers 8 --out DIR

For measuring memory and speed without the released weights. Names are the release's own (transformers'
conversion, reversed), experts one key each where the family has them so; shards of --shard-gb, streamed:
memory stays at a few hundred MB whatever the model's size. Values: see random_formats.py; norms are 1.

    bf16    everything; transformers loads it
    fp8     every linear but router and output head: 128 x 128 blocks, `weight_scale_inv` F32
    int4    routed experts: compressed-tensors pack-quantized, groups of 32, scales BF16
    int8    routed experts: compressed-tensors int-quantized, a scale per row
    mxfp4   routed experts: compressed-tensors mxfp4-pack-quantized; fused ones: gpt-oss' blocks and scales

The tokenizer is the demo's, or --tokenizer DIR's; vocab_size stays the model's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from random_formats import BYTES, FORMATS, POOL, Entry, Pools, entries, is_expert, quantization_config

INDEX = "model.safetensors.index.json"
# Files of a tokenizer, by how their names begin.
TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
# Architectures that carry another name in config.json.
ALIASES = {"kimi_k2": "deepseek_v3"}
_LAYER = re.compile(r"\blayers\.(\d+)\.")


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    config = model_config(args.model, args.layers, args.set)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.iterdir()):
        sys.exit(f"{args.out} is not empty")
    begun = time.monotonic()
    parameters, architecture = released(config)
    try:
        tensors = [e for name, shape in parameters for e in entries(name, shape, args.format)]
    except ValueError as error:
        sys.exit(f"--format {args.format} does not fit {args.model}: {error}")
    _tokenizer(args.tokenizer, args.out, int(config["vocab_size"]))
    total = sum(entry.nbytes for entry in tensors)
    free = shutil.disk_usage(args.out).free
    if total > free:
        sys.exit(f"{args.out}: {total / 1e9:.1f} GB to write, {free / 1e9:.1f} GB free")
    config["architectures"] = [architecture]
    config.pop("quantization_config", None)
    plain = [
        e.name for e in tensors if len(e.shape) == 2 and e.dtype == "BF16" and e.name.endswith(".weight")
    ]
    kept = [name for name in plain if "embed" not in name]
    fused = any(len(shape) == 3 and is_expert(name) for name, shape in parameters)
    if (quantization := quantization_config(args.format, kept, fused)) is not None:
        config["quantization_config"] = quantization
    (args.out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    pools = Pools(args.seed, min(POOL, max(entry.nbytes for entry in tensors)))
    shards = list(split(tensors, args.shard_gb * 1e9))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write(args.out / file, shard, pools)
        weight_map.update((entry.name, file) for entry in shard)
        print(f"{file}: {sum(e.nbytes for e in shard) / 1e9:.2f} GB", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (args.out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    seconds = time.monotonic() - begun
    print(f"{total / 1e9:.1f} GB in {seconds:.0f} s ({total / 1e6 / seconds:.0f} MB/s) at {args.out}")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="an entry of conf/model with dimensions")
    parser.add_argument("--out", type=Path, required=True, help="a directory, new or empty")
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--layers", type=int, help="keep the first N decoder layers only")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's directory (default: the demo's)")
    parser.add_argument("--shard-gb", type=float, default=3.0, help="GB per file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=VALUE", help="other values in config.json, as JSON"
    )
    args = parser.parse_args(argv)
    if args.layers is not None and args.layers < 1:
        parser.error("--layers must be at least 1")
    return args


def model_config(model: str, layers: int | None = None, changes: Iterable[str] = ()) -> dict[str, Any]:
    """config.json of a `conf/model` entry, cut to its first layers, without multi-token prediction."""
    from kt_ray.config.compose import compose

    given = compose([f"model={model}", "mode=plan"]).model.config
    if not given:
        sys.exit(f"conf/model/{model}.yaml has no `config`: take one with dimensions")
    config: dict[str, Any] = json.loads(json.dumps(dict(given)))
    if isinstance(config.get("text_config"), dict):
        sys.exit(f"{model} is multimodal: no checkpoint of its text part alone is released")
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in config:
            sys.exit(f"--set {change}: no KEY=VALUE with a key of conf/model/{model}.yaml")
        config[key] = json.loads(value)
    whole = int(config["num_hidden_layers"])
    if layers is not None:
        if layers > whole:
            sys.exit(f"--layers {layers}: {model} has {whole}")
        config = {k: v[:layers] if isinstance(v, list) and len(v) == whole else v for k, v in config.items()}
        config["num_hidden_layers"] = layers
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    return config


def released(config: dict[str, Any]) -> tuple[list[tuple[str, tuple[int, ...]]], str]:
    """(released name, shape) of every parameter, layer by layer, and the architecture's name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    kind = str(config["model_type"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(ALIASES.get(kind, kind), **plain))
    state = revert_weight_conversion(model, model.state_dict())
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if config.get("tie_word_embeddings") else ()
    names = sorted((name for name in state if name not in tied), key=_place)
    return [(name, tuple(state[name].shape)) for name in names], type(model).__name__


def _place(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Embedding, layers in order, the rest; names with numbers in them in the numbers' order."""
    layer = _LAYER.search(name)
    group = int(layer[1]) if layer else -1 if "embed" in name else 1 << 30
    return group, [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]


def split(tensors: Sequence[Entry], limit: float) -> Iterator[list[Entry]]:
    """Shards of at most `limit` bytes (one tensor at least), in order."""
    shard: list[Entry] = []
    size = 0
    for entry in tensors:
        if shard and size + entry.nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.nbytes
    if shard:
        yield shard


def write(file: Path, shard: Sequence[Entry], pools: Pools) -> None:
    """One safetensors file: tensors by element size, then by name, as the safetensors package writes them."""
    ordered = sorted(shard, key=lambda entry: (-BYTES[entry.dtype], entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for entry in ordered:
        end = place + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        _put(out.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        for entry in ordered:
            for piece in pools.chunks(entry):
                _put(out.fileno(), piece)
        os.fsync(out.fileno())
        # Written once, read by another run: out of the way of what the machine does meanwhile.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _put(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _tokenizer(source: Path | None, out: Path, vocabulary: int) -> None:
    from kt_ray.data.template import load_tokenizer
    from kt_ray.demo import ensure_demo_model

    directory = source if source is not None else Path(ensure_demo_model("demo"))
    if not directory.is_dir():
        sys.exit(f"--tokenizer {directory}: no such directory")
    size = len(load_tokenizer(str(directory)))
    if size > vocabulary:
        sys.exit(f"the tokenizer of {directory} has {size} tokens, the model {vocabulary}")
    for file in sorted(directory.iterdir()):
        if file.name.startswith(TOKENIZER):
            shutil.copyfile(file, out / file.name)


if __name__ == "__main__":
    sys.exit(main())
