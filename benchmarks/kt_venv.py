"""KTransformers' kernels in a virtual environment of their own, beside this interpreter's torch."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.7.2"
_MARK = "made-by-kt_ray"  # a folder without it is never written to


def kt_python(folder: Path, wheel: Path | None = None) -> Path:
    """The interpreter of an environment with kt-kernel, made where `folder` does not exist yet.

    Its packages come first, everything else (torch, numpy, transformers) is this interpreter's, by a .pth
    file: pip installs kt-kernel alone, without the dependencies that its metadata name. wheel: instead of
    the one from PyPI.

    Raises:
        RuntimeError: pip could not install it, or `folder` is something else, which is left alone.
    """
    python = folder / "bin" / "python"
    if python.exists() and _has_kt(python):
        return python
    made = folder / _MARK
    if folder.exists() and any(folder.iterdir()) and not made.exists():
        raise RuntimeError(f"{folder} is no environment with kt-kernel")
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    made.write_text(f"beside {sys.executable}\n", encoding="utf-8")  # first: what follows may be cut off
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError as error:  # Debian and Ubuntu ship ensurepip apart
        raise RuntimeError("it cannot have pip: install python3-venv") from error
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "benchmarks.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    what = [f"kt-kernel=={VERSION}"] if wheel is None else ["--no-index", str(wheel)]
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", *what]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        raise RuntimeError(f"pip install {what[-1]}: {installed.stderr.strip()[-300:]}")
    return python


def _has_kt(python: Path) -> bool:
    command = [str(python), "-c", "import importlib.metadata as m; m.version('kt-kernel')"]
    return subprocess.run(command, capture_output=True).returncode == 0
