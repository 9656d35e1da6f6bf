"""Who may import what, walked over the syntax trees of all modules.

The layers: configuration and placement load without torch, the engine stands alone, and Ray is
known to kt_ray/actors only, so that everything else runs and is tested without it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PACKAGE = REPO / "kt_ray"

# Third parties that a package never imports, directly or through modules of kt_ray. `ray` is
# allowed in kt_ray/actors only and handled separately.
HEAVY = {
    "config": ("torch", "transformers", "peft", "numpy"),
    "placement": ("torch", "transformers", "peft"),
    "errors": ("torch", "transformers", "peft", "numpy"),
    "filetypes": ("torch", "transformers", "peft", "numpy"),
    "batch": ("torch", "transformers", "peft"),
    "cli": ("torch", "transformers", "peft", "numpy"),
    "openmp": ("torch", "transformers", "peft", "numpy"),
    "recipe": ("torch", "transformers", "peft", "numpy"),
}

# Packages of kt_ray that a package may import, itself included. Those not listed here may import any.
ALLOWED = {
    "errors": {"errors"},
    "filetypes": {"filetypes"},
    "batch": {"batch"},
    "native": {"native"},
    "config": {"config", "errors"},
    "placement": {"placement", "config", "errors", "batch", "filetypes"},
    "openmp": {"openmp"},
    "recipe": {"recipe", "config", "errors"},
    "cli": {"cli", "config", "errors", "modes", "openmp", "recipe"},
}

# Pieces that must not know the Ray layer, even indirectly.
WITHOUT_ACTORS = (
    "checkpoint",
    "data",
    "experts",
    "model",
    "tracking",
    "train",
    "serve",
    "native",
    "placement",
    "config",
    "tools",
)


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """Every module that a tree imports, anywhere in it, as absolute dotted names with line numbers.

    `from a import b` yields "a.b" (b may be a module). importlib.import_module("x") counts, with
    the constant part of an f-string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
                base = ".".join([*parts, *([base] if base else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0]
            if isinstance(first, ast.JoinedStr) and first.values:
                first = first.values[0]  # type: ignore[assignment]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield str(first.value).rstrip("."), node.lineno


def package_of(module: str) -> str:
    """ "kt_ray.model.stage" → "model"; "kt_ray.errors" → "errors"; "kt_ray" → ""."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def faults(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `module` imports against the table (direct imports only)."""
    package = package_of(module)
    found = []
    for name, line in imports(ast.parse(source), module, is_package):
        top = name.partition(".")[0]
        where = f"{module}:{line} imports {name}"
        if top == "ray" and package != "actors":
            found.append(f"{where}: ray belongs to kt_ray.actors")
        if top in HEAVY.get(package, ()):
            found.append(f"{where}: {package} never imports {top}")
        if top == "kt_ray":
            target = package_of(name)
            known = ALLOWED.get(package)
            if known and target not in known and _is_module(target):
                found.append(f"{where}: {package} knows only {', '.join(sorted(known))}")
            if target == "actors" and package in WITHOUT_ACTORS:
                found.append(f"{where}: {package} does not know kt_ray.actors")
    return found


def _is_module(name: str) -> bool:
    return bool(name) and ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists())


def modules() -> dict[str, Path]:
    """All modules of kt_ray and launch.py by dotted name."""
    found = {"launch": REPO / "launch.py"}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@pytest.mark.parametrize("module", modules())
def test_imports_follow_the_table(module: str) -> None:
    path = modules()[module]
    assert faults(module, path.read_text(encoding="utf-8"), path.name == "__init__.py") == []


def test_light_packages_reach_nothing_heavy_through_others() -> None:
    known = modules()
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        edges[module] = set()
        # Function-level imports of modes by cli are the point of being lazy: they do not count here.
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for name, _ in imports(_top_level(tree), module, path.name == "__init__.py"):
            edges[module].add(name)
    found = []
    for package, forbidden in HEAVY.items():
        for start in (m for m in known if package_of(m) == package and m.startswith("kt_ray")):
            seen, stack = set(), [start]
            while stack:
                module = stack.pop()
                if module in seen:
                    continue
                seen.add(module)
                for name in edges.get(module, ()):
                    if name.partition(".")[0] in (*forbidden, "ray"):
                        found.append(f"{start} reaches {name} through {module}")
                    stack += [part for part in _prefixes(name) if part in known]
    assert found == []


def _top_level(tree: ast.Module) -> ast.Module:
    """The tree without function bodies."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

    return Strip().visit(tree)


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("kt_ray.model.stage", "import ray", "ray belongs to kt_ray.actors"),
        ("kt_ray.train.trainer", "def f():\n    from ray import get", "ray belongs to kt_ray.actors"),
        (
            "kt_ray.cli",
            "import importlib\nimportlib.import_module('ray.util')",
            "ray belongs to kt_ray.actors",
        ),
        ("launch", "import ray.util", "ray belongs to kt_ray.actors"),
        ("kt_ray.config.mapping", "import torch.nn", "config never imports torch"),
        ("kt_ray.config.mapping", "from kt_ray.placement import order", "config knows only"),
        ("kt_ray.placement.order", "import torch", "placement never imports torch"),
        ("kt_ray.native.engine", "from kt_ray.errors import UserError", "native knows only native"),
        ("kt_ray.native.engine", "from ..errors import UserError", "native knows only native"),
        (
            "kt_ray.train.trainer",
            "from kt_ray.actors import ray_cluster",
            "train does not know kt_ray.actors",
        ),
        ("kt_ray.errors", "from kt_ray import batch", "errors knows only errors"),
    ],
)
def test_the_walk_finds_violations(module: str, source: str, fault: str) -> None:
    assert any(fault in line for line in faults(module, source)), faults(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kt_ray.actors.worker", "import ray\nfrom kt_ray.model.stage import Stage"),
        ("kt_ray.placement.order", "import numpy\nfrom kt_ray.config.schema import Config"),
        ("kt_ray.native.engine", "import torch\nfrom . import _engine"),
        ("kt_ray.config.mapping", "from kt_ray.errors import UserError"),
        ("kt_ray.cli", "import kt_ray\nimport importlib\nimportlib.import_module(f'kt_ray.modes.{x}')"),
        ("kt_ray.model.stage", "from kt_ray.batch import PassSpec\nimport raylib"),
    ],
)
def test_the_walk_lets_the_rest_pass(module: str, source: str) -> None:
    assert faults(module, source) == []
