"""conf/experiment: what was written for a described machine still fits it."""

from __future__ import annotations

import re

import pytest

from kt_ray.config.compose import compose
from kt_ray.config.files import conf_dir, option_names
from kt_ray.hardware.rate_files import rates_for
from kt_ray.timing.prediction import predict
from kt_ray.tools.experiments import find, machines, main, models, plan_of, render

WRITTEN = [
    (name, model, machine)
    for model in models()
    for machine in machines()
    if (name := f"{model}_{machine}") in option_names("experiment")
]


def text(name: str) -> str:
    return (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")


def test_each_family_has_experiments() -> None:
    assert {model for _, model, _ in WRITTEN} == set(models())
    assert {machine for _, _, machine in WRITTEN} == set(machines())


@pytest.mark.parametrize(("name", "model", "machine"), WRITTEN, ids=[name for name, _, _ in WRITTEN])
def test_it_still_fits_and_is_as_fast_as_it_says(name: str, model: str, machine: str) -> None:
    config = compose([f"experiment={name}", "mode=plan", f"plan.hardware={machine}"])
    plan = plan_of(config)
    assert config.model.name == model and plan.fits and not plan.dims.refusal
    said = float(re.search(r"not measured: ([\d,.]+) tokens/s", text(name))[1].replace(",", ""))  # type: ignore[index]
    now = predict(plan, config, rates_for(config, plan.hardware)).tokens_per_s
    assert now == pytest.approx(said, rel=0.1), "write it anew: python -m kt_ray.tools.experiments"


def test_the_tool_writes_what_is_there() -> None:
    found = find("olmoe", "laptop_16gb")
    assert found is not None
    assert render("olmoe", "laptop_16gb", *found) == text("olmoe_laptop_16gb")
    assert find("deepseek_v3", "laptop_16gb") is None


def test_unknown_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["olmo"]) == 2
    assert "no model olmo" in capsys.readouterr().err
