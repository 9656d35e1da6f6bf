"""What is a secret, and that none is written."""

from __future__ import annotations

import json
import logging
import os
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray import cli
from kt_ray.accept.accept_page import write_archive
from kt_ray.config import secret_values
from kt_ray.config.secret_values import MASK, hidden_arguments, hide, is_secret, without_secrets
from kt_ray.report.page import report_page
from kt_ray.runs.rundata import read_run
from kt_ray.runs.rundir import settings_of
from kt_ray.tracking.console import setup_logging

VALUE = "sk-8a7c2f-very-secret"
BY_NAME = (
    "WANDB_API_KEY",
    "HF_TOKEN",
    "OPENAI_API_KEY",
    "KT_RAY_API_KEY",
    "AWS_SECRET_ACCESS",
    "DB_PASSWORD",
)
HARMLESS = (
    "PATH",
    "KT_RAY_CACHE",
    "eos_token",
    "pad_token",
    "data.pad_token_id",
    "max_tokens",
    "monkey",
    "keys",
)


def test_names() -> None:
    assert all(map(is_secret, (*BY_NAME, *map(str.lower, BY_NAME), "serve.api_key", "hf_hub_token", "token")))
    assert not any(map(is_secret, HARMLESS))
    # of our own options, this one
    options = (Path(__file__).parent / "options.txt").read_text().splitlines()
    assert [line.partition(":")[0] for line in options if is_secret(line.partition(":")[0])] == [
        "serve.api_key"
    ]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (f"serve.api_key={VALUE}", f"serve.api_key={MASK}"),
        (f"+serve.api_key='a b {VALUE}'", f"+serve.api_key={MASK}"),
        ("serve.api_key=correct horse battery", f"serve.api_key={MASK}"),
        (r"serve.api_key='ab\'cd efgh'", f"serve.api_key={MASK}"),
        (f"serve={{port: 80, api_key: {VALUE}, host: a}}", f"serve={{port: 80, api_key: {MASK}, host: a}}"),
        (f"--hf-password={VALUE}", f"--hf-password={MASK}"),
        ("generate.max_new_tokens=5", "generate.max_new_tokens=5"),
        ("model.config.eos_token=</s>", "model.config.eos_token=</s>"),
    ],
)
def test_command_lines(given: str, shown: str) -> None:
    assert hidden_arguments([given]) == [shown]


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", VALUE)
    monkeypatch.setenv("SOME_KEY", "short")
    monkeypatch.setattr(secret_values, "_known", set())
    assert hide(f"401 for {VALUE}: short") == f"401 for {MASK}: short"
    tree = {"a": [f"x {VALUE}", 3], "api_key": "k", "token": None, "pad_token_id": 7, "eos_token": "</s>"}
    assert without_secrets(tree) == {
        "a": [f"x {MASK}", 3], "api_key": MASK, "token": None, "pad_token_id": 7, "eos_token": "</s>"
    }  # fmt: skip
    monkeypatch.delenv("HF_TOKEN")
    assert VALUE in hide(VALUE)
    secret_values.remember(VALUE)
    assert hide(VALUE) == MASK


def written(folder: Path) -> dict[Path, str]:
    return {file: file.read_text(errors="replace") for file in folder.rglob("*") if file.is_file()}


def test_a_run_writes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.yaml, env.json, train.log, what W&B is told, the report."""
    key, told = "key-of-the-server-77", []
    for name in BY_NAME:
        monkeypatch.setenv(name, f"{VALUE}-{name}")
    arguments = ["data=demo", "cluster=local", "trainer.max_steps=1", "data.limit=4", f"serve.api_key={key}",
                 f"run.root={tmp_path}", "run.name=r", "trainer.eval_every=0"]  # fmt: skip

    class Told:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def start(self, run_dir: Path, config: Any, **_: Any) -> None:
            told.append(json.dumps([config, sys.argv]))
            logging.getLogger("kt_ray").info("asked with %s", os.environ["HF_TOKEN"])
            raise KeyboardInterrupt  # training itself writes nothing of it

        def finish(self, status: str) -> None: ...

    monkeypatch.setattr("kt_ray.modes.train.make_tracker", Told)
    assert cli.main(arguments) == 130
    run = tmp_path / "r"
    files = written(run)
    assert {"config.yaml", "env.json", "train.log"} <= {file.name for file in files}
    page = report_page(read_run(run))
    assert len(told) == 1 and settings_of(run)["serve.api_key"] == MASK
    assert any(f"serve.api_key={MASK}" in line for line in json.loads((run / "env.json").read_text())["argv"])
    assert f"asked with {MASK}" in (run / "train.log").read_text()
    for text in (*files.values(), page, *told):
        assert key not in text and VALUE not in text
    # One that an earlier version wrote is not shown, either.
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["serve"]["api_key"] = key
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    environment = json.loads((run / "env.json").read_text())
    (run / "env.json").write_text(json.dumps({**environment, "argv": arguments}))
    assert key not in report_page(read_run(run))


def test_an_archive_holds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", VALUE)
    (tmp_path / "a.log").write_text(f"asked with {VALUE}\n")
    with tarfile.open(write_archive(tmp_path)) as archive:
        (name,) = archive.getnames()
        file = archive.extractfile(name)
        assert file is not None and file.read() == f"asked with {MASK}\n".encode()


def test_warnings_hide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", VALUE)
    with setup_logging(tmp_path / "train.log"):
        try:
            raise ValueError(f"refused: {VALUE}")
        except ValueError:
            logging.getLogger("kt_ray").warning("it failed", exc_info=True)
    shown = capsys.readouterr()
    for text in ((tmp_path / "train.log").read_text(), shown.err + shown.out):
        assert "refused: ***" in text and VALUE not in text
