"""The predicted figures of docs/hardware.md and docs/families/*.md are what `mode=plan` says.

`python -m tests.test_doc_plans` writes them anew; with KT_RAY_TEST_DATA also those of released models that
conf/model has no option for, whose rows stay as they are without it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from kt_ray.config.compose import compose
from kt_ray.dims.config_json import dims_from_config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import hardware_for
from kt_ray.hardware.rate_files import rates_for
from kt_ray.modes.plan import model_dims
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import predict

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "docs" / "hardware.md", *(ROOT / "docs" / "families").glob("*.md")])

SETTINGS = ("mode=plan", "data.max_length=512", "trainer.batch_size=16")
HARDWARE = {  # conf/hardware -> how the tables call it
    "1x4090_1x7950x": "1 × 4090, 192 GiB",
    "2x3090_1x7763": "2 × 3090, 512 GiB",
    "2x4090_2x8488c": "2 × 4090 48 GB, 2 TiB",
    "4x4090_2xSPR": "4 × 4090, 2 TiB",
    "8x5090_2x9355": "8 × 5090, 1.5 TiB",
}
# <!-- plans: deepseek_v3 DeepSeek-V3.2.json -->: options of conf/model, files of model_configs/.
TABLE = re.compile(r"(<!-- plans: ([^\n]*?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
HEAD = "| model | " + " | ".join(HARDWARE.values()) + " |\n" + "|---" * (1 + len(HARDWARE)) + "|"


@cache
def row(model: str) -> str:
    """A line of a table: what each machine makes of a model."""
    return f"| {label(model)} | " + " | ".join(cell(model, hardware) for hardware in HARDWARE) + " |"


def cell(model: str, hardware: str) -> str:
    """tokens/s (GiB of the fullest GPU + GiB of host memory), or a dash for what does not fit."""
    option = model if not is_file(model) else "deepseek_v3"  # any: the sizes are the file's
    config = compose([*SETTINGS, f"model={option}", f"plan.hardware={hardware}"])
    machine, dims = hardware_for(config), dims_of(model)
    if dims.refusal:
        return "refused"
    plan = choose_plan(dims, config, machine)
    gpu = max(b.total for b in plan.budgets if not b.is_socket) / 2**30
    host = sum(b.total for b in plan.budgets if b.is_socket) / 2**30
    memory = f"({gpu:.0f} + {host:,.0f})"
    if not plan.fits:
        return f"– {memory}"
    speed = float(f"{predict(plan, config, rates_for(config, machine)).tokens_per_s:.2g}")
    return f"**{speed:,.0f}** {memory}"


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


def renewed(text: str) -> str:
    """The page with every row that can be made here made anew."""

    def table(match: re.Match[str]) -> str:
        models = match[2].split()
        old = {line.split(" | ")[0]: line for line in match[3].splitlines()}
        rows = [row(m) if known(m) else old.get(f"| {label(m)}", "") for m in models]
        return match[1] + "\n".join([HEAD, *filter(None, rows), match[4]])

    return TABLE.sub(table, text)


@pytest.mark.timeout(900)  # seconds each, but on a busy machine
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_figures_are_what_the_plan_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert TABLE.search(text), "no <!-- plans: ... --> table"
    assert text == renewed(text), "run python -m tests.test_doc_plans"


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
