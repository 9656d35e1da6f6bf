"""The page has every claim and table, and what is sent names nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from kt_ray.accept import accept_page as page
from kt_ray.accept.items import Claim, Directory, Result

ABOUT = {
    "packages": {"torch": "2.9", "ray": None},
    "cpu": "A CPU",
    "cores": 4,
    "cores_allowed": 2,
    "memory_bytes": 8 << 30,
    "gpus": ["card, 23.6 GiB"],
    "python": "3.12",
    "git_commit": None,
    "time": "today",
}
RESULTS = [
    Result("here", "machine", "What is here"),
    Result(
        "right",
        "engine",
        "Experts agree",
        "fail",
        seconds=12.0,
        claims=(
            Claim("pass", "one", "1 | 2", "all", "README.md"),
            Claim("fail", "two", "<none>", "all", "docs/x.md"),
        ),
        tables={"Failed tests": [("test", "why"), ("a", "b")]},
    ),
    Result("fast", "a", "A", tables={"Rates": [("x",), ("1",)]}, notes=("note",)),
    Result("fast", "b", "B", tables={"Rates": [("x",), ("2",)]}),
    Result("runs", "c", "C", "cut", cut=True, notes=("the time was over",)),
]


def test_both_pages(tmp_path: Path) -> None:
    page.write_pages(tmp_path, RESULTS, ABOUT)
    text, html = (tmp_path / "page.md").read_text(), (tmp_path / "page.html").read_text()
    assert "1 claim passed, 0 warnings, 1 failure; cut off by the clock: 1 item." in text
    assert text.index("| fail | two |") < text.index("| pass | one | 1 \\| 2 |")
    assert text.count("### Rates") == 1 and "| 1 |\n| 2 |" in text
    assert "&lt;none&gt;" in html and "<none>" not in html and "What is here" in html


def test_results_of_another_commit_are_told() -> None:
    results = [replace(result, commit="b" if result.item == "engine" else "a") for result in RESULTS]
    text = page.markdown(results, {**ABOUT, "git_commit": "a"})
    assert "- commit: a; of b: Experts agree\n" in text
    assert "- commit: a\n" in page.markdown(results[:1], {**ABOUT, "git_commit": "a"})


def test_what_is_sent_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "prancer.example.org")
    monkeypatch.setattr("getpass.getuser", lambda: "rudolph")
    monkeypatch.setattr(page.Path, "home", lambda: Path("/home/rudolph"))
    path = tmp_path / "prancer-2026"
    Directory(path).write(replace(RESULTS[1], records=[{"ms": n} for n in range(12_000)]))
    asked: list[str] = []
    monkeypatch.setattr("socket.getfqdn", lambda: asked.append("") or "prancer.example.org")
    private = "\n".join(
        (
            f"/home/rudolph/x on prancer at 10.1.2.3 as rudolph, {path}/right, {Path.cwd()}/launch.py",
            f"{sys.prefix}/bin/python prancer.example.org prancer-ib0 rudolph_models fe80:0:12:ab::1",
            "2001:db8::7 127.0.0.1 run.root=x 12:30:05 test_a.py::test_b ::1",
        )
    )
    (path / "right" / "engine.log").write_text(private + "\n" + "x" * 300_000 + "end")
    (path / "runs" / "small_run" / "run").mkdir(parents=True)
    (path / "runs" / "small_run" / "run" / "config.json").write_text("{}")
    (path / "right" / "short.log").write_text(private)
    with tarfile.open(page.write_archive(path)) as archive:
        names = archive.getnames()
        texts = {name: archive.extractfile(name).read().decode() for name in names}
    assert set(names) == {
        "acceptance/right/engine.json",
        "acceptance/right/engine.log",
        "acceptance/right/short.log",
    }
    result = texts["acceptance/right/engine.json"]
    assert len(result) > page.LOG_BYTES and json.loads(result)["item"] == "engine"
    assert len(asked) == 1, "a name server may be slow"
    assert (
        texts["acceptance/right/engine.log"].endswith("end")
        and len(texts["acceptance/right/engine.log"]) <= 200_000
    )
    for word in (
        "rudolph",
        "prancer",
        "example",
        "12:ab",
        "db8::7",
        sys.prefix,
        "10.1.2.3",
        str(tmp_path),
        str(Path.cwd()),
    ):
        assert word not in texts["acceptance/right/short.log"], word
    assert "run.root=x 12:30:05 test_a.py::test_b ::1" in texts["acceptance/right/short.log"]
    assert "127.0.0.1" in texts["acceptance/right/short.log"]
    code = (
        "from pathlib import Path; from kt_ray.accept.accept_page import anonymous; "
        "line = '1:2:3:' + 200 * 'a' + 'z'; assert anonymous(line, Path('x'), {}) == line"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)  # no time that doubles per letter
