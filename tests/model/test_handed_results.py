"""Layers that take what earlier ones computed, against transformers: the choice of an index (GLM-5.2, Hy4),
keys and values (Mistral Large 4)."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.errors import UserError
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.plan_types import BackwardPart
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.exhaustive import exhaustive
from tests.helpers.families import LAYERS, save_whole, write_config
from tests.helpers.hf_reference import random_rows
from tests.helpers.stages import backward, forward, pass_spec

LORA = LoraConfig(rank=2, alpha=4.0)
ROWS = random_rows(4)
SHARED = ["full", "shared", "full", "shared"]
# model_type -> keys of config.json, and where stages may be cut
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "glm_5_2": ("glm_moe_dsa", {"indexer_types": SHARED}, (2,)),
    "hy_v4": ("hy_v4", {}, (1,)),
    "mistral_large_4": (
        "mistral_large4",
        {"kv_source_layers": [0, 1, 0, 1], "no_rope_layers": [0, 1, 0, 1]},
        (),
    ),
    "apart": ("mistral_large4", {"index_topk": 2}, (1, 2, 3)),  # nothing is handed on
    "both": ("mistral_large4", {"kv_source_layers": [0, 0, 0, 3], "indexer_types": SHARED}, ()),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made: dict[str, Path] = {}
    for name, (model_type, keys, _) in FAMILIES.items():
        # with few index heads scores tie at 0, and which keys are chosen depends on padding
        made[name] = write_config(tmp_path_factory.mktemp(name), model_type, index_n_heads=64, **keys)
        save_whole(made[name])
    return made


def stages_of(path: Path, cuts: tuple[int, ...] = (), **spec: Any) -> list[Stage]:
    how: dict[str, Any] = {"dtype": "float32", "attn_implementation": "eager", "lora": LORA}
    ranges = itertools.pairwise((0, *cuts, LAYERS))
    return [Stage(StageSpec(str(path), own, LAYERS, **how | spec)) for own in ranges]


def check(path: Path, stages: list[Stage], lowest: int = 0) -> None:
    """Loss and the gradient of every LoRA B in layers from `lowest` on are transformers' own."""
    whole = stages[0] if len(stages) == 1 else stages_of(path)[0]
    reference = Eager(path, whole.model)
    spec = pass_spec(ROWS, groups=2, micro=2)
    loops = forward(stages, spec, EagerExchange(reference.experts))  # type: ignore[arg-type]
    backward(stages, loops, lowest)
    parameters = {name: p for stage in stages for name, p in stage.parameters.items()}
    want, grads = reference.run(ROWS, parameters, LORA.alpha / LORA.rank)
    assert loops[-1].loss_sum / spec.loss_tokens == pytest.approx(want, rel=2e-5)
    compared = 0
    for name, grad in grads.items():
        got = parameters[name].grad
        assert got is not None
        if int(name.split("layers.")[1].split(".")[0]) >= lowest:
            assert float((got - grad).norm()) <= 2e-4 * float(grad.norm()) + 1e-7, name
            compared += float(grad.norm()) > 0
    assert compared
    for loop in loops if lowest == 0 else ():
        for state in loop.groups:
            for micro in state.micro:
                assert not micro.handed._now and not micro.handed._kept and not micro.handed._gradients


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "apart"])
@pytest.mark.parametrize(
    "spec",
    [
        {"activations": "group", "attention_output": "retain"},
        {"activations": "micro_batch"},
        {"activations": "retain"},
        exhaustive({"activations": "host"}),
        {"activations": "host", "attention_output": "retain"},
    ],
    ids=str,
)
def test_equals_transformers(checkpoints: dict[str, Path], name: str, spec: dict[str, Any]) -> None:
    path = checkpoints[name]
    (stage,) = stages_of(path, handed=dims_from_dir(path).handed, **spec)
    assert stage.hands
    check(path, [stage])


@pytest.mark.parametrize("name", [name for name, (_, _, cuts) in FAMILIES.items() if cuts])
def test_stages_are_cut_where_nothing_is_handed_over(checkpoints: dict[str, Path], name: str) -> None:
    path, cuts = checkpoints[name], FAMILIES[name][2]
    assert dims_from_dir(path).cuts == cuts
    check(path, stages_of(path, cuts))


def test_stages_that_part_them_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="cannot run with more than one stage") as error:
        stages_of(checkpoints["glm_5_2"], (1,))
    assert "layer 1 receives what an earlier layer computed" in str(error.value)
    assert "rule.stages=1" in str(error.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_config_json_says_what_trying_finds(checkpoints: dict[str, Path], name: str) -> None:
    """Who hands what to whom, and how large it is."""
    path = checkpoints[name]
    (stage,) = stages_of(path)
    row = 9
    ids = torch.randint(1, 90, (1, row))
    calls = stage.model.capture.record({"input_ids": ids}, None)
    found = set()
    with stage._zero_experts():
        given = stage.hands.given(stage.model.layers, calls, torch.randn(1, row, *stage.state_shape))
    for layer, taken in stage.hands.takes.items():
        for result, by in taken.items():
            size = sum(t.numel() * t.element_size() for t in given[layer].given[result])
            found.add((by, stage.hands.last_taker((by, result)), size))
    assert found == {(h.layer, h.last, h.bytes(row, row, 4)) for h in dims_from_dir(path).handed}


def test_frozen_layers_below_hand_on_without_gradients(checkpoints: dict[str, Path]) -> None:
    """LoRA in the layers that take, not in those that hand on."""
    path = checkpoints["mistral_large_4"]
    lora = LoraConfig(rank=2, alpha=4.0, layers=[2, 3])
    (stage,) = stages_of(path, lora=lora, backward=BackwardPart(2, 2))
    check(path, [stage], lowest=2)


def test_ranges_and_unplanned_results_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match=r"cannot train with rule\.activations=ranges"):
        stages_of(checkpoints["glm_5_2"], activations="ranges", head_ranges=2)
    with pytest.raises(UserError, match=r"cannot train with rule\.activations=host"):
        stages_of(checkpoints["glm_5_2"], activations="host")


@pytest.mark.parametrize("name", ["glm_5_2", "both"])
def test_packed_documents_stay_apart(checkpoints: dict[str, Path], name: str) -> None:
    (stage,) = stages_of(checkpoints[name], padded=True)
    stage.check_packing()
    assert stage.padding_moves == ""
