"""Rates: curves, lookups, files, nominal figures of described hardware, and which of them a plan uses."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from kt_ray.config.files import conf_dir
from kt_ray.config.schema import Config, PlanConfig
from kt_ray.errors import UserError
from kt_ray.hardware import rate_files
from kt_ray.hardware.describe import ISAS, hardware_from_file, this_host
from kt_ray.hardware.machine import Gpu, Hardware, with_hosts
from kt_ray.hardware.nominal import FORMAT_BYTES, defaults, described, nominal_rates
from kt_ray.hardware.rate_files import rates_for, rates_path, read_rates, write_rates
from kt_ray.hardware.rates import ROWS, Curve, Figure, LayerRate, Rates
from tests.helpers.composing import compose
from tests.placement.configs import make_config, make_hardware

PROFILES = sorted((conf_dir() / "hardware").glob("*.yaml"))


def with_plan(**plan: Any) -> Config:
    return dataclasses.replace(make_config(), plan=PlanConfig(**plan))


def measured(hardware: Hardware) -> Rates:
    """Rates as mode=doctor would store them for `hardware`."""
    return dataclasses.replace(
        nominal_rates(hardware), source="measured on a test", cpu=rate_files.cpu_name()
    )


# -- curves and lookups -------------------------------------------------------------------------


def test_a_curve_meets_its_points_and_lies_between() -> None:
    curve = Curve((1, 4, 64), (10, 20, 40), "test")
    assert [curve(x) for x in (0.1, 1, 4, 64, 1000)] == pytest.approx([10, 10, 20, 40, 40])
    assert curve(2) == pytest.approx(10 * 2**0.5)
    assert curve.ample == 40
    assert curve.scaled(2, "why").values == (20, 40, 80) and curve.scaled(2, "why").source == "test; why"


def test_threads_add_up_to_the_measured_whole() -> None:
    rate = nominal_rates(make_hardware(cores=16, isa="avx512_bf16")).expert("auto", "bf16")
    for direction in ("forward", "backward"):
        for rows in ROWS:
            speeds = [rate.flops(direction, rows, threads) for threads in (1, 2, 4, 8, 16, 32)]
            assert speeds == sorted(speeds)
            every = (rate.forward_all if direction == "forward" else rate.backward_all)(rows)
            assert speeds[-1] == speeds[-2] == pytest.approx(every)
    with pytest.raises(ValueError, match="direction"):
        rate.flops("sideways", 1)


def test_lora_costs_time_by_its_rank() -> None:
    rate = nominal_rates(make_hardware()).expert("auto", "bf16")
    plain, low, same, high = (rate.flops("backward", 64, 1, rank) for rank in (0, 4, 8, 64))
    assert plain > same == low == rate.flops("backward", 64, 1) > high


def test_a_rate_is_found_by_format_and_nearest_shape() -> None:
    rates = nominal_rates(make_hardware(isa="avx512_bf16"))
    near = dataclasses.replace(rates.expert("auto", "bf16"), hidden=2048, inter=768)
    rates = dataclasses.replace(rates, experts=(*rates.experts, near))
    assert rates.expert("auto", "bf16", 2048, 1024) is near
    assert rates.expert("auto", "bf16", 7168, 2048).hidden == 7168
    assert rates.expert("auto", "fp8_block").format == "fp8"
    assert rates.expert("auto", "int8").products == "bf16"
    assert rates.expert("auto", "int8", products="int8").products == "int8"


def test_a_format_that_nobody_measured_says_what_stands_for_it() -> None:
    rates = nominal_rates(make_hardware(isa="avx512_bf16"))
    found = rates.expert("auto", "nf4")
    assert found.format == "nf4" and "avx512_bf16 bf16" in found.forward.source
    with pytest.raises(KeyError, match="int8 products"):
        only = tuple(e for e in rates.experts if e.products != "int8")
        dataclasses.replace(rates, experts=only).expert("auto", "int8", products="int8")


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_has_nominal_rates_of_int8_products(isa: str) -> None:
    """mode=plan predicts AMXINT8 on any host, as what might help."""
    rate = nominal_rates(make_hardware(isa=isa)).expert("auto", "int8", products="int8")
    assert (rate.isa, rate.products) == (isa, "int8")


def test_torch_on_some_threads_lies_between_one_and_all() -> None:
    rates = nominal_rates(make_hardware(cores=16))
    one, some, every = (rates.cpu_rate(n) for n in (1, 4, 16))
    assert one is rates.cpu_one and every is rates.cpu_all
    speeds = [r.gemm["bfloat16"](256) for r in (one, some, every)]
    assert speeds == sorted(speeds) and speeds[1] == pytest.approx((speeds[0] * speeds[2]) ** 0.5)


# -- nominal and described ----------------------------------------------------------------------


@pytest.mark.parametrize("file", PROFILES, ids=lambda file: file.stem)
def test_every_profile_names_its_sources(file: Path) -> None:
    hardware = hardware_from_file(file)
    assert {name for name, _ in hardware.rates} >= {"clock", "dram"}
    for name, figure in hardware.rates:
        words = ("data sheet", "assumed", "published", "measured", "Zen 5")
        assert figure.value > 0 and any(word in figure.source for word in words), (name, figure)
    rates = nominal_rates(hardware)
    assert rates.source.startswith("described") and (rates.gpu is None) == (not hardware.gpus)
    assert dict(hardware.rates)["dram"] == rates.memory.read_all


@pytest.mark.parametrize("fmt", FORMAT_BYTES)
def test_nominal_experts_keep_to_memory_and_products(fmt: str) -> None:
    hardware = hardware_from_file(conf_dir() / "hardware/2x4090_2x8488c.yaml")
    rates = nominal_rates(hardware)
    rate = rates.expert("amx", fmt)
    for rows in ROWS:
        for direction in ("forward", "backward"):
            speed = rate.flops(direction, rows, rate.threads)
            assert speed <= 1.0001 * 2 * rows / FORMAT_BYTES[fmt] * rates.memory.read_all.value
            assert speed <= 48 * 2.0e9 * 1024


def test_a_pass_in_few_rows_is_limited_by_bytes_of_the_format() -> None:
    rates = nominal_rates(hardware_from_file(conf_dir() / "hardware/2x4090_2x8488c.yaml"))
    slow, fast = (rates.expert("amx", fmt).flops("forward", 16, 48) for fmt in ("bf16", "fp8"))
    assert fast > 1.3 * slow


BAD_RATES = [
    ({"clok": {"value": 1, "source": "x"}}, "rates.clok is unknown", "clock"),
    ({"gpu_bf16": {"value": 1, "source": "x"}}, "no GPU is listed", "gpu_bf16"),
    ({"clock": 2e9}, "rates.clock is no figure", "value: NUMBER"),
    ({"clock": {"value": "2e9", "source": "x"}}, "no number above 0", "2e9"),
    ({"clock": {"value": float("inf"), "source": "x"}}, "no number above 0", "inf"),
    ({"clock": {"value": 0, "source": "x"}}, "no number above 0", "0"),
    ({"clock": {"value": 2e9, "source": " "}}, "source is empty", "where the value comes from"),
    ([1], "rates is no mapping", "NUMBER"),
    ({"clock": {"value": 2.5, "source": "GHz"}}, "rates.clock.value is of another unit", "per second"),
    ({"network": {"value": 100, "source": "Gbit/s"}}, "rates.network.value is of another unit", "per second"),
    ({"avx2_forward": {"value": 82, "source": "percent"}}, "is of another unit", "0.85 for 85 %"),
    ({"call": {"value": 0.7, "source": "ms"}}, "rates.call.value is of another unit", "seconds"),
]


@pytest.mark.parametrize(("section", "fault", "word"), BAD_RATES)
def test_bad_figures_of_a_hardware_file_are_refused(
    tmp_path: Path, section: Any, fault: str, word: str
) -> None:
    file = tmp_path / "box.yaml"
    file.write_text(
        yaml.safe_dump({"isa": "avx2", "sockets": [{"cores": 4, "memory_gib": 16}], "rates": section})
    )
    with pytest.raises(UserError) as caught:
        hardware_from_file(file)
    assert fault in caught.value.line() and word in caught.value.line() and str(file) in caught.value.line()


def test_every_assumed_figure_is_of_its_unit() -> None:
    every = defaults(make_hardware(gpus=1))
    section = {name: {"value": figure.value, "source": figure.source} for name, figure in every.items()}
    assert described(section, make_hardware(gpus=1), "box.yaml") == tuple(every.items())


def test_a_figure_of_the_file_replaces_the_assumption(tmp_path: Path) -> None:
    file = tmp_path / "box.yaml"
    data = {"isa": "avx2", "sockets": [{"cores": 4, "memory_gib": 16}]}
    file.write_text(yaml.safe_dump(data))
    plain = nominal_rates(hardware_from_file(file))
    twice = 2 * defaults(hardware_from_file(file))["clock"].value
    file.write_text(yaml.safe_dump({**data, "rates": {"clock": {"value": twice, "source": "overclocked"}}}))
    faster = nominal_rates(hardware_from_file(file)).expert("avx2", "bf16").forward
    assert faster.ample == pytest.approx(2 * plain.expert("avx2", "bf16").forward.ample)
    assert "overclocked" in faster.source


# -- files --------------------------------------------------------------------------------------


def test_rates_survive_the_file(tmp_path: Path) -> None:
    hardware = hardware_from_file(conf_dir() / "hardware/2x4090_2x8488c.yaml")
    rates = dataclasses.replace(nominal_rates(hardware), notes=("a note",), date="2026-01-01", commit="abc")
    file = tmp_path / "deep" / "rates.json"
    write_rates(rates, file)
    assert read_rates(file) == rates
    assert [f.name for f in file.parent.iterdir()] == ["rates.json"]


def _broken(change: str) -> dict[str, Any]:
    data = {"version": rate_files.VERSION, **dataclasses.asdict(nominal_rates(make_hardware()))}
    if change == "version":
        data["version"] = 99
    elif change == "missing":
        del data["memory"]
    elif change == "unknown":
        data["optimizer"]["colour"] = 1
    elif change == "zero":
        data["disk"]["value"] = 0
    elif change == "text":
        data["memory"]["read_one"]["value"] = "fast"
    elif change == "nan":
        data["memory"]["read_one"]["value"] = float("nan")
    elif change == "curve":
        data["experts"][0]["forward"]["at"] = [4.0, 1.0, 16.0, 64.0, 256.0]
    return data


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ("version", "of another version; at"),
        ("missing", "memory is missing"),
        ("unknown", "optimizer.colour is unknown"),
        ("zero", "disk is not above 0"),
        ("text", "memory.read_one.value is no number"),
        ("nan", "memory.read_one.value is no number"),
        ("curve", "experts[0].forward is no curve"),
    ],
)
def test_broken_files_are_refused_by_name(tmp_path: Path, change: str, fault: str) -> None:
    file = tmp_path / "rates.json"
    file.write_text(json.dumps(_broken(change)))
    with pytest.raises(UserError) as caught:
        read_rates(file)
    assert fault in caught.value.line() and "mode=doctor" in caught.value.line()


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_rates(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_rates(tmp_path / "bad.json")


def test_a_directory_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        write_rates(nominal_rates(make_hardware()), tmp_path / "file" / "rates.json")


# -- which rates a plan uses --------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_nothing_stored_gives_nominal_rates_and_a_note(cache: Path) -> None:
    rates = rates_for(with_plan(), this_host())
    assert rates.source.startswith("nominal") and "mode=doctor" in rates.notes[-1]


def test_a_cache_that_may_not_be_searched_counts_as_empty(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, real = this_host(), os.stat

    def closed(path: Any, *args: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(str(cache)):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *args, **more)

    monkeypatch.setattr(os, "stat", closed)
    assert "no measured rates" in rates_for(with_plan(), host).notes[-1]


def test_stored_rates_are_used_on_their_own_host_only(cache: Path) -> None:
    host = this_host()
    write_rates(measured(host), rates_path(host))
    assert cache in rates_path(host).parents
    assert rates_for(with_plan(), host).source == "measured on a test"
    assert rates_for(with_plan(rates="nominal"), host).source.startswith("nominal")
    assert rates_for(with_plan(), with_hosts(host, 3)).source == "measured on a test"  # hosts like this one
    other = hardware_from_file(PROFILES[0])
    assert rates_for(with_plan(), other).source.startswith("described")


def test_stored_rates_of_another_cpu_are_refused_with_a_note(cache: Path) -> None:
    host = this_host()
    write_rates(dataclasses.replace(measured(host), cpu="Other CPU"), rates_path(host))
    rates = rates_for(with_plan(), host)
    assert rates.source.startswith("nominal") and "Other CPU" in rates.notes[-1]
    rates_path(host).write_text("{}")
    rates = rates_for(with_plan(), host)
    assert rates.source.startswith("nominal") and "another version" in rates.notes[-1]


def test_a_named_file_must_be_of_this_host_unless_hardware_is_described(tmp_path: Path) -> None:
    host, file = this_host(), tmp_path / "rates.json"
    write_rates(dataclasses.replace(measured(host), cores=999), file)
    with pytest.raises(UserError, match="999 cores"):
        rates_for(with_plan(rates=str(file)), host)
    rates = rates_for(with_plan(rates=str(file)), hardware_from_file(PROFILES[0]))
    assert rates.cores == 999 and any("used for" in note for note in rates.notes)


def test_a_gpu_that_the_measured_host_lacks_has_nominal_rates(tmp_path: Path) -> None:
    host, file = dataclasses.replace(this_host(), gpus=()), tmp_path / "rates.json"
    write_rates(measured(host), file)
    assert measured(host).gpu is None
    described = box(tmp_path, host, "RTX 4090", rates=str(file))
    rates, nominal = rates_for(with_plan(), described), nominal_rates(described)
    assert rates.gpu == nominal.gpu is not None and rates.link == nominal.link is not None
    assert rates.source == "measured on a test" and "host without a GPU: nominal ones" in rates.notes[-1]
    own = dataclasses.replace(measured(host), gpu=nominal.gpu, link=nominal.link)
    write_rates(own, file)
    assert "used for" in rates_for(with_plan(), described).notes[-1]


def box(folder: Path, like: Hardware, card: str, rates: str, cores: int = 0) -> Hardware:
    """A hardware file: the sockets of `like`, two cards, and a file of rates."""
    sockets = [{"cores": cores or socket.cores, "memory_gib": 64} for socket in like.sockets]
    data = {"isa": like.best_isa, "sockets": sockets, "gpus": [{"name": card, "count": 2}], "rates": rates}
    (folder / "box.yaml").write_text(yaml.safe_dump(data))
    return hardware_from_file(folder / "box.yaml")


@pytest.mark.parametrize("described", [False, True])
def test_rates_of_another_card_are_not_this_ones(cache: Path, described: bool) -> None:
    slow, fast = Gpu(0, "NVIDIA GeForce RTX 3090", 23 << 30), Gpu(1, "NVIDIA H200", 139 << 30)
    host = dataclasses.replace(this_host(), gpus=(slow,))
    curve = {"forward": Curve((1.0,), (1.0,), "measured")}
    layers = tuple(LayerRate("a", "a layer", threads, curve) for threads in (0, 1))
    rates = dataclasses.replace(measured(host), layers=layers)
    assert rates.gpu is not None
    rates = dataclasses.replace(rates, gpu=dataclasses.replace(rates.gpu, softmax=Figure(7.0, "measured")))
    write_rates(rates, rates_path(host))
    own, other = (
        box(cache, host, card, str(rates_path(host)))
        if described
        else dataclasses.replace(host, gpus=(Gpu(0, card, 20 << 30), fast))
        for card in ("GeForce RTX 3090", "NVIDIA H200")
    )
    kept, nominal = rates_for(with_plan(), own), rates_for(with_plan(), other)
    assert kept.gpu == rates.gpu and kept.layers == layers  # of mixed cards the slowest counts
    assert nominal.gpu == nominal_rates(other).gpu and nominal.layers == layers[1:]
    assert nominal.experts == rates.experts
    assert nominal.notes[-1] == "these rates are of NVIDIA GeForce RTX 3090: nominal ones for NVIDIA H200"


def test_a_changed_copy_is_predicted_as_changed(tmp_path: Path) -> None:
    """hardware.yaml of mode=doctor with other sockets: the measured rates are not theirs."""
    host, file = dataclasses.replace(this_host(), gpus=(Gpu(0, "H200", 139 << 30),)), tmp_path / "rates.json"
    write_rates(rates := measured(host), file)
    many = box(tmp_path, host, "H200", str(file), cores=96)
    found = rates_for(with_plan(), many)
    assert found.experts == nominal_rates(many).experts and found.cpu_all.threads == 96
    assert found.gpu == rates.gpu and found.disk == rates.disk
    assert "nominal ones for 96 cores per socket" in found.notes[-1]
    named = rates_for(with_plan(rates=str(file)), many)  # asked for by name: as they are
    assert named.experts == rates.experts


def test_rates_taken_along_lie_beside_the_hardware_file(tmp_path: Path) -> None:
    host = dataclasses.replace(this_host(), gpus=(Gpu(0, "H200", 139 << 30),))
    write_rates(measured(host), tmp_path / "rates-x.json")
    moved = box(tmp_path, host, "H200", "/home/other/.cache/kt_ray/rates-x.json")
    assert rates_for(with_plan(), moved).source == "measured on a test"
    (tmp_path / "rates-x.json").unlink()
    with pytest.raises(UserError, match=r"does not exist.*beside the hardware file.*plan\.rates=nominal"):
        rates_for(with_plan(), box(tmp_path, host, "H200", "/home/other/.cache/kt_ray/rates-x.json"))


def test_plan_keys_keep_each_other(tmp_path: Path) -> None:
    given = ["mode=plan", "plan.hardware=laptop_16gb", f"plan.rates={tmp_path}/r.json"]
    plan = compose(given).plan
    assert plan.rates == f"{tmp_path}/r.json" and plan.hardware is not None
    assert compose(["mode=plan", "plan.rates=nominal"]).plan.rates == "nominal"
    assert Figure(2, "a").scaled(2, "b") == Figure(4, "a; b")
