"""Checks of a checkpoint's routed experts: shapes, types, formats, and what fused tensors say about sizes.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.safetensors_file import damaged
from kt_ray.checkpoint.stored import StoredMatrix
from kt_ray.errors import UserError

_PLAIN = {"BF16": "bf16", "F32": "f32"}
_READ = "BF16, F32, FP8, MXFP4, NVFP4, INT8 or INT4"
_CONVERT = "python -m kt_ray.tools convert {path} <new directory> --to bf16"


def no_experts(index: CheckpointIndex) -> UserError:
    """A model without routed experts."""
    return damaged(
        "checkpoint has no routed experts",
        index.path,
        f"model_type {index.config.get('model_type')!r}, {len(index.tensors)} tensors",
        "...experts.N.{gate,up,down}_proj.weight, ...experts.N.{w1,w2,w3}.weight "
        "or ...experts.{gate_up,down}_proj",
        "choose a Mixture-of-Experts checkpoint (model.path)",
    )


def two_dimensions(index: CheckpointIndex, name: str) -> tuple[int, ...]:
    """(rows, columns) of one expert's matrix."""
    shape = index.shape(name)
    if len(shape) != 2:
        raise _mixed_shapes(index, name, "[I, H]")
    return shape


def part_shapes(
    hidden: int, intermediate: int, transposed: bool, count: int | None
) -> dict[str, tuple[int, ...]]:
    """Shape of every part; with `count` of all experts."""
    shapes = {
        "gate": (intermediate, hidden),
        "up": (intermediate, hidden),
        "gate_up": (2 * intermediate, hidden),
        "down": (hidden, intermediate),
    }
    if transposed:
        shapes = {p: (b, a) for p, (a, b) in shapes.items()}
    return {p: shape if count is None else (count, *shape) for p, shape in shapes.items()}


def check_shapes(index: CheckpointIndex, names: Iterable[str], shape: tuple[int, ...]) -> None:
    """One shape for all of `names`."""
    for name in names:
        if index.shape(name) != shape:
            raise _mixed_shapes(index, name, f"{list(shape)} as in the first expert of {index.path.name}")


def check_part(index: CheckpointIndex, names: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """One shape, one format and one kind of scales for all experts of a layer. Returns the format, "" of a
    type that is not read."""
    check_shapes(index, names, shape)
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names:
        matrix = index.matrices.get(name)
        kinds[
            (index.tensors[name].dtype,)
            if matrix is None
            else (matrix.data.dtype, matrix.scales.dtype, matrix.block, *_packing(matrix))
        ].append(name)
    if len(kinds) > 1:
        few = min(kinds.values(), key=len)
        counts = {" ".join(map(str, kind)): len(names) for kind, names in kinds.items()}
        raise damaged(
            "experts of one layer have mixed types",
            f"{index.path}, {some(few, 2)}",
            ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items())),
            "one type for all experts of a layer",
            _CONVERT.format(path=index.path),
        )
    matrix = index.matrices.get(names[0])
    return _PLAIN.get(index.tensors[names[0]].dtype, "") if matrix is None else matrix.format


def _packing(matrix: StoredMatrix) -> tuple[str, ...]:
    return () if matrix.packing is None else (matrix.packing.name, matrix.format)


def check_bias(index: CheckpointIndex, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Shape and type of biases."""
    for name in names:
        info = index.tensors[name]
        if info.shape != shape:
            raise _mixed_shapes(index, name, list(shape))
        if info.dtype not in ("F32", "BF16", "F16"):
            what = "a bias of the experts is in a format that is not read"
            raise damaged(what, info.place, info.dtype, "BF16, F16 or F32")


def expert_bytes_of(index: CheckpointIndex, groups: tuple[tuple[str, ...], ...], count: int) -> int:
    """Bytes that the engine holds of one expert; checked to be the same for all of a layer."""
    total = 0
    for names in groups:
        matrix = index.matrices.get(names[0])
        if matrix is not None:
            total += matrix.nbytes
        else:
            total += index.tensors[names[0]].nbytes // (count if len(names) == 1 and count > 1 else 1)
    return total


def check_formats(
    index: CheckpointIndex, sources: dict[int, dict[str, tuple[str, ...]]], formats: dict[int, dict[str, str]]
) -> None:
    """Formats that are read, and float32 for all experts or for none."""
    where = first_of_each(formats, lambda layer, part: sources[layer][part][0])
    if "" in where:
        info = index.tensors[where[""]]
        what, required = "experts are in a format that is not read from checkpoints", _READ
        raise damaged(what, info.place, info.dtype, required, _CONVERT.format(path=index.path))
    check_float32(where, index.path, "float32 for all experts, or for none", _CONVERT.format(path=index.path))


def first_of_each(formats: dict[int, dict[str, str]], name: Callable[[int, str], str]) -> dict[str, str]:
    """Format -> `name(layer, part)` of the first part that has it."""
    where: dict[str, str] = {}
    for layer, parts in formats.items():
        for part, kind in parts.items():
            where.setdefault(kind, name(layer, part))
    return where


def check_float32(where: Mapping[str, str], path: Path, required: str, remedy: str) -> None:
    """The engine computes float32 weights in float32, all of them or none; `where`: format -> one tensor."""
    if "f32" in where and len(where) > 1:
        observed = ", ".join(f"{fmt} ({name})" for fmt, name in sorted(where.items()))
        raise damaged("experts have mixed types", path, observed, required, remedy)


def _mixed_shapes(index: CheckpointIndex, name: str, required: object) -> UserError:
    where = f"{index.first(name).file}, tensor {name}"
    return damaged("experts have mixed shapes", where, list(index.shape(name)), required)


def fused_sizes(index: CheckpointIndex, up: str, down: str, *, both: bool) -> tuple[int, int, bool]:
    """(H, I, transposed) from the shapes of the fused parameters: [E,2I,H] with [E,H,I], or [E,H,2I] with
    [E,I,H]; I instead of 2I where `up` does not hold both."""
    for name in (up, down):
        if len(index.shape(name)) != 3:
            raise _mixed_shapes(index, name, "three dimensions, experts first")
    (_, a, b), (_, c, d) = index.shape(up), index.shape(down)
    width = 2 if both else 1
    plain, swapped = (a, b) == (width * d, c), (b, a) == (width * c, d)
    if not plain and not swapped:
        observed = f"{up} {list(index.shape(up))}, {down} {list(index.shape(down))}"
        required = "[E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]"
        what = "fused expert weights have shapes that do not fit together"
        raise damaged(what, index.path, observed, required)
    if plain and swapped:  # of up alone the shapes do not tell
        plain = not a == index.text_config.get("hidden_size") != b
    return (c, d, False) if plain else (d, c, True)


def check_fused(
    index: CheckpointIndex, parts: dict[str, tuple[str, ...]], intermediate: int, transposed: bool
) -> None:
    """Quantised stacks of a layer lie row by row, and no scale belongs to gate and to up, but one of all."""
    for part, (name,) in parts.items():
        matrix = index.matrices.get(name)
        if matrix is None:
            continue
        if transposed:
            what = "fused quantised experts are stored transposed"
            raise damaged(what, index.path, f"{name} {list(matrix.shape)}", "[E, 2I, H] with [E, H, I]")
        if part == "gate_up" and intermediate % matrix.block[0] and matrix.block[0] < 2 * intermediate:
            raise damaged(
                "a scale of the fused experts covers rows of gate and of up",
                index.path,
                f"{name}: {intermediate} rows each, blocks of {matrix.block[0]} rows",
                "an intermediate size that is a multiple of the block, or one scale for all rows",
            )


def check_size(what: str, where: object, observed: int, required: object) -> None:
    """A size of the weights is that of the configuration, where it says one."""
    if isinstance(required, int) and observed != required:
        what = f"checkpoint and configuration disagree about the {what}"
        raise damaged(what, where, f"{observed} in the weights", required)
