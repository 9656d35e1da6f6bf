"""For pytest: the tests of one topic of mode=accept, each outcome written as soon as it is known.

    python -m pytest -p kt_ray.accept.pytest_plugin --accept-topic parity --accept-out FILE tests/model

A test belongs to a topic by the marker `accept("topic")`; those with quick=True are run by accept.only=quick.
Tests that FILE says have passed are not run again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def outcomes(file: Path) -> dict[str, dict[str, Any]]:
    """Test -> {outcome, seconds, message}, the last line of each counts.

    A module that could not be imported counts until one of its tests has run.
    """
    found: dict[str, dict[str, Any]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:  # cut off while it was written
            continue
        test = entry.pop("test")
        found.pop(test.partition("::")[0], None)
        found[test] = entry
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-topic", action="append", default=[])
    parser.addoption("--accept-quick", action="store_true")
    parser.addoption("--accept-out", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    if config.option.accept_out is not None:
        config.pluginmanager.register(_Recorder(config.option.accept_out))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    topics, quick = set(config.option.accept_topic), config.option.accept_quick
    if not topics:
        return
    passed = {
        test for test, entry in outcomes(config.option.accept_out).items() if entry["outcome"] == "passed"
    }

    def chosen(item: pytest.Item) -> bool:
        markers = [m for m in item.iter_markers("accept") if m.args[0] in topics]
        return item.nodeid not in passed and any(m.kwargs.get("quick") or not quick for m in markers)

    kept = [item for item in items if chosen(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


class _Recorder:
    """Appends a line per test."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        message = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            message = str(report.longrepr)[-2000:]
        entry = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "message": message,
        }
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            entry = {"test": report.nodeid, "outcome": "failed", "message": str(report.longrepr)[-2000:]}
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**entry, "seconds": 0.0}) + "\n")
