"""The machine's peak: compiles peak.cpp and runs it. The figures that of_peak and of_bandwidth divide by."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

SOURCE = Path(__file__).with_name("peak.cpp")
Rates = dict[str, dict[str, float]]  # threads -> loop -> GFLOP/s ("read": GB/s)


class Peak:
    """peak.cpp, compiled for the time of a `with`.

    Attributes:
        error: why there are no figures (no compiler, another architecture); "" if there are.
    """

    def __init__(self) -> None:
        self.error = ""
        self._folder = tempfile.TemporaryDirectory(prefix="kt_ray_peak_")
        self._program = Path(self._folder.name) / "peak"
        compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
        if compiler is None:
            self.error = "no C++ compiler: set CXX or install g++"
            return
        # CXX may be "ccache g++"
        options = ["-O2", "-std=c++20", "-pthread", str(SOURCE), "-o", str(self._program)]
        self._run([*shlex.split(compiler), *options], compiler)

    def _run(self, command: list[str], name: str) -> str:
        """What a program prints; "" with `error` set where it fails, or cannot be started (a directory for
        temporary files in which nothing may run)."""
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            self.error = f"{name}: {error}"
            return ""
        if done.returncode:
            self.error = f"{name}: ended with {done.returncode}: {done.stderr[-500:]}"
            return ""
        return done.stdout

    def measure(self, threads: list[int], seconds: float, megabytes: int = 1024) -> Rates:
        """GFLOP/s of each instruction set's loop and GB/s read, by number of threads.

        Args:
            threads: numbers of threads to measure with.
            seconds: duration of each loop.
            megabytes: memory that is read through; several times the last-level cache.

        Returns:
            {} when `error` is set.
        """
        if self.error:
            return {}
        printed = self._run([str(self._program), str(seconds), str(megabytes), *map(str, threads)], "peak")
        if not printed:
            return {}
        rates: Rates = json.loads(printed)
        return rates

    def __enter__(self) -> Peak:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._folder.cleanup()


def best(first: Rates, second: Rates) -> Rates:
    """The larger of two measurements, entry by entry."""
    return {
        threads: {name: max(rate, second.get(threads, {}).get(name, 0.0)) for name, rate in loops.items()}
        for threads, loops in first.items()
    }


def loop_for(isa: str | None, dtype: str, rates: dict[str, float]) -> str | None:
    """Which loop an implementation is measured against.

    Args:
        isa: the engine's instruction set; None: a peer, which takes what the machine has.
        dtype: what the products are computed in, "float32" or "bfloat16".
        rates: the loops this machine has.

    Returns:
        Its name, or None where there is nothing to compare with (isa "reference").
    """
    if isa == "reference":
        return None
    wide = {None: "avx512_f32", "amx": "avx512_f32", "avx512_bf16": "avx512_f32", "avx512": "avx512_f32"}
    bf16 = {None: ("amx_bf16", "avx512_bf16"), "amx": ("amx_bf16",), "avx512_bf16": ("avx512_bf16",)}
    names = [*(bf16.get(isa, ()) if dtype == "bfloat16" else ()), wide.get(isa, "avx2_f32"), "avx2_f32"]
    return next((name for name in names if name in rates), None)
