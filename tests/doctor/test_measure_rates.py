"""The measuring half of mode=doctor: what is stored where, what is kept, what is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import kt_ray.measure
from kt_ray.config.schema import Config
from kt_ray.dims.weight_formats import Storage
from kt_ray.doctor import measure_rates
from kt_ray.errors import UserError
from kt_ray.hardware.describe import hardware_from_file, this_host
from kt_ray.hardware.machine import Gpu
from kt_ray.hardware.nominal import nominal_rates
from kt_ray.hardware.rate_files import rates_for, rates_path, read_rates
from kt_ray.hardware.rates import Curve, ExpertRate, Figure, Rates
from kt_ray.measure import ExpertShape
from kt_ray.modes import doctor
from kt_ray.modes.plan import model_dims
from tests.helpers.composing import compose

_FOUND: dict[tuple[str, str, bool], ExpertRate] = {}  # one real measurement serves all tests


def tiny(name: str, **sizes: Any) -> Any:
    """A measurement of kt_ray.measure at sizes that take no time."""
    real = getattr(kt_ray.measure, name)
    return lambda *args, **more: real(*args[:1], **{**sizes, "seconds": 0.001})


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """mode=doctor whose measurements are small, and whose cache and runs are of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)  # hardware.yaml
    measure = kt_ray.measure
    real_experts, real_disk = measure.measure_experts, measure.measure_disk

    def experts(engine: Any, fmt: str, shape: ExpertShape, rows: Any, seconds: float) -> ExpertRate:
        key = (engine.isa, fmt, engine.int8_products)
        if key not in _FOUND:
            small = ExpertShape(256, 256, weight_bytes=1 << 20)
            _FOUND[key] = real_experts(engine, fmt, small, (1, 4), seconds=0.001)
        return dataclasses.replace(_FOUND[key], hidden=shape.hidden, inter=shape.inter)

    monkeypatch.setattr(measure, "measure_experts", experts)
    monkeypatch.setattr(measure, "measure_memory", tiny("measure_memory", size=1 << 16))
    monkeypatch.setattr(measure, "measure_cpu", tiny("measure_cpu", hidden=32, vocabulary=64, tokens=8))
    monkeypatch.setattr(measure, "measure_optimizer", tiny("measure_optimizer", parameters=4096))
    monkeypatch.setattr(measure, "measure_disk", lambda where: real_disk(where, 1 << 16))
    return compose(["mode=doctor", "cluster=local", f"run.root={tmp_path}/runs"])


def test_doctor_measures_stores_and_says_where(
    config: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: [])
    assert doctor.run(config) == 0
    text = capsys.readouterr().out
    path = rates_path(this_host())
    assert f"rates stored in {path}" in " ".join(text.split("\n")) and path.is_file()
    for word in ("measuring: memory", "measuring: experts", "GFLOP/s", "AdamW", "Ray 0.70 ms (assumed"):
        assert word in text
    rates = rates_for(dataclasses.replace(config, mode="plan"), this_host())
    assert rates.source.startswith("measured on") and rates.date and rates == read_rates(path)
    assert hardware_from_file("hardware.yaml").rates_file == str(path)
    dims = model_dims(config.model)
    own = rates.expert("auto", "bf16", dims.expert_width, dims.expert_intermediate)
    assert (own.hidden, own.inter) == (dims.expert_width, dims.expert_intermediate)
    # Formats that are not measured stand beside, scaled; every format of the engine has a rate.
    assert "scaled as bf16 was measured" in rates.expert("auto", "q5_k").forward.source


def test_nothing_is_measured_on_request(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: [])
    assert doctor.run(dataclasses.replace(config, plan=compose(["plan.rates=nominal"]).plan)) == 0
    assert not rates_path(this_host()).exists()


def measured(config: Config) -> Rates:
    said: list[str] = []
    return measure_rates.measure_rates(config, this_host(), None, said.append)


def test_a_named_file_takes_the_rates(config: Config, tmp_path: Path) -> None:
    named = compose(["mode=doctor", "cluster=local", f"plan.rates={tmp_path}/mine.json"])
    rates = nominal_rates(this_host())
    assert measure_rates.store(named, this_host(), rates) == tmp_path / "mine.json"
    assert read_rates(tmp_path / "mine.json") == rates
    assert not rates_path(this_host()).exists()


def test_shapes_measured_before_are_kept(config: Config) -> None:
    host = this_host()
    first = measured(config)
    other = dataclasses.replace(first.experts[0], hidden=7168, inter=2048)
    measure_rates.store(config, host, dataclasses.replace(first, experts=(*first.experts, other)))
    again = dataclasses.replace(first, date="later")
    stored = read_rates(measure_rates.store(config, host, again))
    assert stored.date == "later" and other in stored.experts
    keys = [(e.isa, e.format, e.products, e.hidden, e.inter) for e in stored.experts]
    assert len(set(keys)) == len(keys)
    rates_path(host).write_text("damaged")
    assert read_rates(measure_rates.store(config, host, again)) == again


def test_what_time_does_not_allow_is_named(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_rates, "BUDGET", -1.0)
    # And what memory is measured by is in no cache of an EPYC 9654.
    monkeypatch.setattr(measure_rates, "cache_bytes", lambda cpus: 384 << 20)
    monkeypatch.setattr(measure_rates, "memory_free", lambda: 64 << 30)
    sizes: list[int] = []
    for name in ("measure_memory", "measure_optimizer"):
        real = getattr(kt_ray.measure, name)
        monkeypatch.setattr(
            kt_ray.measure, name, lambda n, size, real=real: (sizes.append(size), real(n, size))[1]
        )
    rates = measured(config)
    assert sizes == [1536 << 20, 1536 << 16]
    note = next(note for note in rates.notes if "want of time" in note)
    assert "mxfp4" in note and "int8 products" in note
    assert [e.format for e in rates.experts if e.forward.source == "measured"] == ["bf16"]
    assert rates.expert("auto", "mxfp4").forward.source.endswith("scaled as bf16 was measured")


@pytest.mark.parametrize(("stored", "asked"), [("uint4", "uint4"), ("nvfp4", "nvfp4"), ("nf4", "bf16")])
def test_the_models_own_format_comes_first(
    config: Config, monkeypatch: pytest.MonkeyPatch, stored: str, asked: str
) -> None:
    monkeypatch.setattr(measure_rates, "BUDGET", -1.0)
    dims = dataclasses.replace(model_dims(config.model), expert_storage=Storage(stored, (1, 32), 2))
    (rate,) = measure_rates._experts(config, this_host(), dims, lambda text: None, [])
    assert (rate.format, rate.inter) == (asked, dims.expert_intermediate)


def test_a_disturbed_measurement_says_so(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_rates._Others, "cpus", lambda self: 1.5)
    assert any("other programs used 1.5 CPUs" in note for note in measured(config).notes)
    monkeypatch.setattr(measure_rates._Others, "cpus", lambda self: 0.0)
    assert not any("other programs" in note for note in measured(config).notes)


def test_ray_that_does_not_start_costs_only_its_own_figures(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kt_ray.actors.ray import ray_probe

    def refuse(address: str, arena_bytes: float) -> dict[str, Figure]:
        raise UserError("no Ray cluster answers")

    monkeypatch.setattr(ray_probe, "measure_ray", refuse)
    rates = measured(compose(["mode=doctor", "cluster=ray", f"run.root={config.run.root}"]))
    assert any("Ray was not measured" in note for note in rates.notes)
    assert rates.transport.call.source.startswith("assumed")
    assert rates.transport.local.source == "measured"


@pytest.mark.parametrize("fails", ["measure_gpu", "measure_layers"])
def test_a_card_or_a_layer_that_fails_costs_only_its_own_figures(
    config: Config, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """Of two cards the slower one is measured, whichever comes first."""
    asked = []

    def refuse(*args: Any, **more: Any) -> Any:
        asked.append(args[0])
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measure_rates, "_experts", lambda *args: [])
    monkeypatch.setattr(kt_ray.measure, "measure_layers", lambda *args: ())
    gpu = nominal_rates(dataclasses.replace(this_host(), gpus=CARDS))
    monkeypatch.setattr(kt_ray.measure, "measure_gpu", lambda device: (gpu.gpu, gpu.link))
    monkeypatch.setattr(kt_ray.measure, fails, refuse)
    host, model = dataclasses.replace(this_host(), gpus=CARDS), model_dims(config.model)
    rates = measure_rates.measure_rates(config, host, model, lambda text: None)
    assert any("not measured: OutOfMemoryError" in note for note in rates.notes)
    assert rates.gpu == gpu.gpu and rates.memory.read_one.source == "measured"
    card = asked[0] if fails == "measure_gpu" else asked[0].device
    assert str(card) == "cuda:1"


CARDS = (Gpu(0, "NVIDIA H200", 139 << 30), Gpu(1, "NVIDIA GeForce RTX 3090", 23 << 30))


def test_a_place_that_cannot_be_written_is_found_before_measuring(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda config: [])
    monkeypatch.setattr(doctor.doctor_rates, "measure_rates", lambda *args: pytest.fail("measured"))
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be stored.*plan\.rates"):
        doctor.run(config)
    assert not hardware_from_file("hardware.yaml").rates_file


def test_figures_are_shown_with_their_units() -> None:
    host = this_host()
    rates = nominal_rates(host)
    rate = dataclasses.replace(rates.experts[0], forward=Curve((1.0,), (5e9,), "measured"))
    rates = dataclasses.replace(rates, experts=(rate,), notes=("mind this",))
    lines = measure_rates.show(rates, host.sockets[0].cores)
    text = "\n".join(lines)
    assert lines[-1] == "note: mind this" and "GB/s" in text and "M parameters/s" in text
    assert f"experts   {rate.isa} {rate.format}" in text
