"""TensorBoard, MLflow, SwanLab and Trackio: what they are told; the libraries themselves where installed."""

from __future__ import annotations

import importlib.util
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kt_ray.config.schema import TrackingConfig
from kt_ray.errors import UserError
from kt_ray.tracking.library_tracker import LibraryTracker
from kt_ray.tracking.optional_trackers import (
    MlflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
)
from tests.helpers.composing import compose

PATTERNS = {r"layers\.(0|1)\..*": 4}  # MLflow refuses such a name
CONFIG = {"lora": {"rank": 8, "target_modules": ["q_proj"], "rank_pattern": PATTERNS}, "seed": 3}
FIGURES = {"loss": 0.5, "busy_worker-0": 1, "gone": None, "bad": math.nan, "note": "text"}
SHOWN = {"loss": 0.5, "busy_worker-0": 1.0}
TABLE = ("eval/metrics", ["metric", "base"], [["a|b\nc", None], ["loss", 1.5]])
MARKDOWN = "| metric | base |\n| --- | --- |\n| a\\|b c |  |\n| loss | 1.5 |\n"


class Calls:
    """Records every call as (name, arguments, options); `results` has what some give."""

    def __init__(self, **results: Any) -> None:
        self._results = results
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.made.append((name, args, options))
            return self._results.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for made, args, options in self.made if made == name]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "a"
    (path / "adapter").mkdir(parents=True)
    (path / "adapter" / "adapter_config.json").write_text("{}")
    return path


def whole(
    kind: type[LibraryTracker],
    run_dir: Path,
    *,
    first_step: int = 0,
    status: str = "finished",
    **options: Any,
) -> LibraryTracker:
    """A run of two steps with a table and an adapter."""
    tracker = kind(TrackingConfig(tags=["t"], **options), init_timeout=100.0, finish_timeout=60.0)
    tracker.start(run_dir, CONFIG, first_step=first_step)
    for step in (first_step, first_step + 1):
        tracker.log(step, FIGURES)
    tracker.table(*TABLE)
    tracker.artifact(run_dir / "adapter")
    tracker.finish(status)
    return tracker


@pytest.fixture(autouse=True)
def nothing_goes_wrong(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert "switched off" not in caplog.text


def test_tensorboard(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, opened = Calls(), []

    def summary_writer(*args: Any, **options: Any) -> Calls:
        opened.append((args, options))
        return writer

    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = summary_writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    whole(TensorBoardTracker, run_dir)
    assert opened[0][0] == (str(run_dir / "tensorboard"),) and opened[0][1]["purge_step"] is None
    scalars = [args for args, _ in writer.of("add_scalar")]
    assert scalars == [(key, value, step) for step in (0, 1) for key, value in SHOWN.items()]
    (config, _), (table, _) = writer.of("add_text")
    assert config[0] == "config" and "    lora.rank: 8" in config[1] and table == (TABLE[0], MARKDOWN)
    assert writer.made[-1][0] == "close"
    whole(TensorBoardTracker, run_dir, first_step=5)
    assert opened[1][1]["purge_step"] == 5  # these steps come again


def test_mlflow(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = SimpleNamespace(info=SimpleNamespace(run_id="id-1"))
    client = Calls(create_run=run, create_experiment="7")
    module: Any = ModuleType("mlflow")
    module.MlflowClient, module.get_tracking_uri = lambda: client, lambda: "there"
    entities: Any = ModuleType("mlflow.entities")
    entities.Metric, entities.Param = (lambda *values: values), (lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    whole(MlflowTracker, run_dir)
    assert client.of("get_experiment_by_name") == [(("kt_ray",), {})]
    assert client.of("create_run") == [(("7",), {"tags": {"t": "true"}, "run_name": "a"})]
    parameters, *steps = client.of("log_batch")
    wanted = [
        *(("lora.rank", "8"), ("lora.target_modules", "['q_proj']")),
        *(("lora.rank_pattern", str(PATTERNS)), ("seed", "3")),
    ]
    assert parameters == (("id-1",), {"params": wanted})
    for number, (args, options) in enumerate(steps):
        assert args == ("id-1",)
        assert [(key, value, step) for key, value, _, step in options["metrics"]] == [
            (key, value, number) for key, value in SHOWN.items()
        ]
    assert client.of("log_text") == [(("id-1", MARKDOWN, "eval/metrics.md"), {})]
    assert client.of("log_artifacts") == [(("id-1", str(run_dir / "adapter"), "adapter"), {})]
    assert client.made[-1] == ("set_terminated", ("id-1", "FINISHED"), {})
    client.made.clear()
    whole(MlflowTracker, run_dir, first_step=3, status="interrupted", upload_adapter=False)
    assert client.made[0] == ("update_run", ("id-1",), {"status": "RUNNING"})
    assert not client.of("create_run") and not client.of("log_artifacts")
    assert client.made[-1] == ("set_terminated", ("id-1", "KILLED"), {})


@pytest.mark.parametrize(
    ("mode", "key", "wanted", "expected"),
    [
        ("auto", None, None, "offline"),
        ("auto", "k", None, "online"),
        ("auto", "k", "disabled", "disabled"),
        ("offline", "k", "online", "offline"),
        ("online", None, None, "online"),
    ],
)
def test_swanlab(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    key: str | None,
    wanted: str | None,
    expected: str,
) -> None:
    """wanted: by SWANLAB_MODE, which cluster nodes without a network set, or by `swanlab offline`."""
    run, seen = Calls(), []
    run.id, run.url, run.dir = "id-1", "https://there", "here"  # type: ignore[method-assign,assignment]

    def init(**options: Any) -> Calls:
        seen.append(options)
        return run

    module: Any = ModuleType("swanlab")
    module.init, module.Text = init, lambda text: ("text", text)
    set_by_user = {"mode"} if wanted else set()
    module.Settings = lambda **options: SimpleNamespace(
        api_key=key, given=options, mode=wanted or "online", model_fields_set={*options} | set_by_user
    )
    monkeypatch.setitem(sys.modules, "swanlab", module)
    whole(SwanLabTracker, run_dir, mode=mode, entity="us")
    whole(SwanLabTracker, run_dir, mode=mode, first_step=3, status="failed")
    first, again = seen
    assert first["mode"] == again["mode"] == expected and first["workspace"] == "us"
    assert first["project"] == "kt_ray" and first["name"] == "a" and first["tags"] == ["t"]
    assert first["log_dir"] == str(run_dir / "swanlab") and first["config"] == CONFIG
    assert first["settings"].given == {"interactive": False, "terminal": {"proxy_type": "none"}}
    assert (run_dir / "swanlab_id").exists() == (expected != "disabled")
    assert "id" not in first and again.get("id") == ("id-1" if expected == "online" else None)
    logged = run.of("log")
    assert logged[:2] == [((SHOWN,), {"step": 0}), ((SHOWN,), {"step": 1})]
    assert logged[2] == (({TABLE[0]: ("text", MARKDOWN)},), {})
    assert run.of("finish") == [(("success",), {}), (("crashed",), {})]


def test_trackio(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, seen = Calls(), []
    run.name = "a-2"  # type: ignore[method-assign,assignment]

    def init(**options: Any) -> Calls:
        seen.append(options)
        return run

    module: Any = ModuleType("trackio")
    module.init, module.Markdown = init, lambda text: ("markdown", text)
    monkeypatch.setitem(sys.modules, "trackio", module)
    whole(TrackioTracker, run_dir)
    whole(TrackioTracker, run_dir, first_step=3)
    first, again = seen
    assert (first["project"], first["name"], first["resume"]) == ("kt_ray", "a", "never")
    assert (again["name"], again["resume"]) == ("a-2", "allow") and first["config"]["lora.rank"] == 8
    assert run.of("log")[1:3] == [((SHOWN,), {"step": 1}), (({TABLE[0]: ("markdown", MARKDOWN)},), {})]
    assert len(run.of("finish")) == 2


def test_a_start_that_comes_too_late_is_closed_again(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on, closed = threading.Event(), threading.Event()

    class Slow(TensorBoardTracker):
        def _open(self, run_dir: Path, config: Any, first_step: int) -> None:
            go_on.wait(30)

        def _close(self, status: str) -> None:
            assert status == "interrupted"
            closed.set()

    tracker = Slow(TrackingConfig(), init_timeout=0.1)
    tracker.start(run_dir, CONFIG)
    tracker.finish("finished")
    assert not closed.is_set()
    go_on.set()
    assert closed.wait(30)
    assert "its start took longer than 0.1 s" in caplog.text
    caplog.clear()


# --- the libraries themselves, in the environment of a user who has them ----------------------------------


def test_tensorboard_for_real(run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole(TensorBoardTracker, run_dir)
    whole(TensorBoardTracker, run_dir, first_step=1)
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.5), (1, 0.5), (2, 0.5)]
    assert set(events.Tags()["scalars"]) == set(SHOWN)


@pytest.mark.filterwarnings("ignore")  # of its own libraries
def test_mlflow_for_real(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{run_dir.parent}/mlflow.db")
    monkeypatch.chdir(run_dir.parent)
    whole(MlflowTracker, run_dir)
    whole(MlflowTracker, run_dir, first_step=2)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("kt_ray").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "loss")] == [0, 1, 2, 3]
    assert run.data.params["lora.rank"] == "8" and run.info.status == "FINISHED"
    assert {f.path for f in client.list_artifacts(run.info.run_id)} == {"adapter", "eval"}


def test_swanlab_for_real(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("HOME", str(run_dir))
    for name in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(name, raising=False)
    before = sys.stdout
    whole(SwanLabTracker, run_dir)
    assert sys.stdout is before
    (file,) = (run_dir / "swanlab").glob("run-*/*.swanlab")
    assert (run_dir / "swanlab_id").read_text().strip() in file.name
    assert all(name in file.read_bytes() for name in (b"loss", b"busy_worker-0"))


def test_trackio_for_real(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(run_dir / "trackio"))
    trackio = pytest.importorskip("trackio")
    whole(TrackioTracker, run_dir)
    whole(TrackioTracker, run_dir, first_step=2)
    (run,) = trackio.Api().runs("kt_ray")
    assert run.name == "a"
    values = trackio.SQLiteStorage.get_metric_values("kt_ray", "a", "loss")
    assert [(v["step"], v["value"]) for v in values] == [(n, 0.5) for n in range(4)]


# --- before a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tensorboard", "mlflow", "swanlab", "trackio"])
def test_one_that_is_not_installed_is_named_with_its_remedy(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n == name else found(n, *a))
    with pytest.raises(UserError, match=rf"tracking\.name={name} needs {name}.*pip install '?{name}"):
        compose([f"tracking={name}"])
    with pytest.raises(UserError, match=rf"needs {name}"):
        compose([f"tracking.name=[wandb,{name}]"])
    compose([f"tracking={name}", "mode=plan"])


def test_an_unknown_one_in_a_list() -> None:
    with pytest.raises(UserError, match=r"tracking\.name=\[wandb,mlflo\] is not known; did you mean mlflow"):
        compose(["tracking.name=[wandb,mlflo]"])
