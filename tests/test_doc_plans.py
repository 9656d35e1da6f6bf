"""The predicted figures of docs/hardware.md and docs/families/*.md are what `mode=plan` says.

`python -m tests.test_doc_plans` writes them anew; with KT_RAY_TEST_DATA also those of released models that
conf/model has no option for, whose rows stay as they are without it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.modes.plan import model_dims
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import predict
from tests.helpers.composing import compose
from tests.helpers.exhaustive import spread

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "docs" / "hardware.md", *(ROOT / "docs" / "families").glob("*.md")])

SETTINGS = ("mode=plan", "data.max_length=512", "trainer.batch_size=16")
HARDWARE = {  # conf/hardware -> how the tables call it
    "1x4090_1x7950x": "1 × 4090, 192 GiB",
    "2x3090_1x7763": "2 × 3090, 512 GiB",
    "2x4090_2x8488c": "2 × 4090 48 GB, 2 TiB",
    "4x4090_2xSPR": "4 × 4090, 2 TiB",
    "8x5090_2x9355": "8 × 5090, 1.5 TiB",
    "laptop_16gb": "laptop, 16 GiB",
}
# rule.experts.backend -> its mark in a cell, in the order in which they are tried.
BACKENDS = {"auto": "", "AMXINT8": " int8", "AMXINT4": " int4"}
# <!-- plans: deepseek_v3 DeepSeek-V3.2.json -->: options of conf/model, files of model_configs/. The head of
# the table that follows names its columns, the machines.
TABLE = re.compile(
    r"(<!-- plans: ([^\n]*?) -->\n(\| model \|[^\n]*)\n\|[-|]*\n)(.*?)(<!-- end -->)", re.DOTALL
)


@cache
def cell(model: str, hardware: str) -> str:
    """tokens/s (GiB of the fullest GPU + GiB of host memory), by the first backend whose plan fits.

    A dash where none does, with what the experts as stored would need.
    """
    stored = ""
    for backend, mark in BACKENDS.items():
        option = model if not is_file(model) else "deepseek_v3"  # any: the sizes are the file's
        config = compose(
            [*SETTINGS, f"model={option}", f"plan.hardware={hardware}", f"rule.experts.backend={backend}"]
        )
        machine, dims = hardware_for(config), dims_of(model)
        if dims.refusal:
            return "refused"
        plan = choose_plan(dims, config, machine)
        gpu = max((b.total for b in plan.budgets if not b.is_socket), default=0) / 2**30
        host = sum(b.total for b in plan.budgets if b.is_socket) / 2**30
        memory = f"({gpu:.0f} + {host:,.0f})"
        if plan.fits:
            speed = float(f"{predict(plan, config, rates_for(config, machine)).tokens_per_s:.2g}")
            return f"**{speed:,.0f}**{mark} {memory}"
        stored = stored or f"– {memory}"
    return stored


@cache
def dims_of(model: str) -> ModelDims:
    if is_file(model):
        return dims_from_config(json.loads((data() / model).read_text()), Path(model).stem)
    return model_dims(compose([*SETTINGS, f"model={model}"]).model)


def label(model: str) -> str:
    """The option's name, or a file's without its ending."""
    return model.removesuffix(".json").removesuffix(".pre-release") if is_file(model) else f"`{model}`"


def is_file(model: str) -> bool:
    return model.endswith(".json")


def data() -> Path:
    return Path(os.environ.get("KT_RAY_TEST_DATA", "")) / "model_configs"


def known(model: str) -> bool:
    """Whether its dimensions are at hand."""
    return not is_file(model) or ("KT_RAY_TEST_DATA" in os.environ and (data() / model).is_file())


def renewed(text: str, wanted: Callable[[str, str], bool] = lambda model, machine: True) -> str:
    """The page with every wanted cell that can be made here made anew."""

    def table(match: re.Match[str]) -> str:
        columns = [name for name, title in HARDWARE.items() if f"| {title} |" in match[3]]
        rows = (line.removesuffix(" |").split(" | ") for line in match[4].splitlines())
        old = {head: dict(zip(columns, cells, strict=True)) for head, *cells in rows}

        def row(model: str) -> str:
            head = f"| {label(model)}"
            if not known(model):
                return " | ".join([head, *old[head].values()]) + " |" if head in old else ""
            stays = {name: cell for name, cell in old.get(head, {}).items() if not wanted(model, name)}
            return " | ".join([head, *(stays.get(name) or cell(model, name) for name in columns)]) + " |"

        return match[1] + "\n".join([*filter(None, map(row, match[2].split())), match[5]])

    return TABLE.sub(table, text)


@pytest.mark.timeout(900)  # minutes, more on a busy machine
@pytest.mark.parametrize("machine", spread([*HARDWARE]))
def test_the_figures_are_what_the_plan_says(machine: str) -> None:
    """All pages in one test: models stand on two of them, and are simulated once. Every eighth figure
    of two machines: a change of what plans count shows there. `main` makes all of them anew."""
    turns = itertools.count()

    def wanted(model: str, name: str) -> bool:
        return name == machine and next(turns) % 8 == 0

    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        planned = "model=" in text  # Qwen4-Exp has no option: its sizes are not known
        assert not planned or TABLE.search(text), f"{page.name}: no <!-- plans: ... --> table"
        assert text == renewed(text, wanted), f"{page.name}: run python -m tests.test_doc_plans"


def test_every_model_option_is_on_the_hardware_page_and_on_one_of_a_family() -> None:
    options = {p.stem for p in (ROOT / "conf" / "model").glob("*.yaml")} - {
        "custom",
        "demo",
        "demo_random",
        "mini",
    }

    def named(page: Path) -> set[str]:
        return {m for t in TABLE.finditer(page.read_text()) for m in t[2].split() if not is_file(m)}

    assert named(ROOT / "docs" / "hardware.md") == options
    families = [named(page) for page in PAGES if page.parent.name == "families"]
    assert set.union(*families) == options and sum(map(len, families)) == len(options)


def main() -> int:
    for page in PAGES:
        page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
