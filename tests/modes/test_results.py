"""mode=eval, report and compare by the command line: files, output, and one error line for bad input."""

from __future__ import annotations

import json
import re

import pytest

from kt_ray import cli
from tests.report.conftest import loss_at, write_predictions, write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """runs/a (with predictions) and runs/b below the working directory."""
    monkeypatch.chdir(tmp_path)
    write_predictions(write_run(tmp_path / "runs", "a", rank=4))
    write_run(tmp_path / "runs", "b", level=0.7)
    return tmp_path / "runs"


def test_eval_of_a_run(runs, capsys):
    assert cli.main(["mode=eval", "run.name=a", "eval.samples=1"]) == 0
    result = json.loads((runs / "a" / "eval.json").read_text())
    assert result["rows"] == 8 and result["change"]["rouge-l"] > 0
    # held-out losses of the run itself: before the first step, and the last
    assert result["base"]["metrics"].get("loss") is None and len(result["samples"]) == 1
    text = (runs / "a" / "eval.md").read_text()
    assert "| loss (nats/token) | 5.2500 |" in text and "metrics.jsonl" in text
    shown = capsys.readouterr().out
    assert "ROUGE-L" in shown and "eval.md" in shown and "<b>question</b> 0" in shown


def test_a_runs_own_losses_are_those_of_its_adapter(runs):
    from kt_ray.runs.evaluation import losses_of_run

    path = runs / "a" / "config.yaml"
    text = path.read_text()
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "eval_loss": 4.0}) + "\n")
    assert losses_of_run(runs / "a")["adapter"]["loss"] == 4.0
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 62, "loss": 4.0}) + "\n")
    assert "adapter" not in losses_of_run(runs / "a")  # that of another state
    path.write_text(text.replace("save_best: false", "save_best: true"))
    assert "adapter" not in losses_of_run(runs / "a")  # which was kept is not known
    (runs / "a" / "checkpoints" / "best").symlink_to("step_000060")
    assert losses_of_run(runs / "a")["adapter"]["loss"] == pytest.approx(0.2 + loss_at(60, 1.0))
    path.write_text(text.replace("stage: sft", "stage: dpo"))
    assert losses_of_run(runs / "a") == {}  # not in nats per token


@pytest.mark.parametrize(
    ("labels", "said"),
    [(("a", "", " "), "2 of the rows have no label"), (("A", "(E)"), "every label .* eval.letters=ABCDE")],
)
def test_labels_that_are_not_scored_are_told(runs, labels, said):
    rows = [{"prompt": "q", "predict": "a", "label": label} for label in labels]
    (runs / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["mode=eval", f"eval.adapter={runs}/answers.jsonl", "eval.out=out"]) == 0
    (note,) = json.loads((runs.parent / "out" / "eval.json").read_text())["notes"]
    assert re.match(said, note)


def test_eval_of_files_into_another_directory(runs):
    a = runs / "a"
    arguments = [
        f"eval.adapter={a}/predictions.jsonl",
        f"eval.base={a}/predictions_base.jsonl",
        "eval.out=out",
    ]
    assert cli.main(["mode=eval", *arguments]) == 0
    assert (runs.parent / "out" / "eval.json").is_file() and not (a / "eval.json").exists()


def test_eval_of_the_base_alone(runs, capsys):
    assert cli.main(["mode=eval", f"eval.base={runs}/a", "eval.out=out"]) == 0
    assert json.loads((runs.parent / "out" / "eval.json").read_text())["adapter"] is None
    assert "change" not in capsys.readouterr().out


def test_eval_refuses_the_bases_answers_as_the_adapters(runs, capsys):
    assert cli.main(["mode=eval", f"eval.adapter={runs}/a/predictions_base.jsonl"]) == 2
    assert "answers of the base model" in capsys.readouterr().err


def test_eval_sends_tables_to_trackers(runs, monkeypatch):
    from kt_ray.runs import evaluation

    calls = []

    class Recorder:
        def start(self, run_dir, config, *, first_step):
            calls.append(("run", run_dir.name))

        def table(self, name, columns, rows):
            calls.append(("table", name, columns, len(rows)))

        def finish(self, status):
            calls.append(("finish", status))

    monkeypatch.setattr(evaluation, "library_trackers", lambda c: [Recorder()] if "wandb" in c.names else [])
    assert cli.main(["mode=eval", "run.name=a"]) == 0 and not calls
    assert cli.main(["mode=eval", "run.name=a", "tracking=wandb"]) == 0
    assert calls[0] == ("run", "a") and calls[-1] == ("finish", "finished")
    assert ("table", "eval/samples", ["row", "prompt", "label", "base", "adapter"], 3) in calls


def test_report_of_a_named_and_of_the_newest_run(runs, capsys):
    assert cli.main(["mode=report", "run.name=a"]) == 0
    assert "the cat sat" in (runs / "a" / "report.html").read_text()
    import os

    os.utime(runs / "b" / "metrics.jsonl", (2e9, 2e9))
    assert cli.main(["mode=report", "report.out=page/b.html"]) == 0
    assert "<h1>b</h1>" in (runs.parent / "page" / "b.html").read_text()
    assert "b.html" in capsys.readouterr().out


def test_compare_all_runs(runs, capsys):
    assert cli.main(["mode=compare", "compare.sort=loss"]) == 0
    assert [r["name"] for r in json.loads((runs / "compare.json").read_text())["runs"]] == ["b", "a"]
    assert (runs / "compare.html").is_file() and "lora.rank" in (runs / "compare.md").read_text()
    assert "lora.rank" in capsys.readouterr().out


def test_compare_knows_evaluations(runs):
    assert cli.main(["mode=eval", "run.name=a"]) == 0
    assert cli.main(["mode=compare"]) == 0
    figures = {r["name"]: r["figures"] for r in json.loads((runs / "compare.json").read_text())["runs"]}
    assert figures["a"]["rouge-l"] > 0 and "rouge-l" not in figures["b"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["mode=eval"], ["does not know which predictions", "eval.adapter=<file"]),
        (["mode=eval", "run.name=b"], ["no predictions", "no predictions.jsonl", "mode=predict"]),
        (["mode=eval", "eval.adapter=nope.jsonl"], ["nope.jsonl", "no such file"]),
        (["mode=eval", "run.name=a", "eval.choice=on"], ["is no option", "row 1", "eval.letters"]),
        (["mode=eval", "run.name=a", "eval.letters=AA"], ["eval.letters=AA", "different capital letters"]),
        (["mode=eval", "run.name=a", "eval.choice=yes please"], ["eval.choice"]),
        (["mode=eval", "run.name=a", "eval.samples=-1"], ["eval.samples=-1", "at least 0"]),
        (["mode=eval", "run.name=a", "eval.out=runs/a/config.yaml"], ["cannot be written", "eval.out"]),
        (["mode=report", "run.name=c"], ["no run directory", "runs/c"]),
        (["mode=report", "run.root=empty"], ["no run to report on", "report.run"]),
        (["mode=report", "report.run=''"], ["report.run", "is empty"]),
        (
            ["mode=report", "run.name=a", "report.out=runs/a/config.yaml/x"],
            ["cannot be written", "report.out"],
        ),
        (["mode=compare", "compare.runs=[a]"], ["at least two runs"]),
        (["mode=compare", "compare.runs=[a,bb]"], ["bb is no run", "a, b"]),
        (["mode=compare", "compare.sort=lose"], ["compare.sort=lose", "did you mean loss?"]),
    ],
)
def test_bad_input_is_one_line(runs, capsys, arguments, parts):
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and all(part in line for part in parts), line
