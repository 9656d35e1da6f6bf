"""rule.layers=null: the layers of each stage, by what they cost and by what fits its GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.layer_cost import LayerSizes, Ranges, cheapest_split, layer_costs
from kt_ray.placement.memory import GPU_RUNTIME, Load, load_of, lora_params, worker_items
from kt_ray.placement.plan_types import WorkerPlan
from kt_ray.placement.wave import choose_groups, micro_batches

_PEAKS = ("workspace",)  # items of which the largest layer counts; the others add up


def balanced_stages(
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    devices: Sequence[Sequence[str]],
    dtype: str,
    speeds: Sequence[float] | None = None,
) -> Ranges:
    """Layers of every stage: the slowest stage as fast as possible, and every stage within its GPU's memory.

    Memory is that of the smallest wave (or of rule.wave): how large waves may be is chosen afterwards.

    Args:
        devices: of every stage, per replica.
        dtype: compute type.
        speeds: of each GPU of `hardware`, in any unit; None = all equal.
    """
    stages = len(devices[0])
    if all(name == "cpu" for names in devices for name in names):
        return cheapest_split(layer_costs(dims, config), stages)
    pace = {f"cuda:{gpu.index}": speed for gpu, speed in zip(hardware.gpus, speeds or (), strict=False)}
    room = {f"cuda:{gpu.index}": max(1, gpu.memory_bytes - GPU_RUNTIME) for gpu in hardware.gpus}
    wave = min(config.rule.wave, micro_batches(config)) if isinstance(config.rule.wave, int) else 1
    groups, _ = choose_groups(config, wave)
    return cheapest_split(
        layer_costs(dims, config),
        stages,
        # Replicas have the same layers: the slowest and the smallest of their devices counts.
        [min(pace.get(names[stage], 1.0) for names in devices) for stage in range(stages)],
        layer_sizes(dims, config, load_of(config, wave, groups), stages, dtype),
        [min(room.get(names[stage], 0) for names in devices) for stage in range(stages)],
    )


def layer_sizes(dims: ModelDims, config: Config, load: Load, stages: int, dtype: str) -> LayerSizes:
    """Bytes of each layer on a GPU, and of what the first and last stage hold besides.

    Sums of them are what `worker_items` says of a stage, to a byte per layer; a stage whose largest matrix
    to dequantise is not in its largest layer needs a little more.
    """
    n = dims.num_layers

    def items(layer: int, stage: int, rank: int, of: int) -> tuple[float, float]:
        worker = WorkerPlan(rank, 0, stage, (layer, layer + 1), "cuda:0", 1)
        found = worker_items(dims, config, load, worker, of, dtype)
        peak = sum(size for item, size in found.items() if item in _PEAKS)
        return sum(size for item, size in found.items() if item != "staging") - peak, peak

    kinds: dict[object, tuple[float, float]] = {}
    sizes = []
    for layer in range(n):
        kind = (
            dims.attention_params[layer],
            dims.dense_params[layer],
            dims.lora_in_out[layer],
            layer in dims.moe_layers,
            dims.quantised[layer] if dims.quantised else None,
            lora_params(dims, config.lora, layer),
        )
        if kind not in kinds:
            kinds[kind] = items(layer, 1, 1, 3)  # neither the first stage nor the last
        sizes.append(kinds[kind])
    first = items(0, 0, 0, max(2, stages))[0] - sizes[0][0]
    last = items(n - 1, 1, 1, 2)[0] - sizes[-1][0]
    if stages == 1:  # a tied head is the embedding
        last = items(n - 1, 0, 0, 1)[0] - sizes[-1][0] - first
    return LayerSizes(
        held=tuple(math.ceil(held) for held, _ in sizes),
        peak=tuple(math.ceil(peak) for _, peak in sizes),
        first=math.ceil(first),
        last=math.ceil(last),
    )
