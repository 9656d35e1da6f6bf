"""The layer loop's own promises: experts once per direction, checked recomputation, non-affine layers."""

from __future__ import annotations

import gc
import json
import math
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.models.qwen3_moe import modeling_qwen3_moe

from kt_ray.batch import IGNORE, PassSpec
from kt_ray.config.schema import LoraConfig
from kt_ray.dims.config_json import dims_from_config
from kt_ray.errors import BadStep
from kt_ray.model import attention, lora_linear
from kt_ray.model.clock import Clock
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.placement.activation_bytes import layer_activation_bytes
from kt_ray.placement.order import Op
from tests.helpers.families import save_whole, write_config
from tests.helpers.hf_reference import Reference, Row, find_router, micro_batch, random_rows
from tests.helpers.stages import DirectLink, TorchExchange, backward, forward, make_stages, pass_spec, run
from tests.model.test_stage_parity import assert_close, assert_logits, ready
from tests.placement.configs import make_config

Checkpoint = Callable[..., Path]
ROWS = random_rows(4)
LORA = LoraConfig(rank=2)


@pytest.mark.parametrize(("groups", "cuts"), [(1, (0, 3)), (3, (0, 2, 3))])
def test_experts_are_called_once_per_direction(
    checkpoint: Checkpoint, groups: int, cuts: tuple[int, ...]
) -> None:
    reference, stages = ready(checkpoint("deepseek_v3"), LORA, cuts)
    calls = run(stages, pass_spec(ROWS, groups=groups, micro=1), reference).exchange.calls
    assert calls == {(d, la, g): 1 for d in ("forward", "backward") for la in (1, 2) for g in range(groups)}
    calls = run(stages, pass_spec(ROWS, groups=groups, micro=1, kind="eval"), reference).exchange.calls
    assert calls == {("forward", la, g): 1 for la in (1, 2) for g in range(groups)}


def test_only_valid_tokens_reach_the_experts(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("mixtral"), LORA, (0, 3))
    seen: dict[int, torch.Tensor] = {}

    class Spy(TorchExchange):
        def submit_forward(self, layer: int, group: int, *tensors: Any) -> None:
            seen[layer] = tensors[3]
            super().submit_forward(layer, group, *tensors)

    reference.set_pass(0, False)
    forward([stage], pass_spec(ROWS, micro=4, kind="eval"), Spy(reference))
    expected = [(row.sample << 32) + i for row in ROWS for i in range(len(row.ids))]
    assert len({len(row.ids) for row in ROWS}) > 1
    assert all(keys.tolist() == expected for keys in seen.values()) and set(seen) == {0, 1, 2}


def test_an_empty_group_still_submits(checkpoint: Checkpoint) -> None:
    reference, stages = ready(checkpoint("deepseek_v3"), LORA, (0, 1, 3))
    shapes: list[tuple[torch.Size, ...]] = []

    class Spy(TorchExchange):
        def submit_forward(self, layer: int, group: int, *tensors: Any) -> None:
            if group == 1:
                shapes.append(tuple(t.shape for t in tensors[:4]))
            super().submit_forward(layer, group, *tensors)

    spec = pass_spec(ROWS, groups=2, micro=4)
    assert spec.wave[0][1] == ()
    exchange = Spy(reference)
    reference.set_pass(0, True)
    backward(stages, forward(stages, spec, exchange))
    assert shapes == [((0, 48), (0, 3), (0, 3), (0,))] * 2
    assert exchange.calls["backward", 1, 1] == 1
    # a whole pass without a row
    empty = PassSpec(2, 0, "train", 0, (((), ()),), 1)
    loops = forward(stages, empty, exchange)
    assert loops[-1].loss_sum == 0.0
    backward(stages, loops)


@pytest.mark.parametrize("affine", [True, False])
def test_recomputation_that_chooses_other_experts_raises(
    checkpoint: Checkpoint, affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not affine:
        _post_norm(monkeypatch)
    reference, (stage,) = ready(checkpoint("qwen3_moe"), LORA, (0, 3))
    spec = pass_spec(ROWS, groups=2)
    reference.set_pass(0, True)
    (loop,) = forward([stage], spec, TorchExchange(reference))
    router = find_router(stage.model.layers[2])
    with torch.no_grad():
        router.weight.copy_(router.weight.flip(0))
    with pytest.raises(RuntimeError, match="layer 2, group 0: the recomputation chose other experts"):
        loop.recompute(2, 0)
        loop.recompute(2, 1)
        loop.recomputed.check()


def test_recomputation_with_other_weights_raises(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    reference.set_pass(0, True)
    (loop,) = forward([stage], pass_spec(ROWS), TorchExchange(reference))
    find_router(stage.model.layers[2]).routed_scaling_factor *= 1.001
    with pytest.raises(RuntimeError, match="layer 2, group 0: recomputed routing weights differ"):
        loop.recompute(2, 0)
        loop.recomputed.check()


def test_recomputation_is_looked_at_once_per_pass(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits for the device at the end and not at every layer; the layer is named all the same."""
    reference, (stage,) = ready(checkpoint("qwen3_moe"), LORA, (0, 3))
    reference.set_pass(0, True)
    (loop,) = forward([stage], pass_spec(ROWS, groups=2), TorchExchange(reference))
    router = find_router(stage.model.layers[0])
    with torch.no_grad():
        router.weight.copy_(router.weight.flip(0))
    looks: list[str] = []
    compare = loop.recomputed.compare

    def watched(*arguments: Any) -> None:
        with monkeypatch.context() as patch:
            for name in ("item", "tolist", "__int__", "__float__", "__bool__"):
                patch.setattr(torch.Tensor, name, lambda tensor, name=name: looks.append(name))
            compare(*arguments)

    monkeypatch.setattr(loop.recomputed, "compare", watched)
    backward([stage], [loop])
    assert looks == []
    with pytest.raises(RuntimeError, match="layer 0, group 0: the recomputation chose other experts"):
        loop.recomputed.check()
    loop.recomputed.check()  # what was looked at is forgotten


def _post_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm after the experts: not affine in y."""
    original = modeling_qwen3_moe.Qwen3MoeSparseMoeBlock.forward

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        out = original(self, hidden_states)
        return out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-3)

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock, "forward", forward)


@pytest.mark.parametrize(("groups", "micro", "cuts"), [(1, 4, (0, 3)), (2, 1, (0, 1, 3)), (3, 2, (0, 3))])
def test_non_affine_layers(
    checkpoint: Checkpoint, groups: int, micro: int, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _post_norm(monkeypatch)
    lora = LoraConfig(rank=4, dropout=0.1)
    reference, stages = ready(checkpoint("qwen3_moe"), lora, cuts)
    assert {la: c for stage in stages for la, c in stage.scales.items()} == {0: None, 2: None}
    got = run(stages, pass_spec(ROWS, groups=groups, micro=micro, step=1), reference)
    assert_close(got, reference.run(ROWS, step=1))
    assert all(count == 1 for count in got.exchange.calls.values()) and len(got.exchange.calls) == 4 * groups
    want = reference.run(ROWS, train=False)
    assert_logits(
        run(stages, pass_spec(ROWS, groups=groups, micro=micro, kind="eval"), reference), ROWS, want
    )


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("cuts", [(0, 3), (0, 2, 3)])
def test_one_micro_batch_at_a_time(
    checkpoint: Checkpoint, cuts: tuple[int, ...], affine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bits, while no more than one graph of each group is held; or all, and none is recomputed."""
    if not affine:
        _post_norm(monkeypatch)
    held: list[int] = []
    outs: weakref.WeakSet[Tensor] = weakref.WeakSet()
    recomputed = LayerLoop._recomputed

    def counted(self: LayerLoop, *arguments: Any) -> Any:
        held.append(len(outs))
        graph = recomputed(self, *arguments)
        outs.add(graph.out)
        return graph

    monkeypatch.setattr(LayerLoop, "_recomputed", counted)
    lora, spec = LoraConfig(rank=4, dropout=0.1), pass_spec(ROWS, groups=2, micro=1, step=1)
    found = {}
    for kind in ("retain", "group", "micro_batch", "host"):
        reference, stages = ready(checkpoint("qwen3_moe"), lora, cuts, activations=kind)
        held.clear()
        found[kind] = run(stages, spec, reference)
        # When one is recomputed: all others of both groups, or the first ones of both.
        most = {"retain": -1, "group": 3}.get(kind, 2 if not affine else 1)
        assert max(held, default=-1) == most
        loops = forward(stages, replace(spec, kind="eval"), TorchExchange(reference))
        assert not any(state.graphs for loop in loops for state in loop.groups)  # nothing comes back
        for stage in stages:
            states = spec.wave[0][0] + spec.wave[0][1]
            size = sum(-(-m.input_ids.size * 48 * 4 // 256) * 256 for m in states) * len(stage.model.layers)
            assert kind != "host" or (stage.shelf is not None and stage.shelf.nbytes == size)
    assert_close(found["group"], reference.run(ROWS, step=1))
    for kind in ("retain", "micro_batch", "host"):
        assert found[kind].loss == found["group"].loss
        for name, grad in found["group"].grads.items():
            assert torch.equal(found[kind].grads[name], grad), name


@pytest.mark.parametrize("activations", ["host", "retain"])
def test_a_loss_that_is_not_finite_is_traced(checkpoint: Checkpoint, activations: str) -> None:
    reference, (stage,) = ready(checkpoint("qwen3_moe"), LORA, (0, 3), activations=activations)
    with torch.no_grad():
        next(stage.model.layers[1].parameters()).fill_(math.nan)
    reference.set_pass(0, True)
    spec = replace(pass_spec(ROWS), samples_per_row=2)
    rows = re.escape(spec.wave[0][0][0].named(2))
    with pytest.raises(BadStep, match=f"layer 1 or before, group 0, micro-batch 0, rows {rows};"):
        forward([stage], spec, TorchExchange(reference))


@pytest.mark.parametrize("cuts", [(0, 3), (0, 2, 3)])
def test_scaled_residuals_and_logits(checkpoint: Checkpoint, cuts: tuple[int, ...]) -> None:
    """Granite: c = 0.22, scaled embeddings and logits (a head through the family's own forward)."""
    reference, stages = ready(checkpoint("granitemoe"), LoraConfig(rank=4), cuts)
    assert {c for stage in stages for c in stage.scales.values()} == {0.22}
    assert_close(run(stages, pass_spec(ROWS, groups=2), reference), reference.run(ROWS))
    want = reference.run(ROWS, train=False)
    assert_logits(run(stages, pass_spec(ROWS, kind="eval"), reference), ROWS, want)


def test_gradients_accumulate_and_reset(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    assert all(p.grad is not None and not p.grad.any() for p in stage.parameters.values())
    spec = pass_spec(ROWS)
    once = run([stage], spec, reference).grads
    reference.set_pass(0, True)
    backward([stage], forward([stage], spec, TorchExchange(reference)))
    for name, parameter in stage.parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * once[name])
    stage.zero_grad()
    assert all(not p.grad.any() for p in stage.parameters.values())


def test_loss_is_divided_by_the_whole_steps_tokens(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    spec = pass_spec(ROWS)
    half = run([stage], replace(spec, loss_tokens=2 * spec.loss_tokens), reference).grads
    whole = run([stage], spec, reference).grads
    for name, grad in whole.items():
        torch.testing.assert_close(half[name], grad / 2)


def test_a_row_without_trained_tokens(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    silent = Row(ROWS[0].ids, [IGNORE] * len(ROWS[0].ids), 9)
    rows = [silent, *ROWS[1:]]
    assert_close(run([stage], pass_spec(rows, micro=1), reference), reference.run(rows))


def test_pad_token_does_not_matter(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("qwen3_moe"), LORA, (0, 3))
    losses = []
    for pad in (0, 95):
        wave = (((micro_batch(ROWS, pad),),),)
        losses.append(run([stage], PassSpec(1, 0, "eval", 0, wave, 10, return_logits=True), reference).loss)
    assert losses[0] == losses[1]


def test_operations_out_of_order(checkpoint: Checkpoint) -> None:
    reference, (stage,) = ready(checkpoint("deepseek_v3"), LORA, (0, 3))
    link = DirectLink(0, {("hidden", 0, 0): [torch.zeros(1, 2, 48)]})
    loop = stage.begin(pass_spec(ROWS), 0, TorchExchange(reference), link)
    for kind in ("forward", "send_hidden", "loss", "send_grad"):
        with pytest.raises(RuntimeError, match=f"{kind} of layer 0, group 0 came before its input"):
            loop.run(Op(kind, 0, 0))
    with pytest.raises(RuntimeError, match="return_logits"):
        loop.logits()
    with pytest.raises(ValueError, match="takes tensors of shapes"):
        loop.run(Op("recv_hidden", 0, 0))


def test_nothing_is_left_of_a_pass(checkpoint: Checkpoint) -> None:
    """After a backward no activations remain, and inputs handed over are not written to."""
    reference, stages = ready(checkpoint("deepseek_v3"), LORA, (0, 2, 3))
    loops = run(stages, pass_spec(ROWS, groups=2), reference).loops
    for loop in loops:
        for group in loop.groups:
            assert not (group.layer_inputs or group.expert_outputs or group.routes or group.graphs)
    seconds = loops[1].seconds()
    assert set(seconds) == {"attention", "experts_wait", "loss"}
    assert seconds["attention"] > 0 and seconds["loss"] > 0


def test_a_pass_that_is_dropped_is_freed_at_once(checkpoint: Checkpoint) -> None:
    """Its memory must not wait for a cyclic collection: the next pass would come on top."""
    reference, stages = ready(checkpoint("deepseek_v3"), LORA, (0, 2, 3))
    gc.collect()
    gc.disable()
    try:
        loops = [weakref.ref(loop) for loop in run(stages, pass_spec(ROWS, groups=2), reference).loops]
        assert [loop() for loop in loops] == [None, None]
    finally:
        gc.enable()


def test_masks_are_freed_with_their_pass(checkpoint: Checkpoint) -> None:
    """The next pass makes its own before anything of this one would be replaced."""
    reference, stages = ready(checkpoint("qwen3_moe"), LORA, (0, 3))
    gc.collect()
    gc.disable()
    try:
        loops = forward(stages, pass_spec(ROWS, groups=2), TorchExchange(reference))
        calls = [call for group in loops[0].groups for micro in group.micro for call in micro.calls.values()]
        masks = [weakref.ref(call.kwargs["attention_mask"]) for call in calls]
        assert len(masks) == 6 and all(mask() is not None for mask in masks)
        backward(stages, loops)
        del loops, calls
        assert [mask() for mask in masks] == [None] * 6
    finally:
        gc.enable()


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "longcat_flash"])
def test_a_plan_counts_what_a_layer_keeps(
    checkpoint: Checkpoint, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What autograd keeps of a recomputed layer, or of all where they are retained, is at most what the plan
    says, and not much less."""
    monkeypatch.setattr(attention, "HELD_BYTES", 0)  # as a GPU, and a CPU with long rows
    path, tokens = checkpoint(family, dtype=torch.bfloat16), 64
    dims = dims_from_config(json.loads((path / "config.json").read_text()), family)
    kept: dict[tuple[float, bool], int] = {}
    planned: dict[tuple[float, bool], int] = {}
    for case in ((0.0, False), (0.1, False), (0.0, True)):
        dropout, gpu = case
        monkeypatch.setattr(lora_linear, "multiplies_in_parts", lambda x, gpu=gpu: gpu)
        lora = {"rank": 2, "dropout": dropout}
        stage = Stage(StageSpec(str(path), (0, 3), 3, lora=LoraConfig(**lora), dtype="bfloat16"))  # type: ignore[arg-type]
        spec = pass_spec(random_rows(1, lengths=(tokens,)), micro=1)
        (loop,) = forward([stage], spec, NoExperts())
        weights = [*stage.model.causal.parameters(), *stage.model.causal.buffers()]
        own = {t.untyped_storage().data_ptr() for t in weights}
        saved: dict[int, Tensor] = {}

        def note(tensor: Tensor, own: set[int] = own, saved: dict[int, Tensor] = saved) -> Tensor:
            address = tensor.untyped_storage().data_ptr()
            if address not in own:
                saved[address] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loop.run(Op("recompute", 2, 0))
        kept[case] = sum(t.untyped_storage().nbytes() for t in saved.values())
        config = make_config(lora=lora, data={"max_length": tokens})
        planned[case] = tokens * layer_activation_bytes(dims, config, 2, "bfloat16", gpu=gpu)
        stage.spec = replace(stage.spec, activations="retain")
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            (loop,) = forward([stage], spec, NoExperts())
        whole = sum(t.untyped_storage().nbytes() for t in saved.values())
        layers = [layer_activation_bytes(dims, config, n, "bfloat16", gpu=gpu) for n in range(3)]
        assert kept[case] < whole <= tokens * sum(layers)
        assert 0.5 * planned[case] < kept[case] <= planned[case]
    usual, dropped, _ = kept
    assert kept[usual] < 0.8 * kept[dropped]  # whose inputs are kept in float32, too


@pytest.mark.parametrize("family", ["deepseek_v3", "longcat_flash"])
def test_a_plan_counts_the_scores_that_a_cpu_holds(checkpoint: Checkpoint, family: str) -> None:
    """Of short rows, where values are narrower than keys: with retained layers, those of all of them."""
    path, tokens = checkpoint(family, dtype=torch.bfloat16), 256
    dims = dims_from_config(json.loads((path / "config.json").read_text()), family)
    how = {"dtype": "bfloat16", "activations": "retain"}
    stage = Stage(StageSpec(str(path), (0, 3), 3, lora=LORA, **how))  # type: ignore[arg-type]
    weights = [*stage.model.causal.parameters(), *stage.model.causal.buffers()]
    own = {t.untyped_storage().data_ptr() for t in weights}
    saved: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        spec = pass_spec(random_rows(1, lengths=(tokens,)), micro=1)
        loops = forward([stage], spec, NoExperts())
    assert len(loops[0].groups[0].graphs) == 3
    kept = sum(t.untyped_storage().nbytes() for address, t in saved.items() if address not in own)
    config = make_config(lora={"rank": 2}, data={"max_length": tokens}, trainer={"micro_batch_size": 1})
    planned = tokens * sum(layer_activation_bytes(dims, config, n, "bfloat16") for n in range(3))
    assert 0.8 * planned <= kept <= planned


_TOLD: dict[str, dict[str, Any]] = {  # whose second layer has a state only if told, or heads of its own
    "granitemoehybrid": {
        "layer_types": ["attention", "mamba"] * 2,
        "mamba_d_state": 64,  # as many as a chunk's tokens or more, as released
        "mamba_chunk_size": 32,
    },
    "inkling_text": {"swa_num_attention_heads": 8, "swa_num_key_value_heads": 4, "swa_head_dim": 16},
    "qwen4_exp_text": {"ple_layer_ids": [2]},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "nemotron_h": {
        "layers_block_type": ["moe", "mamba", "attention", "moe"],
        "ssm_state_size": 64,
        "chunk_size": 32,
    },
}


class _Kept:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in (*_TOLD, "kimi_linear", "minimax", "qwen3_5_moe_text")),
        *((family, "float32") for family in ("jamba", "qwen3_next")),
        *(
            (family, "bfloat16")
            for family in (
                *("afmoe", "axk2", "beam", "deepseek_v32", "deepseek_v4", "gemma4_text", "gpt_oss"),
                "inkling_text",
            )
        ),
    ],
)
def test_a_plan_counts_what_other_layers_keep(tmp_path: Path, family: str, dtype: str) -> None:
    """A state that goes from token to token keeps many times what attention over keys does. Others have more
    norms, sinks, an index, compressed tokens, several streams, or a learned bias."""
    tokens, rows = 72, 2  # of two chunks, of which the second is not full
    save_whole(write_config(tmp_path, family, **_TOLD.get(family, {})))
    dims = dims_from_config(json.loads((tmp_path / "config.json").read_text()), family)
    how = {"dtype": dtype, "activations": "retain"}
    stage = Stage(StageSpec(str(tmp_path), (0, 2), 4, lora=LORA, **how))  # type: ignore[arg-type]
    spec = pass_spec(random_rows(rows, lengths=(tokens,)))
    loop = stage.begin(spec, 0, NoExperts(), DirectLink(0, {}))
    others: list[Any] = [*stage.model.causal.parameters(), *stage.model.causal.buffers()]
    for micro in loop.groups[0].micro:  # masks and rotations, which all layers share
        others += tree_leaves([(call.args, call.kwargs) for call in micro.calls.values()])
    own = {t.untyped_storage().data_ptr() for t in others if isinstance(t, Tensor)}
    waiting: list[weakref.ref[_Kept]] = []  # those of graphs that nobody needs, as of an index, are gone

    def note(tensor: Tensor) -> _Kept:
        held = _Kept(tensor.detach())
        waiting.append(weakref.ref(held))
        return held

    loop.run(Op("embed", 0, 0))
    for layer in range(2):
        waiting.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda held: held.tensor):
            loop.run(Op("forward", layer, 0))
            if layer in stage.moe_layers:
                loop.run(Op("join", layer, 0))
    storages = [held.tensor.untyped_storage() for held in (ref() for ref in waiting) if held is not None]
    kept = sum({t.data_ptr(): t.nbytes() for t in storages if t.data_ptr() not in own}.values())
    config = make_config(lora={"rank": 2}, data={"max_length": tokens}, trainer={"micro_batch_size": rows})
    planned = rows * tokens * layer_activation_bytes(dims, config, 1, dtype)
    exact = bool(dims.states) and family != "lfm2_moe"  # whose gates are counted twice
    least = 0.7 if exact else 0.6
    assert least * planned <= kept <= planned


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("kind", ["retain", "micro_batch"])
def test_time_on_the_device_is_counted_once(
    checkpoint: Checkpoint, affine: bool, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spans of a GPU that lie in each other would both count."""
    if not affine:
        _post_norm(monkeypatch)
    inside, device = [0], Clock.device

    @contextmanager
    def alone(clock: Clock, term: str) -> Iterator[None]:
        assert not inside[0]
        inside[0] += 1
        with device(clock, term):
            yield
        inside[0] -= 1

    monkeypatch.setattr(Clock, "device", alone)
    reference, stages = ready(checkpoint("qwen3_moe"), LORA, (0, 3), activations=kind)
    run(stages, pass_spec(ROWS, groups=2, micro=1), reference)


class NoExperts(TorchExchange):
    """Experts that answer zeros, at no memory of autograd's."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int, int]] = {}

    def submit_forward(self, layer: int, group: int, x_TH: Tensor, *others: Any, **more: Any) -> None:
        self.tokens[layer] = (x_TH.shape[0], x_TH.shape[1])

    def join_forward(self, layer: int, group: int) -> Tensor:
        return torch.zeros(self.tokens[layer])

    def submit_backward(self, layer: int, group: int, dy_TH: Tensor) -> None: ...


def test_experts_outside_the_loop(checkpoint: Checkpoint) -> None:
    (stage,) = make_stages(checkpoint("deepseek_v3"), (0, 3), LORA)
    with pytest.raises(RuntimeError, match="experts of layer 1 were called outside the layer loop"):
        stage.model.layers[1].mlp(torch.zeros(1, 2, 48))


def test_the_checkpoints_experts_are_not_held(checkpoint: Checkpoint) -> None:
    path = checkpoint("deepseek_v3")
    (stage,) = make_stages(path, (0, 3), LoraConfig(rank=2, target_modules="none"))
    reference = Reference(path, LoraConfig(rank=2))
    experts = sum(p.numel() for m in reference.experts.values() for p in m.parameters())
    tables = sum(
        b.numel() for name, b in reference.model.named_buffers() if not name.endswith("correction_bias")
    )
    whole = sum(p.numel() for p in reference.model.parameters())
    bias = sum(b.numel() for name, b in reference.model.named_buffers() if name.endswith("correction_bias"))
    assert stage.weight_bytes == 4 * (whole - experts + bias + tables)
    first, last = make_stages(path, (0, 1, 3), LoraConfig(rank=2, target_modules="none"))
    assert first.weight_bytes + last.weight_bytes == stage.weight_bytes + 4 * tables
    assert isinstance(stage, Stage) and (first.first, first.last, last.first, last.last) == (1, 0, 0, 1)
    assert (first.moe_layers, last.moe_layers) == ((), (1, 2))


def test_large_sample_ids(checkpoint: Checkpoint) -> None:
    """Keys hold the sample above the position: dropout of large sample ids agrees with the reference's."""
    lora = LoraConfig(rank=2, dropout=0.3)
    reference, stages = ready(checkpoint("deepseek_v3"), lora, (0, 3))
    rows = [Row(r.ids, r.labels, 2**30 + i) for i, r in enumerate(ROWS)]
    assert_close(run(stages, pass_spec(rows), reference), reference.run(rows))
