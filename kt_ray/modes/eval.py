"""mode=eval: metrics of predictions, base against adapter, as a table, Markdown, JSON and W&B tables.

Answers that are not there yet are generated first (kt_ray.runs.answering).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kt_ray.checkpoint.manifest import best_step
from kt_ray.config.schema import Config
from kt_ray.disk import write_atomic
from kt_ray.errors import UserError
from kt_ray.evaluate.loss_sums import perplexity, read_losses
from kt_ray.evaluate.predictions import Predictions, check_complete, check_same_questions, find_answers
from kt_ray.evaluate.scores import Scores, score
from kt_ray.evaluate.table import Comparison, compare
from kt_ray.runs.rundata import flatten
from kt_ray.runs.rundir import plain
from kt_ray.runs.wanted import to_answer
from kt_ray.tracking.jsonl import read_jsonl

JSON_FILE, MARKDOWN_FILE = "eval.json", "eval.md"


def run(config: Config) -> int:
    """Print the table and write eval.json and eval.md. Returns the exit code.

    Raises:
        UserError: no predictions and no adapter to make them with, two sets that do not answer the same
            prompts, or a fault in what answers are generated from.
    """
    notes: tuple[str, ...] = ()
    wanted = to_answer(config)
    if wanted is None:
        base, adapter, home = _answers(config)
    else:
        from kt_ray.runs.answering import answer  # torch, and all that generates

        answered = answer(wanted)
        home, notes = answered.directory, answered.notes
        base, adapter = find_answers(home)
    result = evaluate(config, base, adapter, home, notes)
    out = Path(config.eval.out) if config.eval.out else home
    write(result, out)
    show(result, Console(file=sys.stdout, highlight=False))
    print(f"written: {out / MARKDOWN_FILE}, {out / JSON_FILE}")
    if config.tracking.name == "wandb":
        to_wandb(config, result, home)
    return 0


def evaluate(
    config: Config,
    base: Predictions | None,
    adapter: Predictions | None,
    home: Path | None = None,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """The comparison of answers that are at hand, wherever they come from.

    Args:
        config: its `eval` part counts.
        base, adapter: at least one of them.
        home: where losses may have been kept; None = nowhere.
        notes: to be said under the table.
    """
    if base is not None and adapter is not None:
        check_same_questions(base, adapter)
    # The loss of a side that gave no answers would make it look as if it had been asked.
    asked = {"base": base is not None, "adapter": adapter is not None}
    found, source = _losses(home) if home is not None else ({}, "")
    losses = {side: figures for side, figures in found.items() if asked[side]}
    if losses:
        notes = (source, *notes)
    failed = max(sum(row.failed for row in side.rows) for side in (base, adapter) if side is not None)
    if failed:
        notes += (
            f"answers to {failed} of the rows ended with an error and count as far as they came: "
            "start mode=predict or mode=eval with generate.adapter again to ask them once more",
        )
    return compare(
        _scored(base, config),
        _scored(adapter, config),
        samples=config.eval.samples,
        losses=losses,
        notes=notes,
    )


def write(result: Comparison, directory: Path) -> None:
    """eval.json and eval.md into a directory, made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(
            directory / JSON_FILE, json.dumps(plain(result.to_dict()), ensure_ascii=False, indent=1) + "\n"
        )
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
                grid.add_row(name, Text(_short(text)))
        screen.print(f"\n[bold]row {sample.row}[/bold]")
        screen.print(grid)


def to_wandb(config: Config, result: Comparison, home: Path) -> None:
    """The tables into the run's W&B run (a new one, if it has none); trouble with W&B is a warning."""
    from kt_ray.tracking.wandb_tracker import WandbTracker

    tracker = WandbTracker(config.tracking)
    tracker.start(home, {"eval": plain(config.eval)})
    for name, (columns, rows) in result.wandb_tables().items():
        tracker.table(name, columns, rows)
    tracker.finish("finished")


def _answers(config: Config) -> tuple[Predictions | None, Predictions | None, Path]:
    """The base's and the adapter's answers as `eval` and `run.name` ask for them, and where they lie."""
    wanted = config.eval
    base: Predictions | None = None
    adapter: Predictions | None = None
    if wanted.adapter:
        base, adapter = find_answers(Path(wanted.adapter))
        if adapter is None:
            raise UserError(
                "eval.adapter names answers of the base model",
                where=wanted.adapter,
                required="answers given with the adapter",
                remedy=f"set eval.base={wanted.adapter} instead",
            )
    elif config.run.name and not wanted.base:
        base, adapter = find_answers(Path(config.run.root) / config.run.name)
    if wanted.base:
        # A file of answers that nothing else is known of is the base's, since it was named so.
        of_base, other = find_answers(Path(wanted.base))
        base = of_base or other
    known = adapter or base
    if known is None:
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
    return base, adapter, Path(known.source).parent


def _scored(predictions: Predictions | None, config: Config) -> tuple[Predictions, Scores] | None:
    if predictions is None:
        return None
    return predictions, score(predictions, choice=config.eval.choice, letters=config.eval.letters)


def _is_run(directory: Path) -> bool:
    return (directory / "config.yaml").is_file()


def _losses(home: Path) -> tuple[dict[str, dict[str, float]], str]:
    """Loss and perplexity by side, and where they come from: losses.json, else the run's own figures."""
    measured = {side: total for side, total in read_losses(home).items() if total.tokens}
    if measured:
        figures = {side: {"loss": s.loss, "perplexity": s.perplexity} for side, s in measured.items()}
        tokens = max(total.tokens for total in measured.values())
        return figures, f"loss and perplexity are over the rows' {tokens} answer tokens"
    note = "loss and perplexity are the run's own held-out ones (metrics.jsonl), over its eval split"
    return (_losses_of_run(home), note) if _is_run(home) else ({}, "")


def _losses_of_run(directory: Path) -> dict[str, dict[str, float]]:
    """The run's held-out loss before the first step (the base's), and that of its adapter's step."""
    config = flatten(yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8")))
    if config.get("trainer.stage", "sft") not in ("sft", "pt"):
        return {}  # a preference loss is not in nats per token
    records = [
        record for record in read_jsonl(directory / "metrics.jsonl") if isinstance(record.get("step"), int)
    ]
    found = [
        (record["step"], float(record["eval_loss"]))
        for record in records
        if isinstance(record.get("eval_loss"), int | float)
    ]
    losses: dict[str, dict[str, float]] = {}
    # LoRA begins without effect: before the first step the model is the base.
    step = records[-1]["step"] if records else None
    if config.get("trainer.save_best"):
        step = best_step(directory / "checkpoints")
    # Of steps repeated after a resume the last record counts.
    own = [point for point in found if point[0] == step][-1:]
    for side, steps in (("base", found[:1]), ("adapter", own)):
        for step, loss in steps:
            if (side == "base") == (step == 0):
                losses[side] = {"loss": loss, "perplexity": perplexity(loss)}
    return losses


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
