"""mode=predict: answers to the held-out questions, one line of predictions.jsonl each.

    runs/<run.name or MODEL-predict>/
        predictions.jsonl   {"id", "prompt", "label", "predict"[, "base"], "finish", "tokens"}
        predictions.json    the settings that they were made with

A line is written when its answer is there, so a run that ended early goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from kt_ray.config.schema import Config
from kt_ray.data.load import read_split
from kt_ray.data.types import Conversation
from kt_ray.errors import UserError
from kt_ray.generate.generator import Answer, Generator
from kt_ray.modes.generation import Setup, generating, setup
from kt_ray.rundir import write_atomic
from kt_ray.tracking.console import console

ROWS, SETTINGS = "predictions.jsonl", "predictions.json"


@dataclass(frozen=True)
class Question:
    """One row to answer.

    Attributes:
        id: index of the row in its source. prompt: its text as the model sees it. label: the answer that the
            row has. ids: token ids of the prompt. where: file and line.
    """

    id: int
    prompt: str
    label: str
    ids: tuple[int, ...]
    where: str


def run(config: Config) -> int:
    """Answer what has no answer yet. Returns the exit code."""
    made = setup(config)
    questions = list(_questions(made))
    directory = Path(config.run.root) / (config.run.name or f"{config.model.name}-predict")
    done = _open(directory, _settings(made, questions), config.run.overwrite)
    left = [question for question in questions if question.id not in done]
    _say(f"{len(questions)} rows, {len(done)} of them answered already: {directory / ROWS}")
    if not left:
        return 0
    with generating(made, f"{directory.name}-predict") as generator:
        tokens, seconds = _answer(made, generator, left, directory / ROWS)
    rate = tokens / max(seconds, 1e-9)
    _say(f"{len(left)} rows in {seconds:.1f} s, {tokens} tokens, {rate:.1f} tokens/s: {directory / ROWS}")
    return 0


def read_predictions(directory: Path) -> dict[int, dict[str, Any]]:
    """Rows of a predictions file by id; an unfinished last line is left out."""
    path = directory / ROWS
    if not path.is_file():
        return {}
    rows: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        row = json.loads(line)
        rows[int(row["id"])] = row
    return rows


def held_out(config: Config) -> list[Conversation]:
    """The rows that generate.split names, as training sees them.

    Raises:
        UserError: rows without a question.
    """
    parts, _, held, _ = read_split(config.data, config.seed)
    rows = held if config.generate.split == "eval" else [row for part in parts for row in part.rows]
    silent = next((row for row in rows if row.text is not None), None)
    if silent is not None:
        raise UserError(
            "raw text asks nothing that could be answered",
            where=silent.where,
            required="rows with a question and an answer",
            remedy="name such rows in data.path, or set data.format if the format was not meant",
        )
    return rows[: config.generate.limit]


def _questions(made: Setup) -> Iterator[Question]:
    for row in held_out(made.config):
        messages = row.messages[:-1]
        ids = made.prompt(messages, row.tools)
        made.request(ids, row.where, adapter=False, seed=0)  # refused now, not after hours
        prompt = made.encoder.render(messages, prompt=True, tools=row.tools)
        yield Question(row.sample_id, prompt, row.messages[-1]["content"], ids, row.where)


def _who(made: Setup) -> tuple[bool, ...]:
    """Adapter on or off, of each answer to a row; the first one is "predict"."""
    answer = made.config.generate.answer
    if answer == "both":
        return (True, False)
    return (made.adapter is not None and answer != "base",)


def _settings(made: Setup, questions: list[Question]) -> dict[str, Any]:
    """What predictions depend on: those of other settings are not gone on with."""
    generate = made.config.generate
    names = (
        "max_new_tokens",
        "min_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
    )
    rows = hashlib.sha256("\n".join(f"{q.id} {q.ids}" for q in questions).encode()).hexdigest()
    return {
        "model": made.fingerprint,
        "adapter": made.adapter if True in _who(made) else None,
        "answers": ["adapter" if on else "base" for on in _who(made)],
        **{name: getattr(generate, name) for name in names},
        "stop": list(generate.stop),
        "seed": made.config.seed if generate.temperature > 0 else None,
        "rows": rows,
    }


def _open(directory: Path, settings: dict[str, Any], overwrite: bool) -> set[int]:
    """Make the directory ready; ids of the rows that it has already.

    Raises:
        UserError: it holds predictions made with other settings.
    """
    path = directory / SETTINGS
    if path.is_file() and not overwrite:
        before = json.loads(path.read_text(encoding="utf-8"))
        differ = sorted(name for name in settings if before.get(name) != settings[name])
        if differ:
            name = differ[0]
            raise UserError(
                "the predictions in this directory were made with other settings",
                where=str(path),
                observed=f"{name}={before.get(name)}",
                required=f"{name}={settings[name]}",
                remedy="set another run.name, or run.overwrite=true to begin anew",
            )
        rows = read_predictions(directory)
        # A line that was cut off by the end of the last run is written again.
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
        write_atomic(directory / ROWS, text)
        return set(rows)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ROWS).unlink(missing_ok=True)
    write_atomic(path, json.dumps(settings, indent=1) + "\n")
    return set()


def _answer(made: Setup, generator: Generator, questions: list[Question], path: Path) -> tuple[int, float]:
    """Ask all, write each row when its answers are there. Returns tokens generated and seconds."""
    start, tokens = time.monotonic(), 0
    waiting: list[tuple[Question, list[Answer]]] = []
    ahead = 2 * made.config.generate.batch_size * made.plan.replicas
    left = iter(questions)
    with path.open("a", encoding="utf-8") as file:
        while True:
            for question in islice(left, max(0, ahead - len(waiting))):
                seed = (made.config.seed + question.id) % 2**63
                asked = [
                    generator.submit(made.request(question.ids, question.where, adapter=on, seed=seed))
                    for on in _who(made)
                ]
                waiting.append((question, asked))
            if not waiting:
                return tokens, time.monotonic() - start
            waiting[0][1][0].result()
            for item in [w for w in waiting if all(answer.finish for answer in w[1])]:
                waiting.remove(item)
                answers = [answer.result() for answer in item[1]]
                tokens += sum(len(answer.tokens) for answer in answers)
                _write(file, item[0], answers)


def _write(file: TextIO, question: Question, answers: list[Answer]) -> None:
    row = {
        "id": question.id,
        "prompt": question.prompt,
        "label": question.label,
        "predict": answers[0].text,
        **({"base": answers[1].text} if len(answers) > 1 else {}),
        "finish": answers[0].finish,
        "tokens": len(answers[0].tokens),
    }
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _say(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True)
