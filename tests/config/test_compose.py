"""conf/ composes, agrees with the schema, and every model × rule passes the checks."""

from __future__ import annotations

import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.options_page import comments, option_list, render
from kt_ray.config.compose import _quoted, compose, expand
from kt_ray.config.faults import value_of
from kt_ray.config.fields import fields, groups
from kt_ray.config.files import conf_dir, hardware_file, option_groups, option_names
from kt_ray.config.mapping import from_dict, load
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.runs.rundir import RunDir, plain

REPO = Path(__file__).resolve().parents[2]

MODELS = option_names("model")
RULES = option_names("rule")

# The option of each group that states every field; the others state differences only.
COMPLETE = {
    "model": "custom",
    "rule": "auto",
    "data": "jsonl",
    "lora": "default",
    "optim": "adamw",
    "trainer": "default",
    "tracking": "jsonl",
    "cluster": "ray",
    "generate": "default",
    "serve": "default",
}


@cache
def composed(*overrides: str) -> dict[str, Any]:
    return plain(compose(["mode=plan", *overrides]))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_composes_with_every_rule(model: str) -> None:
    """A model's file sets nothing of the rule, so Hydra is asked once for each: the checks see every pair."""
    path = ["model.path=somewhere"] if model == "custom" else []
    mapping = composed(f"model={model}", *path)
    for rule in RULES:
        config = load({**mapping, "rule": composed(f"rule={rule}")["rule"]})
        assert config.rule.name == rule
        assert config.model.name == ("somewhere" if model == "custom" else model)
        assert config.model.path is not None or config.model.build is not None or config.model.config


@pytest.mark.parametrize("group", [g for g in COMPLETE if g != "model"])
def test_every_option_composes(group: str) -> None:
    for option in option_names(group):
        path = ["data.path=rows.jsonl"] if (group, option) == ("data", "jsonl") else []
        plan = ["mode=plan"] if group == "tracking" else []  # training asks for the tracker's library
        compose([f"{group}={option}", *path, *plan])


@pytest.mark.parametrize("experiment", option_names("experiment"))
def test_every_experiment_composes(experiment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_RAY_TEST_DATA", "/data")
    assert plain(compose([f"experiment={experiment}", "mode=plan"])) != composed()


def test_experiment_overrides_groups_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KT_RAY_TEST_DATA", "/data")
    config = compose(["experiment=nekoqa_mini", "trainer.max_steps=7"])
    assert (config.model.build, config.rule.stages, config.rule.experts.sockets) == ("mini", 2, 2)
    assert config.data.path == "/data/nekoqa/neko_union_alpaca.json" and config.data.builtin is None
    assert config.model.tokenizer == "/data/tokenizers/minimind"
    assert config.trainer.max_steps == 7  # the command line beats the experiment
    assert config.run.name is None


@pytest.mark.parametrize("group", COMPLETE)
def test_complete_option_states_the_schemas_defaults(group: str) -> None:
    stated = yaml.safe_load((conf_dir() / group / f"{COMPLETE[group]}.yaml").read_text())
    built = from_dict({group: stated})
    assert plain(built)[group] == plain(Config())[group]
    wanted = {key.removeprefix(group + ".") for key in fields() if key.startswith(group + ".")}
    assert set(_leaves(stated)) == wanted


def test_primary_file_states_the_schemas_defaults() -> None:
    stated = yaml.safe_load((conf_dir() / "config.yaml").read_text())
    names = {k for k in plain(Config()) if k not in COMPLETE}
    assert set(stated) == names | {"defaults", "hydra"}
    for key in names:
        assert stated[key] == plain(Config())[key]


def test_every_field_of_every_file_has_a_comment() -> None:
    bare = []
    for file in [
        conf_dir() / "config.yaml",
        *(f for g in option_groups() for f in (conf_dir() / g).glob("*.yaml")),
    ]:
        commented = in_defaults = False
        for number, line in enumerate(file.read_text().splitlines(), 1):
            text = line.strip()
            if line and not line.startswith(" "):
                in_defaults = text in ("defaults:", "hydra:")
            if text.startswith("#"):
                commented = True
            elif text and not text.startswith("-") and not in_defaults and not text.endswith(":"):
                if "#" not in line and not commented and not text.startswith("name:"):
                    bare.append(f"{file.name}:{number}: {text}")
                commented = False
    assert bare == []


def test_the_demo_brings_its_own_training_settings_and_a_choice_beats_them() -> None:
    demo = compose([])
    assert (demo.model.build, demo.data.builtin, demo.cluster.name) == ("demo_base", "demo", "ray")
    assert demo.trainer.max_steps is not None and demo.optim.lr > Config().optim.lr
    chosen = compose(["trainer=default", "optim=adamw"])
    assert chosen.trainer == Config().trainer and chosen.optim == Config().optim


@pytest.mark.parametrize("value", ["It's", 'say "a", b', r"a\b, it's", "C:\\new, x\\", 'a \\" b', "a, b\\\n"])
def test_a_quoted_value_comes_back_through_shell_and_hydra(value: str) -> None:
    (argument,) = shlex.split(_quoted("data.system", value))
    assert compose(["mode=chat", "model.path=/m", argument]).data.system == value


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *((f"run.name={name}", name) for name in ("2026_11_29", "1.10", "1e3", "-5", "007", "9" * 20)),
        ("++run.name=1.10", "1.10"),
        ("serve.api_key=1e10", "1e10"),
        ("data.path=[a.jsonl]", [f"{Path.cwd()}/a.jsonl"]),
        ("data.path=2024_10", f"{Path.cwd()}/2024_10"),
        ("compare.runs=2026_11_29,b", ["2026_11_29", "b"]),
        ("compare.runs=runs/*,b-?,2026_11", ["runs/*", "b-?", "2026_11"]),
        ("compare.runs=[2026_11_29, b]", ["2026_11_29", "b"]),
        ("data.path=[2024_10]", [f"{Path.cwd()}/2024_10"]),
        ("tracking.tags=1.10", ["1.10"]),
        ("trainer.profile_steps=1_0,2", [10, 2]),
        ("trainer.save_every=1_000", 1000),
        ("seed=1_000", 1000),
    ],
)
def test_a_text_that_looks_like_a_number_stays_as_it_was_typed(argument: str, value: object) -> None:
    assert value_of(compose([argument]), argument.lstrip("+").partition("=")[0]) == value
    assert expand(["run.name=1_0,b"], sweep=True) == ['run.name="1_0",b']


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("serve.adapters={a:~/x, b: ~/y}", {"a": "/home/me/x", "b": "/home/me/y"}),
        ("data.path=[~/a.jsonl, ~/b.jsonl]", ["/home/me/a.jsonl", "/home/me/b.jsonl"]),
        (
            'data.sources=[{path: ~/x, system: "look at ~/x"}]',
            [{"path": "/home/me/x", "system": "look at ~/x"}],
        ),
        ('data.system="a, ~/b"', "a, ~/b"),
    ],
)
def test_home_within_lists_and_mappings(
    argument: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert value_of(compose([argument]), argument.partition("=")[0]) == value


def test_paths_choose_the_generic_options() -> None:
    config = compose(["model.path=some/model", "data.path=rows/my.jsonl"])
    assert config.model.path == str(Path("some/model").absolute())
    assert (config.model.name, config.model.build) == ("model", None)
    assert config.data.builtin is None
    assert compose(["data.sources=[{path: a.jsonl}]"]).data.max_length == config.data.max_length  # not 128
    assert config.optim == Config().optim  # not the demo's learning rate
    chosen = ["model=deepseek_v3", "model.path=x"]
    assert expand(chosen) == ["data=jsonl", *chosen]
    assert expand(["experiment=smoke", "data.path=x"]) == ["experiment=smoke", "data.path=x"]


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ([], None),  # of the demo's file: 300
        (["experiment=smoke"], None),
        (["trainer.max_steps=7"], 7),
        (["trainer=demo"], None),
        (["trainer={max_steps:7}"], 7),
        (["trainer={batch_size:7}"], None),
    ],
)
def test_epochs_on_the_command_line_unset_the_steps_of_a_file(given: list[str], steps: int | None) -> None:
    trainer = compose([*given, "trainer.epochs=2"]).trainer
    assert (trainer.epochs, trainer.max_steps) == (2, steps)
    assert "trainer.max_steps=null" in expand(["trainer.epochs=1,2"], sweep=True)
    assert compose(["trainer={epochs:2}"]).trainer.max_steps is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["trainer={epochs:2},{epochs:3}"], "trainer={max_steps:null,epochs:2},{max_steps:null,epochs:3}"),
        (
            ["trainer={epochs:2},{epochs:3,max_steps:4},{batch_size:8}"],
            "trainer={max_steps:null,epochs:2},{epochs:3,max_steps:4},{batch_size:8}",
        ),
        (["trainer={epochs:2},{epochs:3}", "trainer.max_steps=7"], "trainer={epochs:2},{epochs:3}"),
        (["data={path:a.jsonl},{path:b.jsonl}"], "data=jsonl"),
        (["model={path:some/x},{path:some/y}"], "model=custom"),
    ],
)
def test_mappings_of_a_sweep_choose_as_one_does(given: list[str], expected: str) -> None:
    assert expected in expand(given, sweep=True)


def test_a_mapping_chooses_as_its_keys_one_by_one_do() -> None:
    path = compose(["mode=plan", "model={path:some/x}", "data={path:rows.jsonl}"])
    assert path == compose(["mode=plan", "model.path=some/x", "data.path=rows.jsonl"])
    assert compose(["model={dtype:float32}"]).data.builtin == "demo"
    assert compose(["mode=plan", "model={path:some/x}"]).data.builtin is None


def test_a_plan_without_data_is_not_for_the_rows_of_the_demo() -> None:
    for given in ("model=deepseek_v3", "model.path=some/model", "experiment=deepseek_v3_amx_4gpu"):
        data = compose(["mode=plan", given]).data
        assert data.builtin is None and data.max_length * Config().trainer.batch_size >= 8192, given
    for given in (["model=demo"], ["model=mini"], [], ["model=deepseek_v3", "data=demo"]):
        assert compose(["mode=plan", *given]).data.builtin == "demo", given
    assert compose(["model.path=some/model", "data=demo"]).data.builtin == "demo"


def test_options_of_a_users_own_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(
        "defaults: [custom, _self_]\nname: mine\npath: /models/mine\n"
    )
    config = compose(["model=mine", "data=demo"], config_dir=str(tmp_path))
    assert (config.model.name, config.model.path) == ("mine", "/models/mine")


def test_option_list_is_frozen() -> None:
    frozen = Path(__file__).with_name("options.txt").read_text().splitlines()
    assert option_list() == frozen, (
        "if the new options are meant: python -m docs.options_page --options > tests/config/options.txt"
    )


def test_committed_reference_is_current() -> None:
    committed = (REPO / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == render(), "run python -m docs.options_page > docs/configuration.md"


def test_every_key_has_a_comment_in_one_file() -> None:
    assert {key: texts for key in fields() if len(texts := comments().get(key, [])) != 1} == {}
    assert "rule.experts" in groups()


def test_a_comment_is_one_line_without_its_examples_and_without_the_files_own() -> None:
    assert comments()["model.name"][0].startswith("Label for logs")  # not custom.yaml's first line
    (layers,) = comments()["rule.layers"]
    assert layers.endswith("names one per replica.") and "\n" not in layers


def test_conf_of_an_installed_package_comes_first(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "kt_ray"
    (package / "conf").mkdir(parents=True)
    (package.parent / "conf").mkdir()
    (package.parent / "conf" / "config.yaml").write_text("{}")
    assert conf_dir(package) == package.parent / "conf"
    (package / "conf" / "config.yaml").write_text("{}")
    assert conf_dir(package) == package / "conf"


def test_missing_conf_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"configuration files are missing.*pip install"):
        conf_dir(tmp_path / "kt_ray")


def test_bare_hardware_names_stand_for_files_in_conf(tmp_path: Path) -> None:
    names = sorted(p.stem for p in (conf_dir() / "hardware").glob("*.yaml"))
    assert names, "conf/hardware holds the examples that mode=plan points to"
    assert compose(["mode=plan", f"plan.hardware={names[0]}"]).plan.hardware == str(hardware_file(names[0]))
    other = compose(["mode=plan", f"plan.hardware={tmp_path}/box.yaml"]).plan.hardware
    assert other == f"{tmp_path}/box.yaml"


def test_config_yaml_of_a_run_reads_back(tmp_path: Path) -> None:
    options = ["model=deepseek_v3", "mode=plan", "lora.target_modules=[q_proj,o_proj]", "tracking.tags=[a]"]
    config = compose([*options, f"run.root={tmp_path}"])
    run = RunDir.create(config)
    run.close()
    assert from_dict(yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))) == config


def _leaves(mapping: dict[str, object], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key, value in mapping.items():
        if isinstance(value, dict):
            found += _leaves(value, f"{prefix}{key}.")
        else:
            found.append(prefix + key)
    return found
