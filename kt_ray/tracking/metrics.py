"""What is measured per step, how it is computed, and what the figures are called outside.

`StepMetrics` is one line of `metrics.jsonl`. `METRICS` is the one table of exported metrics: the
Ray exporter (`kt_ray.actors.ray.ray_metrics`), the Grafana dashboard and `docs/metrics.md` all follow
it. The rest are pure functions, with the formulas beside them. Standard library only.

Legend: T tokens, k experts per token, H hidden size, I expert intermediate size, r LoRA rank,
slots = (token, expert) pairs computed, T * k per layer when nothing is padded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Value = float | int | str
"""One figure of a record."""

Direction = Literal["forward", "backward"]

_LOSS_UNITS = {"dpo": "mean of a pair", "orpo": "mean of a pair", "kto": "mean of a row", "grpo": "loss"}


def loss_unit(stage: str) -> str:
    """What the loss of a trainer.stage is a mean over, for the axis of a chart."""
    return _LOSS_UNITS.get(stage, "nats per token")


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step."""

    # optimizer steps completed, this one included (1 = the first; 0 is kept for an evaluation before
    # training). A checkpoint step_000300 holds the state after step 300
    step: int
    epoch: float  # passes over the data so far, fractional
    loss: float  # mean over all trained tokens of the step
    grad_norm: float  # global L2 norm over GPU and expert LoRA, before clipping
    lr: float  # learning rate used
    tokens: int  # valid (not padded) tokens of the step
    tokens_per_s: float  # tokens / seconds
    seconds: float  # wall time of the step
    loss_tokens: int | None = None  # tokens that contributed to the loss
    # time the busiest attention worker computed (attention, norms, router, shared experts, loss)
    seconds_attention: float | None = None
    seconds_experts: float | None = None  # time the busiest expert actor computed
    # time an attention worker waited for experts or other stages beyond what the busiest expert actor
    # computed: messages, queueing, other stages; mean over workers
    seconds_transport: float | None = None
    seconds_optimizer: float | None = None  # both phases of the commit, weights back included
    # operations carried out by the expert kernels, LoRA included, over the busiest actor's time in forward
    # calls; 1e12 per second. See `expert_flops`
    expert_tflops_forward: float | None = None
    expert_tflops_backward: float | None = None  # the same for backward
    # the same time, with the reference system's count (6 k T H I)
    expert_tflops_forward_reference: float | None = None
    # the same time, with the reference system's count (10 k T H I)
    expert_tflops_backward_reference: float | None = None
    # resident memory by kind of process ("driver", "worker", "expert"), summed over its processes; shared
    # memory counts in each process that maps it
    host_rss_bytes: Mapping[str, int] = field(default_factory=dict)
    # peak allocated bytes of the step's passes by device ("cuda:0")
    gpu_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    expert_load_imbalance: float | None = None  # see `expert_load_imbalance`
    # share of the step's wall time that each actor computed, by actor. "experts-0": CPU time of its engine
    # threads inside kernels / (seconds * threads); "worker-0": CPU time of its compute thread and torch's /
    # (seconds * threads), on a GPU device time / seconds
    busy: Mapping[str, float] = field(default_factory=dict)
    # requests that lay ready when an engine call was taken up, mean, by expert actor; 0 means that it waited
    # for attention every time
    queue_depth: Mapping[str, float] = field(default_factory=dict)
    # tokens per thread of the fullest expert actor over the mean, averaged over layers; 1 = all actors end
    # together
    actor_load_imbalance: float | None = None
    skipped: int | None = None  # 1: the step was not applied; its record has its loss and grad_norm only
    eval_loss: float | None = None  # held-out loss after this step, where one was measured
    # the routers' load-balancing loss over the step, without its coefficient (trainer.aux_loss)
    aux_loss: float | None = None
    # of preference stages: mean rewards of chosen and rejected rows; of pairs their mean margin and the share
    # that is ordered rightly ("accuracy"); of kto its reference point ("kl")
    preference: Mapping[str, float] = field(default_factory=dict)
    # of trainer.stage=grpo: rewards, lengths and ratios, see kt_ray.train.policy_steps.Policy.figures
    policy: Mapping[str, float] = field(default_factory=dict)
    eval_reward: float | None = None  # its mean reward of the held-out prompts, in the place of eval_loss
    recoveries: int | None = None  # lost actors brought back in this process so far; absent before the first
    # wall time that they cost so far: from the last progress before a death to the moment when as much was
    # done again
    seconds_lost: float | None = None

    def to_dict(self) -> dict[str, Value]:
        """The flat record: what was not measured is absent; mappings become one key per entry.

        `host_rss_bytes={"driver": 1}` gives `host_rss_bytes_driver`; `gpu_memory_bytes={"cuda:0": 1}`
        gives `gpu_memory_bytes_cuda0`.
        """
        record: dict[str, Value] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Mapping):
                for key, entry in value.items():
                    record[f"{item.name}_{key.replace(':', '')}"] = entry
            elif value is not None:
                record[item.name] = value
        return record


@dataclass(frozen=True)
class MetricSpec:
    """One exported metric."""

    name: str  # as given to `ray.util.metrics`; Prometheus shows it as "ray_" + name
    kind: Literal["gauge", "counter"]  # "gauge" (last value) or "counter" (only grows)
    description: str  # one sentence
    # record key -> value of `tag`; an untagged metric has one key and the value "". A key that ends in "_*"
    # stands for all keys of that prefix, the rest being the tag's value
    fields: Mapping[str, str]
    # the tag that tells entries apart; None = none. Every metric also has the tag "run"
    tag: str | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """All tag keys."""
        return ("run",) if self.tag is None else ("run", self.tag)


def _gauge(
    name: str, description: str, fields: Mapping[str, str] | str = "", tag: str | None = None
) -> MetricSpec:
    """A gauge; `fields` may be the one record key, "" = the metric's name."""
    if isinstance(fields, str):
        fields = {fields or name: ""}
    return MetricSpec(f"kt_ray_{name}", "gauge", description, fields, tag)


_TERMS = ("attention", "experts", "transport", "optimizer")
_TFLOPS = ("forward", "backward", "forward_reference", "backward_reference")

METRICS: tuple[MetricSpec, ...] = (
    _gauge("step", "Optimizer steps completed."),
    _gauge("epoch", "Passes over the training data."),
    _gauge("loss", "Training loss of the step."),
    _gauge("eval_loss", "Latest held-out loss."),
    _gauge("policy", "Figures of the step's answers (GRPO), by name.", "policy_*", "figure"),
    _gauge("eval_reward", "Latest mean reward of held-out prompts (GRPO)."),
    _gauge("grad_norm", "Global gradient norm before clipping."),
    _gauge("learning_rate", "Learning rate of the step.", "lr"),
    _gauge("tokens_per_second", "Training throughput.", "tokens_per_s"),
    MetricSpec("kt_ray_tokens_total", "counter", "Tokens trained on by this process.", {"tokens": ""}),
    _gauge(
        "seconds",
        "Seconds of the step, in total and by term.",
        {"seconds": "total", **{f"seconds_{term}": term for term in _TERMS}},
        "term",
    ),
    _gauge(
        "expert_tflops",
        "Operations per second of the expert kernels while busy.",
        {f"expert_tflops_{direction}": direction for direction in _TFLOPS},
        "direction",
    ),
    _gauge("host_rss_bytes", "Resident host memory by kind of process.", "host_rss_bytes_*", "actor"),
    _gauge("gpu_memory_bytes", "Peak allocated GPU memory of the step.", "gpu_memory_bytes_*", "device"),
    _gauge("expert_load_imbalance", "Tokens of the fullest expert over the mean, averaged over layers."),
    _gauge("busy", "Share of the step that an actor computed.", "busy_*", "actor"),
    _gauge(
        "queue_depth",
        "Requests that lay ready when an expert actor took one up, mean of the step.",
        "queue_depth_*",
        "actor",
    ),
    _gauge(
        "actor_load_imbalance",
        "Tokens per thread of the fullest expert actor over the mean, averaged over layers.",
    ),
    MetricSpec("kt_ray_skipped_total", "counter", "Steps that this process skipped.", {"skipped": ""}),
    _gauge("recoveries", "Recoveries from lost actors."),
    _gauge("seconds_lost", "Wall time lost to them."),
)
"""Every exported metric."""


def samples(record: Mapping[str, Value]) -> Iterator[tuple[MetricSpec, float, dict[str, str]]]:
    """(metric, value, tags without "run") for each exported figure that a record holds."""
    for spec in METRICS:
        for key, tag_value in _entries(spec, record):
            value = record[key]
            if isinstance(value, int | float):
                yield spec, float(value), {} if spec.tag is None else {spec.tag: tag_value}


def _entries(spec: MetricSpec, record: Mapping[str, Value]) -> Iterator[tuple[str, str]]:
    for key, tag_value in spec.fields.items():
        if key.endswith("*"):
            prefix = key[:-1]
            yield from ((name, name.removeprefix(prefix)) for name in record if name.startswith(prefix))
        elif key in record:
            yield key, tag_value


def expert_flops(
    slots: int,
    hidden: int,
    intermediate: int,
    direction: Direction,
    *,
    rank: float = 0,
    recompute: bool = False,
) -> int:
    """Floating-point operations of the routed experts in one direction (a multiply-add is two).

    Base, weights frozen, so backward computes no weight gradient:
        forward   gate, up: W x; down: W act                  3 * 2HI = 6HI per slot
        backward  dact = W_down' dy; dx = W_gate' dg + W_up' du   6HI per slot
    LoRA of a projection in -> out (gate and up H -> I, down I -> H):
        forward   A x, then B (A x)                            2r(in + out), together  6r(H + I)
        backward  ds = B' dy, dB += dy s', dx += A' ds, dA += ds x'   4r(in + out), together 12r(H + I)
    Element-wise work (activation, dropout, routing weights) is not counted.

    Args:
        slots: (token, expert) pairs, summed over layers.
        rank: LoRA rank on gate, up and down, mean of the layers; 0 = no expert LoRA.
        recompute: `rule.experts.activations=recompute`: backward also redoes gate and up of the
            forward, 4HI + 4r(H + I) per slot.
    """
    h, i = hidden, intermediate
    if direction == "forward":
        return round(slots * (6 * h * i + 6 * rank * (h + i)))
    again = 4 * h * i + 4 * rank * (h + i) if recompute else 0
    return round(slots * (6 * h * i + 12 * rank * (h + i) + again))


def expert_flops_reference(slots: int, hidden: int, intermediate: int, direction: Direction) -> int:
    """The same as KTransformers counts it: 6 forward, 10 backward, times H * I per slot, whatever the rank.

    Only for comparison with its published TFLOPS.
    """
    return (6 if direction == "forward" else 10) * slots * hidden * intermediate


def tflops(flops: int, busy_seconds: Sequence[float]) -> float:
    """1e12 operations per second of all expert actors together.

    Args:
        flops: operations of all actors.
        busy_seconds: time that each actor spent in kernel calls. They work side by side, so the
            busiest one counts. No time at all gives 0.
    """
    busy = max(busy_seconds, default=0.0)
    return flops / busy / 1e12 if busy > 0 else 0.0


def expert_load_imbalance(tokens_per_expert: Iterable[Sequence[int]]) -> float | None:
    """Mean over layers of (tokens of the fullest expert / mean tokens per expert).

    1 = even, E = one expert takes all.

    Args:
        tokens_per_expert: per MoE layer, the [E] histogram of slots. Layers without tokens are left out.

    Returns:
        None when no layer had tokens.
    """
    ratios: list[float] = []
    for counts in tokens_per_expert:
        total = float(sum(counts))
        if total > 0:
            ratios.append(float(max(counts)) * len(counts) / total)
    return sum(ratios) / len(ratios) if ratios else None
