"""Every check of a configuration that needs neither files nor hardware.

Two tables (kt_ray/config/limits.py: allowed words, numeric bounds) cover single keys; the functions
below, and layer_checks.py for rule.layers, cover keys that must go together. The first fault found is
raised; each names the key, the value, the reason and what to write instead.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from kt_ray.config.data_checks import check_data
from kt_ray.config.faults import check_regex, fault
from kt_ray.config.fields import closest, show
from kt_ray.config.layer_checks import DEVICE, check_layers
from kt_ray.config.limits import BOUNDS, WORDS
from kt_ray.config.schema import Config, ExpertsRule

# Seeds are 64-bit counters of the random streams; the sign bit stays free.
SEED_LIMIT = 2**63

_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/:]+:\d+")


def check(config: Config) -> None:
    """Raises UserError for the first value, or combination of values, that cannot work."""
    for key, words in WORDS.items():
        _check_word(key, value_of(config, key), words)
    for key, bound in BOUNDS.items():
        value = value_of(config, key)
        if value is not None and not isinstance(value, str) and not bound.holds(value):
            raise fault(key, value, "is out of range", str(bound))
    for key in ("seed", "model.seed"):
        if not 0 <= value_of(config, key) < SEED_LIMIT:
            raise fault(key, value_of(config, key), "is out of range", "at least 0 and less than 2**63")
    parts = (_model, _rule, check_layers, _data, _lora, _optim, _trainer, _generate, _serve, _cluster)
    for part in (*parts, _results, _run):
        part(config)


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _check_word(key: str, value: Any, words: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value in words:
        return
    match = closest(value, words)
    numeric = key in BOUNDS
    allowed = " or ".join([*words, f"a number {BOUNDS[key]}"] if numeric else words)
    reason = "is not known" + (f"; did you mean {match}?" if match else "")
    raise fault(key, value, reason, allowed, f"set {key}={match or words[0]}")


def _model(config: Config) -> None:
    model = config.model
    if not model.name:
        raise fault("model.name", "''", "is empty", "a label", "set model.name=custom")
    if model.path == "":
        raise fault("model.path", "''", "is empty", "a directory", "set model.path=<directory>")
    if model.experts_path == "":
        raise fault(
            "model.experts_path", "''", "is empty", "a GGUF file", "set model.experts_path=<file.gguf>"
        )
    if model.experts_path is not None and model.build is not None:
        raise fault(
            "model.experts_path",
            model.experts_path,
            f"has no meaning for model={model.name}, which is built with experts of its own",
            "a checkpoint in model.path beside it",
            "set model.path=<directory>, or model.experts_path=null",
        )
    if model.path is None and model.build == "demo_base":
        for key, given in (("seed", model.seed or None), ("tokenizer", model.tokenizer)):
            if given is not None:
                raise fault(
                    f"model.{key}",
                    given,
                    f"has no meaning for model={model.name}, which is pretrained with a tokenizer of its own",
                    "its default",
                    f"leave model.{key} out, or take random weights: model=demo_random",
                )
    if model.path is None and model.build is None:
        if config.mode in ("train", "predict", "chat", "serve") or (
            config.mode == "preview" and model.tokenizer is None
        ):
            raise fault(
                "model.path",
                None,
                f"but mode={config.mode} needs the checkpoint of model={model.name}",
                "a Hugging Face directory with config.json, *.safetensors and a tokenizer",
                "set model.path=<directory>"
                + (", or mode=plan to see the placement without weights" if model.config else ""),
            )
        if config.mode == "plan" and model.config is None:
            raise fault(
                "model.path",
                None,
                "and model.config is empty, so there is nothing to plan",
                "a checkpoint directory or a model with known dimensions",
                "set model.path=<directory> or model=deepseek_v3",
            )


def _rule(config: Config) -> None:
    rule, backend, file = config.rule, config.rule.experts.backend, config.model.experts_path
    if backend == "llamafile" and file is None:
        raise fault(
            "rule.experts.backend",
            backend,
            "reads the routed experts from a GGUF file, but model.experts_path=null",
            "a GGUF file of the same model",
            "set model.experts_path=<file.gguf>, or rule.experts.backend=auto (the checkpoint's own format)",
        )
    if file is not None and backend in ("AMXINT8", "AMXINT4"):
        raise fault(
            "rule.experts.backend",
            backend,
            f"would quantise the quantised experts of model.experts_path={file} again",
            "auto or llamafile with a GGUF file",
            "set rule.experts.backend=llamafile, or model.experts_path=null",
        )
    placed = rule.experts
    if placed.load == "":
        raise fault(
            "rule.experts.load", "''", "is empty", "a checkpoint directory", "set rule.experts.load=null"
        )
    if placed.placement == "balanced" and placed.load is None and config.trainer.resume is None:
        raise fault(
            "rule.experts.placement",
            placed.placement,
            "needs a load, but rule.experts.load=null and nothing is resumed",
            "a checkpoint of an earlier run, which holds a histogram",
            "set rule.experts.load=<checkpoint directory>, or rule.experts.placement=auto",
        )
    _lane(placed, backend)
    if rule.replica_count > config.trainer.batch_size:
        raise fault(
            "rule.replicas",
            rule.replicas,
            f"is more than trainer.batch_size={config.trainer.batch_size}: a replica would never have a row",
            f"at most {config.trainer.batch_size}",
            f"set rule.replicas={config.trainer.batch_size} or trainer.batch_size={rule.replicas}",
        )


def _lane(rule: ExpertsRule, backend: str) -> None:
    """Experts on a GPU: where, and what it cannot compute."""
    if rule.lane_device != "auto" and not DEVICE.fullmatch(rule.lane_device):
        raise fault(
            "rule.experts.lane_device",
            rule.lane_device or "''",
            "is not a device",
            "auto, cuda:0, cuda:1, … or cpu",
            "set rule.experts.lane_device=auto",
        )
    for key, value, off in (("gpu_resident", rule.gpu_resident, 0), ("stream", rule.stream, "off")):
        if value != off and backend == "AMXINT8":
            raise fault(
                f"rule.experts.{key}",
                value,
                "clashes with rule.experts.backend=AMXINT8: the engine then multiplies in int8, a GPU would "
                "multiply the same experts in bfloat16",
                "a backend that computes in bfloat16 or float32",
                f"set rule.experts.backend=auto (weights stored as int8 stay so), or "
                f"rule.experts.{key}={show(off)}",
            )


def _data(config: Config) -> None:
    data = config.data
    check_data(config)
    if (
        config.mode == "train"
        and config.trainer.eval_every
        and not data.eval_fraction
        and data.eval_path is None
    ):
        raise fault(
            "trainer.eval_every",
            config.trainer.eval_every,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "held-out rows, or 0",
            "set trainer.eval_every=0 or data.eval_fraction=0.05",
        )


def _lora(config: Config) -> None:
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


def _optim(config: Config) -> None:
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


def _trainer(config: Config) -> None:
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


def _generate(config: Config) -> None:
    generate = config.generate
    if generate.min_new_tokens > generate.max_new_tokens:
        raise fault(
            "generate.min_new_tokens",
            generate.min_new_tokens,
            f"is more than generate.max_new_tokens={generate.max_new_tokens}",
            f"at most {generate.max_new_tokens}",
            "set generate.min_new_tokens=0 or raise generate.max_new_tokens",
        )
    if generate.adapter == "" or not all(generate.stop):
        key = "generate.adapter" if generate.adapter == "" else "generate.stop"
        raise fault(
            key, "''", "is empty", "a directory" if key.endswith("adapter") else "strings", "leave it out"
        )
    if generate.adapter is None and generate.answer in ("adapter", "both"):
        raise fault(
            "generate.answer",
            generate.answer,
            "needs an adapter, but generate.adapter=null",
            "an adapter directory",
            "set generate.adapter=<directory>, or generate.answer=base",
        )
    held_out = config.data.eval_fraction or config.data.eval_path is not None
    if config.mode == "predict" and generate.split == "eval" and not held_out:
        raise fault(
            "generate.split",
            generate.split,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "held-out rows, or all",
            "set generate.split=all or data.eval_path=<file>",
        )


def _serve(config: Config) -> None:
    serve = config.serve
    for key in ("host", "name", "api_key"):
        if getattr(serve, key) == "":
            raise fault(f"serve.{key}", "''", "is empty", "text", f"leave serve.{key} out")
    if config.mode == "serve" and config.generate.adapter is not None:
        raise fault(
            "generate.adapter",
            config.generate.adapter,
            "has no meaning with mode=serve, where requests name adapters",
            "serve.adapters",
            f"set serve.adapters={{NAME: {config.generate.adapter}}}",
        )
    for name, directory in (serve.adapters or {}).items():
        if not name.strip() or not directory or name == (serve.name or config.model.name):
            what = (
                "an adapter has the base model's name" if name.strip() and directory else "something is empty"
            )
            raise fault(
                "serve.adapters",
                f"{{{name}: {directory}}}",
                f"is no list of adapters: {what}",
                "{NAME: DIRECTORY}, each name another one",
                "correct serve.adapters, or give the base model another name: serve.name=NAME",
            )


def _cluster(config: Config) -> None:
    address = config.cluster.address
    if not _ADDRESS.fullmatch(address):
        match = closest(address, ("auto", "local"))
        raise fault(
            "cluster.address",
            address,
            "is no address" + (f"; did you mean {match}?" if match else ""),
            "auto, local or HOST:PORT",
            f"set cluster.address={match or 'auto'}",
        )
    if config.cluster.namespace == "":
        raise fault("cluster.namespace", "''", "is empty", "a name or null")
    if config.tracking.name == "wandb" and not config.tracking.project:
        raise fault("tracking.project", "''", "is empty", "a W&B project name")


def _results(config: Config) -> None:
    """What eval, report and compare read and write."""
    for key in ("eval.adapter", "eval.base", "eval.out", "report.run", "report.out", "compare.out"):
        value = value_of(config, key)
        if value is not None and not value.strip():
            raise fault(key, "''", "is empty", "a path", f"set {key}=null")
    there = next((key for key in ("eval.adapter", "eval.base") if value_of(config, key) is not None), None)
    if config.mode == "eval" and config.generate.adapter is not None and there:
        raise fault(
            there,
            value_of(config, there),
            f"names answers that there are, but generate.adapter={config.generate.adapter} asks for new ones",
            "one of the two",
            f"leave out {there} or generate.adapter",
        )
    held_out = config.data.eval_fraction or config.data.eval_path is not None
    if config.mode == "train" and config.eval.after_training and not held_out:
        raise fault(
            "eval.after_training",
            config.eval.after_training,
            "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
            "0, or held-out rows",
            "set eval.after_training=0, data.eval_fraction or data.eval_path",
        )
    if config.mode == "train" and config.eval.after_training and config.lora.init.startswith("pissa"):
        raise fault(
            "eval.after_training",
            config.eval.after_training,
            f"asks the model without its adapter, whose weights lora.init={config.lora.init} changes",
            "0 with lora.init=pissa",
            "set eval.after_training=0, and run mode=eval generate.adapter=<run> afterwards",
        )
    letters = config.eval.letters
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,}", letters):
        raise fault(
            "eval.letters",
            letters or "''",
            "names no options",
            "at least two different capital letters",
            "set eval.letters=ABCD",
        )
    if not all(run.strip() for run in config.compare.runs):
        raise fault("compare.runs", config.compare.runs, "has an empty name", "run directories or names")


def _run(config: Config) -> None:
    name = config.run.name
    if name is not None and (not name.strip() or re.search(r"[/\\\x00-\x1f]", name) or name in (".", "..")):
        raise fault(
            "run.name",
            name or "''",
            "cannot be a directory name",
            "a name without slashes",
            "set run.name=<name> and put the directory into run.root",
        )
    if not config.run.root:
        raise fault("run.root", "''", "is empty", "a directory")
    if config.plan.hardware is not None and config.mode != "plan":
        raise fault(
            "plan.hardware",
            config.plan.hardware,
            f"has no meaning with mode={config.mode}",
            "mode=plan",
            "set mode=plan, or plan.hardware=null",
        )
    if config.plan.reference and config.mode != "plan":
        raise fault(
            "plan.reference",
            True,
            f"has no meaning with mode={config.mode}",
            "mode=plan",
            "set mode=plan, or plan.reference=false",
        )
