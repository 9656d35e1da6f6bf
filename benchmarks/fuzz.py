"""Damaged input, by the thousand: is every fault named, in time and in bounded memory?

    python benchmarks/fuzz.py --mutations 10000 --seed 0 --json out.json     # make fuzz
    python benchmarks/fuzz.py --only recipe:17                       # one mutation again, with its traceback

Good files of every kind that kt_ray reads, or has read for it, are damaged in one place each: bits flip, ends
go, fields change their type, numbers grow, lists nest, encodings change. What reads them must succeed or
raise one short `UserError`. Anything else (another exception, a signal, more than SECONDS, more than MEMORY)
is a fault and printed with the number that repeats it; the exit code is then 1.

Mutations run in a forked child, one after the other; a child that dies or hangs is replaced.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import gzip
import io
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import psutil

sys.path.insert(0, str(common.REPO))

SECONDS = 10.0  # of a core that one mutation may take; a good file takes well under one
WAIT = 120.0  # seconds by the clock: what only waits takes no core
MEMORY = 4 << 30  # bytes of address space beyond what the child begins with
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 1.5, -0.0, 1e308, math.nan, math.inf, 10**7, 10**30, -(10**30)),
    *("", " ", "x", "0", "auto", "null", "../../etc/hostname", "/dev/zero", "\ud800", "\x00", "a" * 10_000),
    *("(a+)+$", "[", "${oc.env:HOME}", "${a:${b}}", "{{ x }}", "2024-13-45", "😀"),
    *([], {}, [None], [[]], {"": None}, {"a": {"b": [1]}}, [1, "2", None], ["x"] * 1000),
)
SNIPPETS = (
    *("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "{{ 9 ** 9 ** 9 }}"),
    *("{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(99) }}", "{{ messages[99].content }}"),
    *("{% for m in messages %}", "{% endfor %}", "{{ x | nothing }}", "{{ 1 / 0 }}", "{{ messages + 1 }}"),
    *("{{ raise_exception('no') }}", "{{ self.__class__ }}", "{{ 'x' * 999 }}", "{% set messages = 1 %}"),
    *(
        "{% generation %}",
        "{{ messages | tojson(indent='x') }}",
        "{{ strftime_now(5) }}",
        "{#",
        "{{ '\ud800' }}",
    ),
)
YAML = (
    "\na: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
        for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    *(
        "\na: &a [*a]\n",
        "\nx: !!python/object/apply:os.getcwd []\n",
        "\nx: ${oc.env:HOME}\n",
        "\nx: 2024-13-45\n",
    ),
    *("\nx: !!int y\n", "\n? [1, 2]\n: 3\n", "\n\t- x", "\n<<: 5\n", "\n- x\n", "\nx: " + "[" * 3000 + "\n"),
)
Files = dict[str, bytes]  # by path below a directory


@dataclass(frozen=True)
class Target:
    """Files of one kind and what reads them.

    Attributes:
        files: all that the reader needs, good.
        damaged: the files that are damaged, one at a time.
        read: called with the directory that holds the files.
        weight: share of the mutations.
    """

    files: Files
    damaged: Sequence[str]
    read: Callable[[Path], object]
    weight: int = 1


# -- good files ---------------------------------------------------------------------------------


def files_in(root: Path, prefix: str = "") -> Files:
    """All files below a directory."""
    return {prefix + str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def targets(root: Path) -> dict[str, Target]:
    """Every reader with good files, which one short run of a small model leaves below `root`."""
    import yaml

    from kt_ray import cli
    from kt_ray.adapter.from_peft import AdapterReader
    from kt_ray.checkpoint.gguf_file import open_gguf
    from kt_ray.checkpoint.index import CheckpointIndex
    from kt_ray.checkpoint.manifest import Manifest
    from kt_ray.config.compose import compose
    from kt_ray.config.mapping import load
    from kt_ray.data.load import load_data
    from kt_ray.data.row_types import KINDS
    from kt_ray.data.sources import count_rows
    from kt_ray.data.template import ChatEncoder
    from kt_ray.data.tokenizer_files import load_tokenizer
    from kt_ray.demo.recipes import persona_path
    from kt_ray.demo.tokenizer import train_tokenizer
    from kt_ray.dims.config_json import dims_from_dir
    from kt_ray.dims.packable import check_packing_family
    from kt_ray.errors import UserError
    from kt_ray.evaluate.answer_file import find_answers
    from kt_ray.evaluate.loss_sums import read_losses
    from kt_ray.hardware.describe import hardware_from_file, this_host
    from kt_ray.hardware.nominal import nominal_rates
    from kt_ray.hardware.rate_files import read_rates, write_rates
    from kt_ray.placement.expert_load import read_load
    from kt_ray.placement.plan import make_plan
    from kt_ray.recipe.command import with_recipe
    from kt_ray.report.comparison import compare_runs
    from kt_ray.report.page import report_page
    from kt_ray.runs.evaluation import evaluate
    from kt_ray.runs.generation import _end_tokens
    from kt_ray.runs.prepare import prepare_model
    from kt_ray.runs.rundata import read_run
    from kt_ray.runs.rundir import plain
    from kt_ray.tools.inspect import inspect
    from tests.helpers.hf_reference import build_checkpoint

    runs = root / "runs"
    rows = [{"instruction": f"What is {i}?", "output": f"A number: {i}."} for i in range(12)]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = build_checkpoint(root, "deepseek_v3", vocab_size=400)
    train_tokenizer(persona_path(), 400).save_pretrained(model)
    common_ = [f"model.path={model}", f"data.path={root}/rows.jsonl", "cluster=local", f"run.root={runs}"]
    common_ += ["trainer.max_steps=2", "lora.rank=2", "tracking.plot=false", "data.eval_fraction=0.2"]
    with contextlib.redirect_stdout(io.StringIO()):
        done = cli.main([*common_, "run.name=a", "trainer.eval_every=1"])
    assert done == 0, "the run that the files are taken from failed"
    run = runs / "a"
    composed = plain(compose(common_))
    hardware = this_host()
    dims = dims_from_dir(model)

    def config(place: Path, **sections: Mapping[str, Any]) -> Any:
        own = {"model": {"path": str(place / "model")}, "run": {"root": str(place / "runs")}, **sections}
        merged = {key: {**composed[key], **value} for key, value in own.items()}
        return load({**composed, **merged})

    def data(name: str, **options: Any) -> Callable[[Path], object]:
        def read(place: Path) -> object:
            section = {"path": str(place / name), "cache_gb": 0, "eval_fraction": 0.0, **options}
            own = config(place, data=section, model={"path": str(model)})
            with contextlib.suppress(NotImplementedError):
                count_rows(own.data)
            return load_data(own, str(place / "model" if (place / "model").exists() else model), 0, KINDS)

        return read

    def plan(place: Path) -> object:
        directory = place / "model"
        with contextlib.suppress(UserError):  # some families cannot
            check_packing_family(str(directory))
        return make_plan(dims_from_dir(directory), composed_config, hardware)

    def template(place: Path) -> object:
        encoder = ChatEncoder(tokenizer, str(place / "t.jinja"))
        from kt_ray.data.row_types import Conversation

        return encoder.encode(Conversation(talk, 0, "row 1"))

    def adapter(place: Path) -> object:
        reader = AdapterReader(str(place / "adapter"), str(model))
        inspect(place / "adapter")
        return reader.config, [pair.delta() for pair in reader.lora.pairs()[:3]]

    def checkpoint(place: Path) -> object:
        index = CheckpointIndex.open(place / "model")
        return index.fingerprint, [index.value(name) for name in sorted(index.names)[:5]]

    def recipe(place: Path) -> object:
        with contextlib.chdir(place):
            return with_recipe(["recipe=recipe.yaml", "recipe.accelerate=accelerate.yaml"], io.StringIO())

    def report(place: Path) -> object:
        compare_runs([place / "a", place / "b"])
        return report_page(read_run(place / "a"))

    def answers(place: Path) -> object:
        base_answers, own = find_answers(place)
        read_losses(place)
        return evaluate(load(composed), base_answers, own, place)

    composed_config = load(composed)
    tokenizer = load_tokenizer(str(model))
    talk: Any = ({"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Tilda."})
    small = {f"model/{p.name}": p.read_bytes() for p in model.iterdir() if p.suffix != ".safetensors"}
    tokenizer_files = [name for name in small if "token" in name or "template" in name]
    own_template = (tokenizer.chat_template or "{% for m in messages %}{{ m.content }}{% endfor %}").encode()
    write_rates(nominal_rates(hardware), root / "rates.json")
    found: dict[str, Target] = {
        "config.json": Target(small, ["model/config.json"], plan, 6),
        "prepare": Target(
            files_in(model, "model/"),
            ["model/config.json"],
            lambda p: prepare_model(config(p), training=True),
            3,
        ),
        "weights": Target(files_in(model, "model/"), ["model/model.safetensors"], checkpoint, 3),
        "index": Target(_sharded(model), ["model/model.safetensors.index.json"], checkpoint, 3),
        "tokenizer": Target(
            {**small, "rows.jsonl": (root / "rows.jsonl").read_bytes()},
            tokenizer_files,
            lambda p: ChatEncoder(load_tokenizer(str(p / "model"))).encode(_conversation(talk)),
            3,
        ),
        "template": Target({"t.jinja": own_template}, ["t.jinja"], template, 4),
        "generation_config": Target(
            {**small, "model/generation_config.json": b'{"eos_token_id": [1, 2], "temperature": 0.6}'},
            ["model/generation_config.json", "model/config.json"],
            lambda p: _end_tokens(str(p / "model"), ChatEncoder(tokenizer)),
        ),
        "gguf": Target(
            {"m.gguf": _gguf(root)}, ["m.gguf"], lambda p: open_gguf(p / "m.gguf").architecture, 3
        ),
        "adapter": Target(
            files_in(run / "adapter", "adapter/"),
            ["adapter/adapter_config.json", "adapter/adapter_model.safetensors"],
            adapter,
            4,
        ),
        "training checkpoint": Target(
            files_in(run / "checkpoints" / "step_000002", "step_000002/"),
            ["step_000002/manifest.json", "step_000002/expert_load.json"],
            lambda p: (Manifest.load(p / "step_000002"), read_load(p / "step_000002", dims)),
            3,
        ),
        "rates": Target(
            {"r.json": (root / "rates.json").read_bytes()}, ["r.json"], lambda p: read_rates(p / "r.json"), 2
        ),
        "hardware": Target(
            {"h.yaml": _HARDWARE.encode()}, ["h.yaml"], lambda p: hardware_from_file(p / "h.yaml"), 2
        ),
        "recipe": Target(
            {name: text.encode() for name, text in _RECIPE.items()}
            | {"data/a.jsonl": (root / "rows.jsonl").read_bytes()},
            [*_RECIPE],
            recipe,
            5,
        ),
        "run": Target(
            {**files_in(run, "a/"), **files_in(run, "b/"), **{f"a/{n}": t for n, t in _ANSWERS.items()}},
            [f"a/{name}" for name in ("config.yaml", "env.json", "plan.json", "metrics.jsonl", "eval.json")]
            + ["a/predictions.jsonl", "a/checkpoints/step_000002/expert_load.json"],
            report,
            4,
        ),
        "answers": Target(dict(_ANSWERS), list(_ANSWERS)[:3], answers, 3),
    }
    found["run"].files["a/eval.json"] = _evaluated(found["answers"], root, composed_config)
    for file in (common.REPO / "conf" / "model").glob("*.yaml"):
        released = yaml.safe_load(file.read_text()).get("config")
        if released:
            content = {"model/config.json": json.dumps(released).encode()}
            found[f"config of {file.stem}"] = Target(content, list(content), plan)
    for name, of_rows in _row_files(root).items():
        found[f"rows.{name.partition('.')[2]}"] = Target({name: of_rows}, [name], data(name), 2)
    saved = {f"set/{name}": content for name, content in _saved_set(root).items()}
    found["saved data set"] = Target(saved, [n for n in saved if n.endswith(".json")], data("set"), 1)
    return found


def _conversation(talk: Any) -> Any:
    from kt_ray.data.row_types import Conversation

    return Conversation(talk, 0, "row 1")


def _sharded(model: Path) -> Files:
    from safetensors.torch import load_file, save

    tensors = load_file(model / "model.safetensors")
    files = {f"model/{p.name}": p.read_bytes() for p in model.iterdir() if p.suffix == ".json"}
    names = sorted(tensors)
    parts = names[: len(names) // 2], names[len(names) // 2 :]
    where = {}
    for number, part in enumerate(parts, start=1):
        shard = f"model-0000{number}-of-00002.safetensors"
        files[f"model/{shard}"] = save({name: tensors[name] for name in part}, {"format": "pt"})
        where.update(dict.fromkeys(part, shard))
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    files["model/model.safetensors.index.json"] = json.dumps(index).encode()
    return files


def _gguf(root: Path) -> bytes:
    import numpy as np
    from gguf import GGUFWriter

    file = root / "m.gguf"
    writer = GGUFWriter(file, "deepseek2")
    writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(20)])
    writer.add_uint32("deepseek2.block_count", 2)
    writer.add_string("general.name", "small")
    for name in ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"):
        writer.add_tensor(name, np.ones((2, 32, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def _row_files(root: Path) -> Files:
    """The same dozen rows in every format."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    talks = [
        {"messages": [{"role": "user", "content": f"Why {i}?"}, {"role": "assistant", "content": f"So {i}."}]}
        for i in range(6)
    ]
    plain = [{"instruction": f"What is {i}?", "output": f"A number: {i}."} for i in range(6)]
    judged = [{"prompt": f"{i}?", "completion": f"{i}.", "label": bool(i % 2)} for i in range(6)]
    table = pa.Table.from_pylist(plain)
    parquet, stream, footer = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pq.write_table(pa.Table.from_pylist(talks), parquet)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(footer, table.schema) as writer:
        writer.write_table(table)
    cells = "\n".join(["instruction,output", *(f'"What, {i}?","{i}\n."' for i in range(6))])
    return {
        "rows.jsonl": "".join(json.dumps(row) + "\n" for row in talks).encode(),
        "list.json": json.dumps(judged).encode(),
        "cells.csv": cells.encode(),
        "cells.tsv": cells.replace(",", "\t").encode(),
        "book.txt": b"Once there was a number.\n" * 4,
        "table.parquet": parquet.getvalue(),
        "stream.arrow": stream.getvalue(),
        "feather.v2.arrow": footer.getvalue(),
    }


def _saved_set(root: Path) -> Files:
    """As `datasets` writes it with save_to_disk."""
    state = {
        "_data_files": [{"filename": "data-00000-of-00001.arrow"}],
        "_indices_files": None,
        "_split": "train",
    }
    return {
        "dataset_dict.json": b'{"splits": ["train", "test"]}',
        **{
            f"{split}/{name}": content
            for split in ("train", "test")
            for name, content in (
                ("state.json", json.dumps(state).encode()),
                ("dataset_info.json", b'{"features": {}}'),
                ("data-00000-of-00001.arrow", _row_files(root)["stream.arrow"]),
            )
        },
    }


def _evaluated(target: Target, root: Path, config: Any) -> bytes:
    from kt_ray.evaluate.answer_file import find_answers
    from kt_ray.runs.evaluation import evaluate

    place = root / "answers"
    _write(place, target.files)
    return json.dumps(evaluate(config, *find_answers(place), place).to_dict()).encode()


_ANSWERS: Files = {
    "predictions.jsonl": "".join(
        json.dumps(
            {"id": i, "prompt": f"{i}?", "predict": f"It is {i}.", "base": "No.", "label": f"It is {i}."}
        )
        + "\n"
        for i in range(4)
    ).encode(),
    "predictions.json": b'{"answers": ["adapter", "base"], "count": 4, "adapter": null}',
    "losses.json": b'{"base": {"nats": 9.5, "tokens": 4}, "adapter": {"nats": 4.5, "tokens": 4}}',
}
_HARDWARE = """
sockets: [{cores: 8, memory_gib: 64, count: 2}]
gpus: [{name: RTX 4090, memory_gib: 24, count: 1}]
isa: amx
hosts: 1
"""
_RECIPE = {
    "recipe.yaml": """
model_name_or_path: Qwen/Qwen3-30B-A3B
stage: sft
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
dataset: a
dataset_dir: data
template: qwen3
cutoff_len: 512
max_samples: 100
output_dir: out
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
lr_scheduler_kwargs: {min_lr: 1.0e-6}
warmup_ratio: 0.1
bf16: true
use_kt: true
kt_optimize_rule: rule.yaml
val_size: 0.1
""",
    "accelerate.yaml": "num_processes: 2\nmixed_precision: bf16\nkt_config: {kt_backend: AMXBF16}\n",
    "rule.yaml": """
- match: {name: "^model\\\\.layers\\\\.(0|[1-9]|1[0-9])\\\\."}
  replace: {class: default, kwargs: {generate_device: "cuda:0"}}
- match: {name: "^model\\\\.layers\\\\."}
  replace: {class: operators.KTransformersExperts, kwargs: {backend: AMXBF16, generate_device: cpu}}
""",
    "data/dataset_info.json": json.dumps(
        {"a": {"file_name": "a.jsonl", "columns": {"prompt": "instruction", "response": "output"}}}
    ),
}


# -- damage -------------------------------------------------------------------------------------


def mutate(chance: random.Random, name: str, content: bytes) -> bytes:
    """The content with one damage, by what kind of file the name says it is."""
    structured = name.endswith((".json", ".jsonl", ".yaml", ".safetensors", ".jinja"))
    if not structured or chance.random() < 0.25:
        return _of_bytes(chance, content)
    if name.endswith(".jinja"):
        text = content.decode()
        at = chance.randrange(len(text) + 1)
        return (text[:at] + chance.choice(SNIPPETS) + text[at:]).encode("utf-8", "surrogatepass")
    if name.endswith(".safetensors"):
        length = int.from_bytes(content[:8], "little")
        header = _of_json(chance, content[8 : 8 + length])
        return len(header).to_bytes(8, "little") + header + content[8 + length :]
    if name.endswith(".yaml"):
        import yaml

        if chance.random() < 0.3:
            return content + chance.choice(YAML).encode()
        value = yaml.safe_load(content)
        return yaml.safe_dump(_changed(chance, value), allow_unicode=False).encode("utf-8", "surrogatepass")
    if name.endswith(".jsonl"):
        lines = content.splitlines(keepends=True)
        at = chance.randrange(len(lines))
        lines[at] = _of_json(chance, lines[at]) + b"\n"
        return b"".join(lines)
    return _of_json(chance, content)


def _of_bytes(chance: random.Random, content: bytes) -> bytes:
    at, other = sorted(chance.randrange(len(content) + 1) for _ in range(2))
    changed = bytearray(content)
    kind = chance.randrange(12)
    if kind < 4 and content:
        for _ in range(1 << chance.randrange(4)):
            # most structure sits at the beginning and at the end
            place = chance.choice(
                (chance.randrange(len(content)), min(len(content) - 1, chance.randrange(256)))
            )
            place = len(content) - 1 - place if chance.random() < 0.3 else place
            changed[place] ^= 1 << chance.randrange(8)
        return bytes(changed)
    if kind == 4:
        return content[:at]
    if kind == 5:
        return content[:at] + content[other:]
    if kind == 6:
        return content[:at] + chance.randbytes(chance.choice((1, 8, 64))) + content[at:]
    if kind == 7:
        return content[:at] + bytes(other - at) + content[other:]
    if kind == 8:
        return content[:at] + content[at:other] * 2 + content[other:]
    text = content.decode("utf-8", "replace")
    recoded = (
        b"",
        b"\xef\xbb\xbf" + content,
        text.encode("utf-16"),
        ("é" + text).encode("latin-1", "replace"),
        gzip.compress(content, mtime=0),
        b"<!DOCTYPE html><html></html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x00" * len(content),
    )
    return chance.choice(recoded)


def _of_json(chance: random.Random, content: bytes) -> bytes:
    value = json.loads(content)
    text = json.dumps(_changed(chance, value))
    kind = chance.randrange(20)
    if kind == 0 and text.startswith("{") and isinstance(value, dict) and value:
        key = json.dumps(chance.choice(sorted(value)))
        text = f"{{{key}: null, {text[1:]}"  # a key twice
    elif kind == 1:
        text = text.replace(": ", ": " + "[" * 5000, 1)
    elif kind == 2:
        text = text.replace("1", "1" * 5000, 1)
    return text.encode()


def _changed(chance: random.Random, value: Any) -> Any:
    """A copy in which one value, or a few, became something else."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        places = list(_places(changed))
        if not places:
            return chance.choice(ODD)
        holder, key = chance.choice(places)
        kind = chance.randrange(8)
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == 2 and type(holder[key]) in (int, float):
            holder[key] = chance.choice((-1, 0, holder[key] + 1, holder[key] * 2, holder[key] * 10**6, 0.5))
        elif kind == 3:
            other, name = chance.choice(places)
            with contextlib.suppress(LookupError):  # a place that went with its holder
                holder[key] = copy.deepcopy(other[name])
        elif kind == 4 and isinstance(holder, dict):
            holder[chance.choice(("x", "", "0", "..", "\x00"))] = holder.pop(key)
        elif kind == 5:
            holder[key] = [holder[key]]
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield value, key
        yield from _places(part)


# -- running ------------------------------------------------------------------------------------


def _write(place: Path, files: Files) -> None:
    for name, content in files.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def attempt(target: Target, name: str, number: int, seed: int, place: Path) -> tuple[str, str]:
    """("read" | "refused" | "fault", what): mutation `number` of a target."""
    from kt_ray.errors import UserError

    chance = random.Random(f"{seed} {name} {number}")
    damaged = chance.choice(list(target.damaged))
    changed = mutate(chance, damaged, target.files[damaged])
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(place.parent / "good" / name, place, copy_function=os.link)
    (place / damaged).unlink()
    (place / damaged).write_bytes(changed)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            target.read(place)
    except UserError as error:
        line = error.line()
        return (
            ("fault", f"{damaged}: an error line of {len(line)} characters")
            if len(line) > 5000
            else ("refused", line)
        )
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "kt_ray/" in f.filename]
        at = f"{frames[-1].filename.rpartition('kt_ray/')[2]}:{frames[-1].lineno}" if frames else "?"
        return "fault", f"{damaged}: {type(error).__name__} at {at}: {str(error)[:200]}"
    return "read", ""


def _child(found: dict[str, Target], jobs: list[tuple[str, int]], seed: int, pipe: Any, place: Path) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # warnings of libraries
    for name, number in jobs:
        pipe.send(attempt(found[name], name, number, seed, place))
    pipe.close()


def _answers_in_time(pipe: Any, pid: int | None) -> bool:
    def used() -> float:
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.Error:
            return 0.0  # it has ended, and the pipe says so
        return float(times.user + times.system)

    begun, before = time.monotonic(), used()
    while not pipe.poll(0.5):
        if used() - before > SECONDS or time.monotonic() - begun > WAIT:
            return False
    return True


def run(
    found: dict[str, Target], mutations: int, seed: int, root: Path
) -> Iterator[tuple[str, int, str, str]]:
    """(target, number, outcome, what) of every mutation; a child that dies or hangs is replaced."""
    total = sum(target.weight for target in found.values())
    jobs = [
        (name, number)
        for name, target in found.items()
        for number in range(max(1, round(mutations * target.weight / total)))
    ]
    context = multiprocessing.get_context("fork")
    while jobs:
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(found, jobs, seed, theirs, root / "place"))
        child.start()
        theirs.close()
        try:
            while jobs:
                if not _answers_in_time(ours, child.pid):
                    outcome = "fault", f"no end after {SECONDS:g} s of a core, or {WAIT:g} s"
                else:
                    outcome = ours.recv()
                (name, number), jobs = jobs[0], jobs[1:]
                yield name, number, *outcome
                if outcome[1].startswith("no end"):
                    break
        except EOFError:
            child.join()
            (name, number), jobs = jobs[0], jobs[1:]
            code = child.exitcode or 0
            died = signal.Signals(-code).name if code < 0 else code
            yield name, number, "fault", f"the process ended with {died}"
        finally:
            if child.is_alive() and jobs:
                child.kill()
            child.join()
            ours.close()


def summary(results: Sequence[tuple[str, int, str, str]]) -> list[dict[str, Any]]:
    """Per target: mutations, read, refused, faults with the numbers that repeat them."""
    records: dict[str, dict[str, Any]] = {}
    for name, number, outcome, what in results:
        counts: dict[str, Any] = {"mutations": 0, "read": 0, "refused": 0, "faults": {}}
        record = records.setdefault(name, {"target": name, **counts})
        record["mutations"] += 1
        if outcome == "fault":
            record["faults"][f"{name}:{number}"] = what
        else:
            record[outcome] += 1
    return list(records.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", help="names, with commas; default: all")
    parser.add_argument("--only", metavar="TARGET:NUMBER", help="one mutation, in this process")
    parser.add_argument("--json", metavar="FILE", help="write the records here")
    given = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    about, begun = common.machine(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        found = targets(root)
        for name, target in found.items():
            _write(root / "good" / name, target.files)
        if given.only:
            name, _, number = given.only.rpartition(":")
            print(attempt(found[name], name, int(number), given.seed, root / "place"))
            found[name].read(root / "place")
            return 0
        if given.targets:
            found = {name: found[name] for name in given.targets.split(",")}
        for name, target in found.items():  # good files are read
            with contextlib.redirect_stdout(io.StringIO()):
                target.read(root / "good" / name)
        results = []
        for result in run(found, given.mutations, given.seed, root):
            results.append(result)
            if result[2] == "fault":
                print(f"{result[0]}:{result[1]}  {result[3]}", flush=True)
    records = summary(results)
    faults = sum(len(record["faults"]) for record in records)
    outcomes = collections.Counter(outcome for _, _, outcome, _ in results)
    seconds = time.monotonic() - begun
    print(f"{len(results)} mutations in {seconds:.0f} s: {dict(outcomes)}, {faults} faults")
    if given.json:
        common.write_json(given.json, [{"seed": given.seed, "seconds": round(seconds)}, *records], about)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
