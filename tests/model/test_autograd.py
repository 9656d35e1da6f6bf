"""The simple integration: experts_implementation="kt_ray" on a whole Hugging Face model in one process."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from transformers import AutoModelForCausalLM

from kt_ray.errors import UserError
from kt_ray.model import layer_calls
from kt_ray.model.autograd import default_engine, expert_weights
from kt_ray.native import Engine

Checkpoint = Callable[..., Path]
# Families with other experts than SwiGLU, which expert actors do not train yet: configuration beside _SMALL.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {  # interleaved, transposed, biased, clamped
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 12,
        "num_key_value_heads": 2,
    },
    "minimax_m3_vl_text": {  # gpt-oss's gate, concatenated, without biases
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "head_dim": 12,
        "num_key_value_heads": 2,
    },
    "gemma4_text": {  # GeGLU
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
        "intermediate_size": 56,
        "head_dim": 12,
        "global_head_dim": 12,
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 3,
    },
    "nemotron_h": {  # relu squared without a gate
        "layers_block_type": ["moe", "full_attention", "moe"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "head_dim": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 56,
    },
}
ROUTERS = ("mlp.gate.weight", "mixer.gate.weight", "mlp.router.weight", "router.proj.weight")
IDS = torch.tensor([[5, 9, 33, 70, 21, 8], [14, 2, 2, 60, 95, 3]])


def load(path: Path, experts: str, dtype: torch.dtype = torch.float32) -> Any:
    layer_calls.register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation=experts)
    return model.requires_grad_(False).eval()


def logits_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and the gradients at the embedded tokens and at every router."""
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    routers = {n: p.requires_grad_() for n, p in model.named_parameters() if n.endswith(ROUTERS)}
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    (logits.float() ** 2).mean().backward()
    out = {"logits": logits.detach().float(), "embedded": embedded.grad.float()}
    return out | {name: p.grad.float() for name, p in routers.items()}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe", "mixtral", *OTHERS])
def test_gradients_match_eager(checkpoint: Checkpoint, family: str) -> None:
    path = checkpoint(family, **OTHERS.get(family, {}))
    want = logits_and_gradients(load(path, "eager"))
    model = load(path, "kt_ray")
    calls = default_engine().calls
    got = logits_and_gradients(model)
    layers = sum(layer_calls.is_experts(m) for m in model.modules())
    assert default_engine().calls - calls == 2 * layers > 0, "the engine computed, forward and backward"
    assert len(want) > 3
    for name, value in want.items():
        assert float((got[name] - value).norm() / value.norm()) <= 1e-5, name


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_bf16(checkpoint: Checkpoint, family: str) -> None:
    path = checkpoint(family, dtype=torch.bfloat16, **OTHERS.get(family, {}))
    want = load(path, "eager", torch.bfloat16)(input_ids=IDS).logits.float()
    got = load(path, "kt_ray", torch.bfloat16)(input_ids=IDS).logits
    assert got.dtype == torch.bfloat16
    assert float((got.float() - want).norm() / want.norm()) <= 2e-2


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Any]]:
    """What the engine has kept for backward since the test began."""
    refs: list[weakref.ref[Any]] = []
    forward = Engine.forward

    def noted(*args: Any, **options: Any) -> Any:
        y, saved = forward(*args, **options)
        refs.append(weakref.ref(saved))
        return y, saved

    monkeypatch.setattr(Engine, "forward", noted)
    return refs


def alive(refs: list[weakref.ref[Any]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


def experts_of(checkpoint: Checkpoint) -> tuple[Any, list[torch.Tensor]]:
    """An experts module and what it takes, hidden states and routing weights with gradients."""
    module = load(checkpoint("qwen3_moe"), "kt_ray").model.layers[0].mlp.experts
    torch.manual_seed(0)
    hidden = torch.randn(6, module.gate_up_proj.shape[-1], requires_grad=True)
    weights = torch.rand(6, 2, requires_grad=True)
    return module, [hidden, torch.arange(12).reshape(6, 2) % 4, weights]


def test_what_is_kept_goes_with_backward(checkpoint: Checkpoint, kept: list[weakref.ref[Any]]) -> None:
    module, inputs = experts_of(checkpoint)
    y = module(*inputs)
    assert alive(kept) == 1
    y.sum().backward(retain_graph=True)
    assert alive(kept) == 1
    y.sum().backward()
    assert alive(kept) == 0
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    checkpointed = torch.utils.checkpoint.checkpoint(module, *inputs, use_reentrant=False)
    assert alive(kept) == 0
    before = inputs[0].grad / 2  # of two passes
    inputs[0].grad = None
    checkpointed.sum().backward()
    assert torch.equal(inputs[0].grad, before) and alive(kept) == 0


def test_a_second_derivative_is_refused(checkpoint: Checkpoint) -> None:
    module, inputs = experts_of(checkpoint)
    (slope,) = torch.autograd.grad(module(*inputs).square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


def test_a_forked_child_computes_with_an_engine_of_its_own(checkpoint: Checkpoint) -> None:
    module, inputs = experts_of(checkpoint)
    want = module(*inputs).detach()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = False
        with contextlib.suppress(BaseException):
            same = torch.equal(module(*inputs).detach(), want)
        os._exit(7 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_another_default_device_and_inference_mode(checkpoint: Checkpoint) -> None:
    module, inputs = experts_of(checkpoint)
    want = module(*inputs).detach()
    with torch.device("meta"):
        y = module(*inputs)
        y.sum().backward()
    assert torch.equal(y.detach(), want) and inputs[0].grad is not None
    with torch.inference_mode():
        model = load(checkpoint("qwen3_moe"), "kt_ray")
        assert torch.equal(model.model.layers[0].mlp.experts(*inputs), want)


def test_weights_are_taken_once_and_again_when_they_change(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("mixtral"), "kt_ray")
    module = model.model.layers[0].mlp.experts
    first = expert_weights(module)
    assert expert_weights(module) is first
    before = model(input_ids=IDS).logits
    with torch.no_grad():
        module.down_proj.mul_(2.0)
    second = expert_weights(module)
    assert second is not first and torch.equal(second.down, module.down_proj)
    assert second.down.data_ptr() == module.down_proj.data_ptr()
    assert not torch.equal(model(input_ids=IDS).logits, before)


@pytest.mark.parametrize(
    ("transposed", "concatenated"), [(False, True), (True, True), (False, False), (True, False)]
)
def test_layouts_of_the_parameters(checkpoint: Checkpoint, transposed: bool, concatenated: bool) -> None:
    module = load(checkpoint("qwen3_moe"), "kt_ray").model.layers[0].mlp.experts
    plain = expert_weights(module)
    gate_up, down = module.gate_up_proj.data, module.down_proj.data
    if not concatenated:
        gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
        module._apply_gate = lambda both: torch.nn.functional.silu(both[..., 0::2]) * both[..., 1::2]
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
    module.is_transposed, module.is_concatenated = transposed, concatenated
    again = expert_weights(module)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    for name in ("gate", "up", "down"):
        view = getattr(again, name)
        assert torch.equal(getattr(plain, name), view)
        assert view.untyped_storage().data_ptr() in parameters, "not a copy"


def test_trainable_experts_are_refused(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("mixtral"), "kt_ray").requires_grad_(True)
    with pytest.raises(UserError, match="does not train the expert weights"):
        model(input_ids=IDS)
    with torch.no_grad():
        model(input_ids=IDS)


def test_unsupported_parts_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(UserError, match="float16"):
        load(checkpoint("mixtral"), "kt_ray", torch.float16)(input_ids=IDS)
    model = load(checkpoint("mixtral"), "kt_ray")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.GELU()
    with pytest.raises(UserError, match=r"experts of mixtral.*GELU"):
        model(input_ids=IDS)
