"""`convert SRC OUT --to FORMAT`: requantise the routed experts of a checkpoint, or bring it back to BF16.

What is written, by format (docs/tools.md says which server reads what):

    int8   compressed-tensors int-quantized, per row or --group, dynamic INT8 activations declared
    int4   compressed-tensors pack-quantized, groups of 32 or --group
    mxfp4  compressed-tensors mxfp4-pack-quantized; gpt-oss as OpenAI released it (blocks and scales)
    fp8    128x128 blocks, weight_scale_inv, as DeepSeek and Qwen release them
    bf16   every quantised weight, also outside the experts

Quantised experts are written one by one whatever the source: servers read those names, and the fused
families (Qwen3.5, ...) are released that way when quantised. BF16 is fused where the family is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kt_ray.adapter.peft_config import converts_keys
from kt_ray.checkpoint.encode_weights import Encoding, Entry
from kt_ray.checkpoint.expert_groups import ExpertGroup, expert_groups, split_rows
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.names import PROJECTIONS, FusedRelease, family, fused_release, is_linear, part_of
from kt_ray.checkpoint.shard_writer import SHARD_BYTES, Notes, Piece, Unit, copied, finish, write_shards
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.tools.quantization import quantization_config
from kt_ray.tools.units import (
    Placed,
    add_error,
    as_stored,
    check_directories,
    encoded,
    position,
    raw_keys,
    rewritten,
    without_quantization,
)

FORMATS = ("int8", "int4", "fp8", "mxfp4", "bf16")
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
        UserError: an unreadable checkpoint, a shape that the format cannot hold, a directory of another job.
    """
    if options.group is not None and options.to not in ("int8", "int4"):
        raise UserError(f"{options.to} has no choice of group", where="--group", remedy="leave --group away")
    if options.all_linear and options.to == "bf16":
        raise UserError("bf16 dequantises every weight anyway", where="--all-linear", remedy="leave it away")
    index, target = CheckpointIndex.open(source), Path(out)
    check_directories(index, target)
    plan = _Plan(index, options)
    units = plan.units()
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
    finish(target, index.path, plan.config(), units, shard_bytes, own_files=(REPORT,))
    return report


class _Plan:
    """Every tensor of the result."""

    def __init__(self, index: CheckpointIndex, options: Options) -> None:
        self.index, self.options = index, options
        self.groups = expert_groups(index)
        self.family = family(index.config)
        self.release = fused_release(self.family) or FusedRelease()
        self.quantised: set[str] = set()  # names of the result's quantised weights
        self.plain: set[str] = set()

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
        config = without_quantization(self.index.config, bf16=self.options.to == "bf16")
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
        return self.options.to == "mxfp4" and self.release.mxfp4_blocks

    def _encoding(self, convention: str, name: str, shape: tuple[int, ...]) -> Encoding:
        self.quantised.add(name)
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
                source = group.source(projection, expert)
                name = f"{group.prefix}.{expert}.{group.leaf(projection)}.weight"
                placed.append((position(self.index, source), self._expert(group, expert, projection, name)))
            if group.biases:
                placed.append((position(self.index, source), self._expert_biases(group, expert)))
        return placed

    def _expert(self, group: ExpertGroup, expert: int, projection: str, name: str) -> Unit:
        label = f"{group.prefix}/{projection}"
        shape = group.shape(projection)
        if self.options.to == "bf16":
            # Read as the source is stored: gate and up of one expert.
            def produce(notes: Notes) -> Iterator[Piece]:
                before = group.read(expert, projection)
                yield Piece(name, before.bfloat16())
                add_error(notes, label, before, before.bfloat16().float())

            return Unit((Entry(name, "BF16", shape),), produce)
        return encoded(
            self._encoding(self.options.to, name, shape),
            lambda: group.read(expert, projection),
            lambda notes, before, after: add_error(notes, label, before, after),
        )

    def _expert_biases(self, group: ExpertGroup, expert: int) -> Unit:
        names = {p: f"{group.prefix}.{expert}.{group.leaf(p)}.bias" for p in group.projections}
        dtype = self._bias_dtype(group)
        entries = tuple(Entry(names[p], dtype, (group.shape(p)[0],)) for p in group.projections)

        def produce(notes: Notes) -> Iterator[Piece]:
            for projection, name in names.items():
                yield Piece(name, group.bias(expert, projection))

        return Unit(entries, produce)

    def _bias_dtype(self, group: ExpertGroup) -> str:
        return self.index.tensors[next(iter(group.biases.values()))].dtype

    def _fused(self, group: ExpertGroup) -> list[Placed]:
        placed: list[Placed] = []
        for role in group.roles:
            name = group.names.get((role, None), f"{group.prefix}.{role}_proj")
            first = position(self.index, group.source("gate" if role == "gate_up" else role, 0))
            placed.append((first, self._stack(group, role, name)))
            if group.biases:
                placed.append((first, self._stack_biases(group, role)))
        return placed

    def _stack(self, group: ExpertGroup, role: str, name: str) -> Unit:
        rows, columns = group.shape(role)
        plain = self.options.to == "bf16"
        transposed = plain and (self.release.transposed or (group.fused and group.transposed))
        if plain:
            encoding = None
            end = (columns, rows) if transposed else (rows, columns)
            entries: tuple[Entry, ...] = (Entry(name, "BF16", (group.count, *end)),)
        else:
            encoding = self._encoding("mxfp4-blocks", name, (group.count, rows, columns))
            entries = encoding.entries

        def produce(notes: Notes) -> Iterator[Piece]:
            for expert in range(group.count):
                before = group.read(expert, role)
                if encoding is None:
                    written = before.bfloat16()
                    yield Piece(name, written.t() if transposed else written, expert)
                    meant = written.float()
                else:
                    data, scales, meant = encoding.encode(before)
                    yield Piece(encoding.data.key, data, expert)
                    yield Piece(encoding.scales.key, scales, expert)
                _note_roles(notes, group, role, before, meant)

        return Unit(entries, produce)

    def _stack_biases(self, group: ExpertGroup, role: str) -> Unit:
        if (role, None) in group.biases:
            return copied(self.index.tensors[group.biases[role, None]])
        name = f"{group.prefix}.{role}_proj_bias"

        def produce(notes: Notes) -> Iterator[Piece]:
            for expert in range(group.count):
                yield Piece(name, group.bias(expert, role), expert)

        return Unit((Entry(name, self._bias_dtype(group), (group.count, group.shape(role)[0])),), produce)

    # -- everything else

    def _other(self, name: str) -> list[Placed]:
        index, to = self.index, self.options.to
        matrix, at = index.matrices.get(name), position(index, name)
        label = f"other/{name}"
        if self.options.all_linear and is_linear(name, index.shape(name)):
            unit = encoded(
                self._encoding(to, name, index.shape(name)),
                lambda: index.value(name, torch.float32),
                lambda notes, before, after: add_error(notes, label, before, after),
            )
            return [(at, unit)]
        if matrix is None:
            self.plain.add(name)
            return as_stored(index, raw_keys(index, name))
        if to == "fp8" and _is_block_fp8(matrix):
            self.quantised.add(name)
            return as_stored(index, raw_keys(index, name))
        self.plain.add(name)
        return [(at, rewritten(index, name, bf16=True))]


def _is_block_fp8(matrix: StoredMatrix) -> bool:
    """As `--to fp8` writes it."""
    blocks = tuple(-(-size // 128) for size in matrix.shape)
    return matrix.scales.name.endswith(".weight_scale_inv") and matrix.scales.shape == blocks


def _note_roles(
    notes: Notes, group: ExpertGroup, role: str, before: torch.Tensor, after: torch.Tensor
) -> None:
    if role != "gate_up":
        add_error(notes, f"{group.prefix}/{role}", before, after)
        return
    halves = (split_rows(t, group.interleaved) for t in (before, after))
    for projection, old, new in zip(("gate", "up"), *halves, strict=True):
        add_error(notes, f"{group.prefix}/{projection}", old, new)


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
