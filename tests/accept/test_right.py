"""Section `right`: marked tests run, outcomes are kept one by one, a failing test is a failure."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from kt_ray.accept import right
from kt_ray.accept.items import REPO, Found, Item, Task
from kt_ray.accept.pytest_plugin import outcomes
from tests.placement.configs import make_hardware

MODULE = """
import os, pathlib, time
import pytest

@pytest.mark.accept("engine", quick=True)
def test_right():
    pass

@pytest.mark.accept("engine")
@pytest.mark.parametrize("n", [1, 2])
def test_once(n):
    done = pathlib.Path(__file__).with_name(f"done{n}")
    assert not done.exists(), "a second time"
    done.touch()

@pytest.mark.accept("engine")
def test_wrong():
    assert os.environ.get("HEALED"), "wrong here"

@pytest.mark.accept("engine")
def test_absent():
    pytest.skip("no such device")

@pytest.mark.accept("lane")
def test_of_another_topic():
    raise AssertionError

def test_of_no_topic():
    raise AssertionError
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "tests" / "test_made.py"
    file.parent.mkdir()
    file.write_text(MODULE)
    monkeypatch.setattr(right, "files_of", lambda topics: [str(file), "-c", str(REPO / "pyproject.toml")])
    return file


def run_tests(folder: Path, seconds: float = 60, quick: bool = False) -> Found:
    items = {item.name: item for item in right.items(make_hardware(), quick)}
    item: Item = items["quick" if quick else "engine"]
    return item.run(Task(folder / item.name, seconds))


def test_a_failing_test_is_a_failure_and_passed_ones_are_not_run_again(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_tests(tmp_path)
    (claim,) = found.claims
    assert claim.status == "fail" and claim.found == "1 failed, 3 passed, 1 skipped"
    assert found.tables["Failed tests"][1][0].endswith("test_wrong")
    assert list(found.notes) == ["1 tests skipped: no such device"]
    monkeypatch.setenv("HEALED", "1")
    (claim,) = run_tests(tmp_path).claims
    assert claim.status == "pass" and claim.found == "4 passed, 1 skipped"
    (claim,) = run_tests(tmp_path).claims
    assert claim.status == "pass", "nothing is left to run"


def test_what_the_clock_cuts_off_is_lost_alone(module: Path, tmp_path: Path) -> None:
    module.write_text(MODULE.replace('assert os.environ.get("HEALED")', "time.sleep(600); assert 0"))
    found = run_tests(tmp_path, seconds=15)
    (claim,) = found.claims
    assert found.cut and claim.status == "warn" and "the time was over" in claim.found
    kept = outcomes(tmp_path / "engine.jsonl")
    assert [entry["outcome"] for entry in kept.values()].count("passed") == 3


def test_a_module_that_cannot_be_imported_is_a_failure(module: Path, tmp_path: Path) -> None:
    module.write_text("import no_such_module\n" + MODULE)
    (claim,) = run_tests(tmp_path).claims
    assert (claim.status, claim.found) == ("fail", "1 failed")


def test_quick_takes_the_quick_ones_alone(module: Path, tmp_path: Path) -> None:
    (claim,) = run_tests(tmp_path, quick=True).claims
    assert (claim.status, claim.found) == ("pass", "1 passed")


def test_every_topic_has_tests_and_every_marker_a_topic() -> None:
    for topic in right.TOPICS:
        assert right.files_of((topic,)), topic
    marked = set()
    for file in (REPO / "tests").rglob("test_*.py"):
        if file != Path(__file__):
            text = file.read_text(encoding="utf-8")
            marked |= {part.partition('"')[0] for part in text.split('mark.accept("')[1:]}
    assert marked == set(right.TOPICS)


def test_without_ray_its_topics_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    found = {item.name: item.missing for item in right.items(make_hardware(), quick=False)}
    assert found["ray"] == found["memory"] == "ray is not installed" and not found["parity"]


def test_each_card_has_items_of_its_own() -> None:
    names = [item.name for item in right.items(make_hardware(gpus=2), quick=False)]
    assert {"parity_cuda0", "parity_cuda1", "lane_cuda1"} < set(names)
    assert names.count("layouts") == 1 and "parity" not in names
