"""A part of the schema: what is trained and how (`lora.*`, `optim.*`, `trainer.*`, `preference.*`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
            which keeps the rest; Meng et al. 2024; "pissa_niter_16" finds them by iteration). PiSSA needs
            lora.experts=false.
        rank_pattern: must stay null: every adapter has lora.rank (the reason is in the message).
    """

    rank: int = 8
    alpha: float = 16.0
    rslora: bool = False
    dropout: float = 0.0
    target_modules: str | list[str] = "auto"
    experts: bool = True
    init: str = "default"
    rank_pattern: dict[str, Any] | None = None

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
        stage: what is learned: "sft" (answers), "pt" (continued pre-training: every token), or
            from preferences "dpo", "orpo" (pairs) or "kto" (rows, wanted or not); see PreferenceConfig.
        epochs: passes over the data; ignored when max_steps is set.
        max_steps: optimizer steps; None = from epochs.
        batch_size: rows per optimizer step, over all replicas.
        micro_batch_size: rows per forward of an attention worker.
        eval_every: steps between evaluations (also at start and end); 0 = never.
        save_every: steps between checkpoints (also at the end); 0 = only at the end.
        keep_checkpoints: newest checkpoints kept; 0 = all.
        resume: None; "latest" = go on where the run stopped (run.name, else the newest run); or a
            checkpoint directory.
        preview: decode and print this many rows with the trained tokens marked, before training.
        loss_chunk: rows of logits per cross-entropy chunk; "auto" = only when logits would
            dominate, 0 = never.
        step_timeout: seconds without progress after which a step is given up with a report.
        log_every: steps between log lines on a terminal without a progress bar.
        recoveries: how often a run starts lost actors again and repeats from its last committed state; 0 =
            a death ends the run.
        timeline_every: steps between timelines (Chrome trace of all actors, under timelines/ of the run
            directory); 0 = never.
        aux_loss: coefficient of the routers' load-balancing loss, as transformers computes it over the whole
            step; costs a forward pass more. Routers stay frozen: its gradient reaches the LoRA before them;
            0 = off.
        max_hours: the run stops with a checkpoint before this many hours have passed since the command
            began; null = no limit.
        early_stopping: evaluations in a row without a lower held-out loss after which the run stops; 0 =
            never.
        early_stopping_threshold: by how much the held-out loss must fall to count as lower.
        save_best: keep the checkpoint with the lowest held-out loss (checkpoints/best), and write the
            adapter from it.
        spike: a step whose loss (of sft, pt and orpo) or gradient norm is more than this many times the
            median of the last 16 steps is not applied; 0 = only steps that are not finite.
        bad_steps: what follows a step that is not applied: "stop", or "skip" (go on with the next one).
        profile_steps: numbers of the steps of which attention workers write a torch.profiler trace, under
            profile/ of the run directory.
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
        loss: of dpo: "sigmoid", "hinge", "ipo" or "robust".
        beta: dpo and kto: strength of the reference (ipo: its tau); orpo: weight of the odds ratio.
        label_smoothing: of dpo's sigmoid and robust: share of pairs taken to be the wrong way round.
        desirable_weight: of kto: weight of wanted rows.
        undesirable_weight: of kto: weight of unwanted rows.
    """

    loss: str = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
