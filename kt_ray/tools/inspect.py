"""`inspect PATH`: what a checkpoint or an adapter contains, and which programs take it.

Checkpoints are read from their headers alone. Of an adapter every value is read: a B of zeros is the usual
sign of a run that trained nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.peft_config import CONFIG, WEIGHTS
from kt_ray.checkpoint.expert_groups import ExpertGroup, expert_groups
from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import expert_name, family, part_of
from kt_ray.checkpoint.safetensors_file import read_tensor
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.errors import UserError
from kt_ray.integer_packing import METHODS
from kt_ray.parse import read_json

_UNTESTED = "by its documented key names (untested)"


def inspect(path: str | Path) -> dict[str, Any]:
    """Describe a directory.

    Returns:
        {"kind": "checkpoint" or "adapter", ...}, all of it JSON.

    Raises:
        UserError: neither, or a damaged one.
    """
    where = Path(path)
    of_run = (where / "adapter" / CONFIG).is_file() and not (where / "config.json").is_file()
    if of_run or (where / CONFIG).is_file() or (where / WEIGHTS).is_file():
        return _adapter(where)
    return _checkpoint(CheckpointIndex.open(where))


def convention(matrix: StoredMatrix) -> str:
    """A quantised weight's format and scales in a few words."""
    (rows, columns), shape = matrix.block, matrix.shape[-2:]
    if matrix.format == "mxfp4":
        ends = {"_blocks": "blocks and scales", "_packed": "packed"}
        form = next((text for end, text in ends.items() if matrix.data.name.endswith(end)), "E8M0 scales")
        return f"mxfp4 ({form})"
    if matrix.format == "nvfp4":
        return f"nvfp4 ({matrix.scales.dtype} scale per tensor, E4M3 scale per group of 16)"
    if rows >= shape[0] and columns >= shape[1] and shape[0] > 1:
        per = "block" if matrix.scales.name.endswith("_inv") else "tensor"
    elif rows == 1:
        per = "row" if columns == shape[1] else f"group of {columns}"
    else:
        per = f"{rows}x{columns}"
    return f"{matrix.format} ({matrix.scales.dtype} scale per {per})"


# -- checkpoints


def _checkpoint(index: CheckpointIndex) -> dict[str, Any]:
    layers = index.layer_count
    parts: dict[str, dict[str, dict[str, int]]] = defaultdict(
        lambda: defaultdict(lambda: {"parameters": 0, "tensors": 0, "bytes": 0})
    )
    counted: set[str] = set()
    for name in index.names:
        matrix = index.matrices.get(name)
        keys = (name,) if matrix is None else matrix.keys
        label = index.tensors[name].dtype if matrix is None else convention(matrix)
        row = parts[part_of(name, layers)][label]
        row["parameters"] += torch.Size(index.shape(name)).numel()
        row["tensors"] += len(keys)
        row["bytes"] += sum(index.tensors[key].nbytes for key in keys)
        counted.update(keys)
    auxiliary = sorted(set(index.tensors) - counted)
    groups = expert_groups(index) if any(expert_name(name) for name in index.names) else {}
    return {
        "kind": "checkpoint",
        "path": str(index.path),
        "model_type": index.config.get("model_type"),
        "family": family(index.config),
        "architectures": index.config.get("architectures"),
        "layers": layers,
        "shards": len(index.files),
        "bytes": index.nbytes,
        "parameters": sum(row["parameters"] for part in parts.values() for row in part.values()),
        "parts": {part: dict(sorted(rows.items())) for part, rows in sorted(parts.items())},
        "experts": _experts([g for g in groups.values() if not g.mtp]),
        "skipped_layers": sorted(g.prefix for g in groups.values() if g.mtp),
        "auxiliary_tensors": len(auxiliary),
        "takes": _checkpoint_takes(index, groups),
    }


def _experts(groups: list[ExpertGroup]) -> dict[str, Any] | None:
    if not groups:
        return None
    first = groups[0]
    up = first.names[first.role("up"), None] if first.fused else f"{first.prefix}.N.{first.leaf('up')}"
    return {
        "moe_layers": [g.layer for g in groups],
        "count": first.count,
        "hidden": first.sizes[0],
        "intermediate": first.shape("up")[0],
        "layout": "fused" if first.fused else "per_expert",
        "names": up,
        "interleaved": first.fused and first.interleaved,
        "transposed": first.fused and first.transposed,
        "biased": bool(first.biases),
    }


def _checkpoint_takes(index: CheckpointIndex, groups: dict[str, ExpertGroup]) -> dict[str, str]:
    try:
        ExpertLayout.detect(index)
        trains = "yes"
    except UserError as error:
        trains = f"no: {error.what}"
    quantization = index.config.get("quantization_config") or index.text_config.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    methods = (None, "fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "modelopt", *METHODS)
    if index.matrices and method is None:
        text = "no: quantised tensors without a quantization_config in config.json"
        return {"kt_ray": trains, "transformers": text, "vLLM": text, "SGLang": text}
    if method not in methods:
        text = f"not known for quant_method {method!r}"
        return {"kt_ray": trains, "transformers": text, "vLLM": text, "SGLang": text}
    serving = "by its documented conventions (untested)"
    if any(g.fused for g in groups.values()) and method == "fp8":
        serving = "not known: servers document FP8 experts one by one"
    transformers = "yes" if method is None else f"with its {method} quantiser (untested)"
    if zero := index.zero_experts:
        numbers = {parts.expert for name in index.names if (parts := expert_name(name))}
        if not numbers & {None, *zero}:
            transformers = "no: it wants gate and up of zero experts, which releases do not have"
    return {"kt_ray": trains, "transformers": transformers, "vLLM": serving, "SGLang": serving}


# -- adapters


def _adapter(path: Path) -> dict[str, Any]:
    lora = Lora.open(path)
    if model := _model_type(lora):
        lora = Lora.open(path, model)
    pairs = lora.pairs()
    zero, squares = 0, defaultdict[str, list[float]](lambda: [0.0, 0.0])
    for pair in pairs:
        a, b = (float(read_tensor(info).double().square().sum()) for info in (pair.a, pair.b))
        zero += b == 0.0
        sums = squares["experts (fused)" if pair.experts else pair.module.rpartition(".")[2]]
        sums[0] += a
        sums[1] += b
    form = "fused" if lora.fused else "per_expert" if lora.experts else "none"
    if lora.fused and lora.experts:
        form = "fused and per_expert"
    takes = _adapter_takes(lora, model)
    norms = {leaf: {"a": _norm(a), "b": _norm(b)} for leaf, (a, b) in sorted(squares.items())}
    if any(None in row.values() for row in norms.values()):
        takes = dict.fromkeys(takes, "no: it holds values that are not finite")
    return {
        "kind": "adapter",
        "path": str(path),
        "base": lora.base,
        "model_type": model,
        "experts": form,
        "ranks": sorted({pair.rank for pair in pairs}),
        "scales": sorted({pair.scale for pair in pairs}),
        "dora": lora.dora,
        "rslora": bool(lora.config.get("use_rslora")),
        "dtypes": sorted({info.dtype for pair in pairs for info in (pair.a, pair.b)}),
        "bytes": sum(info.nbytes for pair in pairs for info in (pair.a, pair.b)),
        "pairs": {"linear": len(lora.linear), "expert": len(lora.experts), "fused": len(lora.fused)},
        "zero_b": zero,
        "norms": norms,
        "target_modules": lora.config.get("target_modules"),
        "target_parameters": lora.config.get("target_parameters"),
        "takes": takes,
    }


def _norm(squares: float) -> float | None:
    """The root of a sum of squares; None where a value is not finite, which JSON cannot say."""
    return squares**0.5 if math.isfinite(squares) else None


def _model_type(lora: Lora) -> str | None:
    base = lora.base_directory()
    if base is None:
        return None
    return family(read_json(base / "config.json", "config.json", "name a base model that is here"))


def _adapter_takes(lora: Lora, model_type: str | None) -> dict[str, str]:
    settings = {(pair.rank, pair.scale) for pair in lora.linear.values()} | {
        (pair.rank, pair.scale) for pair in lora.experts.values()
    }
    if lora.fused:
        peft, server = "yes", "no: they read experts one by one (export --form peft-per-expert)"
    elif not lora.experts:
        peft, server = "yes", _UNTESTED
    else:
        merges = model_type is not None and lora.merged_by_peft(model_type)
        peft = "yes" if merges else "not known to merge these keys (export --form peft-fused)"
        server = _UNTESTED
    if lora.dora:
        server = "no: they do not read DoRA (merge it)"
    elif len(settings) > 1 and not lora.fused:
        server = "no: one rank and one alpha are required"
    return {"kt_ray merge": "yes", "PEFT": peft, "vLLM": server, "SGLang": server}


# -- text


def _line(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, markup=False)


def show(report: dict[str, Any], console: Console) -> None:
    """The report as tables."""
    if report["kind"] == "adapter":
        _show_adapter(report, console)
        return
    _line(
        console,
        f"{report['path']}: {report['family']}, {report['layers']} layers, "
        f"{report['parameters'] / 1e9:.3f} B parameters, {report['bytes'] / 1e9:.3f} GB "
        f"in {report['shards']} files",
    )
    table = Table("part", "format", "parameters", "GB")
    for part, rows in report["parts"].items():
        for label, row in rows.items():
            table.add_row(part, label, f"{row['parameters']:,}", f"{row['bytes'] / 1e9:.3f}")
    console.print(table)
    experts = report["experts"]
    if experts:
        extra = [word for word in ("interleaved", "transposed", "biased") if experts[word]]
        _line(
            console,
            f"experts: {experts['count']} in each of {len(experts['moe_layers'])} layers, "
            f"hidden {experts['hidden']}, intermediate {experts['intermediate']}, {experts['layout']} "
            f"({', '.join([experts['names'], *extra])})",
        )
    if report["skipped_layers"]:
        _line(console, f"multi-token prediction, not trained: {', '.join(report['skipped_layers'])}")
    if report["auxiliary_tensors"]:
        _line(console, f"scales of activations and caches, not needed: {report['auxiliary_tensors']}")
    _show_takes(report, console)


def _show_adapter(report: dict[str, Any], console: Console) -> None:
    kind = "DoRA" if report["dora"] else "LoRA"
    counts = ", ".join(f"{count} {kind}" for kind, count in report["pairs"].items() if count)
    _line(
        console,
        f"{report['path']}: {kind} for {report['base']} ({report['model_type'] or 'base not here'}), experts "
        f"{report['experts']}, {counts} pairs, rank {report['ranks']}, scale {report['scales']}, "
        f"{report['bytes'] / 1e9:.3f} GB {report['dtypes']}",
    )
    table = Table("modules", "norm of A", "norm of B")
    for leaf, row in report["norms"].items():
        table.add_row(leaf, *("not finite" if row[half] is None else f"{row[half]:.4g}" for half in "ab"))
    console.print(table)
    if report["zero_b"]:
        _line(console, f"{report['zero_b']} pairs have a B of zeros: they change nothing")
    _show_takes(report, console)


def _show_takes(report: dict[str, Any], console: Console) -> None:
    table = Table("program", "takes it")
    for program, answer in report["takes"].items():
        table.add_row(program, answer)
    console.print(table)
