"""What fuzz.py damages: good files of every kind that kt_ray reads, and what reads them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common

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


def files_in(root: Path, prefix: str = "") -> Files:
    """All files below a directory."""
    return {prefix + str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def write_files(place: Path, files: Files) -> None:
    for name, content in files.items():
        file = place / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


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
    write_files(place, target.files)
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
