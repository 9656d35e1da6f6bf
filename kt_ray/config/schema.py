"""The options of kt_ray as frozen dataclasses: one class per Hydra group.

The comments of the YAML files under `conf/` say what each key means; these classes hold types and defaults.
`kt_ray.config.limits` says what a single key may be, `kt_ray.config.checks` what must go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is trained."""

    name: str = "custom"
    path: str | None = None
    config: dict[str, Any] | None = None
    build: str | None = None
    seed: int = 0
    dtype: str = "auto"
    attn_implementation: str = "sdpa"
    tokenizer: str | None = None
    chat_template: str | None = None
    experts_path: str | None = None
    keep_quantized: bool = False


@dataclass(frozen=True)
class ExpertsRule:
    """Where the routed experts live and how they compute."""

    sockets: int | str = "auto"
    copies: int | str = "auto"
    backend: str = "auto"
    isa: str = "auto"
    threads: int | str = "auto"
    activations: str = "auto"
    answers: str = "float32"
    placement: str = "auto"
    load: str | None = None
    gpu_resident: int = 0
    stream: float | str = "auto"
    stream_to: str = "auto"
    lane_device: str | list[str] = "auto"
    gpu_products: str = "bfloat16"

    @property
    def copy_count(self) -> int:
        """Copies as a number; "auto" is 1 until a simulation has chosen (kt_ray.timing.choose)."""
        return self.copies if isinstance(self.copies, int) else 1

    @property
    def lane_devices(self) -> tuple[str, ...]:
        """`lane_device`, one or several."""
        return (self.lane_device,) if isinstance(self.lane_device, str) else tuple(self.lane_device)


@dataclass(frozen=True)
class RayRule:
    """Ray resources that a rule asks for."""

    worker_cpus: float | str = "auto"
    expert_cpus: float | str = "auto"
    strategy: str = "PACK"


@dataclass(frozen=True)
class RuleConfig:
    """Placement: layers to attention workers, experts to sockets."""

    name: str = "auto"
    device: str = "auto"
    gpus: int | str = "auto"
    gpu_memory: float | str = "auto"
    stages: int | str = "auto"
    replicas: int | str = "auto"
    layers: list[Any] | None = None
    resident_layers: int | str = "auto"
    worker_threads: int | str = "auto"
    groups: int | str = "auto"
    wave: int | str = "auto"
    activations: str = "auto"
    attention_output: str = "auto"
    overlap: bool = True
    transport: str = "auto"
    nodes: int = 1
    attention_hosts: str = "auto"
    experts: ExpertsRule = field(default_factory=ExpertsRule)
    ray: RayRule = field(default_factory=RayRule)

    @property
    def replica_count(self) -> int:
        """Replicas as a number; "auto" is 1 until a plan has chosen (kt_ray.placement.layout)."""
        return self.replicas if isinstance(self.replicas, int) else 1


@dataclass(frozen=True)
class DataConfig:
    """Training and held-out rows."""

    path: str | list[str] | None = None
    split: str | None = None
    subset: str | None = None
    sources: list[Any] | None = None
    builtin: str | None = None
    format: str = "auto"
    columns: dict[str, Any] | None = None
    template: str | None = None
    date: str | None = None
    train_on: str = "all"
    eval_path: str | list[str] | None = None
    eval_split: str | None = None
    eval_fraction: float | str = "auto"
    max_length: int = 1024
    overflow: str = "truncate"
    bad_rows: str = "stop"
    pad_to_multiple_of: int = 1
    system: str | None = None
    shuffle: bool = True
    limit: int | None = None
    packing: bool = False
    group_by_length: bool = False
    cache_gb: float = 5.0

    @property
    def widest_row(self) -> int:
        """Positions of the longest row, padding to a multiple included."""
        return -(-self.max_length // self.pad_to_multiple_of) * self.pad_to_multiple_of


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2021) on attention, shared experts, dense MLPs and routed experts."""

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    dropout: float = 0.0
    target_modules: str | list[str] = "auto"
    experts: bool = True
    layers: list[int] | None = None
    dora: bool = False
    init: str = "default"
    adapter: str | None = None

    @property
    def scale(self) -> float:
        return float(self.alpha) / (self.rank**0.5 if self.rslora else self.rank)

    def reaches(self, layer: int) -> bool:
        """Whether `layers` has a layer."""
        return self.layers is None or layer in self.layers


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule."""

    name: str = "adamw"
    lr: float = 1e-4
    lora_plus_ratio: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    schedule: str = "cosine"
    warmup: float = 0.03
    min_lr_ratio: float = 0.0
    decay: float = 0.1
    decay_shape: str = "cosine"


@dataclass(frozen=True)
class TrainerConfig:
    """The loop."""

    stage: str = "sft"
    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 8
    micro_batch_size: int | str = "auto"
    micro_batch_tokens: int | str = "auto"
    eval_every: int | str = "auto"
    save_every: int | str = "30min"
    keep_checkpoints: int = 2
    resume: str | None = None
    preview: int = 0
    loss_chunk: int | str = "auto"
    step_timeout: float = 1800.0
    log_every: int = 1
    recoveries: int = 3
    restarts: int = 0
    timeline_every: int = 0
    aux_loss: float = 0.0
    neftune_noise_alpha: float = 0.0
    max_hours: float | None = None
    early_stopping: int = 0
    early_stopping_threshold: float = 0.0
    save_best: bool = False
    spike: float = 0.0
    bad_steps: str = "stop"
    profile_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PreferenceConfig:
    """Losses of trainer.stage=dpo, orpo and kto, as trl defines them."""

    loss: str = "sigmoid"
    beta: float = 0.1
    gamma: float = 0.5
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class GrpoConfig:
    """`trainer.stage=grpo`: groups of answers to a prompt, scored by `reward` (kt_ray.train.policy_steps)."""

    loss: str = "grpo"
    group_size: int = 8
    steps_per_rollout: int = 1
    iterations: int = 1
    epsilon: float | None = None
    epsilon_high: float | None = None
    kl_coef: float = 0.0
    mask_truncated: bool = False
    overlong_buffer: int = 0

    @property
    def steps_of_round(self) -> int:
        """Optimizer steps on one round of answers."""
        return self.steps_per_rollout * self.iterations


@dataclass(frozen=True)
class TrackingConfig:
    """Where figures go. jsonl is always written; others are added on request, several in a list."""

    name: str | list[str] = "jsonl"
    project: str = "kt_ray"
    entity: str | None = None
    mode: str = "auto"
    tags: list[str] = field(default_factory=list)
    upload_adapter: bool = True
    progress: bool = True
    plot: bool = True

    @property
    def names(self) -> list[str]:
        """Every tracker that is asked for, once."""
        return list(dict.fromkeys([self.name] if isinstance(self.name, str) else self.name))


@dataclass(frozen=True)
class ClusterConfig:
    """How actors run."""

    name: str = "ray"
    address: str = "auto"
    namespace: str | None = None
    dashboard: bool = True
    dashboard_host: str = "127.0.0.1"
    dashboard_port: int = 8265
    start_timeout: float = 120.0


@dataclass(frozen=True)
class PlanConfig:
    """`mode=plan`; `rates` also counts for `mode=doctor` and for the prediction of `mode=train`."""

    mode: str = "train"
    hardware: str | None = None
    rates: str = "auto"


@dataclass(frozen=True)
class AcceptConfig:
    """`mode=accept`: tests, measurements and runs that prove a machine."""

    only: list[str] = field(default_factory=list)
    minutes: float = 25.0
    against: list[str] = field(default_factory=lambda: ["torch"])
    kt: str | None = None
    resume: str | None = None
    root: str = "accept"


@dataclass(frozen=True)
class EvalConfig:
    """`mode=eval`: metrics of predictions, base against adapter; missing ones are generated (`generate`)."""

    adapter: str | None = None
    base: str | None = None
    choice: str = "auto"
    letters: str = "ABCD"
    samples: int = 3
    out: str | None = None
    after_training: int = 0


@dataclass(frozen=True)
class ReportConfig:
    """`mode=report`: one HTML page about a run."""

    run: str | None = None
    out: str | None = None
    samples: int = 5


@dataclass(frozen=True)
class CompareConfig:
    """`mode=compare`: several runs side by side."""

    runs: list[str] = field(default_factory=list)
    sort: str = "name"
    out: str | None = None


@dataclass(frozen=True)
class RunConfig:
    """Where a run's files go."""

    name: str | None = None
    root: str = "runs"
    overwrite: bool = False


@dataclass(frozen=True)
class GenerateConfig:
    """How answers are generated: `mode=predict` and `mode=chat`. Random draws come from `seed`."""

    adapter: str | None = None
    answer: str = "auto"
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = field(default_factory=list)
    batch_size: int = 32
    prefill_tokens: int = 2048
    cache_tokens: int | str = "auto"
    latent_keys: str = "auto"
    split: str = "eval"
    limit: int | None = None
    system: str | None = None


@dataclass(frozen=True)
class ServeConfig:
    """The OpenAI-compatible server: `mode=serve`."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    name: str | None = None
    adapters: dict[str, str] | None = None
    max_batch: int = 32
    max_queue: int = 256
    max_tokens: int | None = None
    max_body: int = 8388608


@dataclass(frozen=True)
class TrainServerConfig:
    """The server of the Tinker API: `mode=train_server`. Where it listens, `ServeConfig` says."""

    adapters: int = 4
    trainings: int = 32
    shared: str = "experts"
    directory: str | None = None

    @property
    def samplers(self) -> int:
        """Copies of weights to sample from that there is memory for: of every training the latest two."""
        return 2 * self.adapters


# Positions of a micro-batch of short rows at auto: from about so many on, a layer's products on a CPU take
# longer than reading its weights. For GPUs kt_ray.timing.choose looks for more.
MICRO_TOKENS = 512


@dataclass(frozen=True)
class Config:
    """Everything."""

    mode: str = "train"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    rule: RuleConfig = field(default_factory=RuleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    reward: str | None = None
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    train_server: TrainServerConfig = field(default_factory=TrainServerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    accept: AcceptConfig = field(default_factory=AcceptConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def trainings(self) -> int:
        """LoRA trainings over one base that there is to be memory for; 0 = one run's own."""
        mode = self.plan.mode if self.mode == "plan" else self.mode
        return self.train_server.adapters if mode == "train_server" else 0

    @property
    def answering_rows(self) -> int:
        """Rows of generation beside passes of training that there is to be memory for; mode=eval has both."""
        if self.trainer.stage == "grpo" or self.mode == "eval":
            return self.generate.batch_size
        return min(self.generate.batch_size, self.eval.after_training)

    @property
    def has_reference(self) -> bool:
        """Whether the stage's loss compares with a reference."""
        stage = self.trainer.stage
        if stage == "grpo":
            return self.grpo.kl_coef > 0
        return stage == "kto" or (stage == "dpo" and self.preference.loss != "simpo")

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference of a loss is a copy of the adapter that the run starts from."""
        return self.lora.adapter is not None and self.has_reference

    @property
    def rows_per_unit(self) -> int:
        """Rows of what trainer.batch_size counts: two of a preference pair, else one."""
        return 2 if self.trainer.stage in ("dpo", "orpo") else 1

    @property
    def samples_per_row(self) -> int:
        """Sample ids that a row of the data set has: those of a pair, or of a prompt's answers."""
        return self.grpo.group_size if self.trainer.stage == "grpo" else self.rows_per_unit

    @property
    def tokens_per_step(self) -> int:
        """Of a step whose rows are all as long as data.max_length."""
        return self.trainer.batch_size * self.rows_per_unit * self.data.max_length

    @property
    def packs_micro_batches(self) -> bool:
        """Whether rows share micro-batches by their lengths (auto, and every row counts by itself)."""
        return self.trainer.micro_batch_size == "auto" and self.trainer.stage in ("sft", "pt", "grpo")

    def micro_batch_rows(self, replicas: int) -> int:
        """Rows (pairs) of a micro-batch; at auto of rows as long as data.max_length, two for each replica."""
        trainer = self.trainer
        if isinstance(trainer.micro_batch_size, int):
            return trainer.micro_batch_size
        if not self.packs_micro_batches:
            return 1
        asked = trainer.micro_batch_tokens
        tokens = asked if isinstance(asked, int) else MICRO_TOKENS
        return max(1, min(tokens // self.data.widest_row, trainer.batch_size // (2 * replicas)))

    def pads(self, replicas: int) -> bool:
        """Whether micro-batches may hold padding after their rows."""
        several = self.packs_micro_batches or self.micro_batch_rows(replicas) * self.rows_per_unit > 1
        return several or self.data.pad_to_multiple_of > 1

    def micro_batch_tokens(self, replicas: int) -> int | None:
        """Positions of a micro-batch, at the most, where rows share it by length; None = they do not."""
        return self.micro_batch_rows(replicas) * self.data.widest_row if self.packs_micro_batches else None
