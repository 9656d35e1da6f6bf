"""Hosts named by their parts, the tables they come from, hardware.yaml by the wizard and by mode=doctor."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.hardware import wizard
from kt_ray.hardware.describe import ISAS, hardware_for, hardware_from_file, this_host
from kt_ray.hardware.machine import Gpu, Hardware
from kt_ray.hardware.nominal import defaults, nominal_rates
from kt_ray.hardware.parts import CPUS, CUDA_GIVES, GPUS, cpu_named, given_gib, gpu_named, named_host
from kt_ray.hardware.rate_files import rates_for, write_rates
from kt_ray.modes.plan import model_dims
from kt_ray.placement.plan import make_plan
from kt_ray.timing.choose import choose_plan
from kt_ray.timing.prediction import predict
from tests.helpers.composing import compose
from tests.placement.configs import make_hardware

COMMON = [
    *("2x4090_2x8480_1024gb", "4x3090_1x7742_512gb", "2x4090_2x7763_1024gb", "2x4090_2x6348_512gb"),
    *("1x4090_1x9354_384gb", "8x5090_2x9654_1536gb", "1x4090_1x7950x_128gb", "1x5090_1x9950x_192gb"),
    *("1x3090_5950x_128gb", "13900k_128gb", "2x4090-48gb_2x8488c_2048gb", "1xh200_1x9654_768gb"),
]


def planned(name: str, model: str = "qwen3_30b_a3b") -> tuple[Config, Hardware]:
    config = compose(["mode=plan", f"model={model}", f"plan.hardware={name}"])
    return config, hardware_for(config)


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("RTX 4090", 23.6),
        ("RTX 4090 24 GB", 23.6),
        ("RTX 4090 48 GB", 48 * CUDA_GIVES),
        ("NVIDIA A100-SXM4-80GB", 79.2),
        ("NVIDIA L40S-48GB", 44.4),
        ("another card 48 GB", None),
    ],
)
def test_a_card_of_another_size_is_planned_with_the_size_in_its_name(name: str, gib: float | None) -> None:
    assert given_gib(name) == gib


@pytest.mark.parametrize("name", COMMON)
def test_every_named_host_plans(name: str) -> None:
    config, hardware = planned(name)
    assert hardware.source == name and not hardware.present
    plan = choose_plan(model_dims(config.model), config, hardware)
    assert plan.fits
    assert predict(plan, config, rates_for(config, hardware)).tokens_per_s > 1


@pytest.mark.parametrize("cpu", CPUS)
def test_every_cpu_is_planned_for(cpu: str) -> None:
    config, hardware = planned(f"2x4090_1x{cpu}_512gb")
    plan = make_plan(model_dims(config.model), config, hardware)
    assert plan.fits
    assert predict(plan, config, rates_for(config, hardware)).tokens_per_s > 1


def test_the_parts_of_a_name() -> None:
    _, hardware = planned("2x4090_2x8480_1024gb")
    assert [(s.cores, s.memory_bytes >> 30) for s in hardware.sockets] == [(56, 512), (56, 512)]
    assert [gpu.memory_bytes for gpu in hardware.gpus] == [int(23.6 * 2**30)] * 2
    assert hardware.best_isa == "amx"
    _, large = planned("1x4090-48gb_1x7763_256gb")
    assert large.gpus[0].memory_bytes == pytest.approx(47.3 * 2**30, rel=0.01) and large.best_isa == "avx2"
    assert cpu_named("AMD EPYC 9654 96-Core Processor") is CPUS["9654"]
    assert cpu_named("Intel(R) Xeon(R) Platinum 8480C") is CPUS["8480"]
    assert cpu_named("AMD Ryzen 9 7950X3D") is None  # another clock, another cache
    assert cpu_named("Intel(R) Xeon(R) Gold 6348H CPU @ 2.30GHz") is None  # other cores


def test_a_card_is_known_by_its_whole_number() -> None:
    for name in ("NVIDIA GeForce RTX 4090", "RTX4090", "4090"):
        assert gpu_named(name) is GPUS["4090"]
    for name in ("NVIDIA GeForce RTX 4090 D", "RTX 4090D", planned("1x4090-d_1x9654_768gb")[1].gpus[0].name):
        assert gpu_named(name) is GPUS["4090 D"]
    assert gpu_named("NVIDIA A100-SXM4-40GB") is GPUS["A100"]
    forms = (
        "A100-SXM4-80GB",
        "A100 80GB PCIe",
        "H100 PCIe",
        "H100 NVL",
        "H200 NVL",
        "H100 80GB HBM3",
        "L40S",
        "L40",
    )
    found = [gpu_named(f"NVIDIA {name}") for name in forms]
    keys = ("A100 80GB", "A100 80GB", "H100 PCIe", "H100 NVL", "H200 NVL", "H100", "L40S", "L40")
    assert found == [GPUS[key] for key in keys]
    others = ("RTX 4090 Laptop GPU", "RTX 3090 Ti", "RTX 4090S", "L4")
    assert all(gpu_named(f"NVIDIA GeForce {name}") is None for name in others)
    assert planned("1xh100-pcie_1x9654_768gb")[1].gpus[0].name == "H100-PCIE"
    assert gpu_named(planned("1xa100-80gb_1x9654_768gb")[1].gpus[0].name) is GPUS["A100 80GB"]
    assert all(gpu_named(name) is None for name in ("NVIDIA RTX A1000", "NVIDIA GH200 480GB", "14090"))


@pytest.mark.parametrize("name", ["2x4090_2x9999_64gb", "2x4099_2x9654_64gb", "2x9654", "my_box"])
def test_what_names_no_host_is_told_what_does(name: str) -> None:
    with pytest.raises(UserError, match=r"names no host.*9654.*4090.*plan\.hardware=wizard"):
        planned(name)


@pytest.mark.parametrize("name", ["0x4090_1x9654_64gb", "1x4090_0x9654_64gb", "1x9654_0gb"])
def test_a_host_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"not a positive (whole )?number"):
        planned(name)


def test_every_figure_of_the_tables_has_a_name_and_a_source() -> None:
    known = defaults(make_hardware())
    for cpu in CPUS.values():
        assert cpu.isa in ISAS and {"clock", "dram"} <= set(cpu.figures) <= set(known)
        for name, figure in cpu.figures.items():
            assert any(word in figure.source for word in ("data sheet", "assumed", "Zen 5")), (name, figure)
    gpu = dataclasses.replace(make_hardware(), gpus=(Gpu(0, "NVIDIA GeForce RTX 4090", 24 << 30),))
    assert "data sheet" in defaults(gpu)["gpu_bf16"].source and GPUS["4090"].flops == 165.2e12


def test_a_part_in_a_file_gives_what_the_file_leaves_out(tmp_path: Path) -> None:
    file = tmp_path / "box.yaml"
    file.write_text("sockets: [{count: 2, cpu: EPYC 9654, memory_gib: 384}]\ngpus: [{name: RTX 3090}]\n")
    hardware = hardware_from_file(file)
    assert [s.cores for s in hardware.sockets] == [96, 96] and hardware.best_isa == "avx512_bf16"
    assert nominal_rates(hardware).memory.read_all == CPUS["9654"].figures["dram"]
    file.write_text(
        "isa: avx2\nsockets: [{cpu: EPYC 9654, cores: 8, memory_gib: 384}]\n"
        "rates: {dram: {value: 1.0e+9, source: a test}}\n"
    )
    own = hardware_from_file(file)
    assert own.sockets[0].cores == 8 and own.best_isa == "avx2"
    assert nominal_rates(own).memory.read_all.value == 1e9
    file.write_text("sockets: [{cpu: EPYC 1, memory_gib: 384}]\n")
    with pytest.raises(UserError, match=r"cpu in the hardware file is unknown.*EPYC 9654.*cores and isa"):
        hardware_from_file(file)


# -- hardware.yaml --------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Answers that are typed; the questions end when they do."""
    typed: list[str] = []

    def read(question: str) -> str:
        if not typed:
            raise EOFError
        return typed.pop(0)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", read)
    yield typed
    assert not typed


def test_six_answers_make_a_file_that_plans(terminal: list[str]) -> None:
    terminal += ["RTX 4090", "2", "", "amd epyc 9654", "2", "1024"]
    _, hardware = planned("wizard")
    assert len(hardware.gpus) == 2 and hardware.gpus[0].memory_bytes == int(23.6 * 2**30)
    assert [(s.cores, s.memory_bytes >> 30) for s in hardware.sockets] == [(96, 512), (96, 512)]
    assert planned("hardware.yaml")[1] == hardware  # what was written says the same
    with pytest.raises(UserError, match=r"hardware\.yaml exists.*plan\.hardware=hardware\.yaml"):
        planned("wizard")


@pytest.mark.parametrize("none", ["none", "No"])
def test_an_unknown_cpu_is_asked_for_cores_and_instruction_set(terminal: list[str], none: str) -> None:
    terminal += [none, "Xeon E5-2680 v4", "none of your business", "2", "14", "sse", "avx2", "256"]
    _, hardware = planned("wizard")
    assert not hardware.gpus and hardware.best_isa == "avx2"
    assert [(s.cores, s.memory_bytes >> 30) for s in hardware.sockets] == [(14, 128), (14, 128)]


def test_answers_that_describe_no_host_leave_no_file(terminal: list[str], tmp_path: Path) -> None:
    terminal += ["none", "EPYC 9654", "1", "8000"]
    with pytest.raises(UserError, match=r"too large; at plan\.hardware=wizard; found 8000"):
        planned("wizard")
    assert list(tmp_path.iterdir()) == []


def test_this_hosts_card_is_suggested_with_its_own_memory(terminal: list[str]) -> None:
    terminal += ["", "", "", "", "", ""]
    cards = tuple(Gpu(i, "NVIDIA RTX 6000 Ada Generation", 48 << 30) for i in range(2))
    answers = wizard.answers(dataclasses.replace(make_hardware(), gpus=cards), "EPYC 9654")
    assert answers["gpus"] == [{"count": 2, "name": cards[0].name, "memory_gib": 48}]


def test_questions_want_a_terminal_and_answers(
    terminal: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="the questions were not answered"):
        planned("wizard")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    with pytest.raises(UserError, match=r"no terminal.*plan\.hardware=2x4090_2x9654_1024gb"):
        planned("wizard")
    assert list(tmp_path.iterdir()) == []


def test_doctor_describes_this_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    host, rates = this_host(), tmp_path / "rates.json"
    measured = dataclasses.replace(nominal_rates(host), source="measured on a test", cpu="a CPU")
    write_rates(measured, rates)
    assert "plan.hardware=COPY" in wizard.write_own(host, "a CPU", rates)
    assert "Replaced by the next mode=doctor; change a copy." in Path("hardware.yaml").read_text()
    config, found = planned("hardware.yaml")
    assert [s.cores for s in found.sockets] == [s.cores for s in host.sockets] and found.isas == host.isas
    assert found.gpus == tuple(dataclasses.replace(gpu, uuid="") for gpu in found.gpus)
    assert rates_for(config, found).source == "measured on a test"
    nominal = dataclasses.replace(config, plan=dataclasses.replace(config.plan, rates="nominal"))
    assert rates_for(nominal, found).source.startswith("nominal")
    assert "described" in wizard.write_own(
        host, "a CPU", None
    )  # its own is replaced, and nothing was measured
    assert rates_for(*planned("hardware.yaml")).source.startswith("nominal")


def test_doctor_leaves_a_file_of_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hardware.yaml").write_text("# mine\n")
    assert "left as it is" in wizard.write_own(this_host(), "a CPU", None)
    assert (tmp_path / "hardware.yaml").read_text() == "# mine\n"
    assert named_host("1x7763_64gb")["sockets"][0]["memory_gib"] == 64
