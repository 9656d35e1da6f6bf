"""KTransformers' kernels in a virtual environment of their own, beside this interpreter's torch."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSION = "0.7.2"


def kt_python(folder: Path) -> Path:
    """The interpreter of an environment with kt-kernel, made on first use.

    Its packages come first, everything else (torch, numpy, transformers) is this interpreter's, by a .pth
    file: pip installs kt-kernel alone, without the dependencies that its metadata name.

    Raises:
        RuntimeError: pip could not install it.
    """
    python = folder / "bin" / "python"
    done = folder / f"kt-kernel-{VERSION}"
    if done.exists() and python.exists():
        return python
    import torch

    venv.create(folder, with_pip=True, clear=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "benchmarks.pth").write_text(f"{Path(torch.__file__).parents[1]}\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", f"kt-kernel=={VERSION}"]
    installed = subprocess.run(command, capture_output=True, text=True)
    if installed.returncode:
        raise RuntimeError(f"pip install kt-kernel=={VERSION}: {installed.stderr.strip()[-300:]}")
    done.write_text(f"beside {sys.executable}\n", encoding="utf-8")
    return python
