"""What whole decoder layers took on this machine, and how a prediction uses it.

Counting a layer's operations (layer_work.py) says how its time grows with tokens, rank and width; it does
not know what Python, autograd and cold caches add. Where mode=doctor ran the model's own layers, the
counted time is multiplied by measured / counted at the same number of positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

from kt_ray.hardware.rates import Curve, LayerRate
from kt_ray.timing.layer_work import LayerWork

KINDS = ("forward", "recompute", "backward")
ENDS = ("begin", "loss")  # of a model, not of a layer


def layer_signature(work: LayerWork) -> str:
    """The same for layers that cost the same: of one model, all but a few."""
    dims = work.dims
    per_key = dims.pair_widths[work.layer] if dims.pair_widths else ()
    facts = (
        work.modules,
        work.moe,
        work.layer == 0,  # whose input needs no gradient
        per_key,
        dims.hidden_size,
        dims.hidden_streams,
        dims.num_heads,
        (dims.choices, dims.experts_per_token) if work.moe else (),
        work.lora.dropout > 0,
        work.lora.dora,
        work.dtype,
        work.attention,
    )
    return f"{dims.model_type} {sha256(repr(facts).encode()).hexdigest()[:12]}"


def ends_signature(work: LayerWork) -> str:
    """Of what a model does before its first layer and after its last."""
    dims = work.dims
    facts = (dims.hidden_size, dims.vocab_size, dims.num_layers, work.dtype)
    return f"{dims.model_type} ends {sha256(repr(facts).encode()).hexdigest()[:12]}"


@dataclass(frozen=True, eq=False)
class Corrections:
    """measured / counted, for the kinds of work that were measured."""

    rates: Sequence[LayerRate]  # of all layers measured
    threads: int  # of the worker, 0 on a GPU
    # (signature's layer, kind, positions, threads) -> seconds of one row, by layer_work.py
    counted: Callable[[int, str, int, int], float]

    def __call__(self, signature: str, layer: int, kind: str, positions: float) -> float:
        """What the counted seconds of `kind` are multiplied by; 1 where nothing was measured."""
        key = (signature, kind)
        if key not in self._curves:
            self._curves[key] = self._curve(signature, layer, kind)
        curve = self._curves[key]
        return 1.0 if curve is None else curve(positions)

    def knows(self, signature: str) -> bool:
        """Whether such a layer was measured."""
        return nearest(self.rates, signature, self.threads) is not None

    @cached_property
    def _curves(self) -> dict[tuple[str, str], Curve | None]:
        return {}

    def _curve(self, signature: str, layer: int, kind: str) -> Curve | None:
        rate = nearest(self.rates, signature, self.threads)
        measured = None if rate is None else rate.kinds.get(kind)
        if rate is None or measured is None:
            return None
        ratios = tuple(
            at / speed / max(self.counted(layer, kind, int(at), rate.threads), 1e-9)
            for at, speed in zip(measured.at, measured.values, strict=True)
        )
        return Curve(measured.at, ratios, measured.source)


def nearest(rates: Sequence[LayerRate], signature: str, threads: int) -> LayerRate | None:
    """Measured on the number of threads nearest in ratio; a GPU (0) is near to nothing but itself."""
    alike = [r for r in rates if r.signature == signature and (r.threads == 0) == (threads == 0)]
    return min(alike, key=lambda r: abs(math.log(max(1, r.threads) / max(1, threads))), default=None)


def merged(new: Sequence[LayerRate], old: Sequence[LayerRate]) -> tuple[LayerRate, ...]:
    """`new`, and what `old` has besides."""
    have = {(r.signature, r.threads) for r in new}
    return (*new, *(r for r in old if (r.signature, r.threads) not in have))


def rate_of(signature: str, name: str, threads: int, seconds: Mapping[str, Mapping[int, float]]) -> LayerRate:
    """From seconds by kind and positions."""
    kinds = {
        kind: Curve(tuple(float(n) for n in sorted(at)), tuple(n / at[n] for n in sorted(at)), "measured")
        for kind, at in seconds.items()
        if at
    }
    return LayerRate(signature, name, threads, kinds)
