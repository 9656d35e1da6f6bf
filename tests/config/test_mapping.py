"""from_dict: types, coercions, did-you-mean; settle: what follows from other keys."""

from __future__ import annotations

import dataclasses
import datetime
import pickle
from pathlib import Path

import pytest

from kt_ray.config.faults import value_of
from kt_ray.config.fields import closest, closest_key, fields, show, type_name
from kt_ray.config.mapping import from_dict, load, settle
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.errors import UserError
from kt_ray.runs.rundir import plain
from tests.helpers.composing import nested


def test_empty_mapping_is_the_default() -> None:
    assert from_dict({}) == Config()


def test_round_trip() -> None:
    config = Config(lora=LoraConfig(rank=16, target_modules=["q_proj"]))
    assert from_dict(plain(config)) == config


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().lora.rank = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "given", "built"),
    [
        ("trainer.max_steps", 1e3, 1000),
        ("trainer.epochs", 2, 2.0),
        ("optim.lr", "1e-4", 1e-4),
        ("optim.betas", [0, 0.95], (0.0, 0.95)),
        ("run.name", 2024, "2024"),
        ("rule.stages", 2, 2),
        ("rule.stages", "auto", "auto"),
        ("rule.ray.worker_cpus", 1, 1.0),
        ("data.path", ["a", "b"], ["a", "b"]),
        ("data.limit", None, None),
        ("lora.target_modules", ["q_proj"], ["q_proj"]),
        ("model.config", {"hidden_size": 8}, {"hidden_size": 8}),
        ("tracking.tags", [], []),
    ],
)
def test_coercions(key: str, given: object, built: object) -> None:
    value = value_of(from_dict(nested(key, given)), key)
    assert value == built and type(value) is type(built)


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("lora.rank", "eight"),
        ("lora.rank", 8.5),
        ("lora.rank", True),
        ("lora.rank", None),
        ("lora.rslora", "yes"),
        ("lora.rslora", 1),
        ("optim.lr", "fast"),
        ("optim.lr", False),
        ("optim.betas", [0.9]),
        ("optim.betas", 0.9),
        ("tracking.tags", "one"),
        ("run.name", True),
        ("data.limit", "x"),
        ("model.config", [1]),
        ("rule.layers", "0-15"),
        ("data.path", {"a": 1}),
    ],
)
def test_wrong_types_name_key_value_and_type(key: str, given: object) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(nested(key, given))
    line = caught.value.line()
    assert f"{key}={show(given)}" in line
    assert type_name(fields()[key].hint) in line
    example = line.partition("To fix: write ")[2].replace("'", "")  # a mapping is quoted for the shell
    assert example.removeprefix("for example ").startswith(f"{key}=") and not example.endswith("=null")


def test_group_given_a_value() -> None:
    with pytest.raises(UserError, match=r"lora is a group of keys.*found lora=8.*lora\.rank="):
        from_dict({"lora": 8})


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("trainer.max_step", 1, "trainer.max_steps"),
        ("rule.experts.socket", 1, "rule.experts.sockets"),
        ("lora.Rank", 1, "lora.rank"),
        ("rank", 1, "lora.rank"),
        ("lora_rank", 1, "lora.rank"),
        ("trianer.max_steps", 1, "trainer.max_steps"),
        ("experts.isa", 1, "rule.experts.isa"),
        ("optim.rank", 1, "lora.rank"),
        ("moed", "plan", "mode"),
    ],
)
def test_did_you_mean(key: str, value: object, meant: str) -> None:
    assert closest_key(key) == meant
    with pytest.raises(UserError) as caught:
        from_dict(nested(key, value))
    # The fault of "trianer.max_steps" is the group, which is met first.
    assert "did you mean" in caught.value.line() and meant.partition(".")[0] in caught.value.line()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("moed", 1),  # no mode
        ("trainer.save_evry", [1]),  # nearly trainer.save_every, which is no list
        ("lora.rnk", 0),  # no rank
        ("generate.max_length", 64),  # data.max_length is about something else
        ("learning", 1e-4),  # somewhat like many
        ("name", "x"),  # the last part of several
    ],
)
def test_what_does_not_fit_is_not_proposed(key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        from_dict(nested(key, value))
    assert "did you mean" not in caught.value.line() and "write" not in caught.value.line()


def test_nothing_alike_proposes_nothing() -> None:
    assert closest_key("zzzz") is None
    assert closest("zzzz", ["alpha"]) is None
    with pytest.raises(UserError) as caught:
        from_dict({"zzzz": 1})
    assert "did you mean" not in caught.value.line() and "trainer" in caught.value.line()


def test_errors_survive_pickling() -> None:
    with pytest.raises(UserError) as caught:
        from_dict({"lora": {"rnk": 8}})
    assert pickle.loads(pickle.dumps(caught.value)).line() == caught.value.line()


def test_paths_become_absolute_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mapping = {
        "mode": "plan",
        "model": {"path": "m/DeepSeek", "tokenizer": "t", "chat_template": "c.jinja"},
        "data": {"path": ["a.jsonl", "b.jsonl"], "eval_path": "e.jsonl"},
        "trainer": {"resume": "runs/x/checkpoints/step_000010"},
        "rule": {"experts": {"load": "runs/y/checkpoints/latest"}},
        "run": {"root": "out"},
    }
    config = load(mapping)
    at = str(tmp_path)
    assert config.model.path == f"{at}/m/DeepSeek" and config.model.name == "DeepSeek"
    assert config.model.tokenizer == f"{at}/t" and config.model.chat_template == f"{at}/c.jinja"
    assert config.data.path == [f"{at}/a.jsonl", f"{at}/b.jsonl"]
    assert config.data.eval_path == f"{at}/e.jsonl"
    assert config.trainer.resume == f"{at}/runs/x/checkpoints/step_000010"
    assert config.rule.experts.load == f"{at}/runs/y/checkpoints/latest"
    assert config.run.root == f"{at}/out"
    assert settle(config) == config


@pytest.mark.parametrize(
    ("given", "settled"),
    [("r.py", "{at}/r.py"), ("a/r.py:f", "{at}/a/r.py:f"), ("/x/r.py", "/x/r.py"), ("numeric", "numeric")],
)
def test_the_file_of_a_reward_is_found_from_elsewhere(
    given: str, settled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    grpo = {"trainer": {"stage": "grpo"}, "grpo": {"group_size": 2}, "data": {"builtin": "demo"}}
    config = load({"reward": given, **grpo, "model": {"path": "/m"}})
    assert config.reward == settled.format(at=tmp_path) and settle(config) == config


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(
        {"model": {"path": "~/m"}, "train_server": {"directory": "~/s"}, "data": {"builtin": "demo"}}
    )
    assert config.model.path == "/home/someone/m" and config.train_server.directory == "/home/someone/s"


def test_a_named_model_keeps_its_name_beside_a_path() -> None:
    config = load({"model": {"name": "deepseek_v3", "path": "/x/y"}, "data": {"builtin": "demo"}})
    assert config.model.name == "deepseek_v3"


def test_path_overrules_build_and_builtin() -> None:
    config = load(
        {
            "model": {"name": "demo", "build": "demo", "path": "/x/y"},
            "data": {"builtin": "demo", "path": "r.jsonl"},
        }
    )
    assert (config.model.build, config.model.name, config.data.builtin) == (None, "y", None)


def test_multirun_jobs_get_names_of_their_own() -> None:
    demo = {"model": {"name": "demo", "build": "demo"}, "data": {"builtin": "demo"}}
    now = datetime.datetime(2030, 1, 2, 3, 4, 5)
    config = from_dict(demo)
    assert settle(config, job=3, now=now).run.name == "demo-20300102-030405-3"
    assert settle(config).run.name is None  # the run directory is named when it is made
    named = from_dict({**demo, "run": {"name": "a"}})
    assert (settle(named, job=0).run.name, settle(named).run.name) == ("a-0", "a")
    latest = from_dict({**demo, "trainer": {"resume": "latest"}})
    with pytest.raises(UserError, match=r"trainer\.resume=latest in a multirun.*set run\.name="):
        settle(latest, job=0)
