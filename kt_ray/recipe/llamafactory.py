"""A LLaMA-Factory training YAML as options of kt_ray.

Absent fields are set, too, to LLaMA-Factory's defaults, which are not kt_ray's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_ray.config.fields import closest
from kt_ray.config.files import HUB_NAME
from kt_ray.config.limits import WORDS
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_yaml_text
from kt_ray.recipe.datasets import map_data
from kt_ray.recipe.field_table import field_table, names_elsewhere
from kt_ray.recipe.ktransformers import map_kt, merge_kt_config
from kt_ray.recipe.reading import Reading, masked
from kt_ray.recipe.templates import map_template
from kt_ray.terminal import shortened

# Hub names whose dimensions conf/model has: enough to plan without a network.
HUB = (
    (r"(deepseek-ai|opensourcerelease|unsloth)/DeepSeek-(V3|R1)(?!.*(Distill|Zero|Lite)).*", "deepseek_v3"),
    (r"deepseek-ai/DeepSeek-V2-Lite.*", "deepseek_v2_lite"),
    (r"deepseek-ai/DeepSeek-V4-Flash.*", "deepseek_v4_flash"),
    (r"Qwen/Qwen3-30B-A3B.*", "qwen3_30b_a3b"),
    (r"Qwen/Qwen3-235B-A22B.*", "qwen3_235b_a22b"),
    (r"Qwen/Qwen3-Next-80B-A3B.*", "qwen3_next_80b_a3b"),
    (r"Qwen/Qwen3\.5-35B-A3B.*", "qwen3_5_35b_a3b"),
    (r"moonshotai/Kimi-K2.*", "kimi_k2"),
    (r"meituan-longcat/LongCat-Flash-Chat", "longcat_flash"),
    (r"(zai-org|THUDM)/GLM-4\.5-Air.*", "glm4_5_air"),
    (r"openai/gpt-oss-20b", "gpt_oss_20b"),
    (r"openai/gpt-oss-120b", "gpt_oss_120b"),
    (r"MiniMaxAI/MiniMax-M2.*", "minimax_m2"),
    (r"mistralai/Mixtral-8x7B.*", "mixtral_8x7b"),
    (r"allenai/OLMoE-1B-7B.*", "olmoe"),
    (r"microsoft/Phi-3\.5-MoE.*", "phi_3_5_moe"),
)
_EXPERTS = ({"gate_proj", "up_proj", "down_proj"}, {"w1", "w2", "w3"})
_FIELD = re.compile(r"\$\{[\w.\[\]]+\}")
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused")


def read(path: str | Path, devices: int | None = None, accelerate: str | None = None) -> Reading:
    """The options that a recipe becomes, with what was ignored and what is refused.

    Args:
        path: the YAML file.
        devices: data-parallel workers that LLaMA-Factory would have been started with; None = as the
            accelerate file or ray_num_workers says, else 1.
        accelerate: the configuration file of `accelerate launch`; None = none.

    Raises:
        UserError: a file that is not there or is no mapping.
    """
    reading = Reading(Path(path), _load(Path(path), "recipe"))
    launcher = {} if accelerate is None else _load(Path(accelerate), "recipe.accelerate")
    if accelerate is not None:
        check_shape(launcher, {"num_processes?": int}, Path(accelerate), "the accelerate file", "correct it")
    merge_kt_config(reading, launcher)
    _map(reading, devices, launcher)
    return reading


def read_field(name: str, value: Any) -> Reading:
    """What one field alone becomes; which files its data sets are is not looked up."""
    reading = Reading(Path(), {name: value})
    _map(reading, None, {}, data_sets=False)
    return reading


def _map(
    reading: Reading, devices: int | None, launcher: Mapping[str, Any], *, data_sets: bool = True
) -> None:
    _table(reading)
    model_dir, option = _model(reading)
    map_kt(reading, model_dir, option)
    stage = _method(reading)
    _preference(reading, stage)
    if data_sets:
        map_data(reading, stage)
    map_template(reading)
    _data_options(reading, stage)
    _batch(reading, devices, launcher)
    _optim(reading)
    _output(reading)
    _evaluation(reading)


def _load(path: Path, key: str) -> dict[str, Any]:
    from omegaconf import OmegaConf

    if not path.is_file():
        raise UserError(
            "the recipe does not exist",
            where=f"{key}={path}",
            observed=f"working directory {Path.cwd()}",
            remedy=f"correct {key}",
        )
    text = read_yaml_text(path, "the recipe", "correct it")
    try:  # OmegaConf, as LLaMA-Factory does: 1e-4 is a number to it
        config = OmegaConf.create(text)
        _refuse_resolvers(path, OmegaConf.to_container(config))
        given = OmegaConf.to_container(config, resolve=True)
    except UserError:
        raise
    except Exception as error:  # of YAML's constructors and of OmegaConf, which raise many kinds
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        lines = lines or [f"{type(error).__name__}: no mapping of fields"]
        raise UserError(
            "the recipe cannot be read", where=str(path), observed=" ".join(lines[:2]), remedy="correct it"
        ) from error
    if not isinstance(given, dict):
        raise UserError("the recipe is no mapping of fields", where=str(path), required="name: value lines")
    return {str(name): value for name, value in given.items()}


def _refuse_resolvers(path: Path, value: Any) -> None:
    """${oc.env:HOME} in a file from elsewhere would read this machine; ${field} reads the file alone."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            _refuse_resolvers(path, name)
            _refuse_resolvers(path, part)
    elif isinstance(value, list):
        for part in value:
            _refuse_resolvers(path, part)
    elif isinstance(value, str) and "${" in _FIELD.sub("", value):
        raise UserError(
            "the recipe asks for more than its own fields",
            where=str(path),
            observed=value[:80],
            required="at most ${field}, the value of another field",
            remedy="write the value itself",
        )


def _table(reading: Reading) -> None:
    """What the table alone decides: unknown, ignored and fixed fields."""
    for name, value in reading.fields.items():
        field = field_table().get(name)
        if field is None:
            match = names_elsewhere().get(name) or closest(name, field_table())
            reading.refuse(name, f"is not known{f'; did you mean {match}?' if match else ''}")
        elif field.kind == "ignored" and value is not None:
            reading.ignored.append((_note(name, value), field.text))
        elif field.kind == "fixed" and not field.accepts(value):
            reading.refuse(name, field.text)


def _note(name: str, value: Any) -> str:
    return f"{name}={shortened(masked(name, value), 60)}"


def _model(reading: Reading) -> tuple[Path | None, str | None]:
    """model, model.path and the computing type. Returns the directory, or the option with a hub name's
    dimensions."""
    given = reading.get("model_name_or_path")
    path, option = None, None
    if not isinstance(given, str):
        reading.refuse("model_name_or_path", "names no model", "model", "model.path")
    elif (there := reading.existing(given)).is_dir():
        path = there
        reading.set("model", "custom", "model_name_or_path")
        reading.set("model.path", str(there), "model_name_or_path")
    elif HUB_NAME.fullmatch(given):
        option = next((name for pattern, name in HUB if re.fullmatch(pattern, given)), None)
        note = "" if option is None else f"; a plan without a network: mode=plan model={option}"
        note = f"from the hub, or its cache here{note}"
        reading.set("model", given.removeprefix("hf://"), "model_name_or_path", note=note)
    else:
        text = "is no directory here, and no hub name"
        reading.refuse("model_name_or_path", text, "model", "model.path")
    if reading.flag("bf16") or reading.flag("pure_bf16"):
        reading.set("model.dtype", "bfloat16", "bf16" if reading.flag("bf16") else "pure_bf16")
    kinds = {"auto": "sdpa", "sdpa": "sdpa", "fa2": "sdpa", "disabled": "eager"}
    if reading.given("flash_attn"):
        note = "the same function by PyTorch's kernels" if reading.fields["flash_attn"] == "fa2" else ""
        kind = reading.word("flash_attn", kinds, "auto", "model.attn_implementation")
        reading.set("model.attn_implementation", kind, "flash_attn", note=note)
    if reading.given("moe_aux_loss_coef"):
        reading.set("trainer.aux_loss", reading.number("moe_aux_loss_coef", 0.0), "moe_aux_loss_coef")
    return path, option


def _method(reading: Reading) -> str:
    """LoRA and the stage, which is returned."""
    stage = str(reading.word("stage", ("sft", "pt", "dpo", "kto"), "sft"))
    names = ["stage"]
    if stage == "dpo" and reading.get("pref_loss") == "orpo":
        stage, names = "orpo", ["stage", "pref_loss"]
    reading.set("trainer.stage", stage, *names)
    _targets(reading)
    if reading.given("adapter_name_or_path"):
        _start(reading, stage)
    else:
        rank = reading.integer("lora_rank", 8, "lora.rank")
        reading.set("lora.rank", rank, "lora_rank")
        reading.set("lora.alpha", reading.number("lora_alpha", 2 * rank, "lora.alpha"), "lora_alpha")
        reading.set("lora.rslora", reading.flag("use_rslora"), "use_rslora")
        if reading.flag("use_dora"):
            reading.set("lora.dora", True, "use_dora")
            note = "DoRA does not reach the routed experts"
            reading.set("lora.experts", False, "use_dora", note=note)
        for name in ("rank_pattern", "alpha_pattern"):
            if reading.given(name):
                reading.set(f"lora.{name}", reading.patterns(name) or None, name)
    reading.set("lora.dropout", reading.number("lora_dropout", 0.0, "lora.dropout"), "lora_dropout")
    if reading.given("loraplus_lr_ratio"):
        ratio = reading.number("loraplus_lr_ratio", 1.0)
        reading.set("optim.lora_plus_ratio", ratio, "loraplus_lr_ratio")
    if reading.flag("pissa_init"):
        steps = reading.integer("pissa_iter", 16)
        if steps not in (16, -1):
            reading.refuse("pissa_iter", "is neither 16 nor -1", "lora.init")
        reading.set("lora.init", "pissa" if steps == -1 else "pissa_niter_16", "pissa_init", "pissa_iter")
    return stage


def _start(reading: Reading, stage: str) -> None:
    """The adapter that training starts from, which says the rest of LoRA's settings itself."""
    adapters = reading.names("adapter_name_or_path")
    if len(adapters) != 1:
        text = "names several adapters: merge all but the last into the model first"
        reading.refuse("adapter_name_or_path", text, "lora.adapter")
        return
    note = (
        "the reference is model and adapter; there it is the model alone" if stage in ("dpo", "kto") else ""
    )
    reading.set("lora.adapter", str(reading.existing(adapters[0])), "adapter_name_or_path", note=note)
    experts = reading.overrides["lora.experts"]
    if experts.value:
        note = "also where that adapter has none, which there stay without: then lora.experts=false"
        reading.overrides["lora.experts"] = replace(experts, note=note)
    del reading.overrides["lora.target_modules"]


def _targets(reading: Reading) -> None:
    given = reading.get("lora_target")
    if given is False:
        reading.refuse("lora_target", "names no module", "lora.target_modules", "lora.experts")
    targets = ["all"] if isinstance(given, bool) else reading.names("lora_target") or ["all"]
    experts = True
    if targets in (["all"], ["all-linear"]):  # PEFT's word for it
        note = "routers stay frozen"
        reading.set("lora.target_modules", "auto", "lora_target", note=note)
    else:
        projections = next((names for names in _EXPERTS if names & set(targets)), set())
        if "all" in targets or not projections <= set(targets):
            text = "names only part of the experts' projections, whose adapters are computed together"
            reading.refuse("lora_target", text, "lora.target_modules", "lora.experts")
        experts = bool(projections)
        reading.set("lora.target_modules", targets, "lora_target")
    source, forced = "lora_target", "kt_force_fused_expert_lora"
    if reading.flag(forced):
        experts, source = True, forced
    source = reading.frozen_experts or source
    reading.set("lora.experts", experts and not reading.frozen_experts, source)


def _preference(reading: Reading, stage: str) -> None:
    if stage in ("dpo", "orpo"):
        losses = ("sigmoid", "hinge", "ipo", "simpo", "orpo")
        loss = reading.word("pref_loss", losses, "sigmoid", "preference.loss")
        if stage == "dpo":
            reading.set("preference.loss", loss, "pref_loss")
        smoothing = reading.number("dpo_label_smoothing", 0.0)
        if loss == "simpo":  # there it has no effect on this loss
            reading.set("preference.gamma", reading.number("simpo_gamma", 0.5), "simpo_gamma")
        else:
            reading.set("preference.label_smoothing", smoothing, "dpo_label_smoothing")
    if stage == "kto":
        for key, name in (
            ("desirable_weight", "kto_chosen_weight"),
            ("undesirable_weight", "kto_rejected_weight"),
        ):
            reading.set(f"preference.{key}", reading.number(name, 1.0), name)
    if stage in ("dpo", "orpo", "kto"):
        note = "the loss of chosen answers counts their prompts, as in trl" if stage == "orpo" else ""
        reading.set("preference.beta", reading.number("pref_beta", 0.1), "pref_beta", note=note)


def _data_options(reading: Reading, stage: str) -> None:
    reading.set("data.max_length", reading.integer("cutoff_len", 2048, "data.max_length"), "cutoff_len")
    last = reading.flag("mask_history")
    note = "every answer after the last question; there the last answer alone" if last else ""
    reading.set("data.train_on", "last" if last else "all", "mask_history", note=note)
    reading.set("data.shuffle", not reading.flag("disable_shuffling"), "disable_shuffling")
    neat = reading.flag("neat_packing")
    packing = neat or reading.flag("packing", stage == "pt")
    note = "" if neat or not packing else "packed rows do not see each other"
    reading.set("data.packing", packing, "neat_packing" if neat else "packing", note=note)
    if reading.flag("group_by_length"):
        reading.set("data.group_by_length", True, "group_by_length")
    reading.set("seed", reading.integer("seed", 42, "seed"), "seed")
    if reading.flag("use_cpu"):
        reading.set("rule.device", "cpu", "use_cpu")


def _batch(reading: Reading, devices: int | None, launcher: Mapping[str, Any]) -> None:
    micro = reading.integer("per_device_train_batch_size", 8, "trainer.batch_size")
    steps = reading.integer("gradient_accumulation_steps", 1, "trainer.batch_size")
    if devices is not None:
        count, origin = devices, f"recipe.devices={devices}"
    elif launcher.get("num_processes"):
        count = int(launcher["num_processes"])
        origin = f"num_processes={count} of the accelerate file"
    elif reading.given("ray_num_workers"):
        count, origin = reading.integer("ray_num_workers", 1), "ray_num_workers"
    else:
        count, origin = 1, "1 data-parallel worker assumed; recipe.devices=N says otherwise"
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    reading.set("trainer.micro_batch_size", micro, names[0])
    note = f"{micro} × {steps} × {count} ({origin})"
    reading.set("trainer.batch_size", micro * steps * count, *names, note=note)
    reading.set("trainer.epochs", reading.number("num_train_epochs", 3.0), "num_train_epochs")
    if (limit := reading.integer("max_steps", -1)) > 0:
        reading.set("trainer.max_steps", limit, "max_steps")
    if reading.given("neftune_noise_alpha"):
        alpha = reading.number("neftune_noise_alpha", 0.0)
        reading.set("trainer.neftune_noise_alpha", alpha, "neftune_noise_alpha")


def _optim(reading: Reading) -> None:
    betas = [name for name in ("adam_beta1", "adam_beta2") if reading.given(name)]
    if reading.flag("use_muon"):
        reading.set("optim", "muon", "use_muon")
        note = "Muon has no second moment, and its momentum is 0.95 there, too"
        reading.ignored += [(_note(name, reading.fields[name]), note) for name in betas]
    else:
        option = reading.word("optim", dict.fromkeys(_ADAMW, "adamw"), "adamw_torch", "optim", "optim.name")
        reading.set("optim", option, "optim")
        if betas:
            values = [reading.number("adam_beta1", 0.9), reading.number("adam_beta2", 0.999)]
            reading.set("optim.betas", values, "adam_beta1", "adam_beta2")
    reading.set("optim.lr", reading.number("learning_rate", 5e-5), "learning_rate")
    for name, key, default in (
        ("weight_decay", "optim.weight_decay", 0.0),
        ("adam_epsilon", "optim.eps", 1e-8),
        ("max_grad_norm", "optim.max_grad_norm", 1.0),
    ):
        reading.set(key, reading.number(name, default), name)
    _schedule(reading)


_SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "wsd",
}


def _schedule(reading: Reading) -> None:
    name = str(reading.get("lr_scheduler_type", "linear"))
    schedule = reading.word("lr_scheduler_type", _SCHEDULES, "linear", "optim.schedule")
    reading.set("optim.schedule", schedule, "lr_scheduler_type")
    steps, share = reading.number("warmup_steps", 0), reading.number("warmup_ratio", 0.0)
    if name == "constant":
        reading.set("optim.warmup", 0, "lr_scheduler_type", note="constant has no warm-up there")
    else:
        if not steps and not 0 <= share < 1:  # optim.warmup counts steps from 1 on
            reading.refuse("warmup_ratio", "is no share of the steps, less than 1", "optim.warmup")
        reading.set("optim.warmup", steps or share, "warmup_steps" if steps else "warmup_ratio")
    kwargs = reading.get("lr_scheduler_kwargs", {})
    if not isinstance(kwargs, Mapping):
        reading.refuse("lr_scheduler_kwargs", "is no mapping", "optim.schedule")
        return
    keys: dict[str, tuple[str, Any]] = {}
    if schedule in ("cosine", "wsd"):
        rate = reading.number("learning_rate", 5e-5)
        keys |= {
            "min_lr": ("optim.min_lr_ratio", lambda value: value / rate if rate else value),
            "min_lr_rate": ("optim.min_lr_ratio", float),
            "min_lr_ratio": ("optim.min_lr_ratio", float),
        }
    if schedule == "wsd":
        keys["decay_type"] = ("optim.decay_shape", str)
        _decay(reading, kwargs, steps, share)
        kwargs = {key: value for key, value in kwargs.items() if key not in _LENGTHS}
    for key, value in kwargs.items():
        if key in keys:
            option, convert = keys[key]
            if convert is not str:
                value = Reading(reading.path, {key: value}).number(key, math.nan)
            if value != value:
                reading.refuse("lr_scheduler_kwargs", f"has no number as {key}", "optim.schedule")
            else:
                reading.set(option, convert(value), "lr_scheduler_kwargs")
        else:
            reading.refuse(f"lr_scheduler_kwargs.{key}", "is not mapped", "optim.schedule", value=value)


_LENGTHS = ("num_stable_steps", "num_decay_steps")


def _decay(reading: Reading, kwargs: Mapping[str, Any], warmup: float, share: float) -> None:
    """optim.decay: without lengths, the last two thirds of what follows the warm-up."""
    total = reading.integer("max_steps", -1)
    rest = max(0, total - int(warmup or math.ceil(share * total)))
    decay: float = rest - rest // 3
    note = "LLaMA-Factory decays over two thirds of the steps after the warm-up"
    if any(name in kwargs for name in _LENGTHS):
        given = Reading(reading.path, dict(kwargs))
        stable, decay = given.integer(_LENGTHS[0], rest // 3), given.integer(_LENGTHS[1], int(decay))
        if given.refused or decay < 1 or stable + decay != rest:
            text = (
                "must end the decay with the last step: num_stable_steps (a third of the steps after the "
                "warm-up unless given) and num_decay_steps are together max_steps without the warm-up"
            )
            reading.refuse("lr_scheduler_kwargs", text, "optim.decay", "optim.schedule")
            return
        reading.set("optim.decay", decay, "lr_scheduler_kwargs")
    elif total > 0:
        reading.set("optim.decay", max(1, decay), "lr_scheduler_type", note=note)
    elif not warmup:
        # Cut, not rounded: a share of steps is rounded up.
        decay = math.floor((1 - share) * 2 / 3 * 1e6) / 1e6
        reading.set("optim.decay", decay, "lr_scheduler_type", note=f"{note}; to within a step")
    else:
        text = (
            "leaves the length of the decay open: two thirds of the steps after the warm-up, whose number is "
            "not known here; give max_steps or warmup_ratio"
        )
        reading.refuse("lr_scheduler_kwargs.num_decay_steps", text, "optim.decay", value=None)


def _output(reading: Reading) -> None:
    if reading.given("output_dir"):
        folder = Path(str(reading.fields["output_dir"]))
        reading.set("run.root", str(folder.parent), "output_dir")
        reading.set("run.name", folder.name, "output_dir")
    resume = reading.get("resume_from_checkpoint", False)
    if resume is not False:
        reading.set("trainer.resume", "latest" if resume is True else str(resume), "resume_from_checkpoint")
    elif reading.flag("overwrite_output_dir"):
        reading.set("run.overwrite", True, "overwrite_output_dir")
    _every(reading, "save", "trainer.save_every", 500)
    kept = reading.integer("save_total_limit", 0)
    reading.set("trainer.keep_checkpoints", kept, "save_total_limit", note="" if kept else "0 = all")
    if reading.given("logging_steps"):
        every = reading.number("logging_steps", 1)
        if every < 1 or every != int(every):
            reading.refuse("logging_steps", "is no number of steps", "trainer.log_every")
        reading.set("trainer.log_every", max(1, int(every)), "logging_steps")
    if reading.given("plot_loss"):
        reading.set("tracking.plot", reading.flag("plot_loss"), "plot_loss")
    _trackers(reading)


def _trackers(reading: Reading) -> None:
    names, sources = [name for name in reading.names("report_to") if name != "none"], ["report_to"]
    known = [name for name in names if name in WORDS["tracking.name"]]
    others = [name for name in names if name not in known]
    note = f"{', '.join(others)}: not a tracker of kt_ray" if others else ""
    if reading.flag("use_swanlab"):
        known, sources = [*known, "swanlab"], [*sources, "use_swanlab"]
    if len(known) > 1:
        reading.set("tracking.name", known, *sources, note=note)
    else:
        reading.set("tracking", known[0] if known else "jsonl", *sources, note=note)
    for name, key in (
        ("project", "tracking.project"),
        ("swanlab_project", "tracking.project"),
        ("swanlab_workspace", "tracking.entity"),
    ):
        if reading.given(name):
            reading.set(key, str(reading.fields[name]), name)


def _every(reading: Reading, what: str, key: str, default: int, strategy: str = "steps") -> int | str:
    """The interval between savings or evaluations, 0 = never; recorded under `key`."""
    name, how = f"{what}_steps", f"{what}_strategy"
    if what == "eval" and not reading.given(how) and reading.given("evaluation_strategy"):
        how = "evaluation_strategy"
    kinds = {"steps": None, "epoch": "1epoch", "no": 0, "False": 0}
    interval: int | str | None = reading.word(how, kinds, strategy, key)
    if interval is not None:
        reading.set(key, interval, how)
        return interval
    every = reading.number(name, default, key)
    if every < 1 or every != int(every):
        reading.refuse(name, "is no number of steps", key)
        every = default
    reading.set(key, int(every), name)
    return int(every)


def _evaluation(reading: Reading) -> None:
    default = max(1, int(reading.number("logging_steps", 500)))
    every = _every(reading, "eval", "trainer.eval_every", default, "no")
    if not every and reading.given("do_eval") and reading.flag("do_eval"):
        reading.refuse("do_eval", "needs eval_strategy: steps or epoch", "trainer.eval_every")
    held_out = "data.eval_path" in reading.overrides or bool(
        (share := reading.overrides.get("data.eval_fraction")) and share.value
    )
    if every and not held_out:
        text = "evaluates, but neither eval_dataset nor val_size holds rows out"
        name = "eval_strategy" if reading.given("eval_strategy") else "evaluation_strategy"
        reading.refuse(name, text, "data.eval_path", "data.eval_fraction", "trainer.eval_every")
    if reading.flag("load_best_model_at_end"):
        reading.set("trainer.save_best", True, "load_best_model_at_end")
    if reading.given("early_stopping_steps"):
        patience = reading.integer("early_stopping_steps", 0)
        reading.set("trainer.early_stopping", patience, "early_stopping_steps")
