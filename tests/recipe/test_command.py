"""recipe=FILE on the command line: what goes before what, how values are written, what is printed."""

from __future__ import annotations

import functools
import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from docs.recipes_page import render
from kt_ray import cli
from kt_ray.config.compose import compose
from kt_ray.errors import UserError
from kt_ray.recipe import with_recipe
from kt_ray.recipe.override_text import override
from tests.helpers.recipes import HERE, recipe

ROOT = HERE.parents[1]
EXAMPLE = HERE / "qwen3moe_lora_sft_kt.yaml"


def test_without_a_recipe_nothing_changes() -> None:
    keys = ["model=demo", "lora.rank=4"]
    assert with_recipe(keys) == keys


def test_a_recipe_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "accelerate.yaml").write_text("num_processes: 2\n")
    recipe(tmp_path, per_device_train_batch_size=3)
    keys = with_recipe(["recipe=~/recipe.yaml", "recipe.accelerate=~/accelerate.yaml"], io.StringIO())
    assert "trainer.batch_size=6" in keys


def test_the_command_line_goes_before_the_recipe() -> None:
    out = io.StringIO()
    keys = with_recipe([f"recipe={EXAMPLE}", "lora.rank=4", "mode=plan", "data=demo", "rule=amx_2gpu"], out)
    config = compose(keys)
    assert config.lora.rank == 4 and config.lora.alpha == 16 and config.data.max_length == 512
    assert config.data.builtin == "demo" and config.data.sources is None and config.data.format == "auto"
    assert config.rule.stages == "auto"  # not the recipe's 1
    said = out.getvalue().partition("overrules the recipe:")[2]
    assert "lora.rank=8" in said and "data.sources=" in said and "rule.stages=1" in said


@pytest.mark.parametrize(
    ("key", "gone"),
    [
        ("model=demo", ("model=", "model.path=")),
        ("data.path=x.jsonl", ("data.sources=", "data.format=")),
        ("rule.layers=[1,2]", ("rule.stages=",)),
        ("model.chat_template=x.jinja", ("data.template=",)),
        ("trainer.resume=latest", ("run.overwrite=",)),
        ("optim=muon", ("optim=",)),
    ],
)
def test_a_key_takes_the_place_of_what_it_excludes(key: str, gone: tuple[str, ...]) -> None:
    keys = with_recipe([f"recipe={EXAMPLE}", key], io.StringIO())
    assert keys[-1] == key
    assert not [k for k in keys[:-1] if k.startswith(gone)]


def test_epochs_take_the_place_of_the_recipes_steps(tmp_path: Path) -> None:
    recipe = tmp_path / "steps.yaml"
    recipe.write_text(EXAMPLE.read_text() + "\nmax_steps: 100\n")
    assert compose(with_recipe([f"recipe={recipe}", "data=demo"], io.StringIO())).trainer.max_steps == 100
    for given in ("trainer.epochs=2", "trainer={epochs:2}"):
        trainer = compose(with_recipe([f"recipe={recipe}", "data=demo", given], io.StringIO())).trainer
        assert (trainer.epochs, trainer.max_steps) == (2, None)


@pytest.mark.parametrize(
    ("fields", "chosen", "key", "value"),
    [
        ({}, "lora=no_experts", "lora.experts", False),
        ({"kt_freeze_experts": True}, "lora=default", "lora.experts", True),
        ({"report_to": ["wandb", "mlflow"]}, "tracking=jsonl", "tracking.name", "jsonl"),
        ({"report_to": ["wandb", "mlflow"]}, "tracking=trackio", "tracking.name", "trackio"),
        ({"adam_beta2": 0.95}, "optim=muon", "optim.betas", (0.95, 0.999)),
        ({"adam_beta1": 0.8, "use_muon": True}, "lora.rank=8", "optim.betas", (0.95, 0.999)),
        ({}, "data=demo", "data.path", None),
        ({"kt_backend": "AMXINT8"}, "rule=amx_1gpu", "rule.experts.backend", "AMXBF16"),
        ({}, "model=demo", "model.path", None),
    ],
)
def test_a_groups_option_goes_before_the_recipes_values(
    tmp_path: Path, fields: dict[str, Any], chosen: str, key: str, value: Any
) -> None:
    config = compose(
        with_recipe([f"recipe={recipe(tmp_path, **fields)}", chosen, "mode=plan"], io.StringIO())
    )
    assert functools.reduce(getattr, key.split("."), config) == value


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["recipe=nowhere.yaml"], "the recipe does not exist"),
        ([f"recipe={EXAMPLE}", "recipe.devices=many"], "recipe.devices=many is no number"),
        ([f"recipe={EXAMPLE}", "recipe.device=2"], "malformed argument recipe.device=2"),
        (["recipe.devices=2"], "recipe.devices has no meaning without a recipe"),
        ([f"recipe={EXAMPLE}", "experiment=smoke"], "recipe and experiment both choose everything"),
    ],
)
def test_wrong_commands(keys: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        with_recipe(keys)


def test_no_mapping_is_refused(tmp_path: Path) -> None:
    for text, message in (
        ("- 1\n", "no mapping"),
        ("a: [1\n", "cannot be read"),
        ("a: ${b}\n", "cannot be read"),
    ):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(UserError, match=message):
            with_recipe([f"recipe={tmp_path / 'x.yaml'}"])


_LORA = "lora_rank: 16\nlora_alpha: 8\nlearning_rate: 2e-4\n"
_SAME = "lora.rank=16 lora.alpha=8 optim.lr=0.0002"


@pytest.mark.parametrize(
    ("program", "text", "written"),
    [
        (
            "Axolotl",
            "base_model: a/b\nsequence_len: 512\nmax_steps: 0\nlora_r: 4\n",
            "model=a/b data.max_length=512 lora.rank=4",
        ),
        ("ms-swift", f"model: ./moe\ntrain_type: lora\ndataset: x\n{_LORA}", f"model.path=./moe {_SAME}"),
        ("torchtune", "model: {_component_: x, lora_rank: 4}\noptimizer: {lr: 1}", "lora.rank=4 optim.lr=1"),
        ("TRL", f"model_name_or_path: a/b\ndataset_name: c/d\n{_LORA}", f"model=a/b {_SAME}"),
        ("Unsloth", "model: a/b\ntraining: {training_type: lora, max_seq_length: 7}\nlora: {lora_r: 4}",
         "model=a/b data.max_length=7 lora.rank=4"),
        # what is said twice is written once, and what differs is left to the user
        ("torchtune", "model: {_component_: x, lora_rank: 4}\noptimizer: {lr: 1}\nold: {lr: 2, lora_rank: 4}",
         "lora.rank=4"),
    ],
)  # fmt: skip
def test_a_recipe_of_another_program_is_known_as_one(
    program: str, text: str, written: str, tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(UserError, match=f"the recipe is one of {program};") as error:
        with_recipe([f"recipe={tmp_path / 'x.yaml'}"])
    assert f"and write {written} data.path=<rows> and what else" in str(error.value)


@pytest.mark.parametrize(
    "value",
    [
        *(
            None,
            True,
            3,
            0.1,
            1e-4,
            5e-5,
            1 / 3,
            "plain",
            "null",
            "12",
            "it's",
            "a,b=c",
            "back\\",
            "q'\\'",
            "",
        ),
        *("üñ/ä b", [1, "x y"], [], {"path": "a b.jsonl", "columns": {"input": None, "output": "x:y"}}),
    ],
)
def test_values_survive_hydras_grammar(value: Any) -> None:
    assert OverridesParser.create().parse_override(override("a.b", value)).value() == value


def test_paths_with_odd_characters_compose(tmp_path: Path) -> None:
    folder = tmp_path / "it's, a=b {x}"
    folder.mkdir()
    (folder / "dataset_info.json").write_text('{"identity": {"file_name": "identity.json"}}')
    (folder / "identity.json").write_bytes((HERE / "data" / "identity.json").read_bytes())
    keys = with_recipe([f"recipe={recipe(tmp_path, dataset_dir=str(folder))}", "mode=plan"], io.StringIO())
    assert compose(keys).data.path == str(folder / "identity.json")


def test_yaml_output_stays_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"recipe={EXAMPLE}", "--cfg", "job"]) == 0
    captured = capsys.readouterr()
    assert yaml.safe_load(captured.out)["lora"]["rank"] == 8
    assert "becomes:" in captured.err and "cpu_infer=32: every expert actor" in captured.err


def test_a_refused_recipe_is_one_line_and_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"recipe={recipe(tmp_path, use_mca=True, shift_attn=True)}", "mode=plan"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert "use_mca=true" in captured.err and "shift_attn=true" in captured.err


def test_the_page_is_what_the_tables_say() -> None:
    assert (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8") == render()
