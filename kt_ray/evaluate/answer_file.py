"""Answers as predictions.jsonl holds them, one per line; LLaMA-Factory writes much the same.

    {"id": 7, "prompt": "…", "predict": "…", "label": "…"}

`predict` (or `prediction`) and `label` are texts; `prompt` is a text or a list of messages. Optional keys:

    messages            the prompt before the chat template; shown instead of it
    id                  rows are sorted by it (they are written as answers come)
    base                the base model's answer to the same prompt
    option_logits       {"A": -1.2, …}: logits of a multiple-choice question's options as the next token
    base_option_logits  the base model's
    loss_nats, loss_tokens  the label's negative log-likelihood and its tokens

Other keys are ignored. A directory may also hold the base's answers as predictions_base.jsonl, or say in
predictions.json ("answers": ["base"]) that its answers are the base's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError
from kt_ray.evaluate.choice import opens_thought
from kt_ray.evaluate.loss_sums import LossSum
from kt_ray.parse import parse_json, read_json, read_text
from kt_ray.terminal import shortened

ADAPTER_FILE, BASE_FILE, SETTINGS_FILE = "predictions.jsonl", "predictions_base.jsonl", "predictions.json"
_WEIGHTS = "adapter_model.safetensors"  # as in kt_ray.adapter.adapter_dir, which imports torch
_SHOWN = 60  # characters of what is wrong
_REMEDY = "write one JSON object per line with prompt, predict and label, as mode=predict does"


@dataclass(frozen=True)
class AnswerRow:
    """One answer."""

    prompt: str  # as text ("" when the file does not say)
    answer: str
    label: str  # what the data says
    # option letter -> logit; empty = not measured
    option_logits: dict[str, float] = field(default_factory=dict)
    loss: LossSum | None = None  # of the label under the model; None = not measured
    failed: bool = False  # whether this answer, or another in the same row, ended with an error
    opened: bool = False  # whether the prompt ends with <think>, so that the answer begins amid reasoning

    @property
    def judged(self) -> str:
        """The answer, behind the <think> that the prompt ends with, if it does."""
        return f"<think>{self.answer}" if self.opened else self.answer


@dataclass(frozen=True)
class AnswerFile:
    """A model's answers to a data set; `source` is the file that holds them."""

    source: str
    rows: tuple[AnswerRow, ...]


def find_answers(path: Path) -> tuple[AnswerFile | None, AnswerFile | None]:
    """The answers in a file or directory, as (base's, adapter's); at least one of them.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if not path.is_dir():
        base, adapter = _read_both(_existing(path, path))
        return (adapter, None) if adapter is not None and path.name == BASE_FILE else (base, adapter)
    if (path / BASE_FILE).is_file() and not (path / ADAPTER_FILE).is_file():
        return read_answers(path / BASE_FILE), None
    base, adapter = _read_both(_existing(path / ADAPTER_FILE, path))
    if base is None and (path / BASE_FILE).is_file():
        base = read_answers(path / BASE_FILE)
    return base, adapter


def _existing(file: Path, path: Path) -> Path:
    if file.is_file():
        return file
    raise UserError(
        "there are no predictions" + (" in this directory" if path.is_dir() else ""),
        where=str(path),
        observed=f"no {file.name}" if path.is_dir() else "no such file",
        required="a predictions.jsonl, or a run directory that holds one",
        remedy="make them with mode=predict, or correct the path",
    )


def _read_both(file: Path) -> tuple[AnswerFile | None, AnswerFile | None]:
    """(base's, adapter's) of one file, by its `base` column and by what predictions.json says of it."""
    rows = _rows(file)
    answers = AnswerFile(str(file), tuple(_row(value, where) for value, where in rows))
    names = settings_beside(file).get("answers")
    if isinstance(names, list) and names[:1] == ["base"]:
        return answers, None
    has_base = [isinstance(value.get("base"), str) for value, _ in rows]
    if not any(has_base):
        return None, answers
    if not all(has_base):
        value, where = rows[has_base.index(False)]
        raise _fault(where, "base", value, "a text in every row, or in none")
    # The row's loss is that of the first answer.
    base = tuple(
        replace(
            answer,
            answer=value["base"],
            option_logits=_option_logits(value, "base_option_logits", where),
            loss=None,
        )
        for answer, (value, where) in zip(answers.rows, rows, strict=True)
    )
    return AnswerFile(str(file), base), answers


def settings_beside(file: Path) -> dict[str, Any]:
    """predictions.json beside predictions.jsonl; {} = there is none, or it is another program's."""
    try:
        return read_json(file.with_suffix(".json"), "predictions.json", _REMEDY)
    except UserError:
        return {}


def missing_answers(file: Path) -> int:
    """Rows that mode=predict or mode=eval have yet to answer; 0 for files of other programs."""
    count = settings_beside(file).get("count")
    if not isinstance(count, int):
        return 0
    # An unfinished last line is no answer.
    return max(0, count - file.read_bytes().count(b"\n")) if file.is_file() else count


def holds_answers(path: Path) -> bool:
    """Whether a directory holds answers; mode=predict that has just begun has none yet."""
    file = path / ADAPTER_FILE
    if not file.is_file():
        return (path / BASE_FILE).is_file()
    count = settings_beside(file).get("count")
    return not isinstance(count, int) or missing_answers(file) < count


def adapter_mark(adapter: Path) -> str | None:
    """Changes when the adapter in a directory is written again; None = there is none."""
    try:
        state = (adapter / _WEIGHTS).stat()
    except OSError:
        return None
    return f"{state.st_size} bytes of {state.st_mtime_ns}"


def of_present_adapter(file: Path, adapter: Path) -> bool:
    """Whether the adapter that answered is still the one on disk; true where nothing is known of it.

    Args:
        file: of the answers.
        adapter: directory of the run's adapter; counts if the one that the file names is gone.
    """
    settings = settings_beside(file)
    mark, own = settings.get("adapter_file"), settings.get("adapter")
    if not isinstance(mark, str):
        return True  # another program's, or the base model's
    current = adapter_mark(Path(own)) if isinstance(own, str) else None
    return mark == (current or adapter_mark(adapter))


def check_complete(path: Path) -> None:
    """Raises UserError when the answers in a file or directory stopped in the middle."""
    file = path / ADAPTER_FILE if path.is_dir() else path
    missing = missing_answers(file)
    if missing:
        raise UserError(
            "not all rows have been answered: scores of a part would pass for scores of the whole",
            where=str(file),
            observed=f"{missing} of {settings_beside(file)['count']} rows without an answer",
            remedy="start mode=predict again with the same settings (it continues where it stopped), or "
            "mode=eval with generate.adapter, which does so itself",
        )


def read_answers(file: Path) -> AnswerFile:
    """The (first) answers of a file, in the order of their ids if all rows have one.

    Raises:
        UserError: the file cannot be read, is empty, or a line is not as described above; with its number.
    """
    return AnswerFile(str(file), tuple(_row(value, where) for value, where in _rows(file)))


def _rows(file: Path) -> list[tuple[dict[str, Any], str]]:
    """JSON objects with file and line."""
    # A disk that is full, or a process that is killed, leaves the last line of mode=predict unfinished.
    ours = isinstance(settings_beside(file).get("count"), int)
    text = read_text(file, "the predictions file", _REMEDY, whole_lines=ours)
    rows = [
        (_object(line, f"{file}:{number}"), f"{file}:{number}")
        for number, line in enumerate(text.split("\n"), 1)  # splitlines would cut at U+2028 inside a text
        if line.strip()
    ]
    if not rows:
        raise UserError("the predictions file has no rows", where=str(file), remedy=_REMEDY)
    if all(isinstance(value.get("id"), int) for value, _ in rows):
        rows.sort(key=lambda row: row[0]["id"])
        for (a, _), (b, where) in pairwise(rows):
            if a["id"] == b["id"]:
                raise _fault(where, "id", b, "an id of its own in every row")
    return rows


def check_same_questions(base: AnswerFile, adapter: AnswerFile) -> None:
    """Raises UserError unless both answer the same prompts with the same labels, in the same order."""
    where = f"{base.source} and {adapter.source}"
    if len(base.rows) != len(adapter.rows):
        raise UserError(
            "base and adapter answered different numbers of prompts, so they cannot be compared",
            where=where,
            observed=f"{len(base.rows)} and {len(adapter.rows)} rows",
            required="the same prompts in the same order",
            remedy="predict both from the same data with the same limit",
        )
    for number, (b, a) in enumerate(zip(base.rows, adapter.rows, strict=True), 1):
        for name, asked, other in (("prompt", b.prompt, a.prompt), ("label", b.label, a.label)):
            if asked != other:
                raise UserError(
                    f"base and adapter have another {name} in row {number}, so they cannot be compared",
                    where=where,
                    observed=f"{shortened(asked, _SHOWN)!r} and {shortened(other, _SHOWN)!r}",
                    required="the same prompts and labels in the same order",
                    remedy="predict both from the same data with the same chat template and seed",
                )


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value: Any = parse_json(line)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    raise UserError(
        "a line of the predictions is no JSON object",
        where=where,
        observed=shortened(line, _SHOWN),
        remedy="if this is the last line, mode=predict was stopped: start it again, it continues; else "
        + _REMEDY,
    )


def _row(value: dict[str, Any], where: str) -> AnswerRow:
    answer_key = "prediction" if "prediction" in value else "predict"
    for key in (answer_key, "label"):
        if not isinstance(value.get(key), str):
            raise _fault(where, key, value, "a text")
    return AnswerRow(
        prompt=_prompt(value, where),
        answer=value[answer_key],
        label=value["label"],
        option_logits=_option_logits(value, "option_logits", where),
        loss=_loss(value, where),
        failed=bool(value.get("error")),
        opened=isinstance(asked := value.get("prompt"), str) and opens_thought(asked),
    )


def _prompt(row: dict[str, Any], where: str) -> str:
    """A text as it is, messages one after the other with their roles."""
    value, turns = row.get("prompt", ""), row.get("messages")
    # Other programs' messages may hold the answer.
    if turns and _are_turns(turns) and turns[-1].get("role") != "assistant":
        value = turns
    if isinstance(value, str):
        return value
    if not _are_turns(value):
        raise _fault(where, "prompt", row, "a text or a list of messages")
    if len(value) == 1:
        return str(value[0]["content"])
    return "\n\n".join(f"{m.get('role', 'user')}: {m['content']}" for m in value)


def _are_turns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(m, dict) and "content" in m for m in value)


def _option_logits(value: dict[str, Any], key: str, where: str) -> dict[str, float]:
    logits = value.get(key) or {}
    if not isinstance(logits, dict) or not all(_is_number(v) for v in logits.values()):
        raise _fault(where, key, value, "an object of option letters and numbers")
    return {str(letter): float(logit) for letter, logit in logits.items()}


def _loss(value: dict[str, Any], where: str) -> LossSum | None:
    nats: Any = value.get("loss_nats")
    tokens = value.get("loss_tokens")
    if nats is None and tokens is None:
        return None
    if not _is_number(nats):
        raise _fault(where, "loss_nats", value, "a number beside loss_tokens")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0:
        raise _fault(where, "loss_tokens", value, "a whole number beside loss_nats")
    return LossSum(float(nats), tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _fault(where: str, key: str, row: dict[str, Any], required: str) -> UserError:
    return UserError(
        f"a line of the predictions has no usable {key}",
        where=where,
        observed=shortened(repr(row[key]), _SHOWN) if key in row else f"no {key}",
        required=required,
        remedy=_REMEDY,
    )
