"""What a plan takes from the checkpoint that the configuration names: tokens per expert, earlier choices."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_ray.config.schema import MICRO_TOKENS, Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.errors import UserError
from kt_ray.parse import read_json
from kt_ray.placement.expert_load import FILE, ExpertLoad, read_load
from kt_ray.placement.lane_share import NOTHING, Tuning
from kt_ray.placement.plan_types import Choice
from kt_ray.runs.rundir import checkpoint_to_resume, find_checkpoints

logger = logging.getLogger(__name__)


def known_load(config: Config, dims: ModelDims) -> ExpertLoad | None:
    """What to place experts by: the load of rule.experts.load, else of the resumed checkpoint; None = none.

    Raises:
        UserError: rule.experts.load names no checkpoint with a histogram; a histogram that cannot be read or
            is another model's; as `checkpoint_to_resume`.
    """
    given = config.rule.experts.load
    if given is None:
        return resumed_load(config, dims)
    load = read_load(Path(given), dims)
    if load is None:
        of_run = find_checkpoints(Path(given))
        name = of_run[-1] if of_run else "<run directory>/checkpoints/step_..."
        raise UserError(
            "there is no histogram of tokens per expert",
            where=f"rule.experts.load={given}",
            observed=f"no {FILE}" if Path(given).is_dir() else "no such directory",
            required="a checkpoint directory that mode=train wrote",
            remedy=f"set rule.experts.load={name}, or rule.experts.load=null",
        )
    # How that run was placed says nothing about this one; how the resumed one was does.
    resumed = resumed_load(config, dims)
    if resumed is None:
        return replace(load, owners={}, residents=None)
    return replace(load, owners=resumed.owners, residents=resumed.residents)


def resumed_load(config: Config, dims: ModelDims) -> ExpertLoad | None:
    """The histogram that a resumed run goes on with; None = a new run, or the checkpoint has none."""
    checkpoint = checkpoint_to_resume(config)
    return read_load(checkpoint, dims) if checkpoint is not None else None


def _streams(plan: dict[str, Any]) -> bool:
    """Whether a plan.json has experts that are carried to GPUs."""
    lanes = [part.get("lane") for part in (*plan["workers"], *plan["experts"])]
    return any(lane and lane["shares"] for lane in lanes)


def _micro_batch(plan: dict[str, Any], config: Config) -> tuple[int, int | None]:
    """Rows of a micro-batch in a plan.json (0 = it does not say), and positions that they share."""
    if "micro_batch_rows" in plan:
        positions = plan["micro_batch_tokens"]
        return int(plan["micro_batch_rows"]), None if positions is None else int(positions)
    if not config.packs_micro_batches:
        return 0, None
    # Plans of earlier versions: as many rows of data.max_length as 512 tokens hold, two for each replica.
    fair = config.trainer.batch_size // (2 * int(plan["replicas"]))
    rows = max(1, min(MICRO_TOKENS // config.data.max_length, fair))
    return rows, rows * config.data.widest_row


def resumed_choice(config: Config) -> Choice | None:
    """Layout, groups, waves and activations of the resumed run, from its plan.json.

    Returns:
        None for a new run, or where no plan.json can be read (a warning).

    Raises:
        UserError: as `checkpoint_to_resume`.
    """
    checkpoint = checkpoint_to_resume(config)
    if checkpoint is None:
        return None
    file = checkpoint.parent.parent / "plan.json"
    try:
        plan = read_json(file, "plan.json", "")
        rows, positions = _micro_batch(plan, config)
        return Choice(
            stages=int(plan["stages"]),
            replicas=int(plan["replicas"]),
            groups=int(plan["groups"]),
            wave=int(plan["wave"]),
            activations=str(plan["experts"][0]["activations"]),
            attention=str(plan.get("activations", "group")),  # plans of earlier versions have no such key
            output=str(plan.get("attention_output", "recompute")),
            ranges=int(plan.get("head_ranges", 0)),
            seconds=0.0,
            copies=int(plan.get("copies", 1)),
            hosts=int(plan.get("attention_hosts", 1)),
            tuning=Tuning(*plan.get("tuning", ())) if _streams(plan) else NOTHING,
            stream_to=str(plan.get("stream_to", "actors")),
            micro_batch_tokens=positions,
            micro_batch_rows=rows,
            resident=None if plan.get("resident") is None else int(plan["resident"]),
        )
    except (UserError, ValueError, LookupError, TypeError, OverflowError):
        found = "is no plan of a run" if file.is_file() else "is not there"
        logger.warning(
            "%s %s: layout, groups and waves of the run that is resumed are chosen anew, and where they are "
            "others, sums are rounded otherwise",
            file,
            found,
        )
        return None
