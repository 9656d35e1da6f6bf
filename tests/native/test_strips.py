"""The weight formats' decoders in C++: the vector ones against the scalar ones, bit for bit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# As CMakeLists.txt compiles the instruction set's object.
FLAGS = (
    "-std=c++20 -O3 -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fno-trapping-math "
    "-fno-exceptions -fno-rtti -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl "
    "-mprefer-vector-width=512 -mavx512bf16"
).split()
GCC_ONLY = ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # its own intrinsics, bug 105593


def compile_driver(target: Path, flags: list[str]) -> Path:
    """Builds the test program; skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = ROOT / "tests/native/cpp/strips_test.cpp"
    include = ROOT / "kt_ray/native/src"
    done = subprocess.run(
        [compiler, *flags, "-I", str(include), str(source), "-o", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return target


def cpu_has(flag: str) -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return any(flag in line.split() for line in text.splitlines() if line.startswith("flags"))


@pytest.mark.skipif(not cpu_has("avx512_bf16"), reason="this CPU has no AVX512_BF16")
def test_vector_strips_equal_scalar_strips(tmp_path: Path) -> None:
    program = compile_driver(tmp_path / "strips_test", [*FLAGS, *GCC_ONLY])
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" ok") == 13
