"""Checks of lora, optim, preference and trainer: keys that must go together."""

from __future__ import annotations

import importlib.util

from kt_ray.config.fields import closest
from kt_ray.config.key_errors import check_regex, fault
from kt_ray.config.schema import Config


def check_lora(config: Config) -> None:
    target = config.lora.target_modules
    if isinstance(target, list):
        if not target or not all(target):
            raise fault(
                "lora.target_modules",
                target,
                "names no module",
                "auto, none, names or a regex",
                "set lora.target_modules=auto, or none to leave the non-expert part frozen",
            )
    elif target not in ("auto", "none"):
        if not target:
            raise fault("lora.target_modules", "''", "is empty", "auto, none, names or a regex")
        check_regex("lora.target_modules", target)
    _lora_init(config)
    if target == "none" and not config.lora.experts:
        raise fault(
            "lora.target_modules",
            target,
            "with lora.experts=false leaves nothing to train",
            "LoRA on the experts, elsewhere, or both",
            "set lora.target_modules=auto or lora.experts=true",
        )


def _lora_init(config: Config) -> None:
    lora = config.lora
    if lora.rank_pattern:
        raise fault(
            "lora.rank_pattern",
            lora.rank_pattern,
            "gives modules ranks of their own, but the engine computes all experts of a layer with adapters "
            "of one rank, and PEFT merges experts' adapters into fused ones of one rank",
            "null",
            "set lora.rank_pattern=null and lora.rank to the largest rank, or leave modules out with "
            "lora.target_modules",
        )
    if not lora.init.startswith("pissa"):
        return
    if lora.experts:
        raise fault(
            "lora.init",
            lora.init,
            "with lora.experts=true would take the largest singular values out of the routed experts, whose "
            "weights stay as stored: rounded to their format again, the rest is another model",
            "default or gaussian with lora.experts=true",
            "set lora.init=default, or lora.experts=false",
        )
    if config.model.keep_quantized:
        raise fault(
            "lora.init",
            lora.init,
            "changes weights that model.keep_quantized=true leaves as stored",
            "default or gaussian with model.keep_quantized=true",
            "set lora.init=default, or model.keep_quantized=false",
        )


def _optim_name(config: Config) -> None:
    if config.optim.name != "deepspeed_cpu_adam":
        return
    if not config.lora.experts:
        raise fault(
            "optim.name",
            config.optim.name,
            "is for the experts' LoRA, but lora.experts=false",
            "adamw or muon with lora.experts=false",
            "set optim=adamw",
        )
    if importlib.util.find_spec("deepspeed") is None:
        raise fault(
            "optim.name",
            config.optim.name,
            "needs deepspeed, which is not installed",
            "the package deepspeed",
            "pip install deepspeed, or set optim=adamw",
        )


def check_optim(config: Config) -> None:
    optim, steps = config.optim, config.trainer.max_steps
    _optim_name(config)
    if optim.decay > 1 and optim.decay != int(optim.decay):
        raise fault(
            "optim.decay",
            optim.decay,
            "is neither a share nor a whole number of steps",
            "less than 1 (a share) or a whole number",
            f"set optim.decay={int(optim.decay)}",
        )
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise fault("optim.betas", optim.betas, "is out of range", "two numbers at least 0 and less than 1")
    if optim.warmup > 1 and optim.warmup != int(optim.warmup):
        raise fault(
            "optim.warmup",
            optim.warmup,
            "is neither a share nor a whole number of steps",
            "less than 1 (a share) or a whole number",
            f"set optim.warmup={int(optim.warmup)}",
        )
    if steps is not None and optim.warmup >= 1 and optim.warmup > steps:
        raise fault(
            "optim.warmup",
            optim.warmup,
            f"is more steps than trainer.max_steps={steps}",
            f"at most {steps}, or a share below 1",
            "set optim.warmup=0.03 or raise trainer.max_steps",
        )


def _preference(config: Config) -> None:
    stage, own = config.trainer.stage, config.preference
    if own.label_smoothing and (stage != "dpo" or own.loss not in ("sigmoid", "robust")):
        raise fault(
            "preference.label_smoothing",
            own.label_smoothing,
            f"has no meaning for trainer.stage={stage} with preference.loss={own.loss}",
            "0, or trainer.stage=dpo with preference.loss=sigmoid or robust",
        )
    if stage in ("dpo", "kto") and config.lora.init.startswith("pissa"):
        raise fault(
            "trainer.stage",
            stage,
            f"takes the model without adapters as its reference, which lora.init={config.lora.init} changes",
            "lora.init=default or gaussian",
            "set lora.init=default, or trainer.stage=orpo (no reference)",
        )


def check_trainer(config: Config) -> None:
    _preference(config)
    trainer = config.trainer
    for key, wanted in (("early_stopping", trainer.early_stopping), ("save_best", trainer.save_best)):
        if wanted and not trainer.eval_every:
            raise fault(
                f"trainer.{key}",
                wanted,
                "goes by the held-out loss, but trainer.eval_every=0",
                "evaluations during the run",
                "set trainer.eval_every=<steps>",
            )
    if 0 < trainer.spike <= 1:
        raise fault(
            "trainer.spike",
            trainer.spike,
            "would refuse ordinary steps",
            "more than 1, or 0",
            "set trainer.spike=5",
        )
    for step in trainer.profile_steps:
        if step < 1:
            raise fault("trainer.profile_steps", trainer.profile_steps, "counts steps from 1", "at least 1")
    if trainer.micro_batch_size > trainer.batch_size:
        raise fault(
            "trainer.micro_batch_size",
            trainer.micro_batch_size,
            f"is more than trainer.batch_size={trainer.batch_size}",
            f"at most {trainer.batch_size}",
            f"set trainer.micro_batch_size={trainer.batch_size} or raise trainer.batch_size",
        )
    resume = trainer.resume
    if resume is None:
        return
    if config.run.overwrite:
        raise fault(
            "run.overwrite",
            True,
            f"with trainer.resume={resume} would delete the run to resume",
            "one of the two",
            "set run.overwrite=false to resume, or trainer.resume=null to begin anew",
        )
    match = closest(resume, ("latest",))
    if resume != "latest" and "/" not in resume and (match or not resume):
        raise fault(
            "trainer.resume",
            resume or "''",
            "is neither latest nor a directory; did you mean latest?",
            "latest or a checkpoint directory",
            "set trainer.resume=latest, or ./NAME for a directory",
        )
