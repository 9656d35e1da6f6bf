"""docs/data.md: its rows are of the formats that it says, and its commands run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from kt_ray.config.data_checks import SOURCE_KEYS
from kt_ray.data.formats import FORMATS, Parser
from kt_ray.data.named_templates import TOKENS
from kt_ray.modes import preview
from tests.helpers.composing import compose

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_example_rows() -> None:
    table = re.findall(r"^\| `(\w+)` \| `(\{.*?\})`", PAGE, re.MULTILINE)
    assert {name for name, _ in table} == set(FORMATS)
    for name, row in table:
        parser = Parser("prompts" if name == "prompts" else "auto")  # which no keys tell
        parser(json.loads(row), name, 0)
        assert parser.format == name


def test_templates_and_sources_are_named() -> None:
    assert all(f"`{name}`" in PAGE for name in TOKENS)
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for source in yaml.safe_load(block)["data"]["sources"]:
        assert set(source) <= set(SOURCE_KEYS)


def test_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"q{i}?", "completion": "yes"}) + "\n" for i in range(4))
    )
    Path("faq.csv").write_text("question,answer\nWho keeps it?,Tilda does.\nWhere?,There.\n")
    commands = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    shown = []
    for command in commands:
        words = shlex.split(command)
        assert words[:2] == ["python", "launch.py"]
        assert preview.run(compose(words[2:])) == 0
        shown.append(capsys.readouterr().out)
    assert "source: rows.jsonl: 4 rows, format prompt_completion (detected)" in shown[0]
    assert "source: faq.csv: 2 rows, format alpaca (detected)" in shown[1]
    assert all("template: " in out and "[[" in out for out in shown)
