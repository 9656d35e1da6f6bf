"""rule.layers=null: the layers of each stage, so that all GPUs are equally full.

The stages of a replica take turns (docs/schedule.md), so where the layers are cut does not change how long
a step takes: DeepSeek-V3 on two GPUs is predicted at 28.8 s with 30 and 31 layers, and at 28.7 s with 10
and 51. Memory alone decides. Pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.layer_table import layer_table
from kt_ray.placement.memory import GPU_RUNTIME, ON_HOST, worker_items
from kt_ray.placement.plan_types import Held, WorkerPlan
from kt_ray.placement.wave import choose_groups, micro_batches
from kt_ray.placement.wave_tokens import HELD, Load, load_of

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class LayerSizes:
    """Bytes on a stage's device: `sums` of all its layers add up, of `peaks` the largest counts.

    first, last: what the first and the last stage hold besides. cuts: layers at which a stage may begin;
    None = any.
    """

    sums: tuple[int, ...]
    peaks: tuple[int, ...]
    first: int = 0
    last: int = 0
    cuts: tuple[int, ...] | None = None


def balanced_stages(
    dims: ModelDims, config: Config, hardware: Hardware, devices: Sequence[Sequence[str]], dtype: str
) -> Ranges:
    """Half-open ranges of layers per stage.

    Sizes are those of the largest wave, or of the smallest one where a stage would not fit. Stages on the CPU
    share one memory and get equal numbers of layers.

    Args:
        devices: of every stage, per replica; replicas have the same layers, so the smallest device counts.
        dtype: compute type.
    """
    stages = len(devices[0])
    if devices[0][0] == "cpu":
        alike = LayerSizes((1,) * dims.num_layers, (0,) * dims.num_layers, cuts=dims.cuts)
        return even_split(alike, [1] * stages)[1]
    room = {f"cuda:{gpu.index}": max(1, gpu.room - GPU_RUNTIME) for gpu in hardware.gpus}
    capacities = [min(room[names[stage]] for names in devices) for stage in range(stages)]
    micro, asked = micro_batches(config), config.rule.wave
    # At auto the plan comes to one level or another; balanced for one, stages are nearly so for all.
    rule = config.rule
    held = Held(
        HELD.experts,
        HELD.attention if rule.activations == "auto" else rule.activations,
        HELD.output if rule.attention_output == "auto" else rule.attention_output,
    )
    ranges: Ranges = ()
    for wave in (min(asked, micro),) if isinstance(asked, int) else (micro, 1):
        load = load_of(dims, config, wave, choose_groups(config, wave), held)
        sizes = layer_sizes(dims, config, load, stages, dtype)
        fullest, ranges = even_split(sizes, capacities)
        if fullest <= 1:
            break
    return ranges


def even_split(sizes: LayerSizes, capacities: Sequence[int]) -> tuple[float, Ranges]:
    """The split whose fullest stage uses the smallest share of its capacity, and that share.

    Of splits that agree in this, one whose shares are as even as the search finds.

    Args:
        capacities: bytes of each stage's device, above 0.

    Raises:
        ValueError: there are fewer places to cut than stages, or no stages.
    """
    n, stages = len(sizes.sums), len(capacities)
    cuts = {*(range(1, n) if sizes.cuts is None else sizes.cuts)}
    if not 1 <= stages <= len(cuts) + 1:
        raise ValueError(f"{stages} stages for {n} layers")
    below = (0, *accumulate(sizes.sums))
    peaks = [tuple(accumulate(sizes.peaks[start:], max)) for start in range(n)]

    def share(stage: int, start: int, stop: int) -> float:
        ends = (sizes.first if stage == 0 else 0) + (sizes.last if stage == stages - 1 else 0)
        return (below[stop] - below[start] + peaks[start][stop - start - 1] + ends) / capacities[stage]

    # Layers divided so far -> (share of the fullest stage, sum of squared shares, where stages end).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        # Every other stage needs a layer, too.
        after = [stop for stop in range(stage + 1, n - (stages - stage - 1) + 1) if stop in cuts or stop == n]
        best = {
            stop: min(
                (max(fullest, own), squares + own * own, (*ends, stop))
                for start, (fullest, squares, ends) in best.items()
                if start < stop
                for own in (share(stage, start, stop),)
            )
            for stop in after
            if any(start < stop for start in best)
        }
    fullest, _, ends = best[n]
    return fullest, tuple(pairwise((0, *ends)))


def layer_sizes(dims: ModelDims, config: Config, load: Load, stages: int, dtype: str) -> LayerSizes:
    """Bytes of each layer on a GPU, and of what the first and last stage hold besides.

    Sums of them are what `worker_items` says of a stage, to a byte per layer; a stage whose largest matrix
    to dequantise is not in its largest layer needs a little more.
    """
    n = dims.num_layers

    def items(layer: int, stage: int, rank: int, of: int) -> tuple[float, float]:
        worker = WorkerPlan(rank, 0, stage, (layer, layer + 1), "cuda:0", 1)
        of_layer = worker_items(dims, config, load, worker, of, dtype)
        peak = of_layer["workspace"]
        return sum(size for item, size in of_layer.items() if item not in ON_HOST) - peak, peak

    kinds: dict[int, tuple[float, float]] = {}
    sizes = []
    for layer, kind in enumerate(layer_table(dims, config, dtype).kinds):
        if kind not in kinds:
            kinds[kind] = items(layer, 1, 1, 3)  # neither the first stage nor the last
        sizes.append(kinds[kind])
    first = items(0, 0, 0, max(2, stages))[0] - sizes[0][0]
    last = items(n - 1, 1, 1, 2)[0] - sizes[-1][0]
    if stages == 1:  # a tied head is the embedding
        last = items(n - 1, 0, 0, 1)[0] - sizes[-1][0] - first
    return LayerSizes(
        sums=tuple(math.ceil(total) for total, _ in sizes),
        peaks=tuple(math.ceil(peak) for _, peak in sizes),
        first=math.ceil(first),
        last=math.ceil(last),
        cuts=dims.cuts,
    )
