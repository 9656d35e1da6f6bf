"""What the engine's threads do beside experts: parts copied one after another, float32 rounded to bfloat16 as
torch does, sums of squares."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from kt_ray.native import Engine

ROWS = (
    0,
    3,
    4_001,
    1,
    9_000,
)  # of parts: with 33 columns of float32 none, part, and several of a thread's runs


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine("reference", threads=3) as engine:
        yield engine


def parts_of(dtype: torch.dtype) -> list[torch.Tensor]:
    return [(1e4 * torch.randn(rows, 33)).to(dtype) for rows in ROWS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_parts_lie_one_after_another(engine: Engine, dtype: torch.dtype) -> None:
    parts = parts_of(dtype)
    out = torch.zeros(sum(ROWS) + 2, 33, dtype=dtype)
    assert engine.join(parts, out[1:-1]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1:-1], torch.cat(parts))
    assert not out[0].any() and not out[-1].any()


def test_rounding_is_torchs(engine: Engine) -> None:
    parts = parts_of(torch.float32)
    odd = torch.tensor(
        [0.0, -0.0, 1e-40, 3.4e38, -3.4e38, float("inf"), -float("inf"), float("nan"), 1.00390625]
    )
    parts[1][0, : len(odd)] = odd
    halves = (
        torch.arange(33, dtype=torch.int32) * (1 << 15) + 0x3F800000
    )  # exactly between two, and exact ones
    parts[1][1] = halves.view(torch.float32)
    out = torch.empty(sum(ROWS), 33, dtype=torch.bfloat16)
    engine.join(parts, out)
    assert torch.equal(out.nan_to_num(7.0), torch.cat(parts).to(torch.bfloat16).nan_to_num(7.0))
    assert out.isnan().sum() == 1


def test_results_do_not_depend_on_threads() -> None:
    x, seen = torch.randn(5_000, 100), []
    for threads in (1, 4):
        with Engine("reference", threads=threads) as engine:
            seen.append(engine.join([x], torch.empty(5_000, 100, dtype=torch.bfloat16)))
    assert all(torch.equal(a, b) for a, b in pairwise(seen))


@pytest.mark.parametrize(
    ("parts", "out", "message"),
    [
        ([torch.ones(2, 3)], torch.ones(2, 4), r"parts\[0\]: shape \[2, 3\], required \[any, 4\]"),
        ([torch.ones(2, 3)], torch.ones(3, 3), "out: 3 rows, the parts have 2"),
        ([torch.ones(2, 3).int()], torch.ones(2, 3), r"parts\[0\]: dtype int32, required float32"),
        ([torch.ones(2, 3).bfloat16()], torch.ones(2, 3), r"parts\[0\]: dtype bfloat16, required float32"),
        ([torch.ones(1, 3), torch.ones(1, 3).bfloat16()], torch.ones(2, 3).bfloat16(), r"parts\[1\]: dtype"),
        ([torch.ones(3, 2).T], torch.ones(2, 3), r"parts\[0\]: must be a contiguous CPU tensor"),
        ([torch.ones(2, 3).half()], torch.ones(2, 3).half(), "out: dtype float16"),
    ],
)
def test_other_tensors_are_refused(
    engine: Engine, parts: list[torch.Tensor], out: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.join(parts, out)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(), (7,), (3, 50_000)])
def test_rows_are_added_part_after_part(threads: int, shape: tuple[int, ...]) -> None:
    """As torch adds them, to the bit: whatever the order of a part's rows, and however wide they are."""
    out, parts = torch.randn(40, *shape), []
    for count in (40, 0, 17, 23):
        parts.append((torch.randperm(40)[:count], torch.randn(count, *shape)))
    parts[2] = (parts[2][0].sort().values, parts[2][1])
    wanted = out.clone()
    for index, values in parts:
        wanted.index_add_(0, index, values)
    with Engine("reference", threads=threads) as engine:
        engine.add_rows(parts, out)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize(
    ("index", "values", "message"),
    [
        (torch.tensor([0, 4]), torch.ones(2, 3), r"parts\[0\].index: row 4 of 4"),
        (torch.tensor([-1]), torch.ones(1, 3), r"parts\[0\].index: row -1 of 4"),
        (torch.tensor([2, 1, 2]), torch.ones(3, 3), r"parts\[0\].index: row 2 is there twice"),
        (torch.tensor([1]), torch.ones(2, 3), r"parts\[0\].values: shape \[2, 3\], required \[1, 3\]"),
        (torch.tensor([1]), torch.ones(1, 3).bfloat16(), r"parts\[0\].values: dtype bfloat16"),
        (torch.tensor([1.0]), torch.ones(1, 3), r"parts\[0\].index: dtype float32"),
    ],
)
def test_rows_that_cannot_be_added_are_refused(
    engine: Engine, index: torch.Tensor, values: torch.Tensor, message: str
) -> None:
    out = torch.zeros(4, 3)
    with pytest.raises(ValueError, match=message):
        engine.add_rows([(index, values)], out)
    assert not out.any()


def test_a_closed_engine_copies_nothing() -> None:
    engine = Engine("reference", threads=1)
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        engine.join([torch.ones(2)], torch.ones(2))


def test_squared_norm_is_of_float64_and_does_not_depend_on_threads() -> None:
    tensors = [torch.randn(700_001), torch.randn(7, 65_537), torch.randn(5), torch.zeros(0, 3)]
    tensors[1][3, 5] = 1.0
    large = [torch.full((3,), 1e20), torch.full((4_097,), 3.0)]
    seen = []
    for threads in (1, 3):
        with Engine("reference", threads=threads) as engine:
            seen.append(engine.squared_norm(tensors))
            assert engine.squared_norm(large) == pytest.approx(3e40, rel=1e-6)
            assert engine.squared_norm(large[1:]) == 9 * 4_097
            assert engine.squared_norm([]) == 0.0
            for odd in (float("inf"), float("nan")):
                tensors[1][3, 5] = odd
                assert not math.isfinite(engine.squared_norm(tensors))
            tensors[1][3, 5] = 1.0
            with pytest.raises(ValueError, match=r"tensors\[0\]: dtype bfloat16"):
                engine.squared_norm([torch.zeros(3, dtype=torch.bfloat16)])
    assert seen[0] == seen[1]
    assert seen[0] == pytest.approx(sum(float((t.double() ** 2).sum()) for t in tensors), rel=1e-12)
