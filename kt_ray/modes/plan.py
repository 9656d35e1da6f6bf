"""mode=plan: placement and bytes per device, without weights, GPUs, torch or Ray."""

from __future__ import annotations

import dataclasses
import glob
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console

from kt_ray.config.fields import show
from kt_ray.config.files import conf_dir, option_names
from kt_ray.config.lora_patterns import check_patterns
from kt_ray.config.mapping import from_dict
from kt_ray.config.schema import Config, ModelConfig, RuleConfig
from kt_ray.dims.config_json import dims_from_config, dims_from_dir
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.weight_formats import plain_storage
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_for
from kt_ray.placement.balance import without_load
from kt_ray.placement.generation_memory import within_server
from kt_ray.placement.lora_sizes import adapted_names, strange_targets
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.remedies import describe, remedies, shortage
from kt_ray.placement.render import (
    billions,
    counted,
    expert_row,
    gib,
    layout_line,
    memory_table,
    worker_row,
)
from kt_ray.runs.known_load import known_load, resumed_choice
from kt_ray.runs.plan_time import run_rows, show_time, titled_table
from kt_ray.terminal import screen_console
from kt_ray.timing.choose import choose_plan

FITS, DOES_NOT_FIT = 0, 1
_WIDTH = 120  # where output is no terminal


def run(config: Config) -> int:
    """Print the plan. Returns 0 when it fits, 1 when it does not.

    Raises:
        UserError: the model is no MoE model, the rule cannot be laid out at all, or no row would be trained.
    """
    console = screen_console(file=sys.stdout, width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    config = within_server(config) if config.trainings else as_adapter(config)
    hardware = hardware_for(config)
    dims = model_dims(config.model)
    check_patterns(config.lora, adapted_names(dims, config.lora), dims.moe_layers, dims.num_experts)
    rows = run_rows(config)
    load = known_load(config, dims)
    plan = choose_plan(dims, config, hardware, load, before=resumed_choice(config))
    _show_head(console, config, plan)
    _show_placement(console, plan)
    _show_memory(console, plan)
    show_time(console, config, plan, rows, load)
    if plan.fits:
        console.print(f"This plan fits {hardware.source}.", style="green")
        return FITS
    missing = f"This plan does not fit {hardware.source}: {shortage(plan)}."
    console.print(missing, style="red", markup=False, soft_wrap=True)
    found = remedies(plan.dims, config, hardware, other_rules())
    for remedy in found:
        console.print(f"  fits with  {remedy.overrides}  ({remedy.effect})", markup=False, soft_wrap=True)
    if not found:
        console.print("  No rule or option tried makes it fit: more memory or a smaller model is needed.")
    return DOES_NOT_FIT


def as_adapter(config: Config) -> Config:
    """With the ranks and modules of the adapter that the run starts from, if it starts from one.

    Raises:
        UserError: there is no such adapter, or settings that are not its own.
    """
    if config.lora.adapter is None:
        return config
    from kt_ray.runs.start_adapter import open_start  # loads torch

    return open_start(config, config.model.path)[0]


def model_dims(model: ModelConfig) -> ModelDims:
    """Dimensions of the configured model: from its directory, its built-in recipe or its inline config.

    Raises:
        UserError: there is neither, or it describes no MoE model.
    """
    dims = _own_dims(model)
    if model.experts_path is None:
        return dims
    size = _experts_file_bytes(Path(model.experts_path))
    note = f"routed experts from {Path(model.experts_path).name}: " + (
        "its size counts whole, also what is not of the experts"
        if size
        else "it is not there; planned at 8.5 bits per weight (Q8_0)"
    )
    size = size or round(dims.bytes_in_file)
    return dataclasses.replace(dims, experts_file_bytes=size, notes=(*dims.notes, note))


def _experts_file_bytes(path: Path) -> int:
    """Bytes of a GGUF file and of the parts after it (NAME-00001-of-00003.gguf); 0 = there is none."""
    stem, of, count = path.stem.rpartition("-of-")
    first = stem.removesuffix("00001") if of and stem.endswith("-00001") else ""
    parts = sorted(path.parent.glob(f"{glob.escape(first)}*-of-{count}.gguf")) if first else [path]
    return sum(part.stat().st_size for part in parts if part.is_file())


def _own_dims(model: ModelConfig) -> ModelDims:
    """Dimensions as the model itself states them."""
    if model.path is not None and (model.config is None or (Path(model.path) / "config.json").is_file()):
        return dataclasses.replace(dims_from_dir(model.path), name=model.name)
    if model.build is not None:
        from kt_ray.demo.recipes import built

        recipe = built(model.build)
        own = {"model_type": "deepseek_v3", "vocab_size": recipe.vocab, "dtype": "bfloat16"}
        dims = dims_from_config({**recipe.config, **own}, model.name)
        if model.tokenizer is None:
            return dims
        note = "vocabulary planned as the demo tokenizer's; the given tokenizer's may be larger"
        return dataclasses.replace(dims, notes=(*dims.notes, note))
    if model.config is not None:
        return dims_from_config(model.config, model.name)
    raise UserError(
        "there is no model to plan for",
        where="model.path",
        required="a checkpoint directory, or a model whose dimensions are known",
        remedy="set model.path=<directory> or model=deepseek_v3",
    )


def other_rules() -> dict[str, RuleConfig]:
    """Every rule of conf/rule by its option name. They build on auto.yaml, as their defaults list says."""
    rules: dict[str, RuleConfig] = {}
    for name in option_names("rule"):
        files = [OmegaConf.load(conf_dir() / "rule" / f"{part}.yaml") for part in ("auto", name)]
        rule: Any = OmegaConf.to_container(OmegaConf.merge(*files))
        rule.pop("defaults", None)
        rules[name] = from_dict({"rule": rule}).rule
    return rules


def _show_head(console: Console, config: Config, plan: Plan) -> None:
    dims = plan.dims
    lora = f"LoRA rank {config.lora.rank}"
    lora += f" (other ranks: {show(config.lora.rank_pattern)})" if config.lora.rank_pattern else ""
    lora += "" if config.lora.experts else ", not on routed experts"
    if plan.backward.lowest or config.lora.layers is not None:
        chosen = "" if config.lora.layers is None else f" in layers {show(config.lora.layers)}"
        lora += f"{chosen}; backward ends at layer {plan.backward.lowest}"
    units = "pairs x 2" if config.rows_per_unit == 2 else "rows"
    lines = [
        f"model     {config.model.name} ({dims.model_type}): {billions(dims.total_params)} parameters, "
        f"{billions(dims.routed_params)} in routed experts",
        f"          {dims.num_layers} layers, {len(dims.moe_layers)} with {dims.num_experts} experts"
        + (f" and {dims.zero_experts} without weights, " if dims.zero_experts else ", ")
        + f"{dims.experts_per_token} per token; experts {dims.expert_format}, the rest {plan.dtype}",
        f"rule      {layout_line(plan)}",
        f"hardware  {plan.hardware.source}: {describe(plan.hardware)}",
        f"step      {config.trainer.batch_size} {units} x {config.data.max_length} tokens = "
        f"{plan.tokens_per_step:,} tokens at most{_unnamed(config)}; {lora}",
    ]
    if config.trainings:
        server = config.train_server
        shared = server.shared if plan.mixes_trainings else "experts"
        joined = f"joined in their {shared}" if plan.joins_trainings else "not joined"
        lines.append(
            f"server    {counted(server.adapters, 'training')} in memory of at most {server.trainings}, "
            f"whose passes are {joined}; {counted(server.samplers, 'sampler')}; "
            f"{counted(config.serve.max_batch, 'answer')} at a time in each replica"
        )
    if plan.expected_load is not None:
        load = plan.expected_load
        lines.append(
            f"load      fullest expert actor {load.chosen:.3f} times the mean of a layer ({load.placement}; "
            f"contiguous {load.contiguous:.3f}), by {counted(load.steps, 'step')} of {load.source}"
        )
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)
    if dims.refusal:
        console.print(f"plan only: {dims.refusal}", style="yellow", markup=False, soft_wrap=True)
    for note in (*plan.notes, *_bf16_note(config, plan), *_targets_note(config, plan)):
        console.print(f"note: {note}", markup=False, soft_wrap=True)


def _unnamed(config: Config) -> str:
    """Where the size of a step comes from, if no rows are named."""
    data = config.data
    if config.trainings:
        return ""
    named = data.path is not None or data.sources is not None or data.builtin is not None
    return "" if named else " (no rows are named: trainer.batch_size x data.max_length)"


def _targets_note(config: Config, plan: Plan) -> list[str]:
    """Names that training would refuse: it knows more modules than a plan does."""
    if strange := ", ".join(strange_targets(plan.dims, config.lora)):
        return [f"lora.target_modules name nothing outside routed experts: {strange}"]
    return []


def _bf16_note(config: Config, plan: Plan) -> list[str]:
    """What a BF16 checkpoint would need, where the model is refused and its experts are stored otherwise."""
    if not plan.dims.refusal or plan.dims.expert_format in ("bf16", "f32"):
        return []
    other = make_plan(
        dataclasses.replace(plan.dims, expert_storage=plain_storage("bfloat16"), plain_expert_layers=()),
        without_load(config),
        plan.hardware,
    )
    sums = [f"{b.device} {gib(b.total)} of {gib(b.capacity)}" for b in other.budgets if b.is_socket]
    verdict = "fits" if other.fits else "does not fit"
    return [f"a BF16 checkpoint of this model {verdict}: {', '.join(sums)}"]


def _show_placement(console: Console, plan: Plan) -> None:
    of_workers = ("worker", "replica", "stage", "device", "layers", "MoE layers", "threads", "CPUs", "lane")
    shown = len(of_workers) - (plan.stream_to != "workers")
    rows = (worker_row(plan, worker)[:shown] for worker in plan.workers)
    console.print(titled_table("Attention workers", of_workers[:shown], rows))
    of_actors = (
        *("actor", "NUMA node", "experts per layer", "threads", "CPUs", "backend", "ISA"),
        *("kept for backward", "lane"),
    )
    console.print(
        titled_table("Expert actors", of_actors, (expert_row(plan, actor) for actor in plan.experts))
    )


def _show_memory(console: Console, plan: Plan) -> None:
    header, rows = memory_table(plan)
    table = titled_table("Memory per device", header, (), numbers=range(1, len(header)))
    for i, row in enumerate(rows):
        if row[0] == "sum":
            table.add_section()
        table.add_row(*row, style="bold" if i == len(rows) - 1 else None)
    console.print(table)
