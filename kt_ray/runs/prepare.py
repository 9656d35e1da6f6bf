"""Everything that can be found wrong without starting an actor: files, plan, data, batches."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kt_ray.checkpoint import (
    CheckpointIndex,
    ExpertLayout,
    GgufExperts,
    check_content,
    check_non_experts,
)
from kt_ray.checkpoint.index import some
from kt_ray.config.schema import Config
from kt_ray.data import Batches, DataBundle, eval_waves, load_data
from kt_ray.demo import resolve_model_dir
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.lora import resolve_targets
from kt_ray.model.routing import router_recorder
from kt_ray.model.stage_spec import StageSpec
from kt_ray.runs.known_load import known_load, resumed_choice, resumed_load
from kt_ray.native import ISA_VARIABLE, ExpertFormula, available_isas, select_isa
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.dims.weight_formats import plain_storage
from kt_ray.hardware.describe import this_host
from kt_ray.timing.choose import choose_plan
from kt_ray.dims.packable import check_packing_family
from kt_ray.dims.model_dims import ModelDims
from kt_ray.placement.plan_types import Plan
from kt_ray.train.trainer import StepBatches
from kt_ray.train.preference_steps import check_units


@dataclass(frozen=True)
class Prepared:
    """A checked run: nothing in it needs an actor.

    Attributes:
        model_dir: resolved Hugging Face directory.
        index: its validated tensors.
        plan: who does what. data: tokenised rows. batches: of every step.
        module_names: the model's linear modules outside the routed experts.
        formulas: MoE layer -> what its experts compute.
        notes: what was passed over in the checkpoint, one line each.
        gguf: the experts of model.experts_path, or None.
        root: module name of the language model.
        load: tokens per expert so far, of the checkpoint resumed from.
    """

    config: Config
    model_dir: str
    index: CheckpointIndex
    plan: Plan
    data: DataBundle
    batches: StepBatches
    module_names: tuple[str, ...]
    formulas: Mapping[int, ExpertFormula]
    notes: tuple[str, ...] = ()
    gguf: GgufExperts | None = None
    root: str = "model"
    load: ExpertLoad = field(default_factory=ExpertLoad)

    @property
    def fingerprint(self) -> str:
        """Recognises the weights on resume."""
        if self.gguf is None:
            return self.index.fingerprint
        return hashlib.sha256(f"{self.index.fingerprint} {self.gguf.fingerprint}".encode()).hexdigest()


def prepare(config: Config) -> Prepared:
    """Check model, hardware, plan and data of a training run, cheapest first.

    Raises:
        UserError: the first fault.
    """
    model_dir = os.path.abspath(resolve_model_dir(config.model))
    dims = dims_from_dir(model_dir)
    load = known_load(config, dims)
    # The plan refuses what cannot be trained, by name, before any file is opened.
    hardware = this_host()
    before = resumed_choice(config)
    plan = choose_plan(dims, config, hardware, load, before=before)
    _check_isa(config)
    if config.data.packing:
        check_packing_family(model_dir)
    index, layout, gguf, stored = open_checkpoint(config, model_dir, dims)
    if stored != dims:
        plan = choose_plan(stored, config, hardware, load, before=before)
    _check_fits(plan)
    whole = build_on_meta(_meta_spec(config, dims, model_dir))
    _check_formulas(layout, whole.formulas)
    if config.trainer.aux_loss:
        router_recorder(whole.causal)
    report = check_non_experts(index, whole.causal, layout=layout)
    check_content(index)
    resolve_targets(config.lora.target_modules, whole.lora_names)
    data = for_stage(config.trainer.stage, load_data(config, model_dir, config.seed))
    batches = _batches(config, plan, data)
    notes = (*index.notes, *_ignored_note(report.ignored), *(() if gguf is None else gguf.notes))
    names = tuple(whole.lora_names)
    so_far = resumed_load(config, dims) or ExpertLoad()
    return Prepared(
        config, model_dir, index, plan, data, batches, names, whole.formulas, notes, gguf, whole.root, so_far
    )


def open_checkpoint(
    config: Config, model_dir: str, dims: ModelDims
) -> tuple[CheckpointIndex, ExpertLayout, GgufExperts | None, ModelDims]:
    """The model's tensors, how its experts lie in them, their GGUF file, and dimensions as files have them.

    Raises:
        UserError: files and config.json do not belong together.
    """
    index = CheckpointIndex.open(model_dir)
    layout = ExpertLayout.detect(index)
    layout.check(
        moe_layers=dims.moe_layers,
        num_experts=dims.num_experts,
        hidden=dims.hidden_size,
        intermediate=dims.expert_intermediate,
    )
    gguf = None
    if config.model.experts_path is not None:
        gguf = GgufExperts.open(config.model.experts_path, index, layout)
    stored = _as_stored(dims, layout) if gguf is None else _as_stored(dims, gguf.layout, own_file=True)
    return index, layout, gguf, stored


def _as_stored(dims: ModelDims, layout: ExpertLayout, *, own_file: bool = False) -> ModelDims:
    """Dimensions with the experts' format as the files have it, where config.json says another.

    Experts with a file of their own (GGUF) count by its bytes: the plan knows no others for llamafile.
    """
    promised = {dims.expert_format.removesuffix("_block")}
    if dims.plain_expert_layers:
        promised.add(plain_storage(dims.dtype).format)
    found = set(layout.distinct_formats)
    size = layout.num_experts * sum(layout.expert_bytes.values())
    if own_file and found != {"f32"}:
        dims = replace(dims, experts_file_bytes=size)
    if found == promised:
        return dims
    note = f"routed experts are stored as {' and '.join(sorted(found))}, not {' and '.join(sorted(promised))}"
    notes = (*dims.notes, note)
    plain = {"f32": "float32", "bf16": "bfloat16"}
    if len(found) == 1 and found <= set(plain):
        storage = plain_storage(plain[found.pop()])
        return replace(dims, expert_storage=storage, plain_expert_layers=(), notes=notes)
    return replace(dims, experts_file_bytes=size, notes=notes)


def _check_formulas(layout: ExpertLayout, formulas: Mapping[int, ExpertFormula]) -> None:
    """The experts of the files are those of transformers' model: the same layers, with a gate or without."""
    layout.check(moe_layers=formulas, where="transformers' model of config.json")
    for layer, formula in formulas.items():
        if layout.gated == (formula.activation == "relu2"):
            raise UserError(
                "checkpoint and model disagree about the experts' gate",
                where=layout.prefixes[layer],
                observed=f"{', '.join(layout.leaves.values())} in the weights",
                required=f"{'a gate' if not layout.gated else 'no gate'} for {formula}",
                remedy="download the checkpoint again, or check that config.json belongs to it",
            )


def _ignored_note(ignored: list[str]) -> list[str]:
    if not ignored:
        return []
    return [f"checkpoint tensors that training ignores (as the family does): {some(ignored, 4)}"]


def _check_isa(config: Config) -> None:
    """Refuse a forced instruction set before an expert actor does; KT_RAY_ISA overrides "auto"."""
    isa = config.rule.experts.isa
    try:
        select_isa(isa)
    except ValueError:
        key, value = ("rule.experts.isa", isa) if isa != "auto" else (ISA_VARIABLE, os.environ[ISA_VARIABLE])
        raise UserError(
            "the forced instruction set is not available",
            where=f"{key} on this host",
            observed=value,
            required=", ".join(("auto", *available_isas())),
            remedy=f"unset {key}" if isa == "auto" else f"set {key}=auto",
        ) from None


def _meta_spec(config: Config, dims: ModelDims, model_dir: str) -> StageSpec:
    """The whole model as one stage: built on meta only, to check family and LoRA targets."""
    return StageSpec(
        model_dir=model_dir,
        layers=(0, dims.num_layers),
        num_layers=dims.num_layers,
        dtype=config.model.dtype,
        attn_implementation=config.model.attn_implementation,
        seed=config.seed,
        lora=config.lora,
        keep_quantized=config.model.keep_quantized,
    )


def _check_fits(plan: Plan) -> None:
    for budget in plan.budgets:
        if not budget.fits:
            raise UserError(
                "the plan does not fit",
                where=budget.device,
                observed=f"{budget.total / 1e9:.1f} GB needed",
                required=f"at most {budget.capacity / 1e9:.1f} GB",
                remedy="run the same command with mode=plan: it lists every item, and the rule or option "
                "that fits",
            )


def for_stage(stage: str, data: DataBundle) -> DataBundle:
    """The rows as the stage wants them: pre-training trains every token.

    Raises:
        UserError: rows of another kind.
    """
    wrong = check_units(stage, [*data.train, *data.eval])
    if wrong is not None:
        raise UserError(
            f"the data is not what trainer.stage={stage} learns from",
            where="data.path",
            observed=wrong,
            required={
                "dpo": "rows with a prompt, a chosen and a rejected answer",
                "orpo": "rows with a prompt, a chosen and a rejected answer",
                "kto": "rows with a prompt, an answer and whether it is wanted",
            }.get(stage, "rows with one answer each"),
            remedy="choose the file in data.path for this stage, or set trainer.stage",
        )
    if stage != "pt":
        return data
    train, held = (
        [replace(row, labels=row.input_ids.copy()) for row in rows] for rows in (data.train, data.eval)
    )
    return replace(data, train=train, eval=held)


def _batches(config: Config, plan: Plan, data: DataBundle) -> StepBatches:
    trainer = config.trainer
    if config.lora.target_modules == "none" and not config.lora.experts:
        raise UserError(
            "nothing would be trained",
            where="lora.target_modules=none with lora.experts=false",
            remedy="set lora.experts=true or lora.target_modules=auto",
        )
    batches = Batches(
        data.train,
        trainer.batch_size,
        trainer.micro_batch_size,
        plan.replicas,
        plan.groups,
        shuffle=config.data.shuffle,
        seed=config.seed,
        pad_id=data.pad_id,
        largest_wave=plan.wave,
        multiple=config.data.pad_to_multiple_of,
        group_by_length=config.data.group_by_length,
    )
    total = trainer.max_steps
    if total is None:
        total = max(1, math.ceil(trainer.epochs * batches.steps_per_epoch))
    held_out = eval_waves(
        data.eval,
        trainer.batch_size,
        trainer.micro_batch_size,
        plan.replicas,
        plan.groups,
        data.pad_id,
        largest=plan.wave,
        multiple=config.data.pad_to_multiple_of,
    )
    return StepBatches(
        total_steps=total,
        steps_per_epoch=batches.steps_per_epoch,
        train=batches.waves,
        evaluate=held_out,
        cut=batches.waves_of,
    )
