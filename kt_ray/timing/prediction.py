"""What a step of a plan takes: seconds per term, tokens per second, the bottleneck, what would help most.

Pure functions over the simulation (simulate.py) of the plan's own order with durations from rates
(step_costs.py).
Every term names the source of the rate that it was divided by.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kt_ray.config.checks import check
from kt_ray.config.fields import show
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Rates
from kt_ray.placement.devices import first_kind, with_gpus
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.layout import layout_is_auto
from kt_ray.placement.memory import read_bytes
from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan, WorkerPlan
from kt_ray.placement.remedies import UNEVEN
from kt_ray.timing.choose import choice_of, choose_plan, with_choice
from kt_ray.timing.lane_products import lane_gemm
from kt_ray.timing.lane_rates import lane_rates
from kt_ray.timing.seats import even_waves, machine_of
from kt_ray.timing.simulate import Simulated, WaveShape, simulate
from kt_ray.timing.step_costs import PlanDurations

SHOWN = 3  # changes that are shown
WORTH = 1.02  # the least gain that is shown
_REFERENCE_PASSES = {"dpo": 1, "kto": 3, "grpo": 1}  # forward ones of a step; two of KTO's: mismatched rows
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
    """A step as predicted."""

    simulated: Simulated  # the step
    tokens: int  # of it, padding not counted
    terms: tuple[Term, ...]  # see Term
    source: str  # where the rates come from; measured: whether they were measured on such a host
    measured: bool
    rows: str  # what was assumed about tokens per row
    load_seconds: float  # reading the weights from disk
    notes: tuple[str, ...] = ()  # what is predicted otherwise than it runs
    stages: int = 1  # of a replica, ranks one after the other

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.simulated.seconds if self.simulated.seconds else 0.0

    def side_busy(self, side: str) -> float:
        """Mean busy fraction of the attention workers or of the expert actors."""
        name = "worker" if side == "attention" else "experts"
        parts = [busy for actor, busy in self.simulated.busy.items() if actor.startswith(name)]
        return sum(parts) / len(parts) if parts else 0.0

    @property
    def bottleneck(self) -> str:
        """What limits the step, with how busy it is."""
        name, used = self.simulated.critical, self.simulated.used.get(self.simulated.critical, 0.0)
        sides = f"attention busy {self.side_busy('attention'):.0%}, experts {self.side_busy('experts'):.0%}"
        busy = [v for actor, v in self.simulated.busy.items() if actor.startswith("worker")]
        replicas = [busy[i : i + self.stages] for i in range(0, len(busy), self.stages)]
        together = max(map(sum, replicas), default=0.0)  # the stages of the replica that computes most
        if self.stages > 1 and together > used:
            turns = f"its {self.stages} stages take turns, {together:.0%} of the step together"
            return f"attention: {turns} ({sides})"
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
    waves: Sequence[WaveShape] | None = None,
    *,
    rows: str = "",
) -> Prediction:
    """A step of `plan` at `rates`.

    Args:
        waves: the passes of a step; None = every row as long as data.max_length.
        rows: what `waves` assumes about rows, for the reader.
    """
    if waves is None:
        waves = even_waves(plan, config, config.data.max_length)
        rows = f"every row {config.data.max_length} tokens long (data.max_length, the worst case)"
    machine = machine_of(plan)
    durations = PlanDurations(plan, config, rates, machine)
    simulated = simulate(plan, machine, durations, waves)
    tokens = sum(m.tokens for wave in waves for groups in wave for group in groups for m in group)
    return Prediction(
        simulated=simulated,
        tokens=tokens,
        terms=_terms(plan, config, durations, waves, simulated, rates),
        source=rates.source,
        measured=rates.source.startswith("measured"),
        rows=rows,
        load_seconds=_load_seconds(plan, rates),
        notes=_left_out(plan, config, rates),
        stages=plan.stages,
    )


def _plainly(resource: str) -> str:
    """A resource of the simulation in words."""
    kind, _, rest = resource.partition(" ")
    if kind == "network":
        return f"the network {'into' if rest == 'in' else 'out of'} a host with attention"
    if kind == "pcie":
        device, _, way = rest.rpartition(" ")
        return f"PCIe {'to' if way == 'in' else 'from'} {device}"
    return f"the cores of {resource}" if "socket" in resource else resource


def _left_out(plan: Plan, config: Config, rates: Rates) -> tuple[str, ...]:
    """What the prediction does not know of this plan."""
    notes = []
    passes = _REFERENCE_PASSES[config.trainer.stage] if config.has_reference and not config.trainings else 0
    passes += config.trainer.aux_loss > 0
    if passes:
        more = "1 forward pass" if passes == 1 else f"{passes} forward passes"
        notes.append(f"{more} of each step before its training pass: not counted in the prediction")
    kinds = {gpu.name for gpu in plan.hardware.gpus}
    if len(kinds) > 1 and rates.gpu is not None and not all(budget.is_socket for budget in plan.budgets):
        notes.append(f"GPUs of several kinds: predicted as if all were {rates.gpu.name}")
    if plan.lane is not None and not plan.lane.cuda:
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
    waves: Sequence[WaveShape],
    simulated: Simulated,
    rates: Rates,
) -> tuple[Term, ...]:
    """Seconds per term, of the worker that does most of it and of the busiest expert actor."""
    attention = dict.fromkeys((*_ATTENTION.values(), "attention, the rest"), 0.0)
    for worker in plan.workers[: len(durations.machine.workers)]:
        for name, value in _of_worker(plan, durations, waves, worker).items():
            attention[name] = max(attention[name], value)
    busy = simulated.busy
    seat = max(durations.machine.experts, key=lambda c: busy[f"experts {c.actors[0]}"])
    calls = {"forward": 0.0, "backward": 0.0}
    on_gpu = 0.0
    for wave in waves:
        own = wave[: len(plan.replicas_of(0))]
        tokens = [sum(m.tokens for part in own for m in part[g]) for g in range(plan.groups)]
        for layer, direction, g in expert_order(plan, "train"):
            calls[direction] += sum(durations.expert(seat.actors[0], layer, direction, tokens[g], call=g))
            lane = durations.lane(seat.actors[0], layer, direction, tokens[g], call=g)
            on_gpu += max((call.products + call.last for call in lane), default=0.0)
        first = plan.workers[0]
        for layer, direction, g in expert_order(plan, "train"):
            here = durations.worker_lane(0, layer, direction, sum(m.tokens for m in wave[0][g]), call=g)
            if here is not None and first.layers[0] <= layer < first.layers[1]:
                on_gpu += here.products + here.products_ahead + here.products_there
    device, expert, transport = durations.device, durations.expert_rate, rates.transport
    layers = "; layers: measured" if durations.corrected else ""
    on = (
        f"{device.name}{layers}; products: {_source(device.gemm, plan.dtype)}; memory: {device.memory.source}"
    )
    terms = [Term(name, value, on) for name, value in attention.items() if value]
    terms.append(Term("experts, forward", calls["forward"], expert.forward_all.source))
    terms.append(Term("experts, backward", calls["backward"], expert.backward_all.source))
    if on_gpu and rates.gpu is not None:
        terms.append(Term("experts on the GPU", on_gpu, lane_gemm(rates.gpu, plan.dims, config).source))
    pcie = rates.link.to_device.source if rates.link else ""
    for kind, source in (("network", transport.network_bytes.source), ("pcie", pcie)):
        shares = [share for name, share in simulated.used.items() if name.startswith(kind)]
        if shares:
            terms.append(Term(f"{kind}, busiest link", max(shares) * simulated.seconds, source))
    waited = max((reasons.get("transfer", 0.0) for reasons in simulated.idle.values()), default=0.0)
    message = transport.local
    if config.cluster.name == "ray":
        message = transport.arena if plan.transport.near == "arena" else transport.call
    terms.append(Term("waiting for messages", waited, message.source))
    end = simulated.seconds - simulated.pass_seconds
    return (*terms, Term("step's end", end, rates.optimizer.source))


def _of_worker(
    plan: Plan, durations: PlanDurations, waves: Sequence[WaveShape], worker: WorkerPlan
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


def _load_seconds(plan: Plan, rates: Rates) -> float:
    """Reading all weights once: hosts read their own experts side by side; what several replicas have is read
    by the first, and then in memory."""
    experts = read_bytes(plan.dims, plan.experts[0].backend) * plan.copies / plan.hardware.hosts
    held = sum(b.items.get(item, 0) for b in plan.budgets for item in ("weights", "embedding and head"))
    return (experts + held / plan.replicas) / rates.disk.value


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

    What is at auto stays as the plan has it: `choose_plan` compared it. For a larger batch, and without cards
    of another kind, it is chosen anew, as a run of it would: room, micro-batches and rates are others then.

    Args:
        plan: the present plan. base: its prediction at rows of `row` tokens. load: that it was made with.
    """
    dims, hardware = plan.dims, plan.hardware
    changes = []
    present = choice_of(plan)
    for keys, effect in _candidates(config, plan):
        anew = not keys.keys().isdisjoint(("trainer.batch_size", "rule.gpus"))
        changed = with_keys(config if anew else with_choice(config, present), {**keys, "mode": "plan"})
        try:
            check(changed)
            cards = with_gpus(changed.rule, hardware)
            own = rates if cards.gpus == hardware.gpus else rates_for(changed, cards)
            if anew:
                other_plan = choose_plan(dims, changed, hardware, load, own)
            else:
                lane = lane_rates(changed, hardware, dims, rates)
                tuned = None if lane is None else lane.tuned(plan.tuning)
                other_plan = make_plan(dims, changed, hardware, load, tuned)
        except UserError:
            continue
        if not other_plan.fits:
            continue
        other = predict(other_plan, changed, own, even_waves(other_plan, changed, row))
        gain = other.tokens_per_s / base.tokens_per_s if base.tokens_per_s else 0.0
        if gain >= WORTH:
            overrides = " ".join(f"{key}={show(value)}" for key, value in keys.items())
            changes.append(Change(overrides, gain, effect))
    return tuple(sorted(changes, key=lambda c: -c.gain)[:SHOWN])


def _candidates(config: Config, plan: Plan) -> Iterator[tuple[dict[str, Any], str]]:
    """Changes of keys, and what each costs."""
    rule, trainer, hardware = config.rule, config.trainer, plan.hardware
    sockets = hardware.on(0)
    same, rounding = "same results", "same results to rounding"
    if rule.groups != "auto":
        for groups in (1, 2, 3, 4, 6, 8):
            if groups != rule.groups:
                yield {"rule.groups": groups}, rounding
    if rule.experts.activations != "auto":
        for activations in ("retain", "recompute"):
            if activations != rule.experts.activations:
                effect = rounding if rule.experts.activations == "int8" else same
                yield {"rule.experts.activations": activations}, effect
    if rule.activations != "auto":
        yield {"rule.activations": "auto"}, same
    if rule.attention_output != "auto":
        yield {"rule.attention_output": "auto"}, same
    if rule.experts.answers == "float32":
        yield {"rule.experts.answers": "bfloat16"}, "y and dx rounded on their way, docs/numerics.md"
    if isinstance(rule.wave, int):
        yield {"rule.wave": "auto"}, same
    for factor in (2, 4):
        rows = trainer.batch_size * factor
        larger = "more rows in a pass" if config.trainings else "a larger step: fewer updates per epoch"
        yield {"trainer.batch_size": rows}, larger
    for size in (plan.micro_batch_rows * 2, plan.micro_batch_rows // 2):
        if 1 <= size <= math.ceil(trainer.batch_size / plan.replicas):
            if config.packs_micro_batches:
                yield {"trainer.micro_batch_tokens": size * config.data.widest_row}, rounding
            else:
                yield {"trainer.micro_batch_size": size}, rounding
    for backend in ("AMXINT8", "AMXINT4"):
        if backend != rule.experts.backend and config.model.experts_path is None:
            yield {"rule.experts.backend": backend}, "experts quantised"
    if hardware.gpus and rule.experts.stream == "off" and "cpu" not in rule.experts.lane_devices:
        yield {"rule.experts.stream": "auto"}, f"{rounding}, docs/streaming.md"
    if not hardware.gpus or rule.device == "cpu":
        for threads in sorted({1, max(1, min(s.cores for s in sockets) // 2)}):
            if threads != rule.worker_threads:
                yield {"rule.worker_threads": threads}, rounding
    for count in sorted({1, len(sockets), 2 * len(sockets)}):
        if count != rule.experts.sockets:
            yield {"rule.experts.sockets": count}, rounding
    gpus = len(hardware.gpus)
    if first_kind(hardware) < gpus and rule.device != "cpu":
        yield {"rule.gpus": first_kind(hardware)}, UNEVEN
    if gpus and not layout_is_auto(rule):
        for stages, replicas in sorted({(1, 1), (1, gpus), (gpus, 1), (max(1, gpus // 2), 2)}):
            if (stages, replicas) != (rule.stages, rule.replicas):
                keys = {"rule.stages": stages, "rule.replicas": replicas}
                yield {**keys, "rule.layers": None} if rule.layers else keys, rounding
