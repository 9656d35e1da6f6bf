"""What a plan is made of. Pure data: no torch, no ray, no transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.machine import Hardware, gpu_name
from kt_ray.placement.lane_share import UNTUNED, Tuning
from kt_ray.placement.transports import DEFAULT, Transport


@dataclass(frozen=True)
class LanePlan:
    """What an expert actor, or an attention worker for its own tokens, computes of the experts on GPUs
    (docs/streaming.md)."""

    devices: tuple[str, ...]  # "cuda:i" (the plan's ordinals) or "cpu", a stand-in
    # (layer, global ids) of the actor's experts that stay in the devices' memory, dealt out in turn
    resident: tuple[tuple[int, tuple[int, ...]], ...] = ()
    # (tokens of a call, share) ascending: from that many tokens on this share of the actor's other experts of
    # the layer, those with most tokens, is carried to the devices; none below the first
    shares: tuple[tuple[int, float], ...] = ()
    # carried experts of a layer whose weights stay on each device until another layer's are carried, so that
    # one copy of them serves all groups
    held: int = 0
    # of an attention worker's lane: experts of a layer that are copied while the layer before is computed, to
    # places of their own; in forward the same ones every time, which every call has streamed
    ahead: int = 0
    # as `shares`, for a layer's calls after the first: what is there is carried no more, and what they carry
    # comes on top; () = as for the first
    later: tuple[tuple[int, float], ...] = ()
    # whether gates and ups of carried and resident experts are computed again in backward, whatever the
    # engine does with its own: else they go to host memory and come back
    recompute: bool = False
    # whether frozen products are computed in FP8 (rule.experts.gpu_products)
    float8: bool = False
    # the GPUs' names in CUDA_VISIBLE_DEVICES, where the actor has a process of its own; "" = left as it is
    visible: str = ""
    # what to call each of `devices` in messages, where a process has numbers of its own; () = as it is
    named: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the devices, for messages."""
        return self.named or self.devices

    @property
    def cuda(self) -> bool:
        """Whether these are GPUs."""
        return "cpu" not in self.devices

    @property
    def streams(self) -> bool:
        """Whether experts are carried to the devices at all."""
        return bool(self.shares)

    def share(self, tokens: int, *, again: bool = False) -> float:
        """Share of the other experts that a call of so many tokens computes on the devices.

        Args:
            again: whether the call before was of the same layer.
        """
        shares = self.later if again and self.later else self.shares
        return next((share for least, share in reversed(shares) if tokens >= least), 0.0)


@dataclass(frozen=True)
class WorkerPlan:
    """One attention worker.

    rank: replica * stages + stage. layers: half-open range [start, stop). device: "cuda:i" (the
    plan's ordinal) or "cpu". threads: torch threads. cpus: CPUs it may use (empty = any). staging: bytes
    of shared memory for its messages, worst case. waiting: bytes of host memory for hidden states that wait
    for backward there, worst case. streamed: own layers whose weights wait in host memory and
    pass through so many slots on the device (kt_ray.placement.weight_slots). host: where it is; device and
    cpus are numbers of it. lane: experts of its host's actors that it computes for its own tokens
    (rule.experts.stream_to=workers); None = none.
    """

    rank: int
    replica: int
    stage: int
    layers: tuple[int, int]
    device: str
    threads: int
    cpus: tuple[int, ...] = ()
    staging: int = 0
    waiting: int = 0
    streamed: tuple[int, ...] = ()
    slots: int = 0
    host: int = 0
    lane: LanePlan | None = None

    @property
    def place(self) -> str:
        """Name of its device's budget, where that is a GPU."""
        return gpu_name(self.host, self.device)


class HoldsExperts:
    """Which experts one expert actor holds: of a plan's actor, and of what the actor is built from.

    experts: global ids held in every MoE layer that `by_layer` does not name. by_layer: (layer, ids) where
    they differ from layer to layer.
    """

    experts: tuple[int, ...]
    by_layer: tuple[tuple[int, tuple[int, ...]], ...]

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """Global ids of the experts of one MoE layer held here, ascending; position i is local id i.

        The actor's loader and whoever sends it tokens ask the same function.
        """
        return next((ids for named, ids in self.by_layer if named == layer), self.experts)

    def counts(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Number of experts held in each of these MoE layers."""
        held, usual = {layer: len(ids) for layer, ids in self.by_layer}, len(self.experts)
        return tuple(held.get(layer, usual) for layer in layers) if held else (usual,) * len(list(layers))


@dataclass(frozen=True)
class ExpertActorPlan(HoldsExperts):
    """One expert actor. experts and by_layer: see HoldsExperts. node and cpus are numbers of its host.
    pinned: as of `Socket`.

    lane: None = the CPU computes all. answers: type in which y and dx are sent. staging: as
    of a worker. copy: which of `copies` of all experts it has a part of.
    """

    rank: int
    node: int
    cpus: tuple[int, ...]
    threads: int
    experts: tuple[int, ...]
    backend: str
    isa: str
    activations: str
    by_layer: tuple[tuple[int, tuple[int, ...]], ...] = ()
    host: int = 0
    lane: LanePlan | None = None
    answers: str = "float32"
    staging: int = 0
    copy: int = 0
    copies: int = 1
    pinned: bool = True

    def updates(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Those of the MoE layers whose LoRA this actor's optimizer updates: copies take turns."""
        return tuple(layers[self.copy :: self.copies])

    def place(self, device: str) -> str:
        """Name of the budget of a GPU of its host."""
        return gpu_name(self.host, device)


@dataclass(frozen=True)
class Budget:
    """Bytes of a device's memory ("cuda:0", "host 2 cuda:0", "socket 1", "host 2 socket 1") against its
    capacity.

    items: those of `kt_ray.placement.memory.ITEMS` that it has. capacity: of a GPU what a plan may fill
    (`Gpu.room`); 0 = unknown.
    """

    device: str
    items: Mapping[str, int]
    capacity: int

    @property
    def total(self) -> int:
        return sum(self.items.values())

    @property
    def fits(self) -> bool:
        return self.capacity == 0 or self.total <= self.capacity

    @property
    def is_socket(self) -> bool:
        """Whether this is host memory, not a GPU's."""
        return "socket" in self.device

    @property
    def host(self) -> int:
        """The host that the device is in."""
        return int(self.device.split()[1]) if self.device.startswith("host") else 0


@dataclass(frozen=True)
class ExpectedLoad:
    """How even the expert actors' work is, by a histogram of tokens per expert.

    source: where it was read. steps: training steps that it counts. placement: "contiguous", "balanced", or
    "kept" as the resumed checkpoint was written under. contiguous, chosen: tokens per thread of the fullest
    actor over the mean, averaged over layers, of contiguous runs and of this plan.
    """

    source: str
    steps: int
    placement: str
    contiguous: float
    chosen: float


class Held(NamedTuple):
    """What is held for backward. experts, output (`Plan.attention_output`): "retain" or "recompute".
    attention: as `Plan.activations`."""

    experts: str
    attention: str = "group"
    output: str = "recompute"
    ranges: int = 0  # `Plan.head_ranges`


class BackwardPart(NamedTuple):
    """The layers that backward passes.

    lowest: the first with LoRA, where it ends. inputs: the first whose experts' inputs get gradients (dx):
    the same, or the next one where the lowest has LoRA on its routed experts alone.
    """

    lowest: int = 0
    inputs: int = 0


ALL_LAYERS = BackwardPart()


class Choice(NamedTuple):
    """A plan that fits, by what may be left at auto, and the simulated seconds of a step."""

    stages: int
    replicas: int
    groups: int
    wave: int
    activations: str  # of the expert actors
    seconds: float
    attention: str = "group"  # `Plan.activations`
    output: str = "recompute"  # `Plan.attention_output`
    resident: int | None = None  # `Plan.resident`
    hosts: int = 1  # `Plan.attention_hosts`
    copies: int = 1  # `Plan.copies`
    tuning: Tuning = UNTUNED  # `Plan.tuning`
    ranges: int = 0  # `Plan.head_ranges`
    stream_to: str = "actors"  # `Plan.stream_to`
    micro_batch_tokens: int | None = None  # `Plan.micro_batch_tokens`
    micro_batch_rows: int = 0  # `Plan.micro_batch_rows`; 0 = not known


TIGHT = 0.85  # share of a socket's memory above which a plan is short of it
# Of what attention workers on a CPU hold for a while, so much more stays in their processes when it is freed:
# glibc keeps blocks below 32 MiB. Measured: 0.31 beyond the plan, with retained layers of latent attention.
FREED = 0.4


@dataclass(frozen=True)
class Plan:
    """Who holds and does what. The same plan drives Ray and the in-process cluster."""

    dims: ModelDims
    hardware: Hardware
    workers: tuple[WorkerPlan, ...]
    experts: tuple[ExpertActorPlan, ...]
    stages: int
    replicas: int
    groups: int
    micro_batch_rows: int = 1  # rows (pairs) of a micro-batch, all as long as data.max_length
    micro_batch_tokens: int | None = None  # positions that rows share by their lengths; None = they do not
    wave: int = 1  # micro-batches of a replica that pass the layers together
    # "retain", "group", "micro_batch", "host" or "ranges": what attention workers hold for backward
    # (rule.activations)
    activations: str = "group"
    head_ranges: int = 0  # with "ranges" as many of heads, in the place of all at once
    attention_output: str = "recompute"  # or "retain": whether it waits for backward (rule.attention_output)
    tuning: Tuning = UNTUNED  # of what lanes carry, with rule.experts.stream=auto
    backward: BackwardPart = ALL_LAYERS
    overlap: bool = True  # False = attention and experts wait for each other
    budgets: tuple[Budget, ...] = ()
    notes: tuple[str, ...] = ()
    rule: str = ""
    dtype: str = ""  # compute type of attention, norms, routers and shared experts
    tokens_per_step: int = 0  # worst case: rows x longest row, all replicas
    transport: Transport = DEFAULT  # how tensors travel between actors
    expected_load: ExpectedLoad | None = None  # of the expert actors, where a histogram is known
    compared: tuple[Choice, ...] = ()  # plans that were simulated, this one first (kt_ray.timing.choose)

    @property
    def fits(self) -> bool:
        return all(b.fits for b in self.budgets)

    @property
    def is_tight(self) -> bool:
        """Whether a socket's memory is nearly used up, so that giving freed memory back is worth time."""
        freed = FREED * any(worker.device == "cpu" for worker in self.workers)

        def most(budget: Budget) -> float:
            held = sum(budget.items.get(name, 0) for name in ("kept activations", "workspace", "logits"))
            return budget.total + freed * held

        return any(most(b) > TIGHT * b.capacity for b in self.budgets if b.is_socket and b.capacity)

    @property
    def resident(self) -> int | None:
        """Layers of each worker whose weights stay on its device; None = all."""
        counts = [w.layers[1] - w.layers[0] - len(w.streamed) for w in self.workers if w.streamed]
        return max(counts, default=None)

    @property
    def lane(self) -> LanePlan | None:
        """What GPUs compute of the experts: the first of those that have a lane, which are alike."""
        lanes = (*(worker.lane for worker in self.workers), *(actor.lane for actor in self.experts))
        return next((lane for lane in lanes if lane is not None), None)

    @property
    def joins_trainings(self) -> bool:
        """Whether a pass may be of several LoRA trainings: lanes, and attention by ranges, have one LoRA."""
        return self.lane is None and self.activations != "ranges"

    @property
    def mixes_trainings(self) -> bool:
        """Whether a micro-batch may hold rows of several LoRA trainings (train_server.shared=layers)."""
        return self.joins_trainings and (self.micro_batch_rows > 1 or self.micro_batch_tokens is not None)

    @property
    def streams(self) -> bool:
        """Whether experts are carried to GPUs, or to a stand-in."""
        return self.lane is not None and self.lane.streams

    @property
    def stream_to(self) -> str:
        """Whose tokens a lane computes: "workers" = every attention worker its own; else "actors"."""
        return "workers" if any(worker.lane for worker in self.workers) else "actors"

    @property
    def attention_hosts(self) -> int:
        """Hosts with attention workers, as many replicas on each, in the order of hosts."""
        return 1 + max(worker.host for worker in self.workers)

    @property
    def copies(self) -> int:
        """Copies of all routed experts, each with as many of the replicas, in order."""
        return self.experts[0].copies

    def first_of_host(self, worker: WorkerPlan) -> bool:
        """Whether a worker is of the first replica on its host."""
        return worker.replica % (self.replicas // self.attention_hosts) == 0

    @property
    def first_copy(self) -> tuple[ExpertActorPlan, ...]:
        """Expert actors that hold all experts once."""
        return self.experts[: len(self.experts) // self.copies]

    def replicas_of(self, copy: int) -> range:
        """Replicas whose tokens a copy of the experts computes."""
        own = self.replicas // self.copies
        return range(copy * own, (copy + 1) * own)

    def experts_of(self, replica: int) -> range:
        """Ranks of the expert actors that compute a replica's tokens."""
        own = len(self.first_copy)
        first = replica * self.copies // self.replicas * own
        return range(first, first + own)

    def worker(self, replica: int, stage: int) -> WorkerPlan:
        return self.workers[replica * self.stages + stage]
