"""The options of kt_ray as frozen dataclasses: one class per Hydra group.

The YAML files under `conf/` hold the defaults that users see; these classes hold the types and
the meaning of each key. `kt_ray.config.limits` says what a single key may be, `kt_ray.config.checks` what
must go together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Which checkpoint is trained.

    Attributes:
        name: a label for logs and run names; "custom" is replaced by the directory's name.
        path: Hugging Face directory with config.json, *.safetensors and a tokenizer; None = only
            a plan can be made from `config`, or (with `build`) the model is built locally.
        config: the released config.json, inline, so that `mode=plan` works without a checkpoint.
            Ignored when `path` holds a config.json.
        build: "demo_base" = the small pretrained model inside the package; "demo" or "mini" = build this
            small model from `seed` on first use, with random weights; ignored when `path` is given.
        seed: seed of a model with random weights.
        dtype: compute type of attention, norms, router and shared experts: "auto" takes the
            checkpoint's torch_dtype; "bfloat16"; "float32". Experts stay in the checkpoint's type.
        attn_implementation: "sdpa" or "eager", as transformers names them.
        tokenizer: directory of the tokenizer; None = `path`.
        chat_template: a Jinja chat template file overriding the tokenizer's own; None = the tokenizer's.
        experts_path: GGUF file (the first, where there are several) that the routed experts are read
            from instead of the checkpoint; None = the checkpoint's own. rule.experts.backend=llamafile
            needs it.
        keep_quantized: true = weights outside the experts stay FP8 or INT in memory and are dequantised at
            each use; false = they are dequantised once, while loading.
    """

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
    """Where the routed experts live and how they compute.

    Attributes:
        sockets: number of expert actors per host, one per NUMA socket; "auto" = every socket of the host.
        backend: "auto" = the checkpoint's own format; "AMXBF16" = likewise, in bf16 arithmetic; "AMXINT8"
            or "AMXINT4" = quantised while they stream in (int8 per row, int4 in groups of 128); or
            "llamafile" = GGUF (model.experts_path). The reference system's names.
        isa: "auto", "reference", "avx2", "avx512", "avx512_bf16" or "amx"; a forced one that the
            machine lacks is an error.
        threads: engine threads per expert actor; "auto" = the socket's physical cores.
        activations: "retain" keeps x, gate and up for backward; "recompute" keeps x only; "auto" =
            retain where the whole step fits as one wave, else what needs fewer waves, or the other where a
            simulated step is 5 % faster.
        placement: which experts a socket holds: "contiguous" (runs of expert ids), "balanced" (by observed
            load, per layer) or "auto" (balanced if the load is known, else contiguous).
        load: checkpoint directory with a histogram of tokens per expert; None = the checkpoint that the run
            resumes from, if any.
        gpu_resident: how many of the most used experts of each MoE layer stay in GPU memory and train there;
            0 = none.
        stream: "off"; "auto" = copy part of each layer's experts to the GPU for large calls where the plan
            expects a gain; or that part as a share of the experts.
        lane_device: device of resident and streamed experts: "auto" (the first GPU), "cuda:i", or "cpu" (a
            stand-in with the same numerics).
    """

    sockets: int | str = "auto"
    backend: str = "auto"
    isa: str = "auto"
    threads: int | str = "auto"
    activations: str = "auto"
    placement: str = "auto"
    load: str | None = None
    gpu_resident: int = 0
    stream: float | str = "off"
    lane_device: str = "auto"


@dataclass(frozen=True)
class RayRule:
    """Ray resources that a rule asks for.

    Attributes:
        worker_cpus: CPUs each attention worker reserves ("auto" = its torch threads).
        expert_cpus: CPUs each expert actor reserves ("auto" = its engine threads).
        strategy: placement-group strategy: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD".
    """

    worker_cpus: float | str = "auto"
    expert_cpus: float | str = "auto"
    strategy: str = "PACK"


@dataclass(frozen=True)
class RuleConfig:
    """Placement: layers to attention workers, experts to sockets.

    Attributes:
        name: label.
        device: "auto" (GPUs if there are any), "cpu" or "cuda".
        stages: pipeline stages per replica; "auto" = GPUs divided by replicas (1 on CPU).
        replicas: data-parallel copies of the attention side; all share the expert actors. "auto" = with
            stages=auto as many as fit the GPUs and have micro-batches of their own, unless a simulated step
            of fewer replicas with more stages is faster; else 1.
        layers: how layers go to stages. None = balanced by memory (all GPUs equally full); a list
            of counts [16, 15, ...]; of ranges ["0-15", "16-30", ...] (inclusive); of ranges with devices
            {"layers": "0-15", "device": "cuda:0"}; or of {"match": regex over module names, "device":
            "cuda:i"} as the reference system's optimize rules have them. Stages that name the same device
            share it; a list of devices names one per replica.
        worker_threads: torch threads per attention worker; "auto".
        groups: micro-batch groups in flight (ping-pong); "auto" = two, or 1, 4 or 8 where simulated steps say
            that they are 5 % faster.
        wave: micro-batches of a replica that pass the layers together, so that each pass over an expert's
            weights serves all their tokens; a step is as many waves as it takes; "auto" = as many as memory
            allows, up to the whole step.
        overlap: attention and experts work at the same time; false = each waits for the other (to measure
            the gain).
        transport: how tensors travel between actors: "auto" (shared memory within a node, the faster of the
            others between nodes), "arena" (shared memory; one node only), "ray" or "gloo".
        nodes: number of identical hosts whose sockets hold experts; attention stays on the driver's host.
            Several need a running Ray cluster, and model and run directories that every host can read.
    """

    name: str = "auto"
    device: str = "auto"
    stages: int | str = "auto"
    replicas: int | str = "auto"
    layers: list[Any] | None = None
    worker_threads: int | str = "auto"
    groups: int | str = "auto"
    wave: int | str = "auto"
    overlap: bool = True
    transport: str = "auto"
    nodes: int = 1
    experts: ExpertsRule = field(default_factory=ExpertsRule)
    ray: RayRule = field(default_factory=RayRule)

    @property
    def replica_count(self) -> int:
        """Replicas as a number; "auto" is 1 until a plan has chosen (kt_ray.placement.layout)."""
        return self.replicas if isinstance(self.replicas, int) else 1


@dataclass(frozen=True)
class DataConfig:
    """Training and held-out rows.

    Attributes:
        path: file (jsonl, json, parquet, csv, tsv, arrow; txt and md are raw text), directory of such files,
            hf://owner/name[@revision] of the Hugging Face hub, or a list of them; None with `builtin`.
        builtin: "demo" = the data set inside the package.
        split: of a data set of several splits (hub, directories); None = train.
        subset: configuration of a hub data set that has several; None = its only one.
        sources: several data sets instead of `path`: a list of {path: ..., weight: 2.0}, where weight is how
            often a row is taken per epoch (0.5 = a fixed half of them), and format, columns, split, subset,
            system and limit are as below, each for its source.
        format: "auto" (by the keys of the rows), "alpaca", "sharegpt", "messages", "prompt_completion",
            "preference" (chosen and rejected), "kto" or "text"; docs/data.md shows a row of each.
        columns: columns that have another name in the files: {instruction: question}; null hides a column:
            {input: null}.
        template: chat template by name (kt_ray/data/templates), or "plain" (no turns: question and answer
            are one text); None = the tokenizer's own, or model.chat_template.
        date: YYYY-MM-DD, for templates that write the date (strftime_now); None = the day the run starts,
            which its config.yaml keeps so that a resumed run has the same tokens.
        train_on: "all" answers of a conversation, or the "last" one (every answer after the last question).
        eval_path: file, directory or hub data set of held-out rows; None = `eval_fraction` of `path`.
        eval_split: split of `eval_path`; None = its validation split, else its test split.
        eval_fraction: share of rows held out when `eval_path` is None (0 = no evaluation).
        max_length: tokens per row; longer rows are truncated and reported, or dropped.
        overflow: "truncate" or "drop" for rows longer than max_length.
        pad_to_multiple_of: micro-batches are padded to a multiple of this; 8 lets a CPU reuse its bfloat16
            kernels for rows of similar length.
        system: system prompt of rows that have none; None = none.
        shuffle: shuffle rows each epoch (by the run's seed).
        limit: use the first N rows only; None = all.
        packing: put several short rows into one of up to max_length tokens; they do not attend to each other.
            trainer.batch_size then counts packed rows.
        group_by_length: batch rows of similar length, which saves padding if trainer.micro_batch_size > 1.
        cache_gb: size limit of the cache of tokenised rows ($KT_RAY_CACHE/tokens); 0 = no cache.
    """

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
    eval_fraction: float = 0.05
    max_length: int = 512
    overflow: str = "truncate"
    pad_to_multiple_of: int = 1
    system: str | None = None
    shuffle: bool = True
    limit: int | None = None
    packing: bool = False
    group_by_length: bool = False
    cache_gb: float = 5.0


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2021) on attention, shared experts, dense MLPs and routed experts.

    Attributes:
        rank: rank r of every adapter, 1..256.
        alpha: scale numerator; the update is B A x * alpha / r (alpha / sqrt(r) with rslora).
        rslora: rank-stabilised scale (Kalajdzievski 2023).
        dropout: dropout on the adapter's input, as PEFT defines it; 0 <= p < 1.
        target_modules: "auto" (attention projections, shared experts, dense MLPs; not routers, gates and
            indexers), "none", a list of module name suffixes, or a regex (full match) over module names of
            the non-expert part.
        experts: train LoRA on gate, up and down of every routed expert.
        init: how adapters begin: "default" (A uniform as PEFT draws it, B zero), "gaussian" (A normal with
            deviation 1 / rank, B zero), or "pissa" (the largest singular values and vectors of the weight,
            which keeps the rest; Meng et al. 2024; "pissa_niter_16" computes them iteratively). PiSSA needs
            lora.experts=false.
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0
    target_modules: str | list[str] = "auto"
    experts: bool = True
    init: str = "default"

    @property
    def scale(self) -> float:
        return float(self.alpha) / (self.rank**0.5 if self.rslora else self.rank)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule.

    Attributes:
        name: "adamw"; "deepspeed_cpu_adam" (DeepSpeed's AdamW for the experts' LoRA, torch's for the rest);
            or "muon" (orthogonalised momentum for every A and B).
        lr: peak learning rate.
        lora_plus_ratio: LoRA+ (Hayou et al. 2024): B's learning rate is this many times A's, which is `lr`.
        betas: moment decay rates; Muon's momentum is the first.
        eps: denominator term.
        weight_decay: decoupled weight decay.
        max_grad_norm: global norm (GPU and expert LoRA together) that gradients are clipped to;
            0 = no clipping.
        schedule: after warm-up: "cosine", "linear", "constant", "wsd" (constant, then down over the last
            `decay` steps) or "inverse_sqrt".
        warmup: warm-up steps (int >= 1) or share of all steps (float < 1).
        min_lr_ratio: final learning rate as a share of `lr` for cosine, linear and wsd.
        decay: for wsd: steps of its last part (int >= 1), or their share of all steps (float < 1).
        decay_shape: for wsd: how it goes down: "cosine", "linear" or "1-sqrt".
    """

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
    """The loop.

    Attributes:
        stage: "sft" (learn answers), "pt" (continued pre-training: learn every token), "dpo" or "orpo"
            (preference pairs) or "kto" (answers labelled good or bad); see PreferenceConfig.
        epochs: passes over the data; ignored when max_steps is set.
        max_steps: optimizer steps; None = from epochs.
        batch_size: rows per optimizer step, over all replicas.
        micro_batch_size: rows per forward of an attention worker.
        eval_every: steps between evaluations (also at start and end); 0 = never.
        save_every: steps between checkpoints (also at the end); 0 = only at the end.
        keep_checkpoints: newest checkpoints kept; 0 = all.
        resume: None; "latest" = go on where the run stopped (run.name, else the newest run); or a
            checkpoint directory.
        preview: print this many rows before training, trained tokens marked.
        loss_chunk: rows of logits per cross-entropy chunk; "auto" = only when logits would
            dominate, 0 = never.
        step_timeout: seconds without progress after which a step fails with a report.
        log_every: steps between log lines on a terminal without a progress bar.
        recoveries: how often a run restarts lost actors and repeats from its last committed state; 0 = the
            loss of an actor ends the run.
        timeline_every: steps between timelines (Chrome trace of all actors, under timelines/ of the run
            directory); 0 = never.
        aux_loss: coefficient of the routers' load-balancing loss, as transformers computes it over the whole
            step; costs one more forward pass. Routers stay frozen: the gradient reaches the LoRA before them;
            0 = off.
        max_hours: stop with a checkpoint before this many hours have passed since the command started; null =
            no limit.
        early_stopping: stop after this many evaluations in a row without a lower held-out loss; 0 = never.
        early_stopping_threshold: by how much the held-out loss must fall to count as lower.
        save_best: keep the checkpoint with the lowest held-out loss (checkpoints/best) and write the adapter
            from it.
        spike: reject a step whose loss (sft, pt, orpo) or gradient norm exceeds the median of the last 16
            steps by this factor; 0 = reject only steps that are not finite.
        bad_steps: after a rejected step: "stop", or "skip" (go on with the next step).
        profile_steps: steps of which attention workers write a torch.profiler trace to profile/ in the run
            directory.
    """

    stage: str = "sft"
    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 8
    micro_batch_size: int = 1
    eval_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    resume: str | None = None
    preview: int = 0
    loss_chunk: int | str = "auto"
    step_timeout: float = 1800.0
    log_every: int = 1
    recoveries: int = 3
    timeline_every: int = 0
    aux_loss: float = 0.0
    max_hours: float | None = None
    early_stopping: int = 0
    early_stopping_threshold: float = 0.0
    save_best: bool = False
    spike: float = 0.0
    bad_steps: str = "stop"
    profile_steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PreferenceConfig:
    """Losses of trainer.stage=dpo, orpo and kto, as trl defines them.

    Attributes:
        loss: dpo: "sigmoid", "hinge", "ipo" or "robust".
        beta: dpo and kto: strength of the reference (ipo: its tau); orpo: weight of the odds ratio.
        label_smoothing: dpo with sigmoid or robust: the assumed share of pairs with swapped labels.
        desirable_weight: kto: weight of good answers.
        undesirable_weight: kto: weight of bad answers.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


@dataclass(frozen=True)
class TrackingConfig:
    """Where figures go. jsonl is always written; wandb is added on request.

    Attributes:
        name: "jsonl" or "wandb".
        project: W&B project.
        entity: W&B team or user; None = the default one.
        mode: W&B mode: "auto" (online with a key, else offline), "online", "offline".
        tags: W&B tags.
        upload_adapter: log the adapter as a W&B artifact at the end.
        progress: rich progress bar on a terminal.
        plot: write loss.png.
    """

    name: str = "jsonl"
    project: str = "kt_ray"
    entity: str | None = None
    mode: str = "auto"
    tags: list[str] = field(default_factory=list)
    upload_adapter: bool = True
    progress: bool = True
    plot: bool = True


@dataclass(frozen=True)
class ClusterConfig:
    """How actors run.

    Attributes:
        name: "ray" or "local" (the same classes in one process, without Ray).
        address: Ray address; "auto" = the cluster of RAY_ADDRESS or of `ray start` on this host, else a
            local one; "local" = always a new local one; or HOST:PORT.
        namespace: Ray namespace of the named actors; None = one per run.
        dashboard: start the dashboard with a local cluster.
        dashboard_host: address the dashboard listens on.
        dashboard_port: port of the dashboard, or the next free one.
        start_timeout: seconds to wait for resources before giving up with `ray status`.
        load_timeout: seconds allowed for loading the model.
    """

    name: str = "ray"
    address: str = "auto"
    namespace: str | None = None
    dashboard: bool = True
    dashboard_host: str = "127.0.0.1"
    dashboard_port: int = 8265
    start_timeout: float = 120.0
    load_timeout: float = 7200.0


@dataclass(frozen=True)
class PlanConfig:
    """`mode=plan`; `rates` also counts for `mode=doctor` and for the prediction of `mode=train`.

    Attributes:
        hardware: YAML file describing other hardware to plan for, or the name of one in
            conf/hardware; None = the rule's nominal hardware if it names GPUs or an ISA that this
            host lacks, else this host.
        rates: JSON file with measured rates (mode=doctor writes it there); "auto" = what mode=doctor stored
            for this host, else nominal ones; "nominal" = as if nothing had been measured (mode=doctor then
            measures nothing).
    """

    hardware: str | None = None
    rates: str = "auto"


@dataclass(frozen=True)
class EvalConfig:
    """`mode=eval`: metrics of predictions, base model against adapter. Missing predictions are generated as
    `generate` says, with the adapter of generate.adapter or of the run run.name.

    Attributes:
        adapter: the fine-tuned model's answers (its adapter is generate.adapter): a predictions.jsonl, or a
            run directory with one; None = the answers of the run run.name, unless `base` is given.
        base: the base model's answers to the same prompts, likewise; None = the ones beside the adapter's
            (column "base", or predictions_base.jsonl), if any.
        choice: "on" = labels are option letters, measure letter accuracy; "off"; "auto" = on if every label
            is a letter.
        letters: the options' letters.
        samples: prompts shown with both answers.
        out: directory for eval.json and eval.md; None = the directory of the answers.
        after_training: `mode=train`: number of held-out rows that base and adapter answer at the end of the
            run, for the same table; 0 = none.
    """

    adapter: str | None = None
    base: str | None = None
    choice: str = "auto"
    letters: str = "ABCD"
    samples: int = 3
    out: str | None = None
    after_training: int = 0


@dataclass(frozen=True)
class ReportConfig:
    """`mode=report`: one HTML page about a run.

    Attributes:
        run: run directory; None = the run run.name, else the newest one under run.root.
        out: the HTML file to write; None = report.html in the run directory.
        samples: predictions shown, before and after.
    """

    run: str | None = None
    out: str | None = None
    samples: int = 5


@dataclass(frozen=True)
class CompareConfig:
    """`mode=compare`: several runs side by side.

    Attributes:
        runs: run directories, directories that hold runs, or names under run.root; a multirun's name
            stands for all of its runs, and * and ? are wildcards. Empty = every run under run.root.
        sort: "name", "loss" (training loss of the last steps), "eval_loss" (best) or "tokens_per_s".
        out: directory for compare.html, compare.md and compare.json; None = run.root.
    """

    runs: list[str] = field(default_factory=list)
    sort: str = "name"
    out: str | None = None


@dataclass(frozen=True)
class RunConfig:
    """Where a run's files go.

    Attributes:
        name: directory name under root; None = "<model>-<date>-<time>".
        root: directory that holds runs (made absolute).
        overwrite: delete a run of the same name and start again (never needed with trainer.resume).
    """

    name: str | None = None
    root: str = "runs"
    overwrite: bool = False


@dataclass(frozen=True)
class GenerateConfig:
    """How answers are generated: `mode=predict` and `mode=chat`. Random draws come from `seed`.

    Attributes:
        adapter: adapter directory (of kt_ray or PEFT), or a run directory that holds one as `adapter`; None =
            the base model.
        answer: who answers in mode=predict: "adapter", "base" (adapter off), "both" (for a table before and
            after), or "auto" = the adapter if one is named, else the base model.
        max_new_tokens: maximum tokens per answer.
        min_new_tokens: minimum tokens per answer.
        temperature: 0 = always the most probable token.
        top_p: sample from the most probable tokens with this total probability; 1 = all.
        top_k: sample from this many most probable tokens; 0 = all.
        min_p: minimum probability, relative to the most probable token's; 0 = all tokens.
        repetition_penalty: above 1 = tokens that occurred already become less probable.
        stop: strings that end an answer, besides the model's own end tokens.
        batch_size: answers that one replica generates at a time; others wait.
        prefill_tokens: maximum prompt tokens (padding included) per step; a single prompt may be longer.
        cache_tokens: size of one replica's key-value caches in tokens, padding included; counted in the
            plan's memory. Rows wait while their longest answers would not fit. "auto" = batch_size times
            data.max_length + max_new_tokens, or the model's context if that is less.
        split: rows of mode=predict: "eval" (held out, as in training) or "all".
        limit: mode=predict: maximum number of rows; None = all.
        system: system prompt of mode=chat; None = none.
    """

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
    split: str = "eval"
    limit: int | None = None
    system: str | None = None


@dataclass(frozen=True)
class ServeConfig:
    """The OpenAI-compatible server: `mode=serve`.

    Attributes:
        host: address to listen on; other machines can reach it (0.0.0.0, a network address) only with a key.
        port: port to listen on.
        api_key: key that clients send as "Authorization: Bearer ..."; None = the variable KT_RAY_API_KEY,
            else no key. Prefer the variable: other users of a machine can see command lines.
        name: name of the base model in requests; None = model.name.
        adapters: name in requests -> adapter directory (of kt_ray or PEFT), or a run directory that holds
            one.
        max_batch: answers that one replica generates at a time.
        max_queue: answers that may wait; further requests are refused (429).
        max_tokens: maximum tokens per answer, and the limit of chat requests that name none; None = the rest
            of the model's context.
        max_body: maximum bytes of a request.
    """

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
class Config:
    """Everything.

    Attributes:
        mode: "train", "plan" (placement and memory), "doctor" (this machine), "preview" (tokenized rows),
            "predict" (answers to held-out questions), "chat" (in the terminal), "serve" (a server compatible
            with OpenAI's), "eval" (metrics of predictions), "report" (a page about a run) or "compare" (runs
            side by side).
        seed: seed of data order, LoRA initialisation and dropout.
    """

    mode: str = "train"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    rule: RuleConfig = field(default_factory=RuleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    run: RunConfig = field(default_factory=RunConfig)
