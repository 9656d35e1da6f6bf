"""benchmarks/bare_machine.sh goes on with this host's acceptance, and brings that one back."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bare_machine.sh"
DAY = "20260102-030405"


def test_another_hosts_acceptance_is_not_gone_on_with(tmp_path: Path) -> None:
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())
    texts = {
        "CMakeLists.txt": "",
        "kt_ray/native/src/engine.cpp": "",
        "kt_ray/native/_native.so": "",
        "build/bare_site/.installed": "",
        "folder/empty": "",
        "python": '#!/bin/sh\necho "$@" > said\n',
        f"accept/{host}-2-{DAY}/machine.json": "",
        f"accept/{host}-2-{DAY}/page.md": "another's",
    }
    for name, text in texts.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "python").chmod(0o755)
    (tmp_path / "benchmarks").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / "benchmarks")
    state = "cat CMakeLists.txt $(find kt_ray/native/src -type f | sort) | sha256sum > build/bare_built"
    subprocess.run(["bash", "-c", state], cwd=tmp_path, check=True)

    def said() -> str:
        command = ["bash", script, "accept", "folder", "out"]
        environment = {**os.environ, "PYTHON": str(tmp_path / "python")}
        subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
        return (tmp_path / "said").read_text()

    assert "mode=accept" in said() and "accept.resume" not in said()
    mine = tmp_path / "accept" / f"{host}-{DAY}"
    mine.mkdir()
    (mine / "machine.json").touch()
    (mine / "page.md").write_text("mine")
    os.utime(mine, (1, 1))
    assert "accept.resume=latest" in said()
    assert (tmp_path / "out" / "page.md").read_text() == "mine"
