"""fuzz.py: a fixed slice of its mutations finds nothing, and what it looks for is found."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kt_ray.errors import UserError

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPO / "benchmarks"))
        return importlib.import_module("fuzz")


def _results(fuzz: Any, found: dict[str, Any], mutations: int, root: Path) -> list[Any]:
    for name, target in found.items():
        fuzz.write_files(root / "good" / name, target.files)
    return list(fuzz.run(found, mutations, 0, root))


def test_no_damage_ends_in_a_traceback(fuzz: Any, tmp_path: Path) -> None:
    """Some hundred mutations over every kind of file; `make fuzz` makes ten thousand."""
    results = _results(fuzz, fuzz.targets(tmp_path), 400, tmp_path)
    assert [result for result in results if result[2] == "fault"] == []
    outcomes = [outcome for _, _, outcome, _ in results]
    assert len(results) > 350 and outcomes.count("refused") > 200 and outcomes.count("read") > 20


def test_the_same_seed_damages_the_same_places(fuzz: Any) -> None:
    content = b'{"a": [1, 2, {"b": "c"}], "d": null}'
    makes = [[fuzz.mutate(fuzz.random.Random(n), "x.json", content) for n in range(200)] for _ in range(2)]
    assert makes[0] == makes[1] and len(set(makes[0])) > 100


def test_what_the_fuzzer_calls_a_fault(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another exception, a signal, and no end; the child is replaced, and the others go on."""
    monkeypatch.setattr(fuzz, "SECONDS", 2.0)
    monkeypatch.setattr(fuzz, "WAIT", 15.0)

    def refuse(place: Path) -> None:
        raise UserError("no good", where=str(place))

    readers = {
        "good": lambda place: None,
        "refused": refuse,
        "raises": lambda place: {}["x"],
        "dies": lambda place: os.kill(os.getpid(), signal.SIGKILL),
        "hangs": lambda place: time.sleep(600),
        "turns": lambda place: sum(1 for _ in itertools.count()),
        "eats": lambda place: bytearray(8 << 30),
        "last": lambda place: None,
    }
    found = {name: fuzz.Target({"a.bin": b"abc"}, ["a.bin"], read) for name, read in readers.items()}
    results = {name: (outcome, what) for name, _, outcome, what in _results(fuzz, found, 1, tmp_path)}
    outcomes = {name: outcome for name, (outcome, _) in results.items()}
    assert outcomes == {
        **dict.fromkeys(readers, "fault"),
        "good": "read",
        "refused": "refused",
        "last": "read",
    }
    for name, what in (
        ("raises", "KeyError"),
        ("dies", "SIGKILL"),
        ("hangs", "no end"),
        ("turns", "no end"),
        ("eats", "MemoryError"),
    ):
        assert what in results[name][1]
