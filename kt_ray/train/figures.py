"""From the actors' reports of a step to its metrics."""

from __future__ import annotations

import os

from kt_ray.config.schema import Config
from kt_ray.placement.types import Plan
from kt_ray.tracking.metrics import (
    StepMetrics,
    expert_flops,
    expert_flops_reference,
    expert_load_imbalance,
    tflops,
)
from kt_ray.train.reports import PassReport, resident_bytes


def step_metrics(
    plan: Plan,
    config: Config,
    report: PassReport,
    *,
    tokens: int,
    loss_tokens: int,
    step: int,
    epoch: float,
    grad_norm: float,
    lr: float,
    seconds: float,
    optimizer_seconds: float,
) -> StepMetrics:
    """One step's figures; `report` covers all its waves, `step` counts from 1, `seconds` is its wall time."""
    dims = plan.dims
    sizes = (dims.hidden_size, dims.expert_intermediate)
    rank = config.lora.rank if config.lora.experts else 0
    recompute = plan.experts[0].activations == "recompute"
    counters = [e.counters for e in report.experts]
    forward = [c.forward_seconds for c in counters]
    backward = [c.backward_seconds for c in counters]
    slots_forward = sum(c.forward_slots for c in counters)
    slots_backward = sum(c.backward_slots for c in counters)
    busiest = max(f + b for f, b in zip(forward, backward, strict=True))
    # What a worker waited beyond the experts' own computing: carrying, queueing, other stages.
    waiting = [max(0.0, w.terms["experts"] + w.terms["stages"] - busiest) for w in report.workers]
    rss = {"driver": resident_bytes()}
    # In one process every actor reports the same memory: count each process once.
    processes: dict[int, tuple[str, int]] = {e.pid: ("expert", e.host_rss_bytes) for e in report.experts}
    processes.update({w.pid: ("worker", w.host_rss_bytes) for w in report.workers})
    processes.pop(os.getpid(), None)  # cluster=local: the driver's own
    for kind, size in processes.values():
        rss[kind] = rss.get(kind, 0) + size
    return StepMetrics(
        step=step,
        epoch=epoch,
        loss=report.loss,
        grad_norm=grad_norm,
        lr=lr,
        tokens=tokens,
        loss_tokens=loss_tokens,
        tokens_per_s=tokens / seconds,
        seconds=seconds,
        seconds_attention=max(w.terms["attention"] + w.terms["head"] for w in report.workers),
        seconds_experts=busiest,
        seconds_transport=sum(waiting) / len(waiting),
        seconds_optimizer=optimizer_seconds,
        expert_tflops_forward=tflops(expert_flops(slots_forward, *sizes, "forward", rank=rank), forward),
        expert_tflops_backward=tflops(
            expert_flops(slots_backward, *sizes, "backward", rank=rank, recompute=recompute), backward
        ),
        expert_tflops_forward_reference=tflops(
            expert_flops_reference(slots_forward, *sizes, "forward"), forward
        ),
        expert_tflops_backward_reference=tflops(
            expert_flops_reference(slots_backward, *sizes, "backward"), backward
        ),
        host_rss_bytes=rss,
        gpu_memory_bytes={plan.workers[w.rank].device: w.gpu_bytes for w in report.workers if w.gpu_bytes},
        expert_load_imbalance=expert_load_imbalance(tokens_per_expert(plan, report).values()),
    )


def tokens_per_expert(plan: Plan, report: PassReport) -> dict[int, list[int]]:
    """MoE layer -> tokens of every expert in this pass, put together from all expert actors."""
    layers: dict[int, list[int]] = {}
    for actor in report.experts:
        for layer, counts in actor.counters.tokens_per_expert.items():
            whole = layers.setdefault(layer, [0] * plan.dims.num_experts)
            for expert, count in zip(plan.held(layer, actor.rank), counts, strict=True):
                whole[expert] += count
    return layers
