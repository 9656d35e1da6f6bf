"""Loss over held-out rows, base model and adapter, measured on a running cluster and kept as losses.json.

    {"settings": {…}, "base": {"nats": 1234.5, "tokens": 678}, "adapter": {…}}

The rows are cut and padded as in training, so the figures are those of its held-out loss.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from kt_ray.batch import PassSpec, trained_tokens
from kt_ray.checkpoint.safetensors_file import writing
from kt_ray.data import Pair, Row, Wave, eval_waves, load_data
from kt_ray.disk import write_atomic
from kt_ray.evaluate.loss_sums import LOSSES_FILE, LossSum, losses_file, sums
from kt_ray.runs.answering import SPACE, completed, model_settings, sides
from kt_ray.runs.generation import PreparedGeneration
from kt_ray.train.cluster_protocol import Cluster


@dataclass(frozen=True)
class HeldOut:
    """Rows to measure the loss over, and the losses measured so far."""

    generation: PreparedGeneration
    file: Path  # losses.json
    settings: dict[str, Any]  # what the losses depend on
    waves: list[Wave]  # the passes
    losses: dict[str, LossSum]  # "base" or "adapter" -> measured before

    @property
    def remaining(self) -> list[str]:
        """The sides that were asked for and have no loss yet."""
        return [side for side in sides(self.generation) if side not in self.losses]


def open_held_out(generation: PreparedGeneration, ids: Sequence[int], directory: Path) -> HeldOut:
    """The rows with these ids, and the losses in a directory if they are of the same rows and model.

    Raises:
        UserError: any fault in files, rows, tokenizer or template.
    """
    config, data = generation.config, generation.config.data
    data = replace(data, packing=False)  # a row is a row here
    every = config.generate.split == "all"
    if every:
        data = replace(data, eval_fraction=0.0, eval_path=None)
    bundle = load_data(replace(config, data=data), generation.model_dir, config.seed)
    # Of pairs the better answer (pair n holds the rows 2n and 2n + 1); of verdicts the wanted ones.
    answers = [
        replace(unit.chosen, sample_id=unit.chosen.sample_id // 2) if isinstance(unit, Pair) else unit
        for unit in (bundle.train if every else bundle.eval)
    ]
    selected = set(ids)
    rows = [row for row in answers if row.sample_id in selected and row.sign >= 0]
    settings = {**model_settings(generation), "rows": _digest(rows)}
    plan, trainer = generation.plan, config.trainer
    # At auto each row by itself: padding moves some models, and speed counts less here.
    micro = trainer.micro_batch_size if isinstance(trainer.micro_batch_size, int) else 1
    sizes = (trainer.batch_size, micro, plan.replicas, plan.groups)
    multiple = data.pad_to_multiple_of
    batches = eval_waves(rows, *sizes, bundle.pad_id, largest=plan.wave, multiple=multiple)
    waves = [wave for waves in batches for wave in waves]
    file = directory / LOSSES_FILE
    content = losses_file(file)
    before = content.get("settings")
    same = isinstance(before, dict) and completed(before, settings) == settings
    losses = sums(content) if same else {}
    return HeldOut(generation, file, settings, waves, losses)


def measure(held_out: HeldOut, side: str, cluster: Cluster, numbers: count[int]) -> None:
    """Measure the loss of the model as the cluster now holds it, and keep it in the file under `side`.

    Args:
        numbers: of passes; a cluster never sees the same twice.

    Raises:
        UserError: the file cannot be written.
    """
    total = LossSum()
    for waves in held_out.waves:
        tokens = trained_tokens(waves)
        spec = PassSpec(
            number=next(numbers),
            step=0,
            kind="eval",
            seed=held_out.generation.config.seed,
            wave=waves,
            loss_tokens=tokens,
        )
        total += LossSum(cluster.run_pass(spec).loss * tokens, tokens)
    held_out.losses[side] = total
    losses = {name: asdict(loss) for name, loss in held_out.losses.items()}
    with writing("the losses", held_out.file, remedy=SPACE):
        write_atomic(held_out.file, json.dumps({"settings": held_out.settings, **losses}, indent=1) + "\n")


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.sample_id} {len(row.input_ids)} ".encode())
        digest.update(row.input_ids.tobytes())
        digest.update(row.labels.tobytes())
    return digest.hexdigest()
