"""How long a plan takes to sample: groups of answers to prompts, as one session of generation makes them.

    rates = rates_for(config, plan.hardware)
    time = predict_sampling(plan, config, rates, prompts=8, group=8, prompt_tokens=256, answer_tokens=64)
    time.prefill, time.decode, time.tokens_per_s

Steps follow one another, and in a step the layers: attention, the experts' tokens there, their products, the
answers back. Within a replica nothing overlaps but a shared expert with the routed ones. Of several replicas,
one's attention overlaps with the experts of others, until experts or cores are busy all the time; or they go
through the layers together and read each expert once for all (kt_ray/actors/joined_calls.py). Durations are
those of training (step_costs.py), with what a cache adds: it grows by copying (transformers' DynamicCache),
and each key is read; of latent ones those of all heads are the same (kt_ray/model/latent_keys.py).

A prompt is read in once for its group (kt_ray/generate/batcher.py); answers are taken to be equally long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from kt_ray.config.limits import FEW_ROWS
from kt_ray.config.schema import Config
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.hardware.rates import Rates
from kt_ray.placement.generation_memory import attends_as_cached
from kt_ray.placement.plan_types import Plan, WorkerPlan
from kt_ray.timing.event_loop import Carriage
from kt_ray.timing.layer_work import Counts, dispatch_seconds, seconds
from kt_ray.timing.seats import machine_of
from kt_ray.timing.simulate import ExpertClass, Group, LaneCall, Micro
from kt_ray.timing.step_costs import PlanDurations

STEP_OPS = (
    60.0  # of a step beside its layers: the coordinator's book, the step's messages, tokens to the driver
)
HEAD_OPS = 12.0  # final norm and logits
ROW_OPS = 30.0  # transformers' logits processors and the draw, row by row on the host
# Passes over the keys and values of all heads that a layer makes of fewer cached elements: repeated heads are
# written and read; where latent ones are expanded (eager attention, DoRA), each head's key gets its rotated
# part, all are laid out anew, and keys and values of two widths go through products (torch.profiler on a
# layer of the demo, one thread).
REPEATED, FROM_LATENT = 1.5, 5.0
DRAWN = 2.0  # passes of such a row over the vocabulary, each like a log-softmax


@dataclass(frozen=True)
class SamplingTime:
    """Seconds of a round of sampling, and what it makes."""

    prefill: float  # seconds that prompts take to be read in
    decode: float  # seconds that all other tokens of the answers take
    prompt_tokens: int  # computed, each prompt once
    answer_tokens: int  # of all answers

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode

    @property
    def tokens_per_s(self) -> float:
        """Tokens of answers per second of the round."""
        return self.answer_tokens / self.seconds if self.seconds else 0.0


def predict_sampling(
    plan: Plan,
    config: Config,
    rates: Rates,
    *,
    prompts: int,
    group: int,
    prompt_tokens: int,
    answer_tokens: int,
    shared: bool = True,
) -> SamplingTime:
    """A round of `prompts` * `group` answers under generate.batch_size and generate.prefill_tokens.

    Args:
        plan: of the actors that generate; one of training serves as well.
        prompt_tokens, answer_tokens: of each prompt and of each answer.
        shared: whether a prompt is read in once for its group, or for every answer.
    """
    steps = _Steps.of(plan, config, rates)
    own = math.ceil(prompts / plan.replicas)
    rows, read = own * group, own * (1 if shared else group)
    most = min(rows, config.generate.batch_size)
    at_once = max(1, min(most, config.generate.prefill_tokens // prompt_tokens))
    whole, rest = divmod(read, at_once)
    prefill = whole * steps.seconds(at_once, prompt_tokens, 0)
    prefill += steps.seconds(rest, prompt_tokens, 0) if rest else 0.0
    # A row's first token comes of its prompt.
    context = prompt_tokens + answer_tokens // 2
    decode = sum(
        (answer_tokens - 1) * steps.seconds(min(most, rows - first), 1, context)
        for first in range(0, rows, most)
    )
    drawn = prompts * (1 if shared else group) * prompt_tokens
    return SamplingTime(prefill, decode, drawn, prompts * group * answer_tokens)


def joins_calls(plan: Plan, config: Config, rates: Rates, *, rows: int, context: int) -> bool:
    """Whether replicas that decode are faster when their tokens share engine calls.

    Args:
        plan: of the actors that generate; one of training serves as well.
        rows: of each replica, after `context` cached tokens each.
    """
    return _Steps.of(plan, config, rates).joins(rows, context)


@dataclass(frozen=True, eq=False)
class _Steps:
    """Seconds of one step of a replica while its neighbours make such a step, too."""

    plan: Plan
    config: Config
    rates: Rates

    @classmethod
    def of(cls, plan: Plan, config: Config, rates: Rates) -> _Steps:
        # Expert actors compute all tokens: workers stream experts in training alone.
        workers = tuple(replace(worker, lane=None) for worker in plan.workers)
        return cls(replace(plan, workers=workers, head_ranges=0), config, rates)

    def joins(self, rows: int, context: int) -> bool:
        """Whether a step of one new token each is shorter with joined calls. Not with a lane, whose choice of
        experts would depend on what is joined, nor with few rows."""
        if self.sharing == 1 or rows <= FEW_ROWS or any(actor.lane for actor in self.plan.experts):
            return False
        return self._step(rows, 1, context, joined=True) < self._step(rows, 1, context, joined=False)

    @cached_property
    def sharing(self) -> int:
        """Replicas whose tokens an expert actor computes."""
        return len(self.plan.replicas_of(0))

    @cached_property
    def durations(self) -> PlanDurations:
        return PlanDurations(self.plan, self.config, self.rates, machine_of(self.plan))

    def seconds(self, rows: int, width: int, context: int) -> float:
        """For `rows` rows of `width` new tokens each, after `context` cached ones."""
        return self._step(rows, width, context, joined=width == 1 and self.joins(rows, context))

    def _step(self, rows: int, width: int, context: int, *, joined: bool) -> float:
        group: Group = (Micro(rows, width, rows * width, rows),)
        workers = [worker for worker in self.plan.workers if worker.replica == 0]
        together = self.sharing if joined else 1
        total = sum(self._stage(worker, group, context, together) for worker in workers)
        for one, other in pairwise(workers):
            total += _carried(self.durations.stage(one.rank, other.rank, rows * width))
        total += self._end(rows)
        return max(total, *self._at_least(workers, group, context, together))

    def _at_least(
        self, workers: Sequence[WorkerPlan], group: Group, context: int, together: int
    ) -> Iterator[float]:
        """Seconds that all replicas' work takes expert actors, and cores that several actors share."""
        machine, used = self.durations.machine, defaultdict[str, float](float)
        attention = [self._stage(worker, group, context, 0) for worker in workers]
        attention[-1] += self._end(group[0].rows)
        replicas = self.plan.replicas_of(0)
        own = [w for w in self.plan.workers if w.host == 0 and w.replica in replicas]
        for worker, seat in zip(own, machine.workers, strict=True):
            used[seat.resource] += attention[worker.stage] * seat.width
        layers = [n for worker in workers for n in range(*worker.layers) if n in self.plan.dims.moe_layers]
        for c in machine.experts:
            calls = sum(self._call(c.actors[0], layer, together * group[0].tokens) for layer in layers)
            busy = self.sharing / together * calls
            used[c.seat.resource] += busy * c.seat.width
            yield busy
        yield from (used[name] / capacity for name, capacity in machine.capacity.items())

    def _stage(self, worker: WorkerPlan, group: Group, context: int, together: int) -> float:
        """Seconds with experts' calls over the tokens of so many replicas; 0 = without the experts."""
        layers, streamed = range(*worker.layers), 0.0
        total = sum(self.durations.attention("begin", layers[0], group))
        for layer in layers:
            total += self._layer(worker, layer, group, context, together)
            if layer in worker.streamed:
                streamed += _carried(self.durations.weights(worker.rank, layer))
        return max(total, streamed)

    def _layer(self, worker: WorkerPlan, layer: int, group: Group, context: int, together: int) -> float:
        durations = self.durations
        before, after = durations.attention("forward", layer, group)
        before += self._cached(layer, group[0].rows, context) if context else 0.0
        if layer not in self.plan.dims.moe_layers:
            return before + after
        routed = self._experts(worker, layer, group[0].tokens, together) if together else 0.0
        joined = sum(durations.attention("join", layer, group))
        return before + joined + (max(after, routed) if self.plan.overlap else after + routed)

    def _cached(self, layer: int, rows: int, context: int) -> float:
        """What the cached tokens of `rows` rows add to a layer's attention for one new token of each."""
        kept, work = self.plan.dims.cache_widths[layer], self.durations.layers[layer]
        near = min(context, kept.window)
        tokens, seen = rows * context, rows * (context if kept.token else near)
        copied = kept.token * tokens + kept.near * rows * near
        if attends_as_cached(self.plan.dims, self.durations.config, layer):
            # Queries as wide as what is cached, in all heads, and the answers; it is copied as it grows, and
            # once more into one tensor.
            products = 4.0 * self.plan.dims.num_heads * kept.token * seen
            return self._seconds(Counts(passes=2 * copied, held=products), tokens)
        heads = sum(work.heads) * work.dims.attentions * seen
        latent = [module for module in work.modules if module[0].endswith("kv_b_proj")]
        again = (FROM_LATENT if latent else REPEATED) * heads if heads > copied else 0.5 * copied
        total = Counts(passes=copied + again)
        for _, n_in, n_out, rank, _ in latent:
            total = total.plus(work.linear(n_in, n_out, rank, tokens)._replace(operations=0.0))
        return self._seconds(total, tokens)

    def _seconds(self, work: Counts, positions: int) -> float:
        durations = self.durations
        return seconds(work, durations.device, durations.host, self.plan.dtype, max(1, positions))

    def _experts(self, worker: WorkerPlan, layer: int, tokens: int, together: int) -> float:
        """Seconds until the answers are there, of a call over as many tokens of so many replicas each."""
        return max(
            self._way(c, worker, tokens) + self._call(c.actors[0], layer, together * tokens)
            for c in self.durations.machine.experts
        )

    def _call(self, actor: int, layer: int, tokens: int) -> float:
        """Seconds that an expert actor is busy with a call."""
        durations = self.durations
        call = durations.expert(actor, layer, "forward", tokens, call=0)
        lanes = durations.lane(actor, layer, "forward", tokens, call=0)
        return max([call.beside, *map(_of_lane, lanes)]) + call.after

    def _way(self, c: ExpertClass, worker: WorkerPlan, tokens: int) -> float:
        durations = self.durations
        return max(
            _carried(durations.request(worker.rank, to, "forward", tokens))
            + _carried(durations.reply(worker.rank, to, "forward", tokens))
            for to in c.ways
        )

    def _end(self, rows: int) -> float:
        """Logits of every row's last position, and a token of each."""
        durations, dims, dtype = self.durations, self.plan.dims, self.plan.dtype
        head = Counts(products=2.0 * rows * dims.hidden_size * dims.vocab_size, operations=HEAD_OPS)
        total = seconds(head, durations.device, durations.host, dtype, rows)
        read = dims.hidden_size * dims.vocab_size * ELEMENT_BYTES[dtype] / durations.device.memory.value
        host = durations.host
        drawn = DRAWN * rows * dims.vocab_size / host.softmax.value
        return max(total, read) + drawn + dispatch_seconds(STEP_OPS + ROW_OPS * rows, host, host)


def _carried(carriage: Carriage) -> float:
    return sum(leg.seconds for leg in carriage.legs) + carriage.latency


def _of_lane(call: LaneCall) -> float:
    ahead = max(call.ahead, call.routing)
    return max(ahead + max(call.copies, call.products) + call.last, call.dispatch, call.kept) + call.back
