"""What a plan is made of. Pure data: no torch, no ray, no transformers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kt_ray.placement.cache import CacheWidth
from kt_ray.placement.formats import Storage, plain_storage
from kt_ray.placement.rates import Figure
from kt_ray.placement.transport import DEFAULT, Transport


class Quantised(NamedTuple):
    """The part of a layer outside its routed experts that the checkpoint stores quantised.

    params: parameters. bytes: what they take as stored. largest: parameters of the largest matrix.
    """

    params: int = 0
    bytes: float = 0
    largest: int = 0


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of a MoE language model, read from its config.json.

    Sizes are numbers of elements; `*_params` are numbers of parameters per layer of that kind.
    """

    model_type: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    num_experts: int  # routed experts per MoE layer
    experts_per_token: int
    expert_intermediate: int  # I of one routed expert
    moe_layers: tuple[int, ...]  # indices of layers with routed experts
    attention_params: tuple[int, ...]  # per layer: attention with its norms
    dense_params: tuple[int, ...]  # per layer: router + shared expert, or the dense MLP; plus layer norms
    lora_in_out: tuple[
        tuple[tuple[str, int, int], ...], ...
    ]  # per layer: (module, in, out) of LoRA targets ("auto")
    tie_embeddings: bool
    dtype: str  # "bfloat16" | "float32" | "float16": non-expert weights
    expert_storage: Storage  # of the routed experts, but for those of plain_expert_layers
    refusal: str | None = None  # why this model cannot be trained; None = it can
    notes: tuple[str, ...] = ()
    name: str = ""  # label for messages: the model group's name or the directory
    expert_hidden: int = 0  # width the routed experts work on; 0 = hidden_size
    expert_bias_params: int = 0  # biases of one routed expert
    outside_params: int = 0  # final norm and whatever else sits outside layers, embedding and head
    num_heads: int = 0  # query heads
    attention_width: int = 0  # elements per token of expanded queries, keys and values of one layer
    pair_widths: tuple[
        tuple[int, int], ...
    ] = ()  # per layer: elements that a query multiplies per key, window
    cache_widths: tuple[CacheWidth, ...] = ()  # per layer: what generation keeps of a row
    context: int = 0  # tokens that the model was made for (max_position_embeddings); 0 = it does not say
    hidden_streams: int = 1  # residual streams between layers (hyper-connections), each hidden_size wide
    gated: bool = True  # whether the routed experts have a gate projection
    plain_expert_layers: tuple[int, ...] = ()  # MoE layers whose experts are stored in `dtype`
    quantised: tuple[Quantised, ...] = ()  # per layer, outside the routed experts; () = nothing is
    experts_file_bytes: int = 0  # bytes of all routed experts in a file of their own (GGUF); 0 = unknown

    @property
    def expert_format(self) -> str:
        """ "bf16", "f32", "fp8_block", "fp8", "mxfp4", "int8", "int4", ... of the routed experts."""
        return self.expert_storage.format

    @property
    def expert_width(self) -> int:
        """Width of a routed expert's input and output."""
        return self.expert_hidden or self.hidden_size

    @property
    def expert_params(self) -> int:
        """Parameters of one routed expert (gate if there is one, up, down and their biases)."""
        matrices = 3 if self.gated else 2
        return matrices * self.expert_width * self.expert_intermediate + self.expert_bias_params

    def expert_bytes(self, storage: Storage | None = None) -> float:
        """Bytes of one expert index in all MoE layers: data and scales as stored, biases in float32.

        Args:
            storage: one that the experts are quantised to while they are read; None = the checkpoint's.
        """
        width, inter = self.expert_width, self.expert_intermediate

        def matrices(kind: Storage, streamed: bool = False) -> float:
            up, down = (kind.dividing(width), kind.dividing(inter)) if streamed else (kind, kind)
            ups = (2 if self.gated else 1) * up.matrix_bytes(inter, width)
            return ups + down.matrix_bytes(width, inter)

        layers, plain = len(self.moe_layers), len(self.plain_expert_layers)
        biases = 4 * self.expert_bias_params * layers
        if storage is not None:
            return layers * matrices(storage, streamed=True) + biases
        kept = plain * matrices(plain_storage(self.dtype)) if plain else 0
        return (layers - plain) * matrices(self.expert_storage) + kept + biases

    @property
    def routed_params(self) -> int:
        """Parameters of all routed experts of all layers."""
        return self.expert_params * self.num_experts * len(self.moe_layers)

    @property
    def embedding_params(self) -> int:
        """Parameters of the token embedding (the head has as many, unless they are tied)."""
        return self.vocab_size * self.hidden_size

    @property
    def total_params(self) -> int:
        """All parameters, multi-token-prediction layers not counted."""
        ends = self.embedding_params * (1 if self.tie_embeddings else 2) + self.outside_params
        return ends + sum(self.attention_params) + sum(self.dense_params) + self.routed_params


@dataclass(frozen=True)
class Socket:
    """One NUMA node: its CPUs (logical ids this process may use), physical cores and memory.

    cpus lists one logical CPU per physical core first (`cores` of them), then their siblings in the
    same order, so that the first n entries are n different cores. Empty = unknown (other hardware).
    host: which host it is in; 0 is the driver's. node and cpus are numbers of that host.
    """

    node: int
    cpus: tuple[int, ...]
    cores: int
    memory_bytes: int
    host: int = 0


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    """One host, or several; gpus are those of host 0.

    source says where the figures come from ("this host", "rule amx_4gpu (nominal)", a file).

    isas is ordered best last. present is False for hardware that is only described, not there. rates
    are the figures of a hardware file (nominal.py), by name.
    """

    source: str
    sockets: tuple[Socket, ...]
    gpus: tuple[Gpu, ...]
    isas: tuple[str, ...]
    present: bool = True
    rates: tuple[tuple[str, Figure], ...] = ()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 + max(socket.host for socket in self.sockets)

    def on(self, host: int) -> tuple[Socket, ...]:
        """Sockets of one host."""
        return tuple(socket for socket in self.sockets if socket.host == host)


@dataclass(frozen=True)
class WorkerPlan:
    """One attention worker.

    rank: replica * stages + stage. layers: half-open range [start, stop). device: "cuda:i" (the
    plan's ordinal) or "cpu". threads: torch threads. cpus: CPUs it may use (empty = any).
    """

    rank: int
    replica: int
    stage: int
    layers: tuple[int, int]
    device: str
    threads: int
    cpus: tuple[int, ...] = ()


class HoldsExperts:
    """Which experts one expert actor holds: of a plan's actor, and of what the actor is built from.

    experts: global ids held in every MoE layer that `by_layer` does not name. by_layer: (layer, ids) where
    they differ from layer to layer. Ids ascend.
    """

    experts: tuple[int, ...]
    by_layer: tuple[tuple[int, tuple[int, ...]], ...]

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """Global ids of the experts of one MoE layer held here; position i is local id i."""
        return next((ids for named, ids in self.by_layer if named == layer), self.experts)

    def counts(self, layers: Iterable[int]) -> tuple[int, ...]:
        """Number of experts held in each of these MoE layers."""
        return tuple(len(self.experts_of(layer)) for layer in layers)


@dataclass(frozen=True)
class LanePlan:
    """What an expert actor computes on a GPU (docs/gpu_lane.md).

    Attributes:
        device: "cuda:i" (the plan's ordinal) or "cpu", a stand-in.
        resident: (layer, global ids) of the actor's experts that stay in the device's memory.
        shares: (tokens of a call, share) ascending: from that many tokens on this share of the actor's other
            experts of the layer, those with most tokens, is carried to the device; none below the first.
        visible: the GPU's name in CUDA_VISIBLE_DEVICES, where the actor has a process of its own; "" = left
            as it is.
    """

    device: str
    resident: tuple[tuple[int, tuple[int, ...]], ...] = ()
    shares: tuple[tuple[int, float], ...] = ()
    visible: str = ""

    @property
    def streams(self) -> bool:
        """Whether experts are carried to the device at all."""
        return bool(self.shares)

    def share(self, tokens: int) -> float:
        """Share of the other experts that is carried for a call of `tokens` tokens."""
        return next((share for least, share in reversed(self.shares) if tokens >= least), 0.0)


@dataclass(frozen=True)
class ExpertActorPlan(HoldsExperts):
    """One expert actor. experts and by_layer: see HoldsExperts. node and cpus are numbers of its host.

    lane: None = the CPU computes all.
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


@dataclass(frozen=True)
class MemoryLine:
    """One line of the memory budget: device ("cuda:0", "socket 1", "host 2 socket 1"), item, bytes."""

    device: str
    item: str
    bytes: int


@dataclass(frozen=True)
class Budget:
    """A device's sum against its capacity, both in bytes (capacity 0 = unknown)."""

    device: str
    lines: tuple[MemoryLine, ...]
    capacity: int

    @property
    def total(self) -> int:
        return sum(line.bytes for line in self.lines)

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


TIGHT = 0.85  # share of a socket's memory above which a plan is short of it


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
    wave: int = 1  # micro-batches of a replica that pass the layers together
    overlap: bool = True  # False = attention and experts wait for each other
    budgets: tuple[Budget, ...] = ()
    notes: tuple[str, ...] = field(default=())
    rule: str = ""
    dtype: str = ""  # compute type of attention, norms, routers and shared experts
    tokens_per_step: int = 0  # worst case: rows x longest row, all replicas
    transport: Transport = DEFAULT  # how tensors travel between actors
    expected_load: ExpectedLoad | None = None  # of the expert actors, where a histogram is known

    @property
    def fits(self) -> bool:
        return all(b.fits for b in self.budgets)

    @property
    def is_tight(self) -> bool:
        """Whether a socket's memory is nearly used up, so that giving freed memory back is worth time."""
        hosts = [b for b in self.budgets if b.is_socket and b.capacity]
        return any(b.total > TIGHT * b.capacity for b in hosts)

    def worker(self, replica: int, stage: int) -> WorkerPlan:
        return self.workers[replica * self.stages + stage]

    def held(self, layer: int, rank: int) -> tuple[int, ...]:
        """Global ids of the experts of MoE layer `layer` that expert actor `rank` holds, ascending.

        The actor's loader and whoever sends it tokens ask the same function.
        """
        return self.experts[rank].experts_of(layer)
