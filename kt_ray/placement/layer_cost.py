"""What a decoder layer costs an attention worker, and the split into stages that costs least. Pure functions.

A pipeline is as fast as its slowest stage, so what is balanced is work, not parameters. Work of a layer per
token of a training step, in FLOPs (a multiply-add is two), from forward and recomputation under grad:

    frozen linear weights   6 per parameter: forward, recomputation, gradient of the input
    LoRA                    8 per parameter: those, and the gradient of the weights
    attention proper        4.5 * 2 * keys * width: forward, recomputation, and 5 products for the 2 of the
                            forward (FlashAttention-2, Dao 2023); `keys` are those a query meets on average
    embedding               2 * H on the first stage: a copy
    head and loss           4 * H * V on the last stage: forward and gradient of the input, of every token

Rows are counted at data.max_length. Router and shared experts are part of a layer's linear weights; routed
experts run elsewhere and cost an attention worker nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kt_ray.config.schema import Config
from kt_ray.dims.layer_params import WITHOUT_SDPA
from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.memory import lora_params

Ranges = tuple[tuple[int, int], ...]

FROZEN, TRAINED = 6, 8  # FLOPs per parameter and token
ATTENTION_PASSES = 4.5  # attention proper of a training step, in forwards


@dataclass(frozen=True)
class LayerCosts:
    """FLOPs per token: of every layer, and what the first and the last stage do besides."""

    layers: tuple[int, ...]
    first: int
    last: int


@dataclass(frozen=True)
class LayerSizes:
    """Bytes on a stage's device: `held` of all its layers add up, of `peak` the largest counts.

    first, last: what the first and the last stage hold besides.
    """

    held: tuple[int, ...]
    peak: tuple[int, ...]
    first: int = 0
    last: int = 0


def layer_costs(dims: ModelDims, config: Config) -> LayerCosts:
    """FLOPs per token of every layer of a training step."""
    row = config.data.max_length
    eager = config.model.attn_implementation == "eager" or dims.model_type in WITHOUT_SDPA
    layers = []
    for layer in range(dims.num_layers):
        linear = FROZEN * (dims.attention_params[layer] + dims.dense_params[layer])
        lora = TRAINED * lora_params(dims, config.lora, layer)
        width, window = dims.pair_widths[layer] if dims.pair_widths else (0, 0)
        # Eager attention computes every score and masks those ahead of the query.
        keys = float(row) if eager else mean_keys(row, window)
        layers.append(linear + lora + round(ATTENTION_PASSES * 2 * keys * width))
    hidden, vocab = dims.hidden_size, dims.vocab_size
    return LayerCosts(tuple(layers), first=2 * hidden, last=4 * hidden * vocab)


def mean_keys(row: int, window: int = 0) -> float:
    """Keys that a query of a row of `row` tokens meets on average: itself and those before it.

    Args:
        window: at most so many of them; 0 = all.
    """
    span = min(window, row) if window else row
    return span - span * (span - 1) / (2 * row)


def cheapest_split(
    costs: LayerCosts,
    n_stages: int,
    speeds: Sequence[float] | None = None,
    sizes: LayerSizes | None = None,
    capacities: Sequence[int] | None = None,
) -> Ranges:
    """Half-open ranges of layers per stage, such that the slowest stage is as fast as possible.

    Of the splits with that slowest stage, one whose fullest device holds the fewest bytes; of those the most
    even one. An optimum, by dynamic programming over the last layer of each stage.

    Args:
        costs: work per layer.
        n_stages: stages, at most as many as layers.
        speeds: of each stage's device, in any unit; None = all equal.
        sizes, capacities: bytes per layer, and of each stage's device (0 = no limit); None = no limits.

    Returns:
        A split that fits every device. Where none does, the one that comes closest: its fullest device is
        over its capacity by the smallest factor.
    """
    n = len(costs.layers)
    if not 1 <= n_stages <= n:
        raise ValueError(f"{n_stages} stages for {n} layers")
    pace = tuple(speeds) if speeds is not None else (1.0,) * n_stages
    limits = tuple(capacities) if capacities is not None else (0,) * n_stages
    if len(pace) != n_stages or len(limits) != n_stages or min(pace) <= 0:
        raise ValueError("a positive speed and a capacity for every stage")
    sums = (0, *accumulate(costs.layers))

    def work(stage: int, start: int, stop: int) -> float:
        ends = (costs.first if stage == 0 else 0) + (costs.last if stage == n_stages - 1 else 0)
        return (sums[stop] - sums[start] + ends) / pace[stage]

    size = _size_of(sizes, n, n_stages)

    def fits(stage: int, start: int, stop: int) -> bool:
        return not limits[stage] or size(stage, start, stop) <= limits[stage]

    def fullness(stage: int, start: int, stop: int) -> float:
        return size(stage, start, stop) / limits[stage] if limits[stage] else 0.0

    best = _optimum(n, n_stages, work, fits)
    if best is None:
        closest = _optimum(n, n_stages, fullness, lambda *_: True)
        assert closest is not None
        return closest[1]
    slowest = best[0]

    def fast(stage: int, start: int, stop: int) -> bool:
        return work(stage, start, stop) <= slowest and fits(stage, start, stop)

    fewest = _optimum(n, n_stages, size, fast)
    assert fewest is not None
    most_bytes = fewest[0]

    def fast_and_small(stage: int, start: int, stop: int) -> bool:
        return size(stage, start, stop) <= most_bytes and fast(stage, start, stop)

    even = _optimum(n, n_stages, lambda *at: work(*at) ** 2, fast_and_small, add=True)
    assert even is not None
    return even[1]


def _size_of(sizes: LayerSizes | None, n: int, n_stages: int) -> Callable[[int, int, int], int]:
    """Bytes of a stage that holds layers [start, stop)."""
    if sizes is None:
        return lambda stage, start, stop: 0
    sums = (0, *accumulate(sizes.held))
    # peaks[start][i]: largest of layers start .. start + i
    peaks = [tuple(accumulate(sizes.peak[start:], max)) for start in range(n)]

    def size(stage: int, start: int, stop: int) -> int:
        ends = (sizes.first if stage == 0 else 0) + (sizes.last if stage == n_stages - 1 else 0)
        return sums[stop] - sums[start] + peaks[start][stop - start - 1] + ends

    return size


def _optimum(
    n: int,
    n_stages: int,
    value: Callable[[int, int, int], float],
    allowed: Callable[[int, int, int], bool],
    *,
    add: bool = False,
) -> tuple[float, Ranges] | None:
    """The smallest maximum (or sum) of `value` over allowed stages, and a split that has it.

    `value` must not fall, and `allowed` not come true again, when a stage grows: the search then stops early.
    """
    best: list[tuple[float, int] | None] = [None] * (n + 1)  # (value, start of the last stage)
    best[0] = (0.0, 0)
    starts: list[list[int]] = []
    for stage in range(n_stages):
        following: list[tuple[float, int] | None] = [None] * (n + 1)
        # The stages before and after this one need a layer each.
        for stop in range(stage + 1, n - (n_stages - stage - 1) + 1):
            found: tuple[float, int] | None = None
            for start in range(stop - 1, stage - 1, -1):
                own = value(stage, start, stop)
                if not allowed(stage, start, stop) or (found is not None and own >= found[0]):
                    break
                before = best[start]
                if before is None:
                    continue
                total = before[0] + own if add else max(before[0], own)
                if found is None or total < found[0]:
                    found = (total, start)
            following[stop] = found
        starts.append([entry[1] if entry is not None else -1 for entry in following])
        best = following
    end = best[n]
    if end is None:
        return None
    edges = [n]
    for stage in reversed(range(n_stages)):
        edges.append(starts[stage][edges[-1]])
    return end[0], tuple(pairwise(reversed(edges)))
