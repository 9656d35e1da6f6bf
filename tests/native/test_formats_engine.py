"""Every weight format on every instruction set, forward and backward, against float64 on dequantised weights.

A backward reads the same bytes in the other orientation: W x in forward, Wᵀ dy in backward.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from kt_ray.native import FORMATS, Engine, ExpertMatrix
from tests.helpers.matrices import VARIANTS, quantised_case, tensors_of
from tests.helpers.native import ISAS, Case, Shape

pytestmark = pytest.mark.accept("engine")


# (H, I) by the multiple that a format needs. Without one: off every vector width, and partial blocks
# of 128 at both edges.
SIZES = {
    1: [(37, 29), (200, 150), (5, 129)],
    32: [(96, 32), (32, 160)],
    128: [(256, 128), (128, 384)],
    256: [(256, 512), (512, 256)],
}
ODD = [
    pytest.param(name, h, i, id=f"{name}-H{h}-I{i}")
    for name, variant in VARIANTS.items()
    for h, i in SIZES[variant.multiple]
]


@functools.cache
def expected(name: str, h: int, i: int, **changes: object) -> Case:
    """A case with its float64 results, shared by the instruction sets."""
    arguments = {key: changes.pop(key) for key in ("routing", "dropout", "x_dtype") if key in changes}
    shape = replace(Shape(tokens=19, slots=2, experts=3, hidden=h, inter=i, rank=5), **changes)
    return quantised_case(shape, name, **arguments).expect()


def smallest(name: str) -> tuple[int, int]:
    return SIZES[VARIANTS[name].multiple][0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_every_format_is_in_the_tables() -> None:
    assert {"f32", "bf16"} | {variant.format for variant in VARIANTS.values()} == set(FORMATS)
    with Engine("reference", threads=1) as engine:
        assert set(engine.formats) == set(FORMATS)


@pytest.mark.accept("engine", quick=True)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("name", "h", "i"), ODD)
def test_matches_the_reference(engine_of, isa: str, name: str, h: int, i: int) -> None:
    """With adapters, dropout and tokens without any; weights and x stay as they are."""
    # A gradient of H = 5 features needs more rows than a few: else one dot product that cancels is much of
    # it, and its rounding errors are not small beside it (test_roundings.py says that they are all there is).
    case = expected(name, h, i, adapters=2, dropout=0.2, tokens=19 if h > 5 else 76)
    inputs = [*tensors_of(case.weights), case.x, case.dy]
    before = [t.clone() for t in inputs]
    got = case.run(engine_of[isa])
    case.check(got)
    after = [*tensors_of(case.weights), case.x, case.dy]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        # One token with several experts: a single dot product may cancel, and then its error is not small
        # beside it.
        {"tokens": 1, "slots": 8, "experts": 8},
        {"tokens": 1, "slots": 8, "experts": 6, "rank": 0},
        {"tokens": 0},
        {"tokens": 67, "routing": "one"},
        {"routing": "none"},
        {"routing": "twice", "slots": 3},
        {"tokens": 40, "experts": 5, "routing": "sparse"},
        {"x_dtype": torch.float32},
    ],
    ids=lambda c: "-".join(f"{k}={v}" for k, v in c.items()),
)
def test_odd_routings(engine_of, isa: str, name: str, changes: dict[str, object]) -> None:
    case = expected(name, *smallest(name), **changes)
    case.check(case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["fp8-128x128", "int4-32", "q8_0", "q4_k"])
@pytest.mark.parametrize("rank", [1, 8, 16, 17, 64, 256])
def test_ranks(engine_of, isa: str, name: str, rank: int) -> None:
    case = expected(name, *smallest(name), rank=rank)
    case.check(case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["fp8-128x128", "mxfp4", "q6_k"])
def test_three_adapters_of_different_ranks(engine_of, isa: str, name: str) -> None:
    case = expected(name, *smallest(name), tokens=45, rank=33, adapters=3, dropout=0.1)
    case.check(case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", VARIANTS)
def test_threads_do_not_change_a_bit(isa: str, name: str) -> None:
    case = expected(name, *SIZES[VARIANTS[name].multiple][1], tokens=75, experts=4, adapters=2, dropout=0.1)
    results = []
    for threads in (1, 2, 3):
        with Engine(isa, threads=threads) as engine:
            results.append(case.run(engine))
    same(results[0], results[1])
    same(results[0], results[2])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", VARIANTS)
def test_save_modes_give_the_same_bits(engine_of, isa: str, name: str) -> None:
    case = expected(name, *smallest(name))
    same(case.run(engine_of[isa], save=True), case.run(engine_of[isa], save="recompute"))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("gate", "up", "down", "h", "i"),
    [
        ("q4_k", "q5_k", "q6_k", 256, 256),
        ("q4_0", "q5_1", "bf16", 64, 96),
        ("bf16", "mxfp4", "fp8-128x128", 160, 32),
        ("fp8-channel", "int8-channel", "fp8-128x128-ue8m0", 45, 131),
        # One format, scales per row beside scales per block.
        ("fp8-channel", "fp8-128x128", "fp8-channel", 256, 320),
        ("fp8-128x128", "fp8-channel", "fp8-128x128", 256, 320),
    ],
)
def test_a_format_for_each_projection(
    engine_of, isa: str, gate: str, up: str, down: str, h: int, i: int
) -> None:
    case = quantised_case(Shape(tokens=21, experts=3, hidden=h, inter=i), gate, up, down).expect()
    case.check(case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
def test_gpt_oss(engine_of, isa: str) -> None:
    """MXFP4 with the clamped gate and biases; its numbers are bfloat16, so no clamp is crossed."""
    shape = Shape(tokens=33, slots=4, experts=4, hidden=96, inter=64, rank=8)
    case = quantised_case(shape, "mxfp4", activation="swiglu_oai", bias=True).expect()
    case.check(case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
def test_ungated(engine_of, isa: str) -> None:
    case = quantised_case(Shape(hidden=70, inter=51), "fp8-128x128").weights
    plain = quantised_case(Shape(hidden=70, inter=51), "bf16", activation="relu2", bias=True)
    plain.weights = replace(plain.weights, up=case.up, down=case.down)
    plain.expect().check(plain.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", VARIANTS)
def test_halves_of_a_fused_matrix(engine_of, isa: str, name: str) -> None:
    """Gate and up as views of one [E, 2 I, ...] matrix: the same bits as separate ones."""
    # Halves of 128 rows: a scale of 128 x 128 belongs to one half only.
    h = max(96, VARIANTS[name].multiple)
    i = max(128, VARIANTS[name].multiple)
    case = quantised_case(Shape(tokens=17, experts=3, hidden=h, inter=i), name)
    separate = case.run(engine_of[isa])
    gate, up = case.weights.gate, case.weights.up
    assert isinstance(gate, ExpertMatrix)
    assert isinstance(up, ExpertMatrix)

    def halves(a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if a is None or b is None:
            return None, None
        # A row more between experts than the two halves need.
        room = torch.cat([t.view(torch.uint8) for t in (a, b, b[:, :1])], 1)
        n = a.shape[1]
        return room[:, :n].view(a.dtype), room[:, n : 2 * n].view(a.dtype)

    data, scales = halves(gate.data, up.data), halves(gate.scales, up.scales)
    case.weights = replace(
        case.weights,
        gate=replace(gate, data=data[0], scales=scales[0]),
        up=replace(up, data=data[1], scales=scales[1]),
    )
    same(separate, case.run(engine_of[isa]))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_numbers_as_plain_weights(engine_of, isa: str, name: str) -> None:
    """Decoded, then computed: within a rounding of the weights as bfloat16."""
    case = expected(name, *smallest(name))
    plain = {part: getattr(case.weights, part).dequantize().bfloat16() for part in ("gate", "up", "down")}
    got = replace(case, weights=replace(case.weights, **plain)).run(engine_of[isa])
    case.check(got)
