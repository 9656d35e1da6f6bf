"""What rule=auto leaves open and memory does not decide: layout, groups in flight, kept activations.

`make_plan` gives the largest waves that fit. This module plans the alternatives, simulates a step of each at
the host's rates, and takes one that is clearly faster. An alternative has to gain 5 %: predictions are no
more accurate than that, and measuring the rates again must not change the order in which a run adds up.

Waves half as large are tried where the largest compute again, or copy to the host, what would then stay;
layers that pass through the card are tried once more when all else is chosen.
Every simulated step is one under Ray, with overlap, over the usual transports, and with rows of
data.max_length tokens, whatever the run uses: what changes no bit of a run must not change its plan. (With
rule.nodes > 1, cluster=local folds all hosts into one and may choose otherwise.) Pure functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Rates
from kt_ray.placement.activation_bytes import may_retain
from kt_ray.placement.devices import with_gpus, with_stream
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.generation_memory import generates
from kt_ray.placement.lane_share import NOTHING, UNTUNED, LaneRates, Tuning
from kt_ray.placement.layout import Layout, layout_is_auto, layout_of, layouts, with_layout
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Choice, Plan
from kt_ray.placement.render import LAYOUT, choice_text, counted, layout_text
from kt_ray.placement.transports import DEFAULT
from kt_ray.placement.wave import micro_batches, output_kinds, waves_of
from kt_ray.placement.worker_lanes import may_stream_to_workers, streams_to_workers
from kt_ray.timing.lane_rates import lane_rates
from kt_ray.timing.seats import even_waves, machine_of
from kt_ray.timing.simulate import simulate
from kt_ray.timing.step_costs import PlanDurations

GAIN = 1.05  # memory's choice stays unless another one is so many times as fast
GROUPS = (1, 4, 8)  # tried beside the usual two
WORKERS_GROUPS = (1, 4)  # where workers compute experts, to which more groups add nothing but kernels
MICRO_BATCHES = (2048, 4096, 8192)  # positions of a GPU's micro-batch that are tried
LAYOUTS = 3  # that fit are simulated at the most, those with most replicas first
# Factors of a GPU's speed, by which lanes get less or more, and what that has to gain: a little, as the
# choice by rates leaves attention out.
SPEEDS, TUNED_GAIN = (0.7, 0.85, 1.2, 1.4), 1.02
EVERYTHING = Tuning(32.0, True)  # all experts on the GPUs, but in small calls
NEAR = 1.25  # whoever computes streamed experts: what is so many times as slow at first is not looked into
STREAMED = 2  # layouts with more replicas, which fit with streamed layers: those with fewest replicas


def choose_plan(
    dims: ModelDims,
    config: Config,
    hardware: Hardware,
    load: ExpertLoad | None = None,
    rates: Rates | None = None,
    before: Choice | None = None,
) -> Plan:
    """The plan of a run: `make_plan`, with simulated steps deciding where several plans fit.

    Args:
        load: tokens per expert of this model, as for `make_plan`.
        rates: the host's; None = those of `rates_for`.
        before: the choice of the run that is resumed. Its layout, groups and activations stay where they are
            at auto and still fit, so that the run continues bit for bit.

    Returns:
        The plan; `Plan.compared` has what was simulated, the chosen one first, and a note says so.

    Raises:
        UserError: as `make_plan` and `rates_for`.
    """
    hardware = with_gpus(config.rule, hardware)
    config = with_stream(config, hardware)
    lane = lane_rates(config, hardware, dims, rates)
    plan = make_plan(dims, config, hardware, load, lane)
    if lane is not None and not plan.fits:
        without = make_plan(dims, config, hardware, load, lane.tuned(NOTHING))
        plan = without if without.fits else plan
    if generates(config) or dims.refusal or not plan.fits:
        return plan
    search = _Search(dims, config, hardware, load, lane, rates or rates_for(config, hardware))
    choices = layouts(dims, config, hardware)
    asked = not layout_is_auto(config.rule)
    if before is not None and (asked or _layout(before) in (choices or [layout_of(plan)])):
        earlier = [
            one
            for one in search.fitting(_as_before(config, before), before.tuning)
            if layout_of(one.plan) == _layout(before)
        ]
        if earlier:  # the one that goes on bit for bit, if there is one
            same = next((one for one in earlier if one.choice[:5] == before[:5]), earlier[0])
            return _beside_resumed(replace(same.plan, compared=(same.choice,)), before)
        search.found.clear()
    own = with_layout(config, layout_of(plan)) if choices else config
    first = search.candidate(own, plan)
    # Copies first, the most that fit: as long as tokens travel, the network hides what a layout is worth.
    copied = (one for other in _other_copies(first) for one in search.fitting([other]))
    best = _faster(first, list(itertools.islice(copied, 1)))
    if choices:
        at = choices.index(layout_of(plan))  # the first that fits
        alike = [other for other in choices[at + 1 :] if other.hosts == plan.attention_hosts]
        # With attention on all hosts also the first layout of the driver's host.
        fewer = [other for other in choices[at + 1 :] if other.hosts < plan.attention_hosts]
        tried = (*alike[: LAYOUTS - 1], *fewer[:1])
        if config.rule.resident_layers == "auto":  # with layers that pass through the GPU more replicas fit
            tried = (*choices[:at][-STREAMED:], *tried)
        search.fitting(_with_layout(best, other) for other in tried)
    of_layouts = tuple(search.simulations)
    search.fitting(other for one in of_layouts for other in _other_residents(one, (0.0,)))
    best = _faster(best, [one for one in search.simulations if one is not best])
    unstreamed = search.unstreamed(best, config)
    to_workers = search.to_workers(best, [c for c in choices[:1] if c != layout_of(best.plan)])
    ends = []
    if to_workers is None or best.seconds < NEAR * to_workers.seconds:
        ends.append(search.best_from(best))
    if to_workers is not None and to_workers.seconds < NEAR * best.seconds:
        ends.append(search.best_from(to_workers))
    best = _faster(ends[0], ends[1:], TUNED_GAIN)
    if unstreamed is not None and unstreamed.seconds < NEAR * best.seconds:
        best = _faster(search.best_from(unstreamed), [best])
    plan = _explained(best, search.simulations, search.rates.source)
    return plan if before is None else _beside_resumed(plan, before)


@dataclass
class _Search:
    """Plans that are made and simulated.

    asked: the user's configuration. found: by what they are alike in, so that nothing is simulated twice.
    """

    dims: ModelDims
    asked: Config
    hardware: Hardware
    load: ExpertLoad | None
    lane: LaneRates | None
    rates: Rates
    found: dict[object, _Candidate] = field(default_factory=dict)

    @property
    def simulations(self) -> list[_Candidate]:
        """In that order."""
        return list(self.found.values())

    def fitting(self, configs: Iterable[Config], tuning: Tuning = UNTUNED) -> list[_Candidate]:
        """Those of the configurations that fit, simulated. tuning: of their lanes."""
        fit = []
        tuned = None if self.lane is None else self.lane.tuned(tuning)
        for changed in configs:
            try:
                other = make_plan(self.dims, changed, self.hardware, self.load, tuned)
            except UserError:  # a resumed run's layout that this machine does not have
                continue
            if other.fits:
                fit.append(self.candidate(changed, other))
        return fit

    def candidate(self, config: Config, plan: Plan) -> _Candidate:
        """`plan`, simulated, or what is like it: more groups than micro-batches are as many."""
        kind = _kind(plan)
        if kind not in self.found:
            seconds = step_seconds(plan, config, self.rates)
            self.found[kind] = _Candidate(self.asked, config, plan, seconds)
        return self.found[kind]

    def best_from(self, start: _Candidate) -> _Candidate:
        """What is fastest from here, from waves half as large, or with all layers passing through the card.

        These two gain little by themselves, but what the room is good for is found out from there as well.
        """
        halves = self.fitting(_other_waves(start), start.plan.tuning)
        better = (half for half in halves if half.seconds * TUNED_GAIN < start.seconds)
        ends = [self.climbed(one) for one in (start, *better)]
        best = self.tuned(_faster(ends[0], ends[1:], TUNED_GAIN))
        if best.plan.resident == 0:
            return best
        passing = self.fitting(_other_residents(best, (0.0,)), best.plan.tuning)
        passing += [
            one for small in passing for one in self.fitting(_other_micro_batches(small), best.plan.tuning)
        ]
        near = (one for one in passing if one.seconds < NEAR * best.seconds)
        return _faster(best, [self.tuned(self.climbed(one)) for one in near])

    def climbed(self, start: _Candidate) -> _Candidate:
        """One thing after the other, as long as it is clearly faster."""
        end = start
        for alternatives in (
            *(_other_micro_batches, _other_residents, _other_activations, _other_attention),
            *(_other_output, _other_groups),
        ):
            end = _faster(end, self.fitting(alternatives(end), end.plan.tuning))
        return end

    def tuned(self, start: _Candidate) -> _Candidate:
        """With less or more of the experts on the GPUs."""
        end = start
        while self.lane is not None:
            tunings = tuple(_other_tunings(end))
            better = _faster(
                end, [one for tuning in tunings for one in self.fitting([end.config], tuning)], TUNED_GAIN
            )
            if better is end:
                break
            end = better
        return end

    def unstreamed(self, best: _Candidate, config: Config) -> _Candidate | None:
        """The same with all streamed experts computed by the CPU, or as memory has it where there is nothing
        to stream; None where nothing is streamed, or rates do not decide. config: with nothing chosen."""
        if self.lane is None or not best.plan.streams:
            return None
        found = self.fitting([best.config, config], NOTHING)
        return min(found, key=lambda one: one.seconds, default=None)

    def to_workers(self, best: _Candidate, layouts: Sequence[Layout] = ()) -> _Candidate | None:
        """The same with streamed experts computed by attention workers; None where they may not be.

        From all of the experts as well as from what the rates say: the more workers compute, the less actors
        keep, the larger waves may be, and the more replicas fit. layouts: tried beside that of `best`.
        """
        rule = best.config.rule
        on_gpus = best.plan.workers[0].device != "cpu"
        if not on_gpus or not (streams_to_workers(rule) or may_stream_to_workers(rule)):
            return None
        changed = with_keys(best.config, {"rule.experts.stream_to": "workers"})
        tried = [changed, *(with_layout(changed, layout) for layout in layouts)]
        # GPU memory may serve experts better than layers, or hidden states
        if rule.resident_layers == "auto":
            tried.append(with_keys(changed, {"rule.resident_layers": 0}))
        if rule.activations == "auto":
            tried.append(with_keys(changed, {"rule.activations": "host"}))
        found = []
        for tuning in (UNTUNED,) if self.lane is None else (UNTUNED, EVERYTHING):
            own = [one for one in self.fitting(tried, tuning) if one.plan.stream_to == "workers"]
            if own:  # those with room for experts that are copied ahead: it takes room to carry more of them
                ahead = max(_ahead(one) for one in own)
                first, *others = (one for one in own if _ahead(one) == ahead)
                found.append(_faster(first, others))
        return min(found, key=lambda one: one.seconds, default=None)


def _ahead(one: _Candidate) -> int:
    return 0 if one.plan.lane is None else one.plan.lane.ahead


def _kind(plan: Plan) -> object:
    """Equal in plans that take equally long."""
    if plan.stream_to == "workers":
        return choice_of(plan)._replace(tuning=UNTUNED), plan.lane
    return choice_of(plan)


def step_seconds(plan: Plan, config: Config, rates: Rates) -> float:
    """Simulated seconds of a step as all plans are compared: see the module."""
    config = with_keys(config, {"cluster.name": "ray"})
    plan = replace(plan, overlap=True, transport=DEFAULT)
    machine = machine_of(plan)
    waves = even_waves(plan, config, config.data.max_length)
    return simulate(plan, machine, PlanDurations(plan, config, rates, machine), waves).seconds


def choice_of(plan: Plan, seconds: float = 0.0) -> Choice:
    """What the plan has where a rule may leave it at auto."""
    shape = (plan.stages, plan.replicas, plan.groups, plan.wave)
    held = (plan.experts[0].activations, seconds, plan.activations, plan.attention_output)
    hosts = (plan.attention_hosts, plan.copies)
    return Choice(
        *shape,
        *held,
        plan.resident,
        *hosts,
        plan.tuning,
        plan.head_ranges,
        plan.stream_to,
        plan.micro_batch_tokens,
        plan.micro_batch_rows,
    )


def _layout(choice: Choice) -> Layout:
    return Layout(choice.stages, choice.replicas, choice.hosts)


def _as_before(config: Config, before: Choice) -> Iterator[Config]:
    """The configuration with all of a choice; or, where more memory is counted now than was then, with its
    waves and whatever else decides in which order a run adds up."""
    yield with_choice(config, before)
    if config.rule.wave == "auto":
        rule = config.rule
        free = {key: getattr(rule, key) for key in ("activations", "attention_output", "resident_layers")}
        keys = {f"rule.{key}": value for key, value in free.items()} | {"rule.wave": before.wave}
        yield with_keys(with_choice(config, before), keys)


def with_choice(config: Config, choice: Choice) -> Config:
    """The configuration with this choice where it is at auto; waves follow from memory."""
    rule, keys = config.rule, dict[str, Any]()
    if layout_is_auto(rule):
        config = with_layout(config, _layout(choice))
    elif rule.attention_hosts == "auto":
        keys["rule.attention_hosts"] = "all" if choice.hosts > 1 else "driver"
    if rule.groups == "auto":
        keys["rule.groups"] = choice.groups
    if rule.experts.stream_to == "auto":
        keys["rule.experts.stream_to"] = choice.stream_to
    if rule.experts.copies == "auto":
        keys["rule.experts.copies"] = choice.copies
    if rule.experts.activations == "auto":
        keys["rule.experts.activations"] = choice.activations
    if rule.activations == "auto":
        keys["rule.activations"] = choice.attention
    if rule.attention_output == "auto":
        keys["rule.attention_output"] = choice.output
    if rule.resident_layers == "auto" and choice.resident is not None:
        keys["rule.resident_layers"] = choice.resident
    if choice.micro_batch_tokens is not None and _chooses_micro_batches(config):
        keys["trainer.micro_batch_tokens"] = choice.micro_batch_tokens
    return with_keys(config, keys)


def _chooses_micro_batches(config: Config) -> bool:
    """Whether how many rows share a micro-batch is left open."""
    return config.packs_micro_batches and config.trainer.micro_batch_tokens == "auto"


@dataclass(frozen=True, eq=False)
class _Candidate:
    """A plan. asked: the user's own configuration, in which what may be chosen is at auto; config: with what
    is chosen so far."""

    asked: Config
    config: Config
    plan: Plan
    seconds: float

    @property
    def choice(self) -> Choice:
        return choice_of(self.plan, self.seconds)


def _faster(best: _Candidate, others: list[_Candidate], gain: float = GAIN) -> _Candidate:
    """The fastest of the others where it is `gain` times as fast, else `best`."""
    return min((best, *others), key=lambda c: c.seconds if c is best else c.seconds * gain)


def _other_residents(best: _Candidate, shares: tuple[float, ...] = (0.0, 0.5)) -> Iterator[Config]:
    """Layers whose weights pass through the GPU leave room for larger waves, or for hidden states. shares: of
    those that stay."""
    plan = best.plan
    whole = waves_of(micro_batches(best.config), plan.wave) == 1 and plan.resident is None
    whole &= plan.stream_to != "workers"  # which fill the room with experts
    whole &= plan.activations not in ("host", "ranges")
    whole |= plan.activations == "retain"  # whose graphs would hold the slots
    if best.asked.rule.resident_layers != "auto" or whole or plan.workers[0].device == "cpu":
        return
    layers = min(stop - start for start, stop in (worker.layers for worker in plan.workers))
    for resident in (int(share * layers) for share in shares):
        if resident != plan.resident:
            yield with_keys(best.config, {"rule.resident_layers": resident})


def _with_layout(best: _Candidate, layout: Layout) -> Config:
    """Another layout with as many copies of the experts, or one where it has attention on fewer hosts."""
    config = with_layout(best.config, layout)
    fewer = layout.hosts < best.plan.attention_hosts and best.plan.copies > 1
    return with_keys(config, {"rule.experts.copies": 1}) if fewer else config


def _other_copies(best: _Candidate) -> Iterator[Config]:
    """Copies of the experts, most first: fewer tokens between hosts, and more bytes of experts on each."""
    nodes, rule = best.plan.hardware.hosts, best.asked.rule
    if rule.experts.copies == "auto" and best.plan.attention_hosts == nodes:
        for copies in range(nodes, 1, -1):
            if nodes % copies == 0:
                yield with_keys(best.config, {"rule.experts.copies": copies})


def _other_micro_batches(best: _Candidate) -> Iterator[Config]:
    """Larger ones take fewer kernels, for which a fast GPU waits, and more memory."""
    if _chooses_micro_batches(best.asked) and best.plan.workers[0].device != "cpu":
        for tokens in MICRO_BATCHES:
            changed = with_keys(best.config, {"trainer.micro_batch_tokens": tokens})
            if changed.micro_batch_rows(best.plan.replicas) > best.plan.micro_batch_rows:
                yield changed


def _other_activations(best: _Candidate) -> Iterator[Config]:
    """What the experts keep trades memory, and so the number of waves, against computing."""
    activations = best.plan.experts[0].activations
    whole = waves_of(micro_batches(best.config), best.plan.wave) == 1
    if best.asked.rule.experts.activations == "auto" and not (activations == "retain" and whole):
        other = "recompute" if activations == "retain" else "retain"
        yield with_keys(best.config, {"rule.experts.activations": other})


def _other_attention(best: _Candidate) -> Iterator[Config]:
    """Smaller waves, of which attention workers hold more: a group's layers are computed again at once, while
    the experts work, and hidden states need not be copied to the host and back; or of all layers, which are
    then computed once. Where workers compute experts these need the room that hidden states take."""
    plan = best.plan
    if best.asked.rule.activations == "auto" and plan.activations != "retain":
        to_host = ("host",) if plan.stream_to == "workers" else ()
        slots = plan.resident is not None or plan.head_ranges
        gpu = plan.workers[0].device != "cpu"
        whole = ("retain",) if may_retain(plan.dims, gpu=gpu) and not slots else ()
        for kind in ("group", *to_host, *whole):
            if kind != plan.activations:
                yield with_keys(best.config, {"rule.activations": kind})


def _other_output(best: _Candidate) -> Iterator[Config]:
    """Attention's outputs that wait for backward trade memory, or a link's time, against a product."""
    plan = best.plan
    whole = waves_of(micro_batches(best.config), plan.wave) == 1 and plan.resident is None
    whole &= plan.activations not in ("host", "ranges")
    if plan.activations == "retain":  # which holds it anyway
        return
    for output in output_kinds(best.config):
        if output != plan.attention_output and not (whole and output == "recompute"):
            yield with_keys(best.config, {"rule.attention_output": output})


def _other_waves(best: _Candidate) -> Iterator[Config]:
    """Smaller waves leave room for what larger ones copy to the host and back, or compute again."""
    plan, rule = best.plan, best.asked.rule
    given_up = (
        rule.activations == "auto" and plan.activations != "group",
        rule.attention_output == "auto" and plan.attention_output == "recompute",
        rule.experts.activations == "auto" and plan.experts[0].activations == "recompute",
        rule.resident_layers == "auto" and plan.resident is not None,
    )
    if rule.wave == "auto" and plan.wave > 1 and any(given_up) and plan.workers[0].device != "cpu":
        yield with_keys(best.config, {"rule.wave": -(-plan.wave // 2)})


def _other_groups(best: _Candidate) -> Iterator[Config]:
    """More groups overlap attention and experts better and need less memory; each reads all weights again."""
    if best.asked.rule.groups == "auto":
        tried = GROUPS if best.plan.stream_to == "actors" else WORKERS_GROUPS
        for groups in sorted({min(count, best.plan.wave) for count in tried} - {best.plan.groups}):
            yield with_keys(best.config, {"rule.groups": groups})


def _other_tunings(best: _Candidate) -> Iterator[Tuning]:
    """Less or more of the experts on the GPUs, and their gates and ups computed again or not."""
    lane, (speed, recompute) = best.plan.lane, best.plan.tuning
    if lane is None or not lane.streams or not lane.cuda:
        return
    yield from (Tuning(round(speed * factor, 3), recompute) for factor in SPEEDS)
    if best.plan.experts[0].activations == "retain":
        yield Tuning(speed, not lane.recompute)


def _adds_up_as(now: Choice, before: Choice) -> bool:
    """Whether a run of one adds up in the order of the other."""

    def order(choice: Choice) -> tuple[object, ...]:
        return (*choice[:5], choice.copies, choice.ranges, choice.stream_to, choice.micro_batch_tokens)

    return order(now) == order(before) and before.micro_batch_rows in (0, now.micro_batch_rows)


def _beside_resumed(plan: Plan, before: Choice) -> Plan:
    """The plan of a resumed run, with a note of whether it adds up as before."""
    now = choice_of(plan)
    streams_anew = plan.streams and before.tuning == NOTHING
    if not streams_anew and _adds_up_as(now, before):
        note = "layout, groups, waves and activations are those of the run that is resumed"
    else:
        earlier = choice_text(before)
        note = f"the run that is resumed had {earlier}: this one continues to rounding, not bit for bit"
    return replace(plan, notes=(*plan.notes, note))


def _explained(best: _Candidate, simulations: list[_Candidate], source: str) -> Plan:
    """The chosen plan with what it was compared with; simulations: memory's choice first."""
    plan, first = best.plan, simulations[0].plan
    others = sorted((c for c in simulations if c.plan is not plan), key=lambda c: c.seconds)
    notes = [note for note in plan.notes if not note.startswith(LAYOUT)]
    layout = [note for note in first.notes if note.startswith(LAYOUT)]
    if layout and layout_of(plan) != layout_of(first):
        slower = f"{layout_text(*layout_of(first))} would take {simulations[0].seconds:.3g} s per step"
        layout = [f"{LAYOUT}: {layout_text(*layout_of(plan))}; {slower}, not {best.seconds:.3g} s"]
    if others:
        notes.append(
            f"chosen by simulated steps: {choice_text(best.choice)}: {best.seconds:.3g} s; the fastest of "
            f"{counted(len(others), 'other plan')}: {choice_text(others[0].choice)}: "
            f"{others[0].seconds:.3g} s (rates: {source})"
        )
    return replace(plan, notes=(*layout, *notes), compared=(best.choice, *(c.choice for c in others)))
