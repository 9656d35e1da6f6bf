"""The Makefile: what messages name is there, and what cannot work is told before anything is made."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROSE = {"a", "another", "it", "one", "the", "them"}
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def texts(file: Path) -> Iterator[str]:
    """The strings of a module but for its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


def test_every_target_that_a_message_names_exists() -> None:
    named = {
        (file.name, word)
        for file in [*(ROOT / "kt_ray").rglob("*.py"), ROOT / "launch.py"]
        for text in texts(file)
        for word in re.findall(r"\bmake (\w+)", text)
    }
    assert {"demo"} <= {word for _, word in named}
    assert not {pair for pair in named if pair[1] not in TARGETS | PROSE}


def make(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """`make demo` with a Python of that script and an environment that is not there yet."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{python}\n")
    program.chmod(0o755)
    command = ["make", "-C", str(ROOT), "demo", f"PYTHON={program}", f"VENV={tmp_path / 'venv'}"]
    return subprocess.run(command, text=True, capture_output=True, check=False)


@pytest.mark.parametrize("version", ["(3, 10, 12)", "(3, 14, 0)"])
def test_another_python_is_refused_before_anything_is_made(tmp_path: Path, version: str) -> None:
    other = f"import sys; sys.version_info = {version}; exec(sys.argv[1])"
    done = make(tmp_path, f"""[ "$1" = -c ] && exec {sys.executable} -c '{other}' "$2"; exit 9""")
    error, *rest = done.stderr.splitlines()
    assert done.returncode == 2 and rest == [line for line in rest if line.startswith("make")]
    assert "required 3.11, 3.12 or 3.13. To fix: make PYTHON=" in error
    assert not (tmp_path / "venv").exists()


def test_an_environment_that_cannot_be_made_does_not_stay(tmp_path: Path) -> None:
    """As Debian's Python without python3-venv: it makes half of one."""
    done = make(tmp_path, f"""[ "$1" = -c ] && exec {sys.executable} "$@"; mkdir -p "$3/bin"; exit 1""")
    assert done.returncode == 2 and "To fix: apt install python3-venv" in done.stderr
    assert not (tmp_path / "venv").exists()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").write_text("")
    make(tmp_path, f"""[ "$1" = -c ] && exec {sys.executable} "$@"; exit 1""")
    assert (tmp_path / "venv" / "mine").exists()
