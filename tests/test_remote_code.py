"""Nothing runs code that lies in a model's directory, or asks whether it should."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.demo import ensure_demo_model
from kt_ray.errors import UserError
from kt_ray.model.family import build_causal, read_family

ROOT = Path(__file__).resolve().parents[1]
FILES = [
    ROOT / "launch.py",
    *(file for room in ("kt_ray", "benchmarks", "tests/helpers") for file in (ROOT / room).rglob("*.py")),
]
LOADS = ("from_pretrained", "from_config")


def loading_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls of transformers' Auto classes that look into a directory; left out, the argument below asks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADS:
            owner = node.func.value
            name = getattr(owner, "id", getattr(owner, "attr", ""))
            if isinstance(owner, ast.Subscript) or name.lower().startswith("auto"):
                yield node


def trusting(call: ast.Call) -> bool:
    """Whether a call leaves open, or allows, that remote code runs."""
    stated = [word.value for word in call.keywords if word.arg == "trust_remote_code"]
    return not (len(stated) == 1 and isinstance(stated[0], ast.Constant) and stated[0].value is False)


def test_every_call_says_no() -> None:
    calls = {file: list(loading_calls(ast.parse(file.read_text(encoding="utf-8")))) for file in FILES}
    assert {ROOT / "kt_ray/data/tokenizer_files.py", ROOT / "kt_ray/model/family.py"} <= {
        f for f, c in calls.items() if c
    }
    wrong = [f"{file}:{call.lineno}" for file, found in calls.items() for call in found if trusting(call)]
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("AutoTokenizer.from_pretrained(path)", True),
        ("transformers.AutoProcessor.from_pretrained(path, trust_remote_code=None)", True),
        ("AutoConfig.from_pretrained(path, **options)", True),
        ("AUTO[kind].from_config(config, trust_remote_code=True)", True),
        ("AutoConfig.from_pretrained(path, trust_remote_code=False)", False),
        ("PeftModel.from_pretrained(model, path)", False),
    ],
)
def test_what_such_a_call_is(text: str, bad: bool) -> None:
    assert any(trusting(call) for call in loading_calls(ast.parse(text))) == bad


def test_a_directory_with_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files name classes in it, as released models do; somebody would even say yes."""
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(ensure_demo_model()).iterdir():
        (model / file.name).symlink_to(file)
    mark = tmp_path / "ran"
    code = f"open({str(mark)!r}, 'w').close()\nclass Own: ...\n"
    (model / "own.py").write_text(code)
    for name, autos in (
        ("config.json", ("AutoConfig", "AutoModelForCausalLM", "AutoModel", "AutoTokenizer")),
        ("tokenizer_config.json", ("AutoTokenizer",)),
    ):
        text = json.loads((model / name).read_text())
        entries = {auto: ["own.Own", "own.Own"] if auto == "AutoTokenizer" else "own.Own" for auto in autos}
        (model / name).unlink()
        (model / name).write_text(json.dumps({**text, "auto_map": entries}))
    monkeypatch.setattr("builtins.input", lambda *_: "yes")
    causal, _, _ = build_causal(read_family(str(model)), torch.float32, "eager")
    assert type(causal).__module__.startswith("transformers.")
    try:
        load_tokenizer(str(model))
    except UserError as error:
        assert "tokenizer" in error.what
    assert not mark.exists()
