"""How one parameter of a checkpoint is written into another: copied, changed, or dequantised to BF16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kt_ray.checkpoint.encode_weights import Encoding, Entry
from kt_ray.checkpoint.expert_groups import read_one
from kt_ray.checkpoint.index import CheckpointIndex, some
from kt_ray.checkpoint.names import part_of
from kt_ray.checkpoint.packings import unread
from kt_ray.checkpoint.safetensors_file import NAMES, TORCH_DTYPES, TensorInfo, read_tensor
from kt_ray.checkpoint.shard_writer import Notes, Piece, Unit, copied
from kt_ray.errors import UserError

_CHUNK = 16 << 20  # values computed at once
# Beside config.json, of ModelOpt, AutoGPTQ and AutoAWQ. vLLM takes the first where config.json has no
# quantization_config.
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
# compression_config: compressed-tensors' own name for it in 2024, which vLLM still reads.
_QUANTIZATION = ("quantization_config", "compression_config")
_TEXT = ("text_config", "language_config")
_TIED = ("tie_word_embeddings", "tie_embedding")  # the latter: LFM2's
_EXPERTS = "expert_dtype"  # DeepSeek-V4's word for the format of its experts
# (values [out, in], expert of a stack or first row of a plain matrix) -> new values.
Change = Callable[[Tensor, int], Tensor]
Note = Callable[[Notes, Tensor, Tensor], None]
Target = Entry | Encoding
Placed = tuple[tuple[str, int], Unit]  # a unit with where it begins on the disk, to read in order


def position(index: CheckpointIndex, name: str) -> tuple[str, int]:
    """Where a parameter begins on the disk."""
    info = index.first(name)
    return str(info.file), info.start


def raw_keys(index: CheckpointIndex, name: str) -> tuple[str, ...]:
    """The tensors that make a parameter."""
    matrix = index.matrices.get(name)
    return (name,) if matrix is None else matrix.keys


def as_stored(index: CheckpointIndex, keys: Iterable[str]) -> list[Placed]:
    """Tensors copied byte by byte."""
    infos = [index.tensors[key] for key in keys]
    return [((str(info.file), info.start), copied(info)) for info in infos]


def uses_powers(index: CheckpointIndex) -> bool:
    """The checkpoint's FP8 scales are powers of two in a wider type (DeepSeek-V3.1 and later)."""
    for config in (index.config, index.text_config):
        quantization = config.get("quantization_config")
        if isinstance(quantization, dict) and quantization.get("scale_fmt") == "ue8m0":
            return True
    return False


def made(
    target: Target,
    read: Callable[[int], Tensor],
    *,
    experts: int = 1,
    transposed: bool = False,
    unchanged: Callable[[int], list[Piece]] = lambda expert: [],
    scales: Callable[[int], Tensor | None] = lambda expert: None,
    note: Note | None = None,
) -> Unit:
    """A matrix, or a stack of them, computed one expert at a time.

    Args:
        target: what is written.
        read: values of an expert, float32 [out, in].
        experts: E of a stack.
        transposed: the stack is stored [E, in, out].
        unchanged: pieces of an expert that is copied; empty = it is computed.
        scales: of an expert, with which it was stored as the target stores it; see `Encoding.encode`.
        note: called with notes, values before writing and as written.
    """

    def produce(notes: Notes) -> Iterator[Piece]:
        for expert in range(experts):
            if pieces := unchanged(expert):
                yield from pieces
                continue
            before = read(expert)
            if isinstance(target, Entry):
                after = before.to(TORCH_DTYPES[target.dtype])
                _require_finite(after, target.key, target.dtype)
                yield Piece(target.key, after.t() if transposed else after, expert)
                after = after.float()
            else:
                _require_finite(before, target.data.key)
                value = before.t().contiguous() if transposed else before
                data, own, after = target.one(expert).encode(value, scales(expert))
                after = after.t() if transposed else after
                yield Piece(target.data.key, data, expert)
                if target.scales in target.entries:
                    yield Piece(target.scales.key, own, expert)
            if note is not None:
                note(notes, before, after)
        if isinstance(target, Encoding):
            for key, value in target.extras().items():
                yield Piece(key, value)

    return Unit((target,) if isinstance(target, Entry) else target.entries, produce)


def rewritten(
    index: CheckpointIndex,
    name: str,
    *,
    bf16: bool = False,
    transposed: tuple[bool, bool] = (False, False),
    change: Change | None = None,
    touched: Callable[[int], bool] = lambda expert: True,
    note: Note | None = None,
) -> Unit:
    """A parameter with new values, in its own format or in BF16.

    Args:
        name: of `index.names`; two or three dimensions.
        bf16: write BF16 instead of the parameter's own format.
        transposed: stacks only: [in, out] in the checkpoint, and in the result.
        change: see Change; None = the values stay.
        touched: experts whose values change; the others of a stack are copied where the format stays.
        note: see `made`.
    """
    matrix, shape = index.matrices.get(name), index.shape(name)
    stack = len(shape) == 3
    if not stack and not bf16 and matrix is None:
        return _plain_rows(index.tensors[name], change, note)
    if bf16 and transposed[0] != transposed[1]:
        shape = (shape[0], shape[2], shape[1])
    target: Target = Entry(name, "BF16", shape)
    if matrix is not None and not bf16:
        target = Encoding.like(matrix, powers=uses_powers(index))
    elif not bf16:
        target = Entry(name, index.tensors[name].dtype, shape)

    def read(expert: int) -> Tensor:
        value = read_one(index, name, expert) if stack else index.value(name, torch.float32)
        value = value.t() if transposed[0] else value
        return value if change is None else change(value, expert)

    def unchanged(expert: int) -> list[Piece]:
        if not stack or bf16 or touched(expert):
            return []
        keys = (name,) if matrix is None else matrix.renewed
        return [Piece(key, read_tensor(index.tensors[key].one(expert)), expert) for key in keys]

    def scales(expert: int) -> Tensor | None:
        if matrix is None or bf16:
            return None
        return read_tensor((matrix.one(expert) if stack else matrix).scales)

    more: dict[str, Any] = {"unchanged": unchanged, "scales": scales, "note": note}
    return made(target, read, experts=shape[0] if stack else 1, transposed=transposed[1], **more)


def _plain_rows(info: TensorInfo, change: Change | None, note: Note | None = None) -> Unit:
    """A plain matrix, some rows at a time: the head of a large model has gigabytes."""
    if change is None:
        return copied(info)
    assert len(info.shape) == 2 and info.dtype in NAMES.values(), info.name
    rows = max(1, _CHUNK // info.shape[1])

    def produce(notes: Notes) -> Iterator[Piece]:
        for start in range(0, info.shape[0], rows):
            part = info.rows(start, min(start + rows, info.shape[0]))
            before = change(read_tensor(part).float(), start)
            value = before.to(TORCH_DTYPES[info.dtype])
            _require_finite(value, info.name, info.dtype)
            yield Piece(info.name, value, start)
            if note is not None:
                note(notes, before, value.float())

    return Unit((Entry(info.name, info.dtype, info.shape),), produce)


def copied_as(
    index: CheckpointIndex, source: str, name: str, change: Change, note: Note | None = None
) -> Unit:
    """A matrix of the checkpoint, changed, as a tensor of its own; BF16 where it was quantised."""
    if source in index.matrices:
        target = Entry(name, "BF16", index.shape(source))
        return made(target, lambda _: change(index.value(source, torch.float32), 0), note=note)
    return _plain_rows(replace(index.tensors[source], name=name), change, note)


def _require_finite(values: Tensor, key: str, dtype: str = "") -> None:
    """`dtype`: that they are written in."""
    if not bool(torch.isfinite(values).all()):
        wider = (
            "; if it is as released, the change is too large for F16: save the checkpoint in bfloat16 with "
            "transformers (from_pretrained, save_pretrained) and take that"
        )
        raise UserError(
            "weights are not finite",
            where=key,
            observed="NaN or infinite values",
            required="finite values",
            remedy="download the checkpoint again" + (wider if dtype == "F16" else ""),
        )


def error_of(name: str) -> Note:
    """Adds up squares for the relative Frobenius error of `name`."""

    def note(notes: Notes, before: Tensor, after: Tensor) -> None:
        wrong, whole = (after - before).double(), before.double()
        notes.add(name, float(wrong.square().sum()), float(whole.square().sum()))

    return note


def without_quantization(config: dict[str, Any], *, to: str = "bf16") -> dict[str, Any]:
    """config.json of the same model without quantised weights.

    Args:
        to: format that the weights get. "bf16" sets the types that the configuration states, too.
    """
    result = {key: value for key, value in config.items() if key not in (*_QUANTIZATION, _EXPERTS)}
    if to == "fp8" and _EXPERTS in config:
        result[_EXPERTS] = to
    for key in _TEXT:
        if isinstance(result.get(key), dict):
            result[key] = without_quantization(result[key], to=to)
    for key in ("dtype", "torch_dtype") if to == "bf16" else ():
        if key in result:
            result[key] = "bfloat16"
    return result


def without_ties(config: dict[str, Any]) -> dict[str, Any]:
    """config.json of the same model with a head of its own."""
    result = config | {key: False for key in _TIED if key in config or key == _TIED[0]}
    return result | {key: without_ties(result[key]) for key in _TEXT if isinstance(result.get(key), dict)}


def check_formats(index: CheckpointIndex) -> None:
    """Refuse weights that would go along as they are while config.json stops to say what they are.

    Integers of a model that says nothing of quantisation are buffers: masks, positions.

    Raises:
        UserError: matrices of integers in a format that is not read.
    """
    said = without_quantization(index.config, to="") != index.config
    if not said and not any((index.path / name).is_file() for name in QUANTIZATION_FILES):
        return
    numbers = ("I8", "U8", "I16", "U16", "I32", "U32")
    names = [
        name
        for name in sorted(index.names - set(index.matrices))
        if index.tensors[name].dtype in numbers
        and len(index.tensors[name].shape) > 1
        and index.tensors[name].nbytes
        and part_of(name, None) != "router"  # DeepSeek-V4's tables of tokens
    ]
    if names:
        raise unread(
            index.path, f"integers of an unknown format: {some(names)}", "integers with their scales"
        )


def check_directories(source: CheckpointIndex, out: Path) -> None:
    """The result may not go into the checkpoint it is made from."""
    if out.resolve() == source.path.resolve():
        raise UserError(
            "output directory is the checkpoint itself", where=str(out), remedy="choose another directory"
        )
