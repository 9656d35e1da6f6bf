"""Bytes of masks and of an index by hand. What layers and LoRA keep is held against autograd where they run
(tests/model/test_layer_loop.py, tests/model/test_lora.py)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kt_ray.placement.activation_bytes import (
    index_scratch_bytes,
    layer_activation_bytes,
    mask_bytes,
    scores_scratch_bytes,
)
from kt_ray.placement.plan import make_plan
from kt_ray.placement.range_memory import heads_width
from kt_ray.placement.wave_tokens import load_of
from tests.placement.configs import make_config, make_hardware, small_dims


@pytest.mark.parametrize(
    ("changes", "masks", "on_gpu"),
    [
        ({}, 0, 0),
        ({"data": {"packing": True}}, 1, 1),
        ({"trainer": {"batch_size": 8, "micro_batch_size": 2}}, 1, 0),
        ({"model": {"attn_implementation": "eager"}}, 2, 2),
    ],
)
def test_attention_masks(changes: dict[str, Any], masks: int, on_gpu: int) -> None:
    """bool [rows, 1, row, row], in bfloat16 where eager attention adds them; none for whole rows, nor on a
    GPU for padding after them."""
    config = make_config(
        **{
            "trainer": {"batch_size": 8},
            **changes,
            "data": {"max_length": 64, **changes.get("data", {})},
        }
    )
    load = load_of(small_dims(), config, wave=8, groups=2)
    assert mask_bytes(small_dims(), config, load, "bfloat16") == masks * 8 * 64 * 64
    assert mask_bytes(small_dims(), config, load, "bfloat16", gpu=True) == on_gpu * 8 * 64 * 64
    told = dataclasses.replace(small_dims(), model_type="minimax")
    assert mask_bytes(told, config, load, "bfloat16", gpu=True) == masks * 8 * 64 * 64
    chunks = ((32, 16),) * 4  # narrower than the row: whole masks of chunks, windows by blocks
    for model_type, on_one in (("mixtral", on_gpu), ("llama4_text", max(1, on_gpu))):
        near = dataclasses.replace(small_dims(), model_type=model_type, pair_widths=chunks)
        assert mask_bytes(near, config, load, "bfloat16", gpu=True) == on_one * 8 * 64 * 64, model_type
    indexed = dataclasses.replace(small_dims(), indexes=((2, False),) * 4)
    assert mask_bytes(indexed, config, load, "bfloat16", gpu=True) == max(1, masks) * 8 * 64 * 64
    # On a CPU a window smaller than the row needs a mask of its own, packed or not; with a long row none.
    window = dataclasses.replace(small_dims(), pair_widths=((64, 0), (64, 16), (64, 16), (64, 0)))
    more = 2 * masks if masks else 1
    assert mask_bytes(window, config, load, "bfloat16") == more * 8 * 64 * 64
    assert mask_bytes(window, config, load, "bfloat16", gpu=True) == 2 * on_gpu * 8 * 64 * 64
    long = dataclasses.replace(load, row=8193)
    assert mask_bytes(window, config, long, "bfloat16") == 2 * masks * 8 * 64 * 8193


def test_an_index_holds_its_scores() -> None:
    """DeepSeek-V3.2: 64 index heads, float32, twice. MiniMax-M3: 4 heads, and a mask of each query head."""
    latent = small_dims("deepseek_v3", index_n_heads=64, index_head_dim=16, index_topk=4)
    assert index_scratch_bytes(latent, 4096, 1, "bfloat16") == 2 * 64 * 4096 * 4
    assert index_scratch_bytes(small_dims("deepseek_v3"), 4096, 1, "bfloat16") == 0
    blocks = dataclasses.replace(small_dims("mixtral"), indexes=((4, True),) * 4, num_heads=32)
    assert index_scratch_bytes(blocks, 100, 1, "bfloat16") == 100 * max(8 * 4, 4 * 32)
    config = make_config(data={"max_length": 100})
    dense = dataclasses.replace(blocks, indexes=())
    more, less = (layer_activation_bytes(d, config, 1, "bfloat16", gpu=True) for d in (blocks, dense))
    assert more - less >= 2 * 32 * 100  # kept for backward


def test_an_index_over_compressed_tokens_is_gone_when_scores_are_made() -> None:
    """DeepSeek-V4's chooses without a gradient. Scores and the sink need 12 bytes each around softmax."""
    dims = small_dims("deepseek_v4")
    layer = next(n for n, own in enumerate(dims.compressions) if own.index_heads)
    own, config = dims.compressions[layer], make_config(data={"max_length": 64})
    many = [c._replace(index_heads=64 * c.index_heads) for c in dims.compressions]
    alike = dataclasses.replace(dims, compressions=tuple(many))
    kept = [layer_activation_bytes(d, config, layer, "bfloat16") for d in (dims, alike)]
    assert kept[0] == kept[1]
    keys = 64 // own.tokens
    index = keys * (12 * own.index_heads + 4 * own.index_head)
    assert index_scratch_bytes(dims, 64, layer, "bfloat16") == index
    scores = dims.num_heads * (64 + keys + 1)
    assert scores_scratch_bytes(dims, config, 64, layer, "bfloat16") == (12 - 2 - 4) * scores
    eager = make_config(model={"attn_implementation": "eager"})
    plain = small_dims("mixtral")
    assert scores_scratch_bytes(plain, eager, 64, 1, "float32") == (12 - 4 - 4) * plain.num_heads * 64
    assert scores_scratch_bytes(plain, config, 64, 1, "bfloat16") == 0


def test_a_plan_has_room_for_scores_around_softmax() -> None:
    """12 bytes of each, where it had the 6 that are kept for backward."""
    dims, eager = small_dims("mixtral"), {"model": {"attn_implementation": "eager"}}
    budgets = [
        make_plan(dims, make_config(data={"max_length": row}, **eager), make_hardware(gpus=1)).budgets
        for row in (2048, 4096)
    ]
    short, long = (next(b.items["workspace"] for b in of if not b.is_socket) for of in budgets)
    assert long - short >= 12 * dims.num_heads * (4096**2 - 2048**2)


@pytest.mark.parametrize(("family", "package"), [("kimi_linear", "fla"), ("nemotron_h", "mamba_ssm")])
def test_a_gpu_without_a_packages_kernels_keeps_states_as_a_cpu(
    family: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers then takes torch's own functions, which keep many times as much."""
    dims, found = small_dims(family), {}
    for there in (True, False):
        names = {package} if there else set()
        monkeypatch.setattr("kt_ray.placement.activation_bytes.installed", names.__contains__)
        notes = "".join(make_plan(dims, make_config(), make_hardware(gpus=1)).notes)
        assert ("pip install" in notes) != there
        found[there] = [
            layer_activation_bytes(dims, make_config(), layer, "bfloat16", gpu=True)
            for layer, state in enumerate(dims.states)
            if state
        ]
        assert "pip install" not in "".join(make_plan(dims, make_config(), make_hardware(gpus=0)).notes)
    assert min(less / more for less, more in zip(found[False], found[True], strict=True)) > 3


def test_a_block_without_attention_keeps_no_queries() -> None:
    """Nemotron-H: a layer is a mixer, attention or experts."""
    dims = small_dims("nemotron_h")
    alike = dataclasses.replace(dims, pair_widths=((1, 0),) * dims.num_layers)
    plain = [not pair and not state for (pair, _), state in zip(dims.pair_widths, dims.states, strict=True)]
    more, less = (
        [layer_activation_bytes(d, make_config(), n, "bfloat16", gpu=True) for n in range(dims.num_layers)]
        for d in (alike, dims)
    )
    gone = [a - b for a, b in zip(more, less, strict=True)]
    assert gone == [2 * dims.attention_width * own for own in plain] and max(gone) > 0


def test_layers_with_narrower_heads_hold_no_scores() -> None:
    """Gemma 4's with a window: their values are as wide as their keys, as those of other layers are."""
    dims, config = small_dims("gemma4_text"), make_config(data={"max_length": 8})
    widths = [3 * heads_width(dims, n) for n in range(dims.num_layers)]
    assert min(widths) < dims.attention_width
    few, many = (dataclasses.replace(dims, num_heads=heads) for heads in (dims.num_heads, 64))
    for layer in range(dims.num_layers):
        planned = [layer_activation_bytes(d, config, layer, "bfloat16") for d in (few, many)]
        assert planned[0] == planned[1]


def test_latent_attention_beside_states_holds_its_scores() -> None:
    """Kimi-Linear's, of short rows on a CPU; heads whose values are as wide as their keys hold none."""
    dims, config = small_dims("kimi_linear"), make_config(data={"max_length": 64})
    layer = dims.states.index(None)
    pairs = tuple((2 * heads_width(dims, layer), window) for _, window in dims.pair_widths)
    alike = dataclasses.replace(dims, pair_widths=pairs)
    more, less = (layer_activation_bytes(d, config, layer, "bfloat16") for d in (dims, alike))
    assert more - less == 4 * dims.num_heads * 64
