"""Files that come from elsewhere: of the wrong kind, type, size or encoding, and ones made to do harm."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.bad_input.place import ROWS, TINY, VOCAB, Case, Place, truncate
from tests.helpers.bad_input.run import RESUME

PLAN = "mode=plan model.path={model}"
SLOW = r"((.{1,99}){1,99}){1,99}(?!.)\w"
DEEP = "[" * 100_000
BOMB = "a: &a [x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 8)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)

# Not a checkpoint to resume: there its checksum speaks first.
LOAD = (
    "model.path={model} data.path={dir}/rows.jsonl trainer.max_steps=1 cluster=local "
    "rule.experts.load={dir}/runs/done/checkpoints/step_000002"
)


def _written(name: str, content: str | bytes) -> Callable[[Place], object]:
    """A file in the case's directory; "model/..." in the model's."""

    def spoil(place: Place) -> None:
        if name.startswith("model/"):
            _ = place.model
        if name.startswith("runs/done/"):
            _ = place.run
        file = place.path / name
        if file.is_symlink() or file.exists():
            file.unlink()
        place.write(name, content)

    return spoil


def _json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Place], object]:
    """A JSON file of the model or the run with a change."""

    def spoil(place: Place) -> None:
        _ = place.model if name.startswith("model/") else place.run
        value = json.loads((place.path / name).read_text())
        change(value)
        (place.path / name).write_text(json.dumps(value))

    return spoil


def _pipe(name: str) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        _ = place.model
        (place.path / name).unlink(missing_ok=True)
        os.mkfifo(place.path / name)

    return spoil


def _link(name: str, to: str) -> Callable[[Place], object]:
    def spoil(place: Place) -> None:
        _ = place.model
        (place.path / name).unlink(missing_ok=True)
        (place.path / name).symlink_to(to)

    return spoil


def _impatient(case: Case) -> Case:
    """With 0.05 s for a regular expression, not a whole one."""

    def spoil(place: Place) -> None:
        case.spoil(place)
        place.monkeypatch.setattr("kt_ray.parse._PATTERN_SECONDS", 0.05)

    return replace(case, spoil=spoil)


def _config(name: str, expected: list[str], arguments: str = PLAN, **changes: Any) -> Case:
    return Case(f"config.json: {name}", arguments, expected, lambda p: p.config(**changes))


def _config_file(name: str, content: str | bytes, *expected: str) -> Case:
    parts = ["config.json cannot be read", "{model}/config.json", *expected, "download config.json again"]
    return Case(f"config.json: {name}", PLAN, parts, _written("model/config.json", content))


CONFIG = [
    _config_file("byte order mark", b"\xef\xbb\xbf{}", "byte order mark"),
    _config_file("UTF-16", json.dumps({"a": 1}).encode("utf-16"), "utf-8"),
    _config_file("gzip", gzip.compress(b"{}"), "a gzip archive (gunzip unpacks it)"),
    _config_file("nested deeply", DEEP, "nested too deeply"),
    _config_file("objects nested deeply", '{"a":' * 50_000, "nested too deeply"),
    _config_file("half a surrogate pair", '{"model_type": "\\ud800"}', "half of a surrogate pair"),
    _config_file("a key twice", '{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
    _config_file("a number of 9,999 digits", '{"hidden_size": ' + "9" * 9999 + "}", "digits"),
    Case("config.json: a pipe", PLAN, ["no config.json", "{model}"], _pipe("model/config.json")),
    Case(
        "config.json: a device", PLAN, ["no config.json", "{model}"], _link("model/config.json", "/dev/zero")
    ),
    _config("ten million layers", ["num_hidden_layers", "10000000", "at most 4096"], num_hidden_layers=10**7),
    _config("a width of 10^30", ["hidden_size", "at most", "config.json"], hidden_size=10**30),
    _config("a billion experts", ["n_routed_experts", "at most", "config.json"], n_routed_experts=10**9),
    _config("half a layer", ["num_hidden_layers", "2.5", "integer of at least 1"], num_hidden_layers=2.5),
    _config("vocab_size true", ["vocab_size", "True", "integer of at least 1"], vocab_size=True),
    _config("top k as text", ["num_experts_per_tok", "'2'", "integer"], num_experts_per_tok="2"),
    _config("heads null", ["lacks num_attention_heads", "config.json"], num_attention_heads=None),
    _config("pad_token_id no token", ["pad_token_id", f"found {VOCAB}", "null"], pad_token_id=VOCAB),
    _config("rope_parameters a list", ["config", "To fix"], TINY, rope_parameters=[1]),
    _config("hidden_act a number", ["activation", "5"], TINY, hidden_act=5),
    _config("model_type a list", ["config.json"], TINY, model_type=["deepseek_v3"]),
    _impatient(
        _config(
            "a pattern that never ends",
            ["regular expression takes too long", "quantization_config", "within 0.05 s"],
            quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["re:" + SLOW]},
        )
    ),
]


def _rows(name: str, content: str | bytes, expected: list[str], file: str = "rows.jsonl") -> Case:
    arguments = TINY if file == "rows.jsonl" else TINY + " data.path={dir}/" + file
    return Case(f"rows: {name}", arguments, [file.partition("/")[0], *expected], _written(file, content))


def _table(rows: list[dict[str, Any]], suffix: str) -> bytes:
    table, out = pa.Table.from_pylist(rows), io.BytesIO()
    if suffix == "parquet":
        pq.write_table(table, out)
    else:
        with pa.ipc.new_stream(out, table.schema) as writer:
            writer.write_table(table)
    return out.getvalue()


def _crafted_arrow() -> bytes:
    """An arrow file whose offsets of the second text lead far outside its buffer."""
    content = _table([{"instruction": "ab", "output": "c"}, {"instruction": "de", "output": "f"}], "arrow")
    offsets = b"\x00\x00\x00\x00\x02\x00\x00\x00\x04\x00\x00\x00"
    at = content.index(offsets)
    return content[: at + 8] + (1 << 30).to_bytes(4, "little") + content[at + 12 :]


def _saved(**files: str) -> Callable[[Place], object]:
    """A directory as `datasets` saves it, with these files ("state" = state.json)."""

    def spoil(place: Place) -> None:
        place.write("set/a.arrow", _table([dict(row) for row in ROWS], "arrow"))
        place.write("secret.jsonl", json.dumps({"text": "secret"}))
        for name, content in files.items():
            place.write(f"set/{name}.json", content)

    return spoil


def _set(name: str, expected: list[str], **files: str) -> Case:
    return Case(f"saved data set: {name}", TINY + " data.path={dir}/set", expected, _saved(**files))


_GOOD = json.dumps(ROWS[0])
DATA_FILES = [
    _rows(
        "half a surrogate pair",
        _GOOD + '\n{"instruction": "\\ud83d", "output": "a"}\n',
        ["line 2", "\\ud83d is half of a surrogate pair"],
    ),
    _rows(
        "half a pair in a list",
        f'[{_GOOD}, {{"instruction": "a", "output": "\\udc00"}}]',
        ["row 2", "\\udc00 is half of a surrogate pair"],
        "rows.json",
    ),
    _rows(
        "half a pair in tools",
        json.dumps({**ROWS[0], "tools": '["\\ud800"]'}) + "\n",
        ["line 1", "surrogate pair"],
    ),
    _rows("nested deeply", _GOOD + "\n" + DEEP + "\n", ["line 2", "nested too deeply"]),
    _rows("a list nested deeply", DEEP, ["invalid JSON", "nested too deeply"], "rows.json"),
    _rows("a number of 9,999 digits", '{"text": ' + "9" * 9999 + "}\n", ["line 1", "digits"]),
    _rows("gzip", gzip.compress(_GOOD.encode()), ["not UTF-8", "a gzip archive (gunzip unpacks it)"]),
    _rows("parquet", _table([dict(ROWS[0])], "parquet"), ["not UTF-8", "a parquet file"]),
    _rows("zstd", b"\x28\xb5\x2f\xfd\xff\xff", ["not UTF-8", "a zstd archive"]),
    _rows("UTF-16", (_GOOD + "\n").encode("utf-16"), ["not UTF-8", "iconv"]),
    _rows("Latin-1", '{"text": "\xe9t\xe9"}'.encode("latin-1"), ["not UTF-8", "byte 0xe9", "iconv"]),
    Case("rows: a pipe", TINY, ["no regular file", "a pipe", "data.path="], _pipe("rows.jsonl")),
    Case("rows: a device", TINY, ["no regular file", "a device"], _link("rows.jsonl", "/dev/zero")),
    Case("rows: unreadable", TINY, ["cannot be read", "rows.jsonl"], _link("rows.jsonl", "/proc/self/mem")),
    Case("rows: a link to itself", TINY, ["does not exist"], _link("rows.jsonl", "rows.jsonl")),
    Case(
        "rows: an unreadable file in a directory",
        TINY + " data.path={dir}/many",
        ["cannot be read", "b.jsonl"],
        lambda p: (p.write("many/a.jsonl", _GOOD), (p.path / "many/b.jsonl").symlink_to("/proc/self/mem")),
    ),
    _rows("an empty prompt", '{"prompt": "", "completion": "a"}\n', ["question is empty", "line 1, prompt"]),
    _rows("an empty text", '{"text": ""}\n', ["empty", "line 1, text"]),
    _rows(
        "a date for a text",
        _table([{"instruction": "When?", "output": date(2024, 1, 1)}], "parquet"),
        ["output has the wrong type", "row 1", "date"],
        "table.parquet",
    ),
    _rows(
        "a truncated parquet",
        _table([dict(r) for r in ROWS], "parquet")[:-9],
        ["write it again"],
        "t.parquet",
    ),
    _rows("a truncated arrow", _table([dict(r) for r in ROWS], "arrow")[:300], ["write it again"], "t.arrow"),
    _rows("an arrow of noise", bytes(range(256)), ["arrow file cannot be read"], "t.arrow"),
    _rows("a crafted arrow", _crafted_arrow(), ["arrow file cannot be read", "write it again"], "t.arrow"),
    _rows("an empty parquet", b"", ["parquet file cannot be read"], "t.parquet"),
    _rows("a column twice", "output,output\na,b\n", ["two columns of the same name"], "t.csv"),
    _rows("a cell too many", "instruction,output\na,b,c\n", ["more cells", "line 2"], "t.csv"),
    _rows("a quote that never ends", 'instruction,output\n"a,b\n', ["invalid CSV"], "t.csv"),
    _rows("a number alone", "5", ["must hold a list of rows"], "rows.json"),
    _rows("roles as numbers", '{"messages": [{"role": 5, "content": "a"}]}\n', ["unknown role", "line 1"]),
    _rows("messages a number", '{"messages": 5}\n', ["messages has the wrong type", "line 1"]),
    _rows(
        "a tool call without a name",
        json.dumps(
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{}]}]}
        )
        + "\n",
        ["tool_calls", "line 1"],
    ),
    _rows("binary text", b"\x80\x81", ["not UTF-8"], "book.txt"),
    _set(
        "a file elsewhere",
        ["not beside it", "../secret.jsonl", "state.json"],
        state='{"_data_files": [{"filename": "../secret.jsonl"}]}',
    ),
    _set(
        "an absolute file",
        ["not beside it", "/etc/hostname"],
        state='{"_data_files": [{"filename": "/etc/hostname"}]}',
    ),
    _set(
        "a file that is not there",
        ["not beside it", "b.arrow"],
        state='{"_data_files": [{"filename": "b.arrow"}]}',
    ),
    _set("no JSON", ["state.json", "cannot be read"], state="{"),
    _set("files without names", ["_data_files[0].filename", "a text"], state='{"_data_files": [{}]}'),
    _set("files as numbers", ["_data_files[0]", "an object"], state='{"_data_files": [5]}'),
    _set(
        "splits elsewhere",
        ["dataset_dict.json", "split elsewhere", "../.."],
        dataset_dict='{"splits": ["../.."]}',
    ),
    _set("splits as numbers", ["dataset_dict.json", "splits[0]"], dataset_dict='{"splits": [1]}'),
    _set("splits no JSON", ["dataset_dict.json", "cannot be read"], dataset_dict="]"),
]


def _tokenizer(name: str, change: Callable[[dict[str, Any]], object]) -> Case:
    expected = ["no tokenizer can be loaded", "model.path={model}"]
    return Case(f"tokenizer: {name}", TINY, expected, _json("model/tokenizer_config.json", change))


def _template(name: str, text: str | bytes, expected: list[str]) -> Case:
    arguments = TINY + " model.chat_template={dir}/t.jinja"
    return Case(f"template: {name}", arguments, expected, _written("t.jinja", text))


_TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"
_ENDLESS = "error: the chat template refuses a plain question and answer"
TOKENIZER = [
    _tokenizer("max length a text", lambda c: c.update(model_max_length="long")),
    _tokenizer("end token a number", lambda c: c.update(eos_token=5)),
    Case(
        "tokenizer: settings a list",
        TINY,
        ["no tokenizer", "{model}"],
        _written("model/tokenizer_config.json", "[]"),
    ),
    Case(
        "tokenizer: truncated",
        TINY,
        ["no tokenizer can be loaded", "{model}"],
        lambda p: truncate(p.model / "tokenizer.json"),
    ),
    _template("no filter of that name", "{{ messages | shout }}", ["template is broken", "t.jinja", "shout"]),
    _template("a loop without an end", _TURNS[:-12], ["template is broken", "{dir}/t.jinja", "line 1"]),
    _template("not UTF-8", b"\xff\xfe", ["chat template file cannot be read", "{dir}/t.jinja"]),
    _template("a power", _TURNS + "{{ 9 ** 9 ** 9 }}", ["computes a power", "{dir}/t.jinja"]),
    _template(
        "nested loops",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        [_ENDLESS, "more than 100000 steps", "t.jinja", "give model.chat_template"],
    ),
    _template(
        "nested loops without a turn",
        "{% for a in range(99999) %}{% for b in range(99999) if false or false %}{% endfor %}{% endfor %}",
        [_ENDLESS, "more than 100000 steps"],
    ),
    _template(
        "another raise_exception",
        "{% set raise_exception = strftime_now %}"
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        [_ENDLESS, "more than 100000 steps"],
    ),
    _template(
        "a macro that calls itself twice",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(25) }}",
        [_ENDLESS, "more than 100000 steps", "t.jinja"],
    ),
    _template("a division by zero", "{{ 1 // 0 }}", ["refuses", "ZeroDivisionError", "t.jinja"]),
    _template("an attribute of nothing", "{{ a.b.c }}", ["refuses", "UndefinedError", "t.jinja"]),
    _template("a private attribute", "{{ messages.__class__.__mro__ }}", ["refuses", "SecurityError"]),
    Case(
        "template: a pipe",
        TINY + " model.chat_template={dir}/t.jinja",
        ["chat template file does not exist", "t.jinja"],
        _pipe("t.jinja"),
    ),
]


def _index(name: str, change: Callable[[dict[str, Any]], object], expected: list[str]) -> Case:
    def spoil(place: Place) -> None:
        place.shards()
        _json("model/model.safetensors.index.json", change)(place)

    return Case(f"index: {name}", TINY, expected, spoil)


def _header(name: str, change: Callable[[dict[str, Any]], Any], *expected: str) -> Case:
    def spoil(place: Place) -> None:
        file = place.model / "model.safetensors"
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        changed = json.dumps(change(header["lm_head.weight"]) or header).encode()
        file.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + length :])

    return Case(f"header: {name}", TINY, ["header is damaged", "model.safetensors", *expected], spoil)


WEIGHTS = [
    _index(
        "an absolute path",
        lambda i: i["weight_map"].update({"lm_head.weight": "/etc/x.safetensors"}),
        ["outside its directory"],
    ),
    _index(
        "a number for a file",
        lambda i: i["weight_map"].update({"lm_head.weight": 5}),
        ["outside its directory", "5"],
    ),
    _index(
        "a name of 999 letters",
        lambda i: i["weight_map"].update({"lm_head.weight": "a" * 999 + ".safetensors"}),
        ["outside its directory"],
    ),
    _index("weight_map a list", lambda i: i.update(weight_map=[]), ["no weight_map", "index.json"]),
    _header("type a list", lambda t: t.update(dtype=["F32"])),
    _header("shape a text", lambda t: t.update(shape="12")),
    _header("shape of halves", lambda t: t.update(shape=[0.5, 2])),
    _header("offsets a number", lambda t: t.update(data_offsets=5)),
    _header("three offsets", lambda t: t.update(data_offsets=[0, 1, 2])),
    _header("shape of 10^99", lambda t: t.update(shape=[10**99, 10**99]), "bytes for shape"),
    _header("an entry that is no object", lambda t: {"lm_head.weight": 5}),
    _header("a list", lambda t: [t]),
    Case(
        "weights: a pipe",
        TINY,
        ["absent or incomplete", "model.safetensors"],
        _pipe("model/model.safetensors"),
    ),
]


def _manifest(name: str, change: Callable[[dict[str, Any]], object], *expected: str) -> Case:
    file = "runs/done/checkpoints/step_000002/manifest.json"
    parts = ["manifest", "manifest.json", *expected, "choose another checkpoint"]
    return Case(f"manifest: {name}", RESUME, parts, _json(file, change))


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
        _written("runs/done/checkpoints/step_000002/expert_load.json", "{"),
    ),
    Case(
        "histogram: steps a text",
        LOAD,
        ["histogram of tokens per expert", "expert_load.json", "steps"],
        _json("runs/done/checkpoints/step_000002/expert_load.json", lambda h: h.update(steps="2")),
    ),
    Case(
        "histogram: counts below zero",
        LOAD,
        ["histogram of tokens per expert", "expert_load.json", "no counts"],
        _json("runs/done/checkpoints/step_000002/expert_load.json", lambda h: h["slots"].update({"1": [-1]})),
    ),
]


def _adapter(name: str, change: Callable[[dict[str, Any]], object], *expected: str) -> Case:
    file = "runs/done/adapter/adapter_config.json"
    return Case(
        f"adapter: {name}",
        "tools inspect {dir}/runs/done/adapter",
        ["adapter_config.json", *expected],
        _json(file, change),
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
    _impatient(
        _adapter("a pattern that never ends", lambda c: c.update(rank_pattern={SLOW: 8}), "takes too long")
    ),
    _adapter("target_parameters a text", lambda c: c.update(target_parameters="x"), "target_parameters"),
    _adapter("peft_type a list", lambda c: c.update(peft_type=["LORA"]), "peft_type", "a text"),
    Case(
        "adapter: settings a list",
        "tools inspect {dir}/runs/done/adapter",
        ["adapter_config.json is not a JSON object"],
        _written("runs/done/adapter/adapter_config.json", "[]"),
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
        _json("runs/done/adapter/adapter_config.json", lambda c: c.update(peft_type="IA3")),
    ),
    Case(
        "generation_config: end tokens as texts",
        "mode=chat model.path={model}",
        ["generation_config.json", "eos_token_id[0]", "a whole number"],
        _written("model/generation_config.json", '{"eos_token_id": ["</s>"]}'),
    ),
    Case(
        "generation_config: no JSON",
        "mode=chat model.path={model}",
        ["generation_config.json cannot be read", "{model}"],
        _written("model/generation_config.json", "{"),
    ),
]


def _recipe(name: str, text: str | bytes, *expected: str, **files: str) -> Case:
    def spoil(place: Place) -> None:
        place.write("r.yaml", text)
        place.write("data/a.jsonl", _GOOD)
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
    Case("recipe: a pipe", "recipe={dir}/r.yaml", ["recipe does not exist", "r.yaml"], _pipe("r.yaml")),
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
    _impatient(
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
        _written(f"runs/done/{file}", content),
    )


_EVAL = "mode=eval eval.adapter={dir}/p"


def _answers(name: str, row: str, *expected: str) -> Case:
    return Case(
        f"answers: {name}",
        _EVAL,
        ["predictions.jsonl:1", *expected],
        _written("p/predictions.jsonl", row + "\n"),
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
        _written("runs/done/predictions.json", "{"),
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
        _pipe("p.jsonl"),
    ),
]


def _rates(name: str, content: str | bytes, *expected: str) -> Case:
    arguments = PLAN + " plan.rates={dir}/r.json"
    return Case(f"rates: {name}", arguments, ["r.json", *expected], _written("r.json", content))


def _machine(name: str, content: str | bytes, *expected: str) -> Case:
    arguments = PLAN + " plan.hardware={dir}/h.yaml"
    return Case(f"hardware: {name}", arguments, ["h.yaml", *expected], _written("h.yaml", content))


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
    *(_closed(key, PLAN) for key in ("plan.hardware", "plan.rates", "lora.adapter")),
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


FOREIGN: list[Case] = [
    *CONFIG,
    *DATA_FILES,
    *TOKENIZER,
    *WEIGHTS,
    *CHECKPOINT,
    *ADAPTER,
    *RECIPE,
    *RUNS,
    *MACHINE,
]
