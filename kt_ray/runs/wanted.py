"""Whether mode=eval is to generate answers, or to look at those that there are. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kt_ray.config.checks import check
from kt_ray.config.schema import Config
from kt_ray.evaluate.predictions import ADAPTER_FILE, BASE_FILE, missing_answers, of_present_adapter


def to_answer(config: Config) -> Config | None:
    """The configuration to answer under; None = mode=eval is to look at answers that there are.

    Asked for are new answers by generate.adapter, by generate.answer=base, or by the name of a run that has
    an adapter but no answers, not all of them, or those of an adapter that was there before.

    Raises:
        UserError: there are no held-out rows.
    """
    generate = config.generate
    if config.eval.adapter or config.eval.base:
        return None
    if generate.adapter is None and generate.answer != "base":
        if not config.run.name:
            return None
        run = Path(config.run.root) / config.run.name
        files = [run / name for name in (ADAPTER_FILE, BASE_FILE)]
        answered = any(
            file.is_file() and not missing_answers(file) and of_present_adapter(file, run / "adapter")
            for file in files
        )
        if answered or not (run / "adapter" / "adapter_config.json").is_file():
            return None
        generate = replace(generate, adapter=str(run))
    if generate.answer == "auto":
        generate = replace(generate, answer="both")
    config = replace(config, mode="predict", generate=generate)
    check(config)
    return replace(config, mode="eval")
