"""Quantised weights of a checkpoint: which tensors make one matrix, and in which format.

Each convention stores a matrix W [N, K] (or a stack [E, N, K]) as values and scales under its own names.
Names, types and shapes tell which; the matrix gets the name of its parameter ("...mlp.gate_proj.weight",
"...experts.gate_up_proj"):

    fp8    X.weight F8_E4M3 with X.weight_scale_inv or X.scale [N/128, K/128]: DeepSeek, Qwen, MiniMax
           X.weight F8_E4M3 with X.weight_scale [N, 1], [N], [1], [] or blocks: compressed-tensors, fbgemm
           X.weight F8_E4M3 with X.weight_scale [N/128, 1, K/128, 1]: ModelOpt's FP8_PB_WO
           X.weight F8_E4M3 with X.weight_scale or X.weight_scale_inv U8 [N, K/32]: MXFP8
           experts.gate_up_proj F8_E4M3 with experts.gate_up_proj_scale_inv: transformers' fused experts
           the same [E, K, N] with experts.gate_up_proj_weight_scale, of blocks or one number: ModelOpt
    int8   X.weight I8 with X.weight_scale [N, 1] or [N, K/group]: compressed-tensors int-quantized
           X.weight_packed I32 [N, K/4] with X.weight_scale: compressed-tensors pack-quantized of 8 bits
           X.qweight I32 with X.scales and X.qzeros: GPTQ of 8 bits, symmetric
    int4   X.weight_packed I32 [N, K/8] with X.weight_scale: compressed-tensors pack-quantized
    uint4  the same with X.weight_zero_point: compressed-tensors, not symmetric (packings.py)
           X.qweight I32 with X.scales and X.qzeros: AWQ, and GPTQ, there int4 if symmetric
           (kt_ray/integer_packing.py)
    mxfp4  X_blocks U8 [E, N, K/32, 16] with X_scales U8 [E, N, K/32]: gpt-oss
           X.weight_packed U8 [N, K/2] with X.weight_scale U8: compressed-tensors mxfp4-pack-quantized
           X.weight I8 [N, K/2] with X.scale F8_E8M0 [N, K/32]: DeepSeek-V4
           X.weight U8 [N, K/2] with X.weight_scale U8 [N, K/32]: AMD Quark
    nvfp4  X.weight U8 [N, K/2] with X.weight_scale F8_E4M3 [N, K/16] and X.weight_scale_2 F32: ModelOpt
           X.weight_packed U8 with X.weight_scale and X.weight_global_scale F32: compressed-tensors
           X U8 [E, N, K/2] or [E, K/2, N] with X_weight_scale and X_weight_scale_2: ModelOpt's stacks

Sources: the released files' headers, `quantization_config` as transformers and compressed-tensors define it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kt_ray import integer_packing, rotations
from kt_ray.checkpoint.names import expert_name, family, fused_release
from kt_ray.checkpoint.packings import Awq, Bytes, Gptq, Nvfp4, Packing, Stack, WithZeros, unread
from kt_ray.checkpoint.safetensors_file import TensorInfo, damaged, read_dtype, read_shape, read_tensor
from kt_ray.native import ExpertMatrix

_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")
# Of activations and caches: no weight needs them.
_ACTIVATION = re.compile(
    r"(\.|_proj_)((input|output)_(scale|zero_point)|input_global_scale|[qkv]_(scale|zero_point)|activation_scale)$"
)
_SCALE = re.compile(
    r"([._]weight_scale_inv|[._]weight_scale|[._]weight_scale_2|\.weight_global_scale|\.weight_shape|"
    r"\.weight_zero_point|_scale_inv|\.qzeros|\.g_idx)$"
)
# Formats that no engine of this project reads, by how a key ends.
_REFUSED = {
    ".weight_g_idx": "integers in an order of their own (actorder)",
    ".pre_quant_scale": "weights whose inputs must be scaled first (ModelOpt's AWQ)",
    ".weight.absmax": "bitsandbytes",
    ".weight.quant_map": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".W_q": "HQQ",
    "._data": "quanto",
    "_weight_qdata": "torchao",
}
_IN_WORDS = "pack-quantized"  # compressed-tensors' name of integers packed into I32
_READ = "BF16, F32, FP8, MXFP4, NVFP4, symmetric INT8, or INT4 (compressed-tensors, GPTQ, AWQ)"


TWO_PARTS = ("nvfp4", "uint4")  # whose scales are of two parts, which belong together


@dataclass(frozen=True)
class StoredMatrix:
    """One quantised matrix of a checkpoint, or a stack of them."""

    name: str  # of the parameter it stands for
    format: str  # one of `kt_ray.native.matrix.SCALED_FORMATS`
    data: TensorInfo
    scales: TensorInfo
    shape: tuple[int, ...]  # of the values: (N, K), or (E, N, K) for a stack
    block: tuple[int, int]  # rows and columns that one scale covers
    keys: tuple[str, ...]  # of the checkpoint: data, scales and what else belongs to them
    packing: Packing | None = None  # where the engine takes other values or scales than are stored

    @property
    def file_shape(self) -> tuple[int, ...]:
        """Shape of one matrix' values as read: [N, bytes or words of a row ...], or the packing's."""
        return read_shape(self.data.dtype, self.data.shape[len(self.shape) - 2 :])

    @property
    def data_shape(self) -> tuple[int, ...]:
        """The same as the engine takes it."""
        rows, columns = self.shape[-2:]
        if self.packing is None:
            return self.file_shape
        if self.format in ("int8", "fp8"):
            return rows, columns
        return (rows, columns // 32, 18) if self.format == "nvfp4" else (rows, columns // 8)

    @property
    def data_type(self) -> torch.dtype:
        """Of the values as the engine takes them."""
        return torch.int8 if self.format == "int8" else read_dtype(self.data.dtype)

    @property
    def keeps_scales(self) -> bool:
        """Whether scales are not made anew with other values: they are of two parts, or one of a stack."""
        return self.format in TWO_PARTS or (len(self.shape) == 3 and not math.prod(self.scales.shape) > 1)

    @property
    def renewed(self) -> tuple[str, ...]:
        """The keys of what other values of the matrix change."""
        return self.keys[: 1 if self.keeps_scales else 2]

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Shape of one matrix' scales as the engine takes them: [rows of blocks, columns of blocks]."""
        rows, columns = self.block
        across = -(-self.shape[-1] // columns)
        return -(-self.shape[-2] // rows), 2 * across if self.format == "uint4" else across

    @property
    def nbytes(self) -> int:
        """Bytes that the engine holds of one matrix."""
        parts = (self.data_shape, self.data_type), (self.scales_shape, read_dtype(self.scales.dtype))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)

    def matrix(self, data: torch.Tensor, scales: torch.Tensor) -> ExpertMatrix:
        """The engine's view of some matrices: data [n, *data_shape], scales [n, *scales_shape]."""
        shape = (data.shape[0], self.shape[-2], self.shape[-1])
        if self.format == "mxfp4":
            data = data.view(torch.uint8)
        return ExpertMatrix(self.format, data, shape, scales, self.block)

    def one(self, index: int) -> StoredMatrix:
        """One matrix of a stack."""
        scales = self.scales if math.prod(self.scales.shape) == 1 else self.scales.one(index)
        packing = None if self.packing is None else self.packing.one(index)
        return replace(self, data=self.data.one(index), scales=scales, shape=self.shape[1:], packing=packing)

    def read(self) -> ExpertMatrix:
        """All of it from the file; one matrix [N, K] as a stack of one."""
        return self.of(read_tensor(self.data))

    def of(self, data: torch.Tensor) -> ExpertMatrix:
        """The same with values that were read already, [*file_shape] or a stack of them."""
        count = self.shape[0] if len(self.shape) == 3 else 1
        scales = read_tensor(self.scales)
        if self.packing is not None:
            data, scales = self.packing.values(data).contiguous(), self.packing.scales(scales).contiguous()
        scales = scales.reshape(-1, *self.scales_shape).expand(count, *self.scales_shape)
        return self.matrix(data.reshape(count, *self.data_shape), scales.contiguous())

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values [N, K] or [E, N, K]: in float32, then rounded to `dtype`."""
        return self.read().dequantize(dtype).reshape(self.shape)


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
    bits = _packed_bits(quantization)
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
            stored = _turned(logical, name, scales, tensors, quantization)
        elif _is_nvfp4(tensors[name], tensors[scales]):
            stored = _nvfp4(logical, name, scales, tensors)
        else:
            base = logical.removesuffix(".weight")
            shape = f"{base}.weight_shape"
            keys = (name, scales, *((shape,) if shape in tensors else ()))
            eight = tensors[name].dtype == "I32" and _is_of_bytes(tensors[name], tensors.get(shape), bits)
            turned = _is_stack_turned(logical, scales, tensors[name], config)
            stored = _matrix(logical, keys, tensors[name], tensors[scales], quantization, eight, turned)
            zeros = tensors.get(f"{base}.weight_zero_point")
            if zeros is not None and eight:
                raise unread(zeros.place, "INT8 with zero points", _READ)
            if zeros is not None and not isinstance(stored, str):
                stored = _with_zeros(stored, zeros)
        if isinstance(stored, str):
            faults.append(f"{name} {list(tensors[name].shape)} with {scales} {stored}")
            faulty.add(logical.removesuffix(".weight"))
        else:
            matrices[logical] = stored
    used = {key for matrix in matrices.values() for key in matrix.keys}
    for name in sorted(tensors):
        if _SCALE.search(name) and name not in used and _SCALE.sub("", name) not in faulty:
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
        raise unread(path / "config.json", f"weights {rotated}", "weights that need no other operation")
    refused: dict[str, list[str]] = {}
    other_bits, turned = _packed_bits(quantization) - {4, 8}, integer_packing.unread(quantization)
    for name, info in tensors.items():
        if turned and name.endswith((".qweight", ".qzeros")):
            refused.setdefault(f"integers {turned}", []).append(name)
        if other_bits and info.dtype == "I32" and name.endswith(".weight_packed"):
            refused.setdefault(f"INT{min(other_bits)} packed into words", []).append(name)
        scales = tensors.get(f"{name}_scale") if info.dtype == "U8" and name.endswith(".weight") else None
        if name.endswith(".weight_zero_point"):
            words = tensors.get(name.removesuffix("zero_point") + "packed")
            if words is None or words.dtype != "I32":
                refused.setdefault("asymmetric integers that are not INT4 packed into words", []).append(name)
        if scales is not None and not (_is_nvfp4(info, scales) or _is_mxfp4(info, scales)):
            refused.setdefault("packed bytes (Quark's MXFP6, BitNet)", []).append(name)
        for suffix, what in _REFUSED.items():
            if name.endswith(suffix):
                refused.setdefault(what, []).append(name)
    for what, names in sorted(refused.items()):
        observed = f"{what} ({len(names)} tensors)"
        raise unread(f"{path}, {min(names)}", observed, _READ)


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
    elif info.dtype == "U8" and name.endswith(".weight") and f"{name}_scale" in tensors:
        logical = name
        candidates = [f"{name}_scale"]
    elif info.dtype == "U8" and f"{name}_weight_scale" in tensors and expert_name(name) is not None:
        logical = name
        candidates = [f"{name}_weight_scale"]
    elif info.dtype in ("F8_E4M3", "F8_E5M2", "I8") and expert_name(name) is not None:
        logical = name
        candidates = [f"{name}{end}" for end in ("_scale_inv", "_scale", "_weight_scale")]
    else:
        return None
    return logical, next((c for c in candidates if c in tensors), None)


def _matrix(
    name: str,
    keys: tuple[str, ...],
    data: TensorInfo,
    scales: TensorInfo,
    quantization: Mapping[str, Any],
    eight: bool,
    turned: bool,
) -> StoredMatrix | str:
    """The matrix, or what is wrong with its scales; `eight`: words hold integers of 8 bits; `turned`: a stack
    [E, K, N]."""
    kind = _kind(data, scales)
    if kind is None:
        raise unread(data.place, f"{data.dtype} with scales {scales.dtype} {list(scales.shape)}", _READ)
    if eight:
        kind = "int8"
    per_item = {"int4": 8, "mxfp4": 2, "int8": 4 if eight else 1}.get(kind, 1) if data.dtype != "F4" else 1
    if data.name.endswith("_blocks"):
        if len(data.shape) < 4 or data.shape[-1] != 16:
            return f"{list(scales.shape)} (values must be [E, N, K / 32, 16])"
        shape = (*data.shape[:-2], data.shape[-2] * 32)
    else:
        if len(data.shape) not in (2, 3):
            return f"{list(scales.shape)} (values must be [N, K] or [E, N, K])"
        shape = (*data.shape[:-1], data.shape[-1] * per_item)
    packing: Packing | None = Bytes() if eight else None
    one = len(shape) == 3 and math.prod(scales.shape) == 1
    # FBGEMM's of the rows of down are [E, N, 1] beside values that are turned round.
    scales_turned = turned and len(scales.shape) == 3 and scales.shape[1:] != (data.shape[2], 1)
    if kind == "fp8" and (turned or one):
        packing = Stack(turned, scales_turned)
        shape = (shape[0], *shape[:0:-1]) if turned else shape
    own = scales
    if scales_turned:
        own = replace(scales, shape=(scales.shape[0], *scales.shape[:0:-1]))
    block = _block(kind, shape, own, quantization)
    if kind == "fp8" and one:
        block = shape[1], shape[2]
    if block is None:
        return f"{list(scales.shape)} (values {list(shape)})"
    if block[1] < shape[-1]:
        _check_group(data, block[1])
    return StoredMatrix(name, kind, data, scales, shape, block, keys, packing)


def _is_stack_turned(name: str, scales: str, data: TensorInfo, config: Mapping[str, Any]) -> bool:
    """Whether an FP8 stack of experts is [E, K, N]: by the hidden size; where both axes have it, ModelOpt's
    are as the family's parameters."""
    expert, text = expert_name(name), config.get("text_config")
    hidden = (text if isinstance(text, Mapping) and "hidden_size" in text else config).get("hidden_size")
    if expert is None or len(data.shape) != 3 or data.dtype != "F8_E4M3" or hidden not in data.shape[1:]:
        return False
    if data.shape[1] == data.shape[2]:
        release = fused_release(family(config))
        return scales.endswith("_weight_scale") and release is not None and release.transposed
    return data.shape[2 if expert.role == "down" else 1] == hidden


def _turned(
    name: str, values: str, scales: str, tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any]
) -> StoredMatrix | str:
    """The same in GPTQ's or AWQ's packing."""
    base, packing = values.removesuffix("qweight"), integer_packing.method(quantization)
    data, own, zeros = tensors[values], tensors[scales], tensors.get(f"{base}qzeros")
    order = tensors.get(f"{base}g_idx") if packing == "gptq" else None
    # Integers of other bits in some modules show in the zero points; other than these would be rows of
    # another length.
    last = [info.shape[-1] if info is not None and len(info.shape) == 2 else 0 for info in (zeros, data)]
    bits = 8 if packing == "gptq" and 4 * last[0] == last[1] > 0 else 4
    per_word = 32 // bits
    required = f"[K / {per_word}, N]" if packing == "gptq" else "[K, N / 8]"
    if data.dtype != "I32" or len(data.shape) != 2 or own.dtype not in ("F32", "BF16", "F16"):
        return f"{own.dtype} {list(own.shape)} (values must be I32 {required}, scales F32, BF16 or F16)"
    columns, rows = data.shape
    columns, rows = (per_word * columns, rows) if packing == "gptq" else (columns, 8 * rows)
    groups = own.shape[0] if len(own.shape) == 2 and own.shape[1] == rows else 0
    if not groups:
        return f"{list(own.shape)} (values {[rows, columns]})"
    if zeros is None or zeros.dtype != "I32" or zeros.shape != (groups, rows // per_word):
        required = f"{base}qzeros I32 [{groups}, {rows // per_word}]"
        return f"{list(own.shape)} (required {required}; or a module of other than 4 or 8 bits)"
    stated = integer_packing.stated_group(quantization) or columns
    if columns % groups or (order is None and groups != max(1, columns // stated)):
        said = f"config.json says {stated} columns each"
        return f"{list(own.shape)} ({groups} groups in rows of {columns}, {said})"
    group = columns // groups
    _check_group(data, group)
    if order is not None and (order.dtype != "I32" or order.shape != (columns,)):
        return f"{list(own.shape)} (required {base}g_idx I32 [{columns}])"
    keys = (values, scales, zeros.name, *((order.name,) if order else ()))
    zero_points = integer_packing.has_zeros(quantization)
    if zero_points and bits == 8:
        raise unread(zeros.place, "INT8 with zero points", _READ)
    parts: Packing = Awq(zeros)
    if packing == "gptq":
        parts = Gptq(zeros, order, group, integer_packing.stored_less(quantization), not zero_points, bits)
    kind = "uint4" if zero_points else f"int{bits}"
    return StoredMatrix(name, kind, data, own, (rows, columns), (1, group), keys, parts)


def _with_zeros(matrix: StoredMatrix, zeros: TensorInfo) -> StoredMatrix | str:
    """compressed-tensors' integers with zero points."""
    if len(matrix.shape) != 2:
        raise unread(zeros.place, "a stack with zero points", "one matrix each")
    rows, groups = matrix.scales_shape
    if (zeros.dtype, zeros.shape) not in (("I32", (-(-rows // 8), groups)), ("I8", (rows, groups))):
        required = f"I32 [{-(-rows // 8)}, {groups}] or I8 [{rows}, {groups}]"
        return f"and {zeros.name} {zeros.dtype} {list(zeros.shape)} (required {required})"
    keys = (*matrix.keys[:2], zeros.name, *matrix.keys[2:])
    return replace(matrix, format="uint4", keys=keys, packing=WithZeros(zeros))


def _is_nvfp4(data: TensorInfo, scales: TensorInfo) -> bool:
    return data.dtype in ("U8", "F4") and scales.dtype == "F8_E4M3"


def _is_mxfp4(data: TensorInfo, scales: TensorInfo) -> bool:
    """Of values in bytes, which may be packed otherwise: two in each, as many as the scales are for."""
    rows, half = data.shape if len(data.shape) == 2 else (0, 0)
    return scales.dtype in ("U8", "F8_E8M0") and scales.shape == (rows, half // 16) and half % 16 == 0


def _nvfp4(name: str, values: str, scales: str, tensors: Mapping[str, TensorInfo]) -> StoredMatrix | str:
    """E2M1 with scales of 16 columns and a global scale."""
    base, data, own = scales.removesuffix("weight_scale"), tensors[values], tensors[scales]
    divides = f"{base}weight_global_scale" in tensors
    global_scale = tensors.get(f"{base}weight_global_scale" if divides else f"{base}weight_scale_2")
    if len(data.shape) not in (2, 3):
        return f"{list(own.shape)} (values must be [N, K / 2] or stacks of it)"
    *stack, rows, half = data.shape
    columns = half * (2 if data.dtype == "U8" else 1)
    turned = bool(stack) and data.dtype == "U8" and own.shape == (*stack, rows // 8, half)
    if turned:
        rows, columns = half, 2 * rows
    if not turned and own.shape != (*stack, rows, columns // 16):
        return f"{list(own.shape)} (values {[*stack, rows, columns]}, required [N, K / 16])"
    if columns % 32:
        raise unread(data.place, f"NVFP4 in rows of {columns} columns", "a multiple of 32")
    number = math.prod(global_scale.shape) if global_scale is not None else 0
    pairs = global_scale if global_scale is not None and global_scale.shape == (*stack, 2) else None
    if global_scale is None or global_scale.dtype != "F32" or not (pairs or number in (1, *stack)):
        required = f"{base}weight_scale_2 or {base[-1]}weight_global_scale, one number F32"
        return f"{list(own.shape)} (required {required})"
    keys, packing = (values, global_scale.name, scales), Nvfp4(own, divides, turned, pairs)
    block = rows, columns
    return StoredMatrix(name, "nvfp4", data, global_scale, (*stack, *block), block, keys, packing)


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
    if len(own) == 4 and own[1] == own[3] == 1:  # as ModelOpt stores those of blocks
        own = own[0], own[2]
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
    if len(own) == 2 and own[0] == rows and own[1] > 0 and columns % own[1] == 0:
        return 1, columns // own[1]
    return None


def _packed_bits(quantization: Mapping[str, Any]) -> set[int]:
    """num_bits of the groups that are packed into words, which the tensors do not tell."""
    groups, found = quantization.get("config_groups"), set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
        if isinstance(bits, int) and (group.get("format") or quantization.get("format")) == _IN_WORDS:
            found.add(bits)
    return found


def _check_group(data: TensorInfo, columns: int) -> None:
    """Raises UserError: a scale for a number of columns that the engine does not compute."""
    if columns % 32:
        raise unread(data.place, f"groups of {columns} columns", "a multiple of 32")


def _is_of_bytes(data: TensorInfo, shape: TensorInfo | None, bits: set[int]) -> bool:
    """Whether words hold integers of 8 bits: where some do, the shape before packing tells which."""
    if 8 in bits and len(bits) > 1 and shape is not None:
        return int(read_tensor(shape).flatten()[-1]) == 4 * data.shape[-1]
    return bits == {8}


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
