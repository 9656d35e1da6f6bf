"""What first_night.py reads: the README's commands, and the silences of a command."""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.ray_place import gone, until

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    return importlib.import_module("first_night")


def test_the_readme_has_five_commands_at_most(tool: Any) -> None:
    """Four until the overnight run has begun, one after it, and one for a power cut."""
    commands, resume = tool.readme_commands((REPO / "README.md").read_text(encoding="utf-8"), Path("m"))
    modes = [next((w for w in words if w.startswith("mode=")), "") for words in commands]
    assert modes == ["mode=doctor", "mode=plan", "mode=preview", "", "mode=chat"]
    assert all(words[0] == "launch.py" for words in commands)
    run = ["launch.py", "model.path=m", "data.path=rows.jsonl", "run.name=night", "trainer.restarts=10"]
    assert commands[3] == run and resume == ["launch.py", f"resume={tool.RUN}"]


def test_the_longest_silence_is_told_with_the_line_before_it(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(tool, "time", SimpleNamespace(monotonic=lambda: now[0]))
    script = (
        "import os, time\n"
        "def word(name):\n"
        "    while not os.path.exists(name): time.sleep(0.01)\n"
        "word('begin'); print('first', flush=True)\n"
        "word('go'); print(input(), flush=True); raise SystemExit(3)"
    )
    command = tool.Command(["-c", script], tmp_path, "second\n")
    now[0] = 1.0
    (tmp_path / "begin").touch()
    until(lambda: command.lines == ["first", ""], 60, 0.01)
    now[0] = 5.0
    (tmp_path / "go").touch()
    record = command.wait()
    assert (record["exit_code"], record["silent_after"]) == (3, "first")
    assert command.lines == ["first", "second", ""]
    assert (record["longest_silence_s"], record["seconds"]) == (4.0, 5.0)


def test_a_power_cut_takes_the_whole_tree(tool: Any, tmp_path: Path) -> None:
    script = "import subprocess; subprocess.run(['sh', '-c', 'sleep 60 & echo $!; wait; echo no'])"
    command = tool.Command(["-c", script], tmp_path)
    while len(command.lines) < 2:
        time.sleep(0.01)
    command.power_cut()
    assert command.wait()["exit_code"] == -9
    until(lambda: gone(int(command.lines[0])), 60, 0.1)
    assert "no" not in command.lines


def test_half_written_lines_are_no_steps(tool: Any, tmp_path: Path) -> None:
    assert tool.steps_done(tmp_path) == []
    text = '{"step": 0, "eval_loss": 2}\n{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n{"step": 3, "lo'
    (tmp_path / "metrics.jsonl").write_text(text)
    assert tool.steps_done(tmp_path) == [1, 2]
