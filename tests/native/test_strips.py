"""The weight formats' decoders in C++: the vector ones against the scalar ones, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.cpp import compile_program, cpu_has

# As CMakeLists.txt compiles the instruction set's object; the last two are for g++'s own intrinsics (its
# bug 105593).
FLAGS = [
    *("-std=c++20", "-O3", "-Wall", "-Wextra", "-Werror"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-exceptions", "-fno-rtti"),
    *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    *("-mprefer-vector-width=512", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"),
    *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
]


@pytest.mark.skipif(not cpu_has("avx512_bf16"), reason="this CPU has no AVX512_BF16")
def test_vector_strips_equal_scalar_strips(tmp_path: Path) -> None:
    program = compile_program("strips_test", tmp_path / "strips_test", FLAGS)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ok") == 13
