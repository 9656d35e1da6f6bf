"""Bytes of generation (mode=predict, mode=chat) where they are others than training's.

A step of a replica has at most as many tokens as generate.prefill_tokens reads in, or a prompt of
data.max_length, which is read in whole, and one of every row that runs. Nothing is kept for a backward pass;
caches are kept instead:

    caches        `CacheWidth` of every layer for generate.cache_tokens tokens in generate.batch_size rows
                  and the row of a prompt that is kept for requests that wait; the largest layer's twice, as
                  it grows by copying
    workspace     one layer of a step's tokens with its mask, which a prompt that is read in by itself needs
                  only for windows, an index or eager attention; and what it makes of all cached tokens: keys
                  for every head, where several share one; latent ones in one tensor, for every head only
                  while a prompt is read in
    logits        of every row

With eval.after_training or trainer.stage=grpo, training's plan counts (as `answers`) what this needs beyond
activations, workspace and logits, which are free then.
"""

from __future__ import annotations

import math

from kt_ray.config.limits import GENERATING
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.dims.layer_params import holds_scores
from kt_ray.dims.model_dims import ModelDims


def generates(config: Config) -> bool:
    """Whether the mode generates instead of training."""
    return config.mode in GENERATING


def within_training(config: Config) -> Config:
    """The configuration under which a run generates: no more rows than it asks for."""
    keys = {"batch_size": max(1, config.answering_rows), "answer": "both", "split": "eval", "adapter": None}
    if config.eval.after_training:
        keys["limit"] = config.eval.after_training
    return with_keys(config, {f"generate.{key}": value for key, value in keys.items()})


def within_server(config: Config) -> Config:
    """What a train server's plan is made for: training, and answers of serve.max_batch rows beside it."""
    rows = config.serve.max_batch
    return with_keys(config, {"generate.batch_size": rows, "eval.after_training": rows})


def room(dims: ModelDims, config: Config) -> int:
    """Tokens that the caches of one replica have room for: generate.cache_tokens, "auto" worked out."""
    generate = config.generate
    if isinstance(generate.cache_tokens, int):
        return generate.cache_tokens
    # max_length of a prompt that training would cut there; of GRPO's it counts the answer
    row = config.data.max_length + (0 if config.trainer.stage == "grpo" else generate.max_new_tokens)
    return generate.batch_size * (min(row, dims.context) if dims.context else row)


def step_tokens(dims: ModelDims, config: Config) -> int:
    """Tokens of one step of a replica at the most; prompts longer than data.max_length aside."""
    generate = config.generate
    return max(generate.prefill_tokens, _longest_prompt(dims, config)) + generate.batch_size


def _longest_prompt(dims: ModelDims, config: Config) -> int:
    """That is planned for; those beyond the caches or the model's context are refused."""
    longest = min(config.data.max_length, room(dims, config))
    if config.trainer.stage == "grpo" and not generates(config):
        longest -= config.generate.max_new_tokens  # longer ones are left out, as they leave it no room
    return min(longest, dims.context) if dims.context else longest


def cache_bytes(dims: ModelDims, config: Config, layers: range, element: int) -> float:
    """Of the layers of one stage."""
    rows, tokens = config.generate.batch_size + 1, room(dims, config)
    sizes = [dims.cache_widths[layer].bytes(rows, tokens, element) for layer in layers]
    return sum(sizes) + max(sizes, default=0.0)


def longest_row(dims: ModelDims, config: Config) -> int:
    """Keys that each token of a step meets, on average over the step at the most."""
    return _longest_row(dims, config, step_tokens(dims, config))


def _longest_row(dims: ModelDims, config: Config, tokens: int) -> int:
    """The same of a step of so many tokens."""
    cached = room(dims, config)
    return max(min(tokens, cached), math.ceil(cached / tokens))


def _masked_alone(dims: ModelDims, config: Config) -> bool:
    """Whether a prompt that is read in by itself, without padding, needs a mask."""
    chosen = any(heads for heads, _ in dims.indexes) or any(window for _, window in dims.pair_widths)
    return chosen or holds_scores(dims.model_type, config.model.attn_implementation)


def absorbs_keys(config: Config) -> bool:
    """Whether latent attention makes no keys of what is cached, where it can do without.

    At auto not of answers that are learned from: log-probabilities are then the trainer's to a rounding.
    """
    if config.generate.latent_keys != "auto":
        return config.generate.latent_keys == "absorbed"
    learns = config.trainer.stage == "grpo" and not generates(config)
    return not learns and not config.trainings


def attends_as_cached(dims: ModelDims, config: Config, layer: int) -> bool:
    """Whether a layer makes no keys of what is cached (kt_ray/model/latent_keys.py)."""
    if not absorbs_keys(config):
        return False
    eager = holds_scores(dims.model_type, config.model.attn_implementation)
    latent = any(name.endswith("kv_b_proj") for name, _, _ in dims.lora_in_out[layer])
    return latent and not eager and not config.lora.dora


def _made_of_cached(dims: ModelDims, config: Config) -> float:
    """Elements that a layer makes of what is cached, of the layer that makes most."""
    cached = room(dims, config)
    caching = [layer for layer, width in enumerate(dims.cache_widths) if width.token or width.near]
    if not caching or not all(attends_as_cached(dims, config, layer) for layer in caching):
        return dims.attention_width * cached
    latent = max(dims.cache_widths[layer].token for layer in caching) / dims.attentions
    return max(latent * cached, dims.attention_width * _longest_prompt(dims, config))


def generation_items(
    dims: ModelDims, config: Config, layers: range, *, last: bool, layer: float, element: int
) -> dict[str, float]:
    """What an attention worker needs in the place of training's items of these names.

    layers: of its stage, the last one or not. layer: bytes per token of one layer. element: of a value.
    """
    tokens, several = step_tokens(dims, config), config.generate.prefill_tokens + config.generate.batch_size
    mask = element * _longest_row(dims, config, several)
    alone = element * longest_row(dims, config) if _masked_alone(dims, config) else 0
    made = element * _made_of_cached(dims, config)
    return {
        "kept activations": 0,
        "caches": cache_bytes(dims, config, layers, element),
        "workspace": max(several * (layer + mask), tokens * (layer + alone)) + made,
        "logits": config.generate.batch_size * dims.vocab_size * (element + 8) if last else 0,
    }
