"""Float panels decoded inside the products of others: the plain decoder's bits, format by format."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.cpp import compile_program, cpu_has

# As CMakeLists.txt compiles the instruction sets' objects, with less optimisation.
FLAGS = [
    *("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"),
    *("-mavx2", "-mfma", "-mf16c"),
]
WIDE = [
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # g++'s own intrinsics (its bug 105593)
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("isa", "flags"), [("avx2", FLAGS), ("avx512", FLAGS + WIDE)])
def test_panels_have_the_plain_decoders_bits(isa: str, flags: list[str], tmp_path: Path) -> None:
    """Whole panels and ragged ones, scales of every type, NaN among E4M3, scales that overflow."""
    if not cpu_has("avx512bw" if isa == "avx512" else isa):
        pytest.skip(f"this CPU has no {isa}")
    source = [f"-DKT_ISA={isa}", f'-DKT_SOURCE="isa/{isa}.cpp"']
    program = compile_program("panels_test", tmp_path / "panels_test", [*flags, *source])
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(" panels, 0 differ\n") and int(done.stdout.split()[0]) > 10_000
