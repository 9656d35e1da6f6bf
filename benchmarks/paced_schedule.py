#!/usr/bin/env python
"""Is the schedule of a real run on GPUs the simulated one? Shown without a GPU.

    python benchmarks/paced_schedule.py --wait-quiet 600 --json out.json
    python benchmarks/paced_schedule.py --cases "both" "2 replicas, both" --set rule.overlap=false

The run is real: attention workers with their layer loop, streamed layers and hidden states in host memory,
expert actors with engine and lane, their messages, in one process. The cards are not: a model as
Qwen3-235B-A22B, SHRINK times smaller in every width and in the length of its rows, runs on described cards
(described_card.py) that are as much slower, so that a copy or product takes as long as at full size: bytes
over SHRINK^2, FLOP over SHRINK^3. Everything then takes --slow times as long, so that this machine's own
work weighs little. Copies take the bytes that are copied and the lane's products the FLOP that it
multiplies; attention and the engine's calls take what the plan predicts. Every expert gets as many rows.
Plan and simulation are those of mode=plan at the same rates, for nominal hardware.

    run, simulated   seconds of a pass, from its first operation to the end of the last work on a card; the
                     run's is the quickest of --passes, as other programs only slow it down
    used             part of the pass for which a card, a link or a socket works; beside it the simulated one
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import add_common_arguments, quiet_machine, write_json
from described_card import Card, DescribedDriver, Done
from torch import Tensor

from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.batch import IGNORE, PassSpec, Wave, trained_tokens
from kt_ray.config.compose import compose
from kt_ray.config.schema import Config
from kt_ray.data.batches import step_waves
from kt_ray.data.row_types import Row
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.gpu import Driver, driver, use_driver
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import Curve, DeviceRate, ExpertRate, Figure, LinkRate, MemoryRate, Rates
from kt_ray.model.layer_calls import Handler
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.state import Graph, MicroState
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.timing.lane_products import lane_flops
from kt_ray.timing.lane_rates import from_rates
from kt_ray.timing.seats import machine_of, waves_of_rows
from kt_ray.timing.simulate import Micro, Simulated, simulate
from kt_ray.timing.step_costs import PlanDurations
from kt_ray.tools.random_checkpoint import Options, random_checkpoint

SHRINK = 32
# Qwen3-235B-A22B in BF16 with 4 layers, and half of its experts and of those that a token chooses.
WIDTHS = {"hidden_size": 4096, "moe_intermediate_size": 1536, "head_dim": 128, "vocab_size": 49152}
COUNTS = {"num_experts": 64, "num_experts_per_tok": 4}
LAYERS, ROW = 4, 2048 // SHRINK
TRAINED = 2  # tokens of a row: a head weighs little beside the layers of a whole model
COMMON = (
    "mode=plan",
    "rule=auto",
    "cluster=local",
    "data=demo",
    f"data.max_length={ROW}",
    "data.pad_to_multiple_of=1",
    "trainer.micro_batch_size=1",
    "lora.rank=1",
    "lora.alpha=2",
    "lora.dropout=0",
    "rule.stages=1",
    "rule.transport=auto",
)


@dataclass(frozen=True)
class Case:
    """A layout. rows: of a step, as long as full-size rows of 2,048 tokens."""

    hardware: str
    rows: int
    options: tuple[str, ...]


DESKTOP, SERVER = "1x4090_1x7950x", "2x4090_2x8488c"
CPU, ALL, BOTH = (f"rule.experts.stream={share}" for share in ("off", "0.99", "auto"))
WORKERS = "rule.experts.stream_to=workers"
SHARED = "rule.replicas=2"
CASES = {
    "cpu": Case(DESKTOP, 4, (CPU,)),
    "streamed": Case(DESKTOP, 8, (ALL, "rule.groups=4")),
    "both": Case(DESKTOP, 32, (BOTH, "rule.groups=4")),
    "both, layers streamed": Case(DESKTOP, 32, (BOTH, "rule.groups=4", "rule.resident_layers=0")),
    "workers": Case(DESKTOP, 32, (BOTH, WORKERS, "rule.groups=2")),
    "workers, layers streamed": Case(DESKTOP, 32, (BOTH, WORKERS, "rule.groups=2", "rule.resident_layers=0")),
    "both, hidden states on the host": Case(DESKTOP, 32, (BOTH, "rule.groups=4", "rule.activations=host")),
    "2 replicas, cpu": Case(SERVER, 32, (CPU, SHARED)),
    "2 replicas, streamed": Case(SERVER, 32, (ALL, SHARED)),
    "2 replicas, both": Case(SERVER, 32, (BOTH, SHARED)),
    "2 replicas, workers": Case(SERVER, 32, (BOTH, WORKERS, SHARED)),
    "2 replicas, both, layers streamed": Case(SERVER, 32, (BOTH, SHARED, "rule.resident_layers=0")),
    "2 replicas, both, hidden states on the host": Case(SERVER, 32, (BOTH, SHARED, "rule.activations=host")),
}


# -- the same machine for a smaller model --------------------------------------------------------------------


def shrunk(rates: Rates, slow: float) -> Rates:
    """Rates at which a model as much smaller in width and length takes `slow` times as long, operation by
    operation.

    Nothing costs more for being an operation: what this host takes to dispatch one is in the run.
    """
    why = f"for a model {SHRINK} times smaller"
    flop, byte = SHRINK**-3 / slow, SHRINK**-2 / slow

    def curve(curve: Curve) -> Curve:
        return Curve(tuple(at / SHRINK for at in curve.at), curve.scaled(flop, why).values, curve.source)

    def device(rate: DeviceRate) -> DeviceRate:
        return replace(
            rate,
            gemm={kind: curve(of) for kind, of in rate.gemm.items()},
            memory=rate.memory.scaled(byte, why),
            sdpa=rate.sdpa.scaled(flop, why),
            softmax=rate.softmax.scaled(byte, why),
            operation=Figure(0.0, why),
            blocks=None,
        )

    def experts(rate: ExpertRate) -> ExpertRate:
        names = ("forward", "backward", "forward_all", "backward_all")
        made = {name: curve(getattr(rate, name)) for name in names}
        return replace(rate, hidden=rate.hidden // SHRINK, inter=rate.inter // SHRINK, **made)

    def bytes_of(rate: Any) -> Any:
        fields = {f.name: getattr(rate, f.name).scaled(byte, why) for f in dataclasses.fields(rate)}
        return replace(rate, **fields)

    link: LinkRate | None = None if rates.link is None else bytes_of(rates.link)
    memory: MemoryRate = bytes_of(rates.memory)
    return replace(
        rates,
        experts=tuple(map(experts, rates.experts)),
        memory=memory,
        cpu_one=device(rates.cpu_one),
        cpu_all=device(rates.cpu_all),
        gpu=None if rates.gpu is None else device(rates.gpu),
        link=link,
    )


def checkpoint(into: Path) -> Path:
    """The smaller model's, random."""
    options = [f"{key}={value // SHRINK}" for key, value in WIDTHS.items()]
    options += [f"{key}={value}" for key, value in COUNTS.items()]
    random_checkpoint(
        "qwen3_235b_a22b",
        str(into),
        Options(format="bf16", layers=LAYERS, changes=tuple(options)),
        shard_bytes=1 << 30,
    )
    return into


@dataclass(frozen=True)
class Planned:
    """A case's plan and how long everything in it takes."""

    config: Config
    plan: Plan
    durations: PlanDurations

    @classmethod
    def of(cls, model: Path, case: Case, slow: float = 1.0, options: Sequence[str] = ()) -> Planned:
        config = compose(
            [
                f"model.path='{model}'",
                f"plan.hardware={case.hardware}",
                *COMMON,
                f"trainer.batch_size={case.rows}",
                *case.options,
                *options,
            ]
        )
        hardware, dims = hardware_for(config), dims_from_dir(str(model))
        rates = shrunk(nominal_rates(hardware), slow)
        wanted = config.rule.experts.stream == "auto"
        chosen = from_rates(rates, config, hardware, dims) if wanted else None
        plan = make_plan(dims, config, hardware, lane_rates=chosen)
        return cls(config, plan, PlanDurations(plan, config, rates, machine_of(plan)))

    def simulated(self) -> Simulated:
        """A step of one pass."""
        rows = [(ROW, TRAINED)] * self.config.trainer.batch_size
        plan = self.plan
        (wave,) = waves_of_rows(rows, 1, plan.replicas, plan.groups, plan.wave)
        return simulate(self.plan, self.durations.machine, self.durations, [wave], events=True)

    @property
    def cards(self) -> dict[str, Card]:
        """By device of the run."""
        gpu, link = self.durations.rates.gpu, self.durations.rates.link
        assert gpu is not None and link is not None
        dims, tokens = self.plan.dims, self.call_tokens
        if self.plan.workers[0].lane is not None:  # a call of a card's lane has one replica's tokens
            tokens /= self.plan.replicas
        rows = max(1.0, tokens * dims.experts_per_token / dims.num_experts)
        rate = lane_flops(gpu, dims, self.config, rows)

        def product(count: int, _: int, inner: int, outer: int) -> float:
            return 2.0 * count * rows * inner * outer / rate

        return {
            f"cpu:{g.index}": Card(f"cuda:{g.index}", link.to_device.value, link.to_host.value, product)
            for g in self.plan.hardware.gpus
        }

    @property
    def call_tokens(self) -> float:
        """Of one call of the experts, all replicas together."""
        return self.config.trainer.batch_size * ROW / self.plan.groups


# -- the run ---------------------------------------------------------------------------------------------


class PacedLoop(LayerLoop):
    """The layer loop; its device takes as long as the plan predicts."""

    def __init__(self, planned: Planned, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._planned = planned
        self._left: Iterator[float] = iter(())  # seconds of the micro-batches that `backward` comes to
        self._name = ""

    def _seconds(self, kind: str, layer: int, micro: MicroState) -> tuple[float, float]:
        return self._planned.durations.attention(kind, layer, (_micro(micro),))

    def _compute(self, seconds: float, name: str) -> None:
        driver().compute(self.device, seconds, name)

    def _group(self, micro: MicroState) -> int:
        return next(g for g, state in enumerate(self.groups) if any(m is micro for m in state.micro))

    def _called(self, layer: int, micro: MicroState, graph: Graph) -> Tensor:
        kind = "recompute" if torch.is_grad_enabled() else "forward"
        before, after = self._seconds(kind, layer, micro)
        name = f"{kind} {layer}.{self._group(micro)}"
        # After the layer's weights are asked for, which its hook does, and before its experts are.
        handle = self.model.layers[layer].register_forward_pre_hook(lambda *_: self._compute(before, name))
        try:
            out = super()._called(layer, micro, graph)
        finally:
            handle.remove()
        self._compute(after, name)
        return out

    def join(self, layer: int, group: int) -> None:
        super().join(layer, group)
        for micro in self.groups[group].micro:
            self._compute(sum(self._seconds("join", layer, micro)), f"join {layer}.{group}")

    def loss(self, layer: int, group: int) -> None:
        super().loss(layer, group)
        for micro in self.groups[group].micro:
            self._compute(sum(self._seconds("loss", layer, micro)), f"loss.{group}")
        driver().mark(self.device).synchronize()  # its value is looked at

    def backward(self, layer: int, group: int) -> None:
        self._name = f"backward {layer}.{group}"
        self._left = iter([sum(self._seconds("backward", layer, m)) for m in self.groups[group].micro])
        super().backward(layer, group)

    def _differentiated(self, *args: Any) -> Tensor:
        self._compute(next(self._left), self._name)
        return super()._differentiated(*args)


def _micro(micro: MicroState) -> Micro:
    batch = micro.batch
    rows, width = batch.input_ids.shape
    return Micro(rows, width, batch.tokens, batch.loss_tokens)


class EvenStage(Stage):
    """All experts get as many rows, as the plan takes it, and each of other tokens."""

    def __init__(self, spec: StageSpec) -> None:
        super().__init__(spec)
        for context in self.model.experts.values():
            context.handled_by = functools.partial(self._evenly, context.handled_by)

    def _evenly(self, handled_by: Callable[[Handler], Any], handler: Handler) -> Any:
        def even(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            order = torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0))
            return handler(hidden, (order % self.num_experts).view(ids.shape).to(ids), weights)

        return handled_by(even)


class PacedStage(EvenStage):
    """A stage on a described card."""

    def __init__(self, planned: Planned, spec: StageSpec) -> None:
        self.loop = functools.partial(PacedLoop, planned)
        self._planned = planned
        super().__init__(spec)

    def begin(self, *args: Any) -> LayerLoop:
        driver().claim(self.device)
        return super().begin(*args)

    def _record(self, micro: MicroState, spec: PassSpec) -> MicroState:
        before, after = self._planned.durations.attention("begin", self.spec.layers[0], (_micro(micro),))
        driver().compute(self.device, before + after, "begin")
        return super()._record(micro, spec)


class PacedEngine:
    """An expert actor's engine; its calls, and copies around them, take as long as the plan predicts."""

    def __init__(self, engine: Any, planned: Planned, actor: int) -> None:
        self._engine, self._planned, self._actor = engine, planned, actor
        self._calls: list[tuple[int, str]] = []  # layer and direction of the last calls, all the same

    def forward(self, weights: Any, x: Tensor, *args: Any, **more: Any) -> Any:
        with self._lasting("forward", weights.layer):
            return self._engine.forward(weights, x, *args, **more)

    def backward(self, weights: Any, saved: Any, dy: Tensor, *args: Any, **more: Any) -> Any:
        with self._lasting("backward", weights.layer):
            return self._engine.backward(weights, saved, dy, *args, **more)

    @contextmanager
    def _lasting(self, direction: str, layer: int) -> Iterator[None]:
        start, call = time.monotonic(), (layer, direction)
        # What a layer's first call carried is there for the others, which carry more.
        before = self._calls = [one for one in self._calls if one == call]
        durations = self._planned.durations
        tokens = int(self._planned.call_tokens)  # of which it gets some, where workers have lanes
        seconds = durations.expert(self._actor, layer, direction, tokens, call=len(before)).beside
        before.append(call)
        yield
        self._until(start, direction, seconds)

    def join(self, parts: Sequence[Tensor], out: Tensor) -> Tensor:
        start = time.monotonic()
        made: Tensor = self._engine.join(parts, out)
        if parts[0].dtype != out.dtype:  # the answer is rounded; a call's own seconds have the rest
            self._until(start, "add", 3 * out.numel() / self._copied_per_second)
        return made

    def add_rows(self, parts: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> None:
        start, read = time.monotonic(), sum(values.nbytes for _, values in parts)
        self._engine.add_rows(parts, out)
        self._until(start, "add", (read / 2 + min(read, out.nbytes)) / self._copied_per_second)

    @property
    def _copied_per_second(self) -> float:
        return self._planned.durations.copied_per_second(self._planned.plan.experts[self._actor].threads)

    def _until(self, start: float, name: str, seconds: float) -> None:
        """Return `seconds` after `start`."""
        time.sleep(max(0.0, start + seconds - time.monotonic()))
        machine = self._planned.durations.machine
        seat = next(c.seat for c in machine.experts if self._actor in c.actors)
        driver().board.note(seat.resource, name, start, time.monotonic())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass(frozen=True)
class Run:
    """A pass as it ran: seconds; done: what cards, links and engines did, from its beginning."""

    seconds: float
    loss: float
    done: tuple[Done, ...]

    @property
    def used(self) -> dict[str, float]:
        """Part of the pass for which a resource was used by somebody."""
        found: dict[str, float] = {}
        for resource in {d.resource for d in self.done}:
            until = total = 0.0
            for d in sorted((d for d in self.done if d.resource == resource), key=lambda d: d.start):
                total += max(0.0, d.end - max(until, d.start))
                until = max(until, d.end)
            found[resource] = total / self.seconds
        return found


@contextmanager
def described(cards: Mapping[str, Card]) -> Iterator[DescribedDriver]:
    """Cards for all that is built inside."""
    before: Driver = driver()
    stand_in = DescribedDriver(cards)
    use_driver(stand_in)
    try:
        yield stand_in
    finally:
        use_driver(before)
        stand_in.board.close()


def wave_of(planned: Planned) -> Wave:
    """Rows of random tokens."""
    plan, generator = planned.plan, np.random.default_rng(0)
    rows = []
    for sample in range(planned.config.trainer.batch_size):
        ids = generator.integers(0, plan.dims.vocab_size, ROW)
        labels = np.where(np.arange(ROW) < ROW - TRAINED, IGNORE, ids)
        rows.append(Row(ids, labels, sample))
    (wave,) = step_waves(rows, 1, plan.replicas, plan.groups)
    return wave


@contextmanager
def cluster_of(model: Path, planned: Planned, build: Callable[[StageSpec], Stage]) -> Iterator[LocalCluster]:
    """A started one; cards are CPUs by name."""
    plan = here(planned.plan)
    specs = replace(actor_specs(plan, planned.config, str(model)), build_stage=build)
    cluster = LocalCluster(plan, specs)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.shutdown()


def a_pass(planned: Planned, number: int = 1) -> PassSpec:
    wave = wave_of(planned)
    return PassSpec(number, 0, "train", 3, wave, trained_tokens(wave), timeline=True)


def run_case(model: Path, planned: Planned, passes: int = 1) -> list[Run]:
    """Passes of the same tokens, after one that warms up if there are several."""
    runs = []
    build = functools.partial(PacedStage, planned)
    with described(planned.cards) as cards, cluster_of(model, planned, build) as cluster:
        for handle in cluster.experts:
            assert isinstance(handle, LocalHandle)
            local = handle.actor.experts
            local.engine = PacedEngine(local.engine, planned, local.spec.rank)
        for number in range(passes + (passes > 1)):
            cards.board.done.clear()
            report = cluster.run_pass(a_pass(planned, number + 1))
            for stream in cards.streams.values():
                stream.synchronize()
            actors = [r.activity for r in (*report.workers, *report.experts)]
            begun = min(a.start for a in actors)
            ended = max(*(a.end for a in actors), *(d.end for d in cards.board.done))
            done = (d._replace(start=d.start - begun, end=d.end - begun) for d in cards.board.done)
            in_order = tuple(sorted(done, key=lambda d: (d.start, d.end)))
            runs.append(Run(ended - begun, report.loss, in_order))
            cluster.discard()
    return runs[passes > 1 :]


def here(plan: Plan) -> Plan:
    """The plan with described cards for GPUs, and one thread for everybody."""

    def device(name: str) -> str:
        return name.replace("cuda", "cpu")

    workers = (
        replace(
            w,
            device=device(w.device),
            threads=1,
            cpus=(),
            lane=None if w.lane is None else replace(w.lane, devices=(device(w.device),)),
        )
        for w in plan.workers
    )
    experts = (
        replace(
            a,
            threads=1,
            cpus=(),
            node=0,
            isa="auto",
            lane=None if a.lane is None else replace(a.lane, devices=tuple(map(device, a.lane.devices))),
        )
        for a in plan.experts
    )
    return replace(plan, workers=tuple(workers), experts=tuple(experts))


def record(name: str, planned: Planned, runs: Sequence[Run], slow: float) -> dict[str, Any]:
    plan, simulated = planned.plan, planned.simulated()
    quickest = min(runs, key=lambda run: run.seconds)
    whole = simulated.seconds / simulated.pass_seconds  # `used` is of a step, with the optimizer's phases
    used = {
        key: {"run": part, "simulated": simulated.used[key] * whole} for key, part in quickest.used.items()
    }
    busiest = max(used, key=lambda key: used[key]["run"])
    lane = next((a.lane for a in (*plan.workers, *plan.experts) if a.lane is not None), None)
    per_lane = int(planned.call_tokens) // (plan.replicas if plan.workers[0].lane is not None else 1)
    return {
        "case": name,
        "hardware": plan.hardware.source,
        "slow": slow,
        "tokens": planned.config.trainer.batch_size * ROW * SHRINK,
        "replicas": plan.replicas,
        "groups": plan.groups,
        "activations": plan.activations,
        "streamed_layers": len(plan.workers[0].streamed),
        "streamed_experts": 0.0 if lane is None else lane.share(per_lane),
        "streamed_to": "workers" if plan.workers[0].lane is not None else "actors",
        "run_s": quickest.seconds,
        "all_run_s": [run.seconds for run in runs],
        "simulated_s": simulated.pass_seconds,
        "run_over_simulated": quickest.seconds / simulated.pass_seconds,
        "busiest": busiest,
        "busiest_used": used[busiest],
        "used": used,
        "loss": quickest.loss,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further options, for all")
    parser.add_argument("--slow", type=float, default=3.0, help="how much slower than at full size")
    parser.add_argument("--passes", type=int, default=3)
    add_common_arguments(parser)
    args = parser.parse_args(argv)
    about = quiet_machine(args.wait_quiet)
    smooth()
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        model = checkpoint(Path(scratch) / "model")
        for name in args.cases:
            planned = Planned.of(model, CASES[name], args.slow, args.set)
            made = record(name, planned, run_case(model, planned, args.passes), args.slow)
            records.append(made)
            part = made["busiest_used"]
            print(
                f"{name:<44} run {made['run_s']:6.2f} s, simulated {made['simulated_s']:6.2f} s "
                f"({made['run_over_simulated'] - 1:+.1%}); {made['busiest']} used {part['run']:.1%}, "
                f"simulated {part['simulated']:.1%}",
                flush=True,
            )
    if args.json:
        write_json(args.json, records, about)
    return 0


def smooth() -> None:
    """A thread that only hands work over does not wait for others' Python long, or for torch's threads."""
    sys.setswitchinterval(5e-4)
    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
