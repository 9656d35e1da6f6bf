"""A run directory as mode=train leaves it, written by hand: figures by formulas, so that tests know them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray.config.schema import Config, LoraConfig, ModelConfig, RunConfig
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.runs.rundir import plain


def write_run(
    root: Path,
    name: str,
    *,
    steps: int = 60,
    rank: int = 8,
    level: float = 1.0,
    eval_every: int = 10,
    layers: int = 6,
    experts: int = 16,
    **sections: Any,
) -> Path:
    """A run whose loss falls from about 5 to about `level`; `sections` replace those of the config."""
    path = root / name
    path.mkdir(parents=True)
    config = Config(
        model=ModelConfig(name="demo", build="demo"),
        lora=LoraConfig(rank=rank, alpha=2.0 * rank),
        run=RunConfig(name=name, root=str(root)),
    )
    config = dataclasses.replace(config, **sections)
    (path / "config.yaml").write_text(yaml.safe_dump(plain(config), sort_keys=False))
    lines = [json.dumps({"step": 0, "eval_loss": 5.25})] if eval_every else []
    for step in range(1, steps + 1):
        lines.append(json.dumps(record(step, steps, level)))
        if eval_every and step % eval_every == 0:
            lines.append(json.dumps({"step": step, "eval_loss": 0.2 + loss_at(step, level)}))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (path / "env.json").write_text(json.dumps(ENVIRONMENT))
    load = ExpertLoad()
    load = load.plus({m: [10 + (7 * e + 3 * m) % 23 for e in range(experts)] for m in range(1, layers + 1)})
    checkpoint = path / "checkpoints" / f"step_{steps:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "expert_load.json").write_text(load.to_json({m: [0] * experts for m in load.slots}))
    (checkpoint / "manifest.json").write_text("{}")
    return path


def loss_at(step: int, level: float) -> float:
    return level + 4 * math.exp(-step / 15)


def record(step: int, steps: int, level: float) -> dict[str, float]:
    wave = math.sin(2.7 * step)
    return {
        "step": step,
        "epoch": step / 40,
        "loss": loss_at(step, level) + 0.15 * wave,
        "grad_norm": 1.2 + 0.3 * wave,
        "lr": 0.002 * min(1, step / 5) * 0.5 * (1 + math.cos(math.pi * step / steps)),
        "tokens": 2000 + 10 * (step % 7),
        "loss_tokens": 900,
        "tokens_per_s": (2000 + 10 * (step % 7)) / 1.6,
        "seconds": 4.0 if step == 1 else 1.6,
        "seconds_attention": 0.9 + 0.05 * wave,
        "seconds_experts": 0.7 + 0.04 * wave,
        "seconds_transport": 0.3,
        "seconds_optimizer": 0.05,
        "host_rss_bytes_driver": 8e8,
        "host_rss_bytes_worker": 1.1e9,
        "host_rss_bytes_expert": 2.6e9,
        "expert_load_imbalance": 1.9 + 0.2 * wave,
        "actor_load_imbalance": 1.05,
        "busy_worker-0": 0.62,
        "busy_experts-0": 0.55,
        "busy_experts-1": 0.52,
    }


ENVIRONMENT: dict[str, Any] = {
    "time": "2026-11-20T10:00:00+0000",
    "hostname": "host-a",
    "cpu": "a CPU",
    "memory_bytes": 25_000_000_000,
    "packages": {"torch": "2.13.0", "wandb": None},
    "git_commit": "0123456789abcdef",
    "argv": ["launch.py", "model=demo", "data.path=my rows.jsonl"],
    "pid": 4711,
    "actors": [
        {"actor": "worker-0", "host": "host-a", "device": "cpu", "layers": [0, 6], "threads": 2},
        {
            "actor": "experts-0",
            "host": "host-a",
            "isa": "avx512_bf16",
            "experts": 16,
            "threads": 2,
            "weight_bytes": 20_643_840,
            "load_seconds": 2.5,
        },
    ],
}


def write_predictions(path: Path, rows: int = 8, *, base: bool = True) -> None:
    """predictions.jsonl, and predictions_base.jsonl that is worse."""
    for file, answer in (("predictions.jsonl", "the cat sat"), ("predictions_base.jsonl", "a dog")):
        if base or "base" not in file:
            lines = [
                {
                    "prompt": f"<b>question</b> {i}",
                    "prediction": f"{answer} {i}",
                    "label": f"the cat sat down {i}",
                }
                for i in range(rows)
            ]
            (path / file).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def make_run() -> Callable[..., Path]:
    """`make_run(root, name, steps=…, rank=…, level=…, …)` returns the directory."""
    return write_run


@pytest.fixture
def make_predictions() -> Callable[..., None]:
    """`make_predictions(run, rows=…, base=…)`."""
    return write_predictions
