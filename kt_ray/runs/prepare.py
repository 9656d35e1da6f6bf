"""All checks that need no actor: files, hardware, plan, data.

`prepare_model` is what training and generation share; `prepare` adds the data and steps of training,
`kt_ray.runs.generation` the tokenizer and adapter of generation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.adapter.peft_config import TEMPLATE, AdapterInfo, load_limits, module_of
from kt_ray.batch import Wave
from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, GgufExperts, check_content, check_non_experts
from kt_ray.checkpoint.index import some
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.names import ALIASES, layer_of, one_expert
from kt_ray.checkpoint.safetensors_file import damaged
from kt_ray.config.checks import check_warmup
from kt_ray.config.faults import value_of
from kt_ray.config.fields import show
from kt_ray.config.interval import ends_until, evaluation_interval, steps_of_epochs
from kt_ray.config.lora_patterns import check_patterns, expert_lora, module_lora
from kt_ray.config.schema import Config
from kt_ray.data import Batches, DataBundle, Pair, Row, eval_waves, load_data
from kt_ray.data.batches import flat
from kt_ray.data.held_out_split import nothing_held_out
from kt_ray.data.prompts import RowCheck
from kt_ray.demo import resolve_model_dir
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.model_dims import ModelDims
from kt_ray.dims.packable import check_packing_family
from kt_ray.dims.weight_formats import plain_storage
from kt_ray.errors import UserError
from kt_ray.gpu import cuda_fault
from kt_ray.hardware.describe import this_host
from kt_ray.model.build import StageModel, build_on_meta
from kt_ray.model.family import read_family
from kt_ray.model.lora import resolve_targets
from kt_ray.model.routing import router_recorder
from kt_ray.model.stage_spec import StageSpec, StartAdapter
from kt_ray.native import ISA_VARIABLE, ExpertFormula, available_isas, select_isa
from kt_ray.parse import read_text
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.lora_sizes import backward_of, expert_lora_layers
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.remedies import answer_remedy
from kt_ray.placement.render import counted
from kt_ray.rewards.reward import VERIFIERS
from kt_ray.runs.known_load import known_load, resumed_choice, resumed_load
from kt_ray.runs.memory_now import in_use
from kt_ray.runs.model_hub import complete, published
from kt_ray.runs.start_adapter import fitted, open_start, require_fit, start_of
from kt_ray.timing.choose import choose_plan
from kt_ray.train import policy_steps
from kt_ray.train.preference_steps import check_units
from kt_ray.train.trainer import StepBatches


@dataclass(frozen=True)
class PreparedModel:
    """A checked model and its plan; nothing in it needs an actor."""

    config: Config
    model_dir: str  # resolved Hugging Face directory
    fingerprint: str  # of its weights, model.experts_path included. Checkpoints and answers carry it
    own_fingerprint: str  # of the weights in `model_dir`
    plan: Plan  # who does what
    formulas: Mapping[int, ExpertFormula]  # MoE layer -> what its experts compute
    root: str  # module name of the language model
    module_names: tuple[str, ...]  # the linear modules of its layers outside the routed experts
    other_names: tuple[str, ...]  # its linear modules outside its layers: head, other towers
    expert_modules: Mapping[int, str]  # MoE layer -> module of its routed experts
    notes: tuple[
        str, ...
    ]  # what the checkpoint holds that training ignores, one line each; what LoRA starts from
    start: StartAdapter | None  # what LoRA starts from; None = `lora.init`


@dataclass(frozen=True)
class Prepared(PreparedModel):
    """A checked training run."""

    data: DataBundle  # tokenised rows
    batches: StepBatches  # the rows of every step
    # tokens per expert so far, of the checkpoint resumed from
    load: ExpertLoad = field(default_factory=ExpertLoad)

    @cached_property
    def rows_digest(self) -> str:
        """Of the tokenised training rows: what a step number means in them. 19 s per 10^9 tokens."""
        return _digest(self.data.train)

    @cached_property
    def judged_digest(self) -> str:
        """Of what the reward reads of the training rows; "" = the stage has none."""
        return self._judged(self.data.train)

    @cached_property
    def eval_digest(self) -> str:
        """Of the held-out rows: losses over others, and rewards by other answers, cannot be compared."""
        return _digest(self.data.eval) + self._judged(self.data.eval)

    def _judged(self, rows: Sequence[Row]) -> str:
        """Digest of the columns that the reward reads: a function of the user's may read any."""
        if self.config.trainer.stage != policy_steps.STAGE:
            return ""
        digest = hashlib.sha256()
        for row in rows:
            columns = self.data.prompts[row.sample_id].columns
            read = {"answer": columns.get("answer")} if self.config.reward in VERIFIERS else columns
            digest.update(json.dumps(read, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def _digest(rows: Sequence[Row | Pair]) -> str:
    digest = hashlib.sha256()
    for row in flat(rows)[0]:
        digest.update(np.int64(row.sample_id).tobytes())
        if row.sign:
            digest.update(np.int64(row.sign).tobytes())
        for document in row.documents:
            digest.update(np.array(document, dtype=np.int64).tobytes())
        digest.update(np.ascontiguousarray(row.input_ids).tobytes())
        digest.update(np.ascontiguousarray(row.labels).tobytes())
    return digest.hexdigest()[:16]


def prepare(config: Config, manifest: Manifest | None = None, check: RowCheck | None = None) -> Prepared:
    """Check model, hardware, plan and data of a training run, cheapest first.

    Args:
        manifest: of the checkpoint that the run continues. check: of the rows of prompts.

    Raises:
        UserError: the first fault.
    """
    model = prepare_model(config, training=True, manifest=manifest)
    config = model.config
    resolve_targets(
        config.lora.target_modules, model.module_names, config.lora.layers, experts=config.lora.experts
    )
    data = load_data(config, model.model_dir, config.seed, check=check)
    check_stage(config.trainer.stage, data)
    _check_held_out(config, data)
    data.report.notes += _beyond_context(config, model.plan.dims.context, data)
    batches = step_batches(config, model.plan, data)
    if manifest is None:  # else the run began so
        data.report.notes += _other_template(config, data)
        check_warmup(config, batches.total_steps, len(data.train))
    load = resumed_load(config, model.plan.dims) or ExpertLoad()
    return Prepared(**vars(model), data=data, batches=batches, load=load)


def _beyond_context(config: Config, context: int, data: DataBundle) -> list[str]:
    """A note where rows have positions that the model never met. Answers of GRPO are held to its context.

    Args:
        context: `ModelDims.context`.
    """
    longest = data.report.train.longest_kept
    if not 0 < context < longest or config.trainer.stage == policy_steps.STAGE:
        return []
    return [
        f"rows have up to {longest:,} tokens, and the model was made for {context:,} (by its "
        f"config.json): what lies beyond is new to it; data.max_length={context} leaves it out"
    ]


def _other_template(config: Config, data: DataBundle) -> list[str]:
    """A note where the adapter that the run starts from was trained with another chat template."""
    if config.lora.adapter is None or config.trainer.stage == "pt":
        return []
    file = Path(config.lora.adapter) / TEMPLATE
    if not file.is_file() or read_text(file, "the adapter's chat template", f"delete {file}") == (
        data.tokenizer.chat_template
    ):
        return []
    return [
        f"{config.lora.adapter} was trained with another chat template than this run's; to use it: "
        f"data.template=null model.chat_template={file}"
    ]


def prepare_model(
    config: Config,
    *,
    training: bool,
    manifest: Manifest | None = None,
    adapters: Sequence[AdapterReader] = (),
) -> PreparedModel:
    """Check model, hardware and plan, cheapest first.

    Args:
        training: place experts by their known load, and refuse what only generation can do.
        manifest: of the checkpoint that a run continues.
        adapters: that are to answer.

    Raises:
        UserError: the first fault.
    """
    model_dir = model_directory(config)
    reader: AdapterReader | None = None
    if training:
        config, reader = open_start(config, model_dir, manifest)
    dims = dims_from_dir(model_dir)
    hardware = this_host()
    load, before = (known_load(config, dims), resumed_choice(config)) if training else (None, None)

    # A plan refuses what cannot be trained, by name, before any file is opened.
    plan = make_plan(dims, config, hardware, load)
    _check_isa(config)
    _check_cuda(plan)
    complete(
        model_dir,
        lambda: _check_fits(
            choose_plan(dims, config, hardware, load, before=before) if training else plan, config, training
        ),
    )
    if training and config.data.packing:
        check_packing_family(model_dir)
    index, layout, gguf, stored = open_checkpoint(config, model_dir, dims)
    if training:
        plan = choose_plan(stored, config, hardware, load, before=before)
    elif stored != dims:
        plan = make_plan(stored, config, hardware)
    _check_fits(plan, config, training)
    whole_spec = StageSpec(
        model_dir=model_dir,
        layers=(0, dims.num_layers),
        num_layers=dims.num_layers,
        dtype=plan.dtype,
        attn_implementation=config.model.attn_implementation,
        seed=config.seed,
        lora=config.lora,
        keep_quantized=config.model.keep_quantized,
    )
    whole = build_on_meta(whole_spec)
    _check_formulas(layout, whole.formulas)
    if training and config.trainer.aux_loss:
        router_recorder(whole.causal)
    notes = [*index.notes, *(() if gguf is None else gguf.notes)]
    if ignored := check_non_experts(index, whole.causal, layout=layout).ignored:
        notes.append(f"checkpoint tensors that training ignores (as the family does): {some(ignored, 4)}")
    for answering in adapters:
        require_fit(answering, whole, layout, dims)
    if reader is not None:
        config, line = fitted(config, reader, whole, layout, dims)
        notes.append(line)
    if training:
        targets = resolve_targets(
            config.lora.target_modules, whole.lora_names, config.lora.layers, experts=config.lora.experts
        )
        check_patterns(config.lora, targets, dims.moe_layers, dims.num_experts)
        outside = {layer for name in targets if (layer := layer_of(name)) is not None}
        plan = replace(plan, backward=backward_of(dims, config.lora, outside))
        notes += [*_adapter_limits(config, model_dir, layout, whole, dims), *in_use(plan)]
    check_content(index)
    if gguf is not None:
        gguf.check_content()
    return PreparedModel(
        config=config,
        model_dir=model_dir,
        fingerprint=index.fingerprint if gguf is None else gguf.fingerprint_with(index),
        own_fingerprint=index.fingerprint,
        plan=plan,
        formulas=whole.formulas,
        root=whole.root,
        module_names=tuple(whole.lora_names),
        other_names=tuple(whole.other_names),
        expert_modules=whole.expert_modules,
        notes=tuple(notes),
        start=start_of(config, reader, manifest),
    )


def _adapter_limits(
    config: Config, model_dir: str, layout: ExpertLayout, whole: StageModel, dims: ModelDims
) -> list[str]:
    """Where the adapter to come will not load."""
    names = list(
        resolve_targets(
            config.lora.target_modules, whole.lora_names, config.lora.layers, experts=config.lora.experts
        )
    )
    for layer in expert_lora_layers(dims, config.lora)[:1]:
        names += layout.names(layer, 0, whole.root).values()
    return [f"adapter: {line}" for line in load_limits(names, adapter_info(config, model_dir, names, dims))]


def adapter_info(
    config: Config,
    model_dir: str,
    names: Iterable[str],
    dims: ModelDims,
    notes: tuple[str, ...] = (),
    experts: Mapping[int, str] | None = None,
) -> AdapterInfo:
    """What the adapter's files will say of this run.

    Args:
        names: of its tensors or modules. experts: `PreparedModel.expert_modules`.
    """
    lora, family = config.lora, read_family(model_dir)
    if lora.adapter is not None:
        notes = (f"started from the adapter {lora.adapter}", *notes)
    wider = 2 if lora.init.startswith("pissa") else 1  # relative to the weights as they are in the checkpoint
    modules = {module_of(name) for name in names if one_expert(module_of(name)) is None}
    settings = {m: (own.rank, own.alpha) for m in sorted(modules) for own in [module_lora(lora, m)]}
    of_experts = expert_lora(lora, dims.moe_layers, dims.num_experts)
    rank, alpha = of_experts.rank, of_experts.alpha
    layers = expert_lora_layers(dims, lora)
    whole = len(layers) == len(dims.moe_layers)
    if settings and not layers:
        rank, alpha = Counter(settings.values()).most_common(1)[0][0]
    base_model, revision = published(model_dir)
    return AdapterInfo(
        base_model=base_model,
        revision=revision,
        model_type=family.text_type,
        rank=wider * rank,
        # With rsLoRA the scale falls with the root of the rank.
        alpha=(wider**0.5 if lora.rslora else wider) * alpha,
        others={
            module: (wider * r, wider * a * (r**0.5 if lora.rslora else 1))
            for module, (r, a) in settings.items()
            if (r, a) != (rank, alpha)
        },
        rslora=lora.rslora,
        dora=lora.dora,
        dropout=lora.dropout,
        notes=notes,
        whole_type="" if family.whole is None else family.model_type,
        released_type=family.model_type if family.whole is None and family.model_type in ALIASES else "",
        auto=family.auto,
        zero_experts=dims.zero_experts,
        expert_modules=() if whole or experts is None else tuple(experts[layer] for layer in layers),
    )


def model_directory(config: Config) -> str:
    """The absolute path of the model's files; built-in models are built there on first use."""
    return os.path.abspath(resolve_model_dir(config.model))


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
    """Dimensions with the experts' format in the files, if config.json says another.

    Experts in a file of their own (GGUF) count by its bytes: the plan knows no other size for llamafile.
    """
    promised = {dims.expert_format.removesuffix("_block")}
    if dims.plain_expert_layers:
        promised.add(plain_storage(dims.dtype).format)
    formats = set(layout.distinct_formats)
    size = layout.nbytes
    if own_file and formats != {"f32"}:
        dims = replace(dims, experts_file_bytes=size)
    if formats == promised:
        return dims
    stored, said = (" and ".join(sorted(names)) for names in (formats, promised))
    notes = (*dims.notes, f"routed experts are stored as {stored}, not {said}")
    plain = {"f32": "float32", "bf16": "bfloat16"}
    if len(formats) == 1 and formats <= set(plain):
        storage = plain_storage(plain[formats.pop()])
        return replace(dims, expert_storage=storage, plain_expert_layers=(), notes=notes)
    return replace(dims, experts_file_bytes=size, notes=notes)


def _check_formulas(layout: ExpertLayout, formulas: Mapping[int, ExpertFormula]) -> None:
    """Check that files and transformers' model agree about the expert layers and whether they have gates."""
    layout.check(moe_layers=formulas, where="transformers' model of config.json")
    for layer, formula in formulas.items():
        if layout.gated == (formula.activation == "relu2"):
            raise damaged(
                "checkpoint and model disagree about the experts' gate",
                layout.prefixes[layer],
                f"{', '.join(layout.leaves.values())} in the weights",
                f"{'a gate' if not layout.gated else 'no gate'} for {formula}",
            )


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


def _check_cuda(plan: Plan) -> None:
    """Refuse GPUs that nvidia-smi lists and torch cannot use before an attention worker meets them."""
    if all(worker.device == "cpu" for worker in plan.workers) or not (fault := cuda_fault()):
        return
    raise UserError(
        "torch cannot use the GPUs of this host",
        where=f"rule.device={plan.workers[0].device.partition(':')[0]}",
        observed=fault,
        required="a CUDA build of torch that the driver supports",
        remedy="install one (pytorch.org says which; nvidia-smi shows the driver), or set rule.device=cpu",
    )


def _check_fits(plan: Plan, config: Config, training: bool) -> None:
    """Refuse before Ray starts what would not fit."""
    budget = next((budget for budget in plan.budgets if not budget.fits), None)
    if budget is None:
        return
    what, needed = "the plan does not fit", f"{budget.total / 1e9:.1f} GB needed"
    mode = "mode=plan plan.mode=train_server" if config.mode == "train_server" else "mode=plan"
    remedy = f"run the same command with {mode}: it lists every item, and the rule or option that fits"
    if not training:
        what = "the model and its key-value caches do not fit"
        largest = sorted(budget.items.items(), key=lambda item: -item[1])[:4]
        needed += ": " + ", ".join(f"{item} {size / 1e9:.1f}" for item, size in largest)
        found = answer_remedy(plan.dims, config, plan.hardware)
        remedy = "take a rule, or a machine, with more memory: nothing tried makes it fit"
        if found is not None:
            remedy = f"set {found.overrides} ({found.effect})"
    raise UserError(
        what,
        where=budget.device,
        observed=needed,
        required=f"at most {budget.capacity / 1e9:.1f} GB",
        remedy=remedy,
    )


def check_stage(stage: str, data: DataBundle) -> None:
    """Check that the rows are what the stage learns from.

    Raises:
        UserError: they are of another kind.
    """
    if stage == policy_steps.STAGE:  # whose rows were read as prompts
        return
    fault = check_units(stage, [*data.train, *data.eval])
    if fault is not None:
        raise UserError(
            f"the data is not what trainer.stage={stage} learns from",
            where="data.path",
            observed=fault,
            required="rows with "
            + {
                **dict.fromkeys(("dpo", "orpo"), "a prompt, a chosen and a rejected answer"),
                "kto": "a prompt, an answer and whether it is wanted",
            }.get(stage, "one answer each"),
            remedy="choose the file in data.path for this stage, or set trainer.stage, or data.format if the "
            "format was not meant",
        )


def _check_held_out(config: Config, data: DataBundle) -> None:
    """Refuse what needs held-out rows where there are none; figures alone are done without where
    data.eval_fraction=auto leaves a small set whole (`evaluation_line` says so)."""
    figures = ("trainer.eval_every", "eval.after_training") if config.data.eval_fraction != "auto" else ()
    for key in (*figures, "trainer.early_stopping", "trainer.save_best"):
        value = value_of(config, key)
        if value and value != "auto" and not data.eval:
            off = "false" if value is True else "0"
            raise nothing_held_out(config.data, len(data.train), f"{key}={show(value)}", f"{key}={off}")


def evaluation_line(prepared: Prepared) -> str:
    """When the held-out loss is measured, or why it is not."""
    config, batches = prepared.config, prepared.batches
    every = evaluation_interval(config, batches.total_steps, batches.held_out)
    what = "reward" if config.trainer.stage == policy_steps.STAGE else "loss"
    rows = f"held-out {what} of {counted(batches.held_out, 'row')}"
    if every:
        unit = "" if isinstance(every, str) else " steps"
        more = ends_until(every, batches.total_steps - 1, batches.steps_per_epoch)
        return f"{rows} at start and end" + (f", and every {every}{unit}" if more else "")
    if config.trainer.eval_every == 0:
        return f"no held-out {what} (trainer.eval_every=0)"
    if batches.held_out:
        return f"no {rows}: the run is too short for it (trainer.eval_every=<steps> measures it)"
    nothing = f"no held-out {what}" + (" and no questions at the end" if config.eval.after_training else "")
    fraction = show(config.data.eval_fraction)
    return f"{nothing}: no rows are held out (data.eval_fraction={fraction}; 0.1 holds a tenth out)"


def without_padding(prepared: Prepared, moves: str) -> tuple[Prepared, str]:
    """The same run with rows of one length only in each micro-batch, and a line for the user.

    Pairs stay in one micro-batch, so their rows are padded to the longer one.

    Args:
        moves: the layer that padding moves, see `Stage.padding_moves`.
    """
    if prepared.config.rows_per_unit == 2:
        return prepared, f"padding moves this model ({moves}): so do losses of pairs of unequal length"
    batches = step_batches(prepared.config, prepared.plan, prepared.data, unpadded=True)
    line = f"padding moves this model ({moves}): micro-batches hold rows of one length only"
    return replace(prepared, batches=batches), line


def step_batches(config: Config, plan: Plan, data: DataBundle, *, unpadded: bool = False) -> StepBatches:
    """The rows of every step of a run with this plan.

    Args:
        data: of the stage (`check_stage`).
        unpadded: rows of one length only in each micro-batch.
    """
    own = config.trainer.stage == policy_steps.STAGE  # answers, of which data.train has the prompts
    rows = config.trainer.batch_size // (config.grpo.group_size if own else 1)
    sizes = (plan.micro_batch_rows, plan.replicas, plan.groups)
    batches = Batches(
        data.train,
        rows,
        *sizes,
        shuffle=config.data.shuffle,
        seed=config.seed,
        pad_id=data.pad_id,
        largest_wave=plan.wave,
        multiple=config.data.pad_to_multiple_of,
        group_by_length=config.data.group_by_length,
        unpadded=unpadded,
        budget=plan.micro_batch_tokens,
    )
    if own:
        return _policy_batches(config, batches, data)
    held_out = eval_waves(
        data.eval,
        rows,
        *sizes,
        data.pad_id,
        largest=plan.wave,
        multiple=config.data.pad_to_multiple_of,
        unpadded=unpadded,
        budget=plan.micro_batch_tokens,
    )
    return StepBatches(
        total_steps=_total_steps(config, batches.steps_per_epoch),
        steps_per_epoch=batches.steps_per_epoch,
        train=batches.waves,
        evaluate=held_out,
        held_out=len(data.eval),
        cut=batches.waves_of,
    )


def _total_steps(config: Config, steps_per_epoch: int) -> int:
    if config.trainer.max_steps is not None:
        return config.trainer.max_steps
    return steps_of_epochs(config.trainer.epochs, steps_per_epoch)


def _policy_batches(config: Config, batches: Batches, data: DataBundle) -> StepBatches:
    """Steps over prompts, whose answers are not known yet."""
    size, longest = config.grpo.group_size, config.generate.max_new_tokens

    def longest_answers(number: int) -> Sequence[Wave]:
        ids = np.full(longest, data.pad_id, dtype=np.int64)
        rows = [
            replace(
                row,
                input_ids=np.concatenate([row.input_ids, ids]),
                labels=np.concatenate([row.labels, ids]),
                sample_id=row.sample_id * size + answer,
            )
            for row in batches.step(number)
            for answer in range(size)
        ]
        return batches.waves_of(rows)

    steps_per_epoch = batches.steps_per_epoch * config.grpo.iterations
    return StepBatches(
        total_steps=_total_steps(config, steps_per_epoch),
        steps_per_epoch=steps_per_epoch,
        train=longest_answers,
        held_out=len(data.eval),
        cut=batches.waves_of,
        prompts=batches.step,
        held_out_prompts=data.eval,
    )
