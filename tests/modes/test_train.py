"""The whole command: stopped by a signal and resumed as it says; killed and started again by its parent."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kt_ray import supervisor
from kt_ray.checkpoint.housekeeping import best_step
from kt_ray.config.schema import Config, TrainerConfig
from kt_ray.modes import train
from kt_ray.runs.rundir import RunDir
from kt_ray.train.trainer import Events
from kt_ray.train.trainer import Summary as TrainerSummary
from tests.checkpoint.test_training import save

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    *("cluster=local", "data.limit=24", "trainer.batch_size=4", "trainer.eval_every=0"),
    *("eval.after_training=0", "trainer.max_steps=14", "tracking.plot=false", "run.name=a"),
)


def start(root: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "launch.py", *RUN, f"run.root={root}", *more],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def steps(run: Path) -> int:
    try:
        return len((run / "metrics.jsonl").read_text().splitlines())
    except OSError:
        return 0


def await_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 240
    while steps(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)


def locked_by(run: Path) -> int:
    """The process id of its driver; 0 while that changes."""
    try:
        return int(json.loads((run / ".lock").read_text())["pid"])
    except (OSError, ValueError):
        return 0


def result(run: Path) -> tuple[list[tuple[int, float]], bytes]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(r["step"], r["loss"]) for r in records], (run / "adapter/adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("undisturbed")
    process = start(root)
    assert process.communicate()[1] is not None and process.returncode == 0
    yield root / "a"


@pytest.mark.slow
def test_a_signal_saves_and_the_line_it_prints_goes_on(tmp_path: Path, undisturbed: Path) -> None:
    process = start(tmp_path)
    await_step(process, tmp_path / "a", 3)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=240)[1]
    assert process.returncode == 75, error
    assert "SIGTERM: saving within about 15 s" in error and "Traceback" not in error
    line = error.strip().splitlines()[-1]
    taken = steps(tmp_path / "a")
    assert line.startswith(f"SIGTERM: stopped after step {taken} of 14, saved: step_{taken:06d}. To go on: ")
    command = shlex.split(line.partition("To go on: ")[2])
    assert command[:2] == ["python", "launch.py"] and command[2:] == [f"resume={tmp_path / 'a'}"]
    subprocess.run([sys.executable, *command[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    assert result(tmp_path / "a") == result(undisturbed)


@pytest.mark.slow
def test_killed_drivers_need_no_hand(tmp_path: Path, undisturbed: Path) -> None:
    supervisor = start(tmp_path, "trainer.restarts=5", "trainer.save_every=2")
    run = tmp_path / "a"
    for step in (3, 7):
        await_step(supervisor, run, step)
        child = locked_by(run)
        assert child not in (0, supervisor.pid)  # 0 would be pytest and all that it started
        os.kill(child, signal.SIGKILL)
        while locked_by(run) == child and supervisor.poll() is None:  # until its successor is there
            time.sleep(0.02)
    error = supervisor.communicate(timeout=240)[1]
    assert supervisor.returncode == 0, error
    assert error.count("supervisor: the driver died (SIGKILL)") == 2
    assert result(run) == result(undisturbed)


@pytest.mark.slow
def test_a_second_driver_is_refused_and_hurts_nothing(tmp_path: Path, undisturbed: Path) -> None:
    first = start(tmp_path, "trainer.save_every=2")
    await_step(first, tmp_path / "a", 3)
    first.send_signal(signal.SIGSTOP)  # it would have ended meanwhile
    for more in ("run.overwrite=true", "trainer.resume=latest"):
        second = start(tmp_path, more)
        error = second.communicate(timeout=240)[1]
        assert second.returncode == 2 and f"process {first.pid} on" in error, error
    first.send_signal(signal.SIGCONT)
    first.communicate(timeout=240)
    assert first.returncode == 0 and result(tmp_path / "a") == result(undisturbed)


def test_a_signal_while_the_held_out_questions_are_asked_ends_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "before_and_after", interrupted)
    questions: Any = [None] * 5
    rest: Any = (RunDir(tmp_path / "a"), None, None)
    assert train._answer(SimpleNamespace(), questions, *rest) == ()
    told = capsys.readouterr().out
    assert told.endswith(
        f"to ask them: python launch.py resume={tmp_path / 'a'} mode=eval generate.limit=5\n"
    )


@pytest.mark.parametrize(("first", "steps"), [(0, [0, 2, 4]), (2, [4]), (None, [])])
def test_a_driver_that_was_started_again_knows_what_the_command_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int | None, steps: list[int]
) -> None:
    values = {0: "1.5", 2: "null", 4: "1.5", 6: "1.5"}
    lines = [f'{{"step": {step}, "eval_loss": {value}}}\n' for step, value in values.items()]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    monkeypatch.setattr(supervisor, "began", None if first is None else 1.0)
    monkeypatch.setattr(supervisor, "first_step", first or 0)
    known = train._evaluations(RunDir(tmp_path, continued=True), "loss", 4)
    assert [step for step, _ in known] == steps
    assert all(math.isnan(value) if step == 2 else value == 1.5 for step, value in known)


class Scripted:
    """A trainer that takes no step: the resumed state is the best, then another one is evaluated."""

    marks, owes = True, False
    stop = SimpleNamespace(name="")
    policy = load = None

    def __init__(self, config: Any, cluster: Any, batches: Any, events: Events, **options: Any) -> None:
        self.events, self.kept = events, options["kept"]
        Scripted.owes = options["owes_evaluation"]

    def recent(self, step: int) -> list[Any]:
        return []

    def run(self) -> TrainerSummary:
        if self.marks:
            self.events.best(4, 4.5)
            self.kept = (4, 4.5)
        return TrainerSummary(steps=2, eval_losses={6: 7.5, **({4: 4.5} if self.marks else {}), 8: 7.0})

    def with_all_steps(self, work: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("marks", "kept"), [(True, None), (False, (4, 4.5)), (False, (8, 7.0)), (False, (2, 4.6))]
)
def test_the_best_of_a_run_that_began_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: bool, kept: tuple[int, float] | None
) -> None:
    """Of another run, without its held-out loss; or of its own, which marked one before.

    A state that is better than the marked one, and not marked itself, is looked at again: the driver died
    between the two.
    """
    monkeypatch.setattr(train, "Trainer", Scripted)
    monkeypatch.setattr(Scripted, "marks", marks)
    monkeypatch.setattr(train, "best_so_far", lambda *_: kept)
    monkeypatch.setattr(train, "save_checkpoint", lambda *arguments: save(tmp_path, arguments[3]))
    config = Config(trainer=TrainerConfig(save_best=True))
    data = SimpleNamespace(train=[])
    batches = SimpleNamespace(total_steps=8, steps_per_epoch=8)
    prepared: Any = SimpleNamespace(config=config, batches=batches, load=None, data=data, eval_digest="rows")
    resume: Any = SimpleNamespace(manifest=SimpleNamespace(step=4), recent=())
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "eval_loss": 4.5}\n')
    resume.directory = tmp_path / "checkpoints" / "step_000004"
    rest: Any = (None, None, resume, 0.0, None)
    continued = kept is not None
    summary, _ = train._train(prepared, RunDir(tmp_path, continued=continued), *rest)
    assert Scripted.owes == (kept != (4, 4.5))  # another run's figure says nothing here
    assert (best_step(tmp_path / "checkpoints") == 4) == marks
    assert summary.epochs == 0.25  # not all rows, where the run is shorter than an epoch
    assert (summary.eval_before, summary.eval_after) == (
        (7.5, 7.0) if kept == (8, 7.0) else (None, (kept or (4, 4.5))[1])
    )
    # Nor does the run's own, where no checkpoint of these rows is marked as the best: save_best is new, or
    # the run goes back. A driver that was started again knows what its command evaluated.
    for known in ([], [(2, 5.0)]):
        monkeypatch.setattr(train, "_evaluations", lambda *_, known=known: known)
        train._train(prepared, RunDir(tmp_path, continued=True), *rest)
        assert Scripted.owes == (kept != (4, 4.5))


@pytest.mark.parametrize("gone", [False, True])
def test_a_best_checkpoint_that_is_gone_gives_neither_adapter_nor_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: bool
) -> None:
    best = tmp_path / "checkpoints" / "step_000004"

    class Finishing(Scripted):
        def with_all_steps(self, work: Any) -> None:
            if gone:
                shutil.rmtree(best)
            work()

    monkeypatch.setattr(train, "Trainer", Finishing)
    monkeypatch.setattr(train, "save_checkpoint", lambda *arguments: save(tmp_path, arguments[3]))
    monkeypatch.setattr(train, "publish_adapter", lambda *_: [])
    monkeypatch.setattr(train, "_write_env", lambda *_: [])
    prepared: Any = SimpleNamespace(
        config=Config(trainer=TrainerConfig(save_best=True)),
        batches=SimpleNamespace(total_steps=8, steps_per_epoch=8),
        data=SimpleNamespace(train=[]),
        load=None,
        eval_digest="rows",
    )
    restored: list[str] = []
    cluster: Any = SimpleNamespace(restore=lambda path, step: restored.append(path))
    summary, _ = train._train(prepared, RunDir(tmp_path), cluster, None, None, 0.0, None)  # type: ignore[arg-type]
    assert restored == ([] if gone else [str(best)])
    assert summary.eval_after == (7.0 if gone else 4.5)
    assert ("not of the best one: not a complete checkpoint" in caplog.text) == gone
    assert best_step(tmp_path / "checkpoints") == (None if gone else 4)


@pytest.mark.parametrize(("first", "steps", "loss", "longest"), [(2, 4, 3.0, 64.0), (4, 2, 1.0, None)])
def test_a_driver_that_was_started_again_sums_up_the_whole_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    steps: int,
    loss: float,
    longest: float | None,
) -> None:
    class Again(Scripted):
        def __init__(self, *rest: Any, **options: Any) -> None:
            super().__init__(*rest, **options)
            assert options["longest_step"] == longest

        def run(self) -> TrainerSummary:
            return TrainerSummary(steps=2, losses=[1.0, 0.5])

    monkeypatch.setattr(train, "Trainer", Again)
    monkeypatch.setattr(supervisor, "began", time.monotonic() - 100)
    monkeypatch.setattr(supervisor, "first_step", first)
    lines = [{"step": step, "loss": 6.0 - step, "seconds": 60 + step} for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepared: Any = SimpleNamespace(
        config=Config(),
        batches=SimpleNamespace(total_steps=8, steps_per_epoch=8),
        data=SimpleNamespace(train=[]),
        load=None,
    )
    resume: Any = SimpleNamespace(manifest=SimpleNamespace(step=4), recent=(), directory=tmp_path / "c" / "s")
    rest: Any = (None, None, resume, time.monotonic(), None)
    summary, _ = train._train(prepared, RunDir(tmp_path, continued=True), *rest)
    assert (summary.steps, summary.epochs) == (steps, steps / 8) and summary.seconds >= 100
    assert (summary.first_loss, summary.last_loss) == (loss, 0.5)


@pytest.mark.parametrize(
    ("continued", "loss", "logged"), [(True, 4.5, []), (True, 4.4, [4]), (False, 4.5, [4])]
)
def test_a_figure_that_is_measured_again_is_recorded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, continued: bool, loss: float, logged: list[int]
) -> None:
    """As where trainer.save_best is new; over other rows it is another figure."""

    class Again(Scripted):
        def run(self) -> TrainerSummary:
            self.events.on_eval(4, loss)
            self.events.on_eval(6, 4.5)
            return TrainerSummary()

    monkeypatch.setattr(train, "Trainer", Again)
    monkeypatch.setattr(train, "best_so_far", lambda *_: None)
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "eval_loss": 4.5}\n')
    prepared: Any = SimpleNamespace(
        config=Config(trainer=TrainerConfig(save_best=True)),
        batches=SimpleNamespace(total_steps=8, steps_per_epoch=8),
        data=SimpleNamespace(train=[]),
        load=None,
        eval_digest="",
    )
    resume: Any = SimpleNamespace(manifest=SimpleNamespace(step=4), recent=(), directory=tmp_path / "c" / "s")
    steps: list[int] = []
    tracker: Any = SimpleNamespace(log=lambda step, _: steps.append(step))
    cluster: Any = None
    train._train(prepared, RunDir(tmp_path, continued=continued), cluster, tracker, resume, 0.0, None)
    assert steps == [*logged, 6]
