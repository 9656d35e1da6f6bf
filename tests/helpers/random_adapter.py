"""PEFT adapters with random values, written as PEFT writes them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from kt_ray.adapter.peft_config import module_of
from tests.helpers.runs import config_for, local_cluster


def random_adapter(
    model_dir: Path,
    to: Path,
    modules: Sequence[str],
    *,
    rank: int,
    alpha: float,
    experts: bool,
    std: float = 0.3,
) -> Path:
    """An adapter of these kinds of linear modules, and of every routed expert where `experts`."""
    config = config_for(
        model_dir,
        f"lora.rank={rank}",
        f"lora.target_modules=[{','.join(modules)}]",
        f"lora.experts={str(experts).lower()}",
    )
    with local_cluster(model_dir, config) as cluster:
        shapes = cluster.parameter_shapes()
    tensors = {}
    for name, shape in shapes.items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{to.name} {name}".encode()))
        tensors[f"base_model.model.{name}"] = std * torch.randn(shape, generator=generator)
    to.mkdir(parents=True)
    save_file(tensors, to / "adapter_model.safetensors")
    kinds = sorted({module_of(name).rpartition(".")[2] for name in shapes})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": kinds}
    (to / "adapter_config.json").write_text(json.dumps(settings))
    return to
