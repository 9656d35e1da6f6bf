"""What each layer of a model takes, counted once: a plan asks for every layer of every layout it compares."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.placement.lora_sizes import adapted, lora_params


class LayerTable(NamedTuple):
    """Per layer, routed experts aside.

    params: of its frozen weights; weight_bytes: as they are held. lora_params: of its LoRA. moe: whether it
    has routed experts. kinds: layers with the same number need the same bytes.
    """

    params: tuple[int, ...]
    lora_params: tuple[int, ...]
    weight_bytes: tuple[float, ...]
    moe: tuple[bool, ...]
    kinds: tuple[int, ...]


_recent: deque[tuple[tuple[object, ...], LayerTable]] = deque(maxlen=4)


def layer_table(dims: ModelDims, config: Config, dtype: str) -> LayerTable:
    """dtype: of what is not kept quantised (model.keep_quantized)."""
    lora = config.lora
    asked = (dims, lora, dtype, config.model.keep_quantized)
    for known, table in tuple(_recent):
        # By identity: a search asks with the same objects, whose lists and long tuples do not hash well.
        if known[0] is dims and known[1] is lora and known[2:] == asked[2:]:
            return table
    numbers: dict[object, int] = {}
    layers, element = range(dims.num_layers), ELEMENT_BYTES[dtype]
    params = [dims.attention_params[layer] + dims.dense_params[layer] for layer in layers]
    quantised = dims.quantised if config.model.keep_quantized else ()
    packed = [q.bytes - element * q.params for q in quantised] or [0.0] * dims.num_layers
    wider = (4 - element) * dims.float32_params
    packed = [size + wider * (layer in dims.moe_layers) for layer, size in enumerate(packed)]
    table = LayerTable(
        tuple(params),
        tuple(lora_params(dims, lora, layer) for layer in layers),
        tuple(element * own + less for own, less in zip(params, packed, strict=True)),
        tuple(layer in dims.moe_layers for layer in layers),
        tuple(numbers.setdefault(_kind(dims, lora, layer), len(numbers)) for layer in layers),
    )
    _recent.append((asked, table))
    return table


def _kind(dims: ModelDims, lora: LoraConfig, layer: int) -> object:
    of_layer = (
        dims.pair_widths,
        dims.indexes,
        dims.cache_widths,
        dims.compressions,
        dims.biases,
        dims.states,
        dims.quantised,
        dims.mapped_params,
    )
    return (
        dims.attention_params[layer],
        dims.dense_params[layer],
        dims.lora_in_out[layer],
        layer in dims.moe_layers,
        adapted(dims, lora, layer),
        *(own[layer] for own in of_layer if own),
        *(h._replace(layer=0, last=0) for h in dims.handed if h.layer == layer),
    )
