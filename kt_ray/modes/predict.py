"""mode=predict: answers to the held-out questions, one line of predictions.jsonl each."""

from __future__ import annotations

from pathlib import Path

from kt_ray.config.schema import Config
from kt_ray.runs.answering import (
    answer,
    answers_directory,
    as_answered_before,
    dated_as_answered,
    open_job,
)
from kt_ray.runs.before_after import other_rows
from kt_ray.runs.generation import generating, prepare_generation
from kt_ray.runs.questions import questions_of
from kt_ray.runs.run_lock import locked
from kt_ray.tracking.console import say


def run(config: Config) -> int:
    """Answer what has no answer yet. Returns the exit code."""
    directory = answers_directory(config)
    config = dated_as_answered(as_answered_before(config, directory), directory)
    generation = prepare_generation(config)
    questions = questions_of(generation)
    if generation.adapter is not None:
        for note in other_rows(config, Path(generation.adapter).parent):
            say(f"note: {note}")
    with locked(directory):
        job = open_job(generation, questions, directory, config.run.overwrite)
        if job.remaining:
            with generating(generation, f"{directory.name}-predict") as generator:
                answer(job, generator)
    return 0
