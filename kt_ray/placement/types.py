"""What a plan is made of. Pure data: no torch, no ray, no transformers."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    lora_in_out: tuple[tuple[tuple[str, int, int], ...], ...]  # per layer: (module, in, out) of LoRA targets ("auto")
    tie_embeddings: bool
    dtype: str  # "bfloat16" | "float32" | "float16": non-expert weights
    expert_format: str  # "bf16" | "f32" | "fp8_block" | "mxfp4" | "int4" | ...
    refusal: str | None = None  # why this model cannot be trained yet; None = it can
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Socket:
    """One NUMA node: its CPUs (logical ids this process may use), physical cores and memory."""

    node: int
    cpus: tuple[int, ...]
    cores: int
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    """A host. `source` says where the figures come from ("this host", "rule amx_4gpu (nominal)", a file)."""

    source: str
    sockets: tuple[Socket, ...]
    gpus: tuple[Gpu, ...]
    isas: tuple[str, ...]


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


@dataclass(frozen=True)
class ExpertActorPlan:
    """One expert actor. experts: global ids of the experts it holds, the same in every MoE layer."""

    rank: int
    node: int
    cpus: tuple[int, ...]
    threads: int
    experts: tuple[int, ...]
    backend: str
    isa: str
    activations: str


@dataclass(frozen=True)
class MemoryLine:
    """One line of the memory budget: device ("cuda:0", "socket 1", "host"), item, bytes."""

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
    budgets: tuple[Budget, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def fits(self) -> bool:
        return all(b.fits for b in self.budgets)

    def worker(self, replica: int, stage: int) -> WorkerPlan:
        return self.workers[replica * self.stages + stage]
