"""transformers' key-value caches of rows that join and leave a batch.

Rows of a cache are aligned on the right: column c of every row belongs to the same place before its
newest token, and shorter rows have padding on the left, which masks hide. Rows are then put together by
padding, and leave by selection. A prompt that several rows have is computed in one and copied for the others:
transformers' layers read one tensor [b, heads, columns, d], which no row can lend another part of.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kt_ray.errors import UserError


def places(config: Any, layers: Iterable[int], count: int) -> list[int]:
    """Where the caches of decoder layers lie, of `count` in the model: LongCat-Flash's have two attentions
    each, which transformers counts as hidden layers."""
    each = max(1, config.num_hidden_layers // count)
    return [layer * each + number for layer in layers for number in range(each)]


def new_cache(config: Any, layers: Iterable[int]) -> Any:
    """An empty cache of a language model, of which `layers` (by `places`) are computed.

    The places of the others show the length of a layer of the same kind, as masks are made for the first
    layer of each kind. A model of linear layers alone gets one more place, that of a layer with keys: inner
    models make a causal mask of its length, which no layer takes.

    Raises:
        UserError: a kind of layer that transformers has no cache for.
    """
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

    own = list(layers)
    try:
        minimax = config.model_type == "minimax"
        cache = _minimax_cache(config, own) if minimax else DynamicCache(config=config)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"{config.model_type} cannot generate: transformers makes no cache for its layers",
            observed=f"{type(error).__name__}: {error}",
            remedy="serve it elsewhere, or choose another model family",
        ) from error
    for index, layer in enumerate(cache.layers):
        if index not in own:
            alike = (cache.layers[n] for n in own if _kind(cache.layers[n]) == _kind(layer))
            cache.layers[index] = next(alike, layer)
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        cache.layers.append(DynamicLayer())
    return cache


def _minimax_cache(config: Any, own: Sequence[int]) -> Any:
    """MiniMax-Text-01 takes its own class only; states of its lightning attention lie in a second list."""
    from transformers.cache_utils import DynamicLayer
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    cache: Any = MiniMaxCache()
    cache.linear_cache = [None] * config.num_hidden_layers
    attends = [kind == "full_attention" for kind in config.layer_types]
    # Masks are made for layer 0, whatever it is: layers without keys show the length of one that has them.
    shown, first = DynamicLayer(), next((index for index in own if attends[index]), None)
    cache.layers = [
        DynamicLayer() if full and index != first else shown for index, full in enumerate(attends)
    ]
    return cache


def _kind(layer: Any) -> tuple[type, int]:
    return type(layer), int(getattr(layer, "sliding_window", 0) or 0)


def can_join(config: Any) -> bool:
    """Whether rows of this model can share a cache: every layer's is of a kind that `join` knows, and none
    takes the columns before a token, padding included, for its position (Llama 4's scale of queries)."""
    if getattr(config, "attn_temperature_tuning", False):
        return False
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

    joinable = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
    return all(type(layer) in joinable for layer in new_cache(config, ()).layers)


def join(caches: Sequence[Any], columns: int, layers: Iterable[int]) -> Any:
    """All rows in the first cache, one cache after another; `columns` of the widest, padding included."""
    for index in layers:
        if _state(caches[0], index) is not None:
            caches[0].linear_cache[index] = torch.cat([_state(cache, index) for cache in caches])
            continue
        parts = [cache.layers[index] for cache in caches]
        target = parts[0]
        if hasattr(target, "conv_states"):
            for states in ("conv_states", "recurrent_states"):
                own = getattr(target, states)
                for number, value in own.items():
                    if value is not None:
                        own[number] = torch.cat([getattr(part, states)[number] for part in parts])
            continue
        keep = _kept(target, columns)
        target.keys = torch.cat([_widened(part.keys, keep) for part in parts])
        target.values = torch.cat([_widened(part.values, keep) for part in parts])
        if hasattr(target, "cumulative_length"):
            target.cumulative_length = columns
    return caches[0]


def select(cache: Any, rows: Sequence[int], padding: int, columns: int, layers: Iterable[int]) -> None:
    """In place: keep some rows, and take off columns that are padding in all of them.

    Args:
        rows: in their new order; one that comes several times is copied.
        padding: columns on the left to take off; the caller has made sure that `can_join`, else 0.
        columns: present number of columns.
    """
    for index in layers:
        layer = cache.layers[index]
        chosen = torch.tensor(rows, dtype=torch.int64)
        if (state := _state(cache, index)) is not None:
            cache.linear_cache[index] = state[chosen.to(state.device)]
            continue
        layer.reorder_cache(chosen)
        for states in _left_out(layer):
            for name, value in states.items():
                if isinstance(value, Tensor):
                    states[name] = value.index_select(0, chosen.to(value.device))
        if padding and hasattr(layer, "keys"):
            keep = _kept(layer, columns - padding)
            layer.keys, layer.values = layer.keys[..., -keep:, :], layer.values[..., -keep:, :]
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = columns - padding


def twin(cache: Any) -> Any:
    """Another cache with the same values, for `select` to take rows of: until then they share memory."""

    def apart(value: Any) -> Any:
        other = copy.copy(value)
        for name, part in vars(other).items():
            if isinstance(part, (dict, list)):  # of states, which layers change in place
                setattr(other, name, copy.copy(part))
        return other

    other = apart(cache)
    layers = {id(layer): apart(layer) for layer in cache.layers}  # some stand in several places
    other.layers = [layers[id(layer)] for layer in cache.layers]
    return other


def _state(cache: Any, index: int) -> Any:
    """What a layer of lightning attention keeps in MiniMax's own cache; None = another layer."""
    states = getattr(cache, "linear_cache", None)
    return None if states is None else states[index]


def _left_out(layer: Any) -> list[dict[str, Any]]:
    """States by name that `reorder_cache` does not know: what DeepSeek-V4 compresses,
    before transformers 5.23."""
    owner = next(cls for cls in type(layer).__mro__ if "reorder_cache" in vars(cls))
    if not hasattr(layer, "compressed_kv") or owner.__module__.endswith("deepseek_v4"):
        return []
    return [states for states in vars(layer).values() if isinstance(states, dict)]


def _kept(layer: Any, columns: int) -> int:
    """Columns that a layer's cache has of so many."""
    window = getattr(layer, "sliding_window", None)
    return columns if window is None else min(columns, int(window) - 1)


def _widened(values: Tensor, columns: int) -> Tensor:
    """[b, heads, columns, d] with zeros on the left."""
    return torch.nn.functional.pad(values, (0, 0, columns - values.shape[-2], 0))
