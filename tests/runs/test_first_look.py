"""What a command names and is not there is told before torch, transformers or Ray are loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from kt_ray.runs.rundir import RunDir
from tests.helpers.composing import compose

REPO = Path(__file__).resolve().parents[2]
_PROGRAM = """
import json, sys
from kt_ray import cli
codes = [cli.main(arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([codes, [name for name in ("torch", "transformers", "ray") if name in sys.modules]]))
"""

# (arguments, what the line says). {home} holds no x.jsonl.
REFUSED: list[tuple[list[str], str]] = [
    (["data.path=absent.jsonl"], "data.path="),
    (["data.path=~/x.jsonl"], "{home}/x.jsonl"),
    (["data.path=[~/x.jsonl,rows.jsonl]"], "{home}/x.jsonl"),
    (["data.path=rows.jsonl", "data.eval_path=rows.pdf"], "unknown kind of data file; at data.eval_path="),
    (["data.sources=[{path: absent.jsonl}]"], "data.sources[0].path="),
    (["mode=preview", "data.path=nothing"], "the data file does not exist"),
    (["model.path=absent", "data.path=rows.jsonl"], "the model directory does not exist"),
    (["model.path=nothing", "data=demo"], "the model directory does not exist"),
    (["model=org/name", "data.path=rows.jsonl"], "hf download org/name"),
    (["mode=chat", "model.path=."], "holds no config.json"),
    (["run.name=taken"], "this directory already holds a run"),
    (["run.name=taken", "trainer.restarts=3"], "this directory already holds a run"),
    (["run.root=.", "run.name=files"], "a directory that holds other files"),
    (["run.name=new", "trainer.resume=latest"], "there is nothing to resume"),
]


def test_what_is_not_there_is_told_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "rows.pdf").write_text("%PDF")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "mine").write_text("")
    run = RunDir.create(compose(["run.name=taken"]))
    run.close()
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    before = sorted(tmp_path.rglob("*"))

    arguments = json.dumps([arguments for arguments, _ in REFUSED])
    hub = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path.parent / "hub")}
    environment = {**os.environ, **hub, "HOME": str(tmp_path / "home"), "PYTHONPATH": str(REPO)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, arguments],
        env=environment,
        text=True,
        capture_output=True,
        check=True,
    )
    codes, loaded = json.loads(done.stdout.splitlines()[-1])
    assert codes == [2] * len(REFUSED) and loaded == []
    lines = done.stderr.splitlines()
    assert len(lines) == len(REFUSED)
    for line, (given, said) in zip(lines, REFUSED, strict=True):
        assert said.format(home=tmp_path / "home") in line, (given, line)
    assert sorted(tmp_path.rglob("*")) == before
