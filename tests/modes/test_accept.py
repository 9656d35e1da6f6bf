"""mode=accept by the command line: quick from end to end, a broken section, going on, what is refused."""

from __future__ import annotations

import errno
import json
import os
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kt_ray import cli
from kt_ray.accept.items import Claim, Found, Item, Task
from kt_ray.doctor.check import Check
from kt_ray.errors import BAD_INPUT, INTERRUPTED
from kt_ray.modes import accept

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return lambda *keys: cli.main(["mode=accept", "cluster=local", f"accept.root={tmp_path / 'a'}", *keys])


def only(root: Path) -> Path:
    (path,) = (root / "a").iterdir()
    return path


@pytest.mark.slow
@pytest.mark.bench
def test_quick(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rehearsal: all sections, but of the tests, which run beside this one, the engine's alone."""
    monkeypatch.setattr(accept.right, "TOPICS", {"engine": accept.right.TOPICS["engine"]})
    code = run("accept.only=quick")
    out = capsys.readouterr().out
    path = only(tmp_path)
    results = {
        f"{f.parent.name}/{f.stem}": json.loads(f.read_text())
        for f in path.glob("*/*.json")
        if ".bench" not in f.name
    }
    assert set(results) == {"here/machine", "right/quick", "fast/layer_tiny", "runs/tiny"}
    assert {name: r["status"] for name, r in results.items() if name != "here/machine"} == {
        "right/quick": "pass",
        "fast/layer_tiny": "pass",
        "runs/tiny": "pass",
    }, out
    assert code == (results["here/machine"]["status"] == "fail")
    assert results["right/quick"]["records"]["passed"] > 20
    assert {r["format"] for r in results["fast/layer_tiny"]["records"]} == {"bf16", "fp8"}
    assert len(results["runs/tiny"]["records"]["losses"]) == 4
    assert "Whole runs at real shapes" in (path / "page.md").read_text()
    with tarfile.open(path / "report.tar.gz") as archive:
        assert "acceptance/page.md" in archive.getnames()


@pytest.fixture
def items(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[[Task], Found]]]:
    """One item per section, which passes unless a test puts another in its place."""
    runs: dict[str, Callable[[Task], Found]] = {}

    def passing(name: str) -> Callable[[Task], Found]:
        return lambda task: Found([Claim("pass", name, "yes", "yes", "README.md")])

    def planted(name: str) -> Callable[..., Iterator[Item]]:
        return lambda *_: iter(
            [Item(name, "it", f"Item of {name}", lambda task: runs.get(name, passing(name))(task))]
        )

    for module, name in ((accept.right, "right"), (accept.fast, "fast"), (accept.whole_runs, "runs")):
        monkeypatch.setattr(module, "items", planted(name))
    monkeypatch.setattr(
        accept, "examine", lambda config: runs.get("here", lambda _: [Check("warn", "x", "y", "z")])(config)
    )
    yield runs


@pytest.mark.parametrize("section", ["right", "fast", "runs"])
def test_a_broken_section_fails_alone(run: Run, items, tmp_path: Path, capsys, section: str) -> None:
    def broken(task: Task) -> Found:
        raise RuntimeError("on purpose")

    items[section] = broken
    assert run() == 1
    out = capsys.readouterr().out
    assert "FAIL" in out and "on purpose" in out and "2 claims passed, 0 warnings, 1 failure" in out
    text = (only(tmp_path) / "page.md").read_text()
    assert f"| fail | Item of {section} |" in text and text.count("| pass | Item of ") == 2


def test_a_failing_check_fails(run: Run, items, capsys) -> None:
    items["here"] = lambda config: [Check("fail", "memory", "1 GiB", "buy more")]
    assert run() == 1
    assert "FAIL memory: 1 GiB" in capsys.readouterr().out


def test_what_the_clock_cut_off_goes_on(run: Run, items, tmp_path: Path, capsys) -> None:
    """Also where it had a claim by then; the page keeps what this call did not ask for."""
    calls: list[str] = []

    def counted(name: str, cut: bool, status: str = "pass") -> Callable[[Task], Found]:
        def run_it(task: Task) -> Found:
            calls.append(name)
            return Found([Claim(status, name, "x", "y", "README.md")], cut=cut)

        return run_it

    items["right"], items["fast"] = counted("right", False, "fail"), counted("fast", True, "warn")
    assert run("accept.only=right,fast") == 1
    assert "accept.resume=latest" in capsys.readouterr().out
    items["fast"] = counted("fast", False)
    assert run("accept.only=fast", "accept.resume=latest") == 1, "right has failed all the same"
    out = capsys.readouterr().out
    assert calls == ["right", "fast", "fast"] and "accept.resume" not in out and "FAIL right" in out
    path = only(tmp_path)
    assert "Item of right" in (path / "page.md").read_text() and (path / "report.tar.gz").is_file()


def test_the_latest_is_of_this_host(run: Run, items, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts share a disk, and one's name may begin with another's."""
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    assert run("accept.only=right") == 0
    monkeypatch.setattr("socket.gethostname", lambda: "node-2")
    assert run("accept.only=right") == 0
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    assert run("accept.only=fast", "accept.resume=latest") == 0
    with_fast = [file.parents[1].name for file in (tmp_path / "a").glob("*/fast/*.json")]
    assert len(with_fast) == 1 and not with_fast[0].startswith("node-2-")


def test_an_acceptance_that_is_killed_leaves_page_and_archive(run: Run, items, tmp_path: Path) -> None:
    def killed(task: Task) -> Found:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        raise AssertionError

    items["fast"] = killed
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run() == INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    path = only(tmp_path)
    assert "Item of right" in (path / "page.md").read_text() and (path / "report.tar.gz").is_file()


def test_a_full_disk_is_one_line(run: Run, items, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(accept, "write_archive", full)
    assert run() == BAD_INPUT
    assert "No space left on device" in capsys.readouterr().err


def test_shares_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone item gets all; what is possible shares; what gives nothing in less time gets it."""

    def item(section: str, name: str, **more: object) -> Item:
        return Item(section, name, name, lambda task: Found(), **more)  # type: ignore[arg-type]

    monkeypatch.setattr(accept.time, "monotonic", lambda: 0.0)
    assert accept._seconds(item("fast", "a"), [], 90, {}) == 90
    assert accept._seconds(item("fast", "a"), [item("fast", "b", missing="no")], 90, {}) == 90
    assert accept._seconds(item("fast", "a"), [item("fast", "b")], 90, {}) == 60
    assert accept._seconds(item("fast", "a"), [item("runs", "b")], 60, {}) == 60 * 0.25 / 0.6
    assert accept._seconds(item("fast", "a", least=50), [item("runs", "b")], 60, {}) == 50
    assert accept._seconds(item("fast", "a", least=500), [], 60, {}) == 60


def test_sections_keep_their_shares_where_every_item_takes_all_it_gets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = {"right": 7, "fast": 6, "runs": 5}
    items = [Item(s, str(n), "", lambda task: Found()) for s, count in numbers.items() for n in range(count)]
    clock, ends, taken = 0.0, dict[str, float](), dict.fromkeys(numbers, 0.0)
    monkeypatch.setattr(accept.time, "monotonic", lambda: clock)
    for number, item in enumerate(items):
        seconds = accept._seconds(item, items[number + 1 :], 960 - clock, ends)
        assert seconds > 10
        clock, taken[item.section] = clock + seconds, taken[item.section] + seconds
    assert taken == pytest.approx({"right": 360, "fast": 250, "runs": 350})


def test_what_is_refused(run: Run, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("accept.resume=latest") == BAD_INPUT
    assert "no acceptance to go on with" in capsys.readouterr().err
    assert run("accept.only=fats") == BAD_INPUT
    assert "did you mean fast" in capsys.readouterr().err
    assert run("accept.only=quick,fast") == BAD_INPUT
    assert "names quick and sections" in capsys.readouterr().err
    (tmp_path / "a").write_text("a file")
    assert run("accept.only=here") == BAD_INPUT
    assert "set accept.root" in capsys.readouterr().err
    (tmp_path / "a").unlink()
    assert run("accept.kt=/no/such.whl") == BAD_INPUT
    assert "correct accept.kt" in capsys.readouterr().err
    monkeypatch.setattr(accept, "REPO", tmp_path)
    assert run() == BAD_INPUT
    assert "of a checkout" in capsys.readouterr().err
