"""The routers' load-balancing loss: transformers' own on the whole batch, its gradient in every adapter."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.routing import balance, router_recorder
from kt_ray.model.stage_spec import StageSpec
from kt_ray.train.trainer import StepBatches, Trainer
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.exhaustive import spread
from tests.helpers.families import LAYERS, save_whole, write_config
from tests.helpers.hf_reference import Reference, build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, relative, waves_of
from tests.helpers.stages import backward, forward, make_stages, pass_spec

COEFFICIENT = 3.0  # large, so that its part of the gradients is seen
LAYOUTS = {
    "one worker": ["rule=cpu_1worker_1socket"],
    "two stages, two sockets, micro-batches of two": [
        "rule=cpu_2workers_2sockets",
        "trainer.micro_batch_size=2",
    ],
    "two replicas, recomputed": ["rule=cpu_replicas_2", "rule.activations=group"],
    "ranges of heads": ["rule=cpu_1worker_1socket", "rule.activations=ranges"],
}


def transformers_loss(reference: Reference) -> Any:
    return sys.modules[type(reference.model).__module__].load_balancing_loss_func  # type: ignore[attr-defined]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "dropout"),
    spread([("qwen3_moe", 0.0), ("qwen3_moe", 0.2), ("mixtral", 0.2), ("mixtral", 0.0)], 2),
)
def test_equals_transformers_on_the_whole_batch(
    tmp_path: Path, family: str, layout: str, dropout: float
) -> None:
    path = build_checkpoint(tmp_path, family)
    rows = random_rows(6)
    reference = Reference(path, LoraConfig(rank=4, alpha=8.0, dropout=dropout), seed=3)
    reference.randomize_b(1)
    expected = reference.run(rows)
    layers: dict[torch.nn.Module, list[torch.Tensor]] = {}
    recorder = router_recorder(reference.model)
    for module in reference.model.modules():
        if isinstance(module, recorder.target_class):
            layers[module] = []
            module.register_forward_hook(lambda m, _, out: layers[m].append(out[recorder.index]))
    for tensor in reference.parameters.values():
        tensor.grad = None
    for row in rows:
        reference._sample = row.sample
        reference.model(input_ids=torch.tensor([row.ids]), use_cache=False)
    experts = len(reference.experts[next(iter(reference.experts))].down_proj)
    logits = tuple(torch.cat(parts) for parts in layers.values())
    aux = transformers_loss(reference)(logits, experts, reference.model.config.num_experts_per_tok)
    (COEFFICIENT * aux).backward()
    wanted = {
        name: expected.grads[name] + (0 if t.grad is None else t.grad)
        for name, t in reference.parameters.items()
    }
    moved = relative(wanted, expected.grads)
    assert max(moved.values()) > 0.05  # else nothing would be tested
    config = config_for(path, *LAYOUTS[layout], f"lora.dropout={dropout}", f"trainer.aux_loss={COEFFICIENT}")
    with local_cluster(path, config) as cluster:
        cluster.set_parameters({k: v.detach() for k, v in reference.parameters.items()})
        waves = waves_of(rows, config, cluster.plan)
        trainer = Trainer(config, cluster, StepBatches(1, 1, lambda _: [waves]))
        loss, slopes = trainer._passes.router_balance(0, [waves])
        tokens = sum(mb.loss_tokens for replica in waves for group in replica for mb in group)
        trainer._passes.run(0, "train", waves, tokens, router_slopes=slopes)
        gradients = cluster.gradients()
    assert loss == pytest.approx(float(aux.detach()), rel=1e-5)
    errors = relative(gradients, wanted)
    assert max(errors.values()) <= 1e-4, max(errors.items(), key=lambda item: item[1])


def test_hash_routers_have_no_part_in_it(tmp_path: Path) -> None:
    path = write_config(tmp_path, "deepseek_v4")  # its first layer has one
    save_whole(path)
    (stage,) = make_stages(path, (0, LAYERS), LoraConfig(rank=4, alpha=8.0), attn_implementation="eager")
    reference, rows = Eager(path, stage.model), random_rows(1)
    spec, exchange = pass_spec(rows), EagerExchange(reference.experts)
    routing = forward([stage], replace(spec, kind="eval", routing=True), exchange)[0].routing()  # type: ignore[arg-type]
    assert routing is not None
    aux, slopes = balance(*routing, stage.top_k, COEFFICIENT)
    loops = forward([stage], replace(spec, router_slopes=slopes), exchange)  # type: ignore[arg-type]
    backward([stage], loops)
    loss, grads = reference.run(rows, stage.parameters, 8.0 / 4, aux=COEFFICIENT)
    assert loops[0].loss_sum / spec.loss_tokens + COEFFICIENT * aux == pytest.approx(loss, rel=2e-5)
    errors = relative({name: stage.parameters[name].grad for name in grads}, grads)  # type: ignore[misc]
    assert max(errors.values()) <= 2e-4, max(errors.items(), key=lambda item: item[1])


@pytest.mark.parametrize("family", ["glm4v_moe", "qwen3_omni_moe_thinker"])
def test_multimodal_classes_leave_the_routers_to_their_language_model(tmp_path: Path, family: str) -> None:
    path = write_config(tmp_path, family)
    causal = build_on_meta(StageSpec(str(path), (0, LAYERS), LAYERS)).causal
    assert "router_logits" not in (causal._can_record_outputs or {})
    assert "TextTop" in router_recorder(causal).target_class.__name__


def test_even_routing_has_the_smallest_loss() -> None:
    even, slopes = balance(np.full(4, 10.0), np.full(4, 5.0), 2, 0.5)
    assert even == pytest.approx(2.0) and slopes == pytest.approx((0.5 * 4 * 0.5 / 20,) * 4)
    uneven, _ = balance(np.array([20.0, 20.0, 0.0, 0.0]), np.array([10.0, 10.0, 0.0, 0.0]), 2, 0.5)
    assert uneven > even


def test_families_without_it_are_refused_by_name(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    model = build_on_meta(StageSpec(str(path), (0, 1), 3))
    with pytest.raises(UserError, match=r"DeepseekV3ForCausalLM has no load-balancing loss.*aux_loss=0"):
        router_recorder(model.causal)
