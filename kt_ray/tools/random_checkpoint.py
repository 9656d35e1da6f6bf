"""random: a checkpoint with random weights at the shapes of a `conf/model` entry, as the family releases it.

To measure memory and speed, and to rehearse a run, without the released weights. Names are the release's own
(transformers' conversion, reversed), experts one key each where the family has them so. Files are written
piece by piece: memory stays below 1 GB whatever the model's size. Norms are 1, the rest see
`kt_ray.checkpoint.random_values`.

    bf16    everything; transformers loads it
    fp8     every linear but router and output head: 128 x 128 blocks, `weight_scale_inv` F32
    int4    routed experts: compressed-tensors pack-quantized, groups of 32, scales BF16
    int8    routed experts: compressed-tensors int-quantized, a scale per row
    mxfp4   routed experts: compressed-tensors mxfp4-pack-quantized; fused ones: gpt-oss' blocks and scales

Sparse: the files have headers and holes. kt_ray fills the tensors while it reads them, with the same values;
other programs would read zeros.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from kt_ray.checkpoint.names import ALIASES, expert_name, family, fused_release, layers_key, zero_experts
from kt_ray.checkpoint.random_values import Fill
from kt_ray.checkpoint.safetensors_file import BITS, tensor_bytes, writing
from kt_ray.dims.config_json import dims_from_config
from kt_ray.disk import free_bytes
from kt_ray.errors import UserError
from kt_ray.tools.random_formats import Entry, entries, is_expert, quantization_config
from kt_ray.tools.units import without_quantization

INDEX = "model.safetensors.index.json"
# Files of a tokenizer, by how their names begin.
TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template")
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Options:
    """What to make of a model."""

    format: str = "bf16"
    layers: int | None = None  # the first of them; None = all
    tokenizer: Path | None = None  # a directory; None = the demo's
    seed: int = 0
    sparse: bool = False
    changes: tuple[str, ...] = ()  # KEY=VALUE for config.json


def random_checkpoint(model: str, out: str, options: Options, *, shard_bytes: int) -> dict[str, Any]:
    """Write the checkpoint of a `conf/model` entry into a new or empty directory.

    Returns:
        Facts: path, model, format, layers, tensors, bytes (of the weights), files, sparse, seconds.

    Raises:
        UserError: unknown model or key, a format that cannot hold the shapes, a directory that is not empty,
            too little space.
    """
    target = Path(out)
    config = model_config(model, options.layers, options.changes)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "the output directory cannot be made", where=out, observed=error, remedy="name another one"
        ) from error
    if any(target.iterdir()):
        raise UserError("the output directory is not empty", where=out, remedy="name a new directory")
    begun = time.monotonic()
    try:
        parameters, architecture = released(config)
    except Exception as error:  # transformers and torch raise many kinds
        if not options.changes:
            raise
        raise _bad_set(options.changes, error) from error
    fused = any(len(shape) == 3 and is_expert(name) for name, shape in parameters)
    release = fused_release(family(config))
    try:
        if options.format == "fp8" and fused and release is not None and release.transposed:
            raise ValueError("experts fused as [E, in, out] are not released in fp8")
        tensors = [e for name, shape in parameters for e in entries(name, shape, options.format)]
    except ValueError as error:
        fault = f"--format {options.format} does not fit {model}"
        raise UserError(fault, observed=error, remedy="take another --format") from error
    total = sum(entry.nbytes for entry in tensors)
    free = free_bytes(target)
    if total > free and not options.sparse:
        raise UserError(
            "too little disk space for the checkpoint",
            where=out,
            observed=f"{free / 1e9:.1f} GB free",
            required=f"{total / 1e9:.1f} GB",
            remedy="add --sparse (kt_ray makes the values while it reads), or fewer --layers",
        )
    remedy = "free space, name another directory, or add --sparse (kt_ray makes the values while it reads)"
    with _emptied_if_stopped(target):
        _tokenizer(options.tokenizer, target, int(config["vocab_size"]))
        config = {**without_quantization(config, to=options.format), "architectures": [architecture]}
        plain = [
            e.name for e in tensors if len(e.shape) == 2 and e.dtype == "BF16" and e.name.endswith(".weight")
        ]
        kept = [name for name in plain if "embed" not in name]
        if (quantization := quantization_config(options.format, kept, fused)) is not None:
            config["quantization_config"] = quantization
        with writing("checkpoint", target, None if options.sparse else total, remedy):
            (target / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
            shards = list(split(tensors, shard_bytes))
            weight_map: dict[str, str] = {}
            for number, shard in enumerate(shards, 1):
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                write(target / file, shard, options.seed, sparse=options.sparse)
                weight_map.update((entry.name, file) for entry in shard)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            (target / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return {
        "path": str(target),
        "model": model,
        "format": options.format,
        "layers": int(config[layers_key(config)]),
        "tensors": len(tensors),
        "bytes": total,
        "files": len(shards),
        "sparse": options.sparse,
        "seconds": round(time.monotonic() - begun, 2),
    }


@contextlib.contextmanager
def _emptied_if_stopped(directory: Path) -> Iterator[None]:
    """Remove the files of a directory that was empty before: what is not complete is no checkpoint, fills the
    disk, and would be in the way of the next try."""
    try:
        yield
    except BaseException:  # Ctrl-C, too
        for file in directory.iterdir():
            file.unlink(missing_ok=True)
        raise


def show(report: dict[str, Any], console: Console) -> None:
    """The report in a line."""
    how = "values made while reading" if report["sparse"] else "written"
    console.print(
        f"{report['model']}, {report['layers']} layers, {report['format']}: {report['bytes'] / 1e9:.1f} GB "
        f"in {report['files']} files ({how}) in {report['seconds']:.0f} s at {report['path']}",
        markup=False,
        soft_wrap=True,
    )


def model_config(model: str, layers: int | None = None, changes: Sequence[str] = ()) -> dict[str, Any]:
    """config.json of a `conf/model` entry, cut to its first layers, without multi-token prediction."""
    from kt_ray.config.compose import compose

    given = compose([f"model={model}", "mode=plan"]).model.config
    if not given:
        fault = f"conf/model/{model}.yaml has no `config`"
        raise UserError(fault, required="a model with known dimensions", remedy="take --model deepseek_v3")
    config: dict[str, Any] = json.loads(json.dumps(dict(given)))
    if isinstance(config.get("text_config"), dict):
        fault = f"{model} is multimodal: no checkpoint of its text part alone is released"
        raise UserError(fault, remedy="take a model of text alone")
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals or key not in config:
            required = f"KEY=VALUE with a key of `config` in conf/model/{model}.yaml"
            raise UserError(f"--set {change} changes nothing", required=required, remedy="correct --set")
        try:
            config[key] = json.loads(value)
        except ValueError as error:
            raise UserError(
                f"--set {change} has no JSON value",
                observed=value or "nothing",
                required='a number, true, false, null, "text" in its quotes, [1, 2]',
                remedy=f"correct it, or for a text write --set '{key}=\"{value}\"'",
            ) from error
    if changes:
        try:
            dims_from_config(config)
        except UserError as error:
            raise _bad_set(changes, error) from error
    whole = int(config[layers_key(config)])
    if layers is not None:
        if layers > whole:
            raise UserError(
                f"--layers {layers} of {model}", required=f"at most {whole}", remedy="lower --layers"
            )
        config = {k: v[:layers] if isinstance(v, list) and len(v) == whole else v for k, v in config.items()}
        config[layers_key(config)] = layers
    if "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    return config


def _bad_set(changes: Sequence[str], error: Exception) -> UserError:
    text = str(error).partition(". To fix:")[0]
    return UserError(
        "no model can be made with these values",
        where=f"--set {' '.join(changes)}",
        observed=text if isinstance(error, UserError) else f"{type(error).__name__}: {text}",
        required="values that a config.json of this family may have",
        remedy="correct --set",
    )


def released(config: dict[str, Any]) -> tuple[list[tuple[str, tuple[int, ...]]], str]:
    """(released name, shape) of every parameter, layer by layer, and the architecture's name."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    plain = {k: v for k, v in config.items() if k not in ("quantization_config", "model_type")}
    kind = str(config["model_type"])
    with torch.device("meta"):
        built = AutoConfig.for_model(ALIASES.get(kind, kind), **plain)
        model = AutoModelForCausalLM.from_config(built, trust_remote_code=False)
    state = revert_weight_conversion(model, model.state_dict())
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if built.tie_word_embeddings else ()
    unused = zero_experts(config)  # whose gate and up transformers saves, and no release has
    own = (name for name in state if (parts := expert_name(name)) is None or parts.expert not in unused)
    names = sorted((name for name in own if name not in tied), key=_place)
    return [(name, tuple(state[name].shape)) for name in names], type(model).__name__


def _place(name: str) -> tuple[int, list[tuple[int, int | str]]]:
    """Embedding, layers in order, the rest; names with numbers in them in the numbers' order."""
    layer = _LAYER.search(name)
    group = int(layer[1]) if layer else -1 if "embed" in name else 1 << 30
    return group, [(0, int(p)) if p.isdigit() else (1, p) for p in name.split(".")]


def split(tensors: Sequence[Entry], limit: int) -> Iterator[list[Entry]]:
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


def write(file: Path, shard: Sequence[Entry], seed: int, *, sparse: bool) -> None:
    """One safetensors file: tensors by element size, then by name, as the safetensors package writes them."""
    ordered = sorted(shard, key=lambda entry: (-BITS[entry.dtype], entry.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for entry in ordered:
        end = place + entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [place, end]}
        if sparse and isinstance(entry.fill, str):
            header[entry.name]["fill"] = f"{entry.fill}:{seed}"
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb", buffering=0) as out:
        _put(out.fileno(), memoryview(struct.pack("<Q", len(text)) + text))
        start = 8 + len(text)
        for entry in ordered:
            if isinstance(entry.fill, bytes):
                _put(out.fileno(), memoryview(entry.fill))
            elif sparse:
                out.seek(entry.nbytes, os.SEEK_CUR)
            else:
                fill = Fill(entry.fill, seed, start)
                for piece in fill.pieces(entry.name, BITS[entry.dtype] // 8, start, entry.nbytes):
                    _put(out.fileno(), tensor_bytes(piece))
            start += entry.nbytes
        out.truncate(start)
        os.fsync(out.fileno())
        # Written once, read by another run: out of the way of what the machine does meanwhile.
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _put(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _tokenizer(source: Path | None, out: Path, vocabulary: int) -> None:
    from kt_ray.data.tokenizer_files import load_tokenizer
    from kt_ray.demo import ensure_demo_model

    directory = source if source is not None else Path(ensure_demo_model("demo"))
    if not directory.is_dir():
        raise UserError("no such directory", where=f"--tokenizer {directory}", remedy="correct --tokenizer")
    size = len(load_tokenizer(str(directory)))
    if size > vocabulary:
        raise UserError(
            "the tokenizer is larger than the model's vocabulary",
            where=str(directory),
            observed=f"{size} tokens",
            required=f"at most {vocabulary}",
            remedy="take another --tokenizer",
        )
    for file in sorted(directory.iterdir()):
        if file.name.startswith(TOKENIZER):
            shutil.copyfile(file, out / file.name)
