"""mode=predict: answers to the held-out questions, one line of predictions.jsonl each; mode=eval uses it.

    runs/<run.name or MODEL-predict>/
        predictions.jsonl   {"id", "prompt", "messages", "label", "predict"[, "base"], "finish", "tokens"
                             [, "error"][, "option_logits"[, "base_option_logits"]]}
        predictions.json    the settings that they were made with

A line is written when its answer is there, so a run that ended early goes on where it stopped. Of
multiple-choice questions the options' log-probabilities as the next token are asked for as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from kt_ray.config.schema import Config
from kt_ray.data.load import read_split
from kt_ray.data.row_types import Conversation, Turn
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.errors import UserError
from kt_ray.evaluate.predictions import adapter_mark
from kt_ray.generate.generator import Answer, Generator, Piece
from kt_ray.runs.choice_options import Options, options_of
from kt_ray.runs.generation import Setup, generating, setup
from kt_ray.runs.rundir import write_atomic
from kt_ray.tracking.console import console

ROWS, SETTINGS = "predictions.jsonl", "predictions.json"


@dataclass(frozen=True)
class Question:
    """One row to answer.

    Attributes:
        id: index of the row in its source. prompt: its text as the model sees it. messages: the same before
            the template. label: the answer that the row has. ids: token ids of the prompt. where: file and
            line.
        options: of a multiple-choice question.
    """

    id: int
    prompt: str
    messages: tuple[Turn, ...]
    label: str
    ids: tuple[int, ...]
    where: str
    options: Options | None = None


@dataclass(frozen=True)
class Work:
    """Questions to answer, and where the answers go.

    Attributes:
        done: ids of those that have been answered.
    """

    made: Setup
    questions: list[Question]
    directory: Path
    done: frozenset[int]

    @property
    def left(self) -> list[Question]:
        return [question for question in self.questions if question.id not in self.done]

    @property
    def path(self) -> Path:
        return self.directory / ROWS


def run(config: Config) -> int:
    """Answer what has no answer yet. Returns the exit code."""
    made = setup(config)
    directory = Path(config.run.root) / (config.run.name or f"{config.model.name}-predict")
    work = open_work(made, questions_of(made), directory, config.run.overwrite)
    if work.left:
        with generating(made, f"{directory.name}-predict") as generator:
            answer(work, generator)
    return 0


def open_work(made: Setup, questions: list[Question], directory: Path, overwrite: bool) -> Work:
    """What there is to do in a directory, which is made if need be.

    Args:
        overwrite: begin anew, whatever lies there.

    Raises:
        UserError: it holds predictions made with other settings.
    """
    done = _open(directory, _settings(made, questions), overwrite)
    _say(f"{len(questions)} rows, {len(done)} of them answered already: {directory / ROWS}")
    return Work(made, questions, directory, frozenset(done))


def answer(work: Work, generator: Generator) -> None:
    """Answer what is left, a line each."""
    left = work.left
    tokens, seconds = _answer(work.made, generator, left, work.path)
    rate = tokens / max(seconds, 1e-9)
    _say(f"{len(left)} rows in {seconds:.1f} s, {tokens} tokens, {rate:.1f} tokens/s: {work.path}")


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
    """The rows that generate.split names, as training sees them: of pairs the better answer is the label, and
    rows with an unwanted answer (KTO) are left out.

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
    return [row for row in rows if row.label is not False][: config.generate.limit]


def questions_of(made: Setup) -> list[Question]:
    """The rows that `generate` names, checked.

    Raises:
        UserError: one that does not fit the model's context, or eval.choice=on and a label that is no option.
    """
    rows = held_out(made.config)
    options = options_of(made, rows)
    return [_question(made, row, found) for row, found in zip(rows, options, strict=True)]


def _question(made: Setup, row: Conversation, options: Options | None) -> Question:
    messages = row.messages[:-1]
    ids = made.prompt(messages, row.tools)
    made.request(ids, row.where, adapter=False, seed=0)  # refused now, not after hours
    prompt = made.encoder.render(messages, prompt=True, tools=row.tools)
    return Question(row.sample_id, prompt, messages, row.messages[-1]["content"], ids, row.where, options)


def who(made: Setup) -> tuple[bool, ...]:
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
    rows = hashlib.sha256("\n".join(map(_content, questions)).encode()).hexdigest()
    return {
        "model": made.fingerprint,
        "adapter": made.adapter if True in who(made) else None,
        "adapter_file": adapter_file(made),
        "answers": ["adapter" if on else "base" for on in who(made)],
        **{name: getattr(generate, name) for name in names},
        "backend": experts_stored(made),
        "eos": list(made.eos),
        "stop": list(generate.stop),
        "seed": made.config.seed if generate.temperature > 0 else None,
        "options": "".join(next((q.options.tokens for q in questions if q.options), {})) or None,
        "rows": rows,
        "count": len(questions),
    }


def _content(question: Question) -> str:
    """All of a row that its line depends on."""
    options = question.options and [question.options.prompt, question.options.tokens]
    return json.dumps([question.id, question.ids, question.label, options])


def experts_stored(made: Setup) -> str:
    """The backend where it makes the experts' weights others; the rest compute the checkpoint's own."""
    backend = made.config.rule.experts.backend
    return backend if backend in BACKEND_STORAGE else "auto"


def adapter_file(made: Setup) -> str | None:
    """Tells an adapter from one that was written to the same place later; None = no adapter answers."""
    if made.adapter is None or True not in who(made):
        return None
    return adapter_mark(Path(made.adapter))


def _open(directory: Path, settings: dict[str, Any], overwrite: bool) -> set[int]:
    """Make the directory ready; ids of the rows that it has already.

    Raises:
        UserError: it holds predictions made with other settings, or those of another program.
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
        # Rows that ended with an error are asked again; a line that the last run's end cut off as well.
        rows = {id: row for id, row in read_predictions(directory).items() if "error" not in row}
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
        write_atomic(directory / ROWS, text)
        return set(rows)
    if (directory / ROWS).is_file() and not overwrite:
        raise UserError(
            "this directory holds predictions of another program",
            where=str(directory / ROWS),
            observed=f"no {SETTINGS} beside them",
            required="a directory without predictions, or predictions of mode=predict to go on with",
            remedy="set another run.name, or run.overwrite=true to replace them",
        )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ROWS).unlink(missing_ok=True)
    write_atomic(path, json.dumps(settings, indent=1) + "\n")
    return set()


def _answer(made: Setup, generator: Generator, questions: list[Question], path: Path) -> tuple[int, float]:
    """Ask all, write each row when its answers are there. Returns tokens generated and seconds.

    Raises:
        BaseException: what ended the session of generation.
    """
    start, tokens = time.monotonic(), 0
    waiting: dict[int, tuple[Question, list[Answer]]] = {}
    ended: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
    ahead = 2 * made.config.generate.batch_size * made.plan.replicas
    left = iter(questions)

    def listen(piece: Piece | BaseException) -> None:
        if isinstance(piece, BaseException) or piece.token.finish:
            ended.put(piece)

    with path.open("a", encoding="utf-8") as file:
        while True:
            for question in islice(left, max(0, ahead - len(waiting))):
                seed = (made.config.seed + question.id) % 2**63
                asked = [
                    generator.submit(
                        made.request(question.ids, question.where, adapter=on, seed=seed), listen
                    )
                    for on in who(made)
                ]
                if question.options is not None:
                    asked += [generator.submit(question.options.request(on), listen) for on in who(made)]
                waiting[question.id] = question, asked
            if not waiting:
                return tokens, time.monotonic() - start
            piece = ended.get()  # of any of them: a long answer holds no other row up
            if isinstance(piece, BaseException):
                raise piece
            # `finish` is there before an answer's last piece: the last piece of a row finds them all.
            for question, asked in [w for w in waiting.values() if all(answer.finish for answer in w[1])]:
                del waiting[question.id]
                found = [answer.result() for answer in asked]
                answers, options = found[: len(who(made))], found[len(who(made)) :]
                tokens += sum(len(answer.tokens) for answer in answers)
                _write(file, question, answers, options)


def _write(file: TextIO, question: Question, answers: list[Answer], options: list[Answer]) -> None:
    row: dict[str, Any] = {
        "id": question.id,
        "prompt": question.prompt,
        "messages": list(question.messages),
        "label": question.label,
        "predict": answers[0].text,
        **({"base": answers[1].text} if len(answers) > 1 else {}),
        "finish": answers[0].finish,
        "tokens": len(answers[0].tokens),
    }
    for key, told in zip(("option_logits", "base_option_logits"), options, strict=False):
        assert question.options is not None
        row[key] = question.options.logits(told)
    wrong = [answer for answer in answers if answer.finish == "error"]
    if wrong:
        row["error"] = wrong[0].error
        _say(f"{question.where}: its answer ended with an error: {wrong[0].error}")
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()
    os.fsync(file.fileno())


def _say(line: str) -> None:
    console().print(line, markup=False, soft_wrap=True)
