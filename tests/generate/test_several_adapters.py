"""Several adapters in one session: each answers as it does alone, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.adapter.from_peft import AdapterReader, settings_of
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.generate.requests import Request, Sampling
from tests.helpers.generation import answers, random_prompts
from tests.helpers.hf_reference import build_checkpoint
from tests.helpers.random_adapter import random_adapter
from tests.helpers.runs import config_for, local_cluster

SAMPLING = Sampling(max_new_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v3")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of other ranks, scales and modules."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "attention": random_adapter(
            model, root / "attention", ["q_a_proj", "o_proj"], rank=2, alpha=2, experts=False
        ),
        "all": random_adapter(model, root / "all", ["o_proj"], rank=4, alpha=8, experts=True),
        "third": random_adapter(
            model, root / "third", ["kv_a_proj_with_mqa"], rank=3, alpha=12, experts=True
        ),
    }


def settings(readers: list[AdapterReader]) -> list[str]:
    lora = settings_of(readers)
    return [
        f"lora.rank={lora.rank}",
        f"lora.alpha={lora.alpha}",
        f"lora.target_modules=[{','.join(lora.target_modules)}]",
        f"lora.experts={str(lora.experts).lower()}",
    ]


@pytest.mark.parametrize("layout", [(), ("rule.stages=2", "rule.experts.sockets=2")], ids=["one", "two"])
def test_each_answers_as_alone(model: Path, adapters: dict[str, Path], layout: tuple[str, ...]) -> None:
    prompts = random_prompts((5, 9, 3, 12, 7, 20, 4, 6))
    alone: dict[bool | str, list[list[int]]] = {}
    readers = {name: AdapterReader(str(path), str(model)) for name, path in adapters.items()}
    for name, path in adapters.items():
        with local_cluster(model, config_for(model, *settings([readers[name]]), *layout)) as cluster:
            cluster.load_adapter(str(path))
            alone[name] = answers(cluster, prompts, SAMPLING)
            alone[False] = answers(cluster, prompts, SAMPLING, adapter=False)
    assert len({str(found) for found in alone.values()}) == 4  # each says something else

    with local_cluster(model, config_for(model, *settings(list(readers.values())), *layout)) as cluster:
        tensors = sum(len(reader.lora.linear) * 2 for reader in readers.values())
        loaded = cluster.load_adapters({name: str(path) for name, path in adapters.items()})
        assert loaded > tensors
        trained = cluster.parameters()
        asked: list[bool | str] = [False, "all", "attention", "third"]
        for _ in range(2):  # a second session finds the adapters again
            with Generator(cluster, max_rows=6) as generator:  # fewer than requests: they join and leave
                jobs = [
                    (who, number, generator.submit(Request(prompt, SAMPLING, who)))
                    for number, prompt in enumerate(prompts)
                    for who in asked
                ]
                for who, number, answer in jobs:
                    assert answer.result(120).tokens == alone[who][number], (who, number)
        after = cluster.parameters()  # what a session leaves is what training would go on with
        assert all(torch.equal(trained[name], value) for name, value in after.items())


def test_an_adapter_of_some_experts_is_no_adapter(model: Path, adapters: dict[str, Path]) -> None:
    from safetensors.torch import load_file, save_file

    reader = AdapterReader(str(adapters["all"]), str(model))
    other = AdapterReader(str(adapters["attention"]), str(model))
    broken = adapters["all"].parent / "broken"
    broken.mkdir()
    tensors = load_file(adapters["all"] / "adapter_model.safetensors")
    lost = next(name for name in tensors if ".experts.3.up_proj" in name).rpartition(".lora_")[0]
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(lost)}
    save_file(kept, broken / "adapter_model.safetensors")
    (broken / "adapter_config.json").write_text((adapters["all"] / "adapter_config.json").read_text())
    with (
        local_cluster(model, config_for(model, *settings([reader, other]))) as cluster,
        pytest.raises(UserError, match=r"lacks parameters.*experts\.3\.up_proj"),
    ):
        cluster.load_adapters({"a": str(adapters["attention"]), "b": str(broken)})
