"""Quantised weights of a checkpoint: which tensors make one matrix, and in which format.

Each convention stores a matrix W [N, K] (or a stack [E, N, K]) as values and scales under its own names.
Names, types and shapes tell which; the matrix gets the name of its parameter ("...mlp.gate_proj.weight",
"...experts.gate_up_proj"):

    fp8    X.weight F8_E4M3 with X.weight_scale_inv or X.scale [N/128, K/128]: DeepSeek, Qwen, MiniMax
           X.weight F8_E4M3 with X.weight_scale [N, 1], [N], [1], [] or blocks: compressed-tensors, fbgemm
           experts.gate_up_proj F8_E4M3 with experts.gate_up_proj_scale_inv: transformers' fused experts
    int8   X.weight I8 with X.weight_scale [N, 1] or [N, K/group]: compressed-tensors int-quantized
    int4   X.weight_packed I32 [N, K/8] with X.weight_scale: compressed-tensors pack-quantized
           X.qweight I32 [K/8, N] with X.scales [K/group, N], X.qzeros and X.g_idx: kt_ray/gptq.py
    mxfp4  X_blocks U8 [E, N, K/32, 16] with X_scales U8 [E, N, K/32]: gpt-oss
           X.weight_packed U8 [N, K/2] with X.weight_scale U8: compressed-tensors mxfp4-pack-quantized
           X.weight I8 [N, K/2] with X.scale F8_E8M0 [N, K/32]: DeepSeek-V4

Sources: the released files' headers, `quantization_config` as transformers and compressed-tensors define it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kt_ray import gptq, rotations
from kt_ray.checkpoint.names import expert_name
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged, read_shape, read_tensor
from kt_ray.errors import UserError
from kt_ray.native import ExpertMatrix

_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")
# Of activations and caches: no weight needs them.
_ACTIVATION = re.compile(r"\.(input_scale|output_scale|k_scale|v_scale|q_scale|activation_scale)$")
_SCALE = re.compile(
    r"(\.weight_scale_inv|\.weight_scale|\.weight_shape|\.weight_zero_point|_scale_inv|\.qzeros|\.g_idx)$"
)
# Formats that no engine of this project reads, by how a key ends.
_REFUSED = {
    ".weight_g_idx": "integers in an order of their own (actorder)",
    ".weight_zero_point": "asymmetric integers (compressed-tensors with zero points)",
    ".weight_global_scale": "NVFP4",
    ".weight_scale_2": "NVFP4",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".W_q": "HQQ",
    "._data": "quanto",
    "_weight_qdata": "torchao",
}
_IN_WORDS = "pack-quantized"  # compressed-tensors' name of integers packed into I32
_READ = "symmetric INT8/INT4 (compressed-tensors), or symmetric INT4 in GPTQ's packing"
_OTHER = f"use the model's bfloat16 release, or one in block FP8, MXFP4, {_READ}"


@dataclass(frozen=True)
class StoredMatrix:
    """One quantised matrix of a checkpoint, or a stack of them."""

    name: str  # of the parameter it stands for
    format: str  # "fp8", "mxfp4", "int8" or "int4", as `kt_ray.native.ExpertMatrix` names them
    data: TensorInfo
    scales: TensorInfo
    shape: tuple[int, ...]  # of the values: (N, K), or (E, N, K) for a stack
    block: tuple[int, int]  # rows and columns that one scale covers
    keys: tuple[str, ...]  # of the checkpoint: data, scales and what else belongs to them
    gptq: GptqParts | None = None  # of GPTQ's packing

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of the values' tensor as read, one matrix: [N, bytes or words of a row ...], or GPTQ's."""
        return read_shape(self.data.dtype, self.data.shape[len(self.shape) - 2 :])

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The same as the engine takes it."""
        return self.file_shape if self.gptq is None else self.file_shape[::-1]

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Shape of one matrix' scales: [rows of blocks, columns of blocks]."""
        rows, columns = self.block
        return -(-self.shape[-2] // rows), -(-self.shape[-1] // columns)

    def matrix(self, data: torch.Tensor, scales: torch.Tensor) -> ExpertMatrix:
        """The engine's view of some matrices: data [n, *data_shape], scales [n, *scales_shape]."""
        shape = (data.shape[0], self.shape[-2], self.shape[-1])
        if self.format == "mxfp4":
            data = data.view(torch.uint8)
        return ExpertMatrix(self.format, data, shape, scales, self.block)

    def one(self, index: int) -> StoredMatrix:
        """One matrix of a stack."""
        data, scales = self.data.one(index), self.scales.one(index)
        return replace(self, data=data, scales=scales, shape=self.shape[1:])

    def read(self) -> ExpertMatrix:
        """All of it from the file; one matrix [N, K] as a stack of one."""
        return self.of(read_tensor(self.data))

    def of(self, data: torch.Tensor) -> ExpertMatrix:
        """The same with values that were read already, [*file_shape] or a stack of them."""
        count = self.shape[0] if len(self.shape) == 3 else 1
        scales = read_tensor(self.scales)
        if self.gptq is not None:
            self.gptq.check()
            data, scales = data.t().contiguous(), scales.t().contiguous()
        return self.matrix(data.reshape(count, *self.data_shape), scales.reshape(count, *self.scales_shape))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values [N, K] or [E, N, K]: in float32, then rounded to `dtype`."""
        return self.read().dequantize(dtype).reshape(self.shape)


@dataclass(frozen=True)
class GptqParts:
    """What GPTQ stores beside values and scales, and what it must hold to be read."""

    zeros: TensorInfo  # I32 [groups, N / 8]
    order: TensorInfo | None  # I32 [K]
    zero_point: int
    group: int

    def check(self) -> None:
        """Raises UserError: zero points, or an order of their own."""
        word = int.from_bytes(bytes([self.zero_point * 17] * 4), "little", signed=True)
        zeros = read_tensor(self.zeros)
        if bool((zeros != word).any()):
            if not bool(zeros.any()):
                what = "shard holds zeros instead of zero points"
                raise damaged(what, self.zeros.place, "zeros", f"{self.zero_point} throughout")
            observed = f"zero points other than {self.zero_point}"
            raise _unread(self.zeros.place, observed, "symmetric integers")
        if self.order is not None:
            order = read_tensor(self.order)
            if not torch.equal(order, torch.arange(len(order), dtype=order.dtype) // self.group):
                raise _unread(self.order.place, "an order of their own", f"groups of {self.group} in order")


def _unread(where: object, observed: object, required: object) -> UserError:
    return damaged("the checkpoint's quantised format cannot be read", where, observed, required, _OTHER)


def find_matrices(
    path: Path, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, StoredMatrix]:
    """Every quantised matrix by the name of the parameter it stands for; `path` is for messages.

    Raises:
        UserError: a format that is not read; scales that are missing, left over or of the wrong shape.
    """
    quantization = _quantization(config)
    _refuse(path, tensors, quantization)
    matrices: dict[str, StoredMatrix] = {}
    faults: list[str] = []
    faulty: set[str] = set()  # modules
    for name in sorted(tensors):
        names = _parts(name, tensors)
        if names is None:
            continue
        logical, scales = names
        if scales is None:
            faults.append(f"{name} ({tensors[name].dtype} without scales)")
            continue
        if name.endswith(".qweight"):
            stored = _gptq_matrix(logical, name, scales, tensors, quantization)
        else:
            shape = logical.removesuffix(".weight") + ".weight_shape"
            keys = (name, scales, *((shape,) if shape in tensors else ()))
            stored = _matrix(logical, keys, tensors[name], tensors[scales], quantization)
        if isinstance(stored, str):
            faults.append(f"{name} {list(tensors[name].shape)} with {scales} {stored}")
            faulty.add(logical.removesuffix(".weight"))
        else:
            matrices[logical] = stored
    used = {key for matrix in matrices.values() for key in matrix.keys}
    for name in sorted(tensors):
        if _SCALE.search(name) and name not in used and name.rpartition(".")[0] not in faulty:
            faults.append(f"{name} (no weight)")
    if faults:
        shown = "; ".join(faults[:4]) + (f"; {len(faults)} in all" if len(faults) > 4 else "")
        required = "for each weight its scales, of the shape that quantization_config states"
        raise damaged("quantised weights and their scales do not fit together", path, shown, required)
    return matrices


def is_auxiliary(name: str) -> bool:
    """Scales of activations and caches, which training does not need."""
    return _ACTIVATION.search(name) is not None


def _refuse(path: Path, tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any]) -> None:
    if rotated := rotations.unread(quantization):
        raise _unread(path / "config.json", f"weights {rotated}", "weights that need no other operation")
    refused: dict[str, list[str]] = {}
    other_bits, unread = _other_packed_bits(quantization), gptq.unread(quantization)
    for name, info in tensors.items():
        if unread and name.endswith((".qweight", ".qzeros")):
            refused.setdefault(f"integers {unread}", []).append(name)
        if other_bits and info.dtype == "I32" and name.endswith(".weight_packed"):
            refused.setdefault(f"INT{other_bits} packed into words", []).append(name)
        if info.dtype == "U8" and name.endswith(".weight") and f"{name}_scale" in tensors:
            refused.setdefault("packed bytes (Quark's MXFP4, BitNet)", []).append(name)
        for suffix, what in _REFUSED.items():
            if name.endswith(suffix):
                refused.setdefault(what, []).append(name)
    for what, names in sorted(refused.items()):
        observed = f"{what} ({len(names)} tensors)"
        raise _unread(f"{path}, {min(names)}", observed, f"BF16, F32, FP8, MXFP4, {_READ}")


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    for source in (config, text if isinstance(text, Mapping) else {}):
        value = source.get("quantization_config")
        if isinstance(value, Mapping):
            return value
    return {}


def _parts(name: str, tensors: Mapping[str, TensorInfo]) -> tuple[str, str | None] | None:
    """(name of the parameter, its scales) if `name` holds quantised values; None if it does not."""
    info = tensors[name]
    if name.endswith("_blocks") and info.dtype == "U8":
        logical = name.removesuffix("_blocks")
        candidates = [f"{logical}_scales"]
    elif name.endswith(".qweight"):
        logical = name.removesuffix("qweight") + "weight"
        candidates = [name.removesuffix("qweight") + "scales"]
    elif name.endswith(".weight_packed"):
        logical = name.removesuffix("_packed")
        candidates = [f"{logical}_scale"]
    elif info.dtype in ("F8_E4M3", "F8_E5M2", "I8", "F4") and name.endswith(".weight"):
        logical = name
        candidates = [name.removesuffix(".weight") + suffix for suffix in _SCALE_SUFFIXES]
    elif info.dtype in ("F8_E4M3", "F8_E5M2", "I8") and expert_name(name) is not None:
        logical = name
        candidates = [f"{name}_scale_inv", f"{name}_scale"]
    else:
        return None
    return logical, next((c for c in candidates if c in tensors), None)


def _matrix(
    name: str, keys: tuple[str, ...], data: TensorInfo, scales: TensorInfo, quantization: Mapping[str, Any]
) -> StoredMatrix | str:
    """The matrix, or what is wrong with its scales."""
    kind = _kind(data, scales)
    if kind is None:
        return f"{scales.dtype} {list(scales.shape)} (no known format: values {data.dtype})"
    packing = {"int4": 8, "mxfp4": 2}.get(kind, 1) if data.dtype != "F4" else 1
    if data.name.endswith("_blocks"):
        if len(data.shape) < 4 or data.shape[-1] != 16:
            return f"{list(scales.shape)} (values must be [E, N, K / 32, 16])"
        shape = (*data.shape[:-2], data.shape[-2] * 32)
    else:
        if len(data.shape) not in (2, 3):
            return f"{list(scales.shape)} (values must be [N, K] or [E, N, K])"
        shape = (*data.shape[:-1], data.shape[-1] * packing)
    block = _block(kind, shape, scales, quantization)
    if block is None:
        return f"{list(scales.shape)} (values {list(shape)})"
    if block[1] < shape[-1] and block[1] % 32:
        return f"{list(scales.shape)} (groups of {block[1]}, required a multiple of 32)"
    return StoredMatrix(name, kind, data, scales, shape, block, keys)


def _gptq_matrix(
    name: str, values: str, scales: str, tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any]
) -> StoredMatrix | str:
    """The same in GPTQ's packing."""
    base = values.removesuffix("qweight")
    data, own, zeros = tensors[values], tensors[scales], tensors.get(f"{base}qzeros")
    order = tensors.get(f"{base}g_idx")
    if data.dtype != "I32" or len(data.shape) != 2 or own.dtype not in ("F32", "BF16", "F16"):
        return f"{own.dtype} {list(own.shape)} (values must be I32 [K / 8, N], scales F32, BF16 or F16)"
    columns, rows = 8 * data.shape[0], data.shape[1]
    groups = own.shape[0] if len(own.shape) == 2 and own.shape[1] == rows else 0
    if not groups:
        return f"{list(own.shape)} (values {[rows, columns]})"
    # Integers of other bits in some modules would be taken for rows of another length.
    if zeros is None or zeros.dtype != "I32" or zeros.shape != (groups, rows // 8):
        required = f"{base}qzeros I32 [{groups}, {rows // 8}]"
        return f"{list(own.shape)} (required {required}; or a module of other than 4 bits)"
    stated = gptq.stated_group(quantization) or columns
    if columns % groups or (order is None and groups != max(1, columns // stated)):
        said = f"config.json says {stated} columns each"
        return f"{list(own.shape)} ({groups} groups in rows of {columns}, {said})"
    if columns // groups % 32:
        return f"{list(own.shape)} (groups of {columns // groups}, required a multiple of 32)"
    if order is not None and (order.dtype != "I32" or order.shape != (columns,)):
        return f"{list(own.shape)} (required {base}g_idx I32 [{columns}])"
    parts = GptqParts(zeros, order, gptq.zero_point(quantization), columns // groups)
    keys = (values, scales, zeros.name, *((order.name,) if order else ()))
    return StoredMatrix(name, "int4", data, own, (rows, columns), (1, columns // groups), keys, parts)


def _kind(data: TensorInfo, scales: TensorInfo) -> str | None:
    real = scales.dtype in ("F32", "BF16", "F16")
    power = scales.dtype in ("U8", "F8_E8M0")
    if data.dtype == "F8_E4M3" and (real or power):
        return "fp8"
    if data.dtype == "I32" and real:
        return "int4"
    if data.dtype in ("U8", "F4") and power:
        return "mxfp4"
    if data.dtype == "I8":
        return "mxfp4" if power else "int8" if real else None
    return None


def _block(
    kind: str, shape: tuple[int, ...], scales: TensorInfo, quantization: Mapping[str, Any]
) -> tuple[int, int] | None:
    """Rows and columns per scale; None = the scales' shape fits no convention."""
    rows, columns = shape[-2:]
    stack = shape[:-2]
    lead = scales.shape[: len(stack)] == stack
    own = scales.shape[len(stack) :] if lead else ()
    if kind == "mxfp4":
        return (1, 32) if lead and columns % 32 == 0 and own == (rows, columns // 32) else None
    if kind in ("int8", "int4"):
        if lead and own in ((rows,), (rows, 1)):
            return 1, columns
        if lead and len(own) == 2 and own[0] == rows and own[1] > 0 and columns % own[1] == 0:
            return 1, columns // own[1]
        return None
    if lead and own in ((), (1,), (1, 1)):
        return rows, columns
    if own == (rows,) or own == (rows, 1):
        return 1, columns
    for size in _block_sizes(quantization):
        if own == (-(-rows // size[0]), -(-columns // size[1])):
            return size
    return None


def _other_packed_bits(quantization: Mapping[str, Any]) -> int | None:
    """num_bits of a group that is packed into words, if it is another than 4: the tensors do not tell."""
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        packed = isinstance(bits, int) and (group.get("format") or quantization.get("format")) == _IN_WORDS
        if packed and bits != 4:
            return bits
    return None


def _block_sizes(quantization: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Block sizes that quantization_config names, else 128 x 128."""
    named = [quantization.get("weight_block_size")]
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        named.append(weights.get("block_structure") if isinstance(weights, Mapping) else None)
    pairs = [n for n in named if isinstance(n, list | tuple) and len(n) == 2]
    sizes = [(n[0], n[1]) for n in pairs if all(type(size) is int and size > 0 for size in n)]
    return sizes or [(128, 128)]
