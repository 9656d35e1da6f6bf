"""Models and rows from elsewhere: of the wrong kind, type, size or encoding, and ones made to do harm."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from datetime import date
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.helpers.bad_input.place import ROWS, TINY, VOCAB, Case, Place, truncate
from tests.helpers.bad_input.spoiling import (
    DEEP,
    GOOD,
    PLANNED,
    SLOW,
    impatient,
    json_file,
    link,
    pipe,
    written,
)


def _config(name: str, expected: list[str], arguments: str = PLANNED, **changes: Any) -> Case:
    return Case(f"config.json: {name}", arguments, expected, lambda p: p.config(**changes))


def _config_file(name: str, content: str | bytes, *expected: str) -> Case:
    parts = ["config.json cannot be read", "{model}/config.json", *expected, "download config.json again"]
    return Case(f"config.json: {name}", PLANNED, parts, written("model/config.json", content))


CONFIG = [
    _config_file("byte order mark", b"\xef\xbb\xbf{}", "byte order mark"),
    _config_file("UTF-16", json.dumps({"a": 1}).encode("utf-16"), "utf-8"),
    _config_file("gzip", gzip.compress(b"{}"), "a gzip archive (gunzip unpacks it)"),
    _config_file("nested deeply", DEEP, "nested too deeply"),
    _config_file("objects nested deeply", '{"a":' * 50_000, "nested too deeply"),
    _config_file("half a surrogate pair", '{"model_type": "\\ud800"}', "half of a surrogate pair"),
    _config_file("a key twice", '{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' appears twice"),
    _config_file("a number of 9,999 digits", '{"hidden_size": ' + "9" * 9999 + "}", "digits"),
    Case("config.json: a pipe", PLANNED, ["no config.json", "{model}"], pipe("model/config.json")),
    Case(
        "config.json: a device",
        PLANNED,
        ["no config.json", "{model}"],
        link("model/config.json", "/dev/zero"),
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
    impatient(
        _config(
            "a pattern that never ends",
            ["regular expression takes too long", "quantization_config", "within 0.05 s"],
            quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["re:" + SLOW]},
        )
    ),
]


def _rows(name: str, content: str | bytes, expected: list[str], file: str = "rows.jsonl") -> Case:
    arguments = TINY if file == "rows.jsonl" else TINY + " data.path={dir}/" + file
    return Case(f"rows: {name}", arguments, [file.partition("/")[0], *expected], written(file, content))


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


DATA_FILES = [
    _rows(
        "half a surrogate pair",
        GOOD + '\n{"instruction": "\\ud83d", "output": "a"}\n',
        ["line 2", "\\ud83d is half of a surrogate pair"],
    ),
    _rows(
        "half a pair in a list",
        f'[{GOOD}, {{"instruction": "a", "output": "\\udc00"}}]',
        ["row 2", "\\udc00 is half of a surrogate pair"],
        "rows.json",
    ),
    _rows(
        "half a pair in tools",
        json.dumps({**ROWS[0], "tools": '["\\ud800"]'}) + "\n",
        ["line 1", "surrogate pair"],
    ),
    _rows("nested deeply", GOOD + "\n" + DEEP + "\n", ["line 2", "nested too deeply"]),
    _rows("a list nested deeply", DEEP, ["invalid JSON", "nested too deeply"], "rows.json"),
    _rows("a number of 9,999 digits", '{"text": ' + "9" * 9999 + "}\n", ["line 1", "digits"]),
    _rows("gzip", gzip.compress(GOOD.encode()), ["not UTF-8", "a gzip archive (gunzip unpacks it)"]),
    _rows("parquet", _table([dict(ROWS[0])], "parquet"), ["not UTF-8", "a parquet file"]),
    _rows("zstd", b"\x28\xb5\x2f\xfd\xff\xff", ["not UTF-8", "a zstd archive"]),
    _rows("UTF-16", (GOOD + "\n").encode("utf-16"), ["not UTF-8", "iconv -f UTF-16 -t"]),
    _rows("Latin-1", '{"text": "\xe9t\xe9"}'.encode("latin-1"), ["not UTF-8", "byte 0xe9", "iconv"]),
    Case("rows: a pipe", TINY, ["no regular file", "a pipe", "data.path="], pipe("rows.jsonl")),
    Case("rows: a device", TINY, ["no regular file", "a device"], link("rows.jsonl", "/dev/zero")),
    Case("rows: unreadable", TINY, ["cannot be read", "rows.jsonl"], link("rows.jsonl", "/proc/self/mem")),
    Case("rows: a link to itself", TINY, ["does not exist"], link("rows.jsonl", "rows.jsonl")),
    Case(
        "rows: an unreadable file in a directory",
        TINY + " data.path={dir}/many",
        ["cannot be read", "b.jsonl"],
        lambda p: (p.write("many/a.jsonl", GOOD), (p.path / "many/b.jsonl").symlink_to("/proc/self/mem")),
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
    return Case(f"tokenizer: {name}", TINY, expected, json_file("model/tokenizer_config.json", change))


def _template(name: str, text: str | bytes, expected: list[str]) -> Case:
    arguments = TINY + " model.chat_template={dir}/t.jinja"
    return Case(f"template: {name}", arguments, expected, written("t.jinja", text))


_TURNS = "{% for m in messages %}{{ m.content }}{% endfor %}"

_ENDLESS = "error: the chat template refuses a plain question and answer"

TOKENIZER = [
    _tokenizer("max length a text", lambda c: c.update(model_max_length="long")),
    _tokenizer("end token a number", lambda c: c.update(eos_token=5)),
    Case(
        "tokenizer: settings a list",
        TINY,
        ["no tokenizer", "{model}"],
        written("model/tokenizer_config.json", "[]"),
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
        pipe("t.jinja"),
    ),
]


def _index(name: str, change: Callable[[dict[str, Any]], object], expected: list[str]) -> Case:
    def spoil(place: Place) -> None:
        place.shards()
        json_file("model/model.safetensors.index.json", change)(place)

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
        pipe("model/model.safetensors"),
    ),
]


FOREIGN: list[Case] = [*CONFIG, *DATA_FILES, *TOKENIZER, *WEIGHTS]
