"""mode=eval from a model and an adapter to the table: losses, answers, options, one base in memory."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from kt_ray import cli
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.config.mapping import with_keys
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.runs.evaluation import to_answer
from kt_ray.runs.rundir import plain
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_chat_checkpoint

COMMON = [
    *("cluster=local", "model.dtype=float32", "rule.worker_threads=1", "tracking.progress=false"),
    "tracking.plot=false",
    *("data=demo", "data.limit=60", "data.eval_fraction=0.2", "generate.max_new_tokens=8"),
]
TRAIN = [
    *("run.name=t", "trainer.max_steps=3", "trainer.batch_size=4", "trainer.eval_every=3", "optim.lr=0.05"),
    "eval.after_training=3",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and the run t, which answered three rows at its end."""
    home = tmp_path_factory.mktemp("trained")
    path = build_chat_checkpoint(home)
    path.rename(home / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        assert cli.main([f"model.path={home / 'model'}", *COMMON, *TRAIN]) == 0
    return home


@pytest.fixture
def model(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The model, from a directory that holds a copy of the run."""
    shutil.copytree(trained / "runs", tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    return trained / "model"


def evaluate(model: Path, *overrides: str) -> int:
    return cli.main(["mode=eval", f"model.path={model}", *COMMON, *overrides])


def result(directory: str = "runs/t") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(directory, "eval.json").read_text())
    return found


def lines(directory: str = "runs/t") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(directory, "predictions.jsonl").read_text().splitlines()]
    return sorted(rows, key=lambda row: row["id"])


def held_out_losses() -> list[float]:
    records = [json.loads(line) for line in Path("runs/t/metrics.jsonl").read_text().splitlines()]
    return [record["eval_loss"] for record in records if "eval_loss" in record]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every request that is handed in."""
    requests: list[Any] = []
    submit = Generator.submit
    monkeypatch.setattr(
        Generator,
        "submit",
        lambda self, request, *to: requests.append(request) or submit(self, request, *to),
    )
    return requests


def test_training_ends_with_a_table(model: Path) -> None:
    found = result()
    before, after = held_out_losses()
    assert found["rows"] == 3 and len(found["samples"]) == 3
    # in one table: the losses that training measured, and both models' answers
    text = Path("runs/t/eval.md").read_text()
    assert f"| loss (nats/token) | {before:.4f} | {after:.4f} |" in text
    assert any(sample["base"] != sample["adapter"] for sample in found["samples"])
    assert all("<|" not in sample["prompt"] for sample in found["samples"])
    assert cli.main(["mode=report", "run.name=t"]) == 0
    page = Path("runs/t/report.html").read_text()
    assert "Before and after" in page and "ROUGE-L" in page


def test_losses_and_answers_of_both(
    model: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answered = lines()  # at the end of training
    assert evaluate(model, "generate.adapter=runs/t") == 0
    shown = capsys.readouterr().out
    found, whole = result(), lines()
    assert found["rows"] == len(whole) == 12 and len(answered) == 3 and len(asked) == 2 * 9
    assert all(row in whole for row in answered)
    assert "perplexity" in shown and "ROUGE-L" in shown and "may have learnt" not in shown
    losses = json.loads(Path("runs/t/losses.json").read_text())
    for side, trained_loss in zip(("base", "adapter"), held_out_losses(), strict=True):
        loss = losses[side]["nats"] / losses[side]["tokens"]
        assert loss == pytest.approx(trained_loss, rel=1e-6)
        assert f"{loss:.4f}" in shown and f"{math.exp(loss):.4f}" in shown

    # the base's answers, given beside the adapter, are those that it gives alone
    assert evaluate(model, "generate.answer=base", "run.name=alone") == 0
    assert [row["predict"] for row in lines("runs/alone")] == [row["base"] for row in whole]
    alone = result("runs/alone")
    assert alone["adapter"] is None and alone["base"]["metrics"] == pytest.approx(found["base"]["metrics"])

    # the same command again only reads
    asked.clear()
    monkeypatch.setattr(LocalCluster, "start", lambda self: pytest.fail("a cluster was started"))
    assert evaluate(model, "generate.adapter=runs/t") == 0
    assert evaluate(model, "run.name=t") == 0 and not asked
    assert result() == found


def test_predictions_are_written_into_the_run_of_their_adapter(model: Path, asked: list[Any]) -> None:
    """What training answered at its end, adapter and base, is kept and gone on with."""
    before, answered = os.listdir("runs"), lines()
    command = ["mode=predict", f"model.path={model}", *COMMON]
    assert cli.main([*command, "generate.adapter=runs/t"]) == 0
    whole = lines()
    assert os.listdir("runs") == before and len(whole) == 12 and len(asked) == 2 * 9
    assert all(row in whole for row in answered) and all("base" in row for row in whole)
    # The path may be written otherwise, and mode=eval takes the same answers.
    asked.clear()
    assert cli.main([*command, f"generate.adapter={Path('runs/t/adapter').resolve()}"]) == 0
    assert evaluate(model, "generate.adapter=runs/t") == 0 and not asked and lines() == whole

    shutil.copytree("runs/t/adapter", "one/mine")
    shutil.copytree("runs/t/adapter", "two/mine/adapter")
    for place in ("one/mine", "two/mine", "two/mine/adapter"):
        assert cli.main([*command, f"generate.adapter={place}", "generate.limit=1"]) == 0
    made = sorted(set(os.listdir("runs")) - set(before))
    assert len(made) == 2 and all(name.startswith("model-mine-") for name in made)
    assert evaluate(model, "generate.adapter=one/mine", "generate.answer=adapter", "generate.limit=1") == 0
    assert len(set(os.listdir("runs")) - set(before)) == 2 and lines() == whole


def test_it_goes_on_where_it_stopped(
    model: Path, asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(model, "generate.adapter=runs/t", "run.overwrite=true") == 0
    found, whole = result(), lines()
    file = Path("runs/t/predictions.jsonl")
    kept = file.read_text().splitlines(keepends=True)
    file.write_text("".join(kept[:5]))
    capsys.readouterr()
    assert evaluate(model, "eval.adapter=runs/t") == 2
    assert "7 of 12 rows without an answer" in capsys.readouterr().err
    file.write_text("".join(kept[:5]) + kept[5][:20])  # killed in the middle of a line
    asked.clear()
    assert evaluate(model, "run.name=t") == 0  # a run with an adapter and a part of the answers
    assert len(asked) == 2 * 7 and lines() == whole and result() == found


def test_answers_of_an_earlier_adapter_are_not_shown(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = "generate.limit=2"
    assert evaluate(model, "generate.adapter=runs/t", "run.overwrite=true", few) == 0
    assert evaluate(model, "run.name=t", few) == 0
    os.utime("runs/t/adapter/adapter_model.safetensors")  # written anew
    before = Path("runs/t/eval.md").stat().st_mtime_ns
    capsys.readouterr()
    assert evaluate(model, "run.name=t", few) == 2
    error = capsys.readouterr().err
    assert "adapter_file" in error and "run.overwrite=true" in error
    assert Path("runs/t/eval.md").stat().st_mtime_ns == before
    Path("runs/t/predictions.json").unlink()  # nothing is known of them: somebody else's
    assert evaluate(model, "run.name=t", few) == 0


def test_changed_settings_of_existing_answers_are_not_passed_over(tmp_path: Path) -> None:
    """resume=RUN and run.name=RUN read what is there; what the first announces as changed is asked for."""
    made = {"count": 3, "temperature": 0.7, "max_new_tokens": 8, "stop": []}
    (tmp_path / "predictions.jsonl").write_text("{}\n" * 3)
    (tmp_path / "predictions.json").write_text(json.dumps(made))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    config = compose(["mode=eval", f"run.root={tmp_path.parent}", f"run.name={tmp_path.name}"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain(config)))

    def reads(resume: str | None = "latest", **given: Any) -> bool:
        keys = {f"generate.{name}": value for name, value in given.items()}
        return to_answer(with_keys(config, {"trainer.resume": resume, **keys})) is None

    assert reads() and reads(temperature=0.7, limit=3, batch_size=2) and reads(None, temperature=0.5)
    assert not reads(temperature=0.5) and not reads(limit=2) and not reads(split="all")
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    assert reads() and reads(temperature=0.7)
    with pytest.raises(UserError, match=r"no adapter to ask.*generate\.temperature=0\.5, generate\.split"):
        reads(temperature=0.5, split="all")
    (tmp_path / "predictions.json").unlink()  # another program's
    assert reads(temperature=0.5)


def test_options_have_the_models_own_probabilities(model: Path) -> None:
    questions = ["Which is a bird? A. gull B. cod", "Which is a fish? A. gull B. cod"] * 3
    rows = [{"instruction": f"{i}. {q}", "output": "AB"[i % 2]} for i, q in enumerate(questions)]
    Path("choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["data=jsonl", "data.path=choice.jsonl", "generate.split=all", "eval.letters=AB", "run.name=c"]
    assert evaluate(model, "generate.adapter=runs/t", *data) == 0
    metrics = {side: result("runs/c")[side]["metrics"] for side in ("base", "adapter")}
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="eager")
    tokenizer = train_tokenizer(persona_path(), 320)
    ids = {letter: tokenizer.convert_tokens_to_ids(letter) for letter in "AB"}
    right = 0
    for row in lines("runs/c"):
        prompt = tokenizer(row["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = torch.log_softmax(hf(prompt).logits[0, -1].float(), -1)
        for letter, token in ids.items():
            assert row["base_option_logits"][letter] == pytest.approx(float(expected[token]), abs=2e-5)
        assert row["option_logits"] != pytest.approx(row["base_option_logits"], abs=1e-3)
        right += row["label"] == max(ids, key=lambda letter: float(expected[ids[letter]]))
    assert metrics["base"]["letter_accuracy_logits"] == pytest.approx(100 * right / 6)
    assert {"letter_accuracy", "letter_accuracy_logits", "exact_match"} <= set(metrics["adapter"])


def test_of_preferences_the_better_answer_counts(model: Path) -> None:
    pairs = [{"prompt": f"{i}?", "chosen": f"a gull {i}", "rejected": f"a cod {i}"} for i in range(4)]
    verdicts = [{"prompt": f"{i}?", "completion": f"a gull {i}", "label": i % 2 == 0} for i in range(4)]
    answers = [{"instruction": f"{i}?", "output": f"a gull {i}"} for i in range(4)]
    losses = []
    kinds = {"pairs": pairs, "kto": verdicts, "sft": answers, "half": answers[::2]}
    for name, rows in kinds.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = ["data=jsonl", f"data.path={name}.jsonl", "generate.split=all", f"run.name={name}"]
        assert evaluate(model, "generate.adapter=runs/t", *data) == 0
        directory = f"runs/{name}"
        assert [row["label"] for row in lines(directory)] == [
            f"a gull {i}" for i in (range(0, 4, 2) if name in ("kto", "half") else range(4))
        ]
        kept = json.loads(Path(directory, "losses.json").read_text())
        losses.append([kept[side] for side in ("base", "adapter")])
    assert losses[0] == losses[2]
    for one, other in zip(losses[1], losses[3], strict=True):
        assert one["tokens"] == other["tokens"] and one["nats"] == pytest.approx(other["nats"], rel=1e-6)


def test_other_rows_than_those_of_training_are_told(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(model, "generate.adapter=runs/t", "run.name=o", "seed=5", "generate.limit=1") == 0
    assert "trained with seed=0, here 5" in capsys.readouterr().out
    assert "it may have learnt" in Path("runs/o/eval.md").read_text()
    other = ["generate.adapter=runs/t", "run.name=p", "seed=5", "generate.limit=1"]
    assert cli.main(["mode=predict", f"model.path={model}", *COMMON, *other]) == 0
    assert "trained with seed=0, here 5: it may have learnt" in capsys.readouterr().out


def test_the_date_of_a_template_is_that_of_training(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("dated.jinja").write_text(
        "{{ strftime_now('%Y-%m-%d') }}\n{% for m in messages %}"
        "{{ m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    file = Path("runs/t/config.yaml")
    file.write_text(file.read_text().replace("  date: null", "  date: '2024-02-03'"))
    common = ["generate.adapter=runs/t", "generate.limit=1", "model.chat_template=dated.jinja"]
    for name, given, date in (("a", "null", "2024-02-03"), ("b", "2024-02-04", "2024-02-04")):
        assert evaluate(model, *common, f"run.name={name}", f"data.date={given}") == 0
        assert lines(f"runs/{name}")[0]["prompt"].startswith(date)
    assert "may have learnt" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode=eval", "generate.adapter=runs/t", "eval.adapter=runs/t"], "asks for new ones"),
        (["mode=eval", "generate.adapter=runs/t", "data.eval_fraction=0"], "needs held-out rows"),
        (["mode=eval", "generate.adapter=runs/t", "eval.choice=on", "run.name=n"], "is no option"),
        (["mode=eval", "generate.adapter=runs/t", "generate.max_new_tokens=600"], "context"),
        (["mode=eval", "generate.adapter=runs/t", "generate.limit=2"], "1 of 3 rows are not asked for"),
        (["mode=eval", "generate.adapter=runs/t", "generate.stop=[x]"], "other settings"),
        (["eval.after_training=2", "data.eval_fraction=0"], "needs held-out rows"),
        (["eval.after_training=2", "generate.max_new_tokens=600"], "context"),
        (
            ["eval.after_training=2", "lora.init=pissa", "lora.experts=false"],
            "without its adapter, whose weights",
        ),
        (["eval.after_training=-1"], "at least 0"),
    ],
)
def test_what_cannot_be_is_refused(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(os.listdir("runs"))
    assert cli.main([f"model.path={model}", *COMMON, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and "To fix" in error and sorted(os.listdir("runs")) == before


@pytest.mark.ray
def test_under_ray_it_is_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from tests.helpers.ray_place import ray_place

    few = ["generate.adapter=runs/t", "generate.limit=4"]
    assert evaluate(model, *few, "run.name=local") == 0
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        try:
            options = ["cluster=ray", "cluster.address=local", "cluster.dashboard=false"]
            assert evaluate(model, *few, "run.name=ray", *options) == 0
        finally:
            ray.shutdown()
    assert lines("runs/ray") == lines("runs/local")
    here, there = (json.loads(Path(f"runs/{name}/losses.json").read_text()) for name in ("local", "ray"))
    assert here == there
