"""eval.after_training: what the actors that trained answer is what the written adapter answers later."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray import cli
from kt_ray.errors import UserError
from kt_ray.modes import train
from kt_ray.runs.before_after import other_rows
from kt_ray.runs.rundir import plain
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_chat_checkpoint

COMMON = [
    *("cluster=local", "model.dtype=float32", "rule.worker_threads=1", "tracking.progress=false"),
    *("generate.max_new_tokens=8", "data.limit=60", "data.eval_fraction=0.2"),
]
TRAIN = [
    "trainer.max_steps=3",
    "trainer.batch_size=2",
    "optim.lr=0.05",
    "trainer.eval_every=3",
    "eval.after_training=5",
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = build_chat_checkpoint(tmp_path_factory.mktemp("model"))
    yield path


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(model: Path, name: str, *overrides: str) -> int:
    return cli.main(["data=demo", f"model.path={model}", f"run.name={name}", *COMMON, *overrides])


def rows(name: str) -> dict[int, dict[str, Any]]:
    lines = Path(f"runs/{name}/predictions.jsonl").read_text().splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def test_answers_are_those_of_the_written_adapter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "t", *TRAIN) == 0
    shown = capsys.readouterr().out
    assert "BLEU-4" in shown and "base" in shown and "adapter" in shown
    told = rows("t")
    assert len(told) == 5
    assert run(model, "p", "mode=predict", "generate.adapter=runs/t", "generate.answer=both") == 0
    later = rows("p")
    for number, row in told.items():
        assert {k: later[number][k] for k in ("predict", "base", "label", "finish")} == {
            k: row[k] for k in ("predict", "base", "label", "finish")
        }
    assert any(row["predict"] != row["base"] for row in told.values())
    scores = json.loads(Path("runs/t/eval.json").read_text())
    assert scores["rows"] == 5 and scores["base"] and scores["adapter"]
    assert scores["change"]["loss"] < 0  # the run's own held-out losses stand in the table
    assert Path("runs/t/eval.md").read_text().startswith("| metric")


def test_answers_stay_until_their_adapter_changes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "t", *TRAIN, "trainer.save_every=3") == 0
    assert cli.main(["mode=report", "run.name=t"]) == 0
    results = ["predictions.jsonl", "predictions.json", "eval.json", "eval.md", "report.html"]
    before = {name: Path("runs/t", name).read_bytes() for name in results}
    capsys.readouterr()
    assert cli.main(["resume=runs/t"]) == 0  # no step is left
    shown = capsys.readouterr().out
    assert "removed:" not in shown and "they stay, and nothing is asked" in shown and "BLEU-4" in shown
    assert {name: Path("runs/t", name).read_bytes() for name in results} == before

    capsys.readouterr()
    more = ["trainer.max_steps=4", "trainer.resume=latest", "eval.after_training=0"]
    assert run(model, "t", *TRAIN, *more) == 0
    assert "removed: predictions.jsonl" in capsys.readouterr().out
    assert not any(Path("runs/t", name).exists() for name in results)
    assert Path("runs/t/adapter/adapter_model.safetensors").is_file()


def test_what_cannot_be_answered_is_refused_before_training(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.jsonl").write_text(
        "".join(json.dumps({"text": f"line {n} of a book"}) + "\n" for n in range(40))
    )
    assert run(model, "x", *TRAIN, "data.path=text.jsonl", "trainer.stage=pt") != 0
    error = capsys.readouterr().err
    assert "text.jsonl" in error and "asks nothing" in error
    assert "To fix: set eval.after_training=0 to train without questions" in error
    assert run(model, "x", *TRAIN, "data.eval_fraction=0", "trainer.eval_every=0") != 0
    assert "eval.after_training" in capsys.readouterr().err
    assert not Path("runs/x").exists()


def test_a_signal_in_the_last_step_leaves_the_questions_to_another_command(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = train.Trainer.step

    def signalled(self: train.Trainer, number: int) -> None:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        step(self, number)

    monkeypatch.setattr(train.Trainer, "step", signalled)
    assert run(model, "t", *TRAIN) == 0
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if line.startswith("SIGTERM: the held-out questions")]
    assert "run directory" in shown and Path("runs/t/loss.png").is_file()
    assert not Path("runs/t/predictions.jsonl").exists()
    command = line.partition("to ask them: ")[2].split()
    assert command[:2] == ["python", "launch.py"] and cli.main(command[2:]) == 0
    assert len(rows("t")) == 5


@pytest.mark.parametrize(
    "error",
    [UserError("an actor fell silent", remedy="ask it"), OSError("no space\nleft")],
    ids=["ours", "other"],
)
def test_trouble_with_answers_leaves_the_run_finished(
    model: Path, error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise error

    monkeypatch.setattr(train, "before_and_after", broken)
    assert run(model, "t", *TRAIN) == 0
    shown = capsys.readouterr()
    (line,) = [line for line in shown.out.splitlines() if "were not answered" in line]
    assert ("fell silent" if isinstance(error, UserError) else "OSError: no space left") in line
    assert "Traceback" not in shown.out + shown.err
    assert "Traceback" in Path("runs/t/train.log").read_text()
    assert Path("runs/t/adapter/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("evaluated", [True, False])
def test_an_adapter_of_a_run_that_held_nothing_out(tmp_path: Path, evaluated: bool) -> None:
    """data.eval_fraction=auto names the same rows both times, but that run trained on them."""
    settings = ["data.path=rows.jsonl", "model.path=m", "trainer.save_every=0"]
    then = compose([*settings, *([] if evaluated else ["trainer.eval_every=0"])])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain(then)))
    asked = ["mode=eval", "generate.adapter=a"]
    told = list(other_rows(compose([*settings, *asked]), tmp_path))
    assert bool(told) != evaluated and all(
        "trainer.eval_every=0, which holds no row out" in line for line in told
    )
