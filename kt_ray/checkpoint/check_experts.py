"""Checks of a checkpoint's routed experts: shapes, types, formats, and what fused tensors say about sizes.

Legend: E experts, I intermediate size of one expert, H hidden size.
"""

from __future__ import annotations

from collections import defaultdict

from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.safetensors_file import damaged
from kt_ray.errors import UserError

_PLAIN = {"BF16": "bf16", "F32": "f32"}
_CONVERT = "python -m kt_ray.tools convert {path} <new directory> --to bf16"


def no_experts(index: CheckpointIndex) -> UserError:
    """A model without routed experts."""
    return UserError(
        "checkpoint has no routed experts",
        where=str(index.path),
        observed=f"model_type {index.config.get('model_type')!r}, {len(index.tensors)} tensors",
        required="...experts.N.{gate,up,down}_proj.weight, ...experts.N.{w1,w2,w3}.weight "
        "or ...experts.{gate_up,down}_proj",
        remedy="choose a Mixture-of-Experts checkpoint (model.path)",
    )


def _format(index: CheckpointIndex, name: str) -> str:
    matrix = index.matrices.get(name)
    return matrix.format if matrix is not None else _PLAIN.get(index.tensors[name].dtype, "")


def two_dimensions(index: CheckpointIndex, name: str) -> tuple[int, int]:
    """(rows, columns) of one expert's matrix."""
    shape = index.shape(name)
    if len(shape) != 2:
        raise _mixed_shapes(index, name, "[I, H]")
    return shape[0], shape[1]


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


def check_part(index: CheckpointIndex, names: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """One shape, one format and one kind of scales for all experts of a layer. Returns the format."""
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names:
        if index.shape(name) != shape:
            raise _mixed_shapes(index, name, f"{list(shape)} as in the first expert of {index.path.name}")
        matrix = index.matrices.get(name)
        kinds[
            (index.tensors[name].dtype,)
            if matrix is None
            else (matrix.data.dtype, matrix.scales.dtype, matrix.block)
        ].append(name)
    if len(kinds) > 1:
        few = min(kinds.values(), key=len)
        counts = {" ".join(map(str, kind)): len(names) for kind, names in kinds.items()}
        raise UserError(
            "experts of one layer have mixed types",
            where=f"{index.path}, {some(few, 2)}",
            observed=", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items())),
            required="one type for all experts of a layer",
            remedy=_CONVERT.format(path=index.path),
        )
    return _format(index, names[0])


def check_bias(index: CheckpointIndex, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Shape and type of biases."""
    for name in names:
        info = index.tensors[name]
        if info.shape != shape:
            raise _mixed_shapes(index, name, list(shape))
        if info.dtype not in ("F32", "BF16", "F16"):
            raise damaged(
                "a bias of the experts is in a format that is not read",
                f"{info.file}, tensor {name}",
                info.dtype,
                "BF16, F16 or F32",
            )


def expert_bytes_of(index: CheckpointIndex, groups: tuple[tuple[str, ...], ...], count: int) -> int:
    """Bytes that one expert takes in the file; checked to be the same for all of a layer."""
    total = 0
    for names in groups:
        matrix = index.matrices.get(names[0])
        infos = [index.tensors[names[0]]] if matrix is None else [matrix.data, matrix.scales]
        total += sum(info.nbytes for info in infos) // (count if len(names) == 1 and count > 1 else 1)
    return total


def check_formats(
    index: CheckpointIndex, sources: dict[int, dict[str, tuple[str, ...]]], formats: dict[int, dict[str, str]]
) -> None:
    """Formats that are read, and float32 for all experts or for none."""
    where: dict[str, str] = {}
    for layer, parts in formats.items():
        for part, name in parts.items():
            where.setdefault(name, sources[layer][part][0])
    if "" in where:
        key = where[""]
        raise UserError(
            "experts are in a format that is not read from checkpoints",
            where=f"{index.tensors[key].file}, tensor {key}",
            observed=index.tensors[key].dtype,
            required="BF16, F32, FP8, MXFP4, INT8 or INT4",
            remedy=_CONVERT.format(path=index.path),
        )
    if "f32" in where and len(where) > 1:
        raise UserError(
            "experts have mixed types",
            where=str(index.path),
            observed=", ".join(f"{fmt} ({name})" for fmt, name in sorted(where.items())),
            required="float32 for all experts, or for none",
            remedy=_CONVERT.format(path=index.path),
        )


def _mixed_shapes(index: CheckpointIndex, name: str, required: object) -> UserError:
    matrix = index.matrices.get(name)
    info = index.tensors[name] if matrix is None else matrix.data
    return damaged(
        "experts have mixed shapes", f"{info.file}, tensor {name}", list(index.shape(name)), required
    )


def fused_sizes(index: CheckpointIndex, up: str, down: str, *, gated: bool) -> tuple[int, int, bool]:
    """(H, I, transposed) from the shapes: [E,2I,H] with [E,H,I], or [E,H,2I] with [E,I,H].

    Args:
        index: the checkpoint.
        up, down: the fused parameters, `up` with the rows of gate where there is one (`gated`).
    """
    for name in (up, down):
        if len(index.shape(name)) != 3:
            raise _mixed_shapes(index, name, "three dimensions, experts first")
    (_, a, b), (_, c, d) = index.shape(up), index.shape(down)
    width = 2 if gated else 1
    plain, swapped = (a, b) == (width * d, c), (b, a) == (width * c, d)
    if not plain and not swapped:
        raise damaged(
            "fused expert weights have shapes that do not fit together",
            index.path,
            f"{up} {list(index.shape(up))}, {down} {list(index.shape(down))}",
            "[E, 2I, H] with [E, H, I], or [E, H, 2I] with [E, I, H]",
        )
    if plain and swapped:  # without a gate the shapes do not tell
        plain = not a == index.text_config.get("hidden_size") != b
    return (c, d, False) if plain else (d, c, True)


def check_fused(
    index: CheckpointIndex, parts: dict[str, tuple[str, ...]], intermediate: int, transposed: bool
) -> None:
    """Quantised stacks of a layer lie row by row, and no scale belongs to gate and to up."""
    for part, (name,) in parts.items():
        matrix = index.matrices.get(name)
        if matrix is None:
            continue
        if transposed:
            raise damaged(
                "fused quantised experts are stored transposed",
                index.path,
                f"{name} {list(matrix.shape)}",
                "[E, 2I, H] with [E, H, I]",
            )
        if part == "gate_up" and intermediate % matrix.block[0]:
            raise damaged(
                "a scale of the fused experts covers rows of gate and of up",
                index.path,
                f"{name}: {intermediate} rows each, blocks of {matrix.block[0]} rows",
                "an intermediate size that is a multiple of the block",
            )


def check_hidden(index: CheckpointIndex, hidden: int) -> None:
    """The experts' H is that of the configuration."""
    required = index.text_config.get("hidden_size")
    if isinstance(required, int) and required != hidden:
        raise damaged(
            "checkpoint and configuration disagree about the hidden size of the experts",
            index.path,
            f"{hidden} in the weights",
            required,
        )
