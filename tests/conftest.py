"""For all tests: one torch thread unless a test asks for more, idle threads that sleep as in a run, and an
interrupt that interrupts.

OpenMP threads that outnumber free cores spin against each other; with parallel test workers on two
cores that turns seconds into minutes. A run sets how long they spin before it imports torch
(kt_ray/torch_environment.py); a run inside a test comes too late for that. Set before torch is imported.

A shell that starts pytest in the background has it ignore SIGINT, and so would every program that tests
start and end by it.
"""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins

from kt_ray import torch_environment
from kt_ray.config.files import conf_dir

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch_environment.apply()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Modules whose tests take a core for many seconds: all of them are `slow`, and `make quick` does not even
# import them. Single slow tests elsewhere have the marker themselves.
SLOW = (
    *("actors/ray/test_ray_leases.py", "adapter/test_adapter_dir.py", "checkpoint/test_corrupt.py"),
    *("config/test_cli.py", "config/test_launch.py"),
    *("data/test_released_templates.py", "doctor/test_measure_rates.py"),
    *("experts/test_lane_host.py", "generate/test_generator.py", "generate/test_several_adapters.py"),
    *("model/test_families.py", "model/test_routing.py", "model/test_stage_parity.py"),
    *("modes/test_eval_run.py", "modes/test_predict.py", "modes/test_results.py"),
    *("native/test_peak_memory.py", "native/test_threads.py", "recipe/test_recipe_runs.py"),
    *("runs/test_after_training.py", "runs/test_saving.py", "test_adapter_of_run.py", "test_bad_input.py"),
    *("test_doc_commands.py", "test_doc_plans.py", "test_packed_runs.py", "test_runs.py"),
    *("tools/test_stopping.py", "train/test_family_parity.py", "train/test_gguf.py"),
    *("train/test_lane_runs.py", "train/test_layouts.py", "train/test_options.py"),
    *("train/test_placement.py", "train/test_preference_runs.py", "train/test_recovery.py"),
    *("train/test_timeline.py", "transport/test_links.py"),
)
TESTS = Path(__file__).parent
CONF = conf_dir()


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Before each job Hydra composes all of it once more, to learn hydra.mode, which no test sets, and parses
    each file of conf/ anew. Processes that tests start run Hydra as it is."""
    Plugins.instance()  # registers the sources
    files: Any = SourcesRegistry.instance().resolve("file")
    parse, parsed = files.load_config, {}

    def load_config(source: Any, config_path: str) -> Any:
        if Path(source.path) != CONF:
            return parse(source, config_path)
        if config_path not in parsed:
            parsed[config_path] = parse(source, config_path)
        return copy.deepcopy(parsed[config_path])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hydra._internal.hydra.Hydra.get_mode", lambda *_, **__: None)
        patch.setattr(files, "load_config", load_config)
        yield


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[pytest.MonkeyPatch]:
    """The demo model is built once for a module, and not into the user's cache. The patch ends with it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KT_RAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield patch


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The inodes of the files that were flushed to the disk."""
    inodes: set[int] = set()
    fsync = os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        inodes.add(os.fstat(fd).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return inodes


def is_slow(path: Path) -> bool:
    return path.is_relative_to(TESTS) and str(path.relative_to(TESTS)) in SLOW


def pytest_configure() -> None:
    absent = [name for name in SLOW if not (TESTS / name).is_file()]
    if absent:
        raise pytest.UsageError(f"SLOW in tests/conftest.py names files that are not there: {absent}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if "not slow" in config.option.markexpr and is_slow(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_slow(item.path):
            item.add_marker("slow")
