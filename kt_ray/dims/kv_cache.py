"""Key-value caches of generation in the plan's memory: what a layer keeps of rows, and how much that is.

transformers' caches (`kt_ray/model/caches.py` makes them): latent keys and values for multi-head latent
attention, states instead of keys for linear attention. Pure functions.
"""

from __future__ import annotations

from typing import NamedTuple

from kt_ray.config.schema import Config


class CacheWidth(NamedTuple):
    """What one layer's cache keeps of one row.

    token: elements per token. near: elements per token of the last ones, `window` of them. row: elements
    besides. state: float32 values besides.
    """

    token: float = 0.0
    near: int = 0
    window: int = 0
    row: int = 0
    state: int = 0

    def bytes(self, rows: int, tokens: int, element: int) -> float:
        """Of `rows` rows with `tokens` tokens all together (padding included); element: bytes of a value."""
        near = self.near * min(tokens, rows * self.window)
        return element * (self.token * tokens + near + self.row * rows) + 4 * self.state * rows


def cache_tokens(config: Config, context: int | None = None) -> int:
    """Tokens that the caches of one replica have room for: generate.cache_tokens, "auto" worked out.

    Args:
        context: tokens that the model was made for; None = it does not say.
    """
    generate = config.generate
    if isinstance(generate.cache_tokens, int):
        return generate.cache_tokens
    row = config.data.max_length + generate.max_new_tokens
    return generate.batch_size * (row if context is None else min(row, context))
