"""`convert SRC OUT --to FORMAT`: requantise the routed experts of a checkpoint, or bring it back to BF16.

What is written, by format (docs/tools.md says which server reads what):

    int8   compressed-tensors int-quantized, per row or --group, dynamic INT8 activations declared
    int4   compressed-tensors pack-quantized, groups of 32 or --group
    mxfp4  compressed-tensors mxfp4-pack-quantized; gpt-oss as OpenAI released it (blocks and scales)
    fp8    128x128 blocks, weight_scale_inv, as DeepSeek and Qwen release them
    bf16   every quantised weight, also outside the experts

Quantised experts are written one by one whatever the source: servers read those names, and the fused
families (Qwen3.5, ...) are released that way when quantised; Step-3.7 in FP8 is released in stacks, and
written so. BF16 is fused where the family is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kt_ray.adapter.peft_config import converts_keys
from kt_ray.checkpoint.content import check_content
from kt_ray.checkpoint.encode_weights import Encoding, Entry
from kt_ray.checkpoint.expert_groups import ExpertGroup, expert_groups, split_rows
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import (
    PROJECTIONS,
    FusedRelease,
    apart_name,
    family,
    fused_release,
    is_linear,
    part_of,
)
from kt_ray.checkpoint.shard_writer import SHARD_BYTES, Notes, Unit, copied, finish, write_shards
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.tools.units import (
    QUANTIZATION_FILES,
    Placed,
    Target,
    as_stored,
    check_directories,
    check_formats,
    error_of,
    made,
    position,
    raw_keys,
    rewritten,
    without_quantization,
)

REPORT = "convert_report.json"


@dataclass(frozen=True)
class Options:
    """--to, --group (None = the format's own), --all-linear."""

    to: str
    group: int | None = None
    all_linear: bool = False

    @property
    def columns(self) -> int | None:
        """Columns per scale of int8 (None = all) and int4."""
        return 32 if self.group is None and self.to == "int4" else self.group


def convert(
    source: str | Path, out: str | Path, options: Options, *, shard_bytes: int = SHARD_BYTES, threads: int = 1
) -> dict[str, Any]:
    """Write the converted checkpoint; an interrupted conversion resumes.

    Returns:
        The report, also in OUT/convert_report.json: {"to", "group", "all_linear", "layers": [{"layer",
        "gate", "up", "down"}], "others": {name: error}}; errors are relative Frobenius norms.

    Raises:
        UserError: an unreadable or unfinished checkpoint, a shape that the format cannot hold, a directory of
            another job.
    """
    if options.group is not None and options.to not in ("int8", "int4"):
        raise UserError(f"{options.to} has no choice of group", where="--group", remedy="leave --group away")
    if options.all_linear and options.to == "bf16":
        raise UserError("bf16 dequantises every weight anyway", where="--all-linear", remedy="leave it away")
    index, target = CheckpointIndex.open(source), Path(out)
    check_directories(index, target)
    check_formats(index)
    plan = _Plan(index, options)
    units = plan.units()
    check_content(index)
    job = {
        "tool": "convert",
        "source": index.fingerprint,
        "to": options.to,
        "group": options.group,
        "all_linear": options.all_linear,
    }
    notes = write_shards(
        target, units, job, shard_bytes=shard_bytes, threads=threads, title=f"convert to {options.to}"
    )
    report = _report(options, notes)
    write_atomic(target / REPORT, json.dumps(report, indent=2) + "\n")
    left_out = (REPORT, *QUANTIZATION_FILES)
    finish(target, index.path, plan.config(), units, shard_bytes, left_out=left_out)
    return report


class _Plan:
    """Every tensor of the result."""

    def __init__(self, index: CheckpointIndex, options: Options) -> None:
        self.index, self.options = index, options
        self.groups = expert_groups(index)
        self.family = family(index.config)
        self.release = fused_release(self.family) or FusedRelease()
        self.plain: set[str] = set()  # parameters outside the experts that are not quantised

    def units(self) -> list[Unit]:
        """In the order of the source's bytes."""
        placed: list[Placed] = []
        experts: set[str] = set()
        for group in self.groups.values():
            experts |= {*group.names.values(), *group.biases.values()}
            placed += self._fused(group) if self._is_fused(group) else self._one_by_one(group)
        for name in sorted(self.index.names - experts):
            placed += self._other(name)
        return [unit for _, unit in sorted(placed, key=lambda item: item[0])]

    def config(self) -> dict[str, Any]:
        """config.json of the result; call after `units`."""
        config = without_quantization(self.index.config, to=self.options.to)
        if self.options.to == "bf16":
            return config
        ignored = [
            name.removesuffix(".weight")
            for name in sorted(self.plain)
            if name.endswith(".weight")
            and len(self.index.shape(name)) == 2
            and part_of(name, None) not in ("norms", "embedding")
        ]
        blocks = self.options.to == "mxfp4" and self.release.mxfp4_blocks
        return config | {
            "quantization_config": quantization_config(
                "mxfp4-blocks" if blocks else self.options.to, self.options.columns, ignored
            )
        }

    def _is_fused(self, group: ExpertGroup) -> bool:
        if self.options.to == "bf16":
            released = fused_release(self.family) is not None and not converts_keys(self.family)
            return group.fused or released
        if self.options.to == "fp8":
            return self.release.apart and self._roles(group) == PROJECTIONS
        return self.options.to == "mxfp4" and self.release.mxfp4_blocks

    def _target(self, convention: str, name: str, shape: tuple[int, ...]) -> Target:
        if self.options.to == "bf16":
            return Entry(name, "BF16", shape)
        try:
            return Encoding.new(convention, name, shape, group=self.options.columns)
        except ValueError as error:
            raise UserError(
                f"a weight cannot be stored as {self.options.to}",
                where=str(self.index.path),
                observed=error,
                remedy="choose another --group or --to"
                + (", or leave --all-linear away" if self.options.all_linear else ""),
            ) from error

    # -- experts

    def _one_by_one(self, group: ExpertGroup) -> list[Placed]:
        placed: list[Placed] = []
        for expert in range(group.count):
            for projection in group.projections:
                name = f"{group.prefix}.{expert}.{group.leaf(projection)}"
                # Read as the source is stored: gate and up of one expert.
                unit = made(
                    self._target(self.options.to, f"{name}.weight", group.shape(projection)),
                    lambda _, e=expert, p=projection: group.read(e, p),  # type: ignore[misc]
                    note=error_of(f"{group.prefix}/{projection}"),
                )
                first = position(self.index, group.source(projection, expert))
                placed.append((first, unit))
                if group.biases:
                    entry = Entry(f"{name}.bias", self._bias_dtype(group), group.shape(projection)[:1])
                    unit = made(entry, lambda _, e=expert, p=projection: group.bias(e, p))  # type: ignore[misc]
                    placed.append((first, unit))
        return placed

    def _bias_dtype(self, group: ExpertGroup) -> str:
        return self.index.tensors[next(iter(group.biases.values()))].dtype

    def _roles(self, group: ExpertGroup) -> tuple[str, ...]:
        """What its fused tensors hold: as they are stored, or as the family is released."""
        return group.stored_roles if group.fused else group.projections if self.release.apart else group.roles

    def _fused(self, group: ExpertGroup) -> list[Placed]:
        placed: list[Placed] = []
        for role in self._roles(group):
            released = apart_name(group.prefix, role) if self.release.apart else f"{group.prefix}.{role}_proj"
            name = group.names.get((role, None), released)
            first = position(self.index, group.source("gate" if role == "gate_up" else role, 0))
            placed.append((first, self._stack(group, role, name)))
            if group.biases:
                placed.append((first, self._stack_biases(group, role)))
        return placed

    def _stack(self, group: ExpertGroup, role: str, name: str) -> Unit:
        shape, to = group.shape(role), self.options.to
        transposed = to == "bf16" and (self.release.transposed or (group.fused and group.transposed))
        convention = "mxfp4-blocks" if to == "mxfp4" else to
        return made(
            self._target(convention, name, (group.count, *(shape[::-1] if transposed else shape))),
            lambda expert: group.read(expert, role),
            experts=group.count,
            transposed=transposed,
            note=partial(_note_roles, group, role),
        )

    def _stack_biases(self, group: ExpertGroup, role: str) -> Unit:
        if (role, None) in group.biases:
            return copied(self.index.tensors[group.biases[role, None]])
        shape = (group.count, group.shape(role)[0])
        entry = Entry(f"{group.prefix}.{role}_proj_bias", self._bias_dtype(group), shape)
        return made(entry, lambda expert: group.bias(expert, role), experts=group.count)

    # -- everything else

    def _other(self, name: str) -> list[Placed]:
        index, to = self.index, self.options.to
        matrix, at = index.matrices.get(name), position(index, name)
        if self.options.all_linear and is_linear(name, index.shape(name)):
            target = self._target(to, name, index.shape(name))
            read: Callable[[int], Tensor] = lambda _: index.value(name, torch.float32)  # noqa: E731
            return [(at, made(target, read, note=error_of(f"other/{name}")))]
        if index.is_blank_bias(name):  # goes with GPTQ's packing: the model has no place for it
            return []
        if matrix is None:
            self.plain.add(name)
            return as_stored(index, raw_keys(index, name))
        if to == "fp8" and _is_block_fp8(matrix):
            return as_stored(index, raw_keys(index, name))
        self.plain.add(name)
        return [(at, rewritten(index, name, bf16=True))]


def quantization_config(convention: str, group: int | None, ignored: Sequence[str]) -> dict[str, Any]:
    """quantization_config of config.json, as vLLM, SGLang and transformers read it.

    Args:
        convention: "int8", "int4", "mxfp4", "fp8" or "mxfp4-blocks".
        group: columns per scale of int8 (None = all) and int4.
        ignored: modules with a matrix that is not quantised.
    """
    if convention == "fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(ignored),
        }
    if convention == "mxfp4-blocks":
        return {"quant_method": "mxfp4", "modules_to_not_convert": list(ignored)}
    formats = {"int8": "int-quantized", "int4": "pack-quantized", "mxfp4": "mxfp4-pack-quantized"}
    size = 32 if convention == "mxfp4" else group
    weights: dict[str, Any] = {
        "num_bits": 8 if convention == "int8" else 4,
        "type": "float" if convention == "mxfp4" else "int",
        "symmetric": True,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    if convention == "mxfp4":
        weights |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    activations = None
    if convention == "int8" and size is None:  # the servers' INT8 kernels quantise activations per token
        activations = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
            "group_size": None,
            "observer": None,
            "observer_kwargs": {},
        }
    return {
        "quant_method": "compressed-tensors",
        "format": formats[convention],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": list(ignored),
    }


def _is_block_fp8(matrix: StoredMatrix) -> bool:
    """As `--to fp8` writes it."""
    blocks = tuple(-(-size // 128) for size in matrix.shape)
    return matrix.scales.name.endswith(".weight_scale_inv") and matrix.scales.shape == blocks


def _note_roles(group: ExpertGroup, role: str, notes: Notes, before: Tensor, after: Tensor) -> None:
    if role != "gate_up":
        error_of(f"{group.prefix}/{role}")(notes, before, after)
        return
    halves = (split_rows(t, group.interleaved) for t in (before, after))
    for projection, old, new in zip(("gate", "up"), *halves, strict=True):
        error_of(f"{group.prefix}/{projection}")(notes, old, new)


def _report(options: Options, notes: Notes) -> dict[str, Any]:
    layers: dict[str, dict[str, Any]] = {}
    others: dict[str, float] = {}
    for key, (wrong, all_of_it) in notes.items():
        error = (wrong / all_of_it) ** 0.5 if all_of_it else 0.0
        first, _, last = key.rpartition("/")
        if key.startswith("other/"):
            others[key.removeprefix("other/")] = error
        else:
            layers.setdefault(first, {"layer": first})[last] = error
    natural = sorted(layers, key=lambda p: [int(s) if s.isdigit() else -1 for s in p.split(".")])
    return {
        "to": options.to,
        "group": options.columns,
        "all_linear": options.all_linear,
        "layers": [{k: layers[p][k] for k in ("layer", *PROJECTIONS) if k in layers[p]} for p in natural],
        "others": others,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The report as a table."""
    table = Table(title=f"relative error of {report['to']} against the source")
    for column in ("experts", *PROJECTIONS):
        table.add_column(column, justify="left" if column == "experts" else "right")
    for row in report["layers"]:
        table.add_row(row["layer"], *(f"{row[p]:.2e}" if p in row else "" for p in PROJECTIONS))
    console.print(table)
    if report["others"]:
        worst = max(report["others"], key=report["others"].__getitem__)
        console.print(
            f"{len(report['others'])} other weights, largest error {report['others'][worst]:.2e} ({worst})"
        )
