"""mode=eval: metrics of answers, base against adapter, as a table, Markdown, JSON and W&B tables.

Answers that do not exist yet are generated first.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kt_ray.config.schema import Config
from kt_ray.evaluate.answer_file import find_answers
from kt_ray.runs.evaluation import (
    JSON_FILE,
    MARKDOWN_FILE,
    evaluate,
    existing_answers,
    show,
    to_answer,
    to_trackers,
    write,
)
from kt_ray.terminal import screen_console


def run(config: Config) -> int:
    """Print the table and write eval.json and eval.md. Returns the exit code.

    Raises:
        UserError: no answers and no adapter to make them with, two sets that do not answer the same
            questions, or a fault in what answers are generated from.
    """
    notes: tuple[str, ...] = ()
    job = to_answer(config)
    if job is None:
        base, adapter, home = existing_answers(config)
    else:
        from kt_ray.runs.before_after import answer_and_measure  # torch, and all that generates

        home, notes = answer_and_measure(job)
        base, adapter = find_answers(home)
    result = evaluate(config, base, adapter, home, notes)
    out = Path(config.eval.out) if config.eval.out else home
    write(result, out)
    show(result, screen_console(file=sys.stdout, highlight=False))
    print(f"written: {out / MARKDOWN_FILE}, {out / JSON_FILE}")
    to_trackers(config, result, home)
    return 0
