"""Bad input, end to end: one error line with place and remedy, exit code 2, and no Ray.

One case calls the command line as a user does, the others what it calls. `tests/config` holds the faults of
single keys; the table (tests/helpers/bad_input) those that only files, hardware, data or earlier runs reveal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from kt_ray import cli
from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from kt_ray.errors import BAD_INPUT
from kt_ray.recipe.command import with_recipe
from kt_ray.tools import __main__ as tools
from tests.helpers.bad_input import CASES, RESUME, ROWS, VOCAB, Case, Place
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_checkpoint

RAY = ("ray", "kt_ray.actors.ray.ray_cluster", "kt_ray.actors.ray.ray_metrics")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 with a tokenizer."""
    path = build_checkpoint(tmp_path_factory.mktemp("base"), "deepseek_v3", vocab_size=VOCAB)
    train_tokenizer(persona_path(), VOCAB).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def finished(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of runs with one run of two steps: what the resumes go on from."""
    root = tmp_path_factory.mktemp("finished")
    rows = root / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = f"model.path={checkpoint} data.path={rows} trainer.eval_every=0 lora.rank=2 seed=1"
    arguments += f" trainer.max_steps=2 run.root={root} run.name=done cluster=local tracking.plot=false"
    assert cli.main(arguments.split()) == 0
    return root


@pytest.fixture
def place(checkpoint: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A case's own place, in which importing Ray fails."""
    for name in ("KT_RAY_ISA", "KT_RAY_DEBUG", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for module in RAY:
        monkeypatch.setitem(sys.modules, module, None)
    place = Place(tmp_path, checkpoint, finished, monkeypatch)
    place.rows(*ROWS)
    return place


def _filled(text: str, place: Place) -> str:
    if "{model}" in text:
        text = text.replace("{model}", str(place.model))
    return text.replace("{dir}", str(place.path))


def _arguments(text: str, place: Place) -> list[str]:
    root = [] if "run.root=" in text else [f"run.root={place.path}/runs"]
    return root + shlex.split(_filled(text, place))


def _dispatch(case: Case, arguments: list[str]) -> int:
    if case.arguments.startswith("tools "):
        return tools.main(arguments[arguments.index("tools") + 1 :])
    return cli.dispatch(compose(with_recipe(arguments)))


def _contents(root: Path) -> dict[str, str]:
    """Files below a directory and what is in them."""
    found = {}
    for folder, _, names in os.walk(root):
        for path in (Path(folder) / name for name in names):
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def test_the_table_is_long_enough() -> None:
    assert len(CASES) >= 250 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input(case: Case, place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    if case.skip:
        pytest.skip(case.skip)
    case.spoil(place)
    arguments = _arguments(case.arguments, place)
    runs = _contents(place.path / "runs")
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    capfd.readouterr()
    # The command line for one of them, the functions that it calls for the others.
    code = cli.main(arguments) if case is CASES[0] else cli.guard(lambda: _dispatch(case, arguments))
    err = capfd.readouterr().err
    assert code == BAD_INPUT, err
    assert err.startswith("error: ") and err.count("\n") == 1 and "Traceback" not in err, err
    assert "To fix: " in err
    missing = [part for part in case.expected if _filled(part, place) not in err]
    assert not missing, f"{missing} not in {err}"
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
    assert _contents(place.path / "runs") == runs, "a refused run must leave runs/ as it was"


def test_the_rest_of_the_input_is_good(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """What the cases spoil works when left alone, so each is refused for its own fault."""
    assert place.run.is_dir()
    assert cli.main(_arguments(RESUME + " cluster=local", place)) == 0, capfd.readouterr().err
    assert [path.name for path in sorted((place.run / "checkpoints").iterdir())] == [
        "latest",
        "step_000002",
        "step_000003",
    ]


def test_a_run_that_blows_up_says_where(place: Place, capfd: pytest.CaptureFixture[str]) -> None:
    """Settings that no check can know to be wrong: the step is not applied, and the line names it."""
    arguments = "model.path={model} data.path={dir}/rows.jsonl trainer.eval_every=0 cluster=local run.name=a"
    arguments += " lora.alpha=1e30 optim.lr=1 optim.warmup=0 trainer.max_steps=4 trainer.save_every=1"
    assert cli.main(_arguments(arguments, place)) == BAD_INPUT
    err = capfd.readouterr().err
    assert err.startswith("error: the loss of step 2 is nan") and err.count("\n") == 1, err
    assert (
        "the step was not applied" in err
        and "To fix: lower optim.lr" in err
        and "trainer.resume=latest" in err
    )
    run = place.path / "runs" / "a"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1]
    assert os.readlink(run / "checkpoints" / "latest") == "step_000001" and not (run / "adapter").exists()


@pytest.mark.ray
def test_a_ray_cluster_that_is_not_there(
    checkpoint: Path,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Only this fault can come to light no earlier than in Ray itself."""
    place = Place(tmp_path, checkpoint, finished, monkeypatch)
    place.rows(*ROWS)
    arguments = (
        "model.path={model} data.path={dir}/rows.jsonl trainer.eval_every=0 cluster.address=127.0.0.1:9"
    )
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    assert cli.main(_arguments(arguments, place)) == BAD_INPUT
    err = capfd.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in err, err
    assert (
        "no Ray cluster answers" in lines[0] and "127.0.0.1:9" in lines[0] and "ray start --head" in lines[0]
    )
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= children
