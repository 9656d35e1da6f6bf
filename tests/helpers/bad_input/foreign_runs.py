"""Files of earlier runs that others have changed: checkpoints, adapters, answers, records."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

from tests.helpers.bad_input.place import Case, truncate
from tests.helpers.bad_input.run import RESUME
from tests.helpers.bad_input.spoiling import (
    BOMB,
    DEEP,
    SLOW,
    impatient,
    json_file,
    pipe,
    written,
)

HISTOGRAM = "runs/done/checkpoints/step_000002/expert_load.json"
# Not a checkpoint to resume: there its checksum speaks first.
LOAD = (
    "model.path={model} data.path={dir}/rows.jsonl trainer.max_steps=1 cluster=local "
    "rule.experts.load={dir}/runs/done/checkpoints/step_000002"
)


def _manifest(name: str, change: Callable[[dict[str, Any]], object], *expected: str) -> Case:
    file = "runs/done/checkpoints/step_000002/manifest.json"
    parts = ["manifest", "manifest.json", *expected, "choose another checkpoint"]
    return Case(f"manifest: {name}", RESUME, parts, json_file(file, change))


CHECKPOINT = [
    _manifest("step a text", lambda m: m.update(step="2"), "step", "a whole number"),
    _manifest("step half", lambda m: m.update(step=2.5), "step"),
    _manifest("no seed", lambda m: m.pop("seed"), "seed", "nothing"),
    _manifest("shards an object", lambda m: m.update(shards={}), "shards", "a list"),
    _manifest("bytes a text", lambda m: m["shards"][0].update(bytes="9"), "shards[0].bytes"),
    _manifest("no checksum", lambda m: m["shards"][0].pop("crc32"), "shards[0].crc32"),
    _manifest("a shard elsewhere", lambda m: m["shards"][0].update(file="../../x"), "outside its directory"),
    _manifest("an unknown key", lambda m: m.update(more=1), "more"),
    _manifest("fields a list", lambda m: m.update(fields=[]), "fields", "an object"),
    Case(
        "histogram: no JSON",
        LOAD,
        ["histogram of tokens per expert", "expert_load.json", "name a checkpoint of this model"],
        written(HISTOGRAM, "{"),
    ),
    Case(
        "histogram: steps a text",
        LOAD,
        ["histogram of tokens per expert", "expert_load.json", "steps"],
        json_file(HISTOGRAM, lambda h: h.update(steps="2")),
    ),
    Case(
        "histogram: counts below zero",
        LOAD,
        ["histogram of tokens per expert", "expert_load.json", "no counts"],
        json_file(HISTOGRAM, lambda h: h["slots"].update({"1": [-1]})),
    ),
]


def _adapter(name: str, change: Callable[[dict[str, Any]], object], *expected: str) -> Case:
    file = "runs/done/adapter/adapter_config.json"
    return Case(
        f"adapter: {name}",
        "tools inspect {dir}/runs/done/adapter",
        ["adapter_config.json", *expected],
        json_file(file, change),
    )


ADAPTER = [
    _adapter("r a text", lambda c: c.update(r="8"), "damaged", "r", "a whole number"),
    _adapter("r true", lambda c: c.update(r=True), "damaged", "a whole number"),
    _adapter("r zero", lambda c: c.update(r=0), "not plain LoRA", "r 0"),
    _adapter("no alpha", lambda c: c.pop("lora_alpha"), "lora_alpha", "a number"),
    _adapter("alpha NaN", lambda c: c.update(lora_alpha=float("nan")), "lora_alpha", "nan"),
    _adapter("rank_pattern a list", lambda c: c.update(rank_pattern=[1]), "rank_pattern", "an object"),
    _adapter("rank_pattern of texts", lambda c: c.update(rank_pattern={"x": "8"}), "rank_pattern.x"),
    _adapter("rank_pattern of zeros", lambda c: c.update(rank_pattern={"x": 0}), "rank_pattern 0"),
    _adapter("a pattern that is none", lambda c: c.update(rank_pattern={"(": 8}), "no regular expression"),
    impatient(
        _adapter("a pattern that never ends", lambda c: c.update(rank_pattern={SLOW: 8}), "takes too long")
    ),
    _adapter("target_parameters a text", lambda c: c.update(target_parameters="x"), "target_parameters"),
    _adapter("peft_type a list", lambda c: c.update(peft_type=["LORA"]), "peft_type", "a text"),
    Case(
        "adapter: settings a list",
        "tools inspect {dir}/runs/done/adapter",
        ["adapter_config.json is not a JSON object"],
        written("runs/done/adapter/adapter_config.json", "[]"),
    ),
    Case(
        "adapter: truncated",
        "mode=predict model.path={model} data.path={dir}/rows.jsonl generate.adapter={dir}/runs/done",
        ["truncated", "adapter_model.safetensors"],
        lambda p: truncate(p.run / "adapter" / "adapter_model.safetensors"),
    ),
    Case(
        "adapter: settings of another program",
        "mode=chat model.path={model} generate.adapter={dir}/runs/done",
        ["not plain LoRA", "IA3"],
        json_file("runs/done/adapter/adapter_config.json", lambda c: c.update(peft_type="IA3")),
    ),
    Case(
        "generation_config: end tokens as texts",
        "mode=chat model.path={model}",
        ["generation_config.json", "eos_token_id[0]", "a whole number"],
        written("model/generation_config.json", '{"eos_token_id": ["</s>"]}'),
    ),
    Case(
        "generation_config: no JSON",
        "mode=chat model.path={model}",
        ["generation_config.json cannot be read", "{model}"],
        written("model/generation_config.json", "{"),
    ),
]


def _run(
    name: str,
    file: str,
    content: str | bytes,
    *expected: str,
    arguments: str = "mode=report report.run={dir}/runs/done",
) -> Case:
    return Case(
        f"run: {name}",
        arguments,
        [file.rpartition("/")[2], *expected],
        written(f"runs/done/{file}", content),
    )


_EVAL = "mode=eval eval.adapter={dir}/p"


def _answers(name: str, row: str, *expected: str) -> Case:
    return Case(
        f"answers: {name}",
        _EVAL,
        ["predictions.jsonl:1", *expected],
        written("p/predictions.jsonl", row + "\n"),
    )


RUNS = [
    _run("config.yaml a list", "config.yaml", "[1]\n", "damaged", "an object", "restore it"),
    _run("config.yaml garbage", "config.yaml", b"\x00\xff", "cannot be read", "restore it"),
    _run("config.yaml aliases of aliases", "config.yaml", BOMB, "too large with its aliases"),
    _run("config.yaml a Python object", "config.yaml", "a: !!python/name:os.system\n", "cannot be read"),
    _run("config.yaml with a number for a key", "config.yaml", "5: 6\n", "damaged"),
    _run("env.json no JSON", "env.json", "{", "cannot be read", "move it away"),
    _run("env.json actors a number", "env.json", '{"actors": 5}', "actors", "a list"),
    _run("env.json layers of one", "env.json", '{"actors": [{"layers": [1]}]}', "actors[0].layers", "of 2"),
    _run("plan.json a list", "plan.json", "[]", "not a JSON object"),
    _run(
        "eval.json scores as texts",
        "eval.json",
        '{"base": {"metrics": {"bleu": "high"}}}',
        "base.metrics.bleu",
    ),
    _run("eval.json base a list", "eval.json", '{"base": []}', "base", "an object"),
    _run("predictions no JSON", "predictions.jsonl", "{\n", "no JSON object", "predictions.jsonl:1"),
    _run(
        "histogram of something else",
        "checkpoints/step_000002/expert_load.json",
        '{"slots": {"x": [1]}}',
        "no layer",
    ),
    Case(
        "run: config.yaml in a comparison",
        "mode=compare run.root={dir}/runs",
        ["config.yaml", "too large with its aliases"],
        lambda p: (
            p.run,
            shutil.copytree(p.run, p.path / "runs" / "b"),
            p.write("runs/b/config.yaml", "a: &a [*a]\n"),
        ),
    ),
    Case(
        "answers of a stopped job that are no JSON",
        "mode=predict model.path={model} data.path={dir}/rows.jsonl run.name=done data.eval_fraction=0.5 "
        "generate.max_new_tokens=8",
        ["settings of the predictions", "predictions.json"],
        written("runs/done/predictions.json", "{"),
    ),
    _answers("an answer that is a number", '{"predict": 5, "label": "a"}', "predict"),
    _answers("no label", '{"predict": "a"}', "no label"),
    _answers("a prompt that is a number", '{"prompt": 5, "predict": "a", "label": "b"}', "prompt"),
    _answers("half a surrogate pair", '{"predict": "\\ud800", "label": "b"}', "no JSON object"),
    _answers("nested deeply", DEEP, "no JSON object"),
    _answers("logits as text", '{"predict": "a", "label": "b", "option_logits": "A"}', "option_logits"),
    _answers("loss NaN", '{"predict": "a", "label": "b", "loss_nats": NaN, "loss_tokens": 1}', "loss_nats"),
    Case(
        "answers: a pipe",
        "mode=eval eval.adapter={dir}/p.jsonl",
        ["no predictions", "p.jsonl"],
        pipe("p.jsonl"),
    ),
]


FOREIGN_RUNS: list[Case] = [*CHECKPOINT, *ADAPTER, *RUNS]
