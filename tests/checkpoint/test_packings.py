"""Integers in the packings of GPTQ, AWQ and others, and scales of two levels: read as what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, load_experts
from kt_ray.checkpoint.content import check_content
from kt_ray.errors import UserError
from kt_ray.experts.lane_weights import expert_tensors, pack
from kt_ray.native import ExpertMatrix, quantize
from tests.checkpoint.conftest import write_checkpoint
from tests.checkpoint.test_stored import AWQ, GPTQ, PREFIX, E, H, I, Tensors, int4, packed, small_config
from tests.helpers.released.formats import (
    Encode,
    Encoded,
    awq,
    fp8_block_modelopt,
    gptq_bytes,
    gptq_zeros,
    int4_zeros,
    int8_packed,
    nvfp4,
)


def _gptq(path: Path, tensors: Tensors, **quantization: Any) -> CheckpointIndex:
    config = small_config(quantization_config=GPTQ | quantization)
    return CheckpointIndex.open(write_checkpoint(path, tensors, config=config))


def _gptq_experts(columns: int = 32) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """Random integers as GPTQ stores them, and scale * (integer - 8) of each, float32 [N, K]; columns of a
    scale, 0 = all."""
    generator = torch.Generator().manual_seed(8)
    tensors: Tensors = {}
    values: dict[str, torch.Tensor] = {}
    for leaf, (n, k) in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
        for e in range(E):
            base, group = f"{PREFIX}.{e}.{leaf}", columns or k
            groups = k // group
            integers = torch.randint(16, (n, k), generator=generator)
            words = torch.zeros(k // 8, n, dtype=torch.int64)
            for column in range(k):
                words[column // 8] |= integers[:, column] << 4 * (column % 8)
            scales = torch.rand(groups, n, generator=generator).half()
            order = torch.arange(k) // group
            tensors |= {
                f"{base}.qweight": torch.where(words >= 2**31, words - 2**32, words).int(),
                f"{base}.scales": scales,
                f"{base}.qzeros": torch.full((groups, n // 8), 0x77777777).int(),
                f"{base}.g_idx": order.int(),
            }
            values[f"{base}.weight"] = scales.float()[order].t() * (integers - 8)
    return tensors, values


def _check_values(index: CheckpointIndex, layout: ExpertLayout, values: Tensors) -> None:
    """Experts as they are read, one at a time, and quantised while they are read."""
    loaded = load_experts(index, layout, 1, [2, 0], threads=2)
    assert loaded.bytes == 2 * layout.expert_bytes[1]
    assert len(pack(expert_tensors(loaded, 1)).stretches) == 1
    for leaf, matrix in {"gate_proj": loaded.gate, "up_proj": loaded.up, "down_proj": loaded.down}.items():
        assert isinstance(matrix, ExpertMatrix) and (matrix.format,) == layout.distinct_formats
        wanted = torch.stack([values[f"{PREFIX}.{e}.{leaf}.weight"] for e in (2, 0)])
        assert torch.equal(matrix.dequantize(), wanted)
        assert torch.equal(index.value(f"{PREFIX}.0.{leaf}.weight"), wanted[1])
    eight = load_experts(index, layout, 1, [1], target="int8")
    wanted = quantize("int8", values[f"{PREFIX}.1.up_proj.weight"][None], scale_type="bfloat16").dequantize()
    assert isinstance(eight.up, ExpertMatrix) and torch.equal(eight.up.dequantize(), wanted)


@pytest.mark.parametrize("group", [32, 0], ids=["groups", "rows"])
@pytest.mark.parametrize("release", ["gptq", "gptq_v2", "auto-round", "AutoGPTQ"])
def test_gptq(tmp_path: Path, release: str, group: int) -> None:
    """Both versions of zero points; no g_idx in AutoRound's files, blank biases in old ones of AutoGPTQ."""
    tensors, values = _gptq_experts(group)
    changes: dict[str, Any] = {"group_size": group or -1, "desc_act": not group}
    if release == "AutoGPTQ":
        blank = {k.removesuffix("qweight"): v.shape[1] for k, v in tensors.items() if k.endswith("qweight")}
        tensors |= {f"{base}bias": torch.zeros(n).half() for base, n in blank.items()}
    if release == "gptq_v2":
        changes |= {"checkpoint_format": "gptq_v2"}
        tensors |= {
            k: torch.full_like(v, 0x88888888 - (1 << 32)) for k, v in tensors.items() if "qzeros" in k
        }
    if release == "auto-round":
        changes |= {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
        tensors = {k: v for k, v in tensors.items() if "g_idx" not in k}
    index = _gptq(tmp_path, tensors, **changes)
    check_content(index)
    layout = ExpertLayout.detect(index)
    assert layout.distinct_formats == ("int4",) and not layout.biased
    assert {name for name in index.names if not name.endswith("bias")} == set(values)
    _check_values(index, layout, values)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("qzeros", lambda v: v - 1, "zero points other than 7; required symmetric integers"),
        ("qzeros", torch.zeros_like, "found zeros; required 7 throughout"),
        ("g_idx", lambda v: v.flip(0), "an order of their own; required groups of 32 in order"),
    ],
)
def test_gptq_of_other_content(
    tmp_path: Path, key: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    """config.json need not tell: found before a run, and by whoever reads the weights."""
    tensors, _ = _gptq_experts()
    name = f"{PREFIX}.1.up_proj.{key}"
    index = _gptq(tmp_path / "one", tensors | {name: change(tensors[name]).contiguous()})
    layout = ExpertLayout.detect(index)
    assert load_experts(index, layout, 1, [0, 2])
    for read in (
        lambda: load_experts(index, layout, 1, [1]),
        lambda: load_experts(index, layout, 1, [1], target="int8"),
        lambda: index.value(f"{PREFIX}.1.up_proj.weight"),
    ):
        with pytest.raises(UserError) as caught:
            read()
        assert message in caught.value.line() and name in caught.value.line()
    odd = {k: change(v).contiguous() if k.endswith(key) else v for k, v in tensors.items()}
    with pytest.raises(UserError, match=message):
        check_content(_gptq(tmp_path / "all", odd))


def _released(encode: Encode) -> tuple[Tensors, Tensors]:
    """Experts as they are released, and their values."""
    generator = torch.Generator().manual_seed(9)
    tensors: Tensors = {}
    values: Tensors = {}
    for leaf, shape in {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}.items():
        for e in range(E):
            name = f"{PREFIX}.{e}.{leaf}.weight"
            stored, values[name] = encode(name, torch.randn(*shape, generator=generator))
            tensors |= stored
    return tensors, values


def _second_version(name: str, value: torch.Tensor) -> Encoded:
    stored, values = gptq_zeros(name, value)
    return Encoded({k: v + 0x11111111 if "qzeros" in k else v for k, v in stored.items()}, values)


def _zeros_as_bytes(name: str, value: torch.Tensor) -> Encoded:
    """As compressed-tensors once stored them: from -8 to 7, one per byte."""
    stored, values = int4_zeros(name, value)
    key = f"{name}_zero_point"
    nibbles = stored[key].unsqueeze(1) >> torch.arange(0, 32, 4)[None, :, None] & 15
    return Encoded(stored | {key: (nibbles.flatten(0, 1) - 8).to(torch.int8)}, values)


PACKINGS: dict[str, tuple[str, dict[str, Any], Encode]] = {
    "gptq": ("uint4", GPTQ | {"sym": False}, gptq_zeros),
    "gptq_v2": ("uint4", GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, _second_version),
    "gptq_v2 of transformers 5": ("uint4", GPTQ | {"sym": False, "format": "gptq_v2"}, _second_version),
    "awq": ("uint4", AWQ, awq),
    "auto-round": (
        "uint4",
        AWQ | {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"},
        awq,
    ),
    "compressed-tensors": ("uint4", {"quant_method": "compressed-tensors"}, int4_zeros),
    "compressed-tensors, bytes": ("uint4", {"quant_method": "compressed-tensors"}, _zeros_as_bytes),
    "gptq, 8 bits": ("int8", GPTQ | {"bits": 8}, gptq_bytes),
    "gptq, 8 bits in some modules": ("int8", GPTQ | {"bits": 4}, gptq_bytes),
    "pack-quantized, 8 bits": ("int8", packed(8), int8_packed),
    "pack-quantized, 8 bits in some modules": ("int8", packed(4, 8), int8_packed),
    "modelopt, FP8 in blocks": ("fp8", {"quant_method": "modelopt"}, fp8_block_modelopt),
    "modelopt": ("nvfp4", {"quant_method": "modelopt"}, nvfp4(("", "_scale", "_scale_2"), False)),
    "nvfp4-pack-quantized": (
        *("nvfp4", {"quant_method": "compressed-tensors"}),
        nvfp4(("_packed", "_scale", "_global_scale"), True),
    ),
}


@pytest.mark.parametrize("case", PACKINGS)
def test_what_is_taken_apart(tmp_path: Path, case: str) -> None:
    """Zero points, and scales of two levels."""
    kind, quantization, encode = PACKINGS[case]
    tensors, values = _released(encode)
    beside = {
        f"{PREFIX}.0.up_proj.input_scale": torch.ones(1),
        f"{PREFIX}.0.up_proj.input_global_scale": torch.ones(1),
        f"{PREFIX}.0.up_proj.input_zero_point": torch.zeros(1),
    }
    path = write_checkpoint(tmp_path, tensors | beside, config=small_config(quantization_config=quantization))
    index = CheckpointIndex.open(path)
    check_content(index)
    layout = ExpertLayout.detect(index)
    assert layout.distinct_formats == (kind,) and set(index.names) == set(values)
    _check_values(index, layout, values)


def test_nvfp4_as_files_may_name_its_type(tmp_path: Path) -> None:
    """F4 [N, K]; most files have U8 [N, K / 2]."""
    _, quantization, encode = PACKINGS["modelopt"]
    tensors, values = _released(encode)
    path = write_checkpoint(tmp_path, tensors, config=small_config(quantization_config=quantization))
    for file in path.glob("*.safetensors"):
        raw = file.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        entries = json.loads(raw[8:start])
        for entry in entries.values():
            if entry.get("dtype") == "U8":
                entry |= {"dtype": "F4", "shape": [entry["shape"][0], 2 * entry["shape"][1]]}
        head = json.dumps(entries).encode()
        file.write_bytes(len(head).to_bytes(8, "little") + head + raw[start:])
    index = CheckpointIndex.open(path)
    layout = ExpertLayout.detect(index)
    loaded = load_experts(index, layout, 1, [2, 0])
    assert loaded.bytes == 2 * layout.expert_bytes[1] and isinstance(loaded.up, ExpertMatrix)
    name = f"{PREFIX}.0.up_proj.weight"
    assert torch.equal(loaded.up.dequantize()[1], values[name])
    assert torch.equal(index.value(name), values[name])


@pytest.mark.parametrize(
    ("case", "key", "change", "message"),
    [
        ("gptq", "up_proj.qzeros", lambda v: torch.full_like(v, -1), "a zero point stored as 15"),
        (
            "modelopt",
            "up_proj.weight_scale",
            lambda v: torch.full_like(v.view(torch.uint8), 127),
            "found NaN",
        ),
    ],
)
def test_content_that_is_not_read(
    tmp_path: Path, case: str, key: str, change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    _, quantization, encode = PACKINGS[case]
    tensors, _ = _released(encode)
    tensors = {k: change(v).view(v.dtype) if k.endswith(key) else v for k, v in tensors.items()}
    path = write_checkpoint(tmp_path, tensors, config=small_config(quantization_config=quantization))
    index = CheckpointIndex.open(path)
    for read in (
        lambda: check_content(index),
        lambda: load_experts(index, ExpertLayout.detect(index), 1, [1]),
    ):
        with pytest.raises(UserError, match=message):
            read()


def test_gptq_beside_another_packing_of_int4(tmp_path: Path) -> None:
    """Words of the same type, scales and groups, but in another order."""
    base = f"{PREFIX}.1.gate_proj"
    tensors = {k: v for k, v in _gptq_experts()[0].items() if not k.startswith(f"{base}.")}
    other = quantize("int4", torch.randn(1, I, H), group=32, scale_type="float16")
    with pytest.raises(UserError, match=r"mixed types.*GPTQ"):
        ExpertLayout.detect(_gptq(tmp_path, tensors | int4(other, 0, base)))


def test_biases_beside_gptq_that_are_not_blank(tmp_path: Path) -> None:
    tensors, _ = _gptq_experts()
    biases = {
        k.replace("qweight", "bias"): torch.ones(v.shape[1]) for k, v in tensors.items() if "qweight" in k
    }
    assert ExpertLayout.detect(_gptq(tmp_path, tensors | biases)).biased


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "integers of 3 bits in the packing of gptq"),
        ({"desc_act": True}, "integers in an order of their own (desc_act) in the packing of gptq"),
        ({"quant_method": "awq", "version": "gemv"}, "integers in the packing of awq, version gemv"),
        ({"quant_method": "awq", "format": "llm-awq"}, "integers in the packing of awq, version llm-awq"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:x"}, "auto-round auto_round:x"),
    ],
)
def test_integers_in_other_packings_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        ExpertLayout.detect(_gptq(tmp_path, _gptq_experts()[0], **changes))
    assert message in str(caught.value) and "INT4 (compressed-tensors, GPTQ, AWQ)" in caught.value.line()
