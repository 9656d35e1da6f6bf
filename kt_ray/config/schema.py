"""The options of kt_ray as frozen dataclasses: one class per Hydra group.

The YAML files under `conf/` hold the defaults that users see; these classes hold the types and
the meaning. Checks that involve several fields live in `kt_ray.config.checks`. Nothing here
imports torch, ray or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kt_ray.config.schema_place import ExpertsRule as ExpertsRule
from kt_ray.config.schema_place import ModelConfig as ModelConfig
from kt_ray.config.schema_place import RayRule as RayRule
from kt_ray.config.schema_train import LoraConfig as LoraConfig
from kt_ray.config.schema_train import OptimConfig as OptimConfig
from kt_ray.config.schema_train import PreferenceConfig as PreferenceConfig
from kt_ray.config.schema_train import TrainerConfig as TrainerConfig


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
            what it brings).
        transport: how tensors travel between actors: "auto" (shared memory within a node, the faster of the
            others between nodes), "arena" (shared memory; one node only), "ray" or "gloo".
        nodes: hosts whose sockets hold experts, all like this one; attention stays on the driver's. More than
            one needs a running Ray cluster, and model and run directories that all of them see.
        experts: see ExpertsRule.
        ray: see RayRule.
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
        name: label; "jsonl" is replaced by the file's name.
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
        columns: the files' names of columns that are called otherwise there: {instruction: question}; null =
            a column that is not read, though the files have it: {input: null}.
        template: chat template by name (kt_ray/data/templates), or "plain" (no turns: question and answer
            are one text); None = the tokenizer's own, or model.chat_template.
        date: YYYY-MM-DD, for templates that write the date (strftime_now); None = the day on which the run
            begins, kept in its config.yaml, so that it goes on with the same tokens.
        train_on: "all" answers of a conversation, or the "last" one (all answers after the last question).
        eval_path: file, directory or hub data set of held-out rows; None = `eval_fraction` of `path`.
        eval_split: split of `eval_path`, as `split`; None = of several its validation or else its test rows.
        eval_fraction: share of rows held out when `eval_path` is None (0 = no evaluation).
        max_length: tokens per row; longer rows are truncated and reported, or dropped.
        overflow: "truncate" or "drop" for rows longer than max_length.
        pad_to_multiple_of: width of micro-batches; 8 spares a CPU (bfloat16) new products per length of row.
        system: system prompt put before rows that have none; None = none.
        shuffle: shuffle rows each epoch (by the run's seed).
        limit: use the first N rows only; None = all.
        packing: fill rows up to max_length with several short ones, each in attention and positions alone.
            trainer.batch_size then counts filled rows.
        group_by_length: rows of a batch have similar lengths, which saves padding where
            trainer.micro_batch_size > 1.
        cache_gb: size limit of the cache of tokenised rows ($KT_RAY_CACHE/tokens); 0 = no cache.
    """

    name: str = "jsonl"
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
        dashboard_port: port of the dashboard (the next free one is taken).
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
    """`mode=plan`; `rates` for `mode=doctor` and the prediction of `mode=train`, too.

    Attributes:
        hardware: YAML file describing other hardware to plan for, or the name of one in
            conf/hardware; None = the rule's nominal hardware if it names GPUs or an ISA that this
            host lacks, else this host.
        rates: JSON file with measured rates (mode=doctor writes it there); "auto" = what mode=doctor stored
            for this host, else nominal ones; "nominal" = as if nothing had been measured (mode=doctor then
            measures nothing).
        reference: show the same terms under the reference system's schedule as well.
    """

    hardware: str | None = None
    rates: str = "auto"
    reference: bool = False


@dataclass(frozen=True)
class EvalConfig:
    """`mode=eval`: metrics of predictions, base model against adapter. Predictions that are not there yet are
    generated as `generate` says: name the adapter by generate.adapter or, if it is a run's, by run.name.

    Attributes:
        adapter: the fine-tuned model's answers (its adapter is generate.adapter): a predictions.jsonl, or a
            run directory that holds one; None = those of the run run.name, unless `base` is given.
        base: the base model's answers to the same prompts, likewise; None = those beside the adapter's
            (column "base", or predictions_base.jsonl), if there are any.
        choice: "on" = the labels are option letters, and letter accuracy is measured; "off"; "auto" = on if
            every label is one.
        letters: the options' letters.
        samples: prompts shown with both answers.
        out: directory for eval.json and eval.md; None = where the answers lie.
        after_training: `mode=train`: held-out rows that base and adapter answer at the end, in the cluster
            that has just trained, for the same table; 0 = none.
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
        overwrite: allow a run directory that already holds a run (never needed with trainer.resume).
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
        max_new_tokens: tokens of one answer at the most.
        min_new_tokens: no end of the answer before so many tokens.
        temperature: 0 = the most probable token always.
        top_p: share of the probability that is kept; 1 = all.
        top_k: most probable tokens that are kept; 0 = all.
        min_p: least probability kept, as a share of the most probable token's; 0 = all.
        repetition_penalty: more than 1 makes tokens that were there already less probable.
        stop: strings that end an answer, besides the model's own end tokens.
        batch_size: answers of one replica that are generated at the same time; others wait.
        prefill_tokens: prompt tokens (padding included) that one step reads in at the most; a single prompt
            may be longer.
        cache_tokens: tokens, padding included, that the key-value caches of one replica have room for, which
            the plan's memory counts; rows wait while their longest answers would not fit. "auto" = for each
            of batch_size rows data.max_length and max_new_tokens, or the model's context where that is less.
        split: rows of mode=predict: "eval" (the held-out ones, as in training) or "all".
        limit: of mode=predict: rows at the most; None = all.
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
        host: address to listen on; beyond this machine (0.0.0.0, an address of its network) only with a key.
        port: to listen on.
        api_key: what clients send as "Authorization: Bearer ..."; None = the variable KT_RAY_API_KEY, and
            without one no key is asked for. Prefer the variable: other users of a machine see command lines.
        name: of the base model in requests; None = model.name.
        adapters: name in requests -> adapter directory (of kt_ray or PEFT), or a run directory that holds
            one.
        max_batch: answers of one replica that are generated at the same time.
        max_queue: answers that wait beside them; beyond, requests are refused (429).
        max_tokens: tokens of one answer at the most, and of a chat answer whose request names no limit;
            None = what is left of the model's context.
        max_body: bytes of a request at the most.
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
        model: see ModelConfig.
        rule: see RuleConfig.
        data: see DataConfig.
        lora: see LoraConfig.
        optim: see OptimConfig.
        trainer: see TrainerConfig.
        preference: see PreferenceConfig.
        tracking: see TrackingConfig.
        cluster: see ClusterConfig.
        generate: see GenerateConfig.
        serve: see ServeConfig.
        plan: see PlanConfig.
        eval: see EvalConfig.
        report: see ReportConfig.
        compare: see CompareConfig.
        run: see RunConfig.
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
