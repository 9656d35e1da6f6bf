"""From the actors' reports of a step to its metrics."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence

from kt_ray.config.schema import Config
from kt_ray.placement.balance import mean_imbalance
from kt_ray.placement.lora_sizes import expert_lora_share, expert_rank
from kt_ray.placement.plan_types import Plan
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
    rank = expert_rank(dims, config.lora) * expert_lora_share(dims, config.lora)  # mean of the layers
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
    processes = {(e.activity.host, e.pid): ("expert", e.host_rss_bytes) for e in report.experts}
    processes |= {(w.activity.host, w.pid): ("worker", w.host_rss_bytes) for w in report.workers}
    processes.pop((socket.gethostname(), os.getpid()), None)  # cluster=local: the driver's own
    for kind, size in processes.values():
        rss[kind] = rss.get(kind, 0) + size
    counts = tokens_per_expert(plan, report)
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
        gpu_memory_bytes=_gpu_memory(plan, report),
        expert_load_imbalance=expert_load_imbalance(counts.values()),
        actor_load_imbalance=_actor_imbalance(plan, counts),
        busy=busy_fractions(plan, report, seconds),
        queue_depth={e.activity.actor: e.activity.queue_mean for e in report.experts},
    )


def _gpu_memory(plan: Plan, report: PassReport) -> dict[str, int]:
    """Peak bytes by device: each process that uses it counts once, with all that it allocated there."""
    peaks = {(plan.workers[w.rank].place, w.pid): w.gpu_bytes for w in report.workers if w.gpu_bytes}
    devices: dict[str, int] = {}
    for (device, _), peak in peaks.items():
        devices[device] = devices.get(device, 0) + peak
    return devices


def _actor_imbalance(plan: Plan, counts: Mapping[int, Sequence[int]]) -> float | None:
    busy = [layer for layer, of_layer in counts.items() if any(of_layer)]
    actors = plan.first_copy  # of the others tokens per expert are counted with it
    shares = {layer: tuple(actor.experts_of(layer) for actor in actors) for layer in busy}
    return mean_imbalance(counts, shares, [actor.threads for actor in actors]) if busy else None


def busy_fractions(plan: Plan, report: PassReport, seconds: float) -> dict[str, float]:
    """By actor: see `StepMetrics.busy`. `seconds` is the wall time that it is a share of."""
    busy = {}
    for worker in report.workers:
        own = worker.activity
        if plan.workers[worker.rank].device.startswith("cuda"):
            busy[own.actor] = (worker.terms["attention"] + worker.terms["head"]) / seconds
        else:
            busy[own.actor] = own.cpu_seconds / (seconds * own.threads)
    for expert in report.experts:
        own = expert.activity
        busy[own.actor] = own.kernel_seconds / (seconds * own.threads)
    return busy


def tokens_per_expert(plan: Plan, report: PassReport) -> dict[int, list[int]]:
    """MoE layer -> tokens of every expert in this pass, put together from all expert actors."""
    layers: dict[int, list[int]] = {}
    for actor in report.experts:
        for layer, counts in actor.counters.tokens_per_expert.items():
            whole = layers.setdefault(layer, [0] * plan.dims.num_experts)
            experts = plan.experts[actor.rank].experts_of(layer)
            for expert, count in zip(experts, counts, strict=True):
                whole[expert] += count
    return layers
