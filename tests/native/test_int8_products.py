"""INT8 products of int8 and int4 weights: the integers exactly, against the same quantisation in torch; alike
on every instruction set; and how far from the weights' own float64 results the quantisation leads."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.native import Engine, ExpertMatrix
from kt_ray.native.quantization import quantize
from tests.helpers.amx import Amx, cpu_flags
from tests.helpers.int8 import expect_int8
from tests.helpers.matrices import VARIANTS, random_matrix
from tests.helpers.native import ISAS, Case, Shape, make_case

pytestmark = pytest.mark.accept("engine")

# On the CPUs that have VNNI, both ways of the avx512 instruction sets; emulated AVX-512 has it, too.
VNNI = "avx512" in ISAS and ("avx512_vnni" in cpu_flags() or "avx512f" not in cpu_flags())
WAYS = [*ISAS, *(["avx512-without-vnni"] if VNNI else [])]
SIZES = [(37, 29), (64, 32), (96, 32), (200, 150), (5, 129), (256, 320), (1, 1)]
# A line, a unit of panels on AVX-512 and a panel's columns, in part and whole.
INT4_SIZES = [(32, 32), (64, 96), (160, 128), (256, 320), (384, 544)]


def int8_engine(way: str, threads: int = 2) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        if way == "avx512-without-vnni":
            patch.setenv("KT_RAY_TEST_NO_VNNI", "1")
        return Engine(way.removesuffix("-without-vnni"), threads=threads, int8_products=True)


@pytest.fixture(scope="module")
def engine_of() -> Iterator[dict[str, Engine]]:
    """Engines with two threads by way."""
    engines = {way: int8_engine(way) for way in WAYS}
    yield engines
    for engine in engines.values():
        engine.close()


def int8_case(h: int, i: int, variant: str = "int8-channel", **arguments: Any) -> Case:
    """A case of random bytes, -128 included, some channels' scales zero."""
    names = ("tokens", "slots", "experts", "rank", "adapters")
    sizes = {name: arguments.pop(name) for name in names if name in arguments}
    shape = Shape(**{"tokens": 29, "experts": 3, "hidden": h, "inter": i, "rank": 0} | sizes)
    case = make_case(shape, torch.bfloat16, **arguments)
    g = torch.Generator().manual_seed(5)
    matrices = {
        name: random_matrix(VARIANTS[variant], shape.experts, n, k, g)
        for name, n, k in (("gate", i, h), ("up", i, h), ("down", h, i))
        if getattr(case.weights, name) is not None
    }
    case.weights = replace(case.weights, **matrices)
    return case


def close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        error = (got[name].double() - expected.double()).norm().item()
        size = expected.double().norm().item()
        assert error <= limit * size, f"{name}: relative error {error / max(size, 1e-300):.2e} > {limit:.2e}"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *names: str) -> None:
    for name in names or a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("h", "i"), SIZES)
def test_the_bits_of_the_emulation(engine_of, way: str, h: int, i: int) -> None:
    """relu2 needs no exp and no adapter adds a float32 sum: nothing is left to differ."""
    case = int8_case(h, i, activation="relu2", slots=3)
    got, want = case.run(engine_of[way]), expect_int8(case)
    same(got, want, "y", "dx")
    close(got, want, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("variant", "h", "i"),
    [*(("int4-32", *size) for size in INT4_SIZES), ("int4-128", 128, 256), ("int4-128", 384, 128)],
)
def test_the_bits_of_the_emulation_of_int4(engine_of, way: str, variant: str, h: int, i: int) -> None:
    """Groups of 32 rows' elements meet groups of 32 and 128 weights; backward meets requantised weights."""
    case = int8_case(h, i, variant, activation="relu2", slots=3)
    got, want = case.run(engine_of[way]), expect_int8(case)
    same(got, want, "y", "dx")
    close(got, want, 1e-6)


@pytest.mark.parametrize("way", WAYS)
def test_panels_deeper_than_the_cache(engine_of, way: str) -> None:
    case = int8_case(8300, 40, activation="relu2", tokens=6, experts=2)
    same(case.run(engine_of[way]), expect_int8(case), "y", "dx")
    case = int8_case(33, 8300, activation="relu2", tokens=6, experts=2)
    same(case.run(engine_of[way]), expect_int8(case), "y", "dx")
    for h, i in [(8352, 32), (32, 4384)]:
        case = int8_case(h, i, "int4-32", activation="relu2", tokens=6, experts=2)
        same(case.run(engine_of[way]), expect_int8(case), "y", "dx")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai"])
def test_gated_and_with_an_adapter(engine_of, way: str, rank: int, activation: str) -> None:
    """A last bit of exp or of the adapter's sums may turn a quantised value by one: rarely."""
    for h, i, variant in [*((h, i, "int8-channel") for h, i in SIZES[3:6:2]), (160, 128, "int4-32")]:
        case = int8_case(h, i, variant, rank=rank, activation=activation)
        close(case.run(engine_of[way]), expect_int8(case), 3e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1, "slots": 8, "experts": 8},
        {"tokens": 0},
        {"tokens": 67, "routing": "one"},
        {"routing": "none"},
        {"routing": "twice", "slots": 3},
        {"tokens": 40, "experts": 5, "routing": "sparse"},
        {"x_dtype": torch.float32},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_odd_routings(engine_of, way: str, changes: dict[str, Any]) -> None:
    for h, i, variant in [(70, 45, "int8-channel"), (96, 64, "int4-32")]:
        case = int8_case(h, i, variant, activation="relu2", **changes)
        same(case.run(engine_of[way]), expect_int8(case), "y", "dx")


@pytest.mark.parametrize(("h", "i", "variant"), [(200, 150, "int8-channel"), (224, 160, "int4-32")])
def test_instruction_sets_agree_to_the_bit(engine_of, h: int, i: int, variant: str) -> None:
    """Integers are exact and all else alike, operation by operation; dw's sum over I is of another width."""
    case = int8_case(h, i, variant, tokens=50, bias=True)
    first = case.run(engine_of["reference"])
    for way in WAYS[1:]:
        got = case.run(engine_of[way])
        same(first, got, "y", "dx")
        close(got, first, 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", ["int8-channel", "int4-32"])
def test_threads_do_not_change_a_bit(way: str, variant: str) -> None:
    case = int8_case(96, 160, variant, tokens=75, experts=4, rank=5, dropout=0.1)
    results = []
    for threads in (1, 2, 3):
        with int8_engine(way, threads) as engine:
            results.append(case.run(engine))
    same(results[0], results[1])
    same(results[0], results[2])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", ["int8-channel", "int4-32"])
def test_other_adapters_rows_do_not_change_a_bit(engine_of, way: str, variant: str) -> None:
    int8_case(96, 160, variant, tokens=60, rank=5, adapters=2).check_each_adapter(engine_of[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rank", [0, 5])
@pytest.mark.parametrize(("h", "i", "variant"), [(72, 40, "int8-channel"), (64, 96, "int4-32")])
def test_save_modes_give_the_same_bits(engine_of, way: str, rank: int, h: int, i: int, variant: str) -> None:
    case = int8_case(h, i, variant, rank=rank)
    kept = case.run(engine_of[way], save=True)
    same(kept, case.run(engine_of[way], save="recompute"))
    y, saved = engine_of[way].forward(
        case.weights, case.x, case.ids, case.weights_TK, lora=case.lora or None, save=False
    )
    assert saved is None
    assert torch.equal(y, kept["y"])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16])
def test_scales_of_other_types_and_views_of_a_fused_matrix(engine_of, way: str, scales: torch.dtype) -> None:
    case = int8_case(70, 64)
    up = case.weights.up
    assert isinstance(up, ExpertMatrix)
    both = ExpertMatrix.int8(up.data.repeat(1, 2, 1), up.scales.repeat(1, 2, 1).to(scales))
    gate, up = both.rows(0, 128, 2), both.rows(1, 128, 2)
    down = case.weights.down
    down = ExpertMatrix.int8(down.data, down.scales.to(scales))
    case.weights = replace(case.weights, gate=gate, up=up, down=down)
    close(case.run(engine_of[way]), expect_int8(case), 3e-3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("scales", [torch.float32, torch.float16])
def test_scales_of_int4_of_other_types_signs_and_sizes(engine_of, way: str, scales: torch.dtype) -> None:
    """A channel of zeros, one with a negative scale, one of denormal scales (in float32), rows by two."""
    case = int8_case(96, 64, "int4-32", activation="relu2")
    up = case.weights.up
    assert isinstance(up, ExpertMatrix) and up.scales is not None
    of = up.scales.to(scales)
    of[:, 1] = 0
    of[:, 2, 1] *= -3
    of[:, 3] *= 1e-43
    up = ExpertMatrix.int4(up.data.repeat(1, 2, 1), of.repeat(1, 2, 1)).rows(1, 128, 2)
    case.weights = replace(case.weights, up=up)
    same(case.run(engine_of[way]), expect_int8(case), "y", "dx")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"dropout": 0.2}, {"bias": True}, {"adapters": 2}], ids=str)
def test_near_float64_on_the_dequantised_weights(engine_of, way: str, options: dict[str, Any]) -> None:
    """A quantised value is off by at most 1/254 of its row's largest magnitude, evenly spread: by sqrt(1/3)
    of that in the mean. A row of normal values has a largest magnitude of at most 4 times its root mean
    square here, one of products of these at most 8. On the way to y are x (for gate and for up) and act, on
    the way to a gradient x, dy and the gradients of gate and up. Twice that, as everywhere."""
    adapters = options.get("adapters", 1)
    shape = Shape(tokens=40, experts=3, hidden=200, inter=150, rank=6, adapters=adapters)
    case = make_case(shape, torch.bfloat16, **{k: v for k, v in options.items() if k != "adapters"})
    matrices = {n: quantize("int8", getattr(case.weights, n)) for n in ("gate", "up", "down")}
    case.weights = replace(case.weights, **matrices)
    case.expect()
    normal, product = (largest / 254 / math.sqrt(3) for largest in (4, 8))
    forward = 2 * math.sqrt(2 * normal**2 + product**2)
    backward = 2 * math.sqrt(3 * normal**2 + product**2)
    got = case.run(engine_of[way])
    close({"y": got.pop("y")}, {"y": case.expected.pop("y")}, forward)
    close(got, case.expected, backward)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{"dropout": 0.2}, {"bias": True}, {"adapters": 2}], ids=str)
def test_int4_near_float64_on_the_dequantised_weights(engine_of, way: str, options: dict[str, Any]) -> None:
    """As above, but that 32 normal values reach 3 times their root mean square, products of them 6, and that
    backward's weights are off, too: by 1/254 of the largest that their row could have, 8 times its largest
    scale, which is 4 times its root mean square here. They take part in dx twice: along down, and along gate
    and up."""
    adapters = options.get("adapters", 1)
    shape = Shape(tokens=40, experts=3, hidden=192, inter=160, rank=6, adapters=adapters)
    case = make_case(shape, torch.bfloat16, **{k: v for k, v in options.items() if k != "adapters"})
    matrices = {n: quantize("int4", getattr(case.weights, n), group=32) for n in ("gate", "up", "down")}
    case.weights = replace(case.weights, **matrices)
    case.expect()
    group, group_product, row, product = (largest / 254 / math.sqrt(3) for largest in (3, 6, 4, 8))
    forward = 2 * math.sqrt(2 * group**2 + group_product**2)
    backward = 2 * math.sqrt(2 * group**2 + row**2 + product**2 + 2 * row**2)
    got = case.run(engine_of[way])
    close({"y": got.pop("y")}, {"y": case.expected.pop("y")}, forward)
    close(got, case.expected, backward)


@pytest.mark.parametrize("way", WAYS)
def test_a_row_of_zeros_and_one_that_is_not_finite(engine_of, way: str) -> None:
    case = int8_case(70, 45, tokens=6, slots=1, experts=1, routing="one", activation="relu2")
    case.x[1] = 0
    case.x[2, 69] = math.inf
    case.x[3, 0] = math.nan
    case.x[4] *= 1e-38
    case.dy[0] = 0
    case.dy[4, 7] = math.nan
    got = case.run(engine_of[way])
    assert got["y"].isfinite().all(1).tolist() == [True, True, False, False, True, True]
    assert not got["y"][1].any() and not got["dx"][0].any()
    assert got["dx"].isfinite().all(1).tolist() == [True, True, False, False, False, True]
    with pytest.raises(ValueError, match=r"^x: token 2 has values that are not finite"):
        engine_of[way].forward(case.weights, case.x, case.ids, case.weights_TK, check_finite=True)


def test_what_an_engine_says_of_itself(engine_of) -> None:
    assert engine_of["reference"].compute == "int8"
    assert engine_of["reference"].formats == ("int8", "int4")
    for isa in ISAS:
        with Engine(isa, threads=1) as plain:
            assert plain.compute == ("bf16" if isa in ("avx512_bf16", "amx") else "f32")
            assert not plain.int8_products


def test_other_weights_are_refused_by_name(engine_of) -> None:
    engine = engine_of["reference"]
    case = int8_case(128, 128)
    groups = int8_case(128, 128, "int8-128")  # one group: still a scale per channel
    wide = int8_case(256, 128, "int8-128")
    bf16 = make_case(Shape(hidden=128, inter=128, experts=3), torch.bfloat16).weights
    fp8 = int8_case(128, 128, "fp8-channel").weights

    def forward(case: Case, **changes: Any) -> None:
        engine.forward(replace(case.weights, **changes), case.x, case.ids, case.weights_TK)

    forward(case)
    forward(groups)
    required = (
        "required format int4, or int8 with one scale per output channel, the same for all projections, by "
        "an engine with int8_products=True"
    )
    with pytest.raises(ValueError, match=rf"^gate: a bf16 tensor, {required}"):
        forward(case, gate=bf16.gate)
    with pytest.raises(ValueError, match=rf"^down: format fp8, {required}"):
        forward(case, down=fp8.down)
    with pytest.raises(ValueError, match=rf"^gate: format int8 with a scale per 128 columns, {required}"):
        forward(wide)
    with pytest.raises(ValueError, match=rf"^down: format int4 beside int8, {required}"):
        forward(case, down=int8_case(128, 128, "int4-32").weights.down)
    plain = make_case(Shape(hidden=128, inter=128, experts=3), torch.float32)
    with pytest.raises(ValueError, match=rf"^gate: a f32 tensor, {required}"):
        forward(plain)


def test_sums_that_could_overflow_are_refused(engine_of) -> None:
    deep = 2**17 + 32
    case = int8_case(deep, 1, tokens=1, slots=1, experts=1)
    with pytest.raises(ValueError, match=rf"^gate: sums of {deep} products, at most 131072 are exact"):
        engine_of["reference"].forward(case.weights, case.x, case.ids, case.weights_TK)


def test_backward_wants_the_engine_that_made_what_was_kept(engine_of) -> None:
    case = int8_case(72, 40)
    _, saved = engine_of["reference"].forward(case.weights, case.x, case.ids, case.weights_TK)
    with (
        Engine("reference", threads=1) as other,
        pytest.raises(ValueError, match=r"^saved: was made by an engine with another instruction set"),
    ):
        other.backward(case.weights, saved, case.dy)


# The same case on AMX and on AVX-512, in a process that finds AMX.
ON_AMX = """
import json, sys, torch
from tests.native.test_int8_products import int8_case, int8_engine
torch.set_num_threads(1)
found = []
for h, i, rank, variant in [
    *((200, 150, 0, "int8-channel"), (37, 29, 0, "int8-channel"), (256, 320, 0, "int8-channel")),
    *((96, 64, 5, "int8-channel"), (160, 96, 0, "int4-32"), (96, 64, 5, "int4-32")),
]:
    for activation in ("silu", "relu2"):
        case = int8_case(h, i, variant, rank=rank, activation=activation, tokens=41, slots=2)
        with int8_engine("avx512_bf16", 1) as avx, int8_engine("amx", 1) as amx:
            want, got = case.run(avx), case.run(amx)
            same = rank > 0 or all(torch.equal(want[n], got[n]) for n in ("y", "dx"))
            error = max(((want[n] - got[n]).norm() / want[n].norm()).item() for n in want)
            found.append((same, error))
print(json.dumps(found))
"""


@pytest.mark.skipif(bool(Amx.unusable()), reason=f"AMX cannot run here: {Amx.unusable()}")
def test_amx_gives_the_bits_of_avx512(tmp_path: Path) -> None:
    amx = Amx.build(tmp_path)
    found = json.loads(amx.run([sys.executable, "-c", ON_AMX]))
    assert len(found) == 12
    assert all(same for same, _ in found)
    assert max(error for _, error in found) < 5e-3
    if amx.emulated:
        assert amx.counts()["tdpbssd"] > 0
