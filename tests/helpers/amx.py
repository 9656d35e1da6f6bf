"""AMX code in tests: on a CPU that has AMX as it is, on others under the emulator in tests/native/amxemu, on
those without AVX-512 with the extension of tests/helpers/avx512.py, too.

amx = Amx.build(tmp_path_factory.mktemp("amx"))     # once per session; Amx.unusable() says why not
amx.run([sys.executable, "-c", "..."])              # a process whose detection finds AMX
amx.counts()["tdpbf16ps"]                           # products so far, if amx.emulated
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers import avx512
from tests.helpers.avx512 import cpu_flags
from tests.helpers.engine_cases import ISA_FLAGS, ROOT, SOURCES

TESTS = ROOT / "tests" / "native"
EMULATOR = TESTS / "amxemu"

TILE_FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
# As CMakeLists.txt compiles an instruction set's object.
AMX_FLAGS = (
    *("-std=c++20", "-O3", "-Wall", "-Wextra", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    *("-fno-exceptions", "-fno-rtti"),
    *(ISA_FLAGS["amx"] if avx512.has_avx512() else (*avx512.FLAGS, *TILE_FLAGS)),
)


def has_amx() -> bool:
    return {"amx_tile", "amx_bf16", "amx_int8"} <= cpu_flags()


def compile_with(compiler: str, output: Path, *arguments: object) -> None:
    """One compiler call; what it says is in the error."""
    command = [compiler, "-o", str(output), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def build_emulator(folder: Path) -> Path:
    """The library to preload. On a CPU with AMX it does nothing unless AMXEMU_PERMISSION=deny."""
    library = folder / "libamxemu.so"
    sources = [EMULATOR / name for name in ("amxemu.c", "decode.c", "tiles.c")]
    flags = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off")
    compile_with("gcc", library, *flags, *sources)
    return library


@dataclass(frozen=True)
class Amx:
    """How AMX code runs on this machine. `emulator` is None where the CPU has AMX, `extension` where it has
    AVX-512."""

    folder: Path
    emulator: Path | None
    extension: Path | None = None

    @staticmethod
    def unusable() -> str:
        """Why neither the CPU nor the emulator can run AMX code here; empty if one can."""
        if missing := avx512.unusable():
            return missing
        for compiler in ("gcc", "g++"):
            if shutil.which(compiler) is None:
                return f"no {compiler}"
        source = "int main() { __builtin_ia32_tilerelease(); }"
        command = ["gcc", *TILE_FLAGS, "-x", "c", "-fsyntax-only", "-"]
        if subprocess.run(command, input=source, capture_output=True, text=True).returncode != 0:
            return "gcc knows no AMX"
        return ""

    @classmethod
    def build(cls, folder: Path) -> Amx:
        """Compiles the emulator into `folder`, and the extension, unless the CPU needs none."""
        extension = None if avx512.has_avx512() else avx512.extension()
        return cls(folder, None if has_amx() else build_emulator(folder), extension)

    @property
    def emulated(self) -> bool:
        return self.emulator is not None

    def program(self, name: str, *flags: str) -> Path:
        """tests/native/cpp/NAME.cpp, compiled as the engine compiles its kernels, but for `flags`."""
        program = self.folder / name
        source = TESTS / "cpp" / f"{name}.cpp"
        arguments = (*AMX_FLAGS, "-Werror", *flags, "-I", SOURCES, source, "-pthread")
        compile_with("g++", program, *arguments)
        return program

    def environment(self, **more: str) -> dict[str, str]:
        """os.environ, under which a child process finds AMX; `more` is added.

        A child is no worker of pytest-xdist, of which plugins (pytest-benchmark) warn.
        """
        result = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")} | more
        if self.emulator is not None:
            result |= {
                "LD_PRELOAD": " ".join([str(self.emulator), *os.environ.get("LD_PRELOAD", "").split()]),
                "KT_RAY_TEST_ASSUME_AMX": "1",
                "AMXEMU_STATS": str(self.folder / "counts"),
            }
        if self.extension is not None:
            result |= avx512.replacing(self.extension, self.folder / "site")
        return result

    def run(self, command: Sequence[str], **more: str) -> str:
        """Standard output of a process that must succeed; `more` are environment variables."""
        done = subprocess.run(command, env=self.environment(**more), capture_output=True, text=True)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def counts(self) -> Mapping[str, int]:
        """What all processes run so far executed (tests/native/amxemu/amxemu.h); nothing if not emulated."""
        total: collections.Counter[str] = collections.Counter()
        file = self.folder / "counts"
        for line in file.read_text().splitlines() if file.exists() else ():
            total.update({name: n for name, n in json.loads(line).items() if name != "pid"})
        return total


if __name__ == "__main__":
    if Amx.unusable():
        sys.exit(Amx.unusable())
    with tempfile.TemporaryDirectory() as folder:
        amx = Amx.build(Path(folder))
        print(amx.run([str(amx.program("amx_micro_test")), "plan"]), end="")
