"""From a plan and rates to the durations that the simulation plays through (kt_ray.timing.simulate).

Who does what in seconds, an actor alone on its cores:

    attention   layer_work.py, corrected where mode=doctor ran the model's layers; with what it copies for the
                experts and what it adds up of their answers
    experts     products of gate, up and down over the measured rate at the rows an expert gets, LoRA and
                elementwise work included in the rate and scaled to this shape; never less than the weights
                as stored over the socket's memory; activations=recompute adds gate and up again; replicas'
                rows are joined, answers=bfloat16 rounded, by all of the engine's threads
    transport   a message's fixed seconds, bytes over shared memory, PCIe or the network (`Carriage`)
    step's end  gradients to the first worker, norms, AdamW, adapters back

Routing is taken as even: each token draws its experts, and those that are drawn at all get the same number of
tokens. Pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kt_ray.config.limits import INT8_BACKENDS
from kt_ray.config.schema import Config
from kt_ray.dims.weight_formats import ELEMENT_BYTES
from kt_ray.hardware.rates import DeviceRate, ExpertRate, Rates
from kt_ray.placement.expert_load import touched
from kt_ray.placement.layer_table import layer_table
from kt_ray.placement.lora_sizes import expert_lora_layers, expert_lora_params, expert_rank, lora_params
from kt_ray.placement.memory import held_format, home_socket, logit_rows, reached_part
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.event_loop import Carriage, Leg
from kt_ray.timing.lane_seconds import LaneSeconds
from kt_ray.timing.layer_rates import ENDS, KINDS, Corrections, ends_signature, layer_signature
from kt_ray.timing.layer_work import (
    NORM_PASSES,
    Counts,
    LayerWork,
    dispatch_seconds,
    head_seconds,
    layer_works,
    seconds,
)
from kt_ray.timing.range_seconds import copied_seconds, repeated
from kt_ray.timing.simulate import (
    ExpertCall,
    ExpertClass,
    Group,
    LaneCall,
    Machine,
    Micro,
    Phase,
    WorkerLaneCall,
)
from kt_ray.timing.worker_lane_seconds import WorkerLaneSeconds

# Operations of dispatch (rates: `operation`) beside the layers themselves.
BEGIN_OPS = 90.0  # the recording pass of a micro-batch: its embedding, masks, rotary table
BEGIN_PASSES = 12.0  # and per element of its hidden state
JOIN_OPS = 4.0  # adding an answer to a micro-batch's hidden state
CALL_OPS = 15.0  # an expert actor's own Python and torch around one engine call
SUBMIT_OPS = 10.0  # what a worker does to hand a group's tokens over
PARAMETER_OPS = 2.0  # of the step's end, per LoRA matrix
PASS_OPS = 300.0  # the driver's calls and reports around a pass or a phase
ADD_BYTES = 12  # read and written per gradient that is added to another; a copied byte is two
SUM_BYTES = 36  # read and written per gradient for its squared norm in float64, by torch; the engine reads 4


@dataclass(frozen=True, eq=False)
class PlanDurations:
    """`Durations` of a plan at given rates."""

    # plan, config, rates: as they are
    plan: Plan
    config: Config
    rates: Rates
    machine: Machine  # its seats, see seats.py

    # -- attention ---------------------------------------------------------------------------

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        key = (kind, self._signatures[layer], layer < self.plan.backward.inputs, group)
        if key not in self._of_groups:
            self._of_groups[key] = self._attention(kind, layer, group)
        return self._of_groups[key]

    @cached_property
    def _of_groups(self) -> dict[tuple[str, str, bool, Group], tuple[float, float]]:
        return {}

    @cached_property
    def _signatures(self) -> tuple[str, ...]:
        """Of each layer: equal layers are counted once."""
        return tuple(map(layer_signature, self.layers))

    @cached_property
    def layers(self) -> tuple[LayerWork, ...]:
        return layer_works(self.plan, self.config)

    @cached_property
    def device(self) -> DeviceRate:
        """What attention runs on: the same kind for every worker of a plan."""
        return self.rates.gpu if self.on_gpu and self.rates.gpu is not None else self.host

    @cached_property
    def host(self) -> DeviceRate:
        """torch on the worker's host threads: sums of answers, copies."""
        return self.rates.cpu_rate(self.plan.workers[0].threads)

    @property
    def on_gpu(self) -> bool:
        return self.plan.workers[0].device != "cpu"

    def _attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        moe = layer in self.plan.dims.moe_layers
        # Only its experts train. Where it is not affine dy is known once the layer is recomputed.
        bare = layer < self.plan.backward.inputs and self.plan.dims.affine
        if bare and kind in ("recompute", "backward"):
            tokens = sum(m.tokens for m in group)
            return (self._submit(kind, tokens), 0.0) if kind == "recompute" else (0.0, 0.0)
        before = after = 0.0
        parts = [(kind, m) for m in group]
        ranges = self.plan.head_ranges > 0
        if ranges:  # each micro-batch is recomputed when its gradients are there
            parts = [] if kind == "recompute" else parts
            parts += [("recompute", m) for m in group] if kind == "backward" else []
        elif self.plan.activations == "retain":
            parts = [] if kind == "recompute" else parts
        elif self.plan.activations != "group":  # backward recomputes all but the first micro-batch
            parts = parts[:1] if kind == "recompute" else parts
            parts += [("recompute", m) for m in group[1:]] if kind == "backward" else []
        for part, m in parts:
            retained = self.plan.attention_output == "retain" and not ranges
            grown = self.plan.activations == "retain" and not bare and layer >= self.plan.backward.lowest
            held = {"retained": retained, "grown": grown}
            one, two = self._counted(part, layer, m, self.device, self.host, **held)
            factor = self._correction(part, layer, m)
            before, after = before + one * factor, after + two * factor
        if ranges:  # experts get tokens from the end of the layer
            before, after = (before + after, 0.0) if kind == "forward" else (before, after)
            after += sum(self._by_ranges(kind, layer, m) for m in group)
        if moe and kind in ("forward", "recompute"):
            # Experts get the whole group at its last micro-batch: shared experts of the others ran before.
            if kind == "forward" and len(group) > 1:
                early = after * (len(group) - 1) / len(group)
                before, after = before + early, after - early
            before += self._submit(kind, sum(m.tokens for m in group))
        elif kind == "join" or (kind == "backward" and moe):
            after += self._answers(kind, sum(m.tokens for m in group))
        return (before, after) if moe or kind == "begin" else (before + after, 0.0)

    def _by_ranges(self, kind: str, layer: int, m: Micro) -> float:
        """A micro-batch's seconds beyond those of a whole layer."""
        copied = copied_seconds(self.plan, self.rates.link, kind, layer, m.rows * m.width)
        if kind != "backward":
            return copied
        retained = self.plan.attention_output == "retain"
        again = repeated(self.layers[layer], m.rows, m.width, retained=retained)
        return copied + seconds(again, self.device, self.host, self.plan.dtype, m.rows * m.width)

    def _counted(
        self,
        kind: str,
        layer: int,
        m: Micro,
        device: DeviceRate,
        host: DeviceRate,
        *,
        retained: bool = False,
        grown: bool = False,
    ) -> tuple[float, float]:
        """One micro-batch's seconds until the experts get their tokens, and after that, by layer_work.py.

        retained: whether the recomputation has attention's output; layers are measured without. grown:
            whether forward makes the graph.
        """
        plan, dtype, work = self.plan, self.plan.dtype, self.layers[layer]
        positions = m.rows * m.width
        if kind == "begin":
            begun = Counts(passes=BEGIN_PASSES * positions * plan.dims.hidden_size, operations=BEGIN_OPS)
            return seconds(begun, device, host, dtype, positions), 0.0
        if kind in ("forward", "recompute"):
            again = kind == "recompute"
            first, rest = (
                work.recompute(m.rows, m.width, retained) if again else work.forward(m.rows, m.width)
            )
            grad = again or grown
            one = seconds(first, device, host, dtype, positions, grad=grad)
            two = seconds(rest, device, host, dtype, positions, grad=grad)
            return (0.0, one + two) if again else (one, two)
        if kind == "backward":
            through = work.backward(m.rows, m.width)
            return 0.0, seconds(through, device, host, dtype, positions, back=True)
        if kind == "join":
            joined = Counts(passes=5.0 * positions * plan.dims.hidden_size, operations=JOIN_OPS)
            return 0.0, seconds(joined, device, host, dtype, positions)
        if kind == "loss":
            asked, vocab = self.config.trainer.loss_chunk, plan.dims.vocab_size
            chunk = logit_rows(asked, max(1, m.trained), vocab, gpu=self.on_gpu)
            return 0.0, head_seconds(plan.dims, device, host, dtype, m.trained, chunk)
        return 0.0, 0.0

    def _correction(self, kind: str, layer: int, m: Micro) -> float:
        """measured / counted, where the model's layers were measured on this machine."""
        if kind in KINDS:
            return self._corrections(self._signatures[layer], layer, kind, m.rows * m.width)
        if kind in ENDS and (m.trained or kind == "begin"):
            size = m.trained if kind == "loss" else m.rows * m.width
            return self._corrections(ends_signature(self.layers[0]), 0, kind, size)
        return 1.0

    @cached_property
    def corrected(self) -> bool:
        """Whether a layer of this model was measured."""
        return any(map(self._corrections.knows, self._signatures))

    @cached_property
    def _corrections(self) -> Corrections:
        def counted(layer: int, kind: str, width: int, threads: int) -> float:
            """What measure/layers.py times: it hands tokens over, and gets no answers to add up."""
            host = self.rates.cpu_rate(threads) if threads else self.host
            device = host if threads else self.device
            total = sum(self._counted(kind, layer, Micro(1, width, width, width), device, host))
            moe = layer in self.plan.dims.moe_layers
            return total + (self._submit(kind, width) if moe and kind in ("forward", "recompute") else 0.0)

        threads = 0 if self.on_gpu else self.plan.workers[0].threads
        return Corrections(self.rates.layers, threads, counted)

    def _submit(self, kind: str, tokens: int) -> float:
        """Host seconds to put a group's tokens (or their gradients, in float32) where experts read them."""
        dispatch = dispatch_seconds(SUBMIT_OPS, self.host, self.host)
        passes = tokens * self.plan.dims.expert_width * (2 if kind == "recompute" else 1)
        return dispatch if self.on_gpu else passes / self._passes_per_second + dispatch

    def _answers(self, kind: str, tokens: int) -> float:
        """Seconds to add the actors' answers: on the host the first is copied, the others are added. A GPU's
        links do that; it adds what it computed itself."""
        dims = self.plan.dims
        if self.on_gpu:
            own = 3.0 * tokens * dims.expert_width if self.worker_lanes.run else 0.0
            return own / (NORM_PASSES * self.device.block.norm.value)
        width = dims.expert_width + (dims.experts_per_token if kind == "backward" else 0)
        return tokens * width * (1 + 1.5 * (len(self.plan.experts_of(0)) - 1)) / self._passes_per_second

    @property
    def _passes_per_second(self) -> float:
        """Elements/s of a pass on the worker's host threads."""
        return NORM_PASSES * self.host.block.norm.value

    @property
    def _under_ray(self) -> bool:
        return self.config.cluster.name == "ray"

    @property
    def _shares_memory(self) -> bool:
        return self._under_ray and self.plan.transport.near == "arena"

    # -- experts -----------------------------------------------------------------------------

    def expert(self, actor: int, layer: int, direction: str, tokens: int, *, call: int = 0) -> ExpertCall:
        # What the layers of a key have in common is all that makes them differ.
        layers = (
            self.lanes.held(actor, layer),
            layer in self._expert_lora,
            layer >= self.plan.backward.inputs,
        )
        key = (actor, layers, direction, tokens, min(call, 1))
        if key not in self._calls:
            self._calls[key] = self._expert(actor, layer, direction, tokens, min(call, 1))
        return self._calls[key]

    @cached_property
    def lanes(self) -> LaneSeconds:
        return LaneSeconds(self.plan, self.config, self.rates)

    def lane(
        self, actor: int, layer: int, direction: str, tokens: int, *, call: int = 0
    ) -> tuple[LaneCall, ...]:
        return self.lanes.calls(actor, layer, direction, tokens, call=call)

    @cached_property
    def worker_lanes(self) -> WorkerLaneSeconds:
        return WorkerLaneSeconds(self.plan, self.config, self.rates)

    def worker_lane(
        self, worker: int, layer: int, direction: str, tokens: int, *, call: int = 0
    ) -> WorkerLaneCall | None:
        return self.worker_lanes.call(worker, layer, direction, tokens, call=call)

    @cached_property
    def _calls(self) -> dict[tuple[int, object, str, int, int], ExpertCall]:
        return {}

    def _expert(self, actor: int, layer: int, direction: str, tokens: int, call: int) -> ExpertCall:
        dims, holder = self.plan.dims, self.plan.experts[actor]
        count = len(holder.experts_of(layer))
        slots = tokens * dims.experts_per_token * count / dims.choices
        if slots == 0:
            return ExpertCall(dispatch_seconds(CALL_OPS, self.host, self.host), 0.0)
        asked = count * (1 - (1 - dims.experts_per_token / dims.choices) ** tokens)
        rows = slots / asked
        resident, carried = self.lanes.part(actor, layer, tokens, call=call)
        left = self.worker_lanes.left(actor, direction, tokens, call=call)
        # Carried experts are read from the same memory.
        busy = asked * (1 - resident) * left.experts + left.read
        slots *= (1 - resident - carried) * left.rows
        of_inner = 2 / 3 if dims.gated else 1 / 2  # gate's and up's part of the products
        rank = expert_rank(dims, self.config.lora) if layer in self._expert_lora else 0
        how = (slots, rows, holder.threads, rank)
        wanted = direction == "forward" or layer >= self.plan.backward.inputs
        total = self._kernel(direction, *how, products=1.0 if wanted else 1 - of_inner)
        if direction == "backward" and holder.activations == "recompute":  # all but down again
            total += self._kernel("forward", *how) * of_inner
        memory = self.rates.memory
        speed = memory.read_all.value if holder.threads > 1 else memory.read_one.value
        least = busy * self.expert_weight_bytes / speed
        copied, added = self.lanes.added(actor, layer, direction, tokens, call=call)
        joined, rounded = self._around(actor, tokens, direction)
        copying = self.copied_per_second(holder.threads)
        dispatch = dispatch_seconds(CALL_OPS, *(self.rates.cpu_rate(holder.threads),) * 2)
        # Replicas' rows are joined where the lane keeps them.
        joined, rounded = left.tokens * joined, left.tokens * rounded
        beside = max(total, least) + (joined or copied) / copying
        late = 3 * left.gradients / 2 / copying  # each read and added to another
        return ExpertCall(beside, (rounded + added / 2) / copying + dispatch, late)

    @cached_property
    def _expert_lora(self) -> frozenset[int]:
        return frozenset(expert_lora_layers(self.plan.dims, self.config.lora))

    def _kernel(
        self, direction: str, slots: float, rows: float, threads: int, rank: int, *, products: float = 1.0
    ) -> float:
        """Engine seconds. What does not multiply frozen matrices (LoRA, activation, adding to tokens) grows
        with H + I, the products with H * I: the measured share of it is scaled to this shape. products: which
        part of them is wanted."""
        dims, rate = self.plan.dims, self.expert_rate
        hidden, inter = dims.expert_width, dims.expert_intermediate
        flop = (6.0 if dims.gated else 4.0) * hidden * inter * slots
        plain = (rate.plain_forward if direction == "forward" else rate.plain_backward).value
        speed = rate.flops(direction, rows, threads, rank)
        other = (1 - plain) if rank else 0.0
        grown = (hidden + inter) / (hidden * inter) * (rate.hidden * rate.inter) / (rate.hidden + rate.inter)
        return flop / speed * ((1 - other) * products + other * grown)

    def _around(self, actor: int, tokens: int, direction: str) -> tuple[float, float]:
        """Bytes that the actor copies before and after a call's products: replicas' rows that are joined, and
        the answer that is rounded.

        An answer that is not rounded is computed where it is read.
        """
        holder = self.plan.experts[actor]
        # Of other hosts' replicas only tokens come that have an expert here.
        reached = reached_part(self.plan.dims, holder, self.plan.attention_hosts)
        elements = tokens * reached * self.plan.dims.expert_width
        joined = elements * self._sent_bytes(direction) if len(self.plan.replicas_of(0)) > 1 else 0.0
        if holder.answers == "float32":
            return joined, 0.0
        return joined, elements * (4 + ELEMENT_BYTES[holder.answers]) / 2  # a copied byte is read and written

    def _sent_bytes(self, direction: str) -> int:
        """Of an element of what the experts get: x in the type that attention computes in, dy in float32."""
        return ELEMENT_BYTES[self.plan.dtype] if direction == "forward" else 4

    def copied_per_second(self, threads: int) -> float:
        """Bytes/s that so many threads of a socket copy."""
        memory, share = self.rates.memory, min(1.0, threads / max(1, self.rates.cpu_all.threads))
        return max(memory.copy_one.value, memory.copy_all.value * share)

    @cached_property
    def expert_rate(self) -> ExpertRate:
        dims, actor = self.plan.dims, self.plan.experts[0]
        fmt = held_format(dims, actor.backend)
        products = "int8" if actor.backend in INT8_BACKENDS else "any"
        isa = self.plan.hardware.forced_isa or "auto" if actor.isa == "auto" else actor.isa
        return self.rates.expert(isa, fmt, dims.expert_width, dims.expert_intermediate, products)

    @cached_property
    def expert_weight_bytes(self) -> float:
        """Bytes of one expert of one layer as held in memory."""
        return self.plan.dims.held_bytes(self.plan.experts[0].backend)

    # -- messages ----------------------------------------------------------------------------

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        return self._message(worker, actors, direction, tokens, "out")

    def reply(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        return self._message(worker, actors, direction, tokens, "in")

    def _message(self, worker: int, actors: ExpertClass, direction: str, tokens: int, way: str) -> Carriage:
        key = (worker, actors, direction, tokens, way)  # layers are alike
        if key not in self._messages:
            self._messages[key] = self._carriage(
                worker, actors, tokens, self._row(actors, direction, way), way
            )
        return self._messages[key]

    @cached_property
    def _messages(self) -> dict[tuple[int, ExpertClass, str, int, str], Carriage]:
        return {}

    def _row(self, actors: ExpertClass, direction: str, way: str) -> int:
        """Bytes of a token, or of its answer, in a message."""
        dims = self.plan.dims
        if way == "out":
            ids = dims.experts_per_token * 8 + 8 if direction == "forward" else 0
            return dims.expert_width * self._sent_bytes(direction) + ids
        weights = dims.experts_per_token * 4 if direction == "backward" else 0
        return dims.expert_width * ELEMENT_BYTES[self.plan.experts[actors.actors[0]].answers] + weights

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        dims = self.plan.dims
        size = tokens * dims.hidden_size * dims.hidden_streams * ELEMENT_BYTES[self.plan.dtype]
        legs = (*self._pcie(worker, size, "out"), *self._doorbell(worker), *self._pcie(to, size, "in"))
        if self._under_ray and not self._shares_memory:
            legs = (*legs, Leg(self._homes[worker], size / self.rates.transport.ray_bytes.value))
        return Carriage(legs)

    def shelf(self, worker: int, group: Group, way: str) -> Carriage:
        dims = self.plan.dims
        positions = sum(m.rows * m.width for m in group)
        streams = dims.hidden_streams + (self.plan.attention_output == "retain")
        size = positions * dims.hidden_size * streams * ELEMENT_BYTES[self.plan.dtype]
        return Carriage(self._pcie(worker, size, way))

    def weights(self, worker: int, layer: int) -> Carriage:
        size = layer_table(self.plan.dims, self.config, self.plan.dtype).weight_bytes[layer]
        if self.on_gpu:
            return Carriage(self._pcie(worker, size, "in"))
        return Carriage((Leg(self._homes[worker], size / self.rates.memory.copy_one.value),))

    def _carriage(self, worker: int, actors: ExpertClass, tokens: int, row: int, way: str) -> Carriage:
        """Device to host, to the actors; or back. Actors of the worker's host read shared memory; to far
        ones, and where rule.transport rules shared memory out, go the tokens that have an expert there."""
        transport = self.rates.transport
        shared = not actors.far and (self._shares_memory or not self._under_ray)
        size = row * (tokens if shared else len(actors.actors) * self.routed(actors.actors[0], tokens))
        # Tokens come to the host once, for all actors: each of their messages takes its part of the copy.
        messages = sum(len(c.ways) for c in self.machine.experts)
        crossing = tokens * row / messages if way == "out" else size
        pcie = self._pcie(worker, crossing, way)
        latency = 0.0
        if shared:
            middle = self._doorbell(worker)
        elif actors.far:
            # Where all hosts do the same, a host's link carries out what it carries in: own tokens and the
            # answers to others there, and back. One direction stands for both.
            link = f"network {way}" if self.machine.hosts == 1 else "network out"
            middle = (Leg(link, size / transport.network_bytes.value),)
            if self.plan.transport.far == "ray":  # inside the calls: serialised and taken apart on a core
                packed = Leg(self._homes[worker], size / transport.ray_bytes.value)
                middle = (packed, *middle) if way == "out" else (*middle, packed)
            latency = transport.call.value + transport.network_latency.value
        else:
            packer = self._homes[worker] if way == "out" else actors.seat.resource
            middle = (Leg(packer, transport.call.value + size / transport.ray_bytes.value),)
        return Carriage((*pcie, *middle) if way == "out" else (*middle, *pcie), latency)

    def routed(self, actor: int, tokens: int) -> float:
        """Tokens of `tokens` that choose an expert of this actor, at even routing."""
        dims = self.plan.dims
        counts = self.plan.experts[actor].counts(dims.moe_layers)
        return tokens * touched(dims.choices, sum(counts) / len(counts), dims.experts_per_token)

    def _pcie(self, worker: int, size: float, way: str) -> tuple[Leg, ...]:
        link = self.rates.link
        if not self.on_gpu or link is None:
            return ()
        rate = link.to_host if way == "out" else link.to_device
        return (Leg(f"pcie {self.plan.workers[worker].place} {way}", size / rate.value),)

    def _doorbell(self, worker: int) -> tuple[Leg, ...]:
        """A message between actors of a host takes a core's time: serialised, sent, taken up."""
        transport = self.rates.transport
        one = (
            (transport.arena if self._shares_memory else transport.call)
            if self._under_ray
            else transport.local
        )
        return (Leg(self._homes[worker], one.value),)

    @cached_property
    def _homes(self) -> list[str]:
        """The socket whose cores each worker's host side uses."""
        return [home_socket(worker, self.plan.hardware) for worker in self.plan.workers]

    # -- the step's end ----------------------------------------------------------------------

    def pass_end(self) -> float:
        return self._driver_seconds

    @cached_property
    def _driver_seconds(self) -> float:
        call = self.rates.transport.call if self._under_ray else self.rates.transport.local
        one = self.rates.cpu_one
        return 2 * call.value + dispatch_seconds(PASS_OPS, one, one)

    def phases(self) -> tuple[Phase, ...]:
        """prepare: gradients and their norms. commit: AdamW, adapters back."""
        plan, dims, lora, rates = self.plan, self.plan.dims, self.config.lora, self.rates
        copied, optimizer = rates.memory.copy_one.value, rates.optimizer.value
        small = dispatch_seconds(PARAMETER_OPS, rates.cpu_one, rates.cpu_one)
        adapters = [lora_params(dims, lora, layer) for layer in range(dims.num_layers)]
        total = sum(adapters)
        matrices = [2 * sum(rank > 0 for *_, rank, _ in work.modules) for work in self.layers]
        norms, steps = [], []
        # Gradients of other hosts' replicas come to worker 0 over its host's link, updated weights go back.
        far = plan.replicas - plan.replicas // plan.attention_hosts
        crossing = far * total * 4 / rates.transport.network_bytes.value
        for worker in plan.workers[: len(self.machine.workers)]:
            own = sum(adapters[slice(*worker.layers)])
            count = sum(matrices[slice(*worker.layers)])
            root = worker.rank == 0  # holds the masters of all stages
            summed = crossing + total * (SUM_BYTES / 2 + 4 + far * ADD_BYTES / 2) / copied if root else 0.0
            norms.append(own * 8 / copied + summed + count * small)
            applied = crossing + total * 4 / copied + total / optimizer if root else 0.0
            steps.append(own * 8 / copied + applied + 2 * count * small)
        expert_norms, expert_steps = [], []
        per_expert = expert_lora_params(dims, lora)
        # Copies of an expert send one another the gradients of each one's own layers, then updated weights. A
        # host's actors share its link.
        others = 1 - 1 / plan.copies
        with_lora = expert_lora_layers(dims, lora)
        on_link = sum(sum(a.counts(with_lora)) for a in plan.experts if a.host == 0) * per_expert
        swapped = others * on_link * 4 / rates.transport.network_bytes.value
        for c in self.machine.experts:
            actor = plan.experts[c.actors[0]]
            params = per_expert * sum(actor.counts(with_lora))
            share = min(1.0, actor.threads / max(1, rates.cpu_all.threads))
            copying = self.copied_per_second(actor.threads)
            count = 6 * len(with_lora) if params else 0
            updated, added = params / plan.copies, params * others * ADD_BYTES / 2 / copying
            expert_norms.append(swapped + added + updated * 4 / 2 / copying + 2 * count * small)
            stepped = updated / (optimizer * share) + params * 2 / copying
            expert_steps.append(swapped + stepped + 2 * count * small)
        end = self._driver_seconds
        return (
            Phase("norms", tuple(norms), tuple(expert_norms), end),
            Phase("optimizer", tuple(steps), tuple(expert_steps), end),
        )
