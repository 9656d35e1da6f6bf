"""Answers to held-out questions, one line of predictions.jsonl each.

    <answers_directory>/
        predictions.jsonl   {"id", "prompt", "messages", "label", "predict"[, "base"], "finish", "tokens"
                             [, "error"][, "option_logits"[, "base_option_logits"]]}
        predictions.json    the settings that produced them

A line is written as soon as its answer is complete, so a run that ended early continues where it stopped, and
one with more questions keeps the answers that there are. For multiple-choice questions, the options'
log-probabilities as the next token are asked for as well.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import queue
import time
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kt_ray.adapter.from_peft import adapter_directory
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.config.schema import Config
from kt_ray.data.chat_template import dated
from kt_ray.dims.weight_formats import BACKEND_STORAGE
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import ADAPTER_FILE, SETTINGS_FILE, adapter_mark
from kt_ray.generate.generator import Answer, Generator, Piece
from kt_ray.parse import check_shape, parse_json, read_json, read_text
from kt_ray.placement.generation_memory import attends_as_cached
from kt_ray.runs.generation import PreparedGeneration
from kt_ray.runs.questions import Question
from kt_ray.runs.rundir import is_run, settings_of
from kt_ray.tracking.console import say

_REMEDY = (
    "start mode=predict or mode=eval with another run.name beside generate.adapter, or with "
    "run.overwrite=true to replace these answers (and nothing else)"
)
SPACE = "free space and start the same command again; it continues"
# What of `generate` changes an answer.
_SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
)
# Settings that files of earlier versions lack.
_LATER = ("date", "dtype", "attn_implementation", "latent_keys")


@dataclass(frozen=True)
class AnswerJob:
    """Questions to answer, and the directory for the answers."""

    generation: PreparedGeneration
    questions: list[Question]
    directory: Path
    done: frozenset[int]  # ids of the questions that have an answer

    @property
    def remaining(self) -> list[Question]:
        return [question for question in self.questions if question.id not in self.done]

    @property
    def path(self) -> Path:
        return self.directory / ADAPTER_FILE


def answers_directory(config: Config) -> Path:
    """Where answers go, for mode=predict and mode=eval alike.

    run.name below run.root; else the run whose adapter answers, where mode=report looks; else, below
    run.root, a directory of model and adapter (two adapters of one name have two), or of the base.

    Raises:
        UserError: generate.adapter names no adapter.
    """
    root = Path(config.run.root)
    if config.run.name:
        return root / config.run.name
    if config.generate.adapter is None:
        return root / f"{config.model.name}-base"
    adapter = Path(adapter_directory(config.generate.adapter))
    if is_run(adapter.parent):
        return adapter.parent
    adapter = adapter.resolve()
    name = adapter.parent.name if adapter.name == "adapter" else adapter.name
    return root / f"{config.model.name}-{name}-{_digest(str(adapter))[:6]}"


def as_answered_before(config: Config, directory: Path) -> Config:
    """generate.answer=auto where adapter and base have answered, as at the end of a training: both again."""
    settings, generate = directory / SETTINGS_FILE, config.generate
    if generate.answer != "auto" or generate.adapter is None or config.run.overwrite:
        return config
    if not settings.is_file():
        return config
    if read_json(settings, "the settings of the predictions", _REMEDY).get("answers") != ["adapter", "base"]:
        return config
    say(f"{directory} has answers of adapter and base: generate.answer=both")
    return replace(config, generate=replace(generate, answer="both"))


def dated_as_answered(config: Config, directory: Path) -> Config:
    """The configuration with data.date set: as given, else as of the answers in the directory, else as of the
    adapter's run, else today. Questions of a template that writes the date are then those of before.

    Raises:
        UserError: generate.adapter names no adapter, or predictions.json is damaged.
    """
    if config.data.date is not None:
        return config
    before, trained = None, None
    settings = directory / SETTINGS_FILE
    if settings.is_file() and not config.run.overwrite:
        before = read_json(settings, "the settings of the predictions", _REMEDY).get("date")
    if config.generate.adapter is not None:
        run = Path(adapter_directory(config.generate.adapter)).parent
        trained = settings_of(run).get("data.date")
    day = next((str(day) for day in (before, trained) if _is_day(day)), datetime.date.today().isoformat())
    return replace(config, data=replace(config.data, date=day))


def _is_day(value: object) -> bool:
    try:
        datetime.date.fromisoformat(str(value))
    except ValueError:
        return False
    return True


def open_job(
    generation: PreparedGeneration, questions: list[Question], directory: Path, overwrite: bool
) -> AnswerJob:
    """The job in a directory, which is made if need be.

    Args:
        overwrite: start afresh, whatever the directory holds.

    Raises:
        UserError: it holds answers made with other settings, to questions that are not asked now, or by
            another program; or it cannot be written.
    """
    done = _open(directory, _settings(generation, questions), overwrite)
    job = AnswerJob(generation, questions, directory, frozenset(done))
    say(f"{len(questions)} rows, {len(done)} of them answered already: {job.path}")
    return job


def answer(job: AnswerJob, generator: Generator) -> None:
    """Answer the remaining questions, a line each.

    Raises:
        UserError: a line cannot be written.
        BaseException: what ended the session of generation.
    """
    start, count = time.monotonic(), len(job.remaining)
    tokens = _answer(job, generator)
    seconds = time.monotonic() - start
    rate = tokens / max(seconds, 1e-9)
    say(f"{count} rows in {seconds:.1f} s, {tokens} tokens, {rate:.1f} tokens/s: {job.path}")


def sides(generation: PreparedGeneration) -> tuple[str, ...]:
    """Who answers each row, "adapter" or "base"; the first one's answer is "predict"."""
    who = generation.config.generate.answer
    if who == "both":
        return ("adapter", "base")
    return ("adapter" if generation.adapter is not None and who != "base" else "base",)


def model_settings(generation: PreparedGeneration) -> dict[str, Any]:
    """What of the model answers and losses depend on."""
    adapter = generation.adapter if "adapter" in sides(generation) else None
    config = generation.config
    backend = config.rule.experts.backend
    return {
        "model": generation.fingerprint,
        # An adapter written to the same place later is another one; a run may be moved with its adapter.
        "adapter_file": None if adapter is None else adapter_mark(Path(adapter)),
        # Only these backends change the experts' weights; the others compute the checkpoint's own.
        "backend": backend if backend in BACKEND_STORAGE else "auto",
        "dtype": generation.plan.dtype,
        "attn_implementation": config.model.attn_implementation,
    }


def completed(before: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings read from a file; what an earlier version did not write down counts as equal."""
    same = "model" in before and settings["model"].startswith(str(before["model"]))
    before = before | ({"model": settings["model"]} if same else {})  # a fingerprint's first half
    return {name: settings[name] for name in _LATER if name in settings} | before


def _settings(generation: PreparedGeneration, questions: list[Question]) -> dict[str, Any]:
    """All that answers depend on; a job continues only under the same settings."""
    generate, dims = generation.config.generate, generation.plan.dims
    layers = range(dims.num_layers)
    absorbed = any(attends_as_cached(dims, generation.config, layer) for layer in layers)
    return {
        **model_settings(generation),
        "latent_keys": "absorbed" if absorbed else "expanded",
        "adapter": generation.adapter and str(Path(generation.adapter).resolve()),
        "answers": list(sides(generation)),
        "date": generation.config.data.date if dated(generation.encoder.template) else None,
        **{name: getattr(generate, name) for name in _SAMPLING},
        "eos": list(generation.eos),
        "stop": list(generate.stop),
        "seed": generation.config.seed if generate.temperature > 0 else None,
        "options": "".join(next((q.options.tokens for q in questions if q.options), {})) or None,
        "rows": {str(question.id): _digest(_content(question))[:16] for question in questions},
        "count": len(questions),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _content(question: Question) -> str:
    """All of a row that its line depends on."""
    options = question.options and [question.options.prompt, question.options.tokens]
    return json.dumps([question.id, question.ids, question.label, options])


def _open(directory: Path, settings: dict[str, Any], overwrite: bool) -> set[int]:
    """Make the directory ready; ids of the rows that it has already."""
    answers, settings_file = directory / ADAPTER_FILE, directory / SETTINGS_FILE
    go_on = settings_file.is_file() and not overwrite
    if not go_on and answers.is_file() and not overwrite:
        raise UserError(
            "this directory holds predictions of another program",
            where=str(answers),
            observed=f"no {SETTINGS_FILE} beside them",
            required="a directory without predictions, or predictions of mode=predict to continue",
            remedy=_REMEDY,
        )
    rows: dict[int, dict[str, Any]] = {}
    if go_on:
        # Rows that ended with an error are asked again, and so is a line that the last run's end cut off.
        rows = {id: row for id, row in _read_rows(answers).items() if "error" not in row}
    if rows:  # a command that failed before its first answer leaves nothing to protect
        _check_settings(settings_file, settings)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if go_on:
            write_atomic(
                answers, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
            )
        else:
            answers.unlink(missing_ok=True)  # before the settings, which are not those of its rows
        write_atomic(settings_file, json.dumps(settings, indent=1) + "\n")
    except OSError as error:
        raise UserError(
            "the predictions cannot be written",
            where=str(directory),
            observed=error.strerror or str(error),
            remedy="free space, or set run.name, and run.root to a directory that you may write to",
        ) from error
    return set(rows)


def _check_settings(file: Path, settings: dict[str, Any]) -> None:
    """That all answers made with the settings in a file are among those that are asked for now."""
    what = "the settings of the predictions"
    before = completed(read_json(file, what, _REMEDY), settings)
    for name in settings:  # in their order: what others follow from comes first
        if name not in ("adapter", "rows", "count") and before.get(name) != settings[name]:
            raise UserError(
                "the predictions in this directory were made with other settings",
                where=str(file),
                observed=f"{name}={before.get(name)}",
                required=f"{name}={settings[name]}",
                remedy=_REMEDY,
            )
    if isinstance(before.get("rows"), str):
        observed = "a digest of all questions in the place of one for each"
        raise UserError(
            "an earlier version wrote these predictions", where=str(file), observed=observed, remedy=_REMEDY
        )
    rows, asked = check_shape(before.get("rows"), {str: str}, file, what, _REMEDY, "rows"), settings["rows"]
    others = [id for id, row in rows.items() if asked.get(id) != row]
    if others:
        raise UserError(
            "the predictions in this directory answer other questions",
            where=str(file),
            observed=f"{len(others)} of {len(rows)} rows are not asked for now, the first: row {others[0]}",
            required=f"rows that are among the {len(asked)} asked for now",
            remedy=_REMEDY,
        )


def _read_rows(file: Path) -> dict[int, dict[str, Any]]:
    """Rows by id; an unfinished last line is left out."""
    if not file.is_file():
        return {}
    rows: dict[int, dict[str, Any]] = {}
    lines = read_text(file, "the predictions file", _REMEDY, whole_lines=True).split("\n")[:-1]
    for number, line in enumerate(lines, start=1):
        try:
            row = parse_json(line)
            rows[int(row["id"])] = row
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            raise UserError(
                "a line of the predictions is none of mode=predict",
                where=f"{file}:{number}",
                observed=line[:60],
                required="a JSON object with an id",
                remedy=_REMEDY,
            ) from error
    return rows


def _answer(job: AnswerJob, generator: Generator) -> int:
    """Ask the remaining questions, write each row when its answers are complete. Returns tokens generated."""
    generation, tokens = job.generation, 0
    adapters = [side == "adapter" for side in sides(generation)]
    waiting: dict[int, tuple[Question, list[Answer]]] = {}
    ended: queue.SimpleQueue[Piece | BaseException] = queue.SimpleQueue()
    ahead = 2 * generation.config.generate.batch_size * generation.plan.replicas
    upcoming = iter(job.remaining)

    def listen(piece: Piece | BaseException) -> None:
        if isinstance(piece, BaseException) or piece.token.finish:
            ended.put(piece)

    while True:
        for question in islice(upcoming, max(0, ahead - len(waiting))):
            seed = (generation.config.seed + question.id) % 2**63
            requests = [
                generation.request(question.ids, question.where, adapter=adapter, seed=seed)
                for adapter in adapters
            ]
            if question.options is not None:
                requests += [question.options.request(adapter) for adapter in adapters]
            waiting[question.id] = question, [generator.submit(r, listen) for r in requests]
        if not waiting:
            return tokens
        piece = ended.get()  # of any answer: a long one delays no other row
        if isinstance(piece, BaseException):
            raise piece
        # `finish` is set before an answer's last piece arrives: with the row's last piece all are set.
        complete = [w for w in waiting.values() if all(answer.finish for answer in w[1])]
        for question, pending in complete:
            del waiting[question.id]
            results = [answer.result() for answer in pending]
            answers, options = results[: len(adapters)], results[len(adapters) :]
            tokens += sum(len(answer.tokens) for answer in answers)
            _write(job.path, question, answers, options)


def _write(path: Path, question: Question, answers: list[Answer], options: list[Answer]) -> None:
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
    for key, option_answer in zip(("option_logits", "base_option_logits"), options, strict=False):
        assert question.options is not None
        if option_answer.logprobs:
            row[key] = question.options.logits(option_answer)
    error = next((answer.error for answer in (*answers, *options) if answer.finish == "error"), None)
    if error is not None:
        row["error"] = error
        say(f"{question.where}: its answer ended with an error: {error}")
    with writing("the predictions", path, remedy=SPACE), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())
