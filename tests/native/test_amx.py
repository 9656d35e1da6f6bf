"""The AMX micro-kernels, executed: by the CPU where it has AMX, elsewhere under an emulator that does to the
bit what the manual says. Bits and counts of tile operations; never speed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.amx import (
    EMULATOR,
    TILE_FLAGS,
    Amx,
    build_emulator,
    compile_with,
)
from tests.helpers.avx512 import SLOW_WITHOUT

pytestmark = [
    pytest.mark.accept("engine"),
    pytest.mark.skipif(bool(Amx.unusable()), reason=f"AMX cannot run here: {Amx.unusable()}"),
    *SLOW_WITHOUT,
]


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> Amx:
    return Amx.build(tmp_path_factory.mktemp("amx"))


@pytest.fixture(scope="module")
def micro_test(amx: Amx) -> Path:
    return amx.program("amx_micro_test")


def test_the_emulator_faults_where_a_cpu_would(amx: Amx) -> None:
    if not amx.emulated:
        pytest.skip("this CPU has AMX: no emulator")
    program = amx.folder / "negtest"
    compile_with("gcc", program, "-std=gnu11", "-O2", *TILE_FLAGS, EMULATOR / "negtest.c", "-pthread")
    lines = amx.run([str(program)]).splitlines()
    assert len(lines) > 15 and all(line.startswith("ok: ") for line in lines)


def test_sums_equal_the_manual_s_arithmetic_and_operations_the_plan(amx: Amx, micro_test: Path) -> None:
    before = dict(amx.counts())
    said = amx.run([str(micro_test), "check"])
    assert said.count("ok: ") == 4
    planned = re.search(r"planned products: (\d+) bf16, (\d+) int8", said)
    assert planned is not None and int(planned[1]) > 2880 and int(planned[2]) > 2880
    if amx.emulated:
        assert "tile operations as planned" in said
        after = amx.counts()
        done = [after[name] - before.get(name, 0) for name in ("tdpbf16ps", "tdpbssd")]
        assert done == [int(planned[1]), int(planned[2])]


def test_one_instruction_per_signal_gives_the_same(amx: Amx, micro_test: Path) -> None:
    if not amx.emulated:
        pytest.skip("this CPU has AMX: no emulator")
    assert amx.run([str(micro_test), "check"], AMXEMU_SINGLE="1").count("ok: ") == 4


def test_without_permission_there_are_no_tiles(amx: Amx, micro_test: Path) -> None:
    denied = Amx(amx.folder, amx.emulator or build_emulator(amx.folder))
    with pytest.raises(AssertionError, match=r"exit status 2\n.*arch_prctl: Operation not permitted"):
        denied.run([str(micro_test), "check"], AMXEMU_PERMISSION="deny")


def test_a_panel_takes_the_operations_that_the_paper_plans(amx: Amx, micro_test: Path) -> None:
    """docs/kernels.md: per 32 rows and 32 elements of depth, four loads and four products."""
    if not amx.emulated:
        pytest.skip("this CPU has AMX: nothing counts")
    cases = [json.loads(line) for line in amx.run([str(micro_test), "plan"]).splitlines()[1:]]
    assert {(c["rows"], c["depth"]) for c in cases} == {(r, d) for r in (16, 64, 256) for d in (7168, 2048)}
    for case in cases:
        pieces, passes = case["depth"] // 32, case["depth"] // case["depth_block"]
        blocks = -(-case["rows"] // 32)
        sums, lefts = (2, 1) if case["rows"] == 16 else (4, 2)
        assert case["tdpbf16ps"] == blocks * pieces * sums
        assert case["tileloadd"] == blocks * (pieces * (lefts + 2) + (passes - 1) * sums)
        assert case["tilestored"] == blocks * passes * sums
        assert case["product_rows"] == case["rows"] * pieces * 2
        assert case["ldtilecfg"] == 1


def test_tiles_are_finished_before_the_products_of_the_next(amx: Amx) -> None:
    """Depth in blocks through groups of panels, along rows and columns: exact sums, in order, and when they
    are taken up."""
    said = amx.run([str(amx.program("amx_sweep_test", "-O1"))])
    assert said.count("ok: 30 tiles") == 2
    if amx.emulated:
        assert said.count("before the products of the next") == 2
