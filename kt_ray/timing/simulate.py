"""One training step, played through in events: who computes, who waits, and for what.

A pure function of the plan's programs (kt_ray.placement.order) and of durations. Every actor walks its
program as it does in a run: attention workers their operations, expert actors the planned calls; messages
carry tokens between them; a step is one or more passes (waves), each ended by all actors together, and the
phases of the optimizer.

What computes shares its resource with the others there: while more cores are asked for than the resource
has, everything on it slows down in proportion (processor sharing, as the kernel's scheduler does it). A
GPU, a link or a socket that one actor has to itself is the case in which nothing slows down.

Legend: an actor's width is the number of cores (or whatever its resource counts) it keeps busy while it
computes; durations are those of an actor alone on its resource.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kt_ray.placement.order import expert_order, worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.weight_slots import Filled, WeightSlots
from kt_ray.timing.event_loop import (
    Actor,
    Busy,
    Carriage,
    Leg,
    Program,
    Seat,
    Send,
    SimulatedSpan,
    Stretch,
    Wait,
    play,
)

# -- what is given, and what comes out -----------------------------------------------------------


class Micro(NamedTuple):
    """A micro-batch: rows x width positions are computed, `tokens` of them are no padding, `trained` have
    a loss."""

    rows: int
    width: int
    tokens: int
    trained: int


Group = tuple[Micro, ...]  # the micro-batches of one group of one replica
WaveShape = tuple[tuple[Group, ...], ...]  # per replica, per group: what one pass takes


class Phase(NamedTuple):
    """A part of a step in which all actors work side by side, and which ends when the last one does.

    workers, experts: seconds of every attention worker and of every expert class; overhead: seconds of the
    driver afterwards.
    """

    name: str
    workers: tuple[float, ...]
    experts: tuple[float, ...]
    overhead: float = 0.0


class ExpertClass(NamedTuple):
    """Expert actors that do the same work at the same time, simulated as one.

    far: on another host than attention. others: those on other hosts with attention, where they do for their
    host what `actors` do for the first.
    """

    actors: tuple[int, ...]
    seat: Seat
    far: bool = False
    others: tuple[int, ...] = ()

    @property
    def ways(self) -> tuple[ExpertClass, ...]:
        """Whom a worker of the first host reaches: these actors, and the others over the network."""
        near = self._replace(others=())
        return (near, near._replace(actors=self.others, far=True)) if self.others else (near,)


class Machine(NamedTuple):
    """Who shares what. capacity: of every resource that is not 1.

    hosts: so many hosts of a copy of the experts do the same at the same time, with as many workers on each;
    only the first is simulated. What it sends to the others is then also what they send it. copies: of the
    experts, which do the same at the same time, too.
    """

    capacity: Mapping[str, float]
    workers: tuple[Seat, ...]
    experts: tuple[ExpertClass, ...]
    hosts: int = 1
    copies: int = 1


class ExpertCall(NamedTuple):
    """Seconds of an expert actor's cores in a call: beside its GPUs, after both, and once its answers have
    left."""

    beside: float
    after: float
    late: float = 0.0


class LaneCall(NamedTuple):
    """What a GPU does of an expert actor's call, beside the CPU, in seconds alone on its resource.

    device: "cuda:i". ahead: on the link, and routing: on a core of the actor's, before anything is computed.
    dispatch: on a core, after routing. copies: on the link, products: on the GPU, kept: on the link to the
    host, all at once. last: on the GPU, after the copies. back: on the link to the host, after all that.
    """

    device: str
    ahead: float
    copies: float
    products: float
    dispatch: float
    back: float
    last: float = 0.0
    kept: float = 0.0
    routing: float = 0.0


class WorkerLaneCall(NamedTuple):
    """What a worker's GPU computes of its own tokens' experts, in seconds alone on the resource.

    device: "cuda:i". home: the socket of the worker's host side. asked: ids on the link to the host; then
    routing on a core: before anything is computed. entering: on the link, likewise. copies, copies_ahead: of
    experts on the link, those of the latter while the layer before is computed. products, products_ahead,
    products_there: on the GPU, of these experts and of those that the call before left. dispatch: on a core;
    leaving: on the link to the host, beside all that. gradients: on it, afterwards. sent: part of the tokens
    that go to expert actors nevertheless.
    """

    device: str
    home: str
    asked: float
    routing: float
    entering: float
    copies: float
    copies_ahead: float
    products: float
    products_ahead: float
    products_there: float
    dispatch: float
    leaving: float
    gradients: float
    sent: float


# Parts in which a worker's lane copies experts and computes them; a few stand for many batches. Of those that
# are copied at the call the first is one batch, of those copied ahead all are alike.
AT_CALL, COPIED_AHEAD = (1 / 16, 5 / 16, 5 / 16, 5 / 16), (1 / 3, 1 / 3, 1 / 3)


class Durations(Protocol):
    """Seconds of everything, an actor alone on its resource.

    Asked for in the order of every actor's own program, once for each operation, call and message.
    """

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        """An operation of a worker program ("begin" before the first one): seconds before what it sends
        leaves, and after that."""

    def expert(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> ExpertCall:
        """A call of expert actor `actor` (the first of its class) for `tokens` tokens of all replicas. call:
        how many of the same layer came before it."""

    def lane(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> tuple[LaneCall, ...]:
        """The same call's parts on GPUs, at the same time; one per GPU that has one."""

    def worker_lane(
        self, worker: int, layer: int, direction: str, tokens: int, *, call: int
    ) -> WorkerLaneCall | None:
        """What a worker computes of its own `tokens` of a call; None = nothing."""

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        """Tokens of one worker, or their gradients, on the way to a class of expert actors."""

    def reply(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        """The way back."""

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        """Hidden states or their gradients from stage to stage."""

    def shelf(self, worker: int, group: Group, way: str) -> Carriage:
        """A group's hidden states before a layer to host memory ("out") and back ("in")."""

    def weights(self, worker: int, layer: int) -> Carriage:
        """A streamed layer's weights from host memory."""

    def pass_end(self) -> float:
        """The driver's seconds between passes."""

    def phases(self) -> tuple[Phase, ...]:
        """What follows the last pass of a step."""


@dataclass(frozen=True)
class Simulated:
    """A step."""

    seconds: float  # wall time
    pass_seconds: float  # of all passes; the rest are the optimizer's phases
    # seconds that every actor would compute alone on its resource, by its name ("worker 0", "experts 3"; a
    # class has its first actor's name)
    work: Mapping[str, float]
    used: Mapping[str, float]  # resource -> share of its capacity used over the step
    idle: Mapping[str, Mapping[str, float]]  # actor -> reason -> seconds
    # seconds of the step's longest chain by what it went through: "attention", "experts", "call" (latency), a
    # link's name, or a phase's. They add up to `seconds`
    path: Mapping[str, float]
    events: tuple[SimulatedSpan, ...] = ()  # what every actor did, when asked for

    @property
    def busy(self) -> dict[str, float]:
        """`work` over `seconds`."""
        return {name: value / self.seconds if self.seconds else 0.0 for name, value in self.work.items()}

    @property
    def critical(self) -> str:
        """The resource used most."""
        return max(self.used, key=self.used.__getitem__, default="")


# -- the simulation ------------------------------------------------------------------------------


def simulate(
    plan: Plan, machine: Machine, durations: Durations, waves: Sequence[WaveShape], *, events: bool = False
) -> Simulated:
    """One step of `waves` passes.

    Args:
        machine: seats of the plan's workers and expert actors.
        waves: what each pass takes; every one has the plan's replicas and groups.
        events: keep what every actor did.

    Raises:
        ValueError: seats or waves do not fit the plan.
    """
    seated = sorted(actor for c in machine.experts for actor in (*c.actors, *c.others))
    workers, experts = len(machine.workers) * machine.hosts * machine.copies, len(plan.experts)
    if workers != len(plan.workers) or seated != list(range(experts // machine.copies)):
        raise ValueError("the machine has other actors than the plan")
    if not waves or any(len(w) != plan.replicas or any(len(g) != plan.groups for g in w) for w in waves):
        raise ValueError(f"every wave takes {plan.replicas} replicas of {plan.groups} groups")
    run = _Step(plan, machine, durations, events)
    known: dict[WaveShape, Stretch] = {}
    total = Stretch()
    for wave in waves:
        if events or wave not in known:  # equal passes, which share nothing, take equally long
            known[wave] = run.one_pass(wave, total.seconds)
        total.add(known[wave])
    pass_seconds = total.seconds
    for phase in durations.phases():
        total.add(run.phase(phase, total.seconds))
    wall = total.seconds
    used = {
        name: value / (wall * machine.capacity.get(name, 1.0)) if wall else 0.0
        for name, value in sorted(total.used.items())
    }
    events_in_order = sorted(total.events, key=lambda e: (e.start, e.actor, e.end))
    return Simulated(wall, pass_seconds, total.work, used, total.idle, total.path, tuple(events_in_order))


class _Step:
    """The programs of the actors."""

    def __init__(self, plan: Plan, machine: Machine, durations: Durations, events: bool) -> None:
        self.events = events
        self.plan = plan
        self.machine = machine
        self.durations = durations
        self.moe = frozenset(plan.dims.moe_layers)
        self.ways = [way for c in machine.experts for way in c.ways]
        self.replicas = plan.replicas // plan.copies // machine.hosts  # those simulated

    # -- stretches ---------------------------------------------------------------------------

    def one_pass(self, wave: WaveShape, offset: float) -> Stretch:
        workers = [self._worker(rank, wave) for rank in range(len(self.machine.workers))]
        calls = [self._experts(c, wave) for c in self.machine.experts]
        lanes = [
            Actor(f"lane {c.actors[0]} {device}", Seat(device), self._lane(c, device, wave))
            for c in self.machine.experts
            for device in self._lane_devices(c)
        ]
        for rank in range(len(self.machine.workers)):
            own = self._lane_calls(rank, wave)
            if any(call for *_, call in own):
                device = self.plan.workers[rank].place
                computing = self._worker_lane(rank, own)
                lanes.append(Actor(f"lane of worker {rank}", Seat(device), computing))
                copying = self._worker_copies(rank, own)
                lanes.append(Actor(f"copies of worker {rank}", Seat(f"pcie {device} in"), copying))
        actors = [*self._seated(workers, calls), *lanes]
        return self._play(actors, offset, self.durations.pass_end(), "end of pass")

    def _play(self, actors: Sequence[Actor], offset: float, overhead: float, ending: str) -> Stretch:
        capacity = self.machine.capacity
        return play(actors, capacity, ending=ending, overhead=overhead, offset=offset, events=self.events)

    def _seated(self, workers: Iterable[Program], experts: Iterable[Program]) -> list[Actor]:
        seats = [(f"worker {rank}", seat) for rank, seat in enumerate(self.machine.workers)]
        seats += [(f"experts {c.actors[0]}", c.seat) for c in self.machine.experts]
        return [Actor(*seat, program) for seat, program in zip(seats, (*workers, *experts), strict=True)]

    def _lane_devices(self, c: ExpertClass) -> tuple[str, ...]:
        lane = self.plan.experts[c.actors[0]].lane
        return lane.devices if lane is not None and lane.cuda else ()

    def phase(self, phase: Phase, offset: float) -> Stretch:
        def only(seconds: float) -> Program:
            yield Busy(phase.name, phase.name, seconds)

        workers = map(only, phase.workers[: len(self.machine.workers)])
        experts = map(only, phase.experts)
        return self._play(self._seated(workers, experts), offset, phase.overhead, "optimizer")

    # -- programs ----------------------------------------------------------------------------

    def _worker(self, rank: int, wave: WaveShape) -> Program:
        plan, durations = self.plan, self.durations
        worker = plan.workers[rank]
        replica, stage = worker.replica, worker.stage
        groups = wave[replica]
        tokens = [sum(m.tokens for m in group) for group in groups]
        for group in groups:
            yield Busy("begin", "attention", sum(durations.attention("begin", worker.layers[0], group)))
        slots, filled = WeightSlots(worker.streamed, worker.slots), Counter[int]()
        slots.begin(wraps=False)

        def fill(part: Filled | None) -> Program:
            if part is not None:
                filled[part.layer] += 1
                tag = ("weights", part.layer, rank, filled[part.layer])
                yield Send(tag, durations.weights(rank, part.layer))

        def own(layer: int, direction: str, g: int) -> WorkerLaneCall | None:
            return durations.worker_lane(rank, layer, direction, tokens[g], call=g)

        for kind, layer, g in worker_program(plan, replica, stage, "train"):
            if kind.startswith("recv"):
                yield Wait((kind[5:], replica, stage, g), "other stages")
            elif kind == "join" or (kind == "backward" and layer in self.moe):
                direction = "forward" if kind == "join" else "backward"
                for c in self.ways:
                    yield Wait(("reply", direction, layer, g, c.actors[0], replica), "experts")
                if own(layer, direction, g) is not None:
                    yield Wait(("own done", layer, direction, g, rank), "lane")
            # Copied behind the computation, and back ahead of it: what waits for them is the link.
            if plan.activations == "host" and kind in ("forward", "recompute"):
                way = "out" if kind == "forward" else "in"
                yield Send(("shelf", way, layer, g, rank), durations.shelf(rank, groups[g], way))
            if layer in worker.streamed and kind in ("forward", "recompute"):
                if kind == "recompute":
                    slots.hold(layer)
                yield from fill(slots.bring(layer))
                yield Wait(("weights", layer, rank, filled[layer]), "transfer")
                yield from fill(slots.ahead(layer, downwards=kind == "recompute"))
            before, after = durations.attention(kind, layer, groups[g])
            if before:
                yield Busy(f"{kind} {layer}.{g}", "attention", before)
            if layer in self.moe and kind in ("forward", "recompute"):
                direction = "forward" if kind == "forward" else "backward"
                here = own(layer, direction, g)
                settled = () if here is None else settling(here)
                if here is not None:
                    yield Send(("own", layer, direction, g, rank), Carriage(settled))
                for c in self.ways:
                    # What the lane sorts is counted first, for all actors together.
                    counted = tuple(leg._replace(seconds=leg.seconds / len(self.ways)) for leg in settled)
                    carriage = durations.request(rank, c, direction, self._sent(here, c, tokens[g]))
                    carriage = carriage._replace(legs=(*counted, *carriage.legs))
                    yield Send((direction, layer, g, c.actors[0], replica), carriage)
                if not plan.overlap:
                    for c in self.ways:
                        yield Wait(("reply", direction, layer, g, c.actors[0], replica), "experts")
            elif kind.startswith("send"):
                to = stage + (1 if kind == "send_hidden" else -1)
                yield Send((kind[5:], replica, to, g), durations.stage(rank, rank + to - stage, tokens[g]))
            if after:
                yield Busy(f"{kind} {layer}.{g}", "attention", after)
            if plan.activations == "host" and kind == "backward":
                yield Wait(("shelf", "in", layer, g, rank), "transfer")
            if layer in worker.streamed and kind == "backward":
                slots.release(layer)

    def _experts(self, c: ExpertClass, wave: WaveShape) -> Program:
        plan, actor, ways = self.plan, c.actors[0], c.ways
        owner = {
            (w.replica, layer): w.rank
            for w in plan.workers
            for layer in range(*w.layers)
            if layer in self.moe
        }
        tokens = [[sum(m.tokens for m in group) for group in groups] for groups in wave]
        for layer, direction, g in expert_order(plan, "train"):
            # The other hosts' tokens come when this host's workers' would come to the others.
            for replica in range(self.replicas):
                for way in ways:
                    yield Wait((direction, layer, g, way.actors[0], replica), "attention")
            together = sum(part[g] for part in tokens[: len(plan.replicas_of(0))])
            own = self.durations.expert(actor, layer, direction, together, call=g)
            lane = self.durations.lane(actor, layer, direction, together, call=g)
            for call in lane:
                yield Send(("lane", layer, direction, g, actor, call.device), Carriage())
            yield Busy(f"{direction} {layer}.{g}", "experts", own.beside)
            for call in lane:
                yield Wait(("lane done", layer, direction, g, actor, call.device), "lane")
            yield Busy(f"add {layer}.{g}", "experts", own.after)
            for replica in range(self.replicas):
                for way in ways:
                    worker = owner[replica, layer]
                    here = self.durations.worker_lane(worker, layer, direction, tokens[replica][g], call=g)
                    sent = self._sent(here, way, tokens[replica][g])
                    carriage = self.durations.reply(worker, way, direction, sent)
                    yield Send(("reply", direction, layer, g, way.actors[0], replica), carriage)
            yield Busy(f"gradients {layer}.{g}", "experts", own.late)

    def _lane(self, c: ExpertClass, device: str, wave: WaveShape) -> Program:
        """The thread that has a GPU compute its part of the actor's calls."""
        actor = c.actors[0]
        own = wave[: len(self.plan.replicas_of(0))]
        tokens = [sum(m.tokens for part in own for m in part[g]) for g in range(self.plan.groups)]
        for layer, direction, g in expert_order(self.plan, "train"):
            calls = self.durations.lane(actor, layer, direction, tokens[g], call=g)
            call = next((call for call in calls if call.device == device), None)
            if call is None:
                continue
            about = (layer, direction, g, actor, device)
            into, back = f"pcie {device} in", f"pcie {device} out"
            yield Wait(("lane", *about), "experts")
            yield Send(("lane ahead", *about), Carriage((Leg(into, call.ahead),)))
            yield Send(("lane routing", *about), Carriage((Leg(c.seat.resource, call.routing),)))
            yield Wait(("lane routing", *about), "dispatch")
            yield Send(("lane kernels", *about), Carriage((Leg(c.seat.resource, call.dispatch),)))
            yield Wait(("lane ahead", *about), "transfer")
            yield Send(("lane copies", *about), Carriage((Leg(into, call.copies),)))
            yield Send(("lane kept", *about), Carriage((Leg(back, call.kept),)))
            yield Busy(f"{direction} {layer}.{g}", "lane", call.products)
            yield Wait(("lane copies", *about), "transfer")
            yield Busy(f"{direction} {layer}.{g}", "lane", call.last)
            yield Wait(("lane kept", *about), "transfer")
            yield Wait(("lane kernels", *about), "dispatch")
            yield Send(("lane done", *about), Carriage((Leg(back, call.back),)))

    @staticmethod
    def _sent(here: WorkerLaneCall | None, actors: ExpertClass, tokens: int) -> int:
        """Tokens that go to near actors. To far ones only those go anyway that have an expert there."""
        return tokens if here is None or actors.far else round(tokens * here.sent)

    def _lane_calls(self, rank: int, wave: WaveShape) -> list[_LaneCall]:
        """A worker's calls of layers with experts, in order, and what its lane has of them."""
        worker = self.plan.workers[rank]
        tokens = [sum(m.tokens for m in group) for group in wave[worker.replica]]
        calls = []
        for kind, layer, g in worker_program(self.plan, worker.replica, worker.stage, "train"):
            if layer in self.moe and kind in ("forward", "recompute"):
                way = "forward" if kind == "forward" else "backward"
                here = self.durations.worker_lane(rank, layer, way, tokens[g], call=g)
                calls.append(_LaneCall(layer, way, g, here))
        return calls

    def _worker_lane(self, rank: int, calls: Sequence[_LaneCall]) -> Program:
        """The thread that has a worker's GPU compute its own tokens' experts."""
        for layer, way, g, call in calls:
            if call is None:
                continue
            about, name = (layer, way, g, rank), f"{way} {layer}.{g}"
            into, out = f"pcie {call.device} in", f"pcie {call.device} out"
            yield Wait(("own", *about), "worker")
            yield Send(("own begun", *about), Carriage())
            yield Send(("own small", *about), Carriage((Leg(into, call.entering),)))
            yield Send(("own kernels", *about), Carriage((Leg(call.home, call.dispatch),)))
            yield Send(("own kept", *about), Carriage((Leg(out, call.leaving),)))
            yield Wait(("own small", *about), "transfer")
            yield Busy(name, "lane", call.products_there)
            for n, part in enumerate(COPIED_AHEAD if call.copies_ahead else ()):
                yield Wait(("copied ahead", *about, n), "transfer")
                yield Busy(name, "lane", call.products_ahead * part)
            for n, part in enumerate(AT_CALL if call.copies else ()):
                yield Wait(("copied", *about, n), "transfer")
                yield Busy(name, "lane", call.products * part)
            yield Wait(("own kernels", *about), "dispatch")
            yield Send(("own done", *about), Carriage())
            yield Send(("own gradients", *about), Carriage((Leg(out, call.gradients),)))
            yield Wait(("own kept", *about), "transfer")

    def _worker_copies(self, rank: int, calls: Sequence[_LaneCall]) -> Program:
        """The link that carries experts to a worker's GPU: a call's, and behind the last one of a layer those
        of the next layer that are copied ahead."""

        def ahead(layer: int, way: str, g: int, call: WorkerLaneCall | None) -> Program:
            for n, part in enumerate(COPIED_AHEAD if call and call.copies_ahead else ()):
                assert call is not None
                yield Busy(f"ahead {layer}.{g}", "copied ahead", call.copies_ahead * part)
                yield Send(("copied ahead", layer, way, g, rank, n), Carriage())

        for number, (layer, way, g, call) in enumerate(calls):
            if call is not None:
                yield Wait(("own begun", layer, way, g, rank), "worker")
            if number == 0:  # before it there is no layer
                yield from ahead(layer, way, g, call)
            for n, part in enumerate(AT_CALL if call and call.copies else ()):
                assert call is not None
                yield Busy(f"copy {layer}.{g}", "copies", call.copies * part)
                yield Send(("copied", layer, way, g, rank, n), Carriage())
            if number + 1 < len(calls) and calls[number + 1].group == 0:
                yield from ahead(*calls[number + 1])


class _LaneCall(NamedTuple):
    layer: int
    way: str
    group: int
    call: WorkerLaneCall | None


def settling(call: WorkerLaneCall) -> tuple[Leg, ...]:
    """What comes before anyone computes a call: ids to the host, and who gets which. The lane and the
    requests to actors both begin with it: ids, which leave once, are half of each."""
    return Leg(f"pcie {call.device} out", call.asked / 2), Leg(call.home, call.routing)
