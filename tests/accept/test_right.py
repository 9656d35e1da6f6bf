"""Section `right`: marked tests run, outcomes are kept one by one, a failing test is a failure."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kt_ray.accept import right
from kt_ray.accept.items import REPO, Directory, Result, Task, complete
from kt_ray.config.schema import Config
from tests.placement.configs import make_config, make_hardware

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


def run_tests(folder: Path, seconds: float = 240, quick: bool = False) -> Result:
    items = {item.name: item for item in right.items(make_config(), make_hardware(), quick)}
    return complete(items["quick" if quick else "engine"], Directory(folder), seconds)


def test_a_failing_test_is_a_failure_and_passed_ones_are_not_run_again(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run_tests(tmp_path)
    (claim,) = result.claims
    assert (result.status, result.cut, claim.found) == ("fail", False, "1 failed, 3 passed, 1 skipped")
    assert result.tables["Failed tests"][1][0].endswith("test_wrong")
    assert result.notes == ("1 test skipped: no such device",)
    monkeypatch.setenv("HEALED", "1")
    result = run_tests(tmp_path)
    assert (result.status, result.claims[0].found) == ("pass", "4 passed, 1 skipped")
    assert run_tests(tmp_path).status == "pass", "nothing is left to run"


def test_what_the_clock_cuts_off_goes_on(module: Path, tmp_path: Path, over_when: Any) -> None:
    """Neither a pass nor a failure; what passed by then is not done again."""
    late = 'pathlib.Path(__file__).with_name("late").touch(); time.sleep(600); assert 0'
    module.write_text(MODULE.replace('assert os.environ.get("HEALED")', late))
    over_when(module.with_name("late").exists)
    result = run_tests(tmp_path)
    assert (result.status, result.cut, result.claims) == ("cut", True, ())
    assert "3 passed" in result.notes[0] and "the time was over" in result.notes[0]
    module.write_text(MODULE.replace('os.environ.get("HEALED")', "True"))
    module.with_name("late").unlink()
    result = run_tests(tmp_path)
    assert (result.status, result.claims[0].found) == ("pass", "4 passed, 1 skipped")


def test_cut_before_the_first_test_has_ended(module: Path, tmp_path: Path) -> None:
    result = run_tests(tmp_path, seconds=0.2)
    assert (result.status, result.cut) == ("cut", True)


def test_a_module_that_cannot_be_imported_is_a_failure_until_it_can(module: Path, tmp_path: Path) -> None:
    module.write_text("import no_such_module\n" + MODULE)
    result = run_tests(tmp_path)
    assert (result.status, result.claims[0].found) == ("fail", "1 failed")
    module.write_text(MODULE.replace('os.environ.get("HEALED")', "True"))
    assert run_tests(tmp_path).claims[0].found == "4 passed, 1 skipped"


def test_nothing_passes_where_every_test_is_skipped(module: Path, tmp_path: Path) -> None:
    module.write_text(
        MODULE[: MODULE.index('@pytest.mark.accept("engine", quick')]
        + MODULE[MODULE.index('@pytest.mark.accept("engine")\ndef test_absent') :]
    )
    result = run_tests(tmp_path)
    assert (result.status, result.notes) == ("skip", ("1 test skipped: no such device",))


def test_quick_takes_the_quick_ones_alone(module: Path, tmp_path: Path) -> None:
    assert run_tests(tmp_path, quick=True).claims[0].found == "1 passed"


def test_every_topic_has_tests_and_every_marker_a_topic() -> None:
    for topic in right.TOPICS:
        assert right.files_of((topic,)), topic
    marked = set()
    for file in (REPO / "tests").rglob("test_*.py"):
        if file != Path(__file__):
            text = file.read_text(encoding="utf-8")
            marked |= {part.partition('"')[0] for part in text.split('mark.accept("')[1:]}
    assert marked == set(right.TOPICS)


def test_what_cannot_run_is_said_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(config: Config) -> dict[str, str]:
        return {item.name: item.missing for item in right.items(config, make_hardware(), quick=False)}

    assert missing(make_config())["memory"] == "there is no GPU"
    found = missing(make_config(cluster="local"))
    assert found["ray"] == "not with cluster=local" and not found["parity"]
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("ray", "pytest_timeout") else find(name)
    )
    assert "pytest_timeout not installed" in missing(make_config())["engine"]


def test_each_card_has_items_of_its_own_and_is_named_as_cuda_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = make_hardware(gpus=2)
    cards = (replace(hardware.gpus[0], uuid="GPU-aa"), replace(hardware.gpus[1], uuid="GPU-bb"))
    items = {i.name: i for i in right.items(make_config(), replace(hardware, gpus=cards), quick=False)}
    assert {"parity_cuda0", "parity_cuda1", "lane_cuda1", "layouts"} < set(items) and "parity" not in items
    seen: list[tuple[Sequence[str], Mapping[str, str]]] = []

    def run(self: Task, command: Sequence[str], environment: Mapping[str, str]) -> int:
        seen.append((command, environment))
        return 0

    monkeypatch.setattr(Task, "run", run)
    for name in ("parity_cuda0", "parity_cuda1", "layouts"):
        complete(items[name], Directory(tmp_path), 60)
    assert [environment.get("CUDA_VISIBLE_DEVICES") for _, environment in seen] == ["GPU-aa", "GPU-bb", None]
    assert ["gpu" in command for command, _ in seen] == [False, True, False]
