"""The event simulation: small cases by hand, and what must hold for every plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kt_ray.config.schema import Config
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.event_loop import Carriage, Leg, Seat
from kt_ray.timing.simulate import (
    ExpertCall,
    ExpertClass,
    Group,
    LaneCall,
    Machine,
    Micro,
    Phase,
    Simulated,
    WaveShape,
    WorkerLaneCall,
    simulate,
)
from tests.placement.configs import make_config, make_hardware, small_dims

M = Micro(1, 8, 8, 8)


class Fixed:
    """Durations given outright. forward is (before the tokens leave, after)."""

    def __init__(self, **given: object) -> None:
        self.forward = given.get("forward", (1.0, 0.0))
        self.recompute = given.get("recompute", 1.0)
        self.backward = given.get("backward", 1.0)
        self.experts = given.get("experts", 1.0)
        self.carriage = given.get("carriage", Carriage())
        self.end = given.get("end", ())
        self.between = given.get("between", 0.0)
        self.on_gpu = given.get("on_gpu", ())
        self.own: Any = given.get("own")
        self.copied = float(given.get("copied", 0.0))  # type: ignore[arg-type]

    def attention(self, kind: str, layer: int, group: Group) -> tuple[float, float]:
        if kind == "forward":
            return self.forward  # type: ignore[return-value]
        return (0.0, float({"recompute": self.recompute, "backward": self.backward}.get(kind, 0.0)))  # type: ignore[arg-type]

    def expert(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> ExpertCall:
        return ExpertCall(float(self.experts), 0.0)  # type: ignore[arg-type]

    def lane(self, actor: int, layer: int, direction: str, tokens: int, *, call: int) -> tuple[LaneCall, ...]:
        return self.on_gpu  # type: ignore[return-value]

    def worker_lane(
        self, worker: int, layer: int, direction: str, tokens: int, *, call: int
    ) -> WorkerLaneCall | None:
        return self.own

    def request(self, worker: int, actors: ExpertClass, direction: str, tokens: int) -> Carriage:
        return self.carriage  # type: ignore[return-value]

    reply = request

    def stage(self, worker: int, to: int, tokens: int) -> Carriage:
        return Carriage()

    def weights(self, worker: int, layer: int) -> Carriage:
        return Carriage((Leg("link", self.copied),))

    def pass_end(self) -> float:
        return float(self.between)  # type: ignore[arg-type]

    def phases(self) -> tuple[Phase, ...]:
        return self.end  # type: ignore[return-value]


def plan_of(family: str = "mixtral", **changes: object) -> Plan:
    """A plan on the CPU, by default of a small model all of whose layers have experts."""
    config = make_config(**changes)
    return make_plan(small_dims(family), config, make_hardware())


def wave_of(plan: Plan) -> WaveShape:
    return (((M,),) * plan.groups,) * plan.replicas


def apart(plan: Plan) -> Machine:
    """Every actor on a resource of its own."""
    return Machine(
        {},
        tuple(Seat(f"w{w.rank}") for w in plan.workers),
        tuple(ExpertClass((e.rank,), Seat(f"e{e.rank}")) for e in plan.experts),
    )


def run(plan: Plan, durations: Fixed, machine: Machine | None = None, passes: int = 1) -> Simulated:
    return simulate(plan, machine or apart(plan), durations, [wave_of(plan)] * passes, events=True)


def small(groups: int, overlap: bool = True) -> Plan:
    """One worker, one expert actor, four layers with experts."""
    rule = {"groups": groups, "stages": 1, "overlap": overlap, "experts": {"sockets": 1}}
    return plan_of(rule=rule, trainer={"batch_size": 4})


def test_one_group_is_a_chain() -> None:
    """Forward: 4 x (attention, experts). Backward: experts run beside the recomputation, then backward."""
    plan = small(1)
    found = run(plan, Fixed(forward=(1.0, 0.0), recompute=1.0, backward=2.0, experts=3.0))
    assert found.seconds == pytest.approx(4 * (1 + 3) + 4 * (max(1, 3) + 2))
    assert found.work == pytest.approx({"worker 0": 4 * (1 + 1 + 2), "experts 0": 4 * 6})
    assert found.idle["worker 0"]["experts"] == pytest.approx(4 * 3 + 4 * 2)


def test_the_shared_expert_runs_beside_the_experts() -> None:
    plan = small(1)
    found = run(plan, Fixed(forward=(1.0, 2.0), recompute=0.0, backward=0.0, experts=3.0))
    assert found.seconds == pytest.approx(4 * (1 + 3) + 4 * 3)


def test_two_groups_hide_the_shorter_side() -> None:
    """While one group is in the experts the other is in attention: the experts never wait but at the ends."""
    plan = small(2)
    found = run(plan, Fixed(forward=(1.0, 0.0), recompute=0.5, backward=0.5, experts=2.0))
    # The last groups' joins hold the turn between forward and backward, and the last backward follows.
    assert found.seconds == pytest.approx(1 + 8 * 2 + 0.5 + 8 * 2 + 0.5, abs=1.01)
    assert found.busy["experts 0"] > 0.9
    assert found.critical == "e0"


def test_without_overlap_everything_adds_up() -> None:
    plan = small(2, overlap=False)
    found = run(plan, Fixed(forward=(1.0, 0.5), recompute=1.0, backward=2.0, experts=3.0))
    assert found.seconds == pytest.approx(8 * (1 + 3 + 0.5) + 8 * (3 + 1 + 2))


def test_messages_take_their_legs_and_latency() -> None:
    plan = small(1)
    still = run(plan, Fixed(recompute=0.0, backward=0.0))
    slow = run(
        plan,
        Fixed(recompute=0.0, backward=0.0, carriage=Carriage((Leg("net", 0.25), Leg("bus", 0.5)), 0.125)),
    )
    assert slow.seconds - still.seconds == pytest.approx(16 * 0.875)  # 8 requests and 8 replies, one by one
    assert slow.used["net"] == pytest.approx(16 * 0.25 / slow.seconds)
    assert slow.path["net"] == pytest.approx(16 * 0.25) and slow.path["call"] == pytest.approx(16 * 0.125)


def test_a_shared_link_is_divided() -> None:
    """Two classes' messages leave together over one link: both arrive after the sum of their seconds."""
    plan = plan_of(rule={"groups": 1, "stages": 1, "experts": {"sockets": 2}})
    found = run(
        plan, Fixed(forward=(0.0, 0.0), recompute=0.0, backward=0.0, carriage=Carriage((Leg("net", 1.0),)))
    )
    assert found.seconds == pytest.approx(8 * (2 + 1 + 2))


def test_cores_that_are_shared_slow_both_down() -> None:
    """Attention with two threads and experts with two threads on two cores: each at half speed."""
    plan = small(1)
    shared = Machine({"cpu": 2.0}, (Seat("cpu", 2.0),), (ExpertClass((0,), Seat("cpu", 2.0)),))
    durations = Fixed(forward=(0.0, 2.0), recompute=0.0, backward=0.0, experts=2.0)
    found = run(plan, durations, shared)
    assert found.seconds == pytest.approx(4 * 4 + 4 * 2)
    assert found.used["cpu"] == pytest.approx(1.0)
    one_each = Machine({"cpu": 2.0}, (Seat("cpu", 1.0),), (ExpertClass((0,), Seat("cpu", 1.0)),))
    assert run(plan, durations, one_each).seconds == pytest.approx(4 * 2 + 4 * 2)


def test_unequal_tasks_share_in_proportion() -> None:
    """3 s and 1 s start together on one core: the short one ends at 2 s, the long one at 4 s."""
    plan = small(1)
    shared = Machine({}, (Seat("cpu"),), (ExpertClass((0,), Seat("cpu")),))
    found = run(plan, Fixed(forward=(0.0, 3.0), recompute=0.0, backward=0.0, experts=1.0), shared)
    first = next(e for e in found.events if e.actor == "experts 0")
    assert (first.start, first.end) == pytest.approx((0.0, 2.0))
    long = next(e for e in found.events if e.name == "forward 0.0" and e.kind == "attention")
    assert long.end == pytest.approx(4.0)


def test_passes_and_phases_follow_each_other() -> None:
    plan = small(1)
    durations = Fixed(
        end=(Phase("norms", (1.0,), (2.0,), 0.5), Phase("optimizer", (4.0,), (3.0,))), between=0.25
    )
    one, three = run(plan, durations), run(plan, durations, passes=3)
    assert one.seconds - one.pass_seconds == pytest.approx(2.5 + 4.0)
    assert three.pass_seconds == pytest.approx(3 * one.pass_seconds)
    assert three.idle["worker 0"]["optimizer"] == pytest.approx(1.0)
    plain = simulate(plan, apart(plan), durations, [wave_of(plan)] * 3)
    assert plain.seconds == pytest.approx(three.seconds) and not plain.events


RULES = [
    {"stages": 1, "replicas": 1, "experts": {"sockets": 1}},
    {"stages": 2, "replicas": 1, "experts": {"sockets": 2}},
    {"stages": 1, "replicas": 2, "experts": {"sockets": 1}},
    {"stages": 2, "replicas": 2, "experts": {"sockets": 2}},
]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
@pytest.mark.parametrize(
    ("rule", "groups", "overlap"), list(itertools.product(RULES, (1, 2, 3, 4), (True, False)))
)
def test_what_holds_for_every_rule(family: str, rule: dict[str, object], groups: int, overlap: bool) -> None:
    changed = {**rule, "groups": groups, "overlap": overlap}
    plan = plan_of(family, rule=changed, trainer={"batch_size": 8})
    found = run(plan, Fixed(forward=(0.7, 0.4), recompute=1.3, backward=1.9, experts=1.1))
    assert all(0 < busy <= 1 + 1e-9 for busy in found.busy.values())
    assert all(used <= 1 + 1e-9 for used in found.used.values())
    assert found.seconds >= max(found.work.values()) - 1e-9  # no actor does its work faster than alone
    assert sum(found.path.values()) == pytest.approx(found.seconds)  # the longest chain explains the step
    for actor, work in found.work.items():  # alone on its resource, an actor works or waits
        assert work + sum(found.idle.get(actor, {}).values()) == pytest.approx(found.seconds), actor
    for name in {e.actor for e in found.events if e.kind in ("attention", "experts")}:
        own = sorted((e.start, e.end) for e in found.events if e.actor == name and e.kind != "transfer")
        assert all(a[1] <= b[0] + 1e-9 for a, b in itertools.pairwise(own)), f"{name} does two things at once"
    layers = plan.dims.num_layers
    assert found.seconds >= layers * (0.7 + 0.4 + 1.3 + 1.9) / plan.stages


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_slower_is_never_sooner_here(groups: int) -> None:
    """Every kind of duration, made longer in an overlapped plan, makes the step at least as long."""
    plan = small(groups)
    given = {"forward": (1.0, 0.5), "recompute": 1.0, "backward": 2.0, "experts": 1.5}
    base = run(plan, Fixed(**given)).seconds
    for name, value in given.items():
        more = tuple(2 * v for v in value) if isinstance(value, tuple) else 2 * value  # type: ignore[operator]
        assert run(plan, Fixed(**{**given, name: more})).seconds >= base, name


@pytest.mark.parametrize("groups", [2, 4])
def test_overlap_is_never_slower(groups: int) -> None:
    durations = Fixed(forward=(1.0, 0.5), recompute=1.0, backward=2.0, experts=2.0)
    assert run(small(groups), durations).seconds < run(small(groups, overlap=False), durations).seconds


def test_a_class_stands_for_its_actors() -> None:
    """Actors that are alike give the same step whether simulated one by one or as one."""
    plan = plan_of(rule={"groups": 2, "stages": 1, "experts": {"sockets": 2}})
    durations = Fixed(experts=1.7)
    both = Machine({}, (Seat("w0"),), (ExpertClass((0, 1), Seat("e0")),))
    assert run(plan, durations, both).seconds == pytest.approx(run(plan, durations).seconds)


def test_one_host_stands_for_all_that_do_the_same() -> None:
    """Four hosts of a worker and an expert actor take as long as one; its link also carries what the others
    send it."""
    rule = {"groups": 1, "stages": 1, "device": "cpu", "nodes": 4, "replicas": 4, "attention_hosts": "all"}
    plan = plan_of(rule=rule, trainer={"batch_size": 4})
    given = Fixed(carriage=Carriage((Leg("net", 0.1),)))
    machine = Machine({}, (Seat("w0"),), (ExpertClass((0,), Seat("e0"), others=(1, 2, 3)),), hosts=4)
    found = run(plan, given, machine)
    assert set(found.work) == {"worker 0", "experts 0"}
    one = run(small(1), Fixed(carriage=Carriage((Leg("net", 0.2),))))  # near and far messages share the link
    assert found.seconds == pytest.approx(one.seconds)
    assert found.used["net"] == pytest.approx(one.used["net"])


def test_spans_are_of_actors_and_links() -> None:
    found = run(small(2), Fixed(carriage=Carriage((Leg("net", 0.1),))))
    assert {span.actor for span in found.events} == {"worker 0", "experts 0", "net"}
    assert max(span.end for span in found.events) == pytest.approx(found.seconds)


def test_seats_and_waves_must_fit_the_plan() -> None:
    plan = small(2)
    with pytest.raises(ValueError, match="other actors"):
        simulate(plan, Machine({}, (), ()), Fixed(), [wave_of(plan)])
    with pytest.raises(ValueError, match="2 groups"):
        simulate(plan, apart(plan), Fixed(), [(((M,),),)])


def test_sixty_one_layers_on_many_nodes_take_seconds() -> None:
    """61 layers, 8 groups, 16 actors one by one: the loop stays fast enough to try many plans."""
    import time

    dims = small_dims("deepseek_v3", num_hidden_layers=61, n_routed_experts=64)
    config: Config = make_config(
        rule={"groups": 8, "stages": 1, "experts": {"sockets": 16}}, trainer={"batch_size": 8}
    )
    plan = make_plan(dims, config, make_hardware())
    start = time.process_time()
    found = simulate(plan, apart(plan), Fixed(), [wave_of(plan)])
    assert found.seconds > 0 and time.process_time() - start < 10


def lane_seconds(*calls: LaneCall) -> Simulated:
    """One call of 1 s on the CPU per direction and group, with a lane beside it; attention takes no time."""
    rule = {"stages": 1, "groups": 1, "experts": {"gpu_resident": 1}}
    config = make_config(rule=rule, trainer={"batch_size": 1, "micro_batch_size": 1})
    plan = make_plan(small_dims(num_hidden_layers=2), config, make_hardware(gpus=2))
    assert plan.dims.moe_layers == (1,)
    machine = Machine({"cores": 4.0}, (Seat("cuda:0"),), (ExpertClass((0,), Seat("cores", 2.0)),))
    given = Fixed(forward=(0.0, 0.0), recompute=0.0, backward=0.0, on_gpu=calls)
    return simulate(plan, machine, given, ((((M,),),),))


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (LaneCall("cuda:0", 0.1, 0.2, 0.3, 0.1, 0.1), 1.0),  # hidden behind the CPU
        (LaneCall("cuda:0", 0.5, 2.0, 1.0, 0.5, 0.25), 2.75),  # copies
        (LaneCall("cuda:0", 0.5, 1.0, 2.0, 0.5, 0.25), 2.75),  # products
        (LaneCall("cuda:0", 0.5, 1.0, 1.0, 3.0, 0.25), 3.25),  # dispatch, also while x comes
        (LaneCall("cuda:0", 0.5, 2.0, 1.0, 0.5, 0.25, last=0.5), 3.25),  # computed after the copies
        (LaneCall("cuda:0", 0.5, 1.0, 2.0, 0.5, 0.25, last=0.5, kept=1.5), 3.25),  # behind the products
        (LaneCall("cuda:0", 0.5, 1.0, 1.0, 0.5, 0.25, kept=2.0), 2.75),  # before the results go
    ],
)
def test_a_call_ends_when_the_cpu_and_the_lane_have(call: LaneCall, seconds: float) -> None:
    found = lane_seconds(call)
    assert found.seconds == pytest.approx(2 * seconds)  # forward and backward
    assert found.work["experts 0"] == pytest.approx(2.0)
    assert found.work["lane 0 cuda:0"] == pytest.approx(2 * (call.products + call.last))
    assert sum(found.path.values()) == pytest.approx(found.seconds)
    assert lane_seconds().seconds == pytest.approx(2.0)


def test_a_call_ends_when_every_gpu_has() -> None:
    """Each with its own link."""
    slow, fast = LaneCall("cuda:0", 0.5, 2.0, 1.0, 0.1, 0.25), LaneCall("cuda:1", 0.5, 1.0, 1.5, 0.1, 0.25)
    found = lane_seconds(slow, fast)
    assert found.seconds == pytest.approx(2 * 2.75)
    assert found.used["pcie cuda:1 in"] == pytest.approx(1.5 / 2.75)
    assert lane_seconds(fast).seconds == pytest.approx(2 * 2.25)


def test_the_lane_shares_the_gpu_with_attention() -> None:
    """Attention of 1 s beside a lane of 1 s on the same GPU: both take 2."""
    rule = {"stages": 1, "groups": 1, "experts": {"gpu_resident": 1}}
    config = make_config(rule=rule, trainer={"batch_size": 1, "micro_batch_size": 1})
    plan = make_plan(small_dims(num_hidden_layers=2), config, make_hardware(gpus=1))
    given = Fixed(
        forward=(0.0, 1.0),
        recompute=0.0,
        backward=0.0,
        experts=0.0,
        on_gpu=(LaneCall("cuda:0", 0, 0, 1, 0, 0),),
    )
    experts = (ExpertClass((0,), Seat("cores")),)
    shared = simulate(plan, Machine({}, (Seat("cuda:0"),), experts), given, ((((M,),),),))
    apart = simulate(plan, Machine({}, (Seat("cuda:1"),), experts), given, ((((M,),),),))
    assert shared.seconds == pytest.approx(apart.seconds + 1.0)


def own_lane_seconds(layers: int = 1, groups: int = 1, **parts: float) -> Simulated:
    """Layers with experts that a worker computes itself; all else takes no time but 1 s of recomputation."""
    rule = {"stages": 1, "groups": groups, "experts": {"sockets": 1}}
    config = make_config(rule=rule, trainer={"batch_size": groups, "micro_batch_size": 1})
    plan = make_plan(small_dims(num_hidden_layers=1 + layers), config, make_hardware(gpus=1))
    machine = Machine({"cores": 4.0}, (Seat("cuda:0"),), (ExpertClass((0,), Seat("cores", 2.0)),))
    names = [name for name in WorkerLaneCall._fields if name not in ("device", "home")]
    own = WorkerLaneCall("cuda:0", "cores", **{name: parts.get(name, 0.0) for name in names})
    given = Fixed(forward=(0.0, 0.0), recompute=0.0, backward=0.0, experts=0.0, own=own)
    return simulate(plan, machine, given, ((((M,),) * groups,),))


@pytest.mark.parametrize(
    ("parts", "seconds"),
    [
        ({"asked": 0.5, "routing": 0.25, "entering": 0.25, "products_there": 1.0}, 2.0),  # in a chain
        ({"copies": 1.6, "products": 0.16}, 1.6 + 0.05),  # the last part is computed after all copies
        ({"copies": 0.16, "products": 1.6}, 0.01 + 1.6),  # behind the first batch
        ({"copies_ahead": 0.3, "products_ahead": 0.9}, 0.1 + 0.9),  # where no layer was before
        ({"products_there": 1.0, "dispatch": 3.0}, 3.0),
        ({"products_there": 1.0, "leaving": 0.5, "gradients": 0.5}, 1.0),  # nobody waits for these
    ],
)
def test_a_workers_own_experts(parts: dict[str, float], seconds: float) -> None:
    found = own_lane_seconds(**parts)
    # Before the second call, backward, there was one to copy beside.
    again = sum(parts.values()) - 0.3 if "copies_ahead" in parts else seconds
    assert found.seconds == pytest.approx(seconds + again)
    products = sum(size for name, size in parts.items() if name.startswith("products"))
    assert found.work["lane of worker 0"] == pytest.approx(2 * products)


def test_experts_are_copied_while_the_layer_before_is_computed() -> None:
    """Two layers, forward and backward: the link has the time of the layer before, and is waited for but
    once."""
    hidden = own_lane_seconds(2, copies_ahead=0.3, products_ahead=1.0)
    assert hidden.seconds == pytest.approx(0.1 + 4 * 1.0)
    waited = own_lane_seconds(2, copies=0.16, products=1.0)
    assert waited.seconds == pytest.approx(4 * (0.16 / 16 + 1.0))
    link = own_lane_seconds(2, copies_ahead=3.0, products_ahead=0.3)
    assert link.seconds == pytest.approx(4 * 3.0 + 0.1) and link.used["pcie cuda:0 in"] > 0.98


def test_streamed_weights_come_one_layer_ahead() -> None:
    """A copy is hidden behind the layer before, or is what is waited for."""
    rule = {"groups": 1, "experts": {"sockets": 1}}
    dims = small_dims("mixtral", num_hidden_layers=8)
    stay, streamed = (
        make_plan(dims, make_config(rule={**rule, **key}), make_hardware())
        for key in ({}, {"resident_layers": 0})
    )
    assert not stay.workers[0].streamed and len(streamed.workers[0].streamed) == 8
    seconds = {"forward": (1.0, 0.0), "recompute": 1.0, "backward": 2.0, "experts": 0.0}
    plain = run(stay, Fixed(**seconds, copied=100.0))
    assert plain.seconds == pytest.approx(8 * 4) and "link" not in plain.used
    # Eight copies upwards and six downwards: the last two are still there.
    hidden = run(streamed, Fixed(**seconds, copied=0.5))
    assert hidden.seconds == pytest.approx(8 * 4 + 0.5)
    assert hidden.used["link"] * hidden.seconds == pytest.approx(14 * 0.5)
    slow = run(streamed, Fixed(**seconds, copied=10.0))
    # The last copy is waited for; then one layer is recomputed and differentiated.
    assert slow.seconds == pytest.approx(14 * 10 + 3, abs=5)
    assert slow.used["link"] >= 0.95 and slow.path["link"] > 120
    assert slow.idle["worker 0"]["transfer"] == pytest.approx(slow.seconds - 8 * 4)
