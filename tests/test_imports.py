"""Who may import what, checked over the syntax trees of all modules.

`PACKAGES` is the house from its foundation up: each package with the packages that it imports, all of which
stand above it in the table (so there are no cycles), and the heavy libraries that importing it may load,
directly or through anything it imports. What a function imports when it runs is an import, but is not loaded.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "kt_ray"
HEAVY = ("numpy", "torch", "transformers", "ray")

# package: packages that it imports [heavy libraries that it loads]
PACKAGES = """
terminal:
errors: terminal
disk: errors
parse: errors disk
native: [torch]
checkpoint_dirs:
integer_packing:
rotations:
batch: [numpy]
timeline:
pulse:
torch_environment:
gpu: errors [torch]
cpu_products: [torch]
gpu_turns: [torch]
config: errors parse
dims: errors parse integer_packing rotations
hardware: errors disk parse native config
placement: errors parse config dims hardware
timing: errors native config dims hardware placement
optim: errors pulse config [torch]
tracking: terminal disk parse timeline config
evaluate: terminal errors parse
generate: errors [numpy torch]
rewards: terminal errors parse evaluate [numpy]
checkpoint: terminal errors disk pulse parse native checkpoint_dirs integer_packing rotations [torch]
model: errors pulse parse gpu cpu_products gpu_turns native batch config dims placement optim generate
    checkpoint [numpy torch]
adapter: disk parse config checkpoint [torch]
data: terminal errors disk parse batch config evaluate [numpy]
experts: errors pulse gpu gpu_turns native config placement optim checkpoint model [torch]
demo: errors disk config data
transport: pulse gpu gpu_turns timeline generate [numpy torch]
train: errors disk batch timeline config placement optim tracking model data experts [numpy torch]
actors: errors pulse native batch timeline config placement optim generate checkpoint model adapter
    experts transport train [numpy torch]
serve: errors disk config generate data [numpy]
train_server: errors disk batch generate serve [numpy torch]
actors/ray: errors disk gpu torch_environment config hardware placement tracking generate data experts
    transport train actors serve [numpy torch ray]
measure: gpu cpu_products native batch config hardware placement timing optim model transport [numpy torch]
runs: terminal errors disk parse checkpoint_dirs gpu native batch config dims hardware placement timing optim
    tracking evaluate generate checkpoint model adapter data demo rewards train actors train_server actors/ray
    [numpy torch]
doctor: errors disk gpu native config dims hardware placement timing checkpoint demo actors actors/ray
    measure runs
report: errors disk config tracking evaluate runs
accept: disk config dims hardware placement timing doctor report
supervisor: errors checkpoint_dirs config train runs
modes: terminal errors disk checkpoint_dirs native timeline config dims hardware placement timing tracking
    evaluate generate checkpoint data demo rewards train actors serve train_server actors/ray runs supervisor
    doctor report accept
    [numpy torch]
recipe: terminal errors parse config dims data
cli: terminal errors torch_environment config modes recipe runs supervisor
tools: terminal errors disk parse integer_packing config dims checkpoint model adapter data demo [numpy torch]
"""

# Modules that load less than their package: what reads files or plans starts without torch.
LIGHT = {
    "actors.ray.ray_address": set(),
    "modes.compare": set(),
    "modes.doctor": {"numpy"},
    "modes.eval": set(),
    "modes.plan": {"numpy"},
    "modes.preview": {"numpy"},
    "modes.report": set(),
    "runs.environment": set(),
    "runs.evaluation": set(),
    "runs.rundata": set(),
    "runs.rundir": set(),
    "tools.__main__": set(),
}


def package_of(module: str) -> str:
    """ "kt_ray.model.stage" → "model"; "kt_ray.actors.ray.ray_actor" → "actors/ray"; "kt_ray" → ""."""
    parts = module.split(".")[1:]
    return "actors/ray" if parts[:2] == ["actors", "ray"] else parts[0] if parts else ""


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Package -> (packages that it may import, heavy libraries that it may load), in the table's order."""
    rows = re.findall(r"^(\S+):([^\[:]*?)(?:\[(.*)\])?$(?!\n )", PACKAGES, re.MULTILINE)
    return {package: (set(known.split()), set(libraries.split())) for package, known, libraries in rows}


@cache
def modules() -> dict[str, Path]:
    """All modules of kt_ray by dotted name; the stub stands for the extension."""
    by_name = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        parts = path.relative_to(REPO).with_suffix("").parts
        by_name[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return by_name


@cache
def imported(module: str, *, loaded: bool = False) -> tuple[str, ...]:
    """Absolute names that a module imports; `loaded`: only those that are imported with it."""
    path = modules()[module]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return tuple(imports(_load_time(tree) if loaded else tree, module, path.name == "__init__.py"))


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[str]:
    """Every name that a tree imports, anywhere in it, as an absolute dotted name.

    `from a import b` yields "a.b" (b may be a module). importlib.import_module("x") counts, with the
    constant part of an f-string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first: ast.AST = node.args[0]
            if isinstance(first, ast.JoinedStr) and first.values:
                first = first.values[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value).rstrip(".")


def _load_time(tree: ast.Module) -> ast.Module:
    """The tree without function bodies and without `if TYPE_CHECKING:`."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            if "TYPE_CHECKING" in ast.dump(node.test):
                return node.orelse
            return self.generic_visit(node)

    return Strip().visit(tree)


def module_of(name: str) -> str | None:
    """The module of kt_ray that holds an imported name; None = it is not kt_ray's."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name or None


def package_imports() -> dict[str, dict[str, list[str]]]:
    """Package -> other package -> the modules that import it."""
    edges: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module in modules():
        for target in filter(None, map(module_of, imported(module))):
            if package_of(target) not in ("", package_of(module)):
                edges[package_of(module)][package_of(target)].append(module)
    return edges


def loaded_libraries(start: str, heavy: Iterable[str] = HEAVY) -> dict[str, str]:
    """Heavy library -> the module that imports it, of all that importing `start` loads."""
    libraries: dict[str, str] = {}
    seen: set[str] = set()
    stack = [start]
    while stack:
        module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        for name in imported(module, loaded=True):
            top = name.partition(".")[0]
            if top in heavy:
                libraries.setdefault(top, module)
            if target := module_of(name):
                parts = target.split(".")  # importing a.b.c runs a and a.b, too
                stack += [
                    parent for n in range(1, len(parts) + 1) if (parent := ".".join(parts[:n])) in modules()
                ]
    return libraries


def cycles(edges: dict[str, Iterable[str]]) -> list[set[str]]:
    """Sets of more than one node that reach each other."""
    reach = {node: _reachable(node, edges) for node in edges}
    groups = {
        frozenset(other for other in reach[node] if node in reach.get(other, ())) | {node} for node in edges
    }
    return [set(group) for group in groups if len(group) > 1]


def _reachable(start: str, edges: dict[str, Iterable[str]]) -> set[str]:
    seen: set[str] = set()
    stack = list(edges.get(start, ()))
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += edges.get(node, ())
    return seen


def test_the_table_names_every_package_and_only_packages_above() -> None:
    rows = table()
    assert set(rows) == {package_of(module) for module in modules()} - {""}
    above: set[str] = set()
    for package, (known, libraries) in rows.items():
        assert known <= above, f"{package} may import only packages above it, not {sorted(known - above)}"
        assert libraries <= set(HEAVY)
        above.add(package)


@pytest.mark.parametrize("package", table())
def test_a_package_imports_what_its_row_says(package: str) -> None:
    known, _ = table()[package]
    edges = package_imports()[package]
    more = {target: importers for target, importers in edges.items() if target not in known}
    assert not more, f"{package} imports more than its row says: {more}"
    row = " ".join(other for other in table() if other in edges)
    assert known <= set(edges), f"{package} imports less than its row says; it should be: {row}"


@pytest.mark.parametrize("module", modules())
def test_a_module_loads_only_what_its_package_may(module: str) -> None:
    of_package = table()[package_of(module)][1] if package_of(module) else set()
    allowed = LIGHT.get(module.removeprefix("kt_ray."), of_package)
    libraries = loaded_libraries(module)
    more = {name: f"through {through}" for name, through in libraries.items() if name not in allowed}
    assert not more, f"{module} loads {more}"


def test_ray_is_imported_by_its_own_package_only() -> None:
    for module in modules():
        if package_of(module) != "actors/ray":
            assert not [name for name in imported(module) if name.partition(".")[0] == "ray"], module


def test_no_module_imports_itself_through_others() -> None:
    edges = {
        module: {target for target in map(module_of, imported(module)) if target not in (None, module)}
        for module in modules()
    }
    assert cycles(edges) == []


def test_a_file_name_says_whose_it_is() -> None:
    """Basenames are unique, but for modes: a mode's file has the mode's name."""
    names = Counter(
        path.name
        for module, path in modules().items()
        if path.name not in ("__init__.py", "__main__.py") and package_of(module) != "modes"
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_tests_mirror_the_packages() -> None:
    others = {"benchmarks", "helpers", "golden"}
    folders = {path.name for path in (REPO / "tests").iterdir() if path.is_dir() and list(path.glob("*.py"))}
    assert folders - others <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}


def test_every_package_says_what_it_is() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_launch_imports_the_command_line_only() -> None:
    tree = ast.parse((REPO / "launch.py").read_text(encoding="utf-8"))
    assert set(imports(tree, "launch")) == {"sys", "kt_ray.cli.main"}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import ray.util", ["ray.util"]),
        ("def f():\n    from ray import get", ["ray.get"]),
        ("import importlib\nimportlib.import_module('ray.util')", ["importlib", "ray.util"]),
        ("from importlib import import_module as m\n__import__(f'kt_ray.modes.{x}')", ["kt_ray.modes"]),
        ("from ..errors import UserError", ["kt_ray.errors.UserError"]),
        ("from . import engine", ["kt_ray.native.engine"]),
        ("import raylib", ["raylib"]),
    ],
)
def test_the_walk_finds_imports(source: str, names: list[str]) -> None:
    assert set(names) <= set(imports(ast.parse(source), "kt_ray.native.module"))


def test_the_walk_passes_over_what_is_not_loaded() -> None:
    source = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\ndef f():\n    import ray\n"
    )
    assert list(imports(_load_time(ast.parse(source)), "kt_ray.cli")) == ["typing.TYPE_CHECKING"]


def test_cycles_are_found() -> None:
    assert cycles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [{"b", "c"}]


def test_attention_workers_alone_load_peft() -> None:
    """And who measures their layers. It takes seconds, transformers and half of torch's compiler included: a
    driver and an expert actor do without."""
    loading = {module for module in modules() if loaded_libraries(module, ["peft"])}
    own = {"kt_ray.actors.attention_worker", "kt_ray.actors.generation_session"}
    assert own <= loading
    assert {package_of(module) for module in loading - own} == {"model", "measure"}
