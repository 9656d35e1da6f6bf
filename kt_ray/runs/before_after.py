"""Base and adapter answer the same questions on one cluster, for mode=eval and at the end of training.

One base model in memory serves both. mode=eval measures the base's loss before the actors read the adapter
(LoRA without effect) and the adapter's after it; then one session answers each row twice and switches the
adapter on and off. All results are kept, so the same command continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from pathlib import Path

from kt_ray.actors.cluster import ActorCluster
from kt_ray.config.fields import show
from kt_ray.config.schema import Config
from kt_ray.evaluate.answer_file import ADAPTER_FILE, find_answers, missing_answers, of_present_adapter
from kt_ray.evaluate.loss_sums import LOSSES_FILE
from kt_ray.evaluate.table import Comparison
from kt_ray.placement.generation_memory import within_training
from kt_ray.runs import evaluation
from kt_ray.runs.answering import AnswerJob, answer, answers_directory, dated_as_answered, open_job
from kt_ray.runs.generation import (
    PreparedGeneration,
    generation_of,
    generator_on,
    load_adapters,
    prepare_generation,
)
from kt_ray.runs.held_out_loss import HeldOut, measure, open_held_out
from kt_ray.runs.prepare import Prepared
from kt_ray.runs.questions import Question, questions_of
from kt_ray.runs.run_lock import locked
from kt_ray.runs.rundir import RunDir, flatten, plain, settings_of
from kt_ray.runs.start_cluster import started
from kt_ray.tracking.console import console, say

# Keys of `data` that change a row's tokens, not which rows are held out.
_SAME_ROWS = frozenset(
    "data." + name
    for name in (
        *("max_length", "overflow", "shuffle", "pad_to_multiple_of", "packing", "group_by_length"),
        *("cache_gb", "template", "date", "train_on", "system"),
    )
)


def answer_and_measure(config: Config) -> tuple[Path, tuple[str, ...]]:
    """Measure the losses and answer the rows, as far as that has not been done.

    Returns:
        The directory of answers and losses, and notes for the user.

    Raises:
        UserError: any fault in model, adapter, data or plan, or answers made with other settings.
    """
    directory = answers_directory(config)
    generation = prepare_generation(dated_as_answered(config, directory))
    questions = questions_of(generation)
    with locked(directory):
        job = open_job(generation, questions, directory, config.run.overwrite)
        held_out = open_held_out(generation, [question.id for question in questions], directory)
        if job.remaining or held_out.remaining:
            _compute(generation, job, held_out)
    if generation.adapter is None:
        return directory, ()
    return directory, tuple(other_rows(config, Path(generation.adapter).parent))


def _compute(generation: PreparedGeneration, job: AnswerJob, held_out: HeldOut) -> None:
    numbers = count(1)
    with started(generation, f"{job.directory.name}-eval") as cluster:
        if "base" in held_out.remaining:
            measure(held_out, "base", cluster, numbers)
        load_adapters(generation, cluster)
        if "adapter" in held_out.remaining:
            measure(held_out, "adapter", cluster, numbers)
        if job.remaining:
            with generator_on(generation, cluster) as generator:
                answer(job, generator)


def other_rows(config: Config, run: Path) -> Iterable[str]:
    """A note when the adapter's run held out other rows, so that it may have learnt from some of these."""
    own = config.generate.split == "eval" and config.data.eval_path is None
    if not own:
        return
    then, now = settings_of(run), flatten(plain(config))
    keys = [key for key in now if key == "seed" or (key.startswith("data.") and key not in _SAME_ROWS)]
    changes = [
        f"{key}={show(then[key])}, here {show(now[key])}"
        for key in keys
        if key in then and then[key] != now[key]
    ]
    evaluated = then.get("trainer.eval_every", 0) or then.get("eval.after_training", 0)
    if then.get("data.eval_fraction") == "auto" and not evaluated:  # kt_ray.data.held_out_split.as_split
        changes.append("trainer.eval_every=0, which holds no row out")
    if changes:
        yield f"the adapter was trained with {', '.join(changes)}: it may have learnt from some of these rows"


def final_questions(prepared: Prepared) -> tuple[PreparedGeneration, list[Question]] | None:
    """What base and adapter will be asked after training: the first eval.after_training held-out rows.

    None = eval.after_training is 0, data.eval_fraction=auto held nothing out, or trainer.stage=grpo, whose
    held-out prompts are answered and scored all along.

    Raises:
        UserError: the family cannot generate, or a row does not fit the model's context.
    """
    config = prepared.config
    if not config.eval.after_training or not prepared.data.eval or config.trainer.stage == "grpo":
        return None
    model = replace(prepared, config=within_training(config))
    generation = generation_of(model, prepared.data.tokenizer)
    return generation, questions_of(generation)


def before_and_after(
    generation: PreparedGeneration, questions: list[Question], run: RunDir, cluster: ActorCluster
) -> Comparison:
    """Answer, print the table, and write predictions.jsonl, eval.json and eval.md into the run directory.

    Answers of this adapter stay: those of a run that is resumed after its last step.

    Args:
        generation, questions: from `final_questions`.
        run: of the training, with its adapter and its held-out losses.
        cluster: as training left it: no model is loaded again.
    """
    generation = replace(generation, adapter=str(run.adapter))
    file = run.path / ADAPTER_FILE
    anew = not (file.is_file() and of_present_adapter(file, run.adapter))
    if anew or missing_answers(file):
        job = open_job(generation, questions, run.path, overwrite=anew)
        if anew:
            (run.path / LOSSES_FILE).unlink(missing_ok=True)  # of an earlier adapter in this directory
        with generator_on(generation, cluster) as generator:
            answer(job, generator)
    else:
        say(f"{file} has this adapter's answers: they stay, and nothing is asked")
    result = evaluation.evaluate(generation.config, *find_answers(run.path), run.path)
    evaluation.write(result, run.path)
    evaluation.show(result, console())
    return result
