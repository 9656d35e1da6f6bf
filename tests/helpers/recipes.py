"""Recipes for tests: a small one with some fields changed, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from kt_ray.recipe import read

HERE = Path(__file__).resolve().parents[1] / "recipe"
BASE: dict[str, Any] = {
    "model_name_or_path": "deepseek-ai/DeepSeek-V3-0324",
    "dataset": "identity",
    "dataset_dir": str(HERE / "data"),
    "template": "deepseek3",
}


def recipe(folder: Path, **fields: Any) -> Path:
    """A recipe of BASE with these fields; None leaves one out."""
    given = {name: value for name, value in (BASE | fields).items() if value is not None}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


def values(folder: Path, **fields: Any) -> dict[str, Any]:
    """What the recipe sets, with nothing refused."""
    reading = read(recipe(folder, **fields))
    assert reading.refused == []
    return {o.key: o.value for o in reading.overrides.values()}


def refused(folder: Path, **fields: Any) -> list[str]:
    return [f"{r.field}: {r.reason}" for r in read(recipe(folder, **fields)).refused]
