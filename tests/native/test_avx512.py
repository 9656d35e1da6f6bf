"""The kernels for AVX-512 and AMX on a CPU that has AVX2 alone, through tests/native/avx512emu: their
recorded bits, and the engine's own tests of them. On a CPU with AVX-512 those tests run as they are."""

from __future__ import annotations

import sys

import pytest

from tests.helpers import avx512
from tests.helpers.amx import Amx
from tests.helpers.engine_cases import ROOT
from tests.helpers.exhaustive import exhaustive

pytestmark = [
    pytest.mark.skipif(avx512.has_avx512(), reason="this CPU has AVX-512"),
    pytest.mark.skipif(bool(Amx.unusable()), reason=f"AVX-512 cannot be emulated here: {Amx.unusable()}"),
]

# Files of tests/native that say something about these kernels.
FILES = (
    *("activations", "dropout", "engine", "engine_out", "formats_engine", "input_grad", "int8_kept"),
    *("int8_products", "roundings", "rows", "scatter"),
)


@pytest.fixture(scope="module")
def amx(tmp_path_factory: pytest.TempPathFactory) -> Amx:
    return Amx.build(tmp_path_factory.mktemp("amx"))


def said_by_pytest(amx: Amx, file: str, selection: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not exhaustive"]
    said = amx.run([*command, "-k", selection, str(ROOT / "tests" / file)], OMP_NUM_THREADS="1")
    assert " passed" in said, said
    return said


@pytest.mark.slow
def test_recorded_bits(amx: Amx) -> None:
    """What CPUs with AVX-512 computed (tests/golden/engine.json), of AMX what its emulator does."""
    before = amx.counts()["tdpbf16ps"]
    said = said_by_pytest(amx, "test_golden.py", "engine_bits and (avx512 or amx)")
    assert "skipped" not in said, said
    assert amx.counts()["tdpbf16ps"] > before + 1000


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", [exhaustive(file) for file in FILES])
def test_the_engine_s_own_tests_pass(amx: Amx, file: str) -> None:
    said_by_pytest(amx, f"native/test_{file}.py", "avx512 or amx")
