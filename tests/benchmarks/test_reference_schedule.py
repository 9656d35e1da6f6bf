"""The reference's schedule: terms add up, scale as they must, and published figures are named."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.reference_schedule import (
    UNEXPLAINED,
    ReferenceTerm,
    main,
    published_for,
    reference_seconds,
    reference_table,
    reference_terms,
)
from kt_ray.config.files import conf_dir
from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.describe import hardware_from_file
from kt_ray.hardware.machine import Hardware
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rates import Figure, Rates
from kt_ray.modes.plan import model_dims
from tests.helpers.composing import compose

XEON, EPYC = "2x4090_2x8488c", "8x5090_2x9355"


def setting(model: str, machine: str, rows: int = 16) -> tuple[ModelDims, Config, Hardware, Rates]:
    step = ("data.max_length=512", f"trainer.batch_size={rows}", "trainer.micro_batch_size=1")
    config = compose(["mode=plan", f"model={model}", *step])
    hardware = hardware_from_file(conf_dir() / f"hardware/{machine}.yaml")
    return model_dims(config.model), config, hardware, nominal_rates(hardware)


def by_name(terms: list[ReferenceTerm]) -> dict[str, ReferenceTerm]:
    assert len({t.name for t in terms}) == len(terms)
    return {t.name: t for t in terms}


@pytest.mark.parametrize(("model", "seconds"), [("deepseek_v3", 203.0), ("deepseek_v2_lite", 36.0)])
def test_the_published_step_is_terms_and_a_named_rest(model: str, seconds: float) -> None:
    terms = reference_terms(*setting(model, XEON))
    assert reference_seconds(terms) == pytest.approx(seconds, rel=0.01)
    named = by_name(terms)
    explained = sum(t.seconds for t in terms if t.counted and t.name != UNEXPLAINED)
    assert named[UNEXPLAINED].seconds == pytest.approx(seconds - explained, rel=0.01)
    # Most of the published step is not in any term: it must stand there, not be fitted away.
    assert named[UNEXPLAINED].seconds > 0.5 * seconds
    assert all(t.seconds >= 0 and t.source for t in terms)


def test_published_moe_rates_give_49_seconds_or_what_memory_allows() -> None:
    named = by_name(reference_terms(*setting("deepseek_v3", XEON)))
    slots = 8192 * 8 * 58 * 7168 * 2048
    assert named["experts, backward"].seconds == pytest.approx(10 * slots / 18.41e12)
    assert "18.41" in named["experts, backward"].source
    # Forward: 19.1 s of products, but 16 passes over the INT8 experts take longer at 80 % of the memory.
    assert named["experts, forward"].seconds > 6 * slots / 17.55e12
    assert "16 passes over 655 GB of int8" in named["experts, forward"].source


def test_a_step_without_publication_is_a_lower_bound() -> None:
    for model in ("qwen3_235b_a22b", "kimi_k2"):
        arguments = setting(model, XEON)
        terms = reference_terms(*arguments)
        assert UNEXPLAINED not in by_name(terms) and published_for(arguments[0], arguments[2]) is None
        title, rows, notes = reference_table(*arguments)
        assert "KTransformers" in title and "lower bound" in notes[0]
        assert rows[-1][0] == "step" and "tokens/s" in rows[-1][2]
        assert float(rows[-1][1]) == pytest.approx(sum(float(row[1]) for row in rows[:-1]), abs=0.6)


def test_the_epyc_figure_is_named_beside_the_terms() -> None:
    _, rows, notes = reference_table(*setting("deepseek_v3", EPYC))
    assert "136" in notes[0] and "62" in notes[0] and "not given" in notes[0]
    assert UNEXPLAINED not in [row[0] for row in rows]


def test_another_machine_has_no_published_step() -> None:
    dims, _, hardware, _ = setting("deepseek_v3", XEON)
    assert published_for(dims, hardware) is not None
    assert published_for(dims, dataclasses.replace(hardware, gpus=())) is None
    assert published_for(dims, dataclasses.replace(hardware, sockets=hardware.sockets[:1])) is None
    other = hardware_from_file(conf_dir() / "hardware/1x4090_1x7950x.yaml")
    assert published_for(dims, other) is None


def test_more_tokens_take_longer_and_faster_parts_less() -> None:
    dims, config, hardware, rates = setting("qwen3_235b_a22b", XEON, rows=8)
    few = by_name(reference_terms(dims, config, hardware, rates))
    _, more, _, _ = setting("qwen3_235b_a22b", XEON, rows=16)
    many = by_name(reference_terms(dims, more, hardware, rates))
    for name, term in few.items():
        if name == "optimizer":  # once per step
            assert many[name].seconds == term.seconds
        else:
            assert many[name].seconds == pytest.approx(2 * term.seconds), name
    slow = dataclasses.replace(rates.memory, read_all=Figure(rates.memory.read_all.value / 10, "slow"))
    slower = by_name(reference_terms(dims, config, hardware, dataclasses.replace(rates, memory=slow)))
    assert slower["experts, forward"].seconds > few["experts, forward"].seconds
    assert slower["copies between GPU and host"].seconds == few["copies between GPU and host"].seconds


def test_what_may_or_may_not_have_run_stands_beside_the_sum() -> None:
    arguments = setting("deepseek_v3", XEON)
    terms = reference_terms(*arguments)
    beside = [t for t in terms if not t.counted]
    assert {t.name for t in beside} == {"experts' forward once more", "repacking the transpose"}
    assert all(t.seconds > 0 for t in beside)
    _, _, notes = reference_table(*arguments)
    assert sum("not in the sum" in note for note in notes) == 2


def test_without_experts_lora_there_is_no_optimizer_term() -> None:
    dims, config, hardware, rates = setting("deepseek_v3", XEON)
    plain = dataclasses.replace(config, lora=dataclasses.replace(config.lora, experts=False))
    assert "optimizer" in by_name(reference_terms(dims, config, hardware, rates))
    assert "optimizer" not in by_name(reference_terms(dims, plain, hardware, rates))


def test_the_program_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["model=deepseek_v3", f"plan.hardware={XEON}", "data.max_length=512"]) == 0
    text = capsys.readouterr().out
    assert "KTransformers" in text and "overhead, not explained" in text and "40.4 tokens/s" in text
