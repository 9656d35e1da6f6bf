"""Every check of a configuration that needs neither files nor hardware.

`kt_ray.config.limits` has what single keys may be; the functions below check keys that must go together. The
first fault is raised; its message names the key, the value, the reason and what to write instead.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from datetime import date
from typing import Any

from kt_ray.config.fields import closest, fields, show
from kt_ray.config.limits import BOUNDS, NOT_EMPTY, WORDS
from kt_ray.config.schema import Config, DataConfig
from kt_ray.errors import UserError

# Seeds are 64-bit counters of the random streams; the sign bit stays free.
SEED_LIMIT = 2**63

# Keys of one entry of data.sources, with the types their values may have.
SOURCE_KEYS: dict[str, tuple[type, ...]] = {
    "path": (str, list),
    "weight": (int, float),
    "format": (str,),
    "columns": (Mapping,),
    "split": (str,),
    "subset": (str,),
    "system": (str,),
    "limit": (int,),
}

_ADDRESS = re.compile(r"auto|local|(ray://)?[^\s/:]+:\d+")
_DEVICE = re.compile(r"cpu|cuda:\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")
_LAYER_STYLES = (
    "counts [31,30], ranges ['0-30','31-60'], ranges with devices [{layers: '0-60', device: 'cuda:0'}] "
    "or patterns [{match: REGEX, device: 'cuda:0'}]"
)


def check(config: Config) -> None:
    """Raises UserError for the first value, or combination of values, that cannot work."""
    _single_keys(config)
    for part in (
        *(_model, _rule, _layers, _data, _held_out, _lora, _optim, _preference, _trainer),
        *(_generate, _serve, _cluster, _results, _run),
    ):
        part(config)


def value_of(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def fault(
    config: Config, key: str, reason: str, required: object, remedy: str | None = None, value: Any = ...
) -> UserError:
    """The error for one key.

    Args:
        remedy: None = set the default.
        value: as the message shows it; ... = the configuration's.
    """
    value = value_of(config, key) if value is ... else value
    if remedy is None:
        remedy = f"set {key}={show(fields()[key].default)} (the default) or another allowed value"
    shown = "''" if value == "" else show(value)
    return UserError(f"{key}={shown} {reason}", required=required, remedy=remedy)


def _single_keys(config: Config) -> None:
    for key, words in WORDS.items():
        value = value_of(config, key)
        if isinstance(value, str) and value not in words:
            match = closest(value, words)
            allowed = " or ".join([*words, f"a number {BOUNDS[key]}"] if key in BOUNDS else words)
            reason = "is not known" + (f"; did you mean {match}?" if match else "")
            raise fault(config, key, reason, allowed, f"set {key}={match or words[0]}")
    for key, bound in BOUNDS.items():
        value = value_of(config, key)
        if value is not None and not isinstance(value, str) and not bound.holds(value):
            raise fault(config, key, "is out of range", str(bound))
    for key in ("seed", "model.seed"):
        if not 0 <= value_of(config, key) < SEED_LIMIT:
            raise fault(config, key, "is out of range", "at least 0 and less than 2**63")
    for key, what in NOT_EMPTY.items():
        value = value_of(config, key)
        texts = [value] if isinstance(value, str) else value or []
        # A line break is a stop string like any other.
        if not all(text if key == "generate.stop" else text.strip() for text in texts):
            raise fault(config, key, "is empty", what)


def _regex(config: Config, key: str, pattern: object) -> None:
    try:
        re.compile(pattern)  # type: ignore[call-overload]
    except (re.error, TypeError) as error:
        raise fault(
            config,
            key,
            f"is not a regular expression ({error})",
            "a Python regular expression",
            f"correct {key}; in a shell put it in single quotes",
            value=pattern,
        ) from None


def _model(config: Config) -> None:
    model, backend, gguf = config.model, config.rule.experts.backend, config.model.experts_path
    if gguf is not None and model.build is not None:
        raise fault(
            config,
            "model.experts_path",
            f"has no meaning for model={model.name}, which is built with experts of its own",
            "a checkpoint in model.path beside it",
            "set model.path=<directory>, or model.experts_path=null",
        )
    if backend == "llamafile" and gguf is None:
        raise fault(
            config,
            "rule.experts.backend",
            "reads the routed experts from a GGUF file, but model.experts_path=null",
            "a GGUF file of the same model",
            "set model.experts_path=<file.gguf>, or rule.experts.backend=auto (the checkpoint's own format)",
        )
    if gguf is not None and backend in ("AMXINT8", "AMXINT4"):
        raise fault(
            config,
            "rule.experts.backend",
            f"would quantise the quantised experts of model.experts_path={gguf} again",
            "auto or llamafile with a GGUF file",
            "set rule.experts.backend=llamafile, or model.experts_path=null",
        )
    if model.path is not None:
        return
    if model.build == "demo_base":
        for key in ("model.seed", "model.tokenizer"):
            if value_of(config, key) != fields()[key].default:
                raise fault(
                    config,
                    key,
                    f"has no meaning for model={model.name}, which is pretrained with a tokenizer of its own",
                    "its default",
                    f"leave {key} out, or take random weights: model=demo_random",
                )
    if model.build is not None:
        return
    if config.mode in ("train", "predict", "chat", "serve") or (
        config.mode == "preview" and model.tokenizer is None
    ):
        plan = ", or mode=plan to see the placement without weights" if model.config else ""
        raise fault(
            config,
            "model.path",
            f"but mode={config.mode} needs the checkpoint of model={model.name}",
            "a Hugging Face directory with config.json, *.safetensors and a tokenizer",
            f"set model.path=<directory>{plan}",
        )
    if config.mode == "plan" and model.config is None:
        raise fault(
            config,
            "model.path",
            "and model.config is empty, so there is nothing to plan",
            "a checkpoint directory or a model with known dimensions",
            "set model.path=<directory> or model=deepseek_v3",
        )


def _rule(config: Config) -> None:
    rule, experts, batch = config.rule, config.rule.experts, config.trainer.batch_size
    if experts.placement == "balanced" and experts.load is None and config.trainer.resume is None:
        raise fault(
            config,
            "rule.experts.placement",
            "needs a load, but rule.experts.load=null and nothing is resumed",
            "a checkpoint of an earlier run, which holds a histogram",
            "set rule.experts.load=<checkpoint directory>, or rule.experts.placement=auto",
        )
    if experts.lane_device != "auto" and not _DEVICE.fullmatch(experts.lane_device):
        raise fault(config, "rule.experts.lane_device", "is not a device", "auto, cuda:0, cuda:1, … or cpu")
    for key, off in (("rule.experts.gpu_resident", 0), ("rule.experts.stream", "off")):
        if value_of(config, key) != off and experts.backend == "AMXINT8":
            raise fault(
                config,
                key,
                "clashes with rule.experts.backend=AMXINT8: the engine then multiplies in int8, a GPU would "
                "multiply the same experts in bfloat16",
                "a backend that computes in bfloat16 or float32",
                f"set rule.experts.backend=auto (weights stored as int8 stay so), or {key}={off}",
            )
    if rule.replica_count > batch:
        raise fault(
            config,
            "rule.replicas",
            f"is more than trainer.batch_size={batch}: a replica would never have a row",
            f"at most {batch}",
            f"set rule.replicas={batch} or trainer.batch_size={rule.replicas}",
        )


def _layers(config: Config) -> None:
    """rule.layers: counts, ranges or patterns, all entries of one style."""
    layers, stages = config.rule.layers, config.rule.stages
    if layers is None:
        return
    key, balanced = "rule.layers", "set rule.layers=null for a balanced split"
    if not layers:
        raise fault(config, key, "is empty", _LAYER_STYLES, balanced)
    if all(isinstance(entry, dict) for entry in layers):
        _layer_devices(config, layers)
        if all("match" in entry for entry in layers):
            return
        _layer_ranges(config, [str(entry["layers"]) for entry in layers])
    elif all(isinstance(entry, int) and not isinstance(entry, bool) for entry in layers):
        if min(layers) < 1:
            raise fault(config, key, "has a stage without layers", "counts of at least 1", balanced)
    elif all(isinstance(entry, str) for entry in layers):
        _layer_ranges(config, layers)
    else:
        raise fault(config, key, "mixes styles or has entries of no style", _LAYER_STYLES, balanced)
    if isinstance(stages, int) and stages != len(layers):
        raise fault(
            config,
            key,
            f"has {len(layers)} entries for rule.stages={stages}",
            f"{stages} entries, one per stage",
            f"set rule.stages={len(layers)} or rule.layers=null",
        )


def _layer_ranges(config: Config, layers: list[str]) -> None:
    start = 0
    for entry in layers:
        match = _RANGE.fullmatch(entry.strip())
        if not match:
            raise fault(
                config, "rule.layers", f"has the entry '{entry}'", "ranges such as '0-15'", value=layers
            )
        first, last = int(match[1]), int(match[2])
        if first != start or last < first:
            raise fault(
                config,
                "rule.layers",
                f"has the range '{entry}' where layer {start} must begin a range",
                "ascending ranges from layer 0, both ends included, without gap or overlap",
                f"begin that range with {start}, or set rule.layers=null for a balanced split",
                value=layers,
            )
        start = last + 1


def _layer_devices(config: Config, layers: list[dict[str, Any]]) -> None:
    """Entries {layers or match, device}."""
    for entry in layers:
        key = "layers" if "layers" in layers[0] else "match"
        if set(entry) != {key, "device"}:
            required = f"exactly the keys {key} and device"
            raise fault(config, "rule.layers", "is not a pattern", required, value=entry)
        if key == "match":
            _regex(config, "rule.layers", entry["match"])
        devices = entry["device"] if isinstance(entry["device"], list) else [entry["device"]]
        replicas = config.rule.replica_count
        if len(devices) != replicas and isinstance(entry["device"], list):
            raise fault(
                config,
                "rule.layers",
                f"lists {len(devices)} devices for rule.replicas={replicas}",
                f"{replicas} devices, one per replica",
                f"set rule.replicas={len(devices)}, or name one device",
                value=devices,
            )
        for device in devices:
            if not isinstance(device, str) or not _DEVICE.fullmatch(device):
                raise fault(
                    config,
                    "rule.layers",
                    f"is not a device ({entry[key]})",
                    "cuda:0, cuda:1, … or cpu; or a list of one per replica",
                    "write device: 'cuda:0'",
                    value=device,
                )
            kind = device.partition(":")[0]
            if config.rule.device not in ("auto", kind):
                raise fault(
                    config,
                    "rule.layers",
                    f"clashes with rule.device={config.rule.device}",
                    f"devices of kind {config.rule.device}",
                    f"set rule.device={kind} or rule.layers=null",
                    value=device,
                )


def _data(config: Config) -> None:
    data = config.data
    for key in ("data.path", "data.eval_path"):
        files = value_of(config, key)
        if files is not None and (not files or not all(files)):
            raise fault(config, key, "names no file", "a file or a list of files", f"set {key}=<file.jsonl>")
    if data.sources is not None:
        _sources(config, data)
    elif data.path is None and data.builtin is None and config.mode in ("train", "preview", "predict"):
        raise fault(
            config,
            "data.path",
            f"but mode={config.mode} needs rows",
            "a jsonl, json, parquet, csv or arrow file, a directory or hf://owner/name",
            "set data.path=<file.jsonl> or data=demo",
        )
    if data.eval_split is not None and data.eval_path is None:
        raise fault(
            config,
            "data.eval_split",
            "names a split of data.eval_path, which is null",
            "data.eval_path, or no eval_split",
            "set data.eval_path=<files with that split>, or data.eval_split=null",
        )
    if data.template is not None and config.model.chat_template is not None:
        raise fault(
            config,
            "data.template",
            f"and model.chat_template={config.model.chat_template} both name a template",
            "one of them",
            "set data.template=null or model.chat_template=null",
        )
    if data.date is not None:
        try:
            date.fromisoformat(data.date)
        except ValueError:
            raise fault(config, "data.date", "is no date", "YYYY-MM-DD", "set data.date=null") from None
    _columns(config, "data.columns", data.columns or {})
    if data.packing and data.group_by_length:
        raise fault(
            config,
            "data.group_by_length",
            "has nothing to group with data.packing=true: packed rows are all nearly data.max_length long",
            "one of them",
            "set data.group_by_length=false",
        )


def _sources(config: Config, data: DataConfig) -> None:
    key = "data.sources"
    if data.path is not None:
        reason = f"and data.path={data.path} both name rows"
        raise fault(config, key, reason, "one of them", "put data.path into the list of data.sources")
    if not data.sources:
        raise fault(config, key, "names no source", "a list", "set data.sources=null")
    if data.limit is not None:
        raise fault(
            config,
            "data.limit",
            "would cut the list of data.sources, not each of them",
            "a limit in each source",
            "set data.limit=null and write {path: …, limit: …} into data.sources",
        )
    for number, source in enumerate(data.sources):
        place = f"{key}[{number}]"
        if not isinstance(source, Mapping):
            required = "{path: …, weight: …}"
            raise fault(config, place, "is no mapping", required, "write {path: <file>}", value=source)
        entry: Mapping[str, Any] = source
        for name, value in entry.items():
            where = f"{place}.{name}"
            if name not in SOURCE_KEYS:
                match = closest(str(name), tuple(SOURCE_KEYS))
                reason = "is not known" + (f"; did you mean {match}?" if match else "")
                raise fault(config, where, reason, ", ".join(SOURCE_KEYS), "rename or delete it", value=value)
            if isinstance(value, bool) or not isinstance(value, SOURCE_KEYS[name]):
                types = " or ".join(kind.__name__.lower() for kind in SOURCE_KEYS[name])
                raise fault(config, where, "has the wrong type", types, f"correct {where}", value=value)
            if name in ("weight", "limit") and not (isinstance(value, int | float) and value > 0):
                raise fault(config, where, "is out of range", "more than 0", "delete it", value=value)
            words = WORDS["data.format"]
            if name == "format" and value not in words:
                raise fault(config, where, "is not known", " or ".join(words), "delete it", value=value)
        if not source.get("path"):
            where = f"{place}.path"
            raise fault(config, where, "names no file", "a file", f"set {where}", value=source.get("path"))
        _columns(config, f"{place}.columns", source.get("columns", {}))


def _columns(config: Config, key: str, columns: Mapping[str, Any]) -> None:
    for name, column in columns.items():
        if column is not None and (not isinstance(column, str) or not column):
            where, required = f"{key}.{name}", "the name of a column, or null"
            raise fault(config, where, "names no column", required, f"correct {where}", value=column)


def _held_out(config: Config) -> None:
    """Keys that need held-out rows."""
    if config.data.eval_fraction or config.data.eval_path is not None:
        return
    for key, mode, off in (
        ("trainer.eval_every", "train", 0),
        ("eval.after_training", "train", 0),
        ("generate.split", "predict", "all"),
    ):
        if config.mode == mode and value_of(config, key) != off:
            raise fault(
                config,
                key,
                "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
                f"held-out rows, or {off}",
                f"set {key}={off}, data.eval_fraction=0.05 or data.eval_path=<file>",
            )


def _lora(config: Config) -> None:
    lora, target, key = config.lora, config.lora.target_modules, "lora.target_modules"
    if isinstance(target, list) and not target:
        raise fault(
            config,
            key,
            "names no module",
            "auto, none, names or a regex",
            "set lora.target_modules=auto, or none to leave the non-expert part frozen",
        )
    if isinstance(target, str) and target not in ("auto", "none"):
        _regex(config, key, target)
    if target == "none" and not lora.experts:
        raise fault(
            config,
            key,
            "with lora.experts=false leaves nothing to train",
            "LoRA on the experts, elsewhere, or both",
            "set lora.target_modules=auto or lora.experts=true",
        )
    if not lora.init.startswith("pissa"):
        return
    if lora.experts:
        raise fault(
            config,
            "lora.init",
            "with lora.experts=true would take the largest singular values out of the routed experts, whose "
            "weights stay as stored: rounded to their format again, the rest is another model",
            "default or gaussian with lora.experts=true",
            "set lora.init=default, or lora.experts=false",
        )
    if config.model.keep_quantized:
        raise fault(
            config,
            "lora.init",
            "changes weights that model.keep_quantized=true leaves as stored",
            "default or gaussian with model.keep_quantized=true",
            "set lora.init=default, or model.keep_quantized=false",
        )
    if config.mode == "train" and config.eval.after_training:
        raise fault(
            config,
            "eval.after_training",
            f"asks the model without its adapter, whose weights lora.init={lora.init} changes",
            "0 with lora.init=pissa",
            "set eval.after_training=0, and run mode=eval generate.adapter=<run> afterwards",
        )
    if config.trainer.stage in ("dpo", "kto"):
        raise fault(
            config,
            "trainer.stage",
            f"takes the model without adapters as its reference, which lora.init={lora.init} changes",
            "lora.init=default or gaussian",
            "set lora.init=default, or trainer.stage=orpo (no reference)",
        )


def _optim(config: Config) -> None:
    optim, steps = config.optim, config.trainer.max_steps
    if optim.name == "deepspeed_cpu_adam" and not config.lora.experts:
        reason, required = (
            "is for the experts' LoRA, but lora.experts=false",
            "adamw or muon with lora.experts=false",
        )
        raise fault(config, "optim.name", reason, required, "set optim=adamw")
    if optim.name == "deepspeed_cpu_adam" and importlib.util.find_spec("deepspeed") is None:
        reason, remedy = (
            "needs deepspeed, which is not installed",
            "pip install deepspeed, or set optim=adamw",
        )
        raise fault(config, "optim.name", reason, "the package deepspeed", remedy)
    for key in ("optim.decay", "optim.warmup"):
        value = value_of(config, key)
        if value > 1 and value != int(value):
            required = "less than 1 (a share) or a whole number"
            raise fault(
                config,
                key,
                "is neither a share nor a whole number of steps",
                required,
                f"set {key}={int(value)}",
            )
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise fault(config, "optim.betas", "is out of range", "two numbers at least 0 and less than 1")
    if steps is not None and optim.warmup >= 1 and optim.warmup > steps:
        raise fault(
            config,
            "optim.warmup",
            f"is more steps than trainer.max_steps={steps}",
            f"at most {steps}, or a share below 1",
            "set optim.warmup=0.03 or raise trainer.max_steps",
        )


def _preference(config: Config) -> None:
    stage, loss = config.trainer.stage, config.preference.loss
    if config.preference.label_smoothing and (stage != "dpo" or loss not in ("sigmoid", "robust")):
        raise fault(
            config,
            "preference.label_smoothing",
            f"has no meaning for trainer.stage={stage} with preference.loss={loss}",
            "0, or trainer.stage=dpo with preference.loss=sigmoid or robust",
        )


def _trainer(config: Config) -> None:
    trainer, resume = config.trainer, config.trainer.resume
    for key in ("trainer.early_stopping", "trainer.save_best"):
        if value_of(config, key) and not trainer.eval_every:
            reason = "goes by the held-out loss, but trainer.eval_every=0"
            raise fault(config, key, reason, "evaluations during the run", "set trainer.eval_every=<steps>")
    if 0 < trainer.spike <= 1:
        raise fault(
            config, "trainer.spike", "would refuse ordinary steps", "more than 1, or 0", "set trainer.spike=5"
        )
    if any(step < 1 for step in trainer.profile_steps):
        raise fault(config, "trainer.profile_steps", "counts steps from 1", "at least 1")
    if trainer.micro_batch_size > trainer.batch_size:
        raise fault(
            config,
            "trainer.micro_batch_size",
            f"is more than trainer.batch_size={trainer.batch_size}",
            f"at most {trainer.batch_size}",
            f"set trainer.micro_batch_size={trainer.batch_size} or raise trainer.batch_size",
        )
    if resume is not None and config.run.overwrite:
        raise fault(
            config,
            "run.overwrite",
            f"with trainer.resume={resume} would delete the run to resume",
            "one of the two",
            "set run.overwrite=false to resume, or trainer.resume=null to begin anew",
        )
    if resume not in (None, "latest") and "/" not in resume and (not resume or closest(resume, ("latest",))):
        raise fault(
            config,
            "trainer.resume",
            "is neither latest nor a directory; did you mean latest?",
            "latest or a checkpoint directory",
            "set trainer.resume=latest, or ./NAME for a directory",
        )


def _generate(config: Config) -> None:
    generate = config.generate
    if generate.min_new_tokens > generate.max_new_tokens:
        raise fault(
            config,
            "generate.min_new_tokens",
            f"is more than generate.max_new_tokens={generate.max_new_tokens}",
            f"at most {generate.max_new_tokens}",
            "set generate.min_new_tokens=0 or raise generate.max_new_tokens",
        )
    if generate.adapter is None and generate.answer in ("adapter", "both"):
        raise fault(
            config,
            "generate.answer",
            "needs an adapter, but generate.adapter=null",
            "an adapter directory",
            "set generate.adapter=<directory>, or generate.answer=base",
        )


def _serve(config: Config) -> None:
    serve, adapter = config.serve, config.generate.adapter
    if config.mode == "serve" and adapter is not None:
        raise fault(
            config,
            "generate.adapter",
            "has no meaning with mode=serve, where requests name adapters",
            "serve.adapters",
            f"set serve.adapters={{NAME: {adapter}}}",
        )
    for name, directory in (serve.adapters or {}).items():
        empty = not name.strip() or not directory
        if empty or name == (serve.name or config.model.name):
            what = "something is empty" if empty else "an adapter has the base model's name"
            raise fault(
                config,
                "serve.adapters",
                f"is no list of adapters: {what}",
                "{NAME: DIRECTORY}, each name another one",
                "correct serve.adapters, or give the base model another name: serve.name=NAME",
                value={name: directory},
            )


def _results(config: Config) -> None:
    """What eval and compare read and write."""
    adapter, letters = config.generate.adapter, config.eval.letters
    for key in ("eval.adapter", "eval.base"):
        if config.mode == "eval" and adapter is not None and value_of(config, key) is not None:
            raise fault(
                config,
                key,
                f"names existing answers, but generate.adapter={adapter} asks for new ones",
                "one of the two",
                f"leave out {key} or generate.adapter",
            )
    if len(set(letters)) != len(letters) or not re.fullmatch(r"[A-Z]{2,}", letters):
        required = "at least two different capital letters"
        raise fault(config, "eval.letters", "names no options", required, "set eval.letters=ABCD")


def _cluster(config: Config) -> None:
    address = config.cluster.address
    if not _ADDRESS.fullmatch(address):
        match = closest(address, ("auto", "local"))
        reason = "is no address" + (f"; did you mean {match}?" if match else "")
        remedy = f"set cluster.address={match or 'auto'}"
        raise fault(config, "cluster.address", reason, "auto, local or HOST:PORT", remedy)


def _run(config: Config) -> None:
    name = config.run.name
    if name is not None and (not name.strip() or re.search(r"[/\\\x00-\x1f]", name) or name in (".", "..")):
        raise fault(
            config,
            "run.name",
            "cannot be a directory name",
            "a name without slashes",
            "set run.name=<name> and put the directory into run.root",
        )
    if config.mode != "plan" and config.plan.hardware is not None:
        reason = f"has no meaning with mode={config.mode}"
        raise fault(config, "plan.hardware", reason, "mode=plan", "set mode=plan, or plan.hardware=null")
