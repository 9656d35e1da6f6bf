"""The rates by which rule.experts.stream=auto decides: one actor's part of what the host is known to do."""

from __future__ import annotations

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Rates
from kt_ray.placement.lane_plan import lane_devices
from kt_ray.placement.lane_share import LaneRates
from kt_ray.placement.lora_sizes import expert_rank
from kt_ray.placement.memory import held_format
from kt_ray.timing.lane_products import lane_flops


def lane_rates(
    config: Config, hardware: Hardware, dims: ModelDims, rates: Rates | None = None
) -> LaneRates | None:
    """What `make_plan` needs for stream=auto; None where it does not decide, or nothing is known of a GPU.

    Args:
        rates: the host's; None = those of `rates_for`.

    Raises:
        UserError: as `rates_for`.
    """
    rule = config.rule.experts
    if rule.stream != "auto" or "cpu" in rule.lane_devices or not hardware.gpus:
        return None
    return from_rates(rates or rates_for(config, hardware), config, hardware, dims)


def from_rates(rates: Rates, config: Config, hardware: Hardware, dims: ModelDims) -> LaneRates | None:
    """The rates at a step's rows per expert, which is more than a call of it has.

    Actors on one socket, and those on one GPU, divide what there is.
    """
    if rates.gpu is None or rates.link is None:
        return None
    rule, sockets = config.rule.experts, hardware.on(0)  # a lane uses the GPU of its actor's host
    actors = rule.sockets if isinstance(rule.sockets, int) else min(len(sockets), dims.num_experts)
    neighbours = max(1, -(-actors // len(sockets)))
    threads = rule.threads if isinstance(rule.threads, int) else max(1, sockets[0].cores // neighbours)
    tokens = config.tokens_per_step / rule.copy_count
    rows = tokens * dims.experts_per_token / dims.choices
    rank = expert_rank(dims, config.lora)
    shape = dims.expert_width, dims.expert_intermediate
    isa = hardware.forced_isa or "auto" if rule.isa == "auto" else rule.isa
    expert = rates.expert(isa, held_format(dims, rule.backend), *shape)
    gpus = len(lane_devices(config, hardware))
    sharing = -(-actors // gpus)
    return LaneRates(
        link=rates.link.to_device.value / sharing,
        gpu=lane_flops(rates.gpu, dims, config, max(1.0, rows)) / sharing,
        cpu=2 / sum(1 / expert.flops(way, max(1.0, rows), threads, rank) for way in ("forward", "backward")),
        memory=rates.memory.read_all.value / neighbours,
        source=rates.source,
        devices=max(1, gpus // actors),
        actors=actors,
        sharing=sharing,
    )
