"""The driver's side of checkpoints and the adapter: what it writes, and what must match on resume."""

from __future__ import annotations

import contextlib
import logging
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kt_ray.adapter.adapter_dir import adapter_layout, create_adapter, discard_adapter, finish_adapter
from kt_ray.adapter.peft_config import TEMPLATE
from kt_ray.batch import WHOLE, LoraPart
from kt_ray.checkpoint.housekeeping import best_checkpoint, prune_checkpoints, set_aside_later
from kt_ray.checkpoint.manifest import Manifest, ShardInfo
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.checkpoint.training import begin_checkpoint, commit_checkpoint
from kt_ray.checkpoint_dirs import MANIFEST, step_name, step_of
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config, LoraConfig
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import adapter_mark
from kt_ray.model.lora_part import changes, shape_in
from kt_ray.model.pissa import doubled_shape
from kt_ray.optim.optimizers import learning_rate, number_of_steps
from kt_ray.placement.balance import owners_of, residents_of
from kt_ray.placement.expert_load import FILE as LOAD_FILE
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.memory import checkpoint_bytes
from kt_ray.runs.disk_room import check_next
from kt_ray.runs.prepare import Prepared, PreparedModel, adapter_info
from kt_ray.runs.rundir import RunDir, checkpoint_to_resume, find_checkpoints
from kt_ray.runs.start_adapter import DIGEST
from kt_ray.train import policy_steps
from kt_ray.train.cluster_protocol import ActorLost, Cluster
from kt_ray.train.preference_steps import STAGES

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResumePoint:
    """A verified checkpoint to continue."""

    directory: Path
    manifest: Manifest

    @property
    def recent(self) -> list[tuple[float, float]]:
        """Losses and gradient norms of the last steps before it; [] = the checkpoint does not say."""
        with contextlib.suppress(
            KeyError, TypeError, ValueError
        ):  # an older checkpoint, or one written by hand
            known = [
                [math.nan if x is None else float(x) for x in pair] for pair in self.manifest.state["recent"]
            ]
            return [(loss, norm) for loss, norm in known]
        return []


def intact_checkpoint(config: Config) -> tuple[Config, Manifest | None]:
    """The configuration with trainer.resume naming an intact checkpoint, and its manifest; None = a new run.

    "latest" passes damaged checkpoints over, with a warning. They are set aside when the run goes on.

    Raises:
        UserError: there is nothing to resume from, or no intact checkpoint.
    """
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is None:
        return config, None
    if config.trainer.resume != "latest":
        return config, Manifest.load(checkpoint)
    newest_first = find_checkpoints(checkpoint.parent.parent)[::-1]
    for path in newest_first:
        try:
            manifest = Manifest.read(path)
            manifest.verify(path)
        except UserError as error:
            if path == newest_first[-1]:
                raise
            logger.warning("%s at %s: found %s; the one before it is taken", error.what, path, error.observed)
            continue
        for later in sorted(path.parent.glob("step_*")):
            if (step_of(later.name) or 0) > manifest.step and later not in newest_first:
                logger.warning("%s has no %s: it is no checkpoint, and is passed over", later, MANIFEST)
        if config.run.name is None:
            logger.warning("resuming the newest run of %s: %s", config.model.name, path)
        return with_keys(config, {"trainer.resume": str(path)}), manifest
    raise AssertionError("the newest checkpoint is gone")


def resume_point(prepared: Prepared, manifest: Manifest | None) -> ResumePoint | None:
    """The checkpoint that this run continues, checked against model, data and settings; None = a fresh run.

    Writes nothing: a run that cannot be continued stays as it was.

    Args:
        manifest: as `intact_checkpoint` gave it.

    Raises:
        UserError: another model, other data or settings, or a checkpoint beyond this run's last step.
    """
    checkpoint = None if manifest is None else checkpoint_to_resume(prepared.config)
    if manifest is None or checkpoint is None:
        return None
    if "reward" in (before := manifest.fields):  # earlier versions wrote it as it was given
        manifest = replace(manifest, fields={**before, "reward": Path(str(before["reward"])).name})
    fields = _fields(prepared)
    if _JUDGED not in manifest.fields:  # earlier versions did not write it
        fields.pop(_JUDGED, None)
    manifest.require(model=prepared.fingerprint, fields=fields, where=str(checkpoint))
    if manifest.step > prepared.batches.total_steps:
        raise UserError(
            "the checkpoint lies beyond the last step of this run",
            where=str(checkpoint),
            observed=f"step {manifest.step}",
            required=f"at most step {prepared.batches.total_steps} (trainer.max_steps or trainer.epochs)",
            remedy=f"set trainer.max_steps to more than {manifest.step}, or resume an earlier one",
        )
    return ResumePoint(checkpoint, manifest)


def save_checkpoint(
    prepared: Prepared,
    rundir: RunDir,
    cluster: Cluster,
    step: int,
    load: ExpertLoad,
    recent: Sequence[tuple[float, float]] = (),
    more: Callable[[Path], Path | None] = lambda _: None,
) -> Path:
    """Every actor writes its shard, then the manifest, then old checkpoints go.

    Args:
        recent: losses and gradient norms of the last steps.
        more: writes one more file into the directory, or none.

    Raises:
        UserError: it cannot be written; the unfinished checkpoint is removed, earlier ones stay.
    """
    with writing("checkpoint", rundir.checkpoints):
        rundir.regain()
    batches, plan = prepared.batches, prepared.plan
    partial = begin_checkpoint(rundir.checkpoints, step)
    with writing("checkpoint", partial):
        try:
            check_next(checkpoint_bytes(plan.dims, prepared.config), rundir.checkpoints)
            shards = cluster.save_shards(str(partial))
            held = owners_of(plan.first_copy, plan.dims), residents_of(plan.first_copy)
            write_atomic(partial / LOAD_FILE, load.to_json(*held))
            shards.append(ShardInfo.of(partial / LOAD_FILE))
            if (file := more(partial)) is not None:
                shards.append(ShardInfo.of(file))
            epoch, step_in_epoch = divmod(step, batches.steps_per_epoch)
            manifest = Manifest(
                step=step,
                seed=prepared.config.seed,
                data={"next_step": step, "epoch": epoch, "step_in_epoch": step_in_epoch},
                model=prepared.fingerprint,
                fields=_fields(prepared),
                shards=tuple(shards),
                state={
                    "total_steps": batches.total_steps,
                    "lr": learning_rate(prepared.config.optim, step - 1, batches.total_steps)
                    if step
                    else None,
                    "next_lr": learning_rate(prepared.config.optim, step, batches.total_steps),
                    "recent": [[x if math.isfinite(x) else None for x in pair] for pair in recent],
                },
            )
            checkpoint = commit_checkpoint(partial, rundir.checkpoints / step_name(step), manifest)
            prune_checkpoints(rundir.checkpoints, prepared.config.trainer.keep_checkpoints)
            return checkpoint
        except ActorLost:
            raise  # written again after the recovery
        except (UserError, OSError):
            shutil.rmtree(partial, ignore_errors=True)  # a full disk needs the space
            raise


def best_so_far(prepared: Prepared, rundir: RunDir) -> tuple[int, float] | None:
    """Steps and held-out loss of a continued run's best checkpoint, if it marked one for the same rows."""
    path = best_checkpoint(rundir.checkpoints)
    if path is None:
        return None
    try:
        manifest = Manifest.load(path)
    except UserError as error:
        logger.warning("the best checkpoint is not kept: %s", error.line())
        return None
    rows = prepared.eval_digest
    # An older checkpoint does not say, or has no digest of what the reward reads.
    if not rows.startswith(str(manifest.state.get("eval_digest", rows))):
        logger.warning(
            "the held-out rows are others than those that %s was the best for: the best is looked for anew",
            path.name,
        )
        return None
    loss = manifest.state.get("eval_loss")
    return None if loss is None else (manifest.step, float(loss))


def new_schedule(resume: ResumePoint, prepared: Prepared) -> str:
    """A line for the user where the learning rate goes on otherwise than it was going to: a schedule is
    planned anew, or its options were changed.

    Returns:
        "" where it goes on as it was, or falls and an older checkpoint does not say how it would have.
    """
    optim, step, total = prepared.config.optim, resume.manifest.step, prepared.batches.total_steps
    state = resume.manifest.state
    before, old, planned = state.get("total_steps"), state.get("lr"), state.get("next_lr")
    if before is None or not 0 < step < total:
        return ""
    new = learning_rate(optim, step, total)
    old = old if isinstance(old, float) else learning_rate(optim, step - 1, before)
    if not isinstance(planned, float):  # an older checkpoint
        rising = step < number_of_steps(optim.warmup, before)
        planned = new if rising else min(old, new)
    steps = f": it was planned over {before} steps, and now over {total}" if before != total else ""
    if new < planned / 1.2:
        return (
            f"the learning rate goes from {old:.2g} at step {step} to {new:.2g} at step {step + 1}{steps}. "
            f"As the run was it would have gone on with {planned:.2g} (optim.*)"
        )
    if new <= 1.2 * max(old, planned):
        return ""
    return (
        f"the learning rate jumps from {old:.2g} at step {step} to {new:.2g} at step {step + 1}{steps}. "
        "Another choice: a small constant rate, optim.schedule=constant optim.warmup=0 "
        f"optim.lr={max(old, 0.1 * new):.2g}"
    )


def go_on_from(resume: ResumePoint, rundir: RunDir, total_steps: int) -> list[str]:
    """Prepare the directory of a continued run for its first step. Returns lines for the user.

    Without a step to take, what was made with the adapter stays: `publish_adapter` sees whether it changes.
    """
    if not rundir.continued:
        return []
    with writing("run directory", rundir.checkpoints):
        aside = set_aside_later(rundir.checkpoints, resume.manifest.step)
    lines = [
        f"set aside: {path} (from before the run went back to step {resume.manifest.step})" for path in aside
    ]
    return lines + (_remove_results(rundir) if resume.manifest.step < total_steps else [])


def publish_adapter(prepared: Prepared, rundir: RunDir, cluster: Cluster) -> list[str]:
    """Write the adapter and its chat template into its run, where no results of another adapter stay.

    Returns:
        Lines for the user.
    """
    with writing("adapter", rundir.adapter):
        rundir.regain()
    before = adapter_mark(rundir.adapter)
    write_adapter(prepared, rundir.adapter, cluster)
    with writing("adapter", rundir.adapter):
        write_atomic(rundir.adapter / TEMPLATE, str(prepared.data.tokenizer.chat_template))
    return _remove_results(rundir) if adapter_mark(rundir.adapter) != before else []


def _remove_results(rundir: RunDir) -> list[str]:
    results = [path.name for path in rundir.remove_results()]
    return [f"removed: {', '.join(results)} (of the adapter so far)"] if results else []


def write_adapter(
    prepared: PreparedModel,
    directory: Path,
    cluster: Cluster,
    notes: tuple[str, ...] = (),
    part: LoraPart = WHOLE,
    which: bool | str = True,
) -> Path:
    """The PEFT directory: laid out by the driver, filled by every actor, then published.

    Args:
        part: that was trained; the adapter has nothing else. Not of a PiSSA run.
        which: the name of a copy that was kept; True = the present LoRA.

    Raises:
        UserError: it cannot be written; what was begun is removed, an earlier adapter stays.
    """
    shapes = {
        name: shape_in(part, name, shape)
        for name, shape in cluster.parameter_shapes().items()
        if changes(part, name)
    }
    if prepared.config.lora.init.startswith("pissa"):
        shapes = {name: doubled_shape(name, shape) for name, shape in shapes.items()}
    about = (prepared.model_dir, shapes, prepared.plan.dims, notes, prepared.expert_modules)
    info = adapter_info(replace(prepared.config, lora=lora_of(part, prepared.config.lora)), *about)
    layout = adapter_layout(shapes, info.model_type)
    with writing("adapter", directory, layout.size):
        try:
            create_adapter(directory, layout)
            cluster.write_adapter(str(directory), layout, which)
            modules = (*prepared.module_names, *prepared.other_names)
            return finish_adapter(directory, layout, info, modules=modules)
        except ActorLost:
            raise  # written again after the recovery
        except (UserError, OSError):
            discard_adapter(directory)
            raise


def lora_of(part: LoraPart, lora: LoraConfig) -> LoraConfig:
    """The settings of an adapter that is a part of the LoRA: another rank, the same scale."""
    rank = lora.rank if part.rank is None else part.rank
    share = rank / lora.rank
    alpha = lora.alpha * (share**0.5 if lora.rslora else share)
    return replace(lora, rank=rank, alpha=alpha, experts=lora.experts and part.mlp)


_JUDGED = "data (digest of the columns that the reward reads)"
# Values of lora's keys that earlier versions did not have
_UNSET = {"init": "default", "dora": False, "rank_pattern": None, "alpha_pattern": None, "layers": None}


def _fields(prepared: Prepared) -> dict[str, Any]:
    """Settings that decide what a step number means. Placement is not among them."""
    config = prepared.config
    quantised = config.rule.experts.backend
    return {
        # Only where it is set: checkpoints of versions without the key stay valid.
        **({"data.group_by_length": True} if config.data.group_by_length else {}),
        "seed": config.seed,
        # These backends change the frozen weights; the others compute the checkpoint's own.
        "rule.experts.backend": quantised if quantised in BACKEND_STORAGE else "auto",
        **lora_fields(config.lora),
        **({} if prepared.start is None else {DIGEST: prepared.start.digest}),
        **_stage_fields(config),
        "optim.name": config.optim.name,
        "trainer.batch_size": config.trainer.batch_size,
        "data.shuffle": config.data.shuffle,
        "data (digest of the tokenised training rows)": prepared.rows_digest,
        **({_JUDGED: prepared.judged_digest} if prepared.judged_digest else {}),
    }


def lora_fields(lora: LoraConfig) -> dict[str, Any]:
    """Settings of the adapters; init, dora, layers and patterns only where they are set.

    Of lora.adapter counts what it is, not where it lies. Patterns are pairs: the first that matches counts.
    """
    return {
        f"lora.{key}": list(value.items()) if isinstance(value, dict) else value
        for key, value in vars(replace(lora, layers=lora.layers and sorted(set(lora.layers)))).items()
        if key != "adapter" and (key not in _UNSET or value != _UNSET[key])
    }


def _stage_fields(config: Config) -> dict[str, Any]:
    """The stage, unless it is supervised fine-tuning: checkpoints without these fields are of that."""
    stage = config.trainer.stage
    if stage == "sft":
        return {}
    if stage == policy_steps.STAGE:
        generate = config.generate
        answers = {"generate.max_new_tokens": generate.max_new_tokens, "generate.stop": list(generate.stop)}
        answers["reward"] = Path(config.reward or "").name  # the same file may lie elsewhere
        return {"trainer.stage": stage, "grpo": asdict(config.grpo), **answers}
    if stage not in STAGES:
        return {"trainer.stage": stage}
    preference = asdict(config.preference)
    if preference["loss"] != "simpo":  # checkpoints of versions without the key stay valid
        del preference["gamma"]
    return {"trainer.stage": stage, "preference": preference}
