"""mode=preview: what the model would be trained on, without loading the model."""

from __future__ import annotations

import sys

from kt_ray.config.schema import Config
from kt_ray.data import load_data, preview_rows, print_preview
from kt_ray.demo import resolve_model_dir


def run(config: Config) -> int:
    """Print trainer.preview (or 3) training rows, trained tokens marked, and the truncation report."""
    from rich.console import Console

    # With a tokenizer named, the checkpoint itself need not be here yet.
    model = config.model
    named = model.tokenizer if model.path is None and model.build is None else None
    bundle = load_data(config, named or resolve_model_dir(model), config.seed)
    console = Console(file=sys.stdout)
    print_preview(preview_rows(bundle.train, bundle.tokenizer, config.trainer.preview or 3), console)
    for line in bundle.report.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0
