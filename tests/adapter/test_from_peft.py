"""Adapters from files: ours per expert, ours fused, PEFT's with patterns, and those that do not fit."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kt_ray import cli
from kt_ray.actors.cluster import ActorCluster
from kt_ray.adapter.adapter_dir import adapter_layout, create_adapter, finish_adapter
from kt_ray.adapter.adapter_file import Lora
from kt_ray.adapter.from_peft import AdapterReader, adapter_directory
from kt_ray.adapter.peft_config import TEXT_ALONE, WEIGHTS, AdapterInfo
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.errors import UserError
from kt_ray.tools import __main__ as tools
from tests.helpers.hf_reference import FAMILIES, build_checkpoint
from tests.helpers.runs import config_for, local_cluster
from tests.helpers.tiny_families import tiny_family
from tests.helpers.tiny_moe import lora, save_adapter, values


def checkpoint(root: Path, family: str) -> Path:
    return build_checkpoint(root, family) if family in FAMILIES else tiny_family(root, family)


def shaken(cluster: ActorCluster) -> dict[str, torch.Tensor]:
    """All LoRA parameters drawn anew."""
    generator = torch.Generator().manual_seed(2)
    values = {
        name: torch.randn(value.shape, generator=generator, dtype=torch.float32)
        for name, value in cluster.parameters().items()
    }
    cluster.set_parameters(values)
    return values


def written(cluster: ActorCluster, config: Config, path: Path, family: str, to: Path) -> None:
    layout = adapter_layout(cluster.parameter_shapes())
    lora = config.lora
    info = AdapterInfo(str(path), family, lora.rank, lora.alpha)
    create_adapter(to, layout)
    cluster.write_adapter(str(to), layout)
    finish_adapter(to, layout, info)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "granitemoe", "gpt_oss"])
def test_what_was_written_is_read_again(tmp_path: Path, family: str) -> None:
    path = checkpoint(tmp_path, family)
    attention = "model.attn_implementation=eager"
    config = config_for(path, "rule.stages=2", "rule.experts.sockets=2", attention)
    with local_cluster(path, config) as cluster:
        values = shaken(cluster)
        written(cluster, config, path, family, tmp_path / "run" / "adapter")
    directory = adapter_directory(str(tmp_path / "run"))
    lora = AdapterReader(directory, str(path)).config
    assert (lora.rank, lora.alpha, lora.experts) == (config.lora.rank, config.lora.alpha, True)
    targets = f"lora.target_modules=[{','.join(lora.target_modules)}]"
    again = config_for(
        path, f"lora.rank={lora.rank}", f"lora.alpha={lora.alpha}", targets, "seed=9", attention
    )
    with local_cluster(path, again) as cluster:
        before = cluster.parameters()
        assert set(before) == set(values)
        assert cluster.load_adapter(directory) == len(values)
        after = cluster.parameters()
        assert all(torch.equal(after[name], value) for name, value in values.items())
        assert not all(torch.equal(before[name], value) for name, value in values.items())


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Path]:
    """A model and an adapter of it."""
    path = checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path)
    with local_cluster(path, config) as cluster:
        shaken(cluster)
        written(cluster, config, path, "deepseek_v3", tmp_path / "adapter")
    return path, tmp_path / "adapter"


def test_smaller_ranks_and_other_scales_compute_the_same(adapter: tuple[Path, Path]) -> None:
    path, directory = adapter
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    key = next(k.removesuffix(".lora_A.weight") for k in tensors if "q_a_proj.lora_A" in k)
    small = {f"{key}.lora_A.weight": 2, f"{key}.lora_B.weight": 2}
    tensors[f"{key}.lora_A.weight"] = tensors[f"{key}.lora_A.weight"][:2].contiguous()
    tensors[f"{key}.lora_B.weight"] = tensors[f"{key}.lora_B.weight"][:, :2].contiguous()
    save_file(tensors, file)
    config = json.loads((directory / "adapter_config.json").read_text())
    module = key.removeprefix("base_model.model.").replace(".", r"\.")
    config["rank_pattern"] = {module: 2}
    config["alpha_pattern"] = {module: 10}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    reader = AdapterReader(str(directory), str(path))
    plain = key.removeprefix("base_model.model.")
    a, b = (
        torch.ones(4, tensors[f"{key}.lora_A.weight"].shape[1]),
        torch.ones(tensors[f"{key}.lora_B.weight"].shape[0], 4),
    )
    assert reader.read_into(
        [(f"{plain}.lora_A.weight", a), (f"{plain}.lora_B.weight", b)], LoraConfig(rank=4, alpha=8)
    ) == len(small)
    expected = 10 / 2 * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    torch.testing.assert_close(2.0 * b @ a, expected)


def test_modules_of_scale_0_change_nothing(adapter: tuple[Path, Path]) -> None:
    path, directory = adapter
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text()) | {"alpha_pattern": {}}
    for change, scale in (({"alpha_pattern": {"q_a_proj": 0}}, 2.0), ({"lora_alpha": 0}, 1.0)):
        file.write_text(json.dumps(config | change))
        reader = AdapterReader(str(directory), str(path))
        pair = next(p for p in reader.lora.pairs() if p.module.endswith("q_a_proj"))
        b = torch.ones(*pair.b.shape)
        assert reader.config.scale == scale
        assert reader.read_into([(f"{pair.module}.lora_B.weight", b)], reader.config) == 1 and not b.any()


def test_adapters_that_do_not_fit_are_refused(adapter: tuple[Path, Path], tmp_path: Path) -> None:
    path, directory = adapter
    small = local_cluster(path, config_for(path, "lora.rank=2"))
    with small as cluster, pytest.raises(UserError, match="does not fit"):
        cluster.load_adapter(str(directory))
    other = checkpoint(tmp_path / "other", "qwen3_moe")
    with local_cluster(other, config_for(other)) as cluster, pytest.raises(UserError, match="lacks"):
        cluster.load_adapter(str(directory))
    shutil.rmtree(directory)
    with pytest.raises(UserError, match="no such directory"):
        adapter_directory(str(directory))


def test_an_adapter_that_is_not_finite_is_used_by_nobody(
    adapter: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, directory = adapter
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    name = max(tensors)
    tensors[name][0, 0] = float("inf")
    save_file(tensors, file)
    common = ["cluster=local", "tracking.plot=false", f"model.path={base}", f"run.root={tmp_path}/runs"]
    commands = [
        lambda: tools.main(["merge", str(base), str(directory), str(tmp_path / "merged")]),
        lambda: tools.main(
            ["export", str(directory), str(tmp_path / "out"), "--form", "peft-fused", "--base", str(base)]
        ),
        *(
            (
                lambda mode=mode: cli.main(
                    [f"mode={mode}", f"generate.adapter={directory}", "data=demo", *common]
                )
            )
            for mode in ("predict", "eval", "chat")
        ),
        lambda: cli.main(["mode=serve", f"serve.adapters={{a: {directory}}}", *common]),
    ]
    for command in commands:
        assert command() == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "not finite" in err and name in err, err
    assert not (tmp_path / "merged").exists() and not (tmp_path / "out").exists()


def test_what_is_an_adapter_otherwise(tmp_path: Path) -> None:
    directory = save_adapter(tmp_path / "run" / "adapter", lora({"q_proj": (4, 4)}))
    with pytest.raises(UserError, match=r"no adapter_config.*name the adapter in it: .*/run/adapter"):
        Lora.open(tmp_path / "run")
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    for given in (directory, directory.parent):  # of the run's, too: naming the adapter in it would not help
        for refused in (lambda path: Lora.open(path), lambda path: adapter_directory(str(path))):
            with pytest.raises(UserError, match=r"load .*/run/adapter/adapter_model\.bin with PEFT and save"):
                refused(given)


@pytest.mark.parametrize("family", [f"{family}{end}" for family in TEXT_ALONE for end in ("", "_text")])
def test_names_inside_the_multimodal_model(tmp_path: Path, family: str) -> None:
    """PEFT's adapter of the class around the text model; its patterns name modules as that class does."""
    inside = "language_model.model" if family.startswith("llama4") else "model.language_model"
    layer = f"{inside}.layers.3"
    tensors = lora({f"{layer}.self_attn.q_proj": (16, 16), f"{layer}.mlp.experts.5.up_proj": (24, 16)})
    tensors |= {f"{layer}.mlp.experts.base_layer.lora_A.weight": values(8, 16)}
    tensors |= {f"{layer}.mlp.experts.base_layer.lora_B.weight": values(48, 8)}
    targets = {"target_parameters": [f"{layer}.mlp.experts.gate_up_proj"]}
    patterns = {"alpha_pattern": {f"{layer}.self_attn.q_proj": 3}}
    directory = save_adapter(tmp_path / "a", tensors, **targets, **patterns)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({"model_type": family}))
    found = AdapterReader(str(directory), str(base)).lora
    layer = "model.layers.3"
    assert {m: (p.module, p.scale) for m, p in found.linear.items()} == {
        f"{layer}.self_attn.q_proj": (f"{layer}.self_attn.q_proj", 3 / 4)
    }
    assert list(found.experts) == [(f"{layer}.mlp.experts", 5, "up")]
    assert list(found.fused) == [(f"{layer}.mlp.experts", "gate_up")]


@pytest.mark.parametrize(
    ("sizes", "version", "family", "refused"),
    [
        ({"gate_up": (16, 48), "down": (24, 16)}, None, "qwen3_moe", None),
        ({"gate_up": (48, 16), "down": (16, 24)}, None, "qwen3_moe", "each other's place"),
        ({"gate_up": (16, 48), "down": (24, 16)}, "0.18.0", "qwen3_moe", None),
        ({"gate_up": (48, 48)}, "0.19.1", "qwen3_moe", None),
        ({"gate_up": (48, 48)}, "0.18.1", "qwen3_moe", r"each other's place.*peft_version 0\.18\.1"),
        ({"gate_up": (48, 48)}, "0.18.1", "gpt_oss", None),
        ({"down": (24, 16)}, "0.18.1", "aria_text", None),
        ({"down": (48, 48)}, "0.19.0", "gpt_oss", r"as PEFT stores them before 0\.19\.1.*or train it again"),
        ({"gate_up": (48, 16), "down": (16, 24)}, "0.21.2", "", "turned"),  # the base is looked up later
        ({"gate_up": (48, 16), "down": (16, 24)}, None, "llama4_text", "turned"),
        ({"down": (16, 24)}, "0.21.2", "llama4_text", "turned"),
        ({"gate_up": (16, 48), "down": (24, 16)}, "0.18.0", "llama4_text", None),
        ({"down": (24, 16)}, "0.18.0", "llama4_text", None),
    ],
)
def test_fused_experts_of_old_peft(
    tmp_path: Path, sizes: dict[str, tuple[int, int]], version: str | None, family: str, refused: str | None
) -> None:
    """0.18.1 trained [E, out, in] by A of out and B of in, as 0.19.0 did [E, in, out]."""
    prefix, tensors = "model.layers.0.mlp.experts", {}
    for role, (columns, rows) in sizes.items():
        module = f"{prefix}.base_layer" if role == "gate_up" and len(sizes) == 2 else prefix
        tensors[f"{module}.lora_A.weight"] = values(4 * 2, columns)
        tensors[f"{module}.lora_B.weight"] = values(rows, 2 * 4)
    targets = [f"experts.{role}_proj" for role in sizes]
    directory = save_adapter(tmp_path / "a", tensors, r=2, target_parameters=targets, peft_version=version)
    with pytest.raises(UserError, match=refused) if refused not in (None, "turned") else nullcontext():
        fused = Lora.open(directory, family).fused
        assert {pair.turned for pair in fused.values()} == {refused == "turned"}
        for (_, role), pair in fused.items():
            inner, outer = (24, 16) if role == "down" else (16, 48)
            assert sizes[role] == (48, 48) or (pair.in_features, pair.out_features) == (inner, outer)


def test_another_adapter_in_the_place_of_one_that_was_read(tmp_path: Path) -> None:
    """A train server's client may delete a checkpoint and give the next one its name."""
    prefix = "model.layers.0.mlp.experts"
    settings = {"r": 2, "target_modules": [], "target_parameters": ["experts.down_proj"]}
    for number, seed in enumerate((1, 3)):
        tensors = {
            f"{prefix}.lora_A.weight": values(3 * 2, 32, seed=seed),
            f"{prefix}.lora_B.weight": values(16, 2 * 3, seed=seed + 1),
        }
        directory = save_adapter(tmp_path / "adapter", tensors, **settings)
        os.utime(directory / WEIGHTS, (number, number))
        b = Lora.open(directory).fused[prefix, "down"].factors(1)[1]
        assert torch.equal(b, tensors[f"{prefix}.lora_B.weight"].view(16, 2, 3)[:, :, 1])
        shutil.rmtree(directory)
