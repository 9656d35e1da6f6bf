"""Every check of a configuration that needs neither files nor hardware.

`kt_ray.config.limits` has what single keys may be; the functions below check keys that must go together. They
yield a `Fault` each; the first is raised.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kt_ray.config.data_checks import data_faults, source_faults
from kt_ray.config.faults import Fault, guess, quoted, regex_faults, value_of
from kt_ray.config.fields import closest, fields, show
from kt_ray.config.interval import EPOCHS_FORM, FORM, epochs_of, seconds_of
from kt_ray.config.limits import BOUNDS, INT8_BACKENDS, LISTED, NOT_EMPTY, QUANTISING_BACKENDS, WORDS
from kt_ray.config.lora_checks import lora_faults
from kt_ray.config.schema import Config, GrpoConfig, PreferenceConfig
from kt_ray.errors import UserError

# Seeds are 64-bit counters of the random streams; the sign bit stays free.
SEED_LIMIT = 2**63

_ADDRESS = re.compile(r"auto|local|(ray://)?(\[[\w:.%]+\]|[^\s/:]+):\d+")
_DEVICE = re.compile(r"cpu|cuda:\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_LAYER_STYLES = (
    "counts [31,30], ranges ['0-30','31-60'], ranges with devices [{layers: '0-60', device: 'cuda:0'}] "
    "or patterns [{match: REGEX, device: 'cuda:0'}]"
)


def check(config: Config) -> None:
    """Raises UserError for the first value, or combination of values, that cannot work."""
    for part in (
        *(single_keys, _model, _rule, _layers, data_faults, source_faults, lora_faults),
        *(_optim, _trainer, _grpo, _answers, _serve, _train_server, _place),
    ):
        for fault in part(config):
            raise _error(config, fault)


def check_warmup(config: Config, steps: int, rows: int) -> None:
    """The same for the warm-up of a run whose steps follow from its rows."""
    for fault in _warmup(config, steps, rows):
        raise _error(config, fault)


def _error(config: Config, fault: Fault) -> UserError:
    what, remedy = f"{fault.key} {fault.reason}", fault.remedy
    if fault.key in fields():
        default = show(fields()[fault.key].default)
        remedy = remedy or f"set {fault.key}={default} (the default) or another allowed value"
        what = f"{fault.key}={quoted(value_of(config, fault.key))} {fault.reason}"
    return UserError(what, required=fault.required, remedy=remedy)


def _other_key(key: str, word: str) -> str:
    """What to do where the word is one of another key: a stage, a loss of dpo, or a tool; "" = it is none."""
    if key == "mode" and word in ("convert", "export", "inspect", "merge"):
        return f"run python -m kt_ray.tools {word} (--help says how)"
    if key == "trainer.stage" and word in WORDS["preference.loss"]:
        return f"set trainer.stage=dpo preference.loss={word}"
    if key == "preference.loss" and word in WORDS["trainer.stage"]:
        return f"set trainer.stage={word} preference.loss={WORDS[key][0]}"
    return ""


def single_keys(config: Config) -> Iterator[Fault]:
    """Values that their key may not have, whatever the others are."""
    for key, words in WORDS.items():
        value = value_of(config, key)
        for word in value if isinstance(value, list) else [value]:
            if isinstance(word, str) and word not in words:
                match, meant = guess(word, words)
                allowed = " or ".join([*words, f"a number {BOUNDS[key]}"] if key in BOUNDS else words)
                other = _other_key(key, word)
                match = match or ("auto" if "auto" in words else None)
                remedy = other or (f"set {key}={match}" if match else f"set {key} to one of these")
                yield Fault(key, f"is not known{'' if other else meant}", allowed, remedy)
    for key, words in LISTED.items():
        for word in (word for word in value_of(config, key) if word not in words):
            fault = f"has the unknown entry {word}{guess(word, words)[1]}"
            yield Fault(key, fault, ", ".join(words), f"correct {key}")
    if "quick" in config.accept.only and len(config.accept.only) > 1:
        yield Fault("accept.only", "names quick and sections", "quick, or sections", "set accept.only=quick")
    for key, bound in BOUNDS.items():
        value = value_of(config, key)
        if value is not None and not isinstance(value, str) and not bound.holds(value):
            yield Fault(key, "is out of range", str(bound))
    for key in ("seed", "model.seed"):
        if not 0 <= value_of(config, key) < SEED_LIMIT:
            yield Fault(key, "is out of range", "at least 0 and less than 2**63")
    every, evaluates = config.trainer.save_every, config.trainer.eval_every
    if isinstance(every, str) and not (epochs_of(every) or seconds_of(every)):
        yield Fault("trainer.save_every", "is no interval", FORM)
    if isinstance(evaluates, str) and evaluates != "auto" and not epochs_of(evaluates):
        yield Fault("trainer.eval_every", "is no interval", f"auto, {EPOCHS_FORM}")
    for key, what in NOT_EMPTY.items():
        value = value_of(config, key)
        texts = [value] if isinstance(value, str) else value or []
        # A line break is a stop string like any other.
        if not all(text if key == "generate.stop" else text.strip() for text in texts):
            yield Fault(key, "is empty", what)


def _model(c: Config) -> Iterator[Fault]:
    model, backend, gguf = c.model, c.rule.experts.backend, c.model.experts_path
    if c.generate.latent_keys == "absorbed" and model.attn_implementation == "eager":
        yield Fault(
            "generate.latent_keys",
            "needs torch's fused attention, but model.attn_implementation=eager",
            "auto or expanded",
            "set generate.latent_keys=auto",
        )
    if gguf is not None and model.build is not None:
        yield Fault(
            "model.experts_path",
            f"has no meaning for model={model.name}, which is built with experts of its own",
            remedy="set model.path=<directory>, or model.experts_path=null",
        )
    if backend == "llamafile" and gguf is None:
        yield Fault(
            "rule.experts.backend",
            "reads the routed experts from a GGUF file, but model.experts_path=null",
            "a GGUF file of the same model",
            "set model.experts_path=<file.gguf>, or rule.experts.backend=auto (the checkpoint's own format)",
        )
    if gguf is not None and backend in QUANTISING_BACKENDS:
        yield Fault(
            "rule.experts.backend",
            f"would quantise the quantised experts of model.experts_path={gguf} again",
            remedy="set rule.experts.backend=llamafile, or model.experts_path=null",
        )
    if model.path is not None or (model.build is not None and model.build != "demo_base"):
        return
    for key in ("model.seed", "model.tokenizer"):
        if model.build is not None and value_of(c, key) != fields()[key].default:
            yield Fault(
                key,
                f"has no meaning for model={model.name}, which is pretrained with a tokenizer of its own",
                remedy=f"leave {key} out, or take random weights: model=demo_random",
            )
    if model.build is not None:
        return
    needs = c.mode in ("train", "predict", "chat", "serve", "train_server")
    if needs or (c.mode == "preview" and model.tokenizer is None):
        plan = ", or mode=plan to see the placement without weights" if model.config else ""
        yield Fault(
            "model.path",
            f"but mode={c.mode} needs the checkpoint of model={model.name}",
            "a Hugging Face directory with config.json, *.safetensors and a tokenizer",
            f"set model.path=<directory>, model.path=hf://ORG/NAME (downloads it){plan}",
        )
    if c.mode == "plan" and model.config is None:
        yield Fault(
            "model.path",
            "and model.config is empty, so there is nothing to plan",
            "a checkpoint directory or a model with known dimensions",
            "set model.path=<directory> or model=deepseek_v3",
        )


def _rule(c: Config) -> Iterator[Fault]:
    experts, rows = c.rule.experts, c.trainer.batch_size
    if experts.placement == "kept" and c.trainer.resume is None:
        yield Fault(
            "rule.experts.placement",
            "has nothing to keep: the run resumes from no checkpoint",
            "trainer.resume",
            "set trainer.resume=latest, or rule.experts.placement=auto",
        )
    if experts.placement == "balanced" and experts.load is None and c.trainer.resume is None:
        yield Fault(
            "rule.experts.placement",
            "needs a load, but rule.experts.load=null and nothing is resumed",
            "a checkpoint of an earlier run, which holds a histogram",
            "set rule.experts.load=<checkpoint directory>, or rule.experts.placement=auto",
        )
    lanes = experts.lane_devices
    several = bool(lanes) and all(map(_DEVICE.fullmatch, lanes)) and len(set(lanes)) == len(lanes)
    if lanes != ("auto",) and set(lanes) != {"cpu"} and not (several and "cpu" not in lanes):
        yield Fault("rule.experts.lane_device", "is not a device", "auto, cuda:1, [cuda:0,cuda:1], … or cpu")
    if experts.activations == "int8" and (c.has_reference or c.trainer.stage == "grpo"):
        yield Fault(
            "rule.experts.activations",
            "clashes with the stage's reference or sampler: gate and up are rounded only in passes that have "
            "a backward, so that losses would compare two models",
            remedy="set rule.experts.activations=auto",
        )
    for key, off in (("rule.experts.gpu_resident", (0,)), ("rule.experts.stream", ("off", "auto"))):
        if value_of(c, key) not in off and experts.backend in INT8_BACKENDS:
            yield Fault(
                key,
                f"clashes with rule.experts.backend={experts.backend}: the engine then multiplies in int8, a "
                "GPU would multiply the same experts in bfloat16",
                remedy="set rule.experts.backend=auto (weights stored as integers stay so), or "
                f"{key}={off[0]}",
            )
    if c.rule.replica_count > rows:
        yield Fault(
            "rule.replicas",
            f"is more than trainer.batch_size={rows}: a replica would never have a row",
            remedy=f"set rule.replicas={rows} or trainer.batch_size={c.rule.replicas}",
        )


def _layers(c: Config) -> Iterator[Fault]:
    """rule.layers: counts, ranges or patterns, all entries of one style."""
    layers, stages, balanced = c.rule.layers, c.rule.stages, "set rule.layers=null for a balanced split"
    if layers is None:
        return
    if not layers:
        yield Fault("rule.layers", "is empty", _LAYER_STYLES, balanced)
    elif all(isinstance(entry, dict) for entry in layers):
        yield from _layer_devices(c, layers)
        if all("match" in entry for entry in layers):
            return
        yield from _layer_ranges([str(entry["layers"]) for entry in layers])
    elif all(isinstance(entry, int) and not isinstance(entry, bool) for entry in layers):
        if min(layers) < 1:
            yield Fault("rule.layers", "has a stage without layers", "counts of at least 1", balanced)
    elif all(isinstance(entry, str) for entry in layers):
        yield from _layer_ranges(layers)
    else:
        yield Fault("rule.layers", "mixes styles or has entries of no style", _LAYER_STYLES, balanced)
    if isinstance(stages, int) and stages != len(layers):
        yield Fault(
            "rule.layers",
            f"has {len(layers)} entries for rule.stages={stages}",
            remedy=f"set rule.stages={len(layers)} or rule.layers=null",
        )


def _layer_ranges(layers: list[str]) -> Iterator[Fault]:
    start = 0
    for entry in layers:
        match = _RANGE.fullmatch(entry.strip())
        first, last = map(int, match.groups()) if match else (-1, -1)
        if first != start or last < first:
            yield Fault(
                f"rule.layers={show(layers)}",
                f"has the entry '{entry}' where layer {start} must begin a range",
                "ascending ranges such as '0-15' from layer 0, both ends included, without gap or overlap",
                f"begin that range with {start}, or set rule.layers=null for a balanced split",
            )
        start = last + 1


def _layer_devices(c: Config, layers: list[dict[str, Any]]) -> Iterator[Fault]:
    """Entries {layers or match, device}."""
    key = "layers" if "layers" in layers[0] else "match"
    for entry in layers:
        if set(entry) != {key, "device"}:
            yield Fault(
                f"rule.layers={show(entry)}",
                "is not a pattern",
                f"exactly the keys {key} and device",
                "set rule.layers=null (the default) or correct that entry",
            )
        if key == "match":
            yield from regex_faults("rule.layers", entry["match"])
        devices, replicas = entry["device"], c.rule.replica_count
        if isinstance(devices, list) and len(devices) != replicas:
            yield Fault(
                f"rule.layers={show(devices)}",
                f"lists {len(devices)} devices for rule.replicas={replicas}",
                remedy=f"set rule.replicas={len(devices)}, or name one device",
            )
        for device in devices if isinstance(devices, list) else [devices]:
            if not isinstance(device, str) or not _DEVICE.fullmatch(device):
                yield Fault(
                    f"rule.layers={quoted(device)}",
                    f"is not a device ({entry[key]})",
                    "cuda:0, cuda:1, … or cpu; or a list of one per replica",
                    "write device: 'cuda:0'",
                )
            kind = str(device).partition(":")[0]
            if c.rule.device not in ("auto", kind):
                yield Fault(
                    f"rule.layers={device}",
                    f"clashes with rule.device={c.rule.device}",
                    remedy=f"set rule.device={kind} or rule.layers=null",
                )


def _optim(c: Config) -> Iterator[Fault]:
    optim = c.optim
    if optim.name == "deepspeed_cpu_adam" and not c.lora.experts:
        yield Fault(
            "optim.name",
            "is for the experts' LoRA, but lora.experts=false",
            remedy="set optim=adamw",
        )
    if optim.name == "deepspeed_cpu_adam" and importlib.util.find_spec("deepspeed") is None:
        yield Fault(
            "optim.name",
            "needs deepspeed, which is not installed",
            remedy="pip install deepspeed, or set optim=adamw",
        )
    for key in ("optim.decay", "optim.warmup"):
        value = value_of(c, key)
        if value > 1 and value != int(value):
            yield Fault(
                key,
                "is neither a share nor a whole number of steps",
                "less than 1 (a share) or a whole number",
                f"set {key}={int(value)}",
            )
    yield from _meaningless(c, "optim.schedule", "optim.decay", "wsd")
    yield from _meaningless(c, "optim.schedule", "optim.decay_shape", "wsd")
    yield from _meaningless(c, "optim.schedule", "optim.min_lr_ratio", "cosine", "linear", "wsd")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Fault("optim.betas", "is out of range", "two numbers at least 0 and less than 1")
    if c.trainer.max_steps is not None:
        yield from _warmup(c, c.trainer.max_steps)


def _is_new(c: Config, key: str) -> bool:
    """Whether a run that begins sets a key. One that goes on may have it from a version that took it."""
    return c.trainer.resume is None and value_of(c, key) != fields()[key].default


def _meaningless(c: Config, of: str, key: str, *values: str) -> Iterator[Fault]:
    """`key` is set, and only these values of the key `of` use it."""
    if value_of(c, of) not in values and _is_new(c, key):
        yield Fault(
            key,
            f"has no meaning {'for' if of == 'trainer.stage' else 'with'} {of}={value_of(c, of)}",
            " or ".join(f"{of}={value}" for value in values),
            f"set {of}={values[0]}, or {key}={show(fields()[key].default)} (the default)",
        )


def _warmup(c: Config, steps: int, rows: int = 0) -> Iterator[Fault]:
    if c.optim.warmup > steps:
        key = "trainer.epochs" if c.trainer.max_steps is None else "trainer.max_steps"
        of = f" (the run has {steps}: {rows} rows)" if rows else ""
        yield Fault(
            "optim.warmup",
            f"is more steps than {key}={show(value_of(c, key))}{of}",
            remedy=f"set optim.warmup=0.03 or raise {key}",
        )


def _trainer(c: Config) -> Iterator[Fault]:
    trainer, resume, loss, rows = c.trainer, c.trainer.resume, c.preference.loss, c.trainer.batch_size
    if c.preference.gamma != PreferenceConfig.gamma and (trainer.stage != "dpo" or loss != "simpo"):
        yield Fault(
            "preference.gamma",
            f"has no meaning for trainer.stage={trainer.stage} with preference.loss={loss}",
            "trainer.stage=dpo with preference.loss=simpo",
        )
    if c.preference.label_smoothing and (trainer.stage != "dpo" or loss not in ("sigmoid", "robust")):
        yield Fault(
            "preference.label_smoothing",
            f"has no meaning for trainer.stage={trainer.stage} with preference.loss={loss}",
            "0, or trainer.stage=dpo with preference.loss=sigmoid or robust",
        )
    yield from _meaningless(c, "trainer.stage", "preference.beta", "dpo", "orpo", "kto")
    yield from _meaningless(c, "trainer.stage", "preference.desirable_weight", "kto")
    yield from _meaningless(c, "trainer.stage", "preference.undesirable_weight", "kto")
    if trainer.stage == "kto" and rows == 1 and c.mode == "train":
        yield Fault(
            "trainer.batch_size",
            "has no other row's answer for the reference point of trainer.stage=kto",
            "at least 2",
        )
    if loss != "sigmoid" and trainer.stage != "dpo":
        yield Fault(
            "preference.loss",
            f"has no meaning for trainer.stage={trainer.stage}",
            "trainer.stage=dpo",
            "set trainer.stage=dpo, or preference.loss=sigmoid",
        )
    for key in ("trainer.early_stopping", "trainer.save_best"):
        if value_of(c, key) and not trainer.eval_every:
            yield Fault(
                key,
                "goes by the held-out loss, but trainer.eval_every=0",
                remedy="set trainer.eval_every=<steps>",
            )
    if not trainer.early_stopping and _is_new(c, "trainer.early_stopping_threshold"):
        yield Fault(
            "trainer.early_stopping_threshold",
            "has no meaning with trainer.early_stopping=0",
            remedy="set trainer.early_stopping=<evaluations>, or trainer.early_stopping_threshold=0",
        )
    if 0 < trainer.spike <= 1:
        yield Fault(
            "trainer.spike",
            "would refuse ordinary steps",
            "more than 1, or 0",
            "set trainer.spike=5",
        )
    if any(step < 1 for step in trainer.profile_steps):
        yield Fault("trainer.profile_steps", "counts steps from 1", "at least 1")
    if isinstance(trainer.micro_batch_size, int) and trainer.micro_batch_size > rows:
        yield Fault(
            "trainer.micro_batch_size",
            f"is more than trainer.batch_size={rows}",
            remedy=f"set trainer.micro_batch_size={rows} or raise trainer.batch_size",
        )
    if trainer.micro_batch_tokens != "auto" and not c.packs_micro_batches:
        size = trainer.micro_batch_size
        why = f"trainer.stage={trainer.stage}" if size == "auto" else f"trainer.micro_batch_size={size}"
        yield Fault(
            "trainer.micro_batch_tokens",
            f"has no meaning with {why}, which counts rows",
            "auto",
            "set trainer.micro_batch_tokens=auto",
        )
    own = Path(c.run.root, c.run.name or "").absolute()  # a new run may begin with another run's checkpoint
    if (
        c.mode == "train"  # other modes replace answers alone
        and c.run.overwrite
        and resume is not None
        and (resume == "latest" or own in Path(resume).absolute().parents)
    ):
        yield Fault(
            "run.overwrite",
            f"with trainer.resume={resume} would delete the run to resume",
            remedy="set run.overwrite=false to resume, or trainer.resume=null to begin anew",
        )
    if resume not in (None, "latest") and "/" not in resume and (not resume or closest(resume, ("latest",))):
        yield Fault(
            "trainer.resume",
            "is neither latest nor a directory; did you mean latest?",
            "latest or a checkpoint directory",
            "set trainer.resume=latest, or ./NAME for a directory",
        )


def _grpo(c: Config) -> Iterator[Fault]:
    grpo, rows = c.grpo, c.trainer.batch_size
    if c.mode == "eval" and c.trainer.stage == "grpo":
        yield Fault(
            "trainer.stage",
            "has prompts without answers, whose loss mode=eval cannot measure",
            remedy="set trainer.stage=sft and data.path=<rows with answers>, or mode=predict",
        )
    if c.mode not in ("train", "plan", "preview"):
        return
    if c.trainer.stage != "grpo":
        for key, given in (("reward", c.reward), ("grpo", None if grpo == GrpoConfig() else grpo)):
            if given is not None:
                yield Fault(
                    key,
                    f"has no meaning for trainer.stage={c.trainer.stage}",
                    "trainer.stage=grpo",
                    f"set trainer.stage=grpo, or leave out {key}",
                )
        return
    if c.reward is None:
        yield Fault(
            "reward",
            "must say what a good answer is with trainer.stage=grpo",
            "FILE.py, FILE.py:FUNCTION, or a verifier's name (docs/rewards.md)",
            "set reward=<file>.py or reward=numeric",
        )
    if rows % grpo.group_size:
        nearest = max(1, round(rows / grpo.group_size)) * grpo.group_size
        yield Fault(
            "trainer.batch_size",
            f"is no multiple of grpo.group_size={grpo.group_size}: a step takes whole groups",
            remedy=f"set trainer.batch_size={nearest}, or another grpo.group_size",
        )
    if c.generate.max_new_tokens >= c.data.max_length:
        yield Fault(
            "generate.max_new_tokens",
            f"leaves no room for a prompt within data.max_length={c.data.max_length}",
            "less than data.max_length, which counts prompt and answer",
            f"set data.max_length={2 * c.generate.max_new_tokens}, or lower generate.max_new_tokens",
        )
    if grpo.overlong_buffer >= c.generate.max_new_tokens:
        yield Fault(
            "grpo.overlong_buffer",
            f"is not less than generate.max_new_tokens={c.generate.max_new_tokens}",
            remedy="set it to the last tokens of an answer that cost reward, or to 0",
        )
    probabilities = "the log-probabilities of sampling and training would differ"
    for key, plain, why in (
        ("lora.dropout", 0.0, probabilities),
        ("trainer.neftune_noise_alpha", 0.0, probabilities),
        ("generate.top_p", 1.0, probabilities),
        ("generate.top_k", 0, probabilities),
        ("generate.min_p", 0.0, probabilities),
        ("generate.repetition_penalty", 1.0, probabilities),
        ("generate.temperature", 0.0, "answers are drawn at temperature 1, held-out ones at 0"),
        ("generate.adapter", None, "the policy answers; what it starts from is lora.adapter"),
        ("trainer.aux_loss", 0.0, "answers are drawn from the policy, whose routers are frozen"),
        ("trainer.spike", 0.0, "steps of equal rewards have next to no gradient to compare with"),
        ("generate.min_new_tokens", 0, probabilities),
        ("data.packing", False, "an answer's loss is a row's"),
        ("data.group_by_length", False, "how long answers get is not known before"),
        ("data.train_on", "all", "nothing of a prompt is trained"),
        ("data.format", "auto", "a row's prompt is read, not its answer (docs/rl.md)"),
    ):
        if value_of(c, key) != plain:
            yield Fault(key, f"cannot be set with trainer.stage=grpo: {why}", show(plain), f"leave out {key}")


def _answers(c: Config) -> Iterator[Fault]:
    generate, adapter, letters = c.generate, c.generate.adapter, c.eval.letters
    if generate.min_new_tokens > generate.max_new_tokens:
        yield Fault(
            "generate.min_new_tokens",
            f"is more than generate.max_new_tokens={generate.max_new_tokens}",
            remedy="set generate.min_new_tokens=0 or raise generate.max_new_tokens",
        )
    if adapter is None and generate.answer in ("adapter", "both"):
        yield Fault(
            "generate.answer",
            "needs an adapter, but generate.adapter=null",
            remedy="set generate.adapter=<directory>, or generate.answer=base",
        )
    for key in ("eval.adapter", "eval.base"):
        if c.mode == "eval" and adapter is not None and value_of(c, key) is not None:
            yield Fault(
                key,
                f"names existing answers, but generate.adapter={adapter} asks for new ones",
                remedy=f"leave out {key} or generate.adapter",
            )
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,}", letters):
        yield Fault(
            "eval.letters",
            "names no options",
            "at least two different capital letters",
            "set eval.letters=ABCD",
        )


def _serve(c: Config) -> Iterator[Fault]:
    adapter = c.generate.adapter
    if c.mode == "serve" and adapter is not None:
        path = adapter if re.fullmatch(r"[\w./~-]+", adapter) else f'"{adapter}"'
        yield Fault(
            "generate.adapter",
            "has no meaning with mode=serve, where requests name adapters",
            remedy="write " + shlex.quote(f"serve.adapters={{NAME: {path}}}"),
        )
    for name, directory in (c.serve.adapters or {}).items():
        empty = not name.strip() or not directory
        if empty or name == (c.serve.name or c.model.name):
            what = "something is empty" if empty else "an adapter has the base model's name"
            yield Fault(
                f"serve.adapters={show({name: directory})}",
                f"is no list of adapters: {what}",
                "{NAME: DIRECTORY}, each name another one",
                "correct serve.adapters, or give the base model another name: serve.name=NAME",
            )


def _train_server(c: Config) -> Iterator[Fault]:
    if not c.trainings:
        return
    for key, plain, why in (
        ("optim.name", "adamw", "clients state AdamW's parameters with every step"),
        ("optim.lora_plus_ratio", 1.0, "clients state one learning rate with every step"),
        ("lora.adapter", None, "clients load what trainings start from"),
        ("lora.dora", False, "a training begins anew on weights whose norms DoRA starts from"),
        ("lora.dropout", 0.0, "the log-probabilities of sampler and trainer would differ"),
        ("lora.init", "default", "trainings share one base, drawn by a seed that clients state"),
        ("trainer.stage", "sft", "clients state the loss with every pass"),
        ("trainer.resume", None, "clients load the state that a training goes on from"),
        ("trainer.neftune_noise_alpha", 0.0, "the log-probabilities of sampler and trainer would differ"),
        ("trainer.aux_loss", 0.0, "clients state the loss"),
        ("data.packing", False, "clients send rows one by one"),
        ("serve.adapters", None, "clients load adapters by their paths"),
        ("generate.adapter", None, "clients load adapters by their paths"),
    ):
        if value_of(c, key) != plain:
            yield Fault(key, f"has no meaning with mode=train_server: {why}", show(plain), f"leave out {key}")


# Trackers that kt_ray does not bring: module -> what pip installs.
_TRACKERS = {name: name for name in ("tensorboard", "mlflow", "trackio")} | {"swanlab": "'swanlab>=0.10'"}


def _place(c: Config) -> Iterator[Fault]:
    """Where a run takes place and where its files and figures go."""
    address, name = c.cluster.address, c.run.name
    for tracker in c.tracking.names if c.mode in ("train", "eval") else ():
        if tracker in _TRACKERS and importlib.util.find_spec(tracker) is None:
            yield Fault(
                "tracking.name",
                f"needs {tracker}, which is not installed",
                remedy=f"pip install {_TRACKERS[tracker]}, or set tracking=jsonl",
            )
    if not _ADDRESS.fullmatch(address):
        match, meant = guess(address, ("auto", "local"))
        yield Fault(
            "cluster.address",
            f"is no address{meant}",
            "auto, local or HOST:PORT",
            f"set cluster.address={match or 'auto'}",
        )
    if name is not None and (
        name != name.strip() or name in ("", ".", "..") or re.search(r"[/\\\x00-\x1f]", name)
    ):
        yield Fault(
            "run.name",
            "cannot be a directory name",
            "a name without slashes, line breaks, and spaces at its ends",
            "set run.name=<name> and put the directory into run.root",
        )
    for key, plain in (("plan.hardware", None), ("plan.mode", "train")):
        if c.mode != "plan" and value_of(c, key) != plain:
            yield Fault(
                key,
                f"has no meaning with mode={c.mode}",
                remedy=f"set mode=plan, or {key}={show(plain)}",
            )
