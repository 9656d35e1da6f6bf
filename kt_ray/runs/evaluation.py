"""What answers are worth: read, scored, compared, and shown as tables. Imports no torch.

`kt_ray.runs.before_after` makes the answers that mode=eval does not find.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kt_ray.config.checks import check
from kt_ray.config.fields import show as show_value
from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.evaluate.answer_file import (
    ADAPTER_FILE,
    BASE_FILE,
    AnswerFile,
    AnswerRow,
    check_complete,
    check_same_questions,
    find_answers,
    missing_answers,
    of_present_adapter,
    settings_beside,
)
from kt_ray.evaluate.choice import label_letter
from kt_ray.evaluate.loss_sums import loss_figures, read_losses
from kt_ray.evaluate.scores import score
from kt_ray.evaluate.table import Comparison, compare
from kt_ray.runs.rundir import plain, settings_of
from kt_ray.terminal import shortened
from kt_ray.tracking import MultiTracker, library_trackers, read_jsonl, series

JSON_FILE, MARKDOWN_FILE = "eval.json", "eval.md"
_OPTIONS = "ABCDEFGHIJ"  # that a data set may have
# Keys of `generate` that change no answer.
_SPEED = ("batch_size", "prefill_tokens", "cache_tokens")


def to_answer(config: Config) -> Config | None:
    """The configuration to answer under; None = mode=eval evaluates answers that exist.

    New answers are asked for by generate.adapter, by generate.answer=base, or by the name of a run that has
    an adapter and no answers, not all of them, those of an earlier adapter, or others than are asked for.

    Raises:
        UserError: there are no held-out rows, or no adapter for the answers that are asked for.
    """
    generate = config.generate
    if config.eval.adapter or config.eval.base:
        return None
    if generate.adapter is None and generate.answer != "base":
        if not config.run.name:
            return None
        run = Path(config.run.root) / config.run.name
        files = [file for file in (run / ADAPTER_FILE, run / BASE_FILE) if file.is_file()]
        asked = {file: _asked_otherwise(config, file) for file in files}
        answered = any(
            not missing_answers(file) and of_present_adapter(file, run / "adapter") and not asked[file]
            for file in files
        )
        if answered:
            return None
        if not (run / "adapter" / "adapter_config.json").is_file():
            keys = next(filter(None, asked.values()), [])
            if not keys:
                return None
            raise UserError(
                "the answers in this run were made with other settings, and it has no adapter to ask again",
                where=str(run),
                observed=f"no adapter/adapter_config.json; {', '.join(keys)}",
                required="an adapter, or the settings that the answers were made with",
                remedy="name the adapter (generate.adapter=DIR), or leave these keys out to evaluate the "
                "answers that are there",
            )
        generate = replace(generate, adapter=str(run))
    if generate.answer == "auto":
        generate = replace(generate, answer="both")
    config = replace(config, mode="predict", generate=generate)
    check(config)
    return replace(config, mode="eval")


def _asked_otherwise(config: Config, file: Path) -> list[str]:
    """KEY=VALUE of `generate` that resume=RUN changes to what the answers in a file were not made with."""
    made, run = settings_beside(file), settings_of(file.parent)
    if config.trainer.resume is None or not isinstance(made.get("count"), int):
        return []  # what was given cannot be told from defaults, or nothing is known of the answers
    made["limit"] = made["count"]
    return [
        f"generate.{name}={show_value(value)}"
        for name, value in vars(config.generate).items()
        if name not in _SPEED and value != run.get(f"generate.{name}", value) and value != made.get(name)
    ]


def existing_answers(config: Config) -> tuple[AnswerFile | None, AnswerFile | None, Path]:
    """The base's and the adapter's answers that `eval` and `run.name` name, and their directory.

    Raises:
        UserError: none are named, not all rows are answered, or a file cannot be read.
    """
    settings = config.eval
    base: AnswerFile | None = None
    adapter: AnswerFile | None = None
    if settings.adapter:
        base, adapter = find_answers(Path(settings.adapter))
        if adapter is None:
            raise UserError(
                "eval.adapter names answers of the base model",
                where=settings.adapter,
                required="answers given with the adapter",
                remedy=f"set eval.base={settings.adapter} instead",
            )
    elif config.run.name and not settings.base:
        base, adapter = find_answers(Path(config.run.root) / config.run.name)
    if settings.base:
        # The key says whose answers they are where the file does not.
        of_base, unmarked = find_answers(Path(settings.base))
        base = of_base or unmarked
    either = adapter or base
    if either is None:
        raise UserError(
            "mode=eval does not know which predictions to look at",
            observed="generate.adapter=null, eval.adapter=null, eval.base=null, run.name=null",
            required="an adapter to make them with, a predictions.jsonl, or a run that holds one of them",
            remedy="set generate.adapter=<run or adapter directory>, run.name=<run>, or eval.adapter=<file "
            "or run directory>",
        )
    for answers in (base, adapter):
        if answers is not None:
            check_complete(Path(answers.source))
    return base, adapter, Path(either.source).parent


def evaluate(
    config: Config,
    base: AnswerFile | None,
    adapter: AnswerFile | None,
    home: Path,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """Score and compare answers.

    Args:
        config: its `eval` part counts.
        base, adapter: at least one of them.
        home: directory that may hold losses.
        notes: printed under the table.

    Raises:
        UserError: the two do not answer the same questions.
    """
    if base is not None and adapter is not None:
        check_same_questions(base, adapter)
    # The loss of a side without answers would suggest that it had been asked.
    answered = {"base": base is not None, "adapter": adapter is not None}
    measured, source = _losses(home)
    losses = {side: figures for side, figures in measured.items() if answered[side]}
    if losses:
        notes = (source, *notes)
    failed = max(sum(row.failed for row in side.rows) for side in (base, adapter) if side is not None)
    if failed:
        notes += (
            f"answers to {failed} of the rows ended with an error and count as far as they came: "
            "start mode=predict or mode=eval with generate.adapter again to ask them once more",
        )
    rows = next(side.rows for side in (adapter, base) if side is not None)
    if config.eval.choice == "auto" and (more := _more_letters(rows, config.eval.letters)):
        notes += (
            f"every label is an option's letter, but not all are in eval.letters={config.eval.letters}: "
            f"letter accuracy is left out, eval.letters={more} measures it",
        )
    if unlabelled := sum(not row.label.strip() for row in rows):
        notes += (
            f"{unlabelled} of the rows have no label to compare answers with, and score nothing: the column "
            "`answer` of a prompt, or the key `label` of a file of answers, says what is right",
        )

    scores = [
        None if side is None else score(side, choice=config.eval.choice, letters=config.eval.letters)
        for side in (base, adapter)
    ]
    return compare(*scores, samples=config.eval.samples, losses=losses, notes=notes)


def _more_letters(rows: Sequence[AnswerRow], letters: str) -> str:
    """What eval.letters would have to be, where all labels are options and some none of it; "" = not so."""
    found = [label_letter(row.label, _OPTIONS) or "" for row in rows]
    return "" if "" in found or {*found} <= {*letters} else _OPTIONS[: _OPTIONS.index(max(found)) + 1]


def write(result: Comparison, directory: Path) -> None:
    """eval.json and eval.md into a directory, made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(plain(result.to_dict()), ensure_ascii=False, indent=1) + "\n"
        write_atomic(directory / JSON_FILE, text)
        write_atomic(directory / MARKDOWN_FILE, result.markdown())
    except OSError as error:
        raise UserError(
            "the evaluation cannot be written",
            where=str(directory),
            observed=error.strerror or str(error),
            remedy="set eval.out to a directory that you may write to",
        ) from error


def show(result: Comparison, screen: Console) -> None:
    """The table and the samples on a terminal."""
    table = Table(title=f"{result.rows} rows", title_justify="left")
    for number, column in enumerate(result.columns()):
        table.add_column(column, justify="right" if number else "left")
    for line, cells in zip(result.lines, result.cells(), strict=True):
        colour = {True: "green", False: "red", None: ""}[line.improved]
        if colour and len(cells) == 4:
            cells = [*cells[:-1], f"[{colour}]{cells[-1]}[/{colour}]"]
        table.add_row(*cells)
    screen.print(table)
    for note in result.notes:
        screen.print(note, markup=False)
    for sample in result.samples:
        grid = Table.grid(padding=(0, 2))
        texts = (sample.prompt, sample.label, sample.base, sample.adapter)
        for name, text in zip(("prompt", "label", "base", "adapter"), texts, strict=True):
            if text is not None:
                grid.add_row(name, Text(shortened(text, 300)))
        screen.print(f"\n[bold]row {sample.row}[/bold]")
        screen.print(grid)


def to_trackers(config: Config, result: Comparison, home: Path) -> None:
    """The tables to the trackers of tracking.name, into the run that they have (a new one, if none)."""
    tracker = MultiTracker(library_trackers(config.tracking))
    tracker.start(home, {"eval": plain(config.eval)})
    for name, (columns, rows) in result.tables().items():
        tracker.table(name, columns, rows)
    tracker.finish("finished")


def _losses(home: Path) -> tuple[dict[str, dict[str, float]], str]:
    """Loss and perplexity by side, and their source: losses.json, else the run's own figures."""
    measured = {side: total for side, total in read_losses(home).items() if total.tokens}
    if measured:
        figures = {side: loss_figures(total.loss) for side, total in measured.items()}
        tokens = max(total.tokens for total in measured.values())
        return figures, f"loss and perplexity are over the rows' {tokens} answer tokens"
    note = "loss and perplexity are the run's own held-out ones (metrics.jsonl), over its eval split"
    return losses_of_run(home), note


def losses_of_run(directory: Path) -> dict[str, dict[str, float]]:
    """The run's held-out loss of the base (before the first step), and at its adapter's step; {} = no run."""
    config = settings_of(directory)
    if not config or config.get("trainer.stage", "sft") not in ("sft", "pt"):
        return {}  # a preference loss is not in nats per token
    records = read_jsonl(directory / "metrics.jsonl")
    evaluated = dict(series(records, "eval_loss"))
    step = next((r["step"] for r in reversed(records) if isinstance(r.get("step"), int)), None)
    if config.get("trainer.save_best"):
        from kt_ray.checkpoint.housekeeping import best_step  # its package imports torch

        step = best_step(directory / "checkpoints")
    # LoRA begins without effect: before the first step the model is the base, but for a run from an adapter.
    by_side = {"base": None if config.get("lora.adapter") else 0, "adapter": step or None}
    losses = {side: evaluated[at] for side, at in by_side.items() if at in evaluated}
    return {side: loss_figures(loss) for side, loss in losses.items()}
