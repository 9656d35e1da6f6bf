"""launch.py as a process: what it prints, its exit codes, its streams, and what it does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kt_ray.errors import BAD_INPUT, INTERRUPTED
from tests.config.test_cli import RECIPE, REPO

pytestmark = pytest.mark.usefixtures("clean")


def _launch(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(REPO / "launch.py"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )


def test_launch_prints_the_composed_configuration(tmp_path: Path) -> None:
    done = _launch("--cfg", "job", "lora.rank=4", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = yaml.safe_load(done.stdout)
    assert printed["lora"]["rank"] == 4 and printed["model"]["name"] == "demo"


def test_an_interrupt_while_launch_loads_is_no_traceback(tmp_path_factory: pytest.TempPathFactory) -> None:
    own = tmp_path_factory.mktemp("own")
    (own / "kt_ray").mkdir()
    (own / "kt_ray" / "__init__.py").touch()
    (own / "kt_ray" / "cli.py").write_text("raise KeyboardInterrupt")
    (own / "launch.py").write_text((REPO / "launch.py").read_text())
    # -S: an editable install's finder would come before the directory.
    command = [sys.executable, "-S", "launch.py"]
    done = subprocess.run(command, cwd=own, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (INTERRUPTED, "interrupted\n")


def test_launch_with_a_users_directory(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    own = tmp_path_factory.mktemp("own")
    (own / "lora").mkdir()
    (own / "lora" / "wide.yaml").write_text("defaults: [default, _self_]\nrank: 64\n")
    done = _launch("--config-dir", str(own), "lora=wide", "--cfg", "job", "--package", "lora", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["rank"] == 64


def test_launch_multirun_with_a_wrong_value(tmp_path: Path) -> None:
    done = _launch("-m", "lora.rank=0,999", cwd=tmp_path)
    assert done.returncode == BAD_INPUT
    *faults, last = done.stderr.splitlines()
    assert len(faults) == 2 and all("lora.rank" in line for line in faults) and "none was started" in last


def test_configuration_imports_nothing_heavy() -> None:
    code = (
        "import sys; from kt_ray import cli; "
        "assert cli.main(['--cfg', 'job']) == 0; assert cli.main(['lora.rank=0']) == 2; "
        "heavy = {'torch', 'ray', 'transformers', 'peft', 'numpy', 'wandb'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


PLAN = f"mode=plan recipe={RECIPE} model=mini data=demo plan.hardware=laptop_16gb"


@pytest.mark.parametrize(
    ("redirections", "code", "told"),
    [
        ("", 0, "  \\u2190 model_name_or_path"),
        (">&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
        (">/dev/full", BAD_INPUT, "error: a disk is full; at standard output, or a file"),
        (">/dev/full 2>/dev/full", BAD_INPUT, ""),
    ],
)
def test_standard_streams_of_any_kind(redirections: str, code: int, told: str, tmp_path: Path) -> None:
    done = subprocess.run(
        f"exec {sys.executable} {REPO / 'launch.py'} {PLAN} {redirections}",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        encoding="latin-1",
        timeout=60,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr and "bug" not in done.stderr
    assert done.stderr.count("\n") <= 1
