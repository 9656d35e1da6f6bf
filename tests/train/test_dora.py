"""DoRA: numbers and files against PEFT, before and after steps, and everything that reads its adapters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from kt_ray.actors.cluster import ActorCluster
from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.from_peft import AdapterReader, settings_of
from kt_ray.batch import IGNORE
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.placement.lora_sizes import trained_params
from kt_ray.runs.prepare import prepare_model
from kt_ray.runs.saving import write_adapter
from kt_ray.tools.export import export
from kt_ray.tools.inspect import inspect
from kt_ray.tools.merge import merge
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import by_row, config_for, local_cluster, one_pass, steps, waves_of

ROWS = random_rows(4)
DORA = ("lora.dora=true", "lora.experts=false")
# qwen2_moe: biases and shared experts. In deepseek_v3 PEFT takes the latter for routed experts.
KINDS = {"qwen2_moe": "auto", "deepseek_v3": "[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]"}


def base(path: Path) -> torch.nn.Module:
    kinds = {"dtype": torch.float32, "attn_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(path, **kinds).eval()


def of_peft(path: Path, adapter: Path) -> tuple[dict[str, Tensor], list[Tensor]]:
    """PEFT's gradients by our names, and its logits."""
    model = PeftModel.from_pretrained(base(path), adapter, is_trainable=True)
    outputs = [model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0] for row in ROWS]
    losses = [
        torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(row.labels)[1:], ignore_index=IGNORE, reduction="sum"
        )
        for logits, row in zip(outputs, ROWS, strict=True)
    ]
    tokens = sum(label != IGNORE for row in ROWS for label in row.labels[1:])
    (torch.stack(losses).sum() / tokens).backward()
    grads = {
        name.removeprefix("base_model.model.").replace(".default.weight", ending): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        for ending in ["" if "magnitude" in name else ".weight"]
    }
    assert all(grad is not None for grad in grads.values())
    return grads, [logits.detach() for logits in outputs]  # type: ignore[return-value]


def ours(cluster: ActorCluster, config: Config) -> tuple[dict[str, Tensor], list[Tensor]]:
    waves = waves_of(ROWS, config, cluster.plan)
    report = cluster.run_pass(one_pass(cluster, waves, "eval", logits=True))
    found = by_row(report.workers[-1].logits, waves[0])
    cluster.run_pass(one_pass(cluster, waves, number=2))
    grads = cluster.gradients()
    cluster.discard()
    return grads, [found[row.sample] for row in ROWS]


def distance(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def shaken(cluster: ActorCluster) -> None:
    generator = torch.Generator().manual_seed(2)
    values = {
        name: value * (1 + 0.3 * torch.randn(value.shape, generator=generator))
        if name.endswith("magnitude_vector")
        else 0.3 * torch.randn(value.shape, generator=generator)
        for name, value in sorted(cluster.parameters().items())
    }
    cluster.set_parameters(values)


@pytest.mark.parametrize("family", KINDS)
def test_numbers_and_files_are_those_of_peft(family: str, tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, family)
    options = [
        *DORA,
        f"lora.target_modules={KINDS[family]}",
        "lora.rank_pattern={o_proj: 2}",
        "rule.stages=2",
    ]
    config = config_for(path, *options, "optim.lr=0.02")
    prepared = prepare_model(config, training=True)
    assert not any("PEFT: " in note for note in prepared.notes)
    assert any("vLLM and SGLang: not as it is, they do not read DoRA" in note for note in prepared.notes)
    with local_cluster(path, config) as cluster:
        shapes = cluster.parameter_shapes()
        assert trained_params(cluster.plan.dims, config.lora) == sum(map(numel, shapes.values()))
        untrained = cluster.parameters()
        shaken(cluster)
        for name in ("before", "after"):
            adapter = write_adapter(prepared, tmp_path / name, cluster)
            grads, logits = ours(cluster, config)
            want, wanted = of_peft(path, adapter)
            assert grads.keys() == want.keys() == shapes.keys()
            assert max(distance(grads[n], want[n]) for n in want) < 1e-4
            assert max(map(distance, logits, wanted)) < 2e-5
            if name == "before":
                steps(cluster, config, [ROWS], 3)
        final = cluster.parameters()
        assert all(not torch.equal(final[n], t) for n, t in untrained.items())
        cluster.restart()
        restarted = cluster.parameters()
        assert all(torch.equal(restarted[n], t) for n, t in untrained.items())

    again = config_for(path, f"lora.adapter={adapter}", "lora.experts=false", "lora.rank=8", "lora.alpha=16")
    start = prepare_model(again, training=True)
    assert start.config.lora.dora and start.config.lora.rank_pattern == {"o_proj": 2}
    with local_cluster(path, start.config) as cluster:
        assert cluster.load_adapter(str(adapter)) == len(final)
        loaded = cluster.parameters()
    assert all(torch.allclose(loaded[n], t, rtol=1e-6) for n, t in final.items())

    merge(path, adapter, tmp_path / "merged")
    with torch.no_grad():
        whole = [base(tmp_path / "merged")(input_ids=torch.tensor([r.ids])).logits[0] for r in ROWS]
    assert max(map(distance, whole, wanted)) < 5e-5
    report = inspect(adapter)
    assert report["dora"] and report["takes"]["vLLM"].startswith("no: they do not read DoRA")
    with pytest.raises(UserError, match="a DoRA adapter has no other form"):
        export(adapter, tmp_path / "other", "peft-fused")


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def test_what_peft_takes_for_experts_is_said(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    notes = prepare_model(config_for(path, *DORA), training=True).notes
    assert any(
        "PEFT: not as it is, in this family it takes down_proj, gate_proj, up_proj" in n for n in notes
    )


def test_adapters_that_cannot_be_used(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "qwen2_moe")
    config = config_for(path, *DORA, "lora.target_modules=[q_proj,o_proj]")
    prepared = prepare_model(config, training=True)
    with local_cluster(path, config) as cluster:
        adapter = write_adapter(prepared, tmp_path / "adapter", cluster)
    reader = AdapterReader(str(adapter), str(path))
    with pytest.raises(UserError, match="a DoRA adapter cannot be used beside others"):
        settings_of([reader, reader])
    taken = prepare_model(config_for(path, f"lora.adapter={adapter}"), training=True)
    assert taken.config.lora.dora and not taken.config.lora.experts
    assert any("it is DoRA: routed experts stay" in note for note in taken.notes)
    with pytest.raises(UserError, match=r"lora\.dora=true.*set optim=adamw"):
        prepare_model(config_for(path, f"lora.adapter={adapter}", "optim=muon"), training=True)

    file, settings = adapter / "adapter_model.safetensors", adapter / "adapter_config.json"
    tensors, written = load_file(file), json.loads(settings.read_text())
    settings.write_text(json.dumps(written | {"use_dora": False}))
    with pytest.raises(UserError, match=r"magnitudes and its configuration disagree.*found a lora_magnitude"):
        Lora.open(adapter)
    plain = {name: t for name, t in tensors.items() if "magnitude" not in name}
    save_file(plain, file)
    asked = config_for(path, *DORA, f"lora.adapter={adapter}")
    with pytest.raises(UserError, match=r"options disagree.*found lora\.dora=true; required plain LoRA"):
        prepare_model(asked, training=True)
    settings.write_text(json.dumps(written))
    with pytest.raises(UserError, match="found no lora_magnitude_vector"):
        Lora.open(adapter)
