"""What is refused, by name and before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.qwen3_moe import modeling_qwen3_moe

from kt_ray.checkpoint import CheckpointIndex
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.formula import check_trainable
from kt_ray.model.layer_calls import LayerContext, LayerStub, Passthrough, RecordedCall
from kt_ray.model.layer_checks import probe_layer
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.layer_table import layer_table
from tests.helpers.families import LAYERS, write_config
from tests.helpers.hf_reference import FAMILIES, SMALL
from tests.placement.configs import make_config

Checkpoint = Callable[..., Path]


def config_only(root: Path, family: str, **overrides: Any) -> Path:
    """A directory with a config.json and no weights: a refusal must come before loading."""
    config = AutoConfig.for_model(family, **{**SMALL, **FAMILIES.get(family, {}), **overrides})
    config.save_pretrained(root)
    return root


def refuse(path: Path, match: str, layers: tuple[int, int] = (0, 3), **spec: Any) -> UserError:
    with pytest.raises(UserError, match=match) as caught:
        Stage(StageSpec(str(path), layers, 3, **spec))
    assert "To fix:" in str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("family", "overrides", "match"),
    [
        ("qwen3_moe", {"hidden_act": "gelu"}, "experts of qwen3_moe.*activation GELU"),
        ("llama4_text", {"num_experts_per_tok": 2}, "llama4_text is trained with one expert per token only"),
        ("llama", {"num_key_value_heads": 4, "intermediate_size": 64}, "llama has no routed experts"),
        (
            "nemotron_h",
            {"num_hidden_layers": 3, "layers_block_type": ["moe", "attention", "moe"]},
            "nemotron_h",
        ),
    ],
)
def test_families(tmp_path: Path, family: str, overrides: dict[str, Any], match: str) -> None:
    refuse(config_only(tmp_path, family, **overrides), match, attn_implementation="eager")


def test_unknown_family(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    refuse(tmp_path, "transformers cannot read this model's configuration.*no_such_model")


def test_no_model_for_text(tmp_path: Path) -> None:
    AutoConfig.for_model("vit").save_pretrained(tmp_path)
    refuse(tmp_path, "transformers cannot build vit for text generation")


def test_other_number_of_layers(tmp_path: Path) -> None:
    refuse(
        config_only(tmp_path, "mixtral", num_hidden_layers=4), "4 layers; required 3 modules in model.layers"
    )


def test_experts_per_token_layer_by_layer(tmp_path: Path) -> None:
    """Hunyuan-A13B states them so, the same of every layer."""

    def spec(counts: list[int]) -> StageSpec:
        path = write_config(tmp_path, "hunyuan_v1_moe", num_experts_per_tok=None, moe_topk=counts)
        return StageSpec(str(path), (0, LAYERS), LAYERS)

    assert build_on_meta(spec([2, 2, 2, 2])).top_k == 2
    with pytest.raises(UserError, match=r"hunyuan_v1_moe does not say.*every layer.*found \[2, 1, 2, 2\]"):
        build_on_meta(spec([2, 1, 2, 2]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bfloat16_products_of_a_cpu(
    checkpoint: Checkpoint, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are widened where torch has no fast ones; a model in float32 is not slowed down for it."""
    asked = []
    monkeypatch.setattr("kt_ray.model.stage.widen_products", lambda: asked.append(dtype))
    Stage(StageSpec(str(checkpoint("qwen3_moe")), (0, 3), 3, dtype=dtype))
    assert asked == ([dtype] if dtype == "bfloat16" else [])


def test_unknown_lora_target(checkpoint: Checkpoint) -> None:
    error = refuse(
        checkpoint("deepseek_v3"),
        "modules that this model does not have",
        lora=LoraConfig(target_modules=["qkv"]),
    )
    assert "kv_a_proj_with_mqa" in str(error) and "lm_head" not in str(error.required)


def test_lora_target_of_another_stage(checkpoint: Checkpoint) -> None:
    """A suffix that only other stages have is no error: layer 0 of this model has no shared expert."""
    lora = LoraConfig(target_modules=["shared_experts.up_proj"])
    assert Stage(StageSpec(str(checkpoint("deepseek_v3")), (0, 1), 3, lora=lora)).parameters == {}


def test_layers_outside_the_model(checkpoint: Checkpoint) -> None:
    for layers in ((2, 2), (0, 4), (-1, 2)):
        with pytest.raises(ValueError, match="no part of 3"):
            Stage(StageSpec(str(checkpoint("deepseek_v3")), layers, 3))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"has_gate": False}, "without a gate"),
        ({"has_post_expert_norm": True}, "norm after each expert"),
        ({"act_fn": nn.ReLU()}, "activation ReLU"),
        ({"act_fn": None}, "activation NoneType"),
        ({"scale_param": nn.Parameter(torch.ones(2))}, "parameters scale_param"),
    ],
)
def test_expert_flags(change: dict[str, Any], match: str) -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, **FAMILIES["qwen3_moe"]})
    module = modeling_qwen3_moe.Qwen3MoeExperts(config)
    check_trainable(module, "qwen3_moe")
    module.act_fn = nn.SiLU()
    check_trainable(module, "qwen3_moe")
    for name, value in change.items():
        delattr(module, name) if name == "act_fn" else None
        setattr(module, name, value)
    with pytest.raises(UserError, match=match):
        check_trainable(module, "qwen3_moe")


def test_own_gate_is_refused() -> None:
    class Clamped(modeling_qwen3_moe.Qwen3MoeExperts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up.chunk(2, -1)[0].clamp(max=7.0)

    config = AutoConfig.for_model("qwen3_moe", **{**SMALL, **FAMILIES["qwen3_moe"]})
    with pytest.raises(UserError, match="a gate of its own"):
        check_trainable(Clamped(config), "other")


def _layers_that(monkeypatch: pytest.MonkeyPatch, forward: Callable[..., Any]) -> None:
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeModel, "forward", forward)


class _Output:
    def __init__(self, h: torch.Tensor) -> None:
        self.last_hidden_state = h
        self.past_key_values = self.hidden_states = self.attentions = self.router_logits = None


def _embed(self: Any, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> torch.Tensor:
    return self.embed_tokens(ids) if embeds is None else embeds


def test_layers_that_share_more_than_h(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kw: Any) -> _Output:
        h = _embed(self, input_ids, inputs_embeds)
        for layer in self.layers:
            h = layer(h, previous=h.mean())
        return _Output(h)

    _layers_that(monkeypatch, forward)
    refuse(checkpoint("qwen3_moe"), "layer 1 receives what an earlier layer computed")


def test_layers_that_return_more_than_h(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kw: Any) -> _Output:
        h = _embed(self, input_ids, inputs_embeds)
        for layer in self.layers:
            h, _, _ = layer(h)
        return _Output(h)

    _layers_that(monkeypatch, forward)
    refuse(checkpoint("qwen3_moe"), "qwen3_moe cannot run with any placement.*input is not one hidden state")


def test_layers_with_a_shared_place(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that layers may leave results in: one that takes what nobody has left is refused."""
    original = modeling_qwen3_moe.Qwen3MoeDecoderLayer.forward

    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kw: Any) -> _Output:
        h, shared = _embed(self, input_ids, inputs_embeds), {}
        positions = torch.arange(h.shape[1])[None]
        for layer in self.layers:
            h = layer(h, position_embeddings=self.rotary_emb(h, positions), shared=shared)
        return _Output(self.norm(h))

    def leaving(self: Any, hidden_states: torch.Tensor, shared: Any, **kw: Any) -> torch.Tensor:
        shared["here"] = (hidden_states,)
        return original(self, hidden_states, **kw)

    def taking(self: Any, hidden_states: torch.Tensor, shared: Any, **kw: Any) -> torch.Tensor:
        return original(self, hidden_states + shared["there"][0], **kw)

    _layers_that(monkeypatch, forward)
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeDecoderLayer, "forward", leaving)
    assert not Stage(StageSpec(str(checkpoint("qwen3_moe")), (0, 3), 3)).hands
    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeDecoderLayer, "forward", taking)
    refuse(checkpoint("qwen3_moe"), "layer 0 receives what an earlier layer computed")

    def inside(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kw: Any) -> _Output:
        h, shared = _embed(self, input_ids, inputs_embeds), {}
        for layer in self.layers:
            h = layer(h, shared=(shared,))
        return _Output(h)

    _layers_that(monkeypatch, inside)
    refuse(checkpoint("qwen3_moe"), "an empty dict")


def test_layers_that_see_the_tokens(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per-layer token embeddings: one stage can, several cannot."""
    original = modeling_qwen3_moe.Qwen3MoeDecoderLayer.forward

    def forward(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **kw: Any) -> _Output:
        h = _embed(self, input_ids, inputs_embeds)
        e = h
        positions = torch.arange(h.shape[1])[None]
        for layer in self.layers:
            h = layer(h, position_embeddings=self.rotary_emb(h, positions), per_layer=e)
        return _Output(self.norm(h))

    def layer_forward(
        self: Any, hidden_states: torch.Tensor, per_layer: torch.Tensor, **kw: Any
    ) -> torch.Tensor:
        return original(self, hidden_states, **kw) + per_layer

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeDecoderLayer, "forward", layer_forward)
    _layers_that(monkeypatch, forward)
    error = refuse(checkpoint("qwen3_moe"), "more than one stage.*made from the tokens", layers=(0, 2))
    assert "rule.stages=1" in str(error)
    stage = Stage(StageSpec(str(checkpoint("qwen3_moe")), (0, 3), 3))
    assert stage.scales == {0: 1.0, 2: 1.0}


def test_a_layer_with_two_outputs() -> None:
    class Layer(nn.Module):
        def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return h, h

    with pytest.raises(UserError, match="2 outputs of one layer"):
        RecordedCall((), {}, False).run(Layer(), torch.zeros(1))


def test_stub_shows_its_layers_attributes() -> None:
    layer = nn.Linear(2, 2)
    layer.attention_type = "sliding_attention"  # type: ignore[assignment]
    stub = LayerStub(layer)
    assert stub.attention_type == "sliding_attention" and list(stub.parameters()) == []
    with pytest.raises(AttributeError):
        _ = stub.no_such_thing
    assert Passthrough()(7, 8) == 7  # type: ignore[arg-type]


class _Probed(nn.Module):
    def __init__(self, how: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.context = LayerContext(0, 4)
        self.linear = nn.Linear(16, 16).to(dtype)
        self.how = how

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        mixed = self.linear(h)
        return self.how(h + mixed, self.context(mixed.view(-1, 16), None, None).view(h.shape))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("how", "c"),
    [
        (lambda p, y: p + y, 1.0),
        (lambda p, y: p + 0.22 * y, 0.22),
        (lambda p, y: 2.5 * (p + y), 2.5),
        (lambda p, y: p + 0.3333 * y, pytest.approx(0.3333, rel=1e-5)),
        (lambda p, y: p - y, pytest.approx(-1.0, rel=1e-5)),
        (lambda p, y: p + torch.nn.functional.rms_norm(y, (16,)), None),
        (lambda p, y: torch.nn.functional.rms_norm(p + y, (16,)), None),
        (lambda p, y: p + p.sigmoid() * y, None),
        (lambda p, y: p + p.abs().mean() * y, None),
        (lambda p, y: p + y.flip(-1), None),
        (lambda p, y: p + y + 0.01 * y.square(), None),
    ],
)
def test_probe(how: Callable[..., torch.Tensor], c: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = _Probed(how, dtype)
    found = probe_layer(layer, RecordedCall((), {}, False), layer.context, (2, 4, 16), (0.22, 2.5, 0.9))
    assert found == c
    assert layer.context.handler is None and layer.linear.weight.dtype == dtype


@pytest.mark.parametrize("calls", [0, 2])
def test_probe_wants_one_call(calls: int) -> None:
    class Layer(_Probed):
        def forward(self, h: torch.Tensor) -> torch.Tensor:
            for _ in range(calls):
                self.context(h, None, None)  # type: ignore[arg-type]
            return h

    layer = Layer(lambda p, y: p, torch.float32)
    with pytest.raises(UserError, match=f"exactly once.*found {calls} calls"):
        probe_layer(layer, RecordedCall((), {}, False), layer.context, (1, 2, 16))


def test_longcat_flashs_routers_stay_in_float32(checkpoint: Callable[..., Path]) -> None:
    """transformers rounds them; the plan counts them."""
    path = checkpoint("longcat_flash")
    lora = LoraConfig(rank=2, target_modules="none")
    stage = Stage(StageSpec(str(path), (0, 3), 3, lora=lora, dtype="bfloat16"))
    index = CheckpointIndex.open(path)
    state = stage.model.causal.state_dict()
    for name in ("mlp.router.classifier.weight", "mlp.router.e_score_correction_bias"):
        name = f"model.layers.2.{name}"
        assert torch.equal(state[name], index.read(name)) and state[name].dtype == torch.float32
    dims = dims_from_dir(path)
    planned = sum(layer_table(dims, make_config(), "bfloat16").weight_bytes)
    held = {n: t for n, t in stage.model.causal.named_parameters() if ".layers." in n}
    assert sum(t.nbytes for t in held.values()) == planned
