"""Loss and perplexity from sums, so that batches of different sizes weigh by their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LossSum:
    """Negative log-likelihood over some tokens; sums add up with `+`.

    Attributes:
        nats: sum over tokens of -log p(token).
        tokens: number of tokens in the sum.
    """

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def loss(self) -> float:
        """Mean nats per token. ValueError when there is no token."""
        if self.tokens < 1:
            raise ValueError("a loss over no tokens has no value")
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond a double."""
        return perplexity(self.loss)


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats; infinite where that is beyond a double (a loss above 709)."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
