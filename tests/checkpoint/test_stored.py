"""Every convention for quantised experts: found, loaded in place, and equal to what was written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, load_experts
from kt_ray.checkpoint.content import check_content
from kt_ray.checkpoint.safetensors_file import TensorInfo, read_tensor
from kt_ray.checkpoint.stored import find_matrices
from kt_ray.errors import UserError
from kt_ray.experts.lane_weights import expert_tensors, pack
from kt_ray.native import ExpertFormula, ExpertMatrix, quantize
from kt_ray.tools import units
from tests.checkpoint.conftest import config_dict, write_checkpoint
from tests.helpers.corrupt.quantised import ROTATED

Tensors = dict[str, torch.Tensor]
E, I, H = 3, 96, 160  # rows and columns of every projection are multiples of 32, and not of 128
PREFIX = "model.layers.1.mlp.experts"
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}


def _fp8(m: ExpertMatrix, e: int, name: str, suffix: str) -> Tensors:
    assert m.scales is not None
    return {f"{name}.weight": m.data[e], f"{name}.{suffix}": m.scales[e]}


def _one_scale(m: ExpertMatrix, e: int, name: str) -> Tensors:
    """A scale without dimensions, as older per-tensor FP8 releases have it."""
    assert m.scales is not None
    return {f"{name}.weight": m.data[e], f"{name}.weight_scale": m.scales[e].reshape(())}


def int4(m: ExpertMatrix, e: int, name: str) -> Tensors:
    assert m.scales is not None
    return {
        f"{name}.weight_packed": m.data[e],
        f"{name}.weight_scale": m.scales[e],
        f"{name}.weight_shape": torch.tensor(m.shape[1:], dtype=torch.int32),
    }


def _mxfp4(m: ExpertMatrix, e: int, name: str) -> Tensors:
    assert m.scales is not None
    return {f"{name}.weight_packed": m.data[e].flatten(1), f"{name}.weight_scale": m.scales[e]}


def _quark(m: ExpertMatrix, e: int, name: str) -> Tensors:
    assert m.scales is not None
    return {f"{name}.weight": m.data[e].flatten(1), f"{name}.weight_scale": m.scales[e]}


def _fp4(m: ExpertMatrix, e: int, name: str) -> Tensors:
    assert m.scales is not None
    scales = m.scales[e].view(torch.float8_e8m0fnu)
    return {f"{name}.weight": m.data[e].flatten(1).view(torch.int8), f"{name}.scale": scales}


Write = Callable[[ExpertMatrix, int, str], Tensors]
PER_TENSOR = (1 << 11, 1 << 11)
PER_ROW = (1, 1 << 11)
# Format with its options, and the tensors of one expert's projection.
CONVENTIONS: dict[str, tuple[str, dict[str, Any], Write]] = {
    "fp8 blocks": ("fp8", {}, lambda m, e, n: _fp8(m, e, n, "weight_scale_inv")),
    "fp8 blocks, scale": ("fp8", {}, lambda m, e, n: _fp8(m, e, n, "scale")),
    "fp8 rows": ("fp8", {"block": None}, lambda m, e, n: _fp8(m, e, n, "weight_scale")),
    "fp8 per tensor": (
        "fp8",
        {"block": PER_TENSOR},
        lambda m, e, n: _fp8(m, e, n, "weight_scale") | {f"{n}.input_scale": torch.ones(1)},
    ),
    "fp8 per tensor, scalar": ("fp8", {"block": PER_TENSOR}, _one_scale),
    "mxfp8": (
        "fp8",
        {"block": (1, 32), "scale_type": "ue8m0"},
        lambda m, e, n: _fp8(m, e, n, "weight_scale"),
    ),
    "int8 rows": ("int8", {"scale_type": "bfloat16"}, lambda m, e, n: _fp8(m, e, n, "weight_scale")),
    "int8 groups": ("int8", {"group": 32}, lambda m, e, n: _fp8(m, e, n, "weight_scale")),
    "int4": ("int4", {"group": 32, "scale_type": "bfloat16"}, int4),
    "int4 rows": ("int4", {}, int4),
    "mxfp4 packed": ("mxfp4", {}, _mxfp4),
    "mxfp4 of Quark": ("mxfp4", {}, _quark),
    "fp4 of DeepSeek-V4": ("mxfp4", {}, _fp4),
}


def _matrices(format: str, options: dict[str, Any]) -> dict[str, ExpertMatrix]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return {
        leaf: quantize(format, torch.randn(E, *shape, generator=generator), **options)
        for leaf, shape in shapes.items()
    }


def small_config(**changes: Any) -> dict[str, Any]:
    return config_dict(**{"hidden_size": H, "num_experts": E, "num_hidden_layers": 2, **changes})


@pytest.mark.parametrize("case", CONVENTIONS)
def test_per_expert(tmp_path: Path, case: str) -> None:
    format, options, write = CONVENTIONS[case]
    if "block" not in options and format == "fp8":
        options = {"block": (128, 128)}
    matrices = _matrices(format, options)
    tensors: Tensors = {}
    for leaf, matrix in matrices.items():
        for e in range(E):
            tensors |= write(matrix, e, f"{PREFIX}.{e}.{leaf}")
    beyond = {k.replace("layers.1", "layers.2"): v.clone() for k, v in tensors.items()}
    index = CheckpointIndex.open(
        write_checkpoint(tmp_path, tensors | beyond, shards=2, config=small_config())
    )
    layout = ExpertLayout.detect(index)
    assert layout.distinct_formats == (format,)
    assert set(layout.skipped) >= {k for k in beyond if not k.endswith("input_scale")}
    assert not any("scale" in name or "packed" in name for name in index.names)
    loaded = load_experts(index, layout, 1, [2, 0], threads=2)
    assert len(pack(expert_tensors(loaded, 1)).stretches) == 1
    assert loaded.bytes == 2 * layout.expert_bytes[1]
    for value, (leaf, matrix) in zip((loaded.gate, loaded.up, loaded.down), matrices.items(), strict=True):
        assert isinstance(value, ExpertMatrix)
        assert torch.equal(value.dequantize(), matrix.dequantize()[[2, 0]])
        assert torch.equal(index.value(f"{PREFIX}.1.{leaf}.weight"), matrix.dequantize()[1])


@pytest.mark.parametrize("quantised", ["", "mxfp4", "nvfp4", "nvfp4 pairs"])
def test_gpt_oss(tmp_path: Path, quantised: str) -> None:
    """Interleaved rows and biases; blocks and scales, or swapped axes: bfloat16, and ModelOpt's NVFP4. pairs:
    global scales of gate and of up."""
    quantised, _, pairs = quantised.partition(" ")
    generator = torch.Generator().manual_seed(2)
    both = quantize(quantised or "mxfp4", torch.randn(E, 2 * I, H, generator=generator))
    down = quantize(quantised or "mxfp4", torch.randn(E, H, I, generator=generator))
    bias = {"gate_up_proj": torch.randn(E, 2 * I), "down_proj": torch.randn(E, H)}
    tensors = {f"{PREFIX}.{k}_bias": v.bfloat16() for k, v in bias.items()}
    for leaf, matrix in (("gate_up_proj", both), ("down_proj", down)):
        assert matrix.scales is not None
        if quantised == "nvfp4":  # a global scale for each expert; one for all is in test_family_parity.py
            packed, scales = matrix.data[..., 2:].flatten(2), matrix.data[..., :2].flatten(2)
            tensors[f"{PREFIX}.{leaf}"] = packed.mT.contiguous()
            tensors[f"{PREFIX}.{leaf}_weight_scale"] = scales.mT.contiguous().view(torch.float8_e4m3fn)
            number = matrix.scales.flatten()
            pair = number[:, None].repeat(1, 2) if pairs and leaf == "gate_up_proj" else number
            tensors[f"{PREFIX}.{leaf}_weight_scale_2"] = pair
            tensors[f"{PREFIX}.{leaf}_input_scale"] = torch.ones(())
        elif quantised:
            tensors[f"{PREFIX}.{leaf}_blocks"] = matrix.data.reshape(*matrix.shape[:2], -1, 16)
            tensors[f"{PREFIX}.{leaf}_scales"] = matrix.scales
        else:
            tensors[f"{PREFIX}.{leaf}"] = matrix.dequantize(torch.bfloat16).transpose(1, 2).contiguous()
    config = small_config(model_type="gpt_oss", num_experts=None, num_local_experts=E)
    index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, config=config))
    check_content(index)
    layout = ExpertLayout.detect(index)
    assert (layout.kind, layout.interleaved, layout.transposed) == ("fused", True, not quantised)
    assert layout.biased and layout.hidden == H and layout.intermediate == I
    formula = ExpertFormula("swiglu_oai", 1.702, 7.0)
    loaded = load_experts(index, layout, 1, [1, 2], formula=formula, threads=2)
    assert (loaded.activation, loaded.limit) == ("swiglu_oai", 7.0)
    assert len(pack(expert_tensors(loaded, 1)).stretches) == 1 + 3  # and each bias
    full = both.dequantize()[1:]
    wanted = {"gate": full[:, 0::2], "up": full[:, 1::2], "down": down.dequantize()[1:]}
    for name, value in wanted.items():
        held = getattr(loaded, name)
        held = held.dequantize() if isinstance(held, ExpertMatrix) else held.float()
        assert torch.equal(held, value if quantised else value.bfloat16().float()), name
    rounded = bias["gate_up_proj"].bfloat16().float()[1:]
    assert loaded.gate_bias is not None and loaded.up_bias is not None and loaded.down_bias is not None
    assert torch.equal(loaded.gate_bias, rounded[:, 0::2]) and torch.equal(loaded.up_bias, rounded[:, 1::2])
    assert torch.equal(loaded.down_bias, bias["down_proj"].bfloat16().float()[1:])
    if pairs:
        tensors[f"{PREFIX}.gate_up_proj_weight_scale_2"][0, 1] *= 2
        index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, config=config))
        with pytest.raises(UserError, match="another global scale for gate than for up"):
            check_content(index)


# Blocks must not cover rows of gate and of up, unless there is one for all of an expert.
_FUSED_FP8 = [
    (128, (128, 128), False),
    (96, PER_TENSOR, False),
    (96, PER_TENSOR, True),
    (96, (1, 32), False),
    (96, PER_ROW, False),
]


@pytest.mark.parametrize(
    ("turned", "wide", "block", "one"),
    [*((t, *case) for t in ("", "modelopt") for case in _FUSED_FP8), ("fbgemm", 96, PER_ROW, False)],
)
def test_fused_fp8(tmp_path: Path, turned: str, wide: int, block: tuple[int, int], one: bool) -> None:
    """turned: Llama 4's [E, K, N], whose scales FBGEMM has as [E, 1, N] and, of down, [E, N, 1]; one: number
    for all experts."""
    both = quantize("fp8", torch.randn(E, 2 * wide, H), block=block)
    down = quantize("fp8", torch.randn(E, H, wide), block=block)
    tensors: Tensors = {}
    for leaf, matrix in (("gate_up_proj", both), ("down_proj", down)):
        assert matrix.scales is not None
        if one:
            matrix.scales[:] = matrix.scales[0]
        scales = matrix.scales.flatten() if block == PER_TENSOR else matrix.scales
        data, scales = matrix.data, scales[0].reshape(()) if one else scales
        if turned:
            data = data.mT.contiguous()
        if scales.dim() == 3 and (turned == "modelopt" or (turned and leaf == "gate_up_proj")):
            scales = scales.mT.contiguous()
        ends = {"": ("_scale_inv",), "modelopt": ("_weight_scale", "_input_scale"), "fbgemm": ("_scale",)}
        tensors |= {f"{PREFIX}.{leaf}": data, **{f"{PREFIX}.{leaf}{end}": scales for end in ends[turned]}}
    index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, config=small_config()))
    check_content(index)
    loaded = load_experts(index, ExpertLayout.detect(index), 1, [2])
    for leaf, matrix in (("gate_up_proj", both), ("down_proj", down)):
        name = f"{PREFIX}.{leaf}"
        assert torch.equal(index.value(name), matrix.dequantize())
        again = units.rewritten(index, name, change=lambda value, expert: value)
        for piece in again.produce(units.Notes()):
            stored = read_tensor(index.tensors[piece.key])[piece.start].float()
            assert torch.equal(piece.value.float(), stored.reshape(piece.value.shape)), piece.key
    for half, rows in ((loaded.gate, slice(wide)), (loaded.up, slice(wide, None))):
        assert isinstance(half, ExpertMatrix)
        assert torch.equal(half.dequantize(), both.dequantize()[2:, rows])
    assert isinstance(loaded.down, ExpertMatrix)
    assert torch.equal(loaded.down.dequantize(), down.dequantize()[2:])


def test_fused_fp8_in_a_later_layer_alone(tmp_path: Path) -> None:
    """What the first layer's plain experts do not show is found in the headers, not when layer 1 is read."""
    both, down = quantize("fp8", torch.randn(E, 2 * I, H)), torch.zeros(E, H, I).bfloat16()
    assert both.scales is not None
    tensors = {
        f"{PREFIX}.gate_up_proj": both.data,
        f"{PREFIX}.gate_up_proj_scale_inv": both.scales,
        f"{PREFIX}.down_proj": down,
        f"{PREFIX.replace('1', '0')}.gate_up_proj": torch.zeros(E, 2 * I, H).bfloat16(),
        f"{PREFIX.replace('1', '0')}.down_proj": down.clone(),
    }
    index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, config=small_config()))
    with pytest.raises(UserError, match=rf"rows of gate and of up.*{PREFIX}.gate_up_proj: {I} rows"):
        ExpertLayout.detect(index)


@pytest.mark.parametrize("target", ["int8", "int4"])
@pytest.mark.parametrize("stored", ["bf16", "fp8", "fused", "int8", "int8 groups"])
def test_quantised_while_reading(tmp_path: Path, target: Any, stored: str) -> None:
    """The same as quantising the stored values; experts that are stored so already stay as they are."""
    generator = torch.Generator().manual_seed(3)
    values = {k: torch.randn(E, *s, generator=generator) for k, s in {"g": (I, H), "u": (I, H)}.items()}
    values["d"] = torch.randn(E, H, I, generator=generator)
    tensors: Tensors = {}
    if stored == "fused":
        both = torch.cat((values["g"], values["u"]), 1).bfloat16()
        tensors[f"{PREFIX}.gate_up_proj"] = both.transpose(1, 2).contiguous()
        tensors[f"{PREFIX}.down_proj"] = values["d"].bfloat16().transpose(1, 2).contiguous()
        values = {k: v.bfloat16().float() for k, v in values.items()}
    else:
        for key, leaf in (("g", "gate_proj"), ("u", "up_proj"), ("d", "down_proj")):
            if stored == "bf16":
                values[key] = values[key].bfloat16().float()
                tensors |= {f"{PREFIX}.{e}.{leaf}.weight": values[key][e].bfloat16() for e in range(E)}
                continue
            matrix = quantize(stored.split()[0], values[key], group=32 if "groups" in stored else None)
            values[key] = matrix.dequantize()
            suffix = "weight_scale_inv" if stored == "fp8" else "weight_scale"
            for e in range(E):
                tensors |= _fp8(matrix, e, f"{PREFIX}.{e}.{leaf}", suffix)
    index = CheckpointIndex.open(write_checkpoint(tmp_path, tensors, config=small_config()))
    loaded = load_experts(index, ExpertLayout.detect(index), 1, [1, 0], target=target, threads=2)
    for value, held in ((values["g"], loaded.gate), (values["u"], loaded.up), (values["d"], loaded.down)):
        assert isinstance(held, ExpertMatrix) and held.format == target
        if stored == target:
            assert torch.equal(held.dequantize(), value[[1, 0]])
            continue
        group = value.shape[2] if target == "int8" else 32
        wanted = quantize(target, value[[1, 0]], group=group, scale_type="bfloat16")
        assert torch.equal(held.dequantize(), wanted.dequantize())


def packed(*bits: int) -> dict[str, Any]:
    groups = {f"group_{n}": {"weights": {"num_bits": n, "type": "int"}} for n in bits}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def _info(name: str, dtype: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, Path("model.safetensors"), dtype, shape, 0, 0)


PACKED = [_info("a.weight_packed", "I32", 8, 8), _info("a.weight_scale", "BF16", 8, 2)]
FAULTS: dict[str, tuple[list[TensorInfo], str]] = {
    "scales of another shape": (
        [_info("a.weight", "F8_E4M3", 256, 256), _info("a.weight_scale_inv", "F32", 2, 3)],
        "a.weight [256, 256] with a.weight_scale_inv [2, 3]",
    ),
    "e5m2": (
        [_info("a.weight", "F8_E5M2", 8, 8), _info("a.weight_scale", "F32", 8, 1)],
        "cannot be read; at model.safetensors, tensor a.weight; found F8_E5M2 with scales F32 [8, 1]",
    ),
    "groups of 16": (
        [_info("a.weight_packed", "I32", 8, 8), _info("a.weight_scale", "BF16", 8, 4)],
        "found groups of 16 columns; required a multiple of 32",
    ),
    "zero points": ([_info("a.weight_zero_point", "I32", 8)], "asymmetric"),
    "int8 with zero points": (
        [
            _info("a.weight", "I8", 8, 8),
            _info("a.weight_scale", "F32", 8),
            _info("a.weight_zero_point", "I8", 8),
        ],
        "asymmetric integers that are not INT4",
    ),
    "zero points of another shape": (
        [*PACKED, _info("a.weight_zero_point", "I32", 8, 2)],
        "and a.weight_zero_point I32 [8, 2] (required I32 [1, 2] or I8 [8, 2])",
    ),
    "a stack with zero points": (
        [
            *(_info("a.weight_packed", "I32", 2, 8, 8), _info("a.weight_scale", "BF16", 2, 8, 2)),
            _info("a.weight_zero_point", "I32", 2, 1, 2),
        ],
        "found a stack with zero points; required one matrix each",
    ),
    "nvfp4 without values": ([_info("a.weight_global_scale", "F32", 1)], "a.weight_global_scale (no weight)"),
    "nvfp4 without its number": (
        [_info("a.weight", "U8", 8, 32), _info("a.weight_scale", "F8_E4M3", 8, 4)],
        "required a.weight_scale_2 or .weight_global_scale, one number F32",
    ),
    "nvfp4 of other groups": (
        [
            _info("a.weight", "U8", 8, 32),
            _info("a.weight_scale", "F8_E4M3", 8, 2),
            _info("a.weight_scale_2", "F32"),
        ],
        "a.weight_scale [8, 2] (values [8, 64], required [N, K / 16])",
    ),
    "nvfp4, rows of 16": (
        [
            *(_info("a.weight", "U8", 8, 24), _info("a.weight_scale", "F8_E4M3", 8, 3)),
            _info("a.weight_scale_2", "F32"),
        ],
        "found NVFP4 in rows of 48 columns; required a multiple of 32",
    ),
    "scaled inputs": ([_info("a.pre_quant_scale", "BF16", 8)], "inputs must be scaled first"),
    "awq, values of another type": (
        [_info("a.qweight", "I16", 8, 8), _info("a.scales", "F16", 2, 8), _info("a.qzeros", "I32", 2, 1)],
        "values must be I32 [K, N / 8]",
    ),
    "awq": ([_info("a.qweight", "I32", 8, 8)], "GPTQ or AWQ"),
    "gptq without scales": ([_info("a.qweight", "I32", 8, 8)], "a.qweight (I32 without scales)"),
    "gptq without zero points": (
        [_info("a.qweight", "I32", 8, 8), _info("a.scales", "F16", 2, 8)],
        "with a.scales [2, 8] (required a.qzeros I32 [2, 1]; or a module of other than 4 or 8 bits)",
    ),
    # a module of 8 bits: taken for 4, its rows would be twice as long
    "gptq of 2 bits": (
        [_info("a.qweight", "I32", 4, 16), _info("a.scales", "F16", 2, 16), _info("a.qzeros", "I32", 2, 1)],
        "required a.qzeros I32 [2, 2]; or a module of other than 4 or 8 bits",
    ),
    "gptq, scales of another shape": (
        [_info("a.qweight", "I32", 8, 8), _info("a.scales", "F16", 3, 8), _info("a.qzeros", "I32", 3, 1)],
        "a.scales [3, 8] (3 groups in rows of 64, config.json says 32 columns each)",
    ),
    "gptq, groups of 16": (
        [
            *(_info("a.qweight", "I32", 8, 8), _info("a.scales", "F16", 4, 8)),
            *(_info("a.qzeros", "I32", 4, 1), _info("a.g_idx", "I32", 64)),
        ],
        "found groups of 16 columns; required a multiple of 32",
    ),
    "gptq, values of another type": (
        [_info("a.qweight", "I16", 8, 8), _info("a.scales", "F16", 2, 8), _info("a.qzeros", "I32", 2, 1)],
        "values must be I32 [K / 8, N]",
    ),
    "gptq, rows of no whole groups, no order": (
        [_info("a.qweight", "I32", 24, 8), _info("a.scales", "F16", 2, 8), _info("a.qzeros", "I32", 2, 1)],
        "a.scales [2, 8] (2 groups in rows of 192, config.json says 32 columns each)",
    ),
    "gptq, rows of no whole groups": (
        [
            *(_info("a.qweight", "I32", 24, 8), _info("a.scales", "F16", 7, 8)),
            *(_info("a.qzeros", "I32", 7, 1), _info("a.g_idx", "I32", 192)),
        ],
        "with a.scales [7, 8] (7 groups in rows of 192, config.json says 32 columns each); required",
    ),
    "gptq, order of another length": (
        [
            *(_info("a.qweight", "I32", 8, 8), _info("a.scales", "F16", 2, 8)),
            *(_info("a.qzeros", "I32", 2, 1), _info("a.g_idx", "I32", 32)),
        ],
        "required a.g_idx I32 [64]",
    ),
    "zero points alone": ([_info("a.qzeros", "I32", 2, 1)], "a.qzeros (no weight)"),
    "bitsandbytes": ([_info("a.weight.absmax", "F32", 8)], "bitsandbytes"),
}


def test_what_the_tensors_do_not_tell_is_refused() -> None:
    """The same tensors would be INT4 of other columns, or in the model's own basis."""
    infos = [_info("a.weight_packed", "I32", 8, 16), _info("a.weight_scale", "BF16", 8, 1)]
    tensors = {info.name: info for info in infos}
    group = {"weights": {"num_bits": 8, "type": "int"}}
    with pytest.raises(UserError, match="INT3 packed into words"):
        find_matrices(Path("model"), tensors, {"quantization_config": packed(3, 8)})
    zeros = {"a.weight_zero_point": _info("a.weight_zero_point", "I32", 2, 1)}
    with pytest.raises(UserError, match=r"found INT8 with zero points; required"):
        find_matrices(Path("model"), tensors | zeros, {"quantization_config": packed(8)})
    with pytest.raises(UserError, match=r"at model/config\.json; found weights rotated.*q_attn"):
        find_matrices(Path("model"), tensors, {"quantization_config": ROTATED})
    # INT8 one per byte beside INT4 in words: each group names its own format
    four = {"format": "pack-quantized", "weights": {"num_bits": 4, "type": "int"}}
    both = {
        "format": "mixed-precision",
        "config_groups": {"a": group | {"format": "int-quantized"}, "b": four},
    }
    assert find_matrices(Path("model"), tensors, {"quantization_config": both})["a.weight"].format == "int4"


@pytest.mark.parametrize("case", FAULTS)
def test_refused(case: str) -> None:
    infos, message = FAULTS[case]
    quantization = (
        AWQ if case.startswith("awq,") else GPTQ if "a.q" in infos[0].name and case != "awq" else {}
    )
    config = {"quantization_config": quantization}
    with pytest.raises(UserError) as caught:
        find_matrices(Path("model"), {info.name: info for info in infos}, config)
    assert message in str(caught.value) and caught.value.remedy
