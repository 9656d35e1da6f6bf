"""Values that do not go together, and values that do."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.config.checks import check
from kt_ray.config.faults import value_of
from kt_ray.config.fields import fields, type_name
from kt_ray.config.limits import BOUNDS, WORDS, Bound
from kt_ray.config.mapping import from_dict
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from tests.helpers.composing import nested

DEMO: dict[str, Any] = {
    "model": {"name": "demo", "build": "demo"},
    "data": {"builtin": "demo"},
}


def _config(**groups: Any) -> Config:
    merged = {key: dict(value) for key, value in DEMO.items()}
    for group, values in groups.items():
        merged[group] = {**merged.get(group, {}), **values} if isinstance(values, dict) else values
    return from_dict(merged)


def _line(config: Config) -> str:
    with pytest.raises(UserError) as caught:
        check(config)
    return caught.value.line()


GOOD: list[dict[str, Any]] = [
    {},
    {"rule": {"layers": [2, 2]}},
    {"rule": {"layers": [2, 2], "stages": 2}},
    {"rule": {"layers": ["0-1", "2-3"]}},
    {
        "rule": {
            "layers": [
                {"match": r"^model\.layers\.0\.", "device": "cuda:0"},
                {"match": ".*", "device": "cuda:1"},
            ]
        }
    },
    {"rule": {"experts": {"backend": "AMXBF16", "isa": "avx2"}}},  # the same mathematics on another ISA
    {"rule": {"experts": {"placement": "balanced", "load": "runs/a/checkpoints/latest"}}},
    {"rule": {"experts": {"placement": "balanced"}}, "trainer": {"resume": "latest"}},
    {"rule": {"groups": 8, "ray": {"worker_cpus": 0.5}}},
    {"lora": {"rank": 256, "dropout": 0.99, "target_modules": r".*\.(q|o)_proj"}},
    {"lora": {"target_modules": "none"}},
    {"lora": {"experts": False}},
    {"optim": {"warmup": 0, "max_grad_norm": 0}},
    {"optim": {"warmup": 10}, "trainer": {"max_steps": 10}},
    {"optim": {"warmup": 1}, "trainer": {"max_steps": 1}},
    {"trainer": {"batch_size": 5, "micro_batch_size": 3}},  # the last micro-batch is smaller
    {"trainer": {"resume": "latest"}},
    {"trainer": {"resume": "./lastest"}},
    {"trainer": {"eval_every": 5}},
    {"trainer": {"eval_every": 5}, "data": {"eval_fraction": 0, "eval_path": "held.jsonl"}},
    {"trainer": {"loss_chunk": 0}},
    {"cluster": {"address": "10.0.0.1:6379"}},
    {"cluster": {"address": "[fd00::1]:6379"}},
    {"mode": "doctor", "model": {"build": None}, "data": {"builtin": None}},
    {"mode": "plan", "model": {"build": None, "config": {"hidden_size": 8}}, "data": {"builtin": None}},
    {"mode": "preview", "model": {"build": None, "tokenizer": "t"}},
    {"seed": 2**63 - 1},
    {"run": {"name": "猫 v1.2"}},
    {"mode": "predict", "generate": {"stop": ["\n\n", " "]}},
]


@pytest.mark.parametrize("groups", GOOD)
def test_good(groups: dict[str, Any]) -> None:
    check(_config(**groups))


@pytest.mark.parametrize("key", BOUNDS)
def test_numbers_out_of_range(key: str) -> None:
    bound = BOUNDS[key]
    outside = [bound.low if bound.open_low else bound.low - 1]
    if bound.high != float("inf"):
        outside.append(bound.high if bound.open_high else bound.high + 1)
    for value in outside:
        line = _line(_config(**nested(key, value)))
        assert key in line and f"{value:g}" in line and str(bound) in line and "To fix: set" in line


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_must_be_finite(value: float) -> None:
    assert not Bound(0).holds(value)
    assert "optim.lr" in _line(_config(optim={"lr": value}))


@pytest.mark.parametrize(
    "key", [k for k, f in fields().items() if type_name(f.hint) in ("int | str", "float | str")]
)
def test_a_number_or_a_word_is_no_other_text(key: str) -> None:
    """It would be found out where it is used, or not at all."""
    with pytest.raises(UserError) as caught:
        check(_config(**nested(key, "abc")))
    assert key in caught.value.line() and "abc" in caught.value.line()


@pytest.mark.parametrize("key", WORDS)
def test_unknown_words(key: str) -> None:
    meant = WORDS[key][0]
    line = _line(_config(**nested(key, meant + "x")))
    assert f"{key}={meant}x" in line and f"did you mean {meant}?" in line
    assert all(word in line for word in WORDS[key]) and f"To fix: set {key}={meant}" in line


def test_tables_name_existing_keys_and_hold_the_defaults() -> None:
    for key, words in WORDS.items():
        assert value_of(Config(), key) is None or value_of(Config(), key) in words
        assert "str" in type_name(fields()[key].hint)
    for key, bound in BOUNDS.items():
        default = fields()[key].default
        assert default is None or isinstance(default, str) or bound.holds(default)


LAYERS: list[tuple[list[Any], str]] = [
    ([], "is empty"),
    ([2, 0], "without layers"),
    ([2, "2-3"], "mixes styles"),
    ([1.5], "mixes styles"),
    ([True], "mixes styles"),
    (["0-1", "3-4"], "layer 2 must begin a range"),
    (["0-3", "2-4"], "layer 4 must begin a range"),
    (["1-3"], "layer 0 must begin a range"),
    (["3-0"], "layer 0 must begin a range"),
    (["first"], "has the entry 'first'"),
    ([{"match": "x"}], "is not a pattern"),
    ([{"match": "x", "device": "cuda:0", "to": 1}], "is not a pattern"),
    ([{"match": "(", "device": "cuda:0"}], "is not a regular expression"),
    ([{"match": 5, "device": "cuda:0"}], "is not a regular expression"),
    ([{"match": "x", "device": "gpu0"}], "is not a device"),
    ([{"match": "x", "device": 0}], "is not a device"),
]


@pytest.mark.parametrize(("layers", "reason"), LAYERS)
def test_layers(layers: list[Any], reason: str) -> None:
    line = _line(_config(rule={"layers": layers}))
    assert "rule.layers=" in line and reason in line and "To fix:" in line


@pytest.mark.parametrize(
    "data, named",
    [
        ({"columns": {"my role": ""}}, "data.columns"),
        ({"builtin": None, "sources": [{"path": "a.jsonl", "wei ght": 1}]}, "wei ght"),
    ],
)
def test_names_with_spaces(data: dict[str, Any], named: str) -> None:
    assert named in _line(_config(data=data))


def test_layers_against_stages_and_device() -> None:
    assert "3 entries for rule.stages=2" in _line(_config(rule={"layers": [1, 1, 1], "stages": 2}))
    pattern = [{"match": ".*", "device": "cuda:0"}]
    assert "clashes with rule.device=cpu" in _line(_config(rule={"layers": pattern, "device": "cpu"}))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/a", " a", "a\0"])
def test_bad_run_names(name: str) -> None:
    line = _line(_config(run={"name": name}))
    assert "cannot be a directory name" in line and "spaces at its ends" in line


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        ({"placement": "balanced"}, "rule.experts.placement=balanced needs a load"),
        ({"placement": "kept"}, "rule.experts.placement=kept has nothing to keep: the run resumes"),
        ({"load": ""}, "rule.experts.load='' is empty"),
    ],
)
def test_placement_by_load_needs_what_it_names(experts: dict[str, Any], message: str) -> None:
    line = _line(_config(rule={"experts": experts}))
    assert message in line and "To fix: set " in line and "rule.experts." in line


@pytest.mark.parametrize(("key", "value"), [("seed", 3), ("tokenizer", "some/tokenizer")])
def test_the_pretrained_demo_takes_no_other_seed_or_tokenizer(key: str, value: object) -> None:
    line = _line(_config(model={"build": "demo_base", key: value}))
    assert f"model.{key}={value} has no meaning" in line and "model=demo_random" in line
    check(_config(model={"build": "demo", key: value}))
    check(_config(model={"build": "demo_base", "path": "some/checkpoint", key: value}))


def _grpo(**more: Any) -> dict[str, Any]:
    given = {"trainer": {"stage": "grpo"}, "reward": "numeric", **more}
    given["trainer"] = {"stage": "grpo", "batch_size": 16, **more.get("trainer", {})}
    return _config(**given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"reward": None}, "reward=null must say what a good answer is"),
        ({"trainer": {"batch_size": 12}}, "trainer.batch_size=12 is no multiple of grpo.group_size=8"),
        ({"data": {"max_length": 256}}, "generate.max_new_tokens=256 leaves no room for a prompt"),
        ({"grpo": {"overlong_buffer": 256}}, "grpo.overlong_buffer=256 is not less than"),
        ({"grpo": {"group_size": 1}}, "grpo.group_size=1 is out of range"),
        ({"grpo": {"loss": "drgrpo"}}, "did you mean dr_grpo?"),
        ({"lora": {"dropout": 0.1}}, "lora.dropout=0.1 cannot be set with trainer.stage=grpo"),
        ({"generate": {"temperature": 0.7}}, "answers are drawn at temperature 1"),
        ({"data": {"packing": True}}, "data.packing=true cannot be set"),
        ({"data": {"group_by_length": True}}, "data.group_by_length=true cannot be set"),
        ({"generate": {"min_new_tokens": 2}}, "generate.min_new_tokens=2 cannot be set"),
        ({"rule": {"experts": {"activations": "int8"}}}, "clashes with the stage's reference or sampler"),
        ({"trainer": {"stage": "sft"}}, "reward=numeric has no meaning for trainer.stage=sft"),
        ({"trainer": {"stage": "dpo"}, "reward": None, "grpo": {"kl_coef": 0.1}}, "grpo has no meaning for"),
        ({"reward": " "}, "reward=  is empty; required a verifier"),
    ],
)
def test_what_grpo_needs(given: dict[str, Any], message: str) -> None:
    assert message in _line(_grpo(**given))
    check(_grpo())


def test_kto_needs_another_row() -> None:
    message = "trainer.batch_size=1 has no other row's answer for the reference point"
    assert message in _line(_config(trainer={"stage": "kto", "batch_size": 1}))
    check(_config(trainer={"stage": "kto", "batch_size": 2}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optim.name", "muon"),
        ("lora.dropout", 0.1),
        ("lora.init", "gaussian"),
        ("data.packing", True),
        ("trainer.stage", "orpo"),
        ("serve.adapters", {"mine": "/a"}),
    ],
)
def test_what_a_train_servers_clients_say_is_not_configured(key: str, value: Any) -> None:
    group, _, name = key.partition(".")
    line = _line(_config(mode="train_server", **{group: {name: value}}))
    assert line.startswith(f"{key}=") and "has no meaning with mode=train_server" in line
    assert f"leave out {key}" in line
    check(_config(mode="train_server", train_server={"adapters": 9}))
