"""What a single key may be: words, numbers, text. Data only; `checks` applies it, the reference prints it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Modes that generate: their plan has caches, and nothing for training.
GENERATING = ("predict", "chat", "serve")

# Words a key may have. Keys whose type also allows null or a number take those as well.
WORDS: dict[str, tuple[str, ...]] = {
    "mode": ("train", "plan", "doctor", "preview", "predict", "chat", "serve", "eval", "report", "compare"),
    "model.build": ("demo_base", "demo", "mini"),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.attn_implementation": ("sdpa", "eager"),
    "rule.device": ("auto", "cpu", "cuda"),
    "rule.stages": ("auto",),
    "rule.replicas": ("auto",),
    "rule.worker_threads": ("auto",),
    "rule.groups": ("auto",),
    "rule.wave": ("auto",),
    "rule.transport": ("auto", "arena", "ray", "gloo"),
    "rule.experts.sockets": ("auto",),
    "rule.experts.backend": ("auto", "AMXBF16", "AMXINT8", "AMXINT4", "llamafile"),
    "rule.experts.isa": ("auto", "reference", "avx2", "avx512", "avx512_bf16", "amx"),
    "rule.experts.threads": ("auto",),
    "rule.experts.activations": ("auto", "retain", "recompute"),
    "rule.experts.placement": ("auto", "contiguous", "balanced"),
    "rule.experts.stream": ("off", "auto"),
    "rule.ray.worker_cpus": ("auto",),
    "rule.ray.expert_cpus": ("auto",),
    "rule.ray.strategy": ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"),
    "data.builtin": ("demo",),
    "data.format": (
        *("auto", "alpaca", "sharegpt", "messages", "prompt_completion", "preference", "kto", "text"),
    ),
    "data.template": (
        *("chatml", "deepseek3", "kimi", "llama3", "mistral", "olmoe", "phi3", "plain", "qwen"),
    ),
    "data.train_on": ("all", "last"),
    "data.overflow": ("truncate", "drop"),
    "lora.init": ("default", "gaussian", "pissa", "pissa_niter_16"),
    "optim.name": ("adamw", "deepspeed_cpu_adam", "muon"),
    "optim.schedule": ("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
    "optim.decay_shape": ("cosine", "linear", "1-sqrt"),
    "trainer.loss_chunk": ("auto",),
    "trainer.stage": ("sft", "pt", "dpo", "orpo", "kto"),
    "preference.loss": ("sigmoid", "hinge", "ipo", "robust"),
    "trainer.bad_steps": ("stop", "skip"),
    "tracking.name": ("jsonl", "wandb"),
    "tracking.mode": ("auto", "online", "offline"),
    "cluster.name": ("ray", "local"),
    "generate.cache_tokens": ("auto",),
    "generate.answer": ("auto", "adapter", "base", "both"),
    "generate.split": ("eval", "all"),
    "eval.choice": ("auto", "on", "off"),
    "compare.sort": ("name", "loss", "eval_loss", "tokens_per_s"),
}


@dataclass(frozen=True)
class Bound:
    """Numbers a key may have: low <= value <= high, or strict where `open_low` / `open_high`."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def holds(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"{'more than' if self.open_low else 'at least'} {self.low:g}"
        if math.isinf(self.high):
            return low
        return f"{low} and {'less than' if self.open_high else 'at most'} {self.high:g}"


BOUNDS: dict[str, Bound] = {
    "rule.stages": Bound(1),
    "rule.replicas": Bound(1),
    "rule.worker_threads": Bound(1),
    "rule.groups": Bound(1, 8),
    "rule.wave": Bound(1),
    "rule.nodes": Bound(1, 64),
    "rule.experts.sockets": Bound(1),
    "rule.experts.threads": Bound(1),
    "rule.experts.gpu_resident": Bound(0),
    "rule.experts.stream": Bound(0, 1, open_low=True, open_high=True),
    "rule.ray.worker_cpus": Bound(0),
    "rule.ray.expert_cpus": Bound(0),
    "data.eval_fraction": Bound(0, 1, open_high=True),
    "data.max_length": Bound(2),  # the first token predicts, the second is predicted
    "data.limit": Bound(1),
    "data.pad_to_multiple_of": Bound(1, 1024),
    "data.cache_gb": Bound(0),
    "lora.rank": Bound(1, 256),
    "lora.alpha": Bound(0, open_low=True),
    "lora.dropout": Bound(0, 1, open_high=True),
    "optim.lr": Bound(0, 1, open_low=True),
    "optim.eps": Bound(0, open_low=True),
    "optim.weight_decay": Bound(0),
    "optim.max_grad_norm": Bound(0),
    "optim.warmup": Bound(0),
    "optim.min_lr_ratio": Bound(0, 1),
    "optim.decay": Bound(0, open_low=True),
    "optim.lora_plus_ratio": Bound(1, 1000),
    "preference.beta": Bound(0, open_low=True),
    "preference.label_smoothing": Bound(0, 0.5, open_high=True),
    "preference.desirable_weight": Bound(0),
    "preference.undesirable_weight": Bound(0),
    "trainer.epochs": Bound(0, open_low=True),
    "trainer.max_steps": Bound(1),
    "trainer.batch_size": Bound(1),
    "trainer.micro_batch_size": Bound(1),
    "trainer.eval_every": Bound(0),
    "trainer.save_every": Bound(0),
    "trainer.keep_checkpoints": Bound(0),
    "trainer.preview": Bound(0),
    "trainer.loss_chunk": Bound(0),
    "trainer.step_timeout": Bound(0, open_low=True),
    "trainer.log_every": Bound(1),
    "trainer.recoveries": Bound(0),
    "trainer.timeline_every": Bound(0),
    "trainer.aux_loss": Bound(0),
    "trainer.max_hours": Bound(0, open_low=True),
    "trainer.early_stopping": Bound(0),
    "trainer.early_stopping_threshold": Bound(0),
    "trainer.spike": Bound(0),
    "cluster.dashboard_port": Bound(1, 65535),
    "cluster.start_timeout": Bound(0, open_low=True),
    "cluster.load_timeout": Bound(0, open_low=True),
    "generate.max_new_tokens": Bound(1),
    "generate.min_new_tokens": Bound(0),
    "generate.temperature": Bound(0),
    "generate.top_p": Bound(0, 1, open_low=True),
    "generate.top_k": Bound(0),
    "generate.min_p": Bound(0, 1),
    "generate.repetition_penalty": Bound(0, open_low=True),
    "generate.batch_size": Bound(1),
    "generate.prefill_tokens": Bound(1),
    "generate.cache_tokens": Bound(1),
    "generate.limit": Bound(1),
    "serve.port": Bound(1, 65535),
    "serve.max_batch": Bound(1),
    "serve.max_queue": Bound(0),
    "serve.max_tokens": Bound(1),
    "serve.max_body": Bound(1),
    "eval.samples": Bound(0),
    "eval.after_training": Bound(0),
    "report.samples": Bound(0),
}

# Texts (or lists of texts) that may be null, where the schema says so, but not empty, with what is required.
NOT_EMPTY: dict[str, str] = {
    "model.name": "a label",
    "model.path": "a directory, or null",
    "model.experts_path": "a GGUF file, or null",
    "rule.experts.load": "a checkpoint directory, or null",
    "lora.target_modules": "auto, none, names or a regex",
    "tracking.project": "the name of a W&B project",
    "cluster.namespace": "a name, or null",
    "generate.adapter": "a directory, or null",
    "generate.stop": "strings that are not empty",
    "serve.host": "an address",
    "serve.name": "a name, or null",
    "serve.api_key": "a key, or null",
    "eval.adapter": "a path, or null",
    "eval.base": "a path, or null",
    "eval.out": "a path, or null",
    "report.run": "a path, or null",
    "report.out": "a path, or null",
    "compare.runs": "run directories or names",
    "compare.out": "a path, or null",
    "run.root": "a directory",
}
