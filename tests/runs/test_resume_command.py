"""resume=runs/NAME: the run's own configuration, and what the command line changes of it."""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray import cli
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.config.resume_line import _program, chat_line, resume_line
from kt_ray.config.schema import Config, OptimConfig
from kt_ray.errors import BAD_INPUT
from kt_ray.runs.rundir import RunDir
from kt_ray.runs.saving import ResumePoint, new_schedule
from tests.checkpoint.test_training import save
from tests.helpers.composing import compose

BEGUN = [
    *("rule=cpu_replicas_2", "data.path=rows.jsonl", "data.max_length=300", "optim=muon", "optim.lr=2e-3"),
    *(
        "lora.rank=4",
        "trainer.max_steps=10",
        "trainer.batch_size=4",
        "seed=7",
        "run.name=a",
        "run.overwrite=true",
    ),
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/a in the working directory, with a checkpoint of step 5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    begin(BEGUN)
    return tmp_path / "runs"


def begin(arguments: list[str]) -> Config:
    config = compose(arguments)
    run = RunDir.create(config)
    run.close()
    save(run.path, 5)
    return config


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that a mode would have been run with."""
    seen: list[Config] = []

    def dispatch(config: Config) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(cli, "dispatch", dispatch)
    return seen


def test_a_run_goes_on_with_its_own_configuration(runs: Path, given: list[Config], capfd: Any) -> None:
    assert cli.main(["resume=runs/a"]) == 0
    begun = compose(BEGUN)
    trainer = dataclasses.replace(begun.trainer, resume="latest")
    run = dataclasses.replace(begun.run, overwrite=False)
    assert given == [dataclasses.replace(begun, trainer=trainer, run=run)]
    assert capfd.readouterr().out == f"goes on as {runs / 'a'} began\n"


@pytest.mark.parametrize("mode", ["chat", "predict"])
def test_its_model_and_adapter_answer(runs: Path, given: list[Config], mode: str, capfd: Any) -> None:
    assert cli.main(["resume=runs/a", f"mode={mode}"]) == BAD_INPUT
    assert "has written no adapter yet" in capfd.readouterr().err and given == []
    write_adapter(runs / "a")
    assert cli.main(["resume=runs/a", f"mode={mode}", "generate.temperature=0.5"]) == 0
    assert cli.main(["resume=runs/a", f"mode={mode}", "generate.adapter=null"]) == 0
    own, bare = given
    assert (own.generate.adapter, own.generate.temperature) == (str(runs / "a"), 0.5)
    assert own.rule.name == "cpu_replicas_2" and own.trainer.resume is None
    assert bare.generate.adapter is None
    assert "generate.adapter" not in capfd.readouterr().out


@pytest.mark.parametrize("mode", ["predict", "eval"])
def test_answers_of_a_run_that_was_resumed_may_be_replaced(
    runs: Path, given: list[Config], mode: str
) -> None:
    write_adapter(runs / "a")
    file = runs / "a" / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["trainer"]["resume"] = "latest"  # what the command that resumed it left there
    file.write_text(yaml.safe_dump(saved))
    more = ["generate.max_new_tokens=9", "run.overwrite=true"]
    assert cli.main(["resume=runs/a", f"mode={mode}", *more]) == 0
    assert given[0].run.overwrite and given[0].trainer.resume == "latest"
    assert cli.main(["resume=runs/a", *more]) == BAD_INPUT


@pytest.mark.parametrize("mode", ["chat", "predict", "serve", "eval"])
def test_a_checkpoint_does_not_answer_with_the_adapter_of_the_runs_end(
    runs: Path, given: list[Config], mode: str, capfd: Any
) -> None:
    write_adapter(runs / "a")
    assert cli.main(["resume=runs/a/checkpoints/step_000005", f"mode={mode}"]) == BAD_INPUT
    err = capfd.readouterr().err
    assert f"write resume={runs}/a for the run's own adapter" in err
    assert "step_000005 run.name=NEW trainer.max_steps=5 writes" in err and given == []


def test_a_warmup_longer_than_a_checkpoint_is_left_out_for_its_adapter(
    runs: Path, given: list[Config], capfd: Any
) -> None:
    begin([*BEGUN, "optim.warmup=6"])
    assert cli.main(["resume=runs/a/checkpoints/step_000005", "mode=predict"]) == BAD_INPUT
    told = capfd.readouterr().err.partition("; resume=")[2].partition(" writes")[0]
    assert told.endswith("run.name=NEW trainer.max_steps=5 optim.warmup=0")
    assert cli.main(f"resume={told}".split()) == 0 and len(given) == 1


@pytest.mark.parametrize("mode", ["predict", "serve"])
def test_a_checkpoint_answers_with_an_adapter_that_is_named(
    runs: Path, given: list[Config], mode: str, capfd: Any
) -> None:
    """Or with none: the run's own is not asked for."""
    keys = ["generate.adapter=/other", "generate.adapter=null"]
    keys = keys if mode == "predict" else ["serve.adapters={x:/other}", "serve.adapters={}"]
    for key in keys:
        assert cli.main(["resume=runs/a/checkpoints/step_000005", f"mode={mode}", key]) == 0
    named, bare = given
    if mode == "predict":
        assert (named.generate.adapter, bare.generate.adapter) == ("/other", None)
    else:
        assert (named.serve.adapters, bare.serve.adapters) == ({"x": "/other"}, {})
    assert named.trainer.resume is None
    assert cli.main(["resume=runs/a/checkpoints/step_000005", "mode=eval", keys[0]]) == BAD_INPUT


def write_adapter(run: Path) -> None:
    (run / "adapter").mkdir()
    (run / "adapter" / "adapter_config.json").write_text("{}")


def test_it_is_served_with_its_adapter_and_no_secret_is_shown(
    runs: Path, given: list[Config], capfd: Any
) -> None:
    write_adapter(runs / "a")
    assert cli.main(["resume=runs/a", "mode=serve", "serve.api_key=geheim42"]) == 0
    (config,) = given
    assert config.serve.adapters == {"a": str(runs / "a")} and config.serve.api_key == "geheim42"
    out = capfd.readouterr().out
    assert "serve.api_key: null → ***" in out and "geheim42" not in out


def test_what_is_no_option_any_more_is_left_out(runs: Path, given: list[Config], capfd: Any) -> None:
    file = runs / "a" / "config.yaml"
    saved = yaml.safe_load(file.read_text())
    saved["cluster"]["load_timeout"] = 7200.0
    file.write_text(yaml.safe_dump(saved))
    assert cli.main(["resume=runs/a"]) == 0 and len(given) == 1
    assert "  cluster.load_timeout=7200.0 is no option any more\n" in capfd.readouterr().out


def test_what_changes_is_shown_and_nothing_else_does(runs: Path, given: list[Config], capfd: Any) -> None:
    changes = ["trainer.max_steps=20", "rule=cpu_1worker_1socket", "data.path=~/x.jsonl", "~optim.eps"]
    assert cli.main(["resume=runs/a", *changes]) == 0
    (config,) = given
    out = capfd.readouterr().out
    assert (
        "  trainer.max_steps: 10 → 20\n" in out
        and "  rule.name: cpu_replicas_2 → cpu_1worker_1socket\n" in out
    )
    assert "optim.lr" not in out and "data.max_length" not in out and "trainer.resume" not in out
    assert config.trainer.max_steps == 20 and config.rule == compose(["rule=cpu_1worker_1socket"]).rule
    # A path chooses no group here: the rest of the run's data options stays.
    assert config.data.path == str(Path("~/x.jsonl").expanduser()) and config.data.max_length == 300
    assert (config.optim.name, config.optim.lr, config.optim.eps) == ("muon", 2e-3, OptimConfig().eps)


def test_a_mapping_changes_its_own_keys_alone(runs: Path, given: list[Config], capfd: Any) -> None:
    changes = ["trainer={max_steps:20}", "run={name:b}", "rule={experts:{threads:2}}", "data={limit:1}"]
    assert cli.main(["resume=runs/a", *changes]) == 0
    lines = [line.split(":")[0].strip() for line in capfd.readouterr().out.splitlines()[1:]]
    assert lines == ["data.limit", "rule.experts.threads", "run.name", "trainer.max_steps"]
    (config,) = given
    assert (config.trainer.batch_size, config.run.root) == (4, str(runs))


def test_epochs_take_the_place_of_the_runs_steps(runs: Path, given: list[Config], capfd: Any) -> None:
    assert cli.main(["resume=runs/a", "trainer.epochs=2"]) == 0
    assert "  trainer.max_steps: 10 → null\n" in capfd.readouterr().out
    assert cli.main(["resume=runs/a", "trainer.epochs=2", "trainer.max_steps=20"]) == 0
    assert [(c.trainer.epochs, c.trainer.max_steps) for c in given] == [(2, None), (2, 20)]


def test_a_run_that_was_moved_and_one_that_branches_off(runs: Path, given: list[Config]) -> None:
    (runs / "a").rename(runs / "moved")
    assert cli.main(["resume=runs/moved"]) == 0
    assert cli.main([f"resume={runs}/moved/checkpoints/latest", "mode=plan"]) == 0
    assert cli.main(["resume=runs/moved/", "run.name=b"]) == 0
    latest, named, branch = given
    assert (latest.run.name, latest.run.root, latest.trainer.resume) == ("moved", str(runs), "latest")
    assert named.mode == "plan" and named.trainer.resume == str(runs / "moved/checkpoints/latest")
    assert branch.run.name == "b" and branch.trainer.resume == str(runs / "moved/checkpoints/step_000005")


def test_a_branch_of_a_run_that_was_moved_to_another_root_lies_beside_it(
    runs: Path, given: list[Config]
) -> None:
    archive = runs.rename(runs.with_name("archive"))
    assert cli.main(["resume=archive/a", "run.name=b"]) == 0
    assert cli.main(["resume=archive/a", "run.root=c"]) == 0
    beside, rooted = (config.run for config in given)
    assert (beside.root, beside.name, rooted.name) == (str(archive), "b", "a")
    assert rooted.root == compose(["run.root=c"]).run.root


def test_a_masked_secret_is_never_taken_for_a_value(
    runs: Path, given: list[Config], capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    begin([*BEGUN, "run.name=s", "serve.api_key=geheim42", "tracking.project=of-0123456789abcdef"])
    assert "***" in (runs / "s/config.yaml").read_text()
    assert cli.main(["resume=runs/s"]) == BAD_INPUT
    err = capfd.readouterr().err
    assert "tracking.project" in err and "To fix: add tracking.project=<value>" in err and given == []
    assert cli.main(["resume=runs/s", "tracking.project=p"]) == 0
    assert given[0].serve.api_key is None and given[0].tracking.project == "p"


def test_a_text_with_the_mask_in_it_may_be_given_again(runs: Path, given: list[Config], capfd: Any) -> None:
    begin([*BEGUN, "run.name=s", 'generate.stop=["***"]'])
    assert cli.main(["resume=runs/s"]) == BAD_INPUT
    assert "To fix: add generate.stop=<value>" in capfd.readouterr().err
    assert cli.main(["resume=runs/s", 'generate.stop=["***"]']) == 0
    assert given[0].generate.stop == ["***"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["resume=runs/b"], ["resume names no run", "no such directory", "resume=runs/NAME"]),
        (["resume=a"], ["resume names no run", "write resume=runs/a"]),
        (["resume=runs/a/adapter/x"], ["resume names no run", "To fix: write resume=/", "/runs/a\n"]),
        (["--resume=runs/a"], ["write resume=runs/a, without dashes"]),
        (["+resume=runs/a"], ["write resume=runs/NAME"]),
        (["resume=runs/a", "experiment=smoke"], ["choose everything", "leave out experiment=smoke"]),
        (["resume=runs/a", "mode=train_server"], ["goes on with no run", "write model=demo in the place"]),
        (["resume=runs/a", "mode=plan", "plan.mode=train_server"], ["mode=train_server goes on with no"]),
        (["resume=runs/a", "-m", "seed=1,2"], ["is no sweep", "leave out -m"]),
        (["resume=runs/a", "--cfg", "job"], ["prints nothing", "leave out --cfg", "runs/a/config.yaml"]),
        (["resume=runs/a", "lora.rnk=4"], ["unknown key lora.rnk", "write lora.rank=4"]),
        (["resume=runs/a", "trainer.max_steps=0"], ["trainer.max_steps=0", "at least 1"]),
    ],
)
def test_bad_commands(
    runs: Path, given: list[Config], arguments: list[str], expected: list[str], capfd: Any
) -> None:
    assert cli.main(arguments) == BAD_INPUT
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and [part for part in expected if part not in err] == [], err
    assert given == []


def test_a_damaged_configuration_is_named(runs: Path, capfd: Any) -> None:
    (runs / "a/config.yaml").write_text("lora: [8")
    assert cli.main(["resume=runs/a"]) == BAD_INPUT
    assert "config.yaml" in capfd.readouterr().err


def test_the_line_is_short_and_works_from_where_it_is_printed(runs: Path, tmp_path: Path) -> None:
    assert resume_line(runs / "a") == "python launch.py resume=runs/a"
    assert chat_line(runs / "a") == "python launch.py resume=runs/a mode=chat"
    assert resume_line(Path("/else where/a")) == "python launch.py 'resume=/else where/a'"
    # Started from another directory, as a program that is installed, and by what is neither.
    assert _program("/my code/launch.py") == "python '/my code/launch.py'"
    assert _program("/usr/bin/kt-ray") == "kt-ray" and _program("pytest") == "python launch.py"


@pytest.mark.parametrize(
    ("optim", "before", "total", "said"),
    [
        ({}, 10, 20, True),  # finished: from nearly nothing up again
        ({}, 10, 10, False),
        ({}, 12, 11, False),  # it only falls faster
        ({"schedule": "constant"}, 10, 20, False),
        ({"warmup": 50}, 60, 90, False),  # it was rising
        ({"schedule": "wsd", "decay": 0.5}, 10, 20, True),
    ],
)
def test_a_schedule_that_begins_to_rise_again_is_said(
    optim: dict[str, Any], before: int, total: int, said: bool
) -> None:
    prepared = types.SimpleNamespace(
        config=Config(optim=OptimConfig(**{"lr": 1e-3, **optim})),
        batches=types.SimpleNamespace(total_steps=total),
    )
    manifest = Manifest(
        step=10, seed=0, data={}, model="m", fields={}, shards=(), state={"total_steps": before}
    )
    line = new_schedule(ResumePoint(Path("x"), manifest), prepared)  # type: ignore[arg-type]
    assert bool(line) is said
    if said:
        assert "at step 11" in line and "optim.schedule=constant" in line


@pytest.mark.parametrize(
    ("lr", "total", "state", "said"),
    [
        (1e-4, 400, {}, ""),
        (1e-2, 40, {}, "from 0.00058 at step 20 to 0.0054"),
        (1e-3, 40, {"next_lr": 5.4e-4}, ""),
        (1e-4, 40, {"next_lr": 5.4e-4}, "0.00058 at step 20 to 5.4e-05 at step 21. As the run was it would"),
        (1e-3, 22, {"next_lr": 5.4e-4}, "to 2.2e-05 at step 21: it was planned over 40 steps"),
        (1e-4, 400, {"next_lr": 1e-8, "total_steps": 20}, ""),  # it had come to its end
    ],
)
def test_the_learning_rate_before_is_the_one_that_was_taken(
    lr: float, total: int, state: dict[str, Any], said: str
) -> None:
    """Whatever optim.* is now."""
    prepared = types.SimpleNamespace(
        config=Config(optim=OptimConfig(lr=lr)), batches=types.SimpleNamespace(total_steps=total)
    )
    state = {"total_steps": 40, "lr": 5.8e-4, **state}
    manifest = Manifest(step=20, seed=0, data={}, model="m", fields={}, shards=(), state=state)
    line = new_schedule(ResumePoint(Path("x"), manifest), prepared)  # type: ignore[arg-type]
    assert said in line and bool(line) is bool(said)


def test_config_yaml_holds_all_that_a_run_is_made_of(runs: Path) -> None:
    saved = yaml.safe_load((runs / "a/config.yaml").read_text())
    assert set(saved) == {field.name for field in dataclasses.fields(Config)}
