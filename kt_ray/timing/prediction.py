"""What a step of a plan takes: seconds per term, tokens per second, the bottleneck, what would help most.

Pure functions over the simulation (simulate.py) of the plan's own order with durations from rates
(step_costs.py).
Every term names the source of the rate that it was divided by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from kt_ray.config.checks import check
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rates import Rates
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.layout import layout_is_auto
from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan, WorkerPlan
from kt_ray.timing.lane_rates import lane_rates
from kt_ray.timing.seats import even_waves, machine_of
from kt_ray.timing.simulate import Simulated, Wave, simulate
from kt_ray.timing.step_costs import PlanDurations

SHOWN = 3  # changes that are shown
WORTH = 1.02  # the least gain that is shown
_ATTENTION = {
    "forward": "attention, forward",
    "recompute": "attention, recomputed",
    "backward": "attention, backward",
    "loss": "head and loss",
}


class Term(NamedTuple):
    """One kind of work of a step: seconds of the actor that does most of it, and the rate's source."""

    name: str
    seconds: float
    source: str


class Change(NamedTuple):
    """A neighbouring configuration: overrides, its tokens/s over the present one's, what it costs."""

    overrides: str
    gain: float
    effect: str


@dataclass(frozen=True)
class Prediction:
    """A step as predicted.

    Attributes:
        simulated: the step. tokens: of it, padding not counted. terms: see Term.
        source: where the rates come from; measured: whether they were measured on such a host.
        rows: what was assumed about tokens per row. load_seconds: reading the weights from disk.
        notes: what is predicted otherwise than it runs.
    """

    simulated: Simulated
    tokens: int
    terms: tuple[Term, ...]
    source: str
    measured: bool
    rows: str
    load_seconds: float
    load_source: str
    notes: tuple[str, ...] = ()
    stages: int = 1  # of a replica, ranks one after the other

    @property
    def in_turn(self) -> tuple[int, float]:
        """Stages of the replica that computes most, and the share of the step that they add up to."""
        busy = [v for name, v in self.simulated.busy.items() if name.startswith("worker")]
        replicas = [busy[i : i + self.stages] for i in range(0, len(busy), self.stages)]
        return self.stages, max(map(sum, replicas), default=0.0)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.simulated.seconds if self.simulated.seconds else 0.0

    @property
    def side(self) -> str:
        """The side whose actors are busy most, as a sentence's subject."""
        return max(("attention", "experts"), key=self.side_busy)

    def side_busy(self, side: str) -> float:
        """Mean busy fraction of the attention workers or of the expert actors."""
        name = "worker" if side == "attention" else "experts"
        found = [busy for actor, busy in self.simulated.busy.items() if actor.startswith(name)]
        return sum(found) / len(found) if found else 0.0

    @property
    def bottleneck(self) -> str:
        """What limits the step, with how busy it is."""
        name, used = self.simulated.critical, self.simulated.used.get(self.simulated.critical, 0.0)
        sides = f"attention busy {self.side_busy('attention'):.0%}, experts {self.side_busy('experts'):.0%}"
        stages, together = self.in_turn
        if stages > 1 and together > used:
            return f"attention: its {stages} stages take turns, {together:.0%} of the step together ({sides})"
        return f"{_plainly(name)}, used {used:.0%} of the step ({sides})"

    def to_dict(self) -> dict[str, Any]:
        """JSON values for plan.json."""
        simulated = self.simulated
        return {
            "seconds_per_step": simulated.seconds,
            "tokens_per_step": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "rows": self.rows,
            "rates": self.source,
            "measured": self.measured,
            "terms": [term._asdict() for term in self.terms],
            "bottleneck": simulated.critical,
            "busy": dict(simulated.busy),
            "used": dict(simulated.used),
            "idle": {actor: dict(reasons) for actor, reasons in simulated.idle.items()},
            "longest_chain": dict(simulated.path),
            "load_seconds": self.load_seconds,
            "notes": list(self.notes),
        }


def predict(
    plan: Plan,
    config: Config,
    rates: Rates,
    waves: Sequence[Wave] | None = None,
    *,
    rows: str = "",
    events: bool = False,
) -> Prediction:
    """A step of `plan` at `rates`.

    Args:
        waves: the passes of a step; None = every row as long as data.max_length.
        rows: what `waves` assumes about rows, for the reader.
        events: keep the simulation's events.
    """
    if waves is None:
        waves = even_waves(plan, config, config.data.max_length)
        rows = f"every row {config.data.max_length} tokens long (data.max_length, the worst case)"
    machine = machine_of(plan)
    durations = PlanDurations(plan, config, rates, machine)
    simulated = simulate(plan, machine, durations, waves, events=events)
    tokens = sum(m.tokens for wave in waves for groups in wave for group in groups for m in group)
    load, load_source = _load_seconds(plan, rates)
    return Prediction(
        simulated=simulated,
        tokens=tokens,
        terms=_terms(plan, config, durations, waves, simulated, rates),
        source=rates.source,
        measured=rates.source.startswith("measured"),
        rows=rows,
        load_seconds=load,
        load_source=load_source,
        notes=_left_out(plan, config),
        stages=plan.stages,
    )


def _plainly(resource: str) -> str:
    """A resource of the simulation in words."""
    kind, _, rest = resource.partition(" ")
    if kind == "network":
        return (
            f"the network {rest}to the driver's host"
            if rest == "in"
            else "the network out of the driver's host"
        )
    if kind == "pcie":
        device, _, way = rest.rpartition(" ")
        return f"PCIe {'to' if way == 'in' else 'from'} {device}"
    return f"the cores of {resource}" if "socket" in resource else resource


def _left_out(plan: Plan, config: Config) -> tuple[str, ...]:
    """What the prediction does not know of this plan."""
    notes = []
    if any(actor.lane is not None and actor.lane.device == "cpu" for actor in plan.experts):
        notes.append("predicted as without the lane: rule.experts.lane_device=cpu is a stand-in for tests")
    if plan.hardware.hosts > 1:
        notes.append(
            "messages between hosts are predicted at the network's rate; packing them is not counted"
        )
    if config.cluster.name == "ray" and plan.transport.near == "gloo":
        notes.append(
            "rule.transport=gloo is predicted at the rate of tensors inside Ray calls: its own is not known"
        )
    return tuple(notes)


def _terms(
    plan: Plan,
    config: Config,
    durations: PlanDurations,
    waves: Sequence[Wave],
    simulated: Simulated,
    rates: Rates,
) -> tuple[Term, ...]:
    """Seconds per term, of the worker that does most of it and of the busiest expert actor."""
    sums = dict.fromkeys((*_ATTENTION.values(), "attention, the rest"), 0.0)
    for worker in plan.workers:
        for name, value in _of_worker(plan, durations, waves, worker).items():
            sums[name] = max(sums[name], value)
    busy = simulated.busy
    seat = max(durations.machine.experts, key=lambda c: busy[f"experts {c.actors[0]}"])
    calls = {"forward": 0.0, "backward": 0.0}
    on_gpu = 0.0
    for wave in waves:
        tokens = [sum(m.tokens for part in wave for m in part[g]) for g in range(plan.groups)]
        for layer, direction, g in expert_order(plan, "train"):
            calls[direction] += durations.expert(seat.actors[0], layer, direction, tokens[g])
            lane = durations.lane(seat.actors[0], layer, direction, tokens[g])
            on_gpu += lane.products if lane is not None else 0.0
    device, expert = durations.device, durations.expert_rate
    layers = "; layers: measured" if durations.corrected else ""
    on = (
        f"{device.name}{layers}; products: {_source(device.gemm, plan.dtype)}; memory: {device.memory.source}"
    )
    found = [Term(name, value, on) for name, value in sums.items() if value]
    for direction in ("forward", "backward"):
        curve = expert.forward_all if direction == "forward" else expert.backward_all
        found.append(Term(f"experts, {direction}", calls[direction], curve.source))
    if on_gpu and rates.gpu is not None:
        found.append(Term("experts on the GPU", on_gpu, _source(rates.gpu.gemm, plan.dtype)))
    used = {
        name: share * simulated.seconds
        for name, share in simulated.used.items()
        if name.startswith(("network", "pcie"))
    }
    for kind, source in (
        ("network", rates.transport.network_bytes.source),
        ("pcie", rates.link.to_device.source if rates.link else ""),
    ):
        parts = [value for name, value in used.items() if name.startswith(kind)]
        if parts:
            found.append(Term(f"{kind}, busiest link", max(parts), source))
    waited = max((reasons.get("transfer", 0.0) for reasons in simulated.idle.values()), default=0.0)
    under_ray = config.cluster.name == "ray"
    shared = rates.transport.arena if plan.transport.near == "arena" else rates.transport.call
    message = shared if under_ray else rates.transport.local
    found.append(Term("waiting for messages", waited, message.source))
    end = simulated.seconds - simulated.pass_seconds
    found.append(Term("step's end", end, rates.optimizer.source))
    return tuple(found)


def _of_worker(
    plan: Plan, durations: PlanDurations, waves: Sequence[Wave], worker: WorkerPlan
) -> dict[str, float]:
    """Seconds that one attention worker computes, per term."""
    sums = dict.fromkeys((*_ATTENTION.values(), "attention, the rest"), 0.0)
    for wave in waves:
        groups = wave[worker.replica]
        for group in groups:
            sums["attention, the rest"] += sum(durations.attention("begin", worker.layers[0], group))
        for kind, layer, g in worker_program(plan, worker.replica, worker.stage, "train"):
            name = _ATTENTION.get(kind, "attention, the rest")
            sums[name] += sum(durations.attention(kind, layer, groups[g]))
    return sums


def _source(gemm: Any, dtype: str) -> str:
    curve = gemm.get(dtype) or gemm.get("float32")
    return str(curve.source) if curve is not None else ""


def _load_seconds(plan: Plan, rates: Rates) -> tuple[float, str]:
    """Reading all weights once; hosts read their own experts side by side."""
    weights = {"experts", "weights", "embedding and head"}
    total = sum(line.bytes for b in plan.budgets for line in b.lines if line.item in weights)
    return total / plan.hardware.hosts / rates.disk.value, rates.disk.source


# -- what would help -----------------------------------------------------------------------------


def neighbours(
    plan: Plan,
    config: Config,
    rates: Rates,
    base: Prediction,
    row: int,
    load: ExpertLoad | None = None,
) -> tuple[Change, ...]:
    """The changes of one option that are predicted to help most, among those that are allowed and fit.

    Groups and activations that are at auto stay as the plan has them: `choose_plan` compared them.

    Args:
        plan: the present plan. base: its prediction at rows of `row` tokens.
        row: tokens per row.
        load: tokens per expert, as the present plan was made with.
    """
    dims, hardware = plan.dims, plan.hardware
    changes = []
    for overrides, effect, candidate in _candidates(config, hardware):
        changed = replace(_with_choice(candidate, plan), mode="plan")
        try:
            check(changed)
            other_plan = make_plan(dims, changed, hardware, load, lane_rates(changed, hardware, dims, rates))
        except UserError:
            continue
        if not other_plan.fits:
            continue
        other = predict(other_plan, changed, rates, even_waves(other_plan, changed, row))
        gain = other.tokens_per_s / base.tokens_per_s if base.tokens_per_s else 0.0
        if gain >= WORTH:
            changes.append(Change(overrides, gain, effect))
    return tuple(sorted(changes, key=lambda c: -c.gain)[:SHOWN])


def _with_choice(config: Config, plan: Plan) -> Config:
    """The configuration with the plan's layout, groups and activations where it has auto."""
    rule = config.rule
    if layout_is_auto(rule):
        rule = replace(rule, stages=plan.stages, replicas=plan.replicas)
    groups = plan.groups if rule.groups == "auto" else rule.groups
    activations = rule.experts.activations
    if activations == "auto":
        activations = plan.experts[0].activations
    experts = replace(rule.experts, activations=activations)
    return replace(config, rule=replace(rule, groups=groups, experts=experts))


def _candidates(config: Config, hardware: Hardware) -> Iterator[tuple[str, str, Config]]:
    """(overrides, what it costs, the configuration)."""
    rule, trainer = config.rule, config.trainer
    same = "same results"

    def with_rule(**changes: Any) -> Config:
        return replace(config, rule=replace(rule, **changes))

    def with_experts(**changes: Any) -> Config:
        return with_rule(experts=replace(rule.experts, **changes))

    if rule.groups != "auto":
        for groups in (1, 2, 3, 4, 6, 8):
            if groups != rule.groups:
                yield f"rule.groups={groups}", "same results to rounding", with_rule(groups=groups)
    if rule.experts.activations != "auto":
        for activations in ("retain", "recompute"):
            if activations != rule.experts.activations:
                yield f"rule.experts.activations={activations}", same, with_experts(activations=activations)
    if isinstance(rule.wave, int):
        yield "rule.wave=auto", same, with_rule(wave="auto")
    for factor in (2, 4):
        rows = trainer.batch_size * factor
        changed = replace(config, trainer=replace(trainer, batch_size=rows))
        yield f"trainer.batch_size={rows}", "a larger step: fewer updates per epoch", changed
    for size in (trainer.micro_batch_size * 2, trainer.micro_batch_size // 2):
        if 1 <= size <= math.ceil(trainer.batch_size / rule.replica_count):
            changed = replace(config, trainer=replace(trainer, micro_batch_size=size))
            yield f"trainer.micro_batch_size={size}", "same results to rounding", changed
    for backend in ("AMXINT8", "AMXINT4"):
        if backend != rule.experts.backend and config.model.experts_path is None:
            yield f"rule.experts.backend={backend}", "experts quantised", with_experts(backend=backend)
    if hardware.gpus and rule.experts.stream == "off" and rule.experts.lane_device != "cpu":
        untested = "same results to rounding; untested on hardware, docs/gpu_lane.md"
        yield "rule.experts.stream=auto", untested, with_experts(stream="auto")
    cores = min(s.cores for s in hardware.on(0))
    if not hardware.gpus or rule.device == "cpu":
        for threads in sorted({1, max(1, cores // 2)}):
            if threads != rule.worker_threads:
                yield f"rule.worker_threads={threads}", same, with_rule(worker_threads=threads)
    sockets = len(hardware.on(0))
    for count in sorted({1, sockets, 2 * sockets}):
        if count != rule.experts.sockets:
            yield f"rule.experts.sockets={count}", "same results to rounding", with_experts(sockets=count)
    gpus = len(hardware.gpus)
    layouts = (
        {(1, 1), (1, gpus), (gpus, 1), (max(1, gpus // 2), 2)} if gpus and not layout_is_auto(rule) else ()
    )
    for stages, replicas in sorted(layouts):
        if (stages, replicas) != (rule.stages, rule.replicas):
            text = f"rule.stages={stages} rule.replicas={replicas}" + (
                " rule.layers=null" if rule.layers else ""
            )
            yield text, "same results to rounding", with_rule(stages=stages, replicas=replicas, layers=None)
