"""Stored matrices: what their bytes mean, what is refused, what the engine is told of them."""

from __future__ import annotations

import ctypes
import math
import re
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf.quants
import numpy as np
import pytest
import torch
from torch import Tensor

from kt_ray.native.matrix import FORMATS, GGUF_BLOCKS, ExpertMatrix, scales_to_float
from kt_ray.native.quantization import quantize
from kt_ray.native.tensors import projection_arg
from tests.helpers.cpp import compile_program
from tests.helpers.formats import random_matrix

pytestmark = pytest.mark.accept("engine")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CASES: dict[str, Callable[[], ExpertMatrix]] = {
    "fp8-blocks": lambda: random_matrix("fp8", (2, 130, 150), generator()),
    "fp8-blocks-ue8m0": lambda: random_matrix("fp8", (2, 130, 288), generator(), scales=torch.uint8),
    "fp8-rows": lambda: random_matrix("fp8", (2, 7, 45), generator(), block=None),
    "fp8-rows-bf16": lambda: random_matrix("fp8", (2, 7, 64), generator(), block=None, scales=torch.bfloat16),
    "fp8-tensor": lambda: random_matrix("fp8", (2, 7, 45), generator(), block=(7, 45)),
    "mxfp4": lambda: random_matrix("mxfp4", (2, 5, 96), generator()),
    "int8-rows": lambda: random_matrix("int8", (2, 7, 45), generator()),
    "int8-groups": lambda: random_matrix("int8", (2, 7, 256), generator(), group=64, scales=torch.float16),
    "int4-groups": lambda: random_matrix("int4", (2, 5, 384), generator(), group=128, scales=torch.bfloat16),
    "int4-rows": lambda: random_matrix("int4", (2, 5, 96), generator()),
    "nvfp4": lambda: random_matrix("nvfp4", (2, 5, 96), generator()),
    "uint4-groups": lambda: random_matrix(
        "uint4", (2, 5, 384), generator(), group=128, scales=torch.bfloat16
    ),
    "uint4-rows": lambda: random_matrix("uint4", (2, 5, 96), generator()),
    **{kind: partial(random_matrix, kind, (2, 5, 512), generator()) for kind in GGUF_BLOCKS},
}


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_program("strips_test", tmp_path_factory.mktemp("strips") / "strips", ["-std=c++20", "-O1"])


def decode(driver: Path, matrix: ExpertMatrix) -> Tensor:
    """The scalar C++ decoder's values of the first expert, through the binding's description."""
    _, form, _, n, k, data, _, row, col, kind, scales, _, scale_row, rows, columns = matrix.binding_arg("w")
    size = matrix.data.shape[2:].numel() * matrix.data.element_size()
    parts = [struct.pack("=3q", n, (n - 1) * row + size, _scale_bytes(matrix))]
    parts.append(_memory(data, (n - 1) * row + size))
    parts.append(_memory(scales, _scale_bytes(matrix)))
    args = [form, kind, k, row, col, scale_row, rows, columns]
    done = subprocess.run(
        [driver, "--decode", *map(str, args)], input=b"".join(parts), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(n, k)


def _memory(address: int, size: int) -> bytes:
    return ctypes.string_at(address, size) if size else b""


def _scale_bytes(matrix: ExpertMatrix) -> int:
    if matrix.scales is None:
        return 0
    scales = matrix.scales[0]
    return ((scales.shape[0] - 1) * scales.stride(0) + scales.shape[1]) * scales.element_size()


@pytest.mark.parametrize("name", CASES)
def test_the_decoder_gives_the_oracles_values_bit_for_bit(driver: Path, name: str) -> None:
    matrix = CASES[name]()
    assert torch.equal(decode(driver, matrix), matrix.dequantize()[0])


@pytest.mark.parametrize("format", ["fp8", "mxfp4", "nvfp4", *GGUF_BLOCKS])
def test_the_decoder_gives_the_oracles_values_for_any_bits(driver: Path, format: str) -> None:
    """Scales that are subnormal, infinite or no numbers, values that overflow."""
    matrix = random_matrix(format, (1, 16, 512), generator(), scales=torch.uint8)
    holder = matrix.data if matrix.scales is None else matrix.scales
    raw = holder.view(torch.uint8)
    raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator(1)))
    if format == "fp8":
        matrix.data.view(torch.uint8)[0, :, ::5] = 127
    with np.errstate(all="ignore"):
        expected = matrix.dequantize()[0]
    torch.testing.assert_close(decode(driver, matrix), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
def test_every_second_row_is_a_view(driver: Path, name: str) -> None:
    whole = CASES[name]()
    n = whole.shape[1]
    part = whole.rows(1, n, 2)
    assert part.data.data_ptr() == whole.data[:, 1].data_ptr()
    assert torch.equal(part.dequantize(), whole.dequantize()[:, 1::2])
    assert torch.equal(decode(driver, part), part.dequantize()[0])


@pytest.mark.parametrize("cut", [(0, 4, 1), (4, 8, 1), (0, 8, 2), (7, 8, 1)])
@pytest.mark.parametrize("block", [(8, 96), (128, 64)])
def test_any_rows_share_a_scale_of_all(
    driver: Path, block: tuple[int, int], cut: tuple[int, int, int]
) -> None:
    whole = random_matrix("fp8", (2, 8, 96), generator(), block=block)
    part = whole.rows(*cut)
    assert torch.equal(part.dequantize(), whole.dequantize()[:, slice(*cut)])
    assert torch.equal(decode(driver, part), part.dequantize()[0])


@pytest.mark.parametrize("kind", GGUF_BLOCKS)
def test_gguf_values_are_the_packages(kind: str) -> None:
    matrix = random_matrix(kind, (2, 3, 512), generator())
    expected = gguf.quants.dequantize(matrix.data.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(matrix.dequantize().numpy(), expected)
    assert torch.equal(matrix.dequantize(torch.bfloat16), torch.from_numpy(expected).bfloat16())


def test_a_block_of_more_than_32_bits_is_all() -> None:
    """The engine would divide by 0 rows."""
    data, scales = torch.ones(1, 40, 64).to(torch.float8_e4m3fn), torch.full((1, 1, 1), 0.5)
    matrix = ExpertMatrix.fp8(data, scales, (2**32, 2**33))
    assert all(size < 2**31 for size in matrix.binding_arg("w")[-2:])
    assert torch.equal(matrix.dequantize(), torch.full((1, 40, 64), 0.5))


def test_fp8_blocks_with_partial_edges() -> None:
    data = torch.randn(2, 130, 200, generator=generator()).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2, 2, generator=generator()) + 0.5
    got = ExpertMatrix.fp8(data, scales).dequantize()
    for e in range(2):
        for n in (0, 127, 128, 129):
            for k in (0, 127, 128, 199):
                assert got[e, n, k] == data[e, n, k].float() * scales[e, n // 128, k // 128]


def test_mxfp4_is_ggufs_mxfp4() -> None:
    """GGUF's block: the exponent, then 16 bytes whose low nibbles come first."""
    matrix = random_matrix("mxfp4", (1, 4, 64), generator())
    assert matrix.scales is not None
    codes = torch.stack((matrix.data & 15, matrix.data >> 4), -1).view(4, 2, 32)
    blocks = torch.cat((matrix.scales.view(4, 2, 1), codes[..., :16] | codes[..., 16:] << 4), -1).view(4, 34)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(matrix.dequantize()[0].numpy(), expected)


def test_int4_by_hand() -> None:
    packed = torch.tensor([0x76543210, -0x01234568, 0, 0x11111111], dtype=torch.int32).view(1, 1, 4)
    got = ExpertMatrix.int4(packed, torch.tensor([[0.5]])).dequantize().flatten() * 2
    assert got[:8].tolist() == [-8, -7, -6, -5, -4, -3, -2, -1]
    assert got[8:16].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert got[16:].tolist() == [-8] * 8 + [-7] * 8


def test_uint4_by_hand() -> None:
    packed = torch.tensor([0x76543210, -0x01234568, 0, 0x11111111] * 2, dtype=torch.int32).view(1, 1, 8)
    scales, zeros = torch.tensor([[[0.5, 2.0]]]), torch.tensor([[[3, 15]]])
    got = ExpertMatrix.uint4(packed, scales, zeros).dequantize().flatten()
    assert (got[:32] * 2).tolist() == [*range(-3, 13), *[-3] * 8, *[-2] * 8]
    assert (got[32:] / 2).tolist() == [*range(-15, 1), *[-15] * 8, *[-14] * 8]


def test_nvfp4_by_hand() -> None:
    packed = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).view(
        1, 1, 16
    )
    scales = torch.tensor([2.0, 448.0]).to(torch.float8_e4m3fn).view(1, 1, 2)
    got = ExpertMatrix.nvfp4(packed, scales, torch.tensor([0.25])).dequantize().flatten()
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert (got[:16] * 2).tolist() == [*sizes, *(-size for size in sizes)]
    assert torch.equal(got[16:], got[:16] * 224)


def test_ue8m0_from_end_to_end() -> None:
    values = scales_to_float(torch.arange(256, dtype=torch.uint8))
    assert values[:255].double().tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert math.isnan(values[255])
    if hasattr(torch, "float8_e8m0fnu"):
        same = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        assert torch.equal(same.float()[:255], values[:255])
        assert torch.equal(scales_to_float(same)[:255], values[:255])


# Half a step of the widest gap, relative to the largest value that shares a scale; scales that are
# themselves rounded (K-quants: to 6 or 8 bits, and from minima) widen it.
BOUNDS = {
    "fp8": 2**-4,
    "mxfp4": 2**-2,
    "int8": 0.51 / 127,
    "int4": 0.51 / 7.5 + 0.034,  # 7.5 is cut to 7
    "nvfp4": 2**-2,
    "uint4": 2 * 1.02 / 15,  # the zero point is rounded, too
    "q8_0": 0.51 / 127,
    "q4_0": 0.51 / 8 + 0.064,  # the other end is cut by a whole step
    "q5_0": 0.51 / 16 + 0.033,
    "q5_1": 2 * 0.51 / 31,
    "q4_k": 2 * 0.51 / 15 + 2 / 63,
    "q5_k": 2 * 0.51 / 31 + 2 / 63,
    "q6_k": 0.51 / 31 + 1 / 127,
}


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_values_are_near(format: str) -> None:
    w = torch.randn(2, 40, 512, generator=generator()) / 30
    got = quantize(format, w).dequantize()
    assert float((got - w).abs().max()) <= BOUNDS[format] * float(w.abs().max())
    again = quantize(format, got).dequantize()
    assert float((again - got).abs().max()) <= BOUNDS[format] * float(w.abs().max())


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: str) -> None:
    assert torch.equal(quantize(format, torch.zeros(1, 2, 256)).dequantize(), torch.zeros(1, 2, 256))


def test_quantize_rounds_to_nearest_within_the_scale() -> None:
    w = torch.randn(1, 16, 64, generator=generator())
    for matrix, codes in [
        (quantize("int8", w), torch.arange(-127, 128).float()),
        (quantize("int4", w, group=32), torch.arange(-8, 8).float()),
        (
            quantize("fp8", w, block=None),
            torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float(),
        ),
        (quantize("mxfp4", w), torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])),
    ]:
        assert matrix.scales is not None
        scale = scales_to_float(matrix.scales).repeat_interleave(matrix.scale_block[1], 2)
        both = torch.cat((codes, -codes))
        nearest = (w.unsqueeze(-1) - both * scale.unsqueeze(-1)).abs().amin(-1)
        torch.testing.assert_close((w - matrix.dequantize()).abs(), nearest, rtol=1e-5, atol=1e-6)


def test_quantize_with_other_scales() -> None:
    w = torch.randn(1, 130, 256, generator=generator())
    for matrix in (
        quantize("fp8", w, scale_type="ue8m0"),
        quantize("fp8", w, block=None, scale_type="bfloat16"),
        quantize("int4", w, group=32, scale_type="float16"),
        quantize("int8", w, group=128, scale_type="bfloat16"),
    ):
        assert float((matrix.dequantize() - w).abs().max()) <= 0.11 * float(w.abs().max())


def test_bytes_and_what_the_binding_is_told() -> None:
    fused = torch.zeros(3, 10, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.ones(3, 10, dtype=torch.bfloat16)
    matrix = ExpertMatrix.fp8(fused[:, 1::2], scales[:, 1::2], None)
    assert matrix.bytes == 3 * 5 * 64 + 3 * 5 * 2
    assert matrix.binding_arg("gate") == (
        *("gate", "fp8", 3, 5, 64, fused.data_ptr() + 64, 640, 128, 0),
        *("bf16", scales.data_ptr() + 2, 20, 4, 1, 64),
    )
    plain = torch.zeros(3, 64, 10)
    assert projection_arg("up", plain[:, :, 0::2].transpose(1, 2)) == (
        *("up", "f32", 3, 5, 64, plain.data_ptr(), 2560, 8, 40),
        *("none", 0, 0, 0, 1, 64),
    )
    assert projection_arg("gate", matrix) == matrix.binding_arg("gate")
    block = random_matrix("q4_k", (1, 2, 256), generator())
    assert block.bytes == 288
    assert block.binding_arg("down")[5:] == (block.data.data_ptr(), 288, 144, 0, "none", 0, 0, 0, 1, 256)


F8 = torch.zeros(2, 4, 64, dtype=torch.uint8).view(torch.float8_e4m3fn)
I8 = torch.zeros(2, 4, 64, dtype=torch.int8)
U8 = torch.zeros(2, 4, 288, dtype=torch.uint8)

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: ExpertMatrix("fp9", F8, (2, 4, 64)), "format: 'fp9', required one of fp8, mxfp4"),
    (lambda: ExpertMatrix("fp8", F8, (2, 0, 64)), "shape: (2, 0, 64), required three positive sizes"),
    (lambda: ExpertMatrix("fp8", F8, (2, 4, 2**21)), "shape: (2, 4, 2097152), required at most 2^20"),
    (
        lambda: ExpertMatrix.fp8(F8[:, :1, :1].expand(2, 5000, 1), torch.ones(2, 2, 1), (4096, 1)),
        "block: 4096 rows, required fewer than 4096, or all 5000",
    ),
    (lambda: ExpertMatrix.fp8(I8, torch.ones(2, 1, 1)), "data: torch.int8, required torch.float8_e4m3fn"),
    (lambda: ExpertMatrix.fp8(F8[0], torch.ones(2, 1, 1)), "data: shape [4, 64], required three dimensions"),
    (lambda: ExpertMatrix("fp8", F8, (2, 4, 63)), "data: shape [2, 4, 64], required [2, 4, 63 in all]"),
    (
        lambda: ExpertMatrix.fp8(F8[..., ::2], torch.ones(2, 1, 1)),
        "data: strides [256, 64, 2], required cont",
    ),
    (lambda: ExpertMatrix.fp8(F8.to("meta"), torch.ones(2, 1, 1)), "data: torch.strided on meta, required"),
    (lambda: ExpertMatrix.fp8(F8, torch.ones(2, 1, 2)), "scales: shape [2, 1, 2], required [2, 1, 1]"),
    (lambda: ExpertMatrix.fp8(F8, torch.ones(2, 4), (1, 48)), "block: (1, 48), required a row or more"),
    (lambda: ExpertMatrix.fp8(F8, torch.ones(2, 3), None), "scales: shape [2, 3, 1], required [2, 4, 1]"),
    (
        lambda: ExpertMatrix.fp8(F8, torch.ones(2, 1, 1).double()),
        "scales: torch.float64, required torch.float32",
    ),
    (lambda: ExpertMatrix("fp8", F8, (2, 4, 64)), "scales: must be a tensor for format fp8, got NoneType"),
    (lambda: ExpertMatrix.mxfp4(U8, U8), "blocks: shape [2, 4, 288], required [E, N, K / 32, 16]"),
    (
        lambda: ExpertMatrix.mxfp4(U8.view(2, 4, 18, 16), torch.ones(2, 4, 18)),
        "scales: torch.float32, required torch.uint8",
    ),
    (lambda: ExpertMatrix.int8(I8, torch.ones(2, 4, 3)), "scales: 3 in a row, required a divisor of K = 64"),
    (
        lambda: ExpertMatrix.int8(I8, torch.ones(2, 4, 4)),
        "block: (1, 16), required a row or more, by K",
    ),
    (
        lambda: ExpertMatrix("int8", I8, (2, 4, 64), torch.ones(2, 2, 1), (2, 64)),
        "block: 2 rows, required 1 for format int8",
    ),
    (
        lambda: ExpertMatrix.int4(torch.zeros(2, 4, 3, dtype=torch.int32), torch.ones(2, 4)),
        "shape: K = 24, required a multiple of 32 for int4",
    ),
    (
        lambda: ExpertMatrix.nvfp4(U8[..., :48], F8[..., :5], torch.ones(2)),
        "scales: shape [2, 4, 5], K = 96, required [2, 4, K / 16] and K a multiple of 32",
    ),
    (
        lambda: ExpertMatrix("nvfp4", U8[..., :54], (2, 4, 96), torch.ones(2, 1, 1), (2, 96)),
        "block: (2, 96), required all of (4, 96) for format nvfp4",
    ),
    (
        lambda: ExpertMatrix(
            "uint4", torch.zeros(2, 4, 8, dtype=torch.int32), (2, 4, 64), torch.ones(2, 4, 3)
        ),
        "scales: shape [2, 4, 3], required [2, 4, 2]",
    ),
    (lambda: ExpertMatrix.gguf("q3_k", U8), "kind: 'q3_k', required one of q8_0"),
    (lambda: ExpertMatrix.gguf("Q6_K", U8), "data: rows of 288 bytes, required a multiple of 210"),
    (
        lambda: ExpertMatrix("q4_k", U8, (2, 4, 512), torch.ones(1)),
        "scales, block: given, required None: q4_k blocks hold their own",
    ),
    (lambda: ExpertMatrix.gguf("q4_k", U8).rows(2, 5), "rows: 2:5:1, required a part of 0:4"),
    (
        lambda: ExpertMatrix.fp8(F8, torch.ones(2, 2, 1), (3, 64)).rows(2, 4),
        "rows: 2:4:1, required whole blocks of 3",
    ),
    (
        lambda: projection_arg("up", torch.zeros(2, 4, 64).half()),
        "up: dtype float16, required float32 or bfloat16",
    ),
    (lambda: projection_arg("up", torch.zeros(4, 64)), "up: shape [4, 64], required three dimensions"),
    (lambda: quantize("fp9", torch.zeros(1, 1, 32)), "format: 'fp9', required one of"),
    (lambda: quantize("fp8", torch.zeros(1, 32)), "w: shape [1, 32], required three dimensions"),
    (
        lambda: quantize("q4_k", torch.zeros(1, 1, 32)),
        "w: K = 32, required a multiple of 256 for format q4_k",
    ),
    (lambda: quantize("int8", torch.zeros(1, 1, 32), group=24), "group: 24, required a divisor of K = 32"),
    (lambda: quantize("int8", torch.zeros(1, 1, 32), scale_type="ue8m0"), "scale_type: 'ue8m0', required"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_what_does_not_fit_is_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        build()
