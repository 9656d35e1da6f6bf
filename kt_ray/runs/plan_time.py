"""The second half of mode=plan: how long a step takes, what limits it, what would help."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kt_ray.batch import MicroBatch
from kt_ray.config.interval import steps_of_epochs
from kt_ray.config.schema import Config
from kt_ray.data.held_out_split import as_split
from kt_ray.data.row_types import Row
from kt_ray.data.sources import count_rows, cuts_text, require_files
from kt_ray.errors import UserError
from kt_ray.hardware.rate_files import rates_for
from kt_ray.hardware.rates import Rates
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import choice_text, counted
from kt_ray.runs.disk_room import DiskNeed, disk_need, gigabytes, shortage, training_bytes
from kt_ray.runs.rundir import place_to_write, resumed_step
from kt_ray.terminal import shortened
from kt_ray.timing.prediction import Change, Prediction, neighbours, predict
from kt_ray.timing.sampling_seconds import SamplingTime, predict_sampling
from kt_ray.timing.simulate import Micro, WaveShape

_SOURCE = 70  # characters of a rate's source in the table


def run_rows(config: Config) -> int | str:
    """Training rows of an epoch, or why they are not known: planning downloads nothing, and the files may be
    on another machine.

    Raises:
        UserError: a file that is here cannot be read, or all rows would be held out.
    """
    try:
        require_files(config.data)
    except UserError as error:
        return f"{error.what} ({error.where})"
    rows = count_rows(as_split(config))
    return "rows on the hub are not counted" if rows is None else rows


def show_time(
    console: Console, config: Config, plan: Plan, rows: int | str, load: ExpertLoad | None
) -> Prediction:
    """Print the prediction for `plan`, rows as long as data.max_length allows.

    Args:
        rows: as `run_rows` counts them.
        load: tokens per expert that the plan was made with.
    """
    rates = rates_for(config, plan.hardware)
    prediction = predict(plan, config, rates)
    if len(plan.compared) > 1:
        console.print(_compared_table(plan))
    console.print(_table(prediction))
    for line in _summary(config, plan, prediction, rates, rows):
        console.print(line, markup=False, soft_wrap=True)
    # Last, since it plans and simulates anew: most of the seconds that mode=plan takes.
    changes = neighbours(plan, config, rates, prediction, config.data.max_length, load)
    for line in _changes(changes):
        console.print(line, markup=False, soft_wrap=True)
    return prediction


def predicted_run(config: Config, plan: Plan, rates: Rates, waves: Sequence[Sequence[Any]]) -> Prediction:
    """The prediction for the micro-batches that a run really takes.

    Args:
        waves: of one step, as `StepBatches.train` gives them.
    """
    shapes = tuple(_shape(wave) for wave in waves)
    micros = [m for wave in shapes for groups in wave for group in groups for m in group]
    rows, tokens = sum(m.rows for m in micros), sum(m.tokens for m in micros)
    text = f"the first step's {rows} rows, {tokens / max(1, rows):.0f} tokens each on average"
    return predict(plan, config, rates, shapes, rows=text)


def run_line(prediction: Prediction, rates: Rates) -> str:
    """One line about the run's own rows."""
    how = rates.source + (f", {rates.date}" if rates.date else "")
    if not prediction.measured:
        how += "; run mode=doctor to measure them"
    return (
        f"predicted {_figure(prediction.tokens_per_s)} tokens/s, {prediction.simulated.seconds:.3g} s per "
        f"step, limited by {prediction.bottleneck}; rates: {how}"
    )


def sampling(config: Config, plan: Plan, rates: Rates, prompts: Sequence[Row] = ()) -> SamplingTime | None:
    """A round of answers of trainer.stage=grpo, as long as they may get, or as many as a train server's
    samplers give at a time; None = neither.

    Args:
        prompts: of a step, whose mean length counts; () = prompts as long as data.max_length leaves.
    """
    tokens = sum(len(row.input_ids) for row in prompts)
    longest, size = config.generate.max_new_tokens, config.grpo.group_size
    if config.trainings:
        count, size = plan.replicas * config.serve.max_batch, 1
        longest = min(longest, config.data.max_length // 2)
    elif config.trainer.stage == "grpo":
        count = config.trainer.batch_size // size * config.grpo.steps_per_rollout
    else:
        return None
    return predict_sampling(
        plan,
        config,
        rates,
        prompts=count,
        group=size,
        prompt_tokens=math.ceil(tokens / len(prompts)) if prompts else config.data.max_length - longest,
        answer_tokens=longest,
    )


def sampling_line(config: Config, sampled: SamplingTime, step_seconds: float) -> str:
    """How sampling and training divide the time."""
    steps = config.grpo.steps_of_round
    share = sampled.seconds / (sampled.seconds + steps * step_seconds)
    every = "each step" if steps == 1 else f"every {steps} steps"
    return (
        f"sampling {_figure(sampled.tokens_per_s)} tokens/s, {sampled.seconds:.3g} s {every} "
        f"({sampled.prefill:.3g} s of it for prompts), {share:.0%} of the time; answers as long as they may "
        "get"
    )


def _server_lines(config: Config, plan: Plan, sampled: SamplingTime) -> Iterator[str]:
    """How fast a train server's samplers are, and what its trainings take on disk."""
    answers, most = config.serve.max_batch * plan.replicas, config.train_server.trainings
    prompt, answer = sampled.prompt_tokens // answers, sampled.answer_tokens // answers
    yield (
        f"sampling   {_figure(sampled.tokens_per_s)} tokens/s: {duration(sampled.seconds)} for "
        f"{counted(answers, 'answer')} of {answer} tokens at a time, of it {duration(sampled.prefill)} for "
        f"prompts of {prompt}, each another one"
    )
    each = training_bytes(plan.dims, config)
    yield (
        f"disk       up to {gigabytes(each)} for each training, {gigabytes(each * most)} for {most} "
        "(train_server.trainings)"
    )


def step_seconds(config: Config, prediction: Prediction, sampled: SamplingTime | None) -> float:
    """Of an optimizer step with its share of the sampling."""
    share = 0.0 if sampled is None else sampled.seconds / config.grpo.steps_of_round
    return prediction.simulated.seconds + share


def _shape(wave: Sequence[Sequence[Sequence[MicroBatch]]]) -> WaveShape:
    return tuple(tuple(tuple(map(_micro, group)) for group in groups) for groups in wave)


def _micro(mb: MicroBatch) -> Micro:
    rows, width = mb.input_ids.shape
    return Micro(rows, width, mb.tokens, mb.loss_tokens)


def titled_table(
    title: str,
    columns: Iterable[str],
    rows: Iterable[Iterable[str]],
    numbers: Container[int] = (),
) -> Table:
    """A table as mode=plan shows them.

    Args:
        numbers: columns that are aligned to the right.
    """
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i in numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _table(prediction: Prediction) -> Table:
    wall = prediction.simulated.seconds
    return titled_table(
        "Time of a step (each kind of work by itself; they overlap)",
        ("term", "seconds", "of the step", "rate"),
        (
            (
                term.name,
                f"{term.seconds:.3g}",
                f"{term.seconds / wall:.0%}",
                shortened(term.source, _SOURCE),
            )
            for term in prediction.terms
        ),
        numbers=(1, 2),
    )


def _compared_table(plan: Plan) -> Table:
    """Plans that were simulated, the chosen one first."""
    rows = [(choice_text(choice), f"{choice.seconds:.3g}") for choice in plan.compared]
    title = "Plans compared, as under Ray (the first is taken; another must be clearly faster)"
    table = titled_table(title, ("plan", "s per step"), rows, numbers=(1,))
    table.rows[0].style = "bold"
    return table


def _summary(config: Config, plan: Plan, prediction: Prediction, rates: Rates, rows: int | str) -> list[str]:
    simulated = prediction.simulated
    lines = [
        f"predicted  {_figure(prediction.tokens_per_s)} tokens/s: {simulated.seconds:.3g} s per step of "
        f"{prediction.tokens:,} tokens; {prediction.rows}",
        f"limited by {prediction.bottleneck}",
        f"loading    {duration(prediction.load_seconds)} at {rates.disk.value / 1e9:.2g} GB/s "
        f"({rates.disk.source})",
    ]
    sampled = sampling(config, plan, rates)
    if config.trainings and sampled is not None:
        lines += _server_lines(config, plan, sampled)
    else:
        if sampled is not None:
            lines.insert(1, sampling_line(config, sampled, simulated.seconds))
        of_step = step_seconds(config, prediction, sampled)
        taken = resumed_step(config)
        steps, line = _length(config, of_step, rows, taken)
        of_epoch = 1 if isinstance(rows, str) else _steps_per_epoch(config, rows)
        left = None if steps is None else max(0, steps - taken)
        lines += [line, *_disk(config, disk_need(plan.dims, config, left, of_step, of_epoch))]
    if prediction.measured:
        lines.append(f"rates      {rates.source}" + (f", {rates.date}" if rates.date else ""))
    else:
        lines.append(f"rates      {rates.source}; none was measured there (mode=doctor does that)")
    return lines + [f"note: {note}" for note in (*prediction.notes, *rates.notes)]


def _disk(config: Config, need: DiskNeed) -> list[str]:
    """What the run will write, and whether the disk has room for it."""
    fault = shortage(need, *place_to_write(config))
    lines = [f"disk       {need}"]
    if fault is not None and config.plan.hardware is None:  # the disk is this machine's
        lines.append(f"note: {fault.line()}")
    return lines


def _length(config: Config, of_step: float, rows: int | str, taken: int) -> tuple[int | None, str]:
    """Optimizer steps of the run, as far as they are known, and a line about the time of those to come."""
    trainer = config.trainer
    if trainer.max_steps is not None:
        left = max(0, trainer.max_steps - taken)
        of = f"{left} of " if taken else ""
        line = f"run        {duration(left * of_step)} for {of}{trainer.max_steps} steps (trainer.max_steps)"
        return trainer.max_steps, line
    if isinstance(rows, str):
        return None, f"run        length unknown: {rows}"
    steps = steps_of_epochs(trainer.epochs, _steps_per_epoch(config, rows))
    how, more = "at most", "shorter rows take less (mode=preview reads yours)"
    if cuts_text(config.data):
        how, more = "about", "raw text is cut into rows, which only mode=preview counts"
    left = max(0, steps - taken)
    rest = f", {left} of them left" if taken else ""
    return steps, (
        f"run        {how} {duration(left * of_step)} for {trainer.epochs:g} "
        f"{'epoch' if trainer.epochs == 1 else 'epochs'} of {rows:,} rows: {counted(steps, 'step')}{rest}; "
        f"{more}"
    )


def _steps_per_epoch(config: Config, rows: int) -> int:
    own, size, times = config.grpo, config.trainer.batch_size, 1
    if config.trainer.stage == "grpo":
        size, times = size // own.group_size, own.iterations
    return math.ceil(rows / size) * times


def _changes(changes: Sequence[Change]) -> list[str]:
    if not changes:
        return ["no other option that was tried is predicted to be faster by 2 % or more"]
    return [f"  faster with  {c.overrides}  ({c.gain:.2f} times the tokens/s; {c.effect})" for c in changes]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Seconds, minutes, hours or days, as reads best."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
