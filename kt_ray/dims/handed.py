"""What layers hand to later ones beside the hidden state, from config.json: an index's choice, shared keys.

As transformers' configurations of these families read it; `kt_ray.model.handed_results` finds it by trying.
"""

from __future__ import annotations

from kt_ray.dims.config_keys import Keys
from kt_ray.dims.model_dims import Handed

# Families whose layers may take the choice of an earlier layer's index.
_SHARED_INDEX = frozenset(("glm_moe_dsa", "hy_v4", "mistral_large4_text"))


def has_index(keys: Keys, layer: int) -> bool:
    """Whether a layer of indexed attention chooses keys itself."""
    if keys.family not in _SHARED_INDEX:
        return True
    types = keys.listed("indexer_types")
    if types is not None:
        return layer >= len(types) or types[layer] != "shared"
    pattern = keys.config.get("index_topk_pattern")
    if isinstance(pattern, str | list) and layer < len(pattern):
        return pattern[layer] not in ("S", "shared")
    if keys.family == "hy_v4":
        return layer == 0 or (layer - 1) % 4 == 0
    first = keys.size("index_skip_topk_offset", default=2, least=0) - 1
    return max(layer - first, 0) % keys.size("index_topk_freq", default=1) == 0


def keys_of(keys: Keys, layer: int) -> int:
    """The layer whose latent keys a layer attends to."""
    sources = keys.listed("kv_source_layers") or []
    source = sources[layer] if layer < len(sources) else layer
    return source if isinstance(source, int) and 0 <= source <= layer else layer


def rotates(keys: Keys, layer: int) -> bool:
    """Whether a layer's latent attention has a rotary part."""
    if keys.family != "mistral_large4_text":
        return True
    flags = keys.listed("no_rope_layers")  # 1: it has
    if flags is not None:
        return layer >= len(flags) or bool(flags[layer])
    return (layer + 1) % keys.size("no_rope_layer_interval", default=4) != 0


def handed(keys: Keys, layers: int) -> tuple[Handed, ...]:
    """Every handed result of a model with so many layers."""
    if not keys.config.get("kv_lora_rank"):
        return ()
    found = []
    if keys.config.get("index_n_heads"):
        full = [layer for layer in range(layers) if has_index(keys, layer)]
        chosen = keys.size("index_topk", default=2048)
        ends = [*full[1:], layers]
        found += [Handed(a, b - 1, chosen=chosen) for a, b in zip(full, ends, strict=True) if b - a > 1]
    sources = [keys_of(keys, layer) for layer in range(layers)]
    for layer in range(layers):
        takers = [taker for taker in range(layer + 1, layers) if sources[taker] == layer]
        if takers:
            width = keys.size("kv_lora_rank")
            width += keys.size("qk_rope_head_dim", least=0) if rotates(keys, layer) else 0
            found.append(Handed(layer, takers[-1], elements=width))
    return tuple(found)
