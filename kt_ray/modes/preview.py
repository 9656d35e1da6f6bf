"""mode=preview: what the model would be trained on, without loading the model."""

from __future__ import annotations

import contextlib
import sys

from kt_ray.config.schema import Config
from kt_ray.data import DataBundle, load_data, preview_rows, print_preview
from kt_ray.data.row_types import KINDS
from kt_ray.demo import resolve_model_dir
from kt_ray.dims.packable import check_packing_family
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.modes.plan import as_adapter, model_dims
from kt_ray.placement.render import LAYOUT, counted, layout_line
from kt_ray.rewards.reward import load_reward
from kt_ray.runs.known_load import known_load, resumed_choice
from kt_ray.runs.plan_time import (
    duration,
    predicted_run,
    run_line,
    sampling,
    sampling_line,
    step_seconds,
)
from kt_ray.terminal import screen_console
from kt_ray.timing.choose import choose_plan


def run(config: Config) -> int:
    """Print trainer.preview (or 3) training rows, trained tokens marked, their origin and the report.

    Rows of every kind are shown: answers, raw text, preference pairs and verdicts.
    """

    # With a tokenizer named, the checkpoint itself need not be here yet.
    model = config.model
    named = model.tokenizer if model.path is None and model.build is None else None
    directory = named or resolve_model_dir(model)
    if config.data.packing:
        check_packing_family(directory)
    with contextlib.ExitStack() as stack:
        check = None
        if config.trainer.stage == "grpo" and config.reward is not None:
            check = stack.enter_context(contextlib.closing(load_reward(config.reward))).check_row
        bundle = load_data(config, directory, config.seed, KINDS, check=check)
    console = screen_console(file=sys.stdout)
    count = config.trainer.preview or 3
    print_preview(preview_rows(bundle.train, bundle.tokenizer, count), console)
    for line in (*bundle.report.origin(), *bundle.report.lines(), *run_lines(config, bundle)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def run_lines(config: Config, bundle: DataBundle) -> list[str]:
    """Where these rows would be trained, and how long that takes; mode=plan says more."""
    from kt_ray.runs.prepare import check_stage, step_batches  # loads torch

    lines: list[str] = []
    try:
        config = as_adapter(config)
        hardware = hardware_for(config)
        dims = model_dims(config.model)
        load = known_load(config, dims)
        plan = choose_plan(dims, config, hardware, load, before=resumed_choice(config))
        chosen = [note for note in plan.notes if note.startswith(LAYOUT)]
        lines += [f"rule {layout_line(plan)}; on {hardware.source}", *chosen]
        if not plan.fits:
            return [*lines, "this plan does not fit: mode=plan says by how much, and what would"]
        rates = rates_for(config, hardware)
        check_stage(config.trainer.stage, bundle)
        batches = step_batches(config, plan, bundle)
        prediction = predicted_run(config, plan, rates, batches.train(0))
        steps, sampled = batches.total_steps, None
        lines.append(run_line(prediction, rates))
        if batches.prompts is not None:
            sampled = sampling(config, plan, rates, batches.prompts(0))
            lines += [] if sampled is None else [sampling_line(config, sampled, prediction.simulated.seconds)]
        took = duration(steps * step_seconds(config, prediction, sampled))
        lines += [
            f"{counted(steps, 'step')} like the first: {took}, beside loading and held-out rows",
        ]
    except UserError as error:  # a preview needs neither the machine nor the model
        lines.append(f"{'no prediction' if lines else 'no plan'}: {error.line()}")
    return lines
