"""metrics.jsonl and its resume; W&B offline for real; trackers that fail while training goes on."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kt_ray.config.schema import TrackingConfig
from kt_ray.tracking import (
    JsonlTracker,
    MlflowTracker,
    MultiTracker,
    WandbTracker,
    make_tracker,
    read_jsonl,
)


def test_jsonl_one_object_per_line_flushed_at_once(tmp_path):
    tracker = JsonlTracker()
    tracker.start(tmp_path, {})
    tracker.log(1, {"step": 1, "loss": np.float32(0.5), "tokens": np.int64(7), "note": "é"})
    tracker.log(2, {"loss": float("nan"), "grad_norm": float("inf")})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == [
        {"step": 1, "loss": 0.5, "tokens": 7, "note": "é"},
        {"step": 2, "loss": None, "grad_norm": None},
    ]
    assert "NaN" not in text
    tracker.finish("finished")
    with pytest.raises(ValueError, match="after finish"):
        tracker.log(3, {})


def test_jsonl_resume_drops_what_will_be_run_again(tmp_path):
    tracker = JsonlTracker()
    tracker.start(tmp_path, {})
    tracker.log(0, {"eval_loss": 4.0})
    for step in range(1, 8):
        tracker.log(step, {"loss": float(step)})
    tracker.finish("failed")
    file = tmp_path / "metrics.jsonl"
    with file.open("a") as handle:
        handle.write('{"step": 8, "lo')  # killed while writing

    resumed = JsonlTracker()
    resumed.start(tmp_path, {}, first_step=5)
    resumed.log(5, {"loss": 50.0})
    resumed.finish("finished")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["step"] for r in records] == [0, 1, 2, 3, 4, 5]
    assert records[-1]["loss"] == 50.0 and records[0]["eval_loss"] == 4.0
    assert list(tmp_path.iterdir()) == [file]


def test_read_jsonl_passes_over_torn_lines(tmp_path):
    file = tmp_path / "m.jsonl"
    assert read_jsonl(file) == []
    file.write_bytes(b'{"step": 1}\n[1]\n{"step": 2}\n{"step": 3, "x": "\xc3')
    assert read_jsonl(file) == [{"step": 1}, {"step": 2}]


class Failing:
    def __init__(self, where: str) -> None:
        self.where, self.calls = where, []

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.where:
            raise RuntimeError("tracker is broken")

    def start(self, run_dir, config, *, first_step=0):
        self._call("start")

    def log(self, step, metrics):
        self._call("log")

    def artifact(self, path):
        self._call("artifact")

    def finish(self, status):
        self._call("finish")


@pytest.mark.parametrize("where", ["start", "log", "artifact", "finish"])
def test_a_failing_tracker_is_left_out_and_the_others_go_on(tmp_path, where, caplog):
    broken = Failing(where)
    multi = MultiTracker([broken, JsonlTracker()])
    multi.start(tmp_path, {})
    multi.log(1, {"loss": 1.0})
    multi.log(2, {"loss": 2.0})
    multi.artifact(tmp_path)
    multi.finish("finished")
    assert [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0, 2.0]
    assert broken.calls[-1] == where and broken.calls.count(where) == 1
    assert caplog.text.count("training goes on") == 1


def test_tables_go_to_those_that_take_them(tmp_path, caplog):
    class Tables(Failing):
        def table(self, name, columns, rows):
            self._call(name)

    good, broken, plain_one = Tables("nowhere"), Tables("eval"), Failing("eval")
    multi = MultiTracker([good, broken, plain_one])
    multi.table("eval", ["metric"], [["loss"]])
    multi.table("again", ["metric"], [["loss"]])
    assert (good.calls, broken.calls, plain_one.calls) == (["eval", "again"], ["eval"], [])
    assert multi.trackers == [good, plain_one] and "training goes on" in caplog.text


def test_make_tracker():
    assert [type(t) for t in make_tracker(TrackingConfig()).trackers] == [JsonlTracker]
    extra = Failing("never")
    assert make_tracker(TrackingConfig(), [extra]).trackers[1:] == [extra]
    both = make_tracker(TrackingConfig(name="wandb"), [extra])
    assert [type(t) for t in both.trackers] == [JsonlTracker, WandbTracker, Failing]
    several = make_tracker(TrackingConfig(name=["mlflow", "jsonl", "wandb", "mlflow"]))
    assert [type(t) for t in several.trackers] == [JsonlTracker, MlflowTracker, WandbTracker]


# --- W&B -------------------------------------------------------------------------------------------------


@pytest.fixture
def run_dir(tmp_path) -> Path:
    path = tmp_path / "a"
    path.mkdir()
    return path


def wandb_tracker(*, mode: str = "auto", **timeouts: float) -> WandbTracker:
    return WandbTracker(TrackingConfig(tags=("t",), mode=mode), **timeouts)


def wandb_id(run_dir: Path) -> str | None:
    file = run_dir / "wandb_id"
    return file.read_text().strip() if file.exists() else None


def test_wandb_offline_for_real_and_resumed(run_dir, monkeypatch, caplog):
    """Without a key: offline; the file on disk holds config, figures and adapter; the id is kept."""
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", "/nonexistent")
    monkeypatch.setenv("HOME", str(run_dir.parent))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(run_dir.parent / "wandb-config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(run_dir.parent / "wandb-cache"))
    monkeypatch.setenv("WANDB_DATA_DIR", str(run_dir.parent / "wandb-data"))
    adapter = run_dir / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    ids = []
    for first_step in (0, 3):
        tracker = wandb_tracker(finish_timeout=120.0)
        tracker.start(run_dir, {"lora": {"rank": 424242}}, first_step=first_step)
        assert tracker.enabled, caplog.text
        assert tracker.mode == "offline"
        tracker.log(first_step + 1, {"step": first_step + 1, "loss": 1.5})
        tracker.artifact(adapter)
        tracker.finish("finished")
        ids.append(wandb_id(run_dir))
    assert ids[0] and ids[0] == ids[1]
    assert "switched off" not in caplog.text
    files = sorted((run_dir / "wandb").glob(f"offline-run-*-{ids[0]}/run-{ids[0]}.wandb"))
    assert files
    content = files[0].read_bytes()
    for expected in (b"424242", b"loss", b"adapter_config.json", b"adapter-a"):
        assert expected in content, expected


def fake_wandb(monkeypatch, *, init=None, log=None, finish=None, given="") -> SimpleNamespace:
    """A stand-in for the wandb module; functions given replace the harmless ones. `given`: id of the run that
    init returns in the place of the one asked for."""
    seen = SimpleNamespace(logged=[], init=None, exit_code=None)

    def do_init(**kwargs):
        seen.init = kwargs
        if init is not None:
            init()
        return SimpleNamespace(
            id=given or kwargs["id"],
            url="https://example.test/run",
            define_metric=lambda *a, **k: None,
            log=log or seen.logged.append,
            log_artifact=lambda a: None,
            finish=finish or (lambda exit_code: setattr(seen, "exit_code", exit_code)),
        )

    module = SimpleNamespace(
        init=do_init, Settings=lambda **k: k, api=SimpleNamespace(api_key=None), Artifact=lambda *a, **k: None
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return seen


def drive(run_dir: Path, tracker: WandbTracker, steps: int = 3) -> float:
    """A whole run with metrics.jsonl beside it; returns its seconds."""
    began = time.monotonic()
    multi = MultiTracker([JsonlTracker(), tracker])
    multi.start(run_dir, {})
    for step in range(1, steps + 1):
        multi.log(step, {"loss": 1.0 / step})
    multi.finish("finished")
    assert len(read_jsonl(run_dir / "metrics.jsonl")) == steps
    return time.monotonic() - began


def fail():
    raise OSError("no\nnetwork")


def warnings_of(caplog) -> list[str]:
    """Of kt_ray: libraries' threads outlive the tests that started them."""
    own = [r for r in caplog.records if r.name.startswith("kt_ray")]
    return [r.getMessage() for r in own if r.levelno >= logging.WARNING]


def test_wandb_init_raises(run_dir, monkeypatch, caplog):
    fake_wandb(monkeypatch, init=fail)
    assert drive(run_dir, wandb_tracker()) < 25
    assert warnings_of(caplog) == ["W&B is switched off for this run, training goes on: OSError: no network"]
    assert wandb_id(run_dir) is None


def test_wandb_is_not_installed(run_dir, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    drive(run_dir, wandb_tracker())
    (warning,) = warnings_of(caplog)
    assert "ModuleNotFoundError" in warning


def test_wandb_log_raises(run_dir, monkeypatch, caplog):
    calls = []

    def log(record):
        calls.append(record)
        sys.exit(3)  # not even this may get through

    seen = fake_wandb(monkeypatch, log=log)
    tracker = wandb_tracker()
    drive(run_dir, tracker)
    tracker._thread.join(60)
    assert len(calls) == 1 and len(warnings_of(caplog)) == 1
    assert seen.exit_code == 1  # closed: the next job of a multirun would get this run


def test_wandb_does_not_log_into_another_jobs_run(run_dir, monkeypatch, caplog):
    seen = fake_wandb(monkeypatch, given="another")
    drive(run_dir, wandb_tracker())
    (warning,) = warnings_of(caplog)
    assert "returned run another" in warning
    assert seen.logged == [] and seen.exit_code is None and wandb_id(run_dir) is None


@pytest.mark.parametrize("stuck", ["init", "log", "finish"])
def test_wandb_hangs(run_dir, monkeypatch, caplog, stuck):
    release = threading.Event()
    try:
        fake_wandb(monkeypatch, **{stuck: lambda *a, **k: release.wait(30)})
        assert drive(run_dir, wandb_tracker(init_timeout=0.3, finish_timeout=0.3)) < 25
        (warning,) = warnings_of(caplog)
        assert "switched off" in warning
    finally:
        release.set()


def test_wandb_that_falls_behind_is_switched_off(run_dir, monkeypatch, caplog):
    release = threading.Event()
    try:
        monkeypatch.setattr("kt_ray.tracking.library_tracker._QUEUE", 8)
        fake_wandb(monkeypatch, log=lambda record: release.wait(30))
        assert drive(run_dir, wandb_tracker(), steps=50) < 25
        (warning,) = warnings_of(caplog)
        assert "wait to be sent" in warning
    finally:
        release.set()


def test_wandb_gets_the_resolved_config_and_every_step(run_dir, monkeypatch, caplog):
    seen = fake_wandb(monkeypatch)
    (run_dir / "wandb_id").write_text("kept-id\n")
    config = {"lora": {"rank": 8}}
    tracker = wandb_tracker(mode="online")
    tracker.start(run_dir, config, first_step=4)
    tracker.log(4, {"loss": 2.0})
    tracker.finish("failed")
    assert seen.init["id"] == "kept-id" == wandb_id(run_dir) and seen.init["resume"] == "allow"
    assert seen.init["mode"] == "online" and seen.init["tags"] == ["t"] and seen.init["name"] == "a"
    assert seen.init["config"] == config
    assert seen.logged == [{"loss": 2.0, "step": 4}] and seen.exit_code == 1
    assert warnings_of(caplog) == []


@pytest.mark.parametrize(
    ("mode", "key", "wanted", "expected"),
    [
        ("auto", None, None, "offline"),
        ("auto", "k" * 40, None, "online"),
        ("auto", "k" * 40, "disabled", "disabled"),
        ("offline", "k" * 40, "online", "offline"),
    ],
)
def test_wandb_mode(run_dir, monkeypatch, mode, key, wanted, expected):
    """The variable of W&B's own, which cluster nodes without a network set."""
    seen = fake_wandb(monkeypatch)
    if wanted:
        monkeypatch.setenv("WANDB_MODE", wanted)
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
    tracker = wandb_tracker(mode=mode)
    tracker.start(run_dir, {})
    assert tracker.mode == seen.init["mode"] == expected and bool(tracker.url) == (expected == "online")
    tracker.finish("finished")


def test_tracking_imports_neither_ray_nor_any_tracker():
    code = (
        "import sys, kt_ray.tracking\n"
        "libraries = {'wandb', 'tensorboard', 'mlflow', 'swanlab', 'trackio'}\n"
        "print(sorted({'ray', 'torch', 'matplotlib', *libraries} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.strip() == "[]"


def test_wandb_tables_offline_for_real(run_dir, monkeypatch):
    """A table is a file of the offline run, with its columns and rows; another job opens another run."""
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(run_dir.parent / "home"))
    tracker = wandb_tracker(mode="offline", finish_timeout=120.0)
    tracker.start(run_dir, {})
    other = wandb_tracker(mode="offline", finish_timeout=120.0)
    (run_dir / "b").mkdir()
    other.start(run_dir / "b", {})
    assert other.enabled and other._run.id == wandb_id(run_dir / "b") != wandb_id(run_dir)
    other.finish("finished")
    tracker.table(
        "eval/metrics", ["metric", "base", "adapter"], [["loss", None, 1.5], ["rouge-l", 2.0, 30.0]]
    )
    tracker.finish("finished")
    (file,) = run_dir.glob("wandb/offline-run-*/files/media/table/eval/*.table.json")
    written = json.loads(file.read_text())
    assert written["columns"] == ["metric", "base", "adapter"]
    assert written["data"] == [["loss", None, 1.5], ["rouge-l", 2.0, 30.0]]


def test_figures_outlive_a_full_disk(tmp_path, monkeypatch, caplog):
    """Lines that could not be written, or only in part, are written with the next one."""
    tracker = JsonlTracker()
    tracker.start(tmp_path, {})
    tracker.log(0, {"loss": 0.5})
    real = tracker._file

    class Full:
        room = 0
        fileno = real.fileno

        def write(self, data):
            if not self.room:
                raise OSError(28, "No space left on device")
            part, self.room = data[: self.room], max(0, self.room - len(data))
            return real.write(part)

    disk = tracker._file = Full()
    tracker.log(1, {"loss": 1.5})
    disk.room = 7
    tracker.log(2, {"loss": 2.5})
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[1] == '{"step"'
    tracker._file = real
    tracker.log(3, {"loss": 3.5})
    tracker.finish("finished")
    assert [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [0.5, 1.5, 2.5, 3.5]
    assert caplog.text.count("its lines wait in memory") == 1
    tracker.start(tmp_path, {}, first_step=4)
    real = tracker._file
    disk.room, disk.fileno, disk.close, tracker._file = 0, real.fileno, real.close, disk
    tracker.log(4, {"loss": 4.5})
    tracker.finish("finished")
    assert "metrics.jsonl cannot be written at the end, lines that are lost: 1: [Errno 28]" in caplog.text


def test_a_disk_that_is_full_at_the_start_of_a_resumed_run(tmp_path, monkeypatch):
    """The figures of steps that come again are cut off later."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 9.0}\n')

    def full(path, text):
        raise OSError(28, "No space left on device")

    tracker = JsonlTracker()
    with monkeypatch.context() as patch:
        patch.setattr("kt_ray.tracking.jsonl.write_atomic", full)
        tracker.start(tmp_path, {}, first_step=2)
        tracker.log(2, {"loss": 2.5})
    tracker.log(3, {"loss": 3.5})
    tracker.finish("finished")
    assert [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [0.5, 2.5, 3.5]
