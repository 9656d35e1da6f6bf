"""Fixtures for the run directory (of a config only run and trainer matter); the demo model for backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kt_ray.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PlanConfig,
    RuleConfig,
    RunConfig,
    TrackingConfig,
    TrainerConfig,
)
from kt_ray.demo.builder import ensure_demo_model
from tests.helpers.float32_copy import in_float32
from tests.report.conftest import make_run  # noqa: F401  (a fixture)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(ensure_demo_model("demo", 0, tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def exact(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in float32."""
    return in_float32(model, tmp_path_factory.mktemp("exact") / "model")


def _make_config(
    root: Path,
    *,
    name: str | None = None,
    model: str = "demo",
    overwrite: bool = False,
    resume: str | None = None,
    **tracking: Any,
) -> Config:
    return Config(
        mode="train",
        seed=0,
        model=ModelConfig(name=model),
        rule=RuleConfig(name="auto"),
        data=DataConfig(builtin="demo"),
        lora=LoraConfig(),
        optim=OptimConfig(),
        trainer=TrainerConfig(resume=resume),
        tracking=TrackingConfig(**tracking),
        cluster=ClusterConfig(),
        plan=PlanConfig(),
        run=RunConfig(name=name, root=str(root), overwrite=overwrite),
    )


def _add_checkpoint(run: Path, step: int, *, complete: bool = True) -> Path:
    """A checkpoint directory as the run directory sees it: the manifest marks it complete."""
    path = run / "checkpoints" / f"step_{step:06d}"
    path.mkdir(parents=True)
    (path / "worker_0.safetensors").write_bytes(b"x")
    if complete:
        (path / "manifest.json").write_text(json.dumps({"step": step}))
    return path


@pytest.fixture
def make_config() -> Callable[..., Config]:
    """`make_config(root, name=..., overwrite=..., resume=..., **tracking options)`."""
    return _make_config


@pytest.fixture
def add_checkpoint() -> Callable[..., Path]:
    """`add_checkpoint(run, step, complete=True)` returns the directory."""
    return _add_checkpoint
