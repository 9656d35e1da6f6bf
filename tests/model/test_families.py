"""Every MoE family that transformers dispatches: it runs through the layer loop as transformers runs it, or
is refused by name. docs/families.md says which; this test keeps it true.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, load_experts
from kt_ray.checkpoint.non_experts import check_non_experts
from kt_ray.config.schema import LoraConfig
from kt_ray.data.batches import side_by_side
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.packable import packing_obstacle
from kt_ray.errors import UserError
from kt_ray.model.autograd import expert_weights
from kt_ray.model.family import build_causal, read_family
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.eager_experts import Eager, EagerExchange
from tests.helpers.exhaustive import spread
from tests.helpers.families import LAYERS, dispatched, randomise, save_whole, write_config
from tests.helpers.hf_reference import loss_tokens, micro_batch, random_rows
from tests.helpers.stages import backward, forward, pass_spec

HEAD = """# Families

## Pages
Each page has a family's checkpoints and formats, the modules that kt_ray trains, predicted memory and
speed, templates, adapters, and traps.

[DeepSeek-V2](families/deepseek_v2.md) · [DeepSeek-V3, R1, V3.1, V3.2](families/deepseek_v3.md) ·
[DeepSeek-V4](families/deepseek_v4.md) · [GLM-4.5 to GLM-5](families/glm.md) ·
[gpt-oss](families/gpt_oss.md) · [Kimi-K2](families/kimi_k2.md) · [LongCat-Flash](families/longcat.md) ·
[MiniMax](families/minimax.md) · [Mixtral](families/mixtral.md) · [OLMoE](families/olmoe.md) ·
[PhiMoE](families/phimoe.md) · [Qwen3-MoE, VL, Qwen2-MoE](families/qwen3_moe.md) ·
[Qwen3-Next, Qwen3.5](families/qwen3_next.md) · [Qwen4-Exp](families/qwen4_exp.md)

## All of them

Every MoE family whose experts transformers {version} dispatches, and Llama 4, LongCat-Flash and Step-3.7,
whose experts kt_ray does. A test has transformers save each at a tiny size, other towers included, loads it,
runs it forward and backward through the layer loop, and compares it with transformers' own class (loss, and
the gradient of every LoRA matrix outside the experts). Another reads each adapter back, loads it with PEFT,
merges and exports it ([adapter.md](adapter.md)). kt_ray refuses a family by name before it reads any weight.

"y kept" marks families whose layers are not affine in the experts' output, which is therefore kept for the
recomputation. Layers may take what earlier ones computed
([decision 026](decisions/026-handed-results.md)): an index's choice (GLM-5.2, Hy4), keys and values
(Mistral Large 4). Llama 4 counts positions from a row's start: its rows are not packed, and its answers are
computed one by one. Qwen4-Exp's tables of n-grams stay in the model's files
([checkpoints.md](checkpoints.md#memory-and-speed-of-loading)). A multimodal name trains its text part.
`python -m tests.model.test_families` writes this page, and the test compares its rows.

| model_type | | |
|---|---|---|
"""
TABLE = Path(__file__).parents[2] / "docs" / "families.md"
ROWS = random_rows(3)
LORA = LoraConfig(rank=2, alpha=4.0)


def documented() -> dict[str, tuple[str, str]]:
    """model_type -> (status, reason) of the table."""
    rows = re.findall(r"^\| `(\w+)` \| (trains|refused) \| (.*?) \|$", TABLE.read_text(), re.MULTILINE)
    return {name: (status, reason) for name, status, reason in rows}


def check_loaded_experts(path: Path, stage: Stage, reference: Eager) -> None:
    """What an expert actor reads is what transformers loads into its experts modules."""
    index = CheckpointIndex.open(path)
    layout = ExpertLayout.detect(index)
    assert layout.moe_layers == stage.moe_layers
    for layer in layout.moe_layers:
        formula = stage.model.formulas[layer]
        got = load_experts(index, layout, layer, range(layout.num_experts), formula=formula)
        want = expert_weights(reference.experts[layer])
        for part in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
            a, b = getattr(got, part), getattr(want, part)
            assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), part
        assert (got.activation, got.limit) == (want.activation, want.limit)


def build(path: Path) -> None:
    """Random weights for a directory that has a config.json only, as transformers saves them."""
    torch.manual_seed(0)
    causal, _, _ = build_causal(read_family(path), torch.float32, "eager", device="cpu")
    randomise(causal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        causal.save_pretrained(path)


def make_stages(path: Path, cuts: tuple[int, ...]) -> list[Stage]:
    how = {"dtype": "float32", "attn_implementation": "eager", "attention_output": "retain"}
    return [Stage(StageSpec(str(path), c, LAYERS, lora=LORA, **how)) for c in itertools.pairwise(cuts)]


def assert_equals_transformers(stages: list[Stage], reference: Eager) -> None:
    """Loss and the gradients of every LoRA B of a pass in two groups."""
    exchange = EagerExchange(reference.experts)
    spec = pass_spec(ROWS, groups=2, micro=2)
    loops = forward(stages, spec, exchange)  # type: ignore[arg-type]
    loss = loops[-1].loss_sum / spec.loss_tokens
    backward(stages, loops)
    parameters = {name: p for stage in stages for name, p in stage.parameters.items()}
    want, grads = reference.run(ROWS, parameters, 4.0 / 2)
    assert loss == pytest.approx(want, rel=2e-5)
    assert_gradients({name: p.grad for name, p in parameters.items()}, grads)


def assert_gradients(found: Mapping[str, Any], grads: Mapping[str, Tensor]) -> None:
    assert grads and any(g.abs().max() > 0 for g in grads.values())
    for name, grad in grads.items():
        assert float((found[name] - grad).norm()) <= 2e-4 * float(grad.norm()) + 1e-7, name


def check_rows_of_several_trainings(stage: Stage, reference: Eager) -> None:
    """One micro-batch of two trainings' rows: each gets the gradients that transformers has with its LoRA."""
    stage.zero_grad()
    own = {name: p.detach() for name, p in stage.parameters.items()}
    other = {name: value.flip(-1) for name, value in own.items()}
    grads = {name: torch.zeros_like(value) for name, value in other.items()}
    shortest = min(len(row.ids) for row in ROWS)  # rows of one length, for families that padding moves
    rows = [replace(row, ids=row.ids[:shortest], labels=row.labels[:shortest]) for row in ROWS]
    each = {True: rows[:2], "other": rows[2:]}
    parts = [replace(micro_batch(part), training=name) for name, part in each.items()]
    mixed = side_by_side(parts)
    spec = replace(pass_spec(rows), wave=(((mixed,),),), joined={"other": None})  # type: ignore[dict-item]
    with stage.adapters.lent({"other": (other, grads)}):
        loops = forward([stage], spec, EagerExchange(reference.experts))  # type: ignore[arg-type]
        backward([stage], loops)
    found = {True: {name: p.grad for name, p in stage.parameters.items()}, "other": grads}
    for name, adapters in ((True, own), ("other", other)):
        loss, wanted = reference.run(each[name], adapters, 4.0 / 2)
        assert loops[0].losses()[0][name == "other"] == pytest.approx(
            loss * loss_tokens(each[name]), rel=2e-5
        )
        share = loss_tokens(each[name]) / spec.loss_tokens
        assert_gradients(found[name], {key: share * grad for key, grad in wanted.items()})


def check_packing_is_known(path: Path, stage: Stage) -> None:
    """Layers that mix the documents of packed rows belong to a family that is refused by name for it."""
    config = json.loads((path / "config.json").read_text())
    if packing_obstacle(config) is not None:
        return
    if "index_topk" in config.get("text_config", config):
        return  # two index heads give equal scores: see tests/model/test_layer_checks.py
    stage.check_packing()


def try_family(root: Path, model_type: str) -> tuple[str, str]:
    """("trains", class and what is special) or ("refused", reason); numbers are asserted."""
    path = write_config(root / model_type, model_type)
    try:
        build_causal(read_family(path), torch.float32, "eager")
        save_whole(path)
        (stage,) = make_stages(path, (0, LAYERS))
    except UserError as error:
        return "refused", error.what if not error.observed else f"{error.what}: {error.observed}"
    reference = Eager(path, stage.model)
    check_loaded_experts(path, stage, reference)
    assert_equals_transformers([stage], reference)
    check_packing_is_known(path, stage)
    check_rows_of_several_trainings(stage, reference)
    dims = dims_from_dir(path)
    assert dims.affine == (None not in stage.scales.values())
    assert stage.state_shape == ((dims.hidden_streams,) if dims.hidden_streams > 1 else ()) + (32,)
    special = sorted({str(f) for f in stage.model.formulas.values()})
    if None in stage.scales.values():
        special.append("y kept")
    return "trains", f"{type(stage.model.causal).__name__}; {', '.join(special)}"


def families(start: int) -> list[Any]:
    """Those that train, two thirds of them exhaustive; tests that begin at 0, 1 and 2 have all of them."""
    names = sorted(documented())
    return spread([name for name in names if documented()[name][0] == "trains"], start=start, places=names)


@pytest.mark.parametrize(
    "model_type", [*families(0), *(name for name, (status, _) in documented().items() if status != "trains")]
)
def test_family(tmp_path: Path, model_type: str) -> None:
    assert try_family(tmp_path, model_type) == documented()[model_type]


def test_the_table_lists_what_is_installed() -> None:
    assert sorted(documented()) == dispatched()


@pytest.mark.parametrize(
    ("family", "cuts"),
    [
        ("deepseek_v4", (0, 1, LAYERS)),
        ("deepseek_v4", (0, 2, 3, LAYERS)),
        ("qwen4_exp_text", (0, 1, 2, LAYERS)),
    ],
)
def test_hyper_connections_on_several_stages(tmp_path: Path, family: str, cuts: tuple[int, ...]) -> None:
    """Several streams go from stage to stage; what looks at token ids, a router or n-grams, is on a later
    one."""
    routers = {"mlp_layer_types": ["moe", "hash_moe", "hash_moe", "moe"]} if family == "deepseek_v4" else {}
    path = write_config(tmp_path, family, **routers)
    build(path)
    stages = make_stages(path, cuts)
    (whole,) = make_stages(path, (0, LAYERS))
    assert all(stage.state_shape == (2 if routers else 4, 32) for stage in stages)
    assert_equals_transformers(stages, Eager(path, whole.model))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_without_shared_experts(tmp_path: Path) -> None:
    """Their modules have no weights; it does not matter whether the checkpoint stores them."""
    path = write_config(tmp_path, "deepseek_v3", n_shared_experts=0)
    build(path)
    (stage,) = make_stages(path, (0, LAYERS))
    assert not any("shared" in name for name in stage.parameters)
    assert_equals_transformers([stage], Eager(path, stage.model))
    file = path / "model.safetensors"
    some = {name: tensor for name, tensor in load_file(file).items() if tensor.numel()}
    save_file(some, file, metadata={"format": "pt"})
    check_non_experts(CheckpointIndex.open(path), build_causal(read_family(path), torch.float32, "eager")[0])
    make_stages(path, (0, LAYERS))


def test_numbers_of_n_grams_need_not_be_stored(tmp_path: Path) -> None:
    """config.json determines them; transformers then makes them, too."""
    path = write_config(tmp_path, "qwen4_exp_text")
    build(path)
    file = path / "model.safetensors"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if v.is_floating_point()}, file, metadata={"format": "pt"})
    check_non_experts(CheckpointIndex.open(path), build_causal(read_family(path), torch.float32, "eager")[0])
    (made,) = make_stages(path, (0, LAYERS))
    own = dict(made.model.causal.named_buffers())
    numbers = {name: value for name, value in whole.items() if not value.is_floating_point()}
    assert len(numbers) == 6 and all(torch.equal(own[name], value) for name, value in numbers.items())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = {name: try_family(Path(folder), name) for name in dispatched()}
    rows = [f"| `{name}` | {status} | {reason} |\n" for name, (status, reason) in results.items()]
    TABLE.write_text(HEAD.format(version=transformers.__version__) + "".join(rows))
