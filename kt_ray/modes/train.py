"""mode=train: from a configuration to an adapter."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kt_ray import supervisor
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.checkpoint.housekeeping import forget_best, mark_best
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.checkpoint_dirs import step_name
from kt_ray.config.resume_line import resume_line
from kt_ray.config.schema import Config
from kt_ray.config.secret_values import without_secrets
from kt_ray.errors import Stopped, UserError
from kt_ray.hardware.machine import socket_name
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Rates
from kt_ray.placement.render import counted, experts_per_layer, plan_to_dict
from kt_ray.rewards.reward import Reward, load_reward
from kt_ray.runs.before_after import before_and_after, final_questions
from kt_ray.runs.disk_room import disk_need, shortage
from kt_ray.runs.environment import environment
from kt_ray.runs.generation import PreparedGeneration
from kt_ray.runs.plan_time import predicted_run, run_line, sampling, sampling_line, step_seconds
from kt_ray.runs.policy_rollouts import LOG, PolicyRollouts, generation_for
from kt_ray.runs.prepare import Prepared, evaluation_line, prepare, without_padding
from kt_ray.runs.questions import Question
from kt_ray.runs.rundir import (
    RunDir,
    dated_as_before,
    find_checkpoints,
    place_to_write,
    plain,
)
from kt_ray.runs.saving import (
    ResumePoint,
    best_so_far,
    go_on_from,
    intact_checkpoint,
    new_schedule,
    publish_adapter,
    resume_point,
    save_checkpoint,
)
from kt_ray.runs.start_cluster import started
from kt_ray.timeline import Activity
from kt_ray.timing.prediction import Prediction
from kt_ray.timing.sampling_seconds import SamplingTime
from kt_ray.tracking import MultiTracker, StepMetrics, make_tracker, read_jsonl, series
from kt_ray.tracking.chrome_trace import write_timeline
from kt_ray.tracking.console import console, say, setup_logging
from kt_ray.tracking.metrics import loss_unit
from kt_ray.tracking.plot import plot_loss
from kt_ray.tracking.progress import Summary, TrainProgress, show_summary
from kt_ray.train import policy_steps
from kt_ray.train.cluster_protocol import ActorLost
from kt_ray.train.stop_signals import stop_signals
from kt_ray.train.trainer import Events, Trainer

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Train. Returns the exit code; a user's mistake raises UserError before Ray is touched."""
    began = time.monotonic()
    if config.trainer.stage != policy_steps.STAGE:
        return _checked(config, None, began)
    assert config.reward is not None
    with contextlib.closing(load_reward(config.reward)) as reward:
        return _checked(config, reward, began)


def _checked(config: Config, reward: Reward | None, began: float) -> int:
    """All that can be refused before anything runs, and then the run. reward: of trainer.stage=grpo."""
    config, manifest = intact_checkpoint(config)
    undated, config = config, dated_as_before(config)
    check_row = None if reward is None else reward.check_row
    prepared = prepare(supervisor.as_placed(config), manifest, check_row)
    if not prepared.data.dated:
        config = undated
    config = replace(config, lora=prepared.config.lora)  # which may be an adapter's
    final = final_questions(prepared)
    answering = None if reward is None else (_policy(prepared), reward)
    resume = resume_point(prepared, manifest)
    rates = rates_for(config, prepared.plan.hardware)  # may refuse what plan.rates names
    prediction = predicted_run(config, prepared.plan, rates, prepared.batches.train(0))
    sampled = None
    if prepared.batches.prompts is not None:
        sampled = sampling(config, prepared.plan, rates, prepared.batches.prompts(0))
    _check_room(prepared, resume, step_seconds(config, prediction, sampled))
    with contextlib.closing(RunDir.create(config, resume.directory if resume else None)) as rundir:
        file = rundir.path / "train.log"
        with writing("the run's log", file, remedy="move it away, or make it a file that you may write to"):
            log = setup_logging(file)
        with log:
            return _run(prepared, rundir, resume, prediction, sampled, rates, final, answering, began)


def _policy(prepared: Prepared) -> PreparedGeneration:
    """How the policy of trainer.stage=grpo answers.

    Raises:
        UserError: the family cannot generate.
    """
    generation = generation_for(prepared)
    longest = max(prepared.data.prompts.values(), key=lambda prompt: len(prompt.row.input_ids))
    ids = tuple(longest.row.input_ids.tolist())
    generation.request(ids, longest.where, adapter=True, seed=0)  # refused now, not amid the run
    return generation


def _check_room(prepared: Prepared, resume: ResumePoint | None, seconds: float) -> None:
    """The disk's, for all that the run will write; `seconds` of a step."""
    config, taken = prepared.config, resume.manifest.step if resume else 0
    batches = prepared.batches
    steps = batches.total_steps - taken
    need = disk_need(prepared.plan.dims, config, steps, seconds, batches.steps_per_epoch)
    fault = shortage(need, *place_to_write(config))
    if fault is not None:
        raise fault


def _run(
    prepared: Prepared,
    rundir: RunDir,
    resume: ResumePoint | None,
    prediction: Prediction,
    sampled: SamplingTime | None,
    rates: Rates,
    final: tuple[PreparedGeneration, list[Question]] | None,
    answering: tuple[PreparedGeneration, Reward] | None,
    began: float,
) -> int:
    """Train in a run directory that is this process's own."""
    config = prepared.config
    if rundir.lock is not None and rundir.lock.note:
        logger.warning("%s", rundir.lock.note)
    _announce(prepared, rundir)
    say(run_line(prediction, rates))
    if sampled is not None:
        say(sampling_line(config, sampled, prediction.simulated.seconds))
    rundir.write_plan({**plan_to_dict(prepared.plan), "prediction": prediction.to_dict()})
    rundir.write_env(environment())
    with started(prepared, rundir.path.name, run_dir=str(rundir.path)) as cluster:

        def begin() -> list[dict[str, Any]]:
            if resume is not None:
                cluster.restore(str(resume.directory), resume.manifest.step)
            return _write_env(rundir, cluster)

        facts = cluster.at_start(begin)
        if moves := next(filter(None, (actor.get("padding_moves") for actor in facts)), ""):
            prepared, line = without_padding(prepared, moves)
            say(line)
            logger.info("%s", line)
        tracker = make_tracker(config.tracking, extra=_ray_exporter(cluster))
        status = "failed"
        try:
            first_step = 0
            if resume is not None:
                first_step = resume.manifest.step
                for line in go_on_from(resume, rundir, prepared.batches.total_steps):
                    say(line)
                say(f"resumed from {resume.directory} after step {first_step}")
                if line := new_schedule(resume, prepared):
                    say(line)
            tracker.start(
                rundir.path, without_secrets(plain(config)), first_step=first_step + 1 if first_step else 0
            )
            rollouts = None
            if answering is not None:
                rollouts = PolicyRollouts(
                    answering[0], cluster, prepared.data.prompts, answering[1], rundir.path / LOG, first_step
                )
            summary, came = _train(prepared, rundir, cluster, tracker, resume, began, rollouts)
            if final is not None and came:
                _say_not_asked(came, final, rundir)
            elif final is not None:
                summary = replace(summary, sample=_answer(*final, rundir, cluster, tracker))
            status = "finished"
            if config.tracking.upload_adapter:
                tracker.artifact(rundir.adapter)
            if config.tracking.plot:
                unit = loss_unit(config.trainer.stage)
                plot_loss(rundir.path / "metrics.jsonl", rundir.path / "loss.png", unit)
            show_summary(summary)
            return 0
        except Stopped as stopped:
            status = "interrupted"
            way_on = "nothing was saved: start the same command again"
            if resume is not None:  # of another run; here may be an evaluation of its state
                way_on = "no step was taken: start the same command again"
                way_on += ", with run.overwrite=true if run.name is set"
            if find_checkpoints(rundir.path):
                way_on = f"To go on: {resume_line(rundir.path)}"
            raise Stopped(f"{stopped}. {way_on}") from stopped
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            tracker.finish(status)


def _evaluated(resume: ResumePoint) -> bool:
    """Whether the held-out loss of the resumed state is in its run's figures: it is saved before that."""
    records = read_jsonl(resume.directory.parent.parent / "metrics.jsonl")
    return any(
        r.get("step") == resume.manifest.step and not r.keys().isdisjoint(("eval_loss", "eval_reward"))
        for r in records
    )


def _evaluations(rundir: RunDir, figure: str, until: int) -> list[tuple[int, float]]:
    """Steps and figures of the evaluations of this command before its present driver (trainer.restarts); NaN
    where one was not finite."""
    if supervisor.began is None or not rundir.continued:
        return []
    first = supervisor.first_step or -1  # of a new run the untrained model counts
    records, key = read_jsonl(rundir.path / "metrics.jsonl"), f"eval_{figure}"
    evaluated = {record["step"]: math.nan for record in records if key in record and record[key] is None}
    evaluated |= dict(series(records, key))
    return [(step, value) for step, value in sorted(evaluated.items()) if first < step <= until]


def _of_drivers_before(rundir: RunDir, key: str, until: int) -> list[float]:
    """A figure of the steps that this command took before its present driver (trainer.restarts)."""
    if supervisor.began is None:
        return []
    figures = series(read_jsonl(rundir.path / "metrics.jsonl"), key)
    return [value for step, value in figures if supervisor.first_step < step <= until]


def _announce(prepared: Prepared, rundir: RunDir) -> None:
    from kt_ray.data import preview_rows, print_preview

    config, plan = prepared.config, prepared.plan
    say(f"run directory: {rundir.path}")
    for worker in plan.workers:
        start, stop = worker.layers
        say(
            f"attention worker {worker.rank}: layers {start}-{stop - 1} on {worker.place}, "
            f"{worker.threads} threads"
        )
    for actor in plan.experts:
        home = socket_name(plan.hardware, actor.host, actor.node)
        say(
            f"expert actor {actor.rank}: {experts_per_layer(plan, actor)} of {plan.dims.num_experts} "
            f"experts per layer, {home}, {actor.threads} threads"
        )
    for line in (*plan.notes, *prepared.notes, *prepared.data.report.lines()):
        say(line)
        logger.info("%s", line)
    steps = prepared.batches.total_steps
    rows = f"{config.trainer.batch_size} rows"
    if config.trainer.stage == policy_steps.STAGE:
        size, of_round = config.grpo.group_size, config.grpo.steps_of_round
        prompts = min(config.trainer.batch_size // size, len(prepared.data.train))
        rows = f"{counted(prompts, 'prompt')}, {size} answers each"
        if config.eval.after_training:
            say("eval.after_training asks nothing here: evaluations answer the held-out prompts")
        if rest := steps % of_round:
            say(f"the last round of answers serves {rest} of {of_round} steps: the run ends with them")
    say(f"{steps} steps of {rows}, {len(prepared.data.train)} rows in all")
    say(evaluation_line(prepared))
    if config.trainer.preview:
        print_preview(
            preview_rows(prepared.data.train, prepared.data.tokenizer, config.trainer.preview), console()
        )


def _write_env(rundir: RunDir, cluster: ActorCluster) -> list[dict[str, Any]]:
    """env.json with what the actors say of themselves, which is returned."""
    facts = cluster.info()
    dashboard = getattr(cluster, "dashboard_url", None)
    rundir.write_env({**environment(), "actors": facts, "dashboard": dashboard})
    return facts


def _ray_exporter(cluster: ActorCluster) -> list[Any]:
    if isinstance(cluster, LocalCluster):
        return []
    from kt_ray.actors.ray.ray_metrics import RayMetrics

    return [RayMetrics()]


def _train(
    prepared: Prepared,
    rundir: RunDir,
    cluster: ActorCluster,
    tracker: MultiTracker,
    resume: ResumePoint | None,
    began: float,
    rollouts: PolicyRollouts | None,
) -> tuple[Summary, str]:
    """Returns the summary, and the signal that came in the last step ("" = none): nobody waits for more."""
    config = prepared.config
    # what evaluations are called, and their sign where more is better
    figure, sign = ("loss", 1) if rollouts is None else ("reward", -1)
    first_step = resume.manifest.step if resume else 0
    display = TrainProgress(
        prepared.batches.total_steps,
        first_step,
        live=config.tracking.progress,
        log_every=config.trainer.log_every,
    )

    def on_step(metrics: StepMetrics) -> None:
        tracker.log(metrics.step, metrics.to_dict())
        display.update(metrics.to_dict())

    def on_skip(step: int, loss: float, norm: float) -> None:
        tracker.log(step, {"skipped": 1, "loss": loss, "grad_norm": norm})

    recorded = None  # the figure of the state that the run goes on from, which may be measured again
    if rundir.continued:
        records = read_jsonl(rundir.path / "metrics.jsonl")
        recorded = dict(series(records, f"eval_{figure}")).get(first_step)

    def on_eval(step: int, loss: float) -> None:
        if step != first_step or sign * loss != recorded:
            tracker.log(step, {f"eval_{figure}": sign * loss})
        display.evaluated(step, f"{figure} {sign * loss:.4f}")

    def save(step: int) -> Path:
        more = partial(trainer.policy.save, step) if trainer.policy is not None else lambda _: None
        return save_checkpoint(prepared, rundir, cluster, step, trainer.load, trainer.recent(step), more)

    def timeline(step: int, activities: Sequence[Activity]) -> None:
        write_timeline(rundir.path / "timelines", step, activities, {"run": rundir.path.name, "step": step})

    def best(step: int, loss: float) -> None:
        if not (rundir.checkpoints / step_name(step)).is_dir():  # the run began with another run's checkpoint
            save(step)
        mark_best(rundir.checkpoints, step, loss, prepared.eval_digest)
        best = "lowest" if sign > 0 else "highest"
        display.line(f"step {step}: the {best} held-out {figure} so far, {sign * loss:.4f}")

    def finish() -> None:
        trainer.kept = _still_there(rundir, trainer.kept) if config.trainer.save_best else None
        if trainer.kept is not None:
            chosen = rundir.checkpoints / step_name(trainer.kept[0])
            cluster.restore(str(chosen), trainer.kept[0])
            held_out = sign * trainer.kept[1]
            display.line(f"the adapter is that of {chosen.name}, held-out {figure} {held_out:.4f}")
        try:
            for line in publish_adapter(prepared, rundir, cluster):
                display.line(line)
        except ActorLost:
            raise
        except UserError as error:
            raise trainer.recovery.with_way_on(error) from error
        _write_env(rundir, cluster)  # once more: how many kernel calls ran, and where

    kept = best_so_far(prepared, rundir) if resume and config.trainer.save_best else None
    known = [(step, sign * value) for step, value in _evaluations(rundir, figure, first_step)]
    # What was measured before does not count here: by another run, over other rows, or where no checkpoint is
    # marked for it, or a worse one: the driver died between the two. The state that this begins with may be
    # the best.
    unmarked = kept is None or (recorded is not None and sign * recorded < kept[1])
    fresh = not rundir.continued or (config.trainer.save_best and unmarked)
    # What the command has done so far counts from its own start, whichever driver did it.
    restarted = supervisor.began is not None and first_step > supervisor.first_step
    began = began if supervisor.began is None else supervisor.began
    durations = _of_drivers_before(rundir, "seconds", first_step)
    with display, stop_signals() as stop:
        events = Events(on_step, on_eval, save, timeline, display.repeating, display.line, best, on_skip)
        trainer = Trainer(
            config,
            cluster,
            prepared.batches,
            events,
            first_step=first_step,
            before=resume.recent if resume else (),
            resumed_from=resume.directory if resume else None,
            load=prepared.load,
            directory=rundir.path,
            began=began,
            kept=kept,
            evaluated=known,
            longest_step=max(durations, default=0.0) if restarted else None,
            stop=stop,
            owes_evaluation=resume is not None and (fresh or not _evaluated(resume)),
            rollouts=rollouts,
        )
        done = trainer.run()
        trainer.with_all_steps(finish)
    evaluated = sorted(done.eval_losses.items())
    if trainer.kept is not None and evaluated:
        # what the adapter is; also what there was before, if this command only evaluated later states
        evaluated = [min(trainer.kept, evaluated[0]), trainer.kept]
    steps = _of_drivers_before(rundir, "loss" if rollouts is None else "policy_reward", first_step)
    steps += done.applied_losses if rollouts is None else done.rewards
    count = len(durations) + done.steps
    summary = Summary(
        run_dir=rundir.path,
        steps=count,
        epochs=count / prepared.batches.steps_per_epoch,
        rows=len(prepared.data.train),
        seconds=time.monotonic() - began,
        first_loss=steps[0] if len(steps) > 1 else None,
        last_loss=steps[-1] if steps else None,
        eval_before=sign * evaluated[0][1] if evaluated and evaluated[0] != evaluated[-1] else None,
        eval_after=sign * evaluated[-1][1] if evaluated else None,
        figure=figure,
        recoveries=done.recoveries,
        seconds_lost=done.seconds_lost,
    )
    return summary, trainer.stop.name


def _still_there(rundir: RunDir, kept: tuple[int, float] | None) -> tuple[int, float] | None:
    """Step and loss of the best checkpoint if it is intact; else a warning, and no figure of it stays."""
    if kept is None:
        return None
    try:
        Manifest.load(rundir.checkpoints / step_name(kept[0]))
    except UserError as error:
        fault = f"{error.what} at {error.where}: found {error.observed}"
        logger.warning("the adapter is that of the last step, not of the best one: %s", fault)
        forget_best(rundir.checkpoints)
        return None
    return kept


def _say_not_asked(why: str, final: tuple[PreparedGeneration, list[Question]], rundir: RunDir) -> None:
    line = f"{resume_line(rundir.path)} mode=eval generate.limit={len(final[1])}"
    say(f"{why}: the held-out questions are not asked; to ask them: {line}")


def _answer(
    generation: PreparedGeneration,
    questions: list[Question],
    rundir: RunDir,
    cluster: ActorCluster,
    tracker: MultiTracker,
) -> tuple[str, ...]:
    """Answers before and after. The adapter is safe by now: what fails here, or a signal, ends nothing else.

    Returns:
        A question and both answers; () = there are none.
    """
    try:
        result = before_and_after(generation, questions, rundir, cluster)
    except KeyboardInterrupt:
        _say_not_asked("interrupted", (generation, questions), rundir)
        return ()
    except Exception as error:
        logger.info("held-out questions were not answered", exc_info=error)  # the whole of it: to train.log
        reason = error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        say(f"held-out questions were not answered, the adapter is not concerned: {' '.join(reason.split())}")
        return ()
    for name, (columns, rows) in result.tables().items():
        tracker.table(name, columns, rows)
    return next(((s.prompt, s.base or "", s.adapter or "") for s in result.samples), ())
