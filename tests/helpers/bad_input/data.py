"""Data files, rows, tokenizers and templates that cannot be used."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from kt_ray.demo.recipes import persona_path
from kt_ray.demo.tokenizer import train_tokenizer
from tests.helpers.bad_input.place import ROWS, TINY, VOCAB, Case, Place


def _without_tokenizer(place: Place) -> None:
    for name in os.listdir(place.model):
        if "token" in name or "template" in name:
            (place.model / name).unlink()


def _tokenizer_config(place: Place, drop: Sequence[str]) -> None:
    file = place.model / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k not in drop}))
    for other in ("special_tokens_map.json", "chat_template.jinja"):
        (place.model / other).unlink(missing_ok=True)


def _wider_tokenizer(place: Place) -> None:
    train_tokenizer(persona_path(), VOCAB + 200).save_pretrained(place.path / "wide")


DATA: list[Case] = [
    Case(
        "data file missing",
        TINY,
        ["data file does not exist", "data.path={dir}/rows.jsonl", "correct data.path"],
        lambda p: (p.path / "rows.jsonl").unlink(),
    ),
    Case(
        "data directory without data",
        TINY + " data.path={dir}/rows",
        ["directory holds no data file", "data.path={dir}/rows", "found notes.log", "put data files there"],
        lambda p: ((p.path / "rows").mkdir(), (p.path / "rows" / "notes.log").write_text("x")),
    ),
    Case(
        "packed rows of a family with state",
        TINY + " data.packing=true",
        ["data.packing=true does not work", "qwen3_next", "gated delta", "set data.packing=false"],
        lambda p: p.config(model_type="qwen3_next"),
    ),
    Case(
        "rows that fit two formats",
        TINY,
        ["fits several data formats", "rows.jsonl, line 2", "alpaca, text", "set data.format=alpaca"],
        lambda p: p.rows(ROWS[0], {**ROWS[1], "text": "both"}),
    ),
    Case(
        "template of another model",
        TINY + " data.template=llama3",
        ["does not have the tokens of the template llama3", "<|eot_id|>", "set data.template=null"],
    ),
    Case(
        "data file of unknown kind",
        TINY + " data.path={dir}/rows.xlsx",
        ["unknown kind of data file", "found .xlsx", "convert it"],
        lambda p: p.write("rows.xlsx", "a,b"),
    ),
    Case(
        "data file empty",
        TINY,
        ["holds no rows", "{dir}/rows.jsonl", "at least one row"],
        lambda p: p.write("rows.jsonl", ""),
    ),
    Case(
        "data file of blank lines",
        TINY,
        ["holds no rows", "{dir}/rows.jsonl", "at least one row"],
        lambda p: p.write("rows.jsonl", "\n \n"),
    ),
    Case(
        "data line that is no JSON",
        TINY,
        ["invalid JSON", "rows.jsonl, line 3, column 2", "{'instruction': 1}", "correct or delete that line"],
        lambda p: p.write("rows.jsonl", json.dumps(ROWS[0]) + "\n\n{'instruction': 1}\n"),
    ),
    Case(
        "data file not UTF-8",
        TINY,
        ["not UTF-8", "byte 0xff at offset 0", "iconv"],
        lambda p: p.write("rows.jsonl", b"\xff\xfd\x00"),
    ),
    Case(
        "json data that is no list",
        TINY + " data.path={dir}/rows.json",
        ["must hold a list of rows", "keys data", 'keep only the list under "data"'],
        lambda p: p.write("rows.json", '{"data": []}'),
    ),
    Case(
        "parquet file corrupt",
        TINY + " data.path={dir}/rows.parquet",
        ["parquet file cannot be read", "rows.parquet", "write it again"],
        lambda p: p.write("rows.parquet", "PAR0"),
    ),
    Case(
        "row that is no object",
        TINY,
        ["not an object", "rows.jsonl, line 2", "a list [1, 2]", "JSON object"],
        lambda p: p.rows(ROWS[0], [1, 2]),
    ),
    Case(
        "unknown data format",
        TINY,
        ["unknown data format", "line 1", "keys question, answer", "rename the keys"],
        lambda p: p.rows({"question": "a", "answer": "b"}),
    ),
    Case(
        "ShareGPT data without an answer",
        TINY,
        ["does not end with an answer", "last role user", "add the answer"],
        lambda p: p.rows({"conversations": [{"from": "human", "value": "x"}]}),
    ),
    Case(
        "row without output",
        TINY,
        ["output is missing", "rows.jsonl, line 2", "add the key"],
        lambda p: p.rows(ROWS[0], {"instruction": "a"}),
    ),
    Case(
        "output null",
        TINY,
        ["output has the wrong type", "line 1", "found null", "correct or delete that row"],
        lambda p: p.rows({"instruction": "a", "output": None}),
    ),
    Case(
        "output a number",
        TINY,
        ["output has the wrong type", "a number 5", "correct or delete that row"],
        lambda p: p.rows({"instruction": "a", "output": 5}),
    ),
    Case(
        "empty answer",
        TINY,
        ["answer is empty", "rows.jsonl, line 4, output", "fill or delete that row"],
        lambda p: p.rows(*ROWS[:3], {"instruction": "a", "output": "  "}),
    ),
    Case(
        "empty question",
        TINY,
        ["question is empty", "line 1", "fill or delete that row"],
        lambda p: p.rows({"instruction": "", "output": "b"}),
    ),
    Case(
        "answer before the question",
        TINY,
        ["roles are out of order", "messages[1]", "found assistant", "reorder, merge or delete"],
        lambda p: p.rows({"messages": [{"role": "assistant", "content": "x"}]}),
    ),
    Case(
        "unknown role",
        TINY,
        ["unknown role", "messages[1]", "found narrator", "[system,] user, assistant"],
        lambda p: p.rows({"messages": [{"role": "narrator", "content": "x"}]}),
    ),
    Case(
        "conversation without an answer",
        TINY,
        ["does not end with an answer", "last role user", "add the answer"],
        lambda p: p.rows({"messages": [{"role": "user", "content": "x"}]}),
    ),
    Case(
        "two formats in one file",
        TINY,
        ["another format", "rows.jsonl, line 2", "found messages", "rows.jsonl, line 1", "data.sources"],
        lambda p: p.rows(ROWS[0], {"messages": [{"role": "user", "content": "x"}]}),
    ),
    Case(
        "every row too long, all dropped",
        TINY + " data.max_length=3 data.overflow=drop",
        ["no row is left", "3 tokens", "all 12 rows dropped", "set data.max_length="],
    ),
    Case(
        "max_length that leaves no answer",
        TINY + " data.max_length=2",
        ["no row is left", "2 tokens", "set data.max_length="],
    ),
    Case(
        "max_length of one token",
        TINY + " data.max_length=1",
        ["data.max_length=1", "at least 2", "set data.max_length=1024"],
    ),
    Case(
        "held-out file missing",
        TINY + " data.eval_path={dir}/held.jsonl",
        ["data file does not exist", "data.eval_path={dir}/held.jsonl", "correct data.eval_path"],
    ),
    Case(
        "held-out file empty",
        TINY + " data.eval_path={dir}/held.jsonl",
        ["holds no rows", "{dir}/held.jsonl", "change data.eval_path"],
        lambda p: p.write("held.jsonl", ""),
    ),
    Case(
        "held-out file of unknown format",
        TINY + " data.eval_path={dir}/held.jsonl",
        ["unknown data format", "{dir}/held.jsonl, line 1", "keys q", "rename the keys"],
        lambda p: p.rows({"q": "a"}, name="held.jsonl"),
    ),
    Case(
        "one row, and one to be held out",
        TINY + " data.eval_fraction=0.9",
        ["no rows can be held out", "1 prompt", "set data.eval_fraction=0"],
        lambda p: p.rows(ROWS[0]),
    ),
    Case(
        "tokenizer missing",
        TINY,
        ["no tokenizer can be loaded", "model.path={dir}/model", "copy the model's tokenizer files"],
        _without_tokenizer,
    ),
    Case(
        "tokenizer dir missing",
        TINY + " model.tokenizer={dir}/tok",
        ["tokenizer directory does not exist", "{dir}/tok", "set model.tokenizer"],
    ),
    Case(
        "tokenizer corrupt",
        TINY,
        ["no tokenizer can be loaded", "model.path={dir}/model", "copy the model's tokenizer files"],
        lambda p: (p.model / "tokenizer.json").write_text("{}"),
    ),
    Case(
        "neither chat template nor end token",
        TINY,
        ["neither a chat template nor an end-of-sequence token", "give model.chat_template a Jinja template"],
        lambda p: _tokenizer_config(p, ["eos_token", "chat_template"]),
    ),
    Case(
        "chat template missing",
        TINY + " model.chat_template={dir}/t.jinja",
        ["chat template file does not exist", "{dir}/t.jinja", "correct model.chat_template"],
    ),
    Case(
        "chat template broken",
        TINY + " model.chat_template={dir}/t.jinja",
        ["the chat template is broken", "{dir}/t.jinja", "line 1", "data.template"],
        lambda p: p.write("t.jinja", "{% for m in messages %}"),
    ),
    Case(
        "chat template without the answers",
        TINY + " model.chat_template={dir}/t.jinja",
        ["answers cannot be located", "rows.jsonl, line 1", "{% generation %} blocks"],
        lambda p: p.write("t.jinja", "{{ messages[0].content }}"),
    ),
    Case(
        "tokenizer of a larger vocabulary",
        TINY + " model.tokenizer={dir}/wide",
        ["does not belong to this model", "token id", "vocab_size 400", "set model.tokenizer"],
        _wider_tokenizer,
    ),
]
