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
from kt_ray.data import Pair, Row, Wave, eval_waves, load_data
from kt_ray.evaluate.loss_sums import LOSSES_FILE, LossSum, losses_file, sums
from kt_ray.runs.generation import Setup
from kt_ray.modes.predict import adapter_file, experts_stored, who
from kt_ray.disk import write_atomic
from kt_ray.train.cluster_protocol import Cluster


@dataclass(frozen=True)
class HeldOut:
    """Rows to measure the loss over, and what is known of it.

    Attributes:
        file: losses.json.
        settings: what the losses depend on.
        waves: the passes. known: "base" or "adapter" -> measured before.
    """

    made: Setup
    file: Path
    settings: dict[str, Any]
    waves: list[Wave]
    known: dict[str, LossSum]

    @property
    def sides(self) -> list[str]:
        """Those asked for."""
        return ["adapter" if on else "base" for on in who(self.made)]

    @property
    def left(self) -> list[str]:
        """Those asked for that are not known."""
        return [side for side in self.sides if side not in self.known]


def open_held_out(made: Setup, ids: Sequence[int], directory: Path) -> HeldOut:
    """The rows with these ids, and the losses that lie in a directory if they are of the same rows.

    Raises:
        UserError: any fault in files, rows, tokenizer or template.
    """
    config, data = made.config, made.config.data
    data = replace(data, packing=False)  # a row is a row here
    every = config.generate.split == "all"
    if every:
        data = replace(data, eval_fraction=0.0, eval_path=None)
    bundle = load_data(replace(config, data=data), made.model_dir, config.seed)
    wanted = set(ids)
    # Of pairs the better answer (pair n holds the rows 2n and 2n + 1); of verdicts the wanted ones.
    answers = [
        replace(unit.chosen, sample_id=unit.chosen.sample_id // 2) if isinstance(unit, Pair) else unit
        for unit in (bundle.train if every else bundle.eval)
    ]
    rows = [row for row in answers if row.sample_id in wanted and row.sign >= 0]
    settings = {
        "model": made.fingerprint,
        "adapter": made.adapter if True in who(made) else None,
        "adapter_file": adapter_file(made),
        "backend": experts_stored(made),
        "rows": _digest(rows),
    }
    plan, trainer = made.plan, config.trainer
    waves = eval_waves(
        rows,
        trainer.batch_size,
        trainer.micro_batch_size,
        plan.replicas,
        plan.groups,
        bundle.pad_id,
        largest=plan.wave,
        multiple=data.pad_to_multiple_of,
    )
    file = directory / LOSSES_FILE
    return HeldOut(made, file, settings, waves, _known(file, settings))


def measure(held_out: HeldOut, side: str, cluster: Cluster, numbers: count[int]) -> LossSum:
    """The loss of the model as the cluster now holds it; kept in the file as that of a side.

    Args:
        numbers: of passes, in one cluster never the same twice.
    """
    total = LossSum()
    for waves in held_out.waves:
        tokens = trained_tokens(waves)
        spec = PassSpec(
            number=next(numbers),
            step=0,
            kind="eval",
            seed=held_out.made.config.seed,
            wave=waves,
            loss_tokens=tokens,
        )
        total += LossSum(cluster.run_pass(spec).loss * tokens, tokens)
    held_out.known[side] = total
    known = {name: asdict(loss) for name, loss in held_out.known.items()}
    write_atomic(held_out.file, json.dumps({"settings": held_out.settings, **known}, indent=1) + "\n")
    return total


def _known(file: Path, settings: dict[str, Any]) -> dict[str, LossSum]:
    content = losses_file(file)
    return sums(content) if content.get("settings") == settings else {}


def _digest(rows: Sequence[Row]) -> str:
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.sample_id} {len(row.input_ids)} ".encode())
        digest.update(row.input_ids.tobytes())
        digest.update(row.labels.tobytes())
    return digest.hexdigest()
