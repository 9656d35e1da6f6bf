"""What a table says of each layer, counted by hand; and that it is another's as soon as anything differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kt_ray.dims.model_dims import Compression, Quantised, StateValues
from kt_ray.placement.layer_table import layer_table
from kt_ray.placement.lora_sizes import lora_params
from tests.placement.configs import SMALL, make_config, small_dims


@pytest.mark.parametrize("family", sorted(SMALL))
def test_each_layer_by_itself(family: str) -> None:
    dims, config = small_dims(family), make_config()
    table = layer_table(dims, config, "bfloat16")
    params = [a + d for a, d in zip(dims.attention_params, dims.dense_params, strict=True)]
    assert table.params == tuple(params)
    assert table.moe == tuple(layer in dims.moe_layers for layer in range(dims.num_layers))
    float32 = [moe * dims.float32_params for moe in table.moe]
    assert table.weight_bytes == tuple(2 * (a + b) for a, b in zip(params, float32, strict=True))
    assert table.lora_params == tuple(lora_params(dims, config.lora, n) for n in range(dims.num_layers))
    for layer, kind in enumerate(table.kinds):
        first = table.kinds.index(kind)
        assert dims.lora_in_out[layer] == dims.lora_in_out[first] and params[layer] == params[first]
        assert table.moe[layer] == table.moe[first]


def test_layers_that_differ_in_lora_alone_are_of_two_kinds() -> None:
    dims = small_dims("olmoe")
    assert len({*layer_table(dims, make_config(), "bfloat16").kinds}) == 1
    some = layer_table(dims, make_config(lora={"layers": [1]}), "bfloat16")
    assert some.kinds == (0, 1, 0, 0) and [n > 0 for n in some.lora_params] == [False, True, False, False]


def test_layers_that_differ_in_what_they_keep_alone_are_of_two_kinds() -> None:
    """Jamba's Mamba is estimated as its attention."""
    dims = small_dims("olmoe")
    of_some = {
        "states": (None, StateValues(plain=1), None, None),
        "compressions": (Compression(), Compression(4), Compression(), Compression()),
    }
    for name, values in of_some.items():
        table = layer_table(replace(dims, **{name: values}), make_config(), "bfloat16")  # type: ignore[arg-type]
        assert table.kinds == (0, 1, 0, 0)


def test_another_question_gets_another_answer() -> None:
    """The same objects are asked with again and again, also in turn."""
    dims, config = small_dims("olmoe"), make_config()
    packed = replace(dims, quantised=(Quantised(100, 60, 100),) * dims.num_layers)
    keeping = replace(config, model=replace(config.model, keep_quantized=True))
    ranked = replace(config, lora=replace(config.lora, rank=16))
    for _ in range(3):
        plain = layer_table(dims, config, "bfloat16")
        assert layer_table(dims, config, "bfloat16") is plain
        assert layer_table(dims, config, "float32").weight_bytes == tuple(2 * n for n in plain.weight_bytes)
        assert layer_table(dims, ranked, "bfloat16").lora_params == tuple(2 * n for n in plain.lora_params)
        assert layer_table(packed, config, "bfloat16").weight_bytes == plain.weight_bytes
        less = layer_table(packed, keeping, "bfloat16").weight_bytes
        assert less == tuple(n - 200 + 60 for n in plain.weight_bytes)
