"""README and docs against the tree: files that exist, links that lead somewhere, keys that are options."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kt_ray.config.fields import fields
from kt_ray.tracking.metrics import StepMetrics

ROOT = Path(__file__).resolve().parents[1]
FAMILIES = sorted(p.relative_to(ROOT) for p in (ROOT / "docs" / "families").glob("*.md"))
PAGES = sorted(p.relative_to(ROOT) for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]) + FAMILIES


def tree() -> str:
    text = (ROOT / "README.md").read_text()
    return re.search(r"## The files\n\n```\n(.*?)```", text, re.DOTALL).group(1)


def test_the_readme_tree_has_every_package_and_module_and_nothing_else():
    listed = re.findall(r"^  ([\w.]+/?)  ", tree(), re.MULTILINE)
    named = set(listed)
    assert len(listed) == len(named)
    package = ROOT / "kt_ray"
    # An installed tree has the compiled extension and the conf/ of the wheel beside them.
    present = {f"{p.parent.name}/" for p in package.glob("*/__init__.py")}
    present |= {p.name for p in package.glob("*.py") if p.name != "__init__.py"}
    assert named == present


def test_the_table_of_modes_has_every_mode():
    table = set(re.findall(r"^\| `(\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE))
    modes = {p.stem for p in (ROOT / "kt_ray" / "modes").glob("*.py") if "def run(" in p.read_text()}
    assert modes <= table


def test_the_engine_by_itself_runs():
    text = (ROOT / "README.md").read_text()
    program = re.search(r"## The engine by itself\n.*?```python\n(.*?)```", text, re.DOTALL).group(1)
    names: dict[str, object] = {}
    exec(compile(program, "README.md", "exec"), names)
    assert names["y"].shape == names["dx"].shape == (16, 256)
    assert names["drouter"].shape == (16, 2) and bool(names["y"].isfinite().all())


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in t]
    missing = [t for t in targets if t and not (ROOT / page).parent.joinpath(t).exists()]
    assert not missing


def test_the_readme_names_every_page_and_benchmarks_every_file():
    readme = (ROOT / "README.md").read_text()
    pages = {str(p) for p in PAGES if p.name != "README.md" and p not in FAMILIES}
    assert pages <= set(re.findall(r"\]\((docs/\w+\.md)\)", readme))
    families = (ROOT / "docs" / "families.md").read_text()
    assert [p for p in FAMILIES if f"](families/{p.name})" not in families] == []
    listed = (ROOT / "benchmarks" / "README.md").read_text()
    assert [p.name for p in (ROOT / "benchmarks").glob("*.py") if f"`{p.name}`" not in listed] == []


def test_every_figure_of_a_step_has_a_healthy_range():
    text = (ROOT / "docs" / "metrics.md").read_text()
    section = re.search(r"\n## Healthy ranges\n(.*?)\n## ", text, re.DOTALL).group(1)
    first = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    named = {re.sub(r"_(<\w+>|\*)$", "", key) for cell in first for key in re.findall(r"`([^`]+)`", cell)}
    assert {field.name for field in dataclasses.fields(StepMetrics)} <= named


def test_decisions_have_numbers_of_their_own():
    files = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert len({p.name[:3] for p in files}) == len(files)
    assert all(p.read_text().startswith(f"# {p.name[:3]} ") for p in files)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_merge_is_left_half_done(page):
    assert not re.search(r"^(<{7} |={7}$|>{7} )", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_keys_are_options(page):
    groups = "model|rule|data|lora|optim|trainer|tracking|cluster|run"
    text = (ROOT / page).read_text()
    # `lora.rank=8` or `lora.rank` in code; file names such as optim.py are no keys.
    named = set(re.findall(rf"(?<![\w./])(?:{groups})\.[a-z_]+(?:\.[a-z_]+)?(?![\w/])", text))
    unknown = {k for k in named if not any(f == k or f.startswith(f"{k}.") for f in fields())}
    unknown -= {k for k in unknown if k.startswith("model.config.")}  # the model's own config.json
    unknown -= {k for k in unknown if k.endswith(".md")}  # pages: data.md
    # A file of the tree; the beginning of a module's name in transformers.
    assert not unknown - {"optim.py", "model.layers", "model.language_model.layers"}
