"""README and docs against the tree: paths and links that exist, keys that are options, one index."""

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
EVERY_PAGE = sorted(p.relative_to(ROOT) for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def rooms() -> list[str]:
    """The packages and modules of kt_ray/ that the tree in docs/architecture.md lists."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    tree = re.search(r"## The rooms\n\n```\n(.*?)```", text, re.DOTALL).group(1)
    return re.findall(r"^  ([\w.]+/?)  ", tree, re.MULTILINE)


def test_the_tree_of_the_architecture_has_every_package_and_module_and_nothing_else():
    named = set(rooms())
    assert len(rooms()) == len(named)
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
    text = (ROOT / "docs" / "kernels.md").read_text()
    program = re.search(r"## The engine by itself\n.*?```python\n(.*?)```", text, re.DOTALL).group(1)
    names: dict[str, object] = {}
    exec(compile(program, "docs/kernels.md", "exec"), names)
    assert names["y"].shape == names["dx"].shape == (16, 256)
    assert names["drouter"].shape == (16, 2) and bool(names["y"].isfinite().all())


def anchors(page: Path) -> set[str]:
    """Names under which GitHub links to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = page.parent / name if name else page
    return file.exists() and (not anchor or anchor in anchors(file))


@pytest.mark.parametrize("page", EVERY_PAGE, ids=str)
def test_links_lead_somewhere(page):
    targets = [t for t in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()) if "://" not in t]
    assert [target for target in targets if not leads_somewhere(ROOT / page, target)] == []


def test_a_link_to_no_heading_is_found():
    page = ROOT / "docs" / "recovery.md"
    assert leads_somewhere(page, "troubleshooting.md#it-does-not-fit") and leads_somewhere(page, "#cost")
    assert not leads_somewhere(page, "troubleshooting.md#memory") and not leads_somewhere(page, "#costs")


def missing_paths(text: str) -> list[str]:
    """Files, folders and modules of the repository that `text` names and that do not exist."""
    paths = set(re.findall(r"(?<![\w./-])(?:kt_ray|tests|benchmarks|conf|docs)/[\w./*-]*[\w*/]", text))
    missing = [p for p in paths if not any(ROOT.glob(p.rstrip("/"))) and not p.endswith(".so")]
    modules = set(re.findall(r"(?<![\w./-])kt_ray(?:\.\w+)+", text))
    return sorted(missing + [m for m in modules if not _is_importable(m)])


def _is_importable(name: str) -> bool:
    """Whether `name` is a module of kt_ray, or a name that a module of kt_ray defines or imports."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
        if file.exists():
            rest = parts[length:]
            return not rest or re.search(rf"\b{rest[0]}\b", file.read_text()) is not None
    return False


@pytest.mark.parametrize("page", EVERY_PAGE, ids=str)
def test_paths_and_modules_exist(page):
    assert missing_paths((ROOT / page).read_text()) == []


def test_a_path_that_does_not_exist_is_found():
    text = (
        "`kt_ray/model/stage.py`, `kt_ray/actors/`, kt_ray.native.Engine, kt_ray.model.layer_calls.register()"
    )
    assert missing_paths(text) == []
    wrong = ["kt_ray.model.layer_calls.unregister", "kt_ray.nothing", "kt_ray/model/stages.py", "tests/none"]
    assert missing_paths(f"`{'`, `'.join(wrong)}`") == wrong


def test_the_index_names_every_page_once_and_benchmarks_every_file():
    listed = re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    assert len(listed) == len(set(listed))
    pages = {p.name for p in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == set(listed)
    assert "](docs/README.md)" in (ROOT / "README.md").read_text()
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
    assert not unknown - {"optim.py", "model.layers", "model.language_model.layers", "model.llm.layers"}
