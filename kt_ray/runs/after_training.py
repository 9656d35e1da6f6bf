"""A table before and after, with samples, in the cluster that has just trained: no model is loaded again."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kt_ray.actors.cluster import ActorCluster
from kt_ray.evaluate.loss_sums import LOSSES_FILE
from kt_ray.evaluate.predictions import find_answers
from kt_ray.evaluate.table import Comparison
from kt_ray.modes import predict
from kt_ray.modes.eval import evaluate, show, write
from kt_ray.runs.generation import Setup, generator_on, setup_of
from kt_ray.runs.prepare import Prepared
from kt_ray.placement.generation_memory import after_training as settings_after
from kt_ray.runs.rundir import RunDir
from kt_ray.tracking.console import console


@dataclass(frozen=True)
class AfterTraining:
    """What base and adapter will be asked, checked before training begins."""

    made: Setup
    questions: list[predict.Question]


def after_training(prepared: Prepared) -> AfterTraining | None:
    """The first eval.after_training held-out rows; None = it is 0.

    Raises:
        UserError: the family cannot generate, or a row does not fit the model's context.
    """
    config = prepared.config
    if not config.eval.after_training:
        return None
    made = setup_of(prepared, settings_after(config))
    return AfterTraining(made, predict.questions_of(made))


def before_and_after(after: AfterTraining, run: RunDir, cluster: ActorCluster) -> Comparison:
    """Answer, print the table, and write predictions.jsonl, eval.json and eval.md into the run directory.

    Args:
        after: what `after_training` gave.
        run: of the training, with its adapter and its held-out losses.
        cluster: as training left it.
    """
    made = replace(after.made, adapter=str(run.adapter))
    work = predict.open_work(made, after.questions, run.path, overwrite=True)
    (run.path / LOSSES_FILE).unlink(missing_ok=True)  # of an earlier adapter in this directory
    with generator_on(made, cluster) as generator:
        predict.answer(work, generator)
    base, adapter = find_answers(run.path)
    result = evaluate(made.config, base, adapter, run.path)
    write(result, run.path)
    show(result, console())
    return result
