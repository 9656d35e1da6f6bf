"""Calls of few tokens that keep nothing: by rows of the weights, in an order of additions of its own."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kt_ray.native import Engine, ExpertMatrix
from tests.helpers.matrices import VARIANTS, quantised_case
from tests.helpers.native import ACTIVATIONS, DTYPES, EVERY, ISAS, Case, Shape, lay_out, make_case

pytestmark = pytest.mark.accept("engine")

TOKENS = 16

# (H, I) by the multiple that a format needs: whole steps of 128 or 256 elements and a rest, or only a rest.
SIZES = {
    1: [(37, 29), (300, 150), (5, 129)],
    32: [(160, 288), (416, 32)],
    128: [(128, 384), (640, 256)],
    256: [(256, 512), (768, 256)],
}
ODD = [
    pytest.param(name, h, i, id=f"{name}-H{h}-I{i}")
    for name, variant in VARIANTS.items()
    for h, i in SIZES[variant.multiple]
]
EACH = pytest.mark.parametrize(
    ("isa", "dtype"), EVERY, ids=[f"{isa}-{str(dtype).removeprefix('torch.')}" for isa, dtype in EVERY]
)


@functools.cache
def expected(name: str, h: int, i: int, routing: str = "random", **changes: int) -> Case:
    """A case in a format with its float64 results, shared by the instruction sets."""
    shape = replace(Shape(tokens=11, slots=2, experts=3, hidden=h, inter=i, rank=5, adapters=2), **changes)
    return quantised_case(shape, name, routing=routing).expect()


@functools.cache
def plain(dtype: torch.dtype, activation: str, bias: bool, shape: Shape, routing: str = "random") -> Case:
    return make_case(shape, dtype, activation=activation, bias=bias, routing=routing).expect()


def alone(case: Case, token: int) -> Case:
    """One token of a case."""
    rows = slice(token, token + 1)
    adapter = case.adapter_of_token
    return replace(
        case,
        x=case.x[rows],
        ids=case.ids[rows],
        weights_TK=case.weights_TK[rows],
        keys=case.keys[rows],
        adapter_of_token=None if adapter is None else adapter[rows],
    )


@pytest.mark.accept("engine", quick=True)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "h", "i"), ODD)
def test_formats(engine_of, isa: str, name: str, h: int, i: int) -> None:
    case = expected(name, h, i)
    case.check({"y": case.forward(engine_of[isa])[0]})


@EACH
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(engine_of, isa: str, dtype: torch.dtype, activation: str, bias: bool) -> None:
    shape = Shape(tokens=13, slots=3, experts=4, hidden=201, inter=75, rank=9, adapters=2)
    case = plain(dtype, activation, bias, shape)
    case.check({"y": case.forward(engine_of[isa])[0]})


@EACH
@pytest.mark.parametrize("routing", ["one", "none", "twice", "sparse"])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 16])
def test_routings(engine_of, isa: str, dtype: torch.dtype, routing: str, tokens: int) -> None:
    case = plain(dtype, "silu", False, Shape(tokens=tokens, slots=3), routing)
    case.check({"y": case.forward(engine_of[isa])[0]})


@EACH
def test_x_of_the_other_dtype_and_no_tokens(engine_of, isa: str, dtype: torch.dtype) -> None:
    case = make_case(Shape(tokens=6), dtype, x_dtype=DTYPES[1 - DTYPES.index(dtype)]).expect()
    case.check({"y": case.forward(engine_of[isa])[0]})
    assert make_case(Shape(tokens=0), dtype).forward(engine_of[isa])[0].shape == (0, 72)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("layout", ["fused", "interleaved"])
def test_views_of_one_matrix(engine_of, isa: str, layout: str) -> None:
    """The same bits as from matrices of their own."""
    case = make_case(Shape(tokens=9, hidden=130, inter=70), torch.bfloat16)
    views = replace(case, weights=lay_out(case.weights, layout))
    assert torch.equal(case.forward(engine_of[isa])[0], views.forward(engine_of[isa])[0])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("gate", "up", "down", "h", "i"),
    [
        ("q4_k", "q5_k", "q6_k", 256, 256),
        ("int4-32", "int4-128", "fp8-128x128", 256, 128),
        # Rows of down in fours and what is left.
        ("fp8-128x128", "fp8-128x128", "int4-32", 131, 128),
        ("fp8-128x128", "fp8-128x128", "uint4-32", 131, 128),
        ("uint4-32", "uint4-128", "fp8-128x128", 256, 128),
        ("fp8-128x128", "fp8-128x128", "mxfp4", 131, 128),
        ("fp8-128x128", "fp8-128x128", "q4_k", 131, 256),
    ],
)
def test_a_format_for_each_projection(
    engine_of, isa: str, gate: str, up: str, down: str, h: int, i: int
) -> None:
    case = quantised_case(Shape(tokens=10, experts=3, hidden=h, inter=i), gate, up, down).expect()
    case.check({"y": case.forward(engine_of[isa])[0]})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["fp8-128x128", "int8-128", "int4-32", "mxfp4"])
def test_deeper_than_the_scales_decoded_at_once(engine_of, isa: str, name: str) -> None:
    case = expected(name, 4480, 128, tokens=3)
    case.check({"y": case.forward(engine_of[isa])[0]})


@pytest.mark.parametrize("isa", ISAS)
def test_ends_of_the_code(engine_of, isa: str) -> None:
    """Powers of two at both ends of ue8m0, and E4M3's NaNs, which reach their own expert's tokens only."""
    case = quantised_case(Shape(tokens=8, slots=1, experts=2, hidden=160, inter=128, rank=0), "mxfp4")
    small = replace(case.weights.up, scales=torch.zeros_like(case.weights.up.scales))
    y = replace(case, weights=replace(case.weights, up=small)).forward(engine_of[isa])[0]
    assert y.abs().max() < 1e-30
    for name, row, column, code in (
        ("mxfp4", 3, 1, 255),
        ("fp8-128x128", 3, 40, 0x7F),
        ("fp8-128x128", 127, 127, 0xFF),
        ("fp8-128x128", 5, 159, 0xFF),  # behind whole steps
    ):
        case = quantised_case(Shape(tokens=8, slots=1, experts=2, hidden=160, inter=128, rank=0), name)
        up = case.weights.up
        assert isinstance(up, ExpertMatrix)
        data, scales = up.data.clone().view(torch.uint8), up.scales.clone()
        (scales if name == "mxfp4" else data)[1, row, column] = code
        spoilt = replace(up, data=data.view(up.data.dtype), scales=scales)
        y = replace(case, weights=replace(case.weights, up=spoilt)).forward(engine_of[isa])[0]
        assert torch.equal(y.isnan().any(1), case.ids[:, 0] == 1), name


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bf16", *VARIANTS])
def test_threads_and_other_tokens_do_not_change_a_bit(isa: str, name: str) -> None:
    shape = Shape(tokens=TOKENS, slots=2, experts=2, hidden=512, inter=256, rank=4, adapters=2)
    case = make_case(shape, torch.bfloat16) if name == "bf16" else quantised_case(shape, name)
    results = []
    for threads in (1, 2, 3):
        with Engine(isa, threads=threads) as engine:
            results.append(case.forward(engine)[0])
            for token in (0, 7, 15):
                one = alone(case, token).forward(engine)[0]
                assert torch.equal(one[0], results[0][token]), (threads, token)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
def test_when(engine_of, isa: str) -> None:
    """The rule, by what a forward that keeps everything gives: other bits by rows, the same by panels."""
    engine = engine_of[isa]

    def by_rows(case: Case, on: Engine = engine) -> bool:
        return not torch.equal(case.forward(on)[0], case.forward(on, save=True)[0])

    shape = Shape(tokens=TOKENS, slots=2, experts=3, hidden=300, inter=200)
    case = make_case(shape, torch.float32)
    assert by_rows(case)
    assert by_rows(make_case(replace(shape, tokens=1), torch.float32))
    assert not by_rows(make_case(replace(shape, tokens=TOKENS + 1), torch.float32))
    assert not by_rows(make_case(shape, torch.float32, dropout=0.1))
    assert by_rows(replace(case, weights=lay_out(case.weights, "interleaved")))
    assert not by_rows(replace(case, weights=lay_out(case.weights, "transposed")))
    assert torch.equal(case.forward(engine, save="recompute")[0], case.forward(engine, save=True)[0])
    assert by_rows(make_case(shape, torch.bfloat16))
    for stored in ("fp8-128x128", "int8-channel", "int4-32", "mxfp4"):
        assert by_rows(quantised_case(replace(shape, hidden=320, inter=256), stored)), stored
    with Engine(isa, threads=1, int8_products=True) as int8:
        assert not by_rows(quantised_case(replace(shape, rank=0), "int8-channel"), int8)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("routing", "h", "i"), [("random", 2048, 1024), ("twice", 2048, 1024), ("twice", 7168, 256)]
)
def test_no_more_memory_than_panels(isa: str, routing: str, h: int, i: int) -> None:
    """So a plan's figures hold; one expert's rows may be more than there are tokens."""
    shape = Shape(tokens=TOKENS, slots=8, experts=9, hidden=h, inter=i)
    case = quantised_case(shape, "q4_k", routing=routing)
    with Engine(isa, threads=1) as rows, Engine(isa, threads=1) as panels:  # an engine keeps what it held
        by_rows = case.forward(rows)[0]
        by_panels, saved = case.forward(panels, save=True)
        saved.release()
        assert rows.scratch_bytes <= panels.scratch_bytes
    assert (by_rows - by_panels).norm() <= 0.01 * by_panels.norm()


@pytest.mark.parametrize("isa", ISAS)
def test_values_that_are_not_finite(engine_of, isa: str) -> None:
    case = make_case(Shape(tokens=3), torch.bfloat16)

    def forward(x: torch.Tensor) -> None:
        engine_of[isa].forward(
            case.weights, x, case.ids, case.weights_TK, lora=case.lora, save=False, check_finite=True
        )

    forward(case.x)
    case.x[1, 5] = float("inf")
    with pytest.raises(ValueError, match="x: token 1 has values that are not finite, at layer 7"):
        forward(case.x)


def test_no_memory_for_scratch_ends_the_call_on_every_thread() -> None:
    """The first task that needs any fails, while another thread waits for its phase."""
    program = """
import resource, torch
from kt_ray.native import Engine, ExpertWeights
H = 2**23
weights = ExpertWeights(torch.ones(1, 1, H), torch.ones(1, 1, H), torch.ones(1, H, 1), 12, (34,))
x, ids, w = torch.ones(1, H), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
small = ExpertWeights(torch.ones(1, 1, 2), torch.ones(1, 1, 2), torch.ones(1, 2, 1), 12, (34,))
engine = Engine("reference", threads=3)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 80 * 2**20,) * 2)
for _ in range(20):
    try:
        engine.forward(weights, x, ids, w, save=False)
    except MemoryError as error:
        told = str(error)
print(told)
print(engine.forward(small, x[:, :2], ids, w, save=False)[0].shape)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("layer 12, ")
    assert "bytes of scratch for a thread" in first
    assert second == "torch.Size([1, 2])"


def test_up_to_how_many_tokens() -> None:
    """Three rows of an expert under even routing, and 16 tokens whatever the experts."""
    shape = Shape(tokens=2, slots=2, experts=32, hidden=256, inter=256)
    with Engine("auto", threads=1) as own, Engine("auto", threads=1, tokens_per_row=32) as told:
        for name, most, by_told in (
            ("fp8-128x128", 48, 96),
            ("q4_k", 32, 64),
            ("q4_0", 16, 32),
            ("q5_1", 0, 0),
        ):
            weights = quantised_case(shape, name).weights
            assert (own.row_tokens(weights, 2), told.row_tokens(weights, 2)) == (most, by_told), name
            assert own.row_tokens(weights, 16) == min(most, 16)
        mixed = quantised_case(shape, "q4_k", down="q5_0").weights
        assert own.row_tokens(mixed, 2) == 0
    with Engine("auto", threads=1, int8_products=True) as integer:
        assert integer.row_tokens(quantised_case(shape, "int4-32").weights, 2) == 0


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["fp8-128x128", "int4-32", "q4_k", "q6_k"])
def test_joined_calls_have_the_bits_of_each(engine_of, isa: str, name: str) -> None:
    """Also where all of their tokens would go by panels, and an expert has more rows than a span."""
    case = quantised_case(Shape(tokens=40, slots=2, experts=3, hidden=256, inter=256, rank=4), name)
    engine, lora = engine_of[isa], case.lora or None

    def forward(rows: slice, alone: int | None = None) -> torch.Tensor:
        some = case.x[rows], case.ids[rows], case.weights_TK[rows]
        return engine.forward(case.weights, *some, lora=lora, save=False, tokens_alone=alone)[0]

    apart = [forward(slice(first, first + 10)) for first in range(0, 40, 10)]
    assert torch.equal(forward(slice(0, 40), alone=10), torch.cat(apart))
    by_panels = forward(slice(0, 40))
    assert torch.equal(by_panels, forward(slice(0, 40), alone=40))
    assert not torch.equal(by_panels, torch.cat(apart)) or isa == "reference"
    for wrong in (0, 41):
        with pytest.raises(ValueError, match="tokens_alone"):
            forward(slice(0, 40), alone=wrong)
