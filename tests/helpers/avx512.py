"""AVX-512 code in tests, on a CPU that has AVX2 alone: kt_ray's extension with the kernels for AVX-512 and
AMX compiled through tests/native/avx512emu.

if not has_avx512():
    environment |= replacing(extension(), folder)      # of a process that is to find these instruction sets
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers import engine_cases
from tests.helpers.engine_cases import (
    ISA_FLAGS,
    ROOT,
    SOURCES,
    compiler,
    digest_of,
    object_cache,
    run,
    shipped_objects,
)

INTRINSICS = ROOT / "tests" / "native" / "avx512emu"
NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vbmi", "avx512_vnni", "avx512_bf16"}
# In the place of AVX-512's own flags.
FLAGS = (*ISA_FLAGS["avx2"], "-Wno-psabi", "-I", str(INTRINSICS))

# What the header cannot stand in for: an instruction by name, and what CPUID says.
PATCHES = (
    (
        "isa/avx512_vec.inl",
        '__asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));',
        "sum = _mm512_fmadd_ps(a, b, sum);",
    ),
    (
        "cpu_features.cpp",
        'result.push_back({"avx512", avx512.empty(), avx512});',
        'avx512 = avx512_bf16 = avx2;\n    result.push_back({"avx512", avx512.empty(), avx512});',
    ),
    ("cpu_features.cpp", "(cpuid(7, 0).ecx >> 11 & 1) != 0 &&", ""),
)


def cpu_flags() -> set[str]:
    with open("/proc/cpuinfo") as file:
        return next((set(line.split()) for line in file if line.startswith("flags")), set())


def has_avx512() -> bool:
    return cpu_flags() >= NEEDED


# Of tests that AVX-512's instructions take seconds and the header minutes.
SLOW_WITHOUT = () if has_avx512() else (pytest.mark.exhaustive,)


def unusable() -> str:
    """Why neither the CPU nor the header can run AVX-512 code here; empty if one can."""
    if missing := ({"avx2", "fma", "f16c"} - cpu_flags()):
        return f"this CPU lacks {', '.join(sorted(missing))}"
    if has_avx512() or shipped_objects():
        return ""
    missing = ", ".join(sorted(NEEDED - cpu_flags()))
    return f"this CPU lacks {missing}, and the objects of an extension of these sources are not here"


def extension() -> Path:
    """The extension, kept in kt_ray's cache and compiled once: half a minute of a core.

    Unoptimised, which compiles fifty times as fast; sums and roundings are the same. The engine around the
    kernels is as it ships.
    """
    program = compiler()
    assert program is not None
    shipped = {path.name.removesuffix(".cpp.o"): path for path in shipped_objects()}
    engine = [path for path in shipped["engine"].parent.glob("*.o") if path != shipped["cpu_features"]]
    others = [*engine, shipped["reference"], shipped["avx2"]]
    made_of = (SOURCES, INTRINSICS, Path(__file__), Path(engine_cases.__file__), *others)
    digest = digest_of(program, *made_of)
    target = object_cache() / f"extension-{digest}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = shutil.copytree(SOURCES, folder / "src")
        for file, old, new in PATCHES:
            text = (sources / file).read_text()
            assert text.count(old) == 1, f"{file}: {text.count(old)} × {old}"
            (sources / file).write_text(text.replace(old, new))

        def compile_one(source: str) -> str:
            made = str(folder / f"{Path(source).stem}.o")
            tiles = [flag for flag in ISA_FLAGS["amx"] if "amx" in flag] if source == "isa/amx.cpp" else []
            command = [program, "-std=c++20", "-O0", "-fPIC", "-ffp-contract=off", *FLAGS, *tiles]
            run([*command, "-I", str(sources), "-c", str(sources / source), "-o", made])
            return made

        kernels = [f"isa/{isa}.cpp" for isa in ("amx", "avx512_bf16", "avx512", "avx512_vnni")]
        with ThreadPoolExecutor(2) as pool:
            made = [*pool.map(compile_one, [*kernels, "cpu_features.cpp"])]
        partial = folder / "extension.so"
        run([program, "-shared", *map(str, others), *made, "-pthread", "-o", str(partial)])
        shutil.copy(partial, target.with_suffix(f".{os.getpid()}"))
        target.with_suffix(f".{os.getpid()}").rename(target)
    return target


def replacing(module: Path, folder: Path) -> dict[str, str]:
    """The environment of a Python process that takes `module` for kt_ray's extension, by code in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('kt_ray.native._native', {str(module)!r})\n"
        "sys.modules[spec.name] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(sys.modules[spec.name])\n"
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}
