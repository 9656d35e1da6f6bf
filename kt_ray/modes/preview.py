"""mode=preview: what the model would be trained on, without loading the model."""

from __future__ import annotations

import sys

from kt_ray.config.schema import Config
from kt_ray.data import load_data, preview_pairs, preview_rows, print_preview
from kt_ray.data.types import KINDS
from kt_ray.demo import resolve_model_dir
from kt_ray.placement.packing import check_packing_family


def run(config: Config) -> int:
    """Print trainer.preview (or 3) training rows, trained tokens marked, their origin and the report.

    Rows of every kind are shown: answers, raw text, preference pairs and verdicts.
    """
    from rich.console import Console

    # With a tokenizer named, the checkpoint itself need not be here yet.
    model = config.model
    named = model.tokenizer if model.path is None and model.build is None else None
    directory = named or resolve_model_dir(model)
    if config.data.packing:
        check_packing_family(directory)
    bundle = load_data(config, directory, config.seed, KINDS)
    console = Console(file=sys.stdout)
    shown = config.trainer.preview or 3
    if bundle.kind == "pairs":
        print_preview(preview_pairs(bundle.train_pairs, bundle.tokenizer, shown), console)
    else:
        print_preview(preview_rows(bundle.train, bundle.tokenizer, shown), console)
    for line in (*bundle.report.origin(), *bundle.report.lines()):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
