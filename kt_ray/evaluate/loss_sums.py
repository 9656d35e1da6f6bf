"""Loss and perplexity from sums, so that batches of different sizes weigh by their tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json

_LARGEST = 690.0  # exp of it is below the largest number that kt_ray.parse takes, 1e300
_SUM = {"nats": float, "tokens": int}
LOSSES_FILE = "losses.json"  # beside predictions.jsonl; kt_ray.runs.held_out_loss says what is in it


@dataclass(frozen=True)
class LossSum:
    """Negative log-likelihood over some tokens; sums add up with `+`."""

    nats: float = 0.0  # sum over tokens of -log p(token)
    tokens: int = 0  # number of tokens in the sum

    def __add__(self, other: LossSum) -> LossSum:
        return LossSum(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def loss(self) -> float:
        """Mean nats per token. ValueError when there is no token."""
        if self.tokens < 1:
            raise ValueError("a loss over no tokens has no value")
        return self.nats / self.tokens


def loss_figures(loss: float) -> dict[str, float]:
    """A mean loss in nats and exp of it, the perplexity, which is left out where no file would hold it."""
    return {"loss": loss} | ({"perplexity": math.exp(loss)} if loss < _LARGEST else {})


def read_losses(directory: Path) -> dict[str, LossSum]:
    """ "base" or "adapter" -> what losses.json in a directory says of it; {} = there is none."""
    return sums(losses_file(directory / LOSSES_FILE))


def losses_file(file: Path) -> dict[str, Any]:
    """Its content; {} = there is none, or none that can be read: the losses can be measured again."""
    try:
        content = read_json(file, LOSSES_FILE, "")
        return check_shape(content, {"base?": _SUM, "adapter?": _SUM}, file, LOSSES_FILE, "")
    except UserError:
        return {}


def sums(content: dict[str, Any]) -> dict[str, LossSum]:
    """The losses in the content of losses.json."""
    return {
        side: LossSum(float(content[side]["nats"]), int(content[side]["tokens"]))
        for side in ("base", "adapter")
        if content.get(side) is not None and content[side]["tokens"] >= 0
    }
