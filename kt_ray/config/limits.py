"""What a single key may be: words, numbers, text. Data only; `checks` applies it, the reference prints it."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Modes that generate: their plan has caches, and nothing for training.
GENERATING = ("predict", "chat", "serve")

# Words of lists: each entry of the key is one of them.
LISTED: dict[str, tuple[str, ...]] = {
    "accept.only": ("here", "right", "fast", "runs", "quick"),
    "accept.against": ("kt", "torch", "peft", "grouped_mm"),
}

QUANTISING_BACKENDS = ("AMXINT8", "AMXINT4", "W4A8")  # quantise experts while they stream in
INT8_BACKENDS = ("AMXINT8", "W4A8")  # multiply them in int8

# Replicas whose decoding steps have no more rows do not wait for each other. A guess: the less they have, the
# fewer experts are chosen by both, and a wait is as long as ever.
FEW_ROWS = 16

# Words a key may have. Keys whose type also allows null or a number take those as well.
WORDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            *(
                "rule.gpus",
                "rule.gpu_memory",
                "rule.stages",
                "rule.replicas",
                "rule.resident_layers",
                "rule.worker_threads",
                "rule.groups",
            ),
            *("rule.wave", "rule.experts.copies", "trainer.micro_batch_size"),
            "trainer.micro_batch_tokens",
            *("rule.experts.sockets", "rule.experts.threads", "rule.ray.worker_cpus", "rule.ray.expert_cpus"),
            *("trainer.loss_chunk", "data.eval_fraction", "generate.cache_tokens"),
        ),
        ("auto",),
    ),
    "mode": (
        *("train", "plan", "doctor", "accept", "preview", "predict", "chat", "serve", "eval", "report"),
        *("compare", "train_server"),
    ),
    "plan.mode": ("train", "train_server"),
    "train_server.shared": ("experts", "layers"),
    "model.build": ("demo_base", "demo", "mini"),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.attn_implementation": ("sdpa", "eager"),
    "rule.device": ("auto", "cpu", "cuda"),
    "rule.attention_hosts": ("auto", "driver", "all"),
    "rule.transport": ("auto", "arena", "ray", "gloo"),
    "rule.experts.backend": ("auto", "AMXBF16", *QUANTISING_BACKENDS, "llamafile"),
    "rule.experts.isa": ("auto", "reference", "avx2", "avx512", "avx512_bf16", "amx"),
    "rule.activations": ("auto", "retain", "group", "micro_batch", "host", "ranges"),
    "rule.attention_output": ("auto", "retain", "recompute"),
    "rule.experts.activations": ("auto", "retain", "int8", "recompute"),
    "rule.experts.stream_to": ("auto", "actors", "workers"),
    "rule.experts.answers": ("float32", "bfloat16"),
    "generate.latent_keys": ("auto", "absorbed", "expanded"),
    "rule.experts.gpu_products": ("bfloat16", "float8"),
    "rule.experts.placement": ("auto", "contiguous", "balanced", "kept"),
    "rule.experts.stream": ("off", "auto"),
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
    "data.bad_rows": ("stop", "skip"),
    "lora.init": ("default", "gaussian", "pissa", "pissa_niter_16"),
    "optim.name": ("adamw", "deepspeed_cpu_adam", "muon"),
    "optim.schedule": ("cosine", "linear", "constant", "wsd", "inverse_sqrt"),
    "optim.decay_shape": ("cosine", "linear", "1-sqrt"),
    "trainer.stage": ("sft", "pt", "dpo", "orpo", "kto", "grpo"),
    "grpo.loss": ("grpo", "dr_grpo", "dapo", "gspo"),
    "preference.loss": ("sigmoid", "hinge", "ipo", "robust", "simpo"),
    "trainer.bad_steps": ("stop", "skip"),
    "tracking.name": ("jsonl", "wandb", "tensorboard", "mlflow", "swanlab", "trackio"),
    "tracking.mode": ("auto", "online", "offline"),
    "cluster.name": ("ray", "local"),
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


_KEYS_OF_BOUNDS = {
    Bound(1): """
        rule.gpus rule.gpu_memory rule.stages rule.replicas rule.worker_threads rule.wave rule.experts.sockets
        rule.experts.threads rule.experts.copies
        data.limit trainer.max_steps trainer.batch_size trainer.micro_batch_size trainer.micro_batch_tokens
        trainer.log_every
        generate.max_new_tokens generate.batch_size generate.prefill_tokens generate.cache_tokens
        generate.limit serve.max_batch serve.max_tokens serve.max_body train_server.adapters
        grpo.steps_per_rollout grpo.iterations train_server.trainings
    """,
    Bound(1, 8): "rule.groups",
    Bound(1, 64): "rule.nodes",
    Bound(0): """
        rule.resident_layers rule.experts.gpu_resident rule.ray.worker_cpus rule.ray.expert_cpus data.cache_gb
        data.eval_fraction optim.weight_decay optim.max_grad_norm optim.warmup preference.desirable_weight
        preference.undesirable_weight
        trainer.eval_every trainer.save_every trainer.keep_checkpoints trainer.preview trainer.loss_chunk
        trainer.recoveries trainer.restarts trainer.timeline_every trainer.aux_loss trainer.early_stopping
        trainer.early_stopping_threshold trainer.spike trainer.neftune_noise_alpha preference.gamma
        generate.min_new_tokens generate.temperature generate.top_k serve.max_queue eval.samples
        eval.after_training report.samples grpo.kl_coef grpo.overlong_buffer
    """,
    Bound(0, 1, open_low=True, open_high=True): "rule.experts.stream",
    Bound(0, 1, open_high=True): "lora.dropout",
    # the first token predicts, the second is predicted; answers are compared with each other
    Bound(2): "data.max_length grpo.group_size",
    Bound(1, 1024): "data.pad_to_multiple_of",
    Bound(1, 256): "lora.rank",
    Bound(0, open_low=True): """
        grpo.epsilon_high
        lora.alpha optim.decay preference.beta trainer.epochs trainer.step_timeout trainer.max_hours
        accept.minutes cluster.start_timeout generate.repetition_penalty
    """,
    Bound(1e-30): "optim.eps",  # beside a gradient of 0, float32 would divide 0 by 0
    Bound(0, 1, open_low=True): "grpo.epsilon optim.lr generate.top_p",
    Bound(0, 1): "optim.min_lr_ratio generate.min_p",
    Bound(1, 1000): "optim.lora_plus_ratio",
    Bound(0, 0.5, open_high=True): "preference.label_smoothing",
    Bound(1, 65535): "cluster.dashboard_port serve.port",
}
BOUNDS = {key: bound for bound, keys in _KEYS_OF_BOUNDS.items() for key in keys.split()}

# Texts (or lists of texts) that may be null, where the schema says so, but not empty, with what is required.
NOT_EMPTY: dict[str, str] = {
    **dict.fromkeys(("eval.adapter", "eval.base", "eval.out", "report.run"), "a path, or null"),
    **dict.fromkeys(("report.out", "compare.out", "plan.rates"), "a path, or null"),
    "plan.hardware": "a path, parts of a host, wizard, or null",
    "model.name": "a label",
    "model.path": "a directory, hf://ORG/NAME, or null",
    "model.experts_path": "a GGUF file, or null",
    "rule.experts.load": "a checkpoint directory, or null",
    "lora.target_modules": "auto, none, names or a regex",
    "lora.adapter": "a directory, or null",
    "tracking.project": "the name of a project",
    "cluster.namespace": "a name, or null",
    "generate.adapter": "a directory, or null",
    "generate.stop": "strings that are not empty",
    "serve.host": "an address",
    "serve.name": "a name, or null",
    "serve.api_key": "a key, or null",
    "train_server.directory": "a directory, or null",
    "reward": "a verifier, FILE.py or FILE.py:FUNCTION, or null",
    "compare.runs": "run directories or names",
    "run.root": "a directory",
    "accept.root": "a directory",
    "accept.resume": "latest or a directory, or null",
    "accept.kt": "a directory or a wheel, or null",
}
