"""merge: what it refuses, and what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.errors import UserError
from kt_ray.tools.__main__ import main
from kt_ray.tools.merge import merge
from tests.helpers.tiny_moe import H, I, expert_modules, lora, per_expert, save, save_adapter


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (
            lora({"model.layers.0.b_proj": (H, H), "model.layers.0.a_proj": (H, H)}),
            {},
            r"a_proj, model.layers.0.b_proj",
        ),
        (lora({"model.layers.7.mlp.experts.0.up_proj": (I, H)}), {}, "layers.7"),
        (lora({"model.layers.0.mlp.experts.3.up_proj": (I, H)}), {}, "experts.3"),
        (lora({"model.layers.0.self_attn.q_proj": (H, I)}), {}, "shapes do not fit"),
        (lora({"model.layers.0.self_attn.q_proj": (H, H)}), {"r": 8}, "disagree about the rank"),
        (lora({"model.layers.0.self_attn.q_proj": (H, H)}), {"use_dora": True}, "use_dora"),
        (lora({"model.layers.0.self_attn.q_proj": (H, H)}), {"use_rslora": "false"}, "use_rslora; found str"),
        (
            {f"model.layers.0.mlp.experts.lora_{half}.weight": torch.ones(4) for half in "AB"},
            {"target_parameters": ["experts.down_proj"]},
            r"number of dimensions.*lora_A\.weight \[4\]",
        ),
        (lora({"model.layers.0.self_attn.q_proj": (H, H)}), {"peft_type": "IA3"}, "IA3"),
        (
            lora({"model.layers.0.self_attn.q_proj": (H, H)}),
            {"init_lora_weights": "pissa_niter_4"},
            "pissa_niter_4",
        ),
        (
            lora({"model.layers.0.self_attn.q_proj": (H, H)}),
            {"alora_invocation_tokens": [1, 2]},
            "alora_invocation_tokens",
        ),
        (
            lora({"model.layers.0.self_attn.q_proj": (H, H)}),
            {"modules_to_save": ["lm_head"]},
            "modules_to_save",
        ),
        ({"model.norm.weight": torch.ones(3)}, {}, "not LoRA matrices.*model.norm"),
        (
            {"lm_head.base_layer.weight": torch.ones(3)},
            {},
            "weights of the base.*embedding_layers=False",
        ),
        ({"x.lora_A.weight": torch.ones(4, 3)}, {}, "one half of a pair"),
        (
            {f"x.lora_A.{name}weight": torch.ones(4, 3) for name in ("", "default.")},
            {},
            r"matrices twice; .*x\.lora_A",
        ),
        (
            {
                "x.lora_A.weight": torch.ones(4, 3),
                "x.lora_B.weight": torch.ones(3, 4).to(torch.float8_e4m3fn),
            },
            {},
            "of a type that is not read.*lora_B.weight F8_E4M3; required F32",
        ),
        (
            {f"x.lora_{half}.weight": torch.ones(4, 4, dtype=torch.int8) for half in "AB"},
            {},
            "of a type that is not read.*I8",
        ),
        (
            {
                "model.layers.0.mlp.experts.lora_A.weight": torch.ones(12, 5),
                "model.layers.0.mlp.experts.lora_B.weight": torch.ones(5, 12),
            },
            {},
            "neither",
        ),
    ],
)
def test_adapters_that_do_not_fit(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    tensors: dict[str, torch.Tensor],
    config: dict[str, Any],
    message: str,
) -> None:
    base = save(tmp_path / "base", per_expert())
    path = save_adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(UserError, match=message) as caught:
        merge(base, path, tmp_path / "out")
    assert caught.value.remedy and not (tmp_path / "out").exists()
    assert main(["merge", str(base), str(path), str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_another_adapter_is_another_job(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert())
    modules = {"model.layers.0.self_attn.q_proj": (H, H)}
    first = save_adapter(tmp_path / "one", lora(modules))
    second = save_adapter(tmp_path / "two", lora(modules), lora_alpha=7)
    merge(base, first, tmp_path / "out")
    with pytest.raises(UserError, match="not empty"):
        merge(base, second, tmp_path / "out")
    with pytest.raises(UserError, match=r"no adapter_config.json"):
        merge(base, base, tmp_path / "other")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    tensors = per_expert()
    key = "model.layers.0.mlp.experts.0.gate_proj.weight"
    tensors[key][0, 0] = torch.inf
    base = save(tmp_path / "base", tensors)
    with pytest.raises(UserError, match=rf"weights are not finite; at {key}.*download the checkpoint again$"):
        merge(base, save_adapter(tmp_path / "adapter", lora(expert_modules())), tmp_path / "out")


def test_float16_that_an_update_leaves_behind(tmp_path: Path) -> None:
    base = save(tmp_path / "base", per_expert(torch.float16))
    adapter = lora(expert_modules())
    adapter["model.layers.0.self_attn.q_proj.lora_B.weight"] *= 1e7
    with pytest.raises(UserError, match=r"q_proj.*too large for F16: save the checkpoint in bfloat16"):
        merge(base, save_adapter(tmp_path / "adapter", adapter), tmp_path / "out")
