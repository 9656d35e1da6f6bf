"""Compiles the C++ test programs of tests/native/cpp."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def compile_program(name: str, target: Path, flags: list[str]) -> Path:
    """Builds tests/native/cpp/<name>.cpp; skips the test where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source = ROOT / f"tests/native/cpp/{name}.cpp"
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
