"""Recipes, rates and descriptions of machines that come from elsewhere, and paths that cannot be used."""

from __future__ import annotations

import errno
import gzip
import os
from typing import Any

from tests.helpers.bad_input.place import TINY, Case, Place
from tests.helpers.bad_input.spoiling import (
    BOMB,
    DEEP,
    GOOD,
    PLANNED,
    SLOW,
    impatient,
    pipe,
    written,
)


def _recipe(name: str, text: str | bytes, *expected: str, **files: str) -> Case:
    def spoil(place: Place) -> None:
        place.write("r.yaml", text)
        place.write("data/a.jsonl", GOOD)
        for file, content in {"data/dataset_info.json": '{"a": {"file_name": "a.jsonl"}}', **files}.items():
            place.write(file.replace("_yaml", ".yaml"), content)

    return Case(f"recipe: {name}", "recipe={dir}/r.yaml", list(expected), spoil)


_BASE = "model_name_or_path: Qwen/Qwen3-30B-A3B\nstage: sft\nfinetuning_type: lora\n"
_BASE += "dataset: a\ndataset_dir: data\n"


def _info(name: str, entry: str, *expected: str) -> Case:
    return _recipe(
        f"dataset_info {name}", _BASE, "dataset_info.json", *expected, **{"data/dataset_info.json": entry}
    )


def _rule(name: str, text: str, *expected: str) -> Case:
    return _recipe(f"rule {name}", _BASE + "kt_optimize_rule: rule.yaml\n", *expected, rule_yaml=text)


RECIPE = [
    _recipe("the environment", _BASE + "output_dir: ${oc.env:HOME}\n", "more than its own fields", "r.yaml"),
    _recipe("a resolver inside another", _BASE + "x: ${${stage}:HOME}\n", "more than its own fields"),
    _recipe("a resolver in a key", _BASE + "? '${oc.env:HOME}'\n: 1\n", "r.yaml"),
    _recipe("aliases of aliases", BOMB, "too large with its aliases written out", "r.yaml", "at most 100000"),
    _recipe("an alias in itself", "a: &a [*a]\n", "too large with its aliases", "inside of what it names"),
    _recipe("a Python object", "a: !!python/object/apply:os.getcwd []\n", "recipe cannot be read", "r.yaml"),
    _recipe("a number that is none", "a: !!int x\n", "recipe cannot be read", "r.yaml"),
    _recipe("neither true nor false", "a: !!bool x\n", "recipe cannot be read", "r.yaml"),
    _recipe("a tab", "a:\n\t- b\n", "recipe cannot be read", "r.yaml"),
    _recipe("lists in lists", "a: " + "[" * 20_000, "recipe cannot be read", "r.yaml"),
    _recipe("a number", "5\n", "no mapping", "r.yaml"),
    _recipe("two megabytes", "a: " + "x" * (2 << 20), "more than 1 MiB", "r.yaml"),
    _recipe("gzip", gzip.compress(b"a: 1"), "a gzip archive", "r.yaml"),
    _recipe("a list for a rank", _BASE + "lora_rank: [8]\n", "lora_rank", "is no number"),
    _recipe("an endless rank", _BASE + "lora_rank: .inf\n", "lora_rank", "r.yaml"),
    _recipe("samples as text", _BASE + "max_samples: many\n", "max_samples", "r.yaml"),
    _recipe(
        "a schedule of texts",
        _BASE + "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {min_lr: low}\n",
        "lr_scheduler_kwargs",
        "r.yaml",
    ),
    Case("recipe: a pipe", "recipe={dir}/r.yaml", ["recipe does not exist", "r.yaml"], pipe("r.yaml")),
    _info("a list", "[]", "not a JSON object"),
    _info("nested deeply", DEEP, "nested too deeply"),
    _info("an entry that is a number", '{"a": 5}', "a", "an object"),
    _info("columns a list", '{"a": {"file_name": "a.jsonl", "columns": ["x"]}}', "a.columns", "an object"),
    _info(
        "a column that is a number",
        '{"a": {"file_name": "a.jsonl", "columns": {"prompt": 5}}}',
        "a.columns.prompt",
        "a text",
    ),
    _info("a file that is a number", '{"a": {"file_name": 5}}', "a.file_name", "a text"),
    _info("samples as text", '{"a": {"file_name": "a.jsonl", "num_samples": "all"}}', "a.num_samples"),
    _rule("a number", "5\n", "kt_optimize_rule", "no list of match and replace"),
    _rule("a match that is a list", "- match: [x]\n", "optimize rule", "[0].match", "an object"),
    _rule("names as numbers", "- match: {name: 5}\n", "[0].match.name", "a text"),
    _rule("aliases of aliases", BOMB, "optimize rule", "too large with its aliases"),
    impatient(
        _rule(
            "a pattern that never ends",
            f"- match: {{name: '{SLOW}'}}\n"
            "  replace: {kwargs: {generate_device: 'cuda:0'}}\n"
            "- match: {name: x}\n  replace: {kwargs: {generate_device: 'cuda:1', backend: AMXBF16}}\n",
            "takes too long",
            "kt_optimize_rule",
        )
    ),
]


def _rates(name: str, content: str | bytes, *expected: str) -> Case:
    arguments = PLANNED + " plan.rates={dir}/r.json"
    return Case(f"rates: {name}", arguments, ["r.json", *expected], written("r.json", content))


def _machine(name: str, content: str | bytes, *expected: str) -> Case:
    arguments = PLANNED + " plan.hardware={dir}/h.yaml"
    return Case(f"hardware: {name}", arguments, ["h.yaml", *expected], written("h.yaml", content))


def _closed(key: str, arguments: str) -> Case:
    """A key that names something below a directory which this user may not search."""

    def spoil(place: Place) -> None:
        real, below = os.stat, str(place.path / "closed") + os.sep

        def stat(path: Any, *args: Any, **more: Any) -> os.stat_result:
            if str(path).startswith(below):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *args, **more)

        place.monkeypatch.setattr(os, "stat", stat)

    expected = [
        "this user may not use",
        "{dir}/closed/x",
        "Permission denied",
        "ask its owner",
        "another path",
    ]
    return Case(f"{key} in a closed directory", f"{arguments} {key}={{dir}}/closed/x.yaml", expected, spoil)


MACHINE = [
    *(_closed(key, PLANNED) for key in ("plan.hardware", "plan.rates", "lora.adapter")),
    *(_closed(key, TINY) for key in ("data.path", "model.path")),
    Case(
        "a path no disk can hold",
        f"{TINY} data.path={'a' * 300}",
        ["a path is too long", "aaa", "255", "names it"],
    ),
    _rates("a list", "[]", "not a JSON object"),
    _rates("no version", "{}", "another version"),
    _rates("nested deeply", DEEP, "nested too deeply"),
    _rates("binary", b"\x80", "cannot be read"),
    _machine("a list", "[1]\n", "no mapping"),
    _machine("cores as text", "sockets: [{cores: many, memory_gib: 9}]\n", "cores"),
    _machine("10^30 cores", f"sockets: [{{cores: {10**30}, memory_gib: 9}}]\n", "cores", "at most 4096"),
    _machine(
        "a billion sockets", f"sockets: [{{cores: 1, memory_gib: 9, count: {10**9}}}]\n", "count", "at most"
    ),
    _machine("a billion hosts", f"sockets: [{{cores: 1, memory_gib: 9}}]\nhosts: {10**9}\n", "hosts"),
    _machine("no memory", "sockets: [{cores: 1, memory_gib: .nan}]\n", "memory_gib"),
    _machine("endless memory", "sockets: [{cores: 1, memory_gib: .inf}]\n", "memory_gib"),
    _machine("aliases of aliases", BOMB, "too large with its aliases"),
    _machine("a date that is none", "a: 2024-13-45\n", "cannot be read"),
    _machine("an isa that is a list", "sockets: [{cores: 1, memory_gib: 9}]\nisa: [amx]\n", "isa"),
]


FOREIGN_SETTINGS: list[Case] = [*RECIPE, *MACHINE]
