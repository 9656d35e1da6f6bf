"""Adapters of models that have names or experts of their own: PEFT places every tensor of them.

qwen3_vl_moe, glm4v_moe   the language model inside a multimodal model
nemotron_h                experts without a gate, released under "backbone."
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kt_ray.model.build import build_on_meta
from kt_ray.model.stage_spec import StageSpec
from kt_ray.runs.prepare import Prepared
from kt_ray.runs.saving import write_adapter
from tests.helpers.families import randomise, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.runs import by_row, config_for, local_cluster, one_pass, waves_of

AUTO: dict[str, Any] = {
    "qwen3_vl_moe": AutoModelForImageTextToText,
    "glm4v_moe": AutoModelForImageTextToText,
    "nemotron_h": AutoModelForCausalLM,
}


@pytest.mark.parametrize("family", AUTO)
def test_peft_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    path = write_config(tmp_path / "base", family)
    model = AUTO[family].from_config(AutoConfig.from_pretrained(path))
    randomise(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(path)
    rows = random_rows(3)
    config = config_for(path, "rule=cpu_1worker_1socket", "trainer.micro_batch_size=3")
    with local_cluster(path, config) as cluster:
        shapes = cluster.parameter_shapes()
        generator = torch.Generator().manual_seed(5)
        values = {n: torch.randn(*shape, generator=generator) * 0.1 for n, shape in sorted(shapes.items())}
        cluster.set_parameters(values)
        waves = waves_of(rows, config, cluster.plan)
        report = cluster.run_pass(one_pass(cluster, waves, "eval", logits=True))
        logits = by_row(report.workers[-1].logits, waves[0])
        layers = cluster.plan.dims.num_layers
        whole = build_on_meta(StageSpec(str(path), (0, layers), layers, dtype="float32"))
        assert all(name.startswith(f"{whole.root}.layers.") for name in shapes)
        prepared = SimpleNamespace(
            config=config, model_dir=str(path), plan=cluster.plan, module_names=tuple(whole.lora_names)
        )
        adapter = write_adapter(cast(Prepared, prepared), tmp_path / "adapter", cluster)
    assert f"{AUTO[family].__name__}.from_pretrained" in (adapter / "README.md").read_text()

    base = AUTO[family].from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        before = [base(torch.tensor([row.ids]), use_cache=False).logits[0] for row in rows]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # PEFT warns of keys that it leaves out
            # Not of these: docs/adapter.md says why.
            warnings.filterwarnings("ignore", message="The following .*_pattern keys did not match")
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*")
            tuned = PeftModel.from_pretrained(base, adapter).eval()
        after = [tuned(torch.tensor([row.ids]), use_cache=False).logits[0] for row in rows]
    loaded = [p for n, p in tuned.named_parameters() if ".lora_" in n]
    assert sum(int((p != 0).sum()) for p in loaded) == sum(int((v != 0).sum()) for v in values.values())
    assert max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)) > 0.05
    for row, got in zip(rows, after, strict=True):
        want = logits[row.sample]
        assert float((got - want).norm()) <= 2e-5 * float(want.norm())
