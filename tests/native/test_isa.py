"""Which instruction set is chosen, and what a forced one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType

import pytest

from kt_ray import native
from kt_ray.native import Engine, _native, available_isas, select_isa
from tests.helpers.amx import Amx, build_emulator, cpu_flags, has_amx

ALL = ("reference", "avx2", "avx512", "avx512_bf16", "amx")
NO_AMX = "no AMX-BF16 in the CPU, no AMX-TILE in the CPU, no AMX-INT8 in the CPU"

# Detection runs once per process; the extension alone, without torch, in a process of its own.
STATUSES = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps(module.isas()))
"""


def test_what_is_available_is_ordered_and_never_invented() -> None:
    isas = available_isas()
    assert isas[0] == "reference"
    newest = isas[-1] == [name for name in ALL if name in isas][-1]
    assert not newest or list(isas) == [name for name in ALL if name in isas]
    for name, flag in [("avx2", "avx2"), ("avx512", "avx512bw"), ("avx512_bf16", "avx512_bf16")]:
        assert (name in isas) == (flag in cpu_flags())
    assert "amx" not in isas or has_amx() or "KT_RAY_TEST_ASSUME_AMX" in os.environ


def test_auto_takes_the_best_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_RAY_ISA", raising=False)
    isa, reason = select_isa()
    assert isa == available_isas()[-1]
    assert "best of" in reason
    with Engine(threads=1) as engine:
        assert (engine.isa, engine.isa_reason) == (isa, reason)


@pytest.mark.parametrize("name", available_isas())
def test_the_environment_wins_over_auto_only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("KT_RAY_ISA", name)
    assert select_isa() == (name, f"forced by KT_RAY_ISA={name}")
    assert select_isa("reference")[0] == "reference"
    with Engine(threads=1) as engine:
        assert engine.isa == name


@pytest.mark.parametrize("name", [*(n for n in ALL if n not in available_isas()), "avx1024"])
def test_a_forced_isa_that_is_missing_raises(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(
        ValueError, match=f"isa: instruction set '{name}' cannot.*available: reference.*{name} "
    ):
        select_isa(name)
    monkeypatch.setenv("KT_RAY_ISA", name)
    with pytest.raises(ValueError, match="KT_RAY_ISA: instruction set"):
        Engine()


def test_a_cpu_without_avx512_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses = [("reference", True, ""), ("avx2", True, ""), ("avx512", False, "no AVX512F in the CPU")]
    monkeypatch.setattr(_native, "isas", lambda: statuses)
    monkeypatch.delenv("KT_RAY_ISA", raising=False)
    assert select_isa() == ("avx2", "best of reference, avx2; avx512 not available: no AVX512F in the CPU")
    with pytest.raises(ValueError, match=r"not available: avx512 \(no AVX512F in the CPU\)"):
        select_isa("avx512")


def test_the_binding_checks_for_itself() -> None:
    with pytest.raises(ValueError, match="isa: this build has no avx1024"):
        _native.Engine("avx1024", 1, [])


def amx_status(**environment: str) -> tuple[bool, str]:
    """(available, what is missing) of AMX, as a fresh process finds it."""
    inherited = {k: v for k, v in os.environ.items() if k != "KT_RAY_TEST_ASSUME_AMX"}
    command = [sys.executable, "-c", STATUSES, str(_native.__file__)]
    said = subprocess.run(command, env=inherited | environment, capture_output=True, text=True, check=True)
    name, available, reason = json.loads(said.stdout)[-1]
    assert name == "amx"
    return available, reason


def test_a_cpu_without_amx_is_told_what_it_lacks() -> None:
    if has_amx():
        pytest.skip("this CPU has AMX")
    available, reason = amx_status()
    assert not available
    assert reason.startswith(NO_AMX if "avx512_bf16" in available_isas() else "no ")


@pytest.mark.skipif("avx512_bf16" not in available_isas(), reason="this CPU lacks what AMX needs besides")
def test_amx_needs_the_operating_system_s_permission(tmp_path) -> None:
    if not has_amx():  # Linux refuses what the CPU has not
        available, reason = amx_status(KT_RAY_TEST_ASSUME_AMX="1")
        assert not available
        assert reason.startswith("AMX tile data not permitted by the operating system (arch_prctl: errno ")
    if Amx.unusable():
        pytest.skip(f"the case that emulates a refusal: {Amx.unusable()}")
    refused = {"LD_PRELOAD": str(build_emulator(tmp_path)), "AMXEMU_PERMISSION": "deny"}
    assert amx_status(KT_RAY_TEST_ASSUME_AMX="1", **refused) == (
        False,
        "AMX tile data not permitted by the operating system (arch_prctl: errno 1, Operation not permitted)",
    )


@pytest.mark.skipif("avx512_bf16" not in available_isas(), reason="this CPU lacks what AMX needs besides")
@pytest.mark.skipif(bool(Amx.unusable()), reason=f"AMX cannot run here: {Amx.unusable()}")
def test_amx_with_permission_is_available(tmp_path) -> None:
    environment = Amx.build(tmp_path).environment()
    added = {k: v for k, v in environment.items() if os.environ.get(k) != v}
    assert amx_status(**added) == (True, "")


def test_the_emulation_s_variable_alone_changes_nothing_but_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    if has_amx() or "avx512_bf16" not in available_isas():
        pytest.skip("needs a CPU with AVX512_BF16 and without AMX")
    for value in ("", "0", "yes"):
        available, reason = amx_status(KT_RAY_TEST_ASSUME_AMX=value)
        assert not available and reason.startswith(NO_AMX)


def test_forced_amx_is_taken_where_available_and_an_error_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(name, True, "") for name in ALL[:-1]]
    monkeypatch.setenv("KT_RAY_ISA", "amx")
    monkeypatch.setattr(_native, "isas", lambda: [*others, ("amx", True, "")])
    monkeypatch.setattr(_native, "product_rates", lambda: [(name, 1e9) for name in ALL[1:]])
    assert select_isa() == ("amx", "forced by KT_RAY_ISA=amx")
    assert select_isa("avx2")[0] == "avx2"
    monkeypatch.setattr(_native, "isas", lambda: [*others, ("amx", False, NO_AMX)])
    with pytest.raises(ValueError, match=rf"KT_RAY_ISA: instruction set 'amx' cannot .*amx \({NO_AMX}\)"):
        select_isa()
    monkeypatch.delenv("KT_RAY_ISA")
    monkeypatch.setattr(_native, "product_rates", lambda: [(name, 1e9) for name in ALL[1:-1]])
    assert select_isa()[0] == "avx512_bf16"


@pytest.mark.parametrize(
    ("float32", "bfloat16", "chosen"),
    [(117e9, 235e9, "avx512_bf16"), (175e9, 83e9, "avx512"), (100e9, 80e9, "avx512_bf16")],
    ids=["Zen 4", "a Xeon without AMX", "too close to tell"],
)
def test_an_older_instruction_set_that_is_clearly_faster_is_taken(
    monkeypatch: pytest.MonkeyPatch, float32: float, bfloat16: float, chosen: str
) -> None:
    monkeypatch.delenv("KT_RAY_ISA", raising=False)
    monkeypatch.setattr(_native, "isas", lambda: [(name, name != "amx", "none") for name in ALL])
    rates = [("avx2", 100e9), ("avx512", float32), ("avx512_bf16", bfloat16)]
    monkeypatch.setattr(_native, "product_rates", lambda: rates)
    assert (set(available_isas()), available_isas()[0], available_isas()[-1]) == (
        set(ALL[:-1]),
        "reference",
        chosen,
    )
    isa, reason = select_isa()
    assert isa == chosen and f"avx512 {float32 / 1e9:.0f}, avx512_bf16 {bfloat16 / 1e9:.0f}" in reason


def test_rates_of_products_are_measured_once() -> None:
    rates = dict(_native.product_rates())
    assert set(rates) == set(available_isas()) - {"reference"} and all(1e8 < r < 1e14 for r in rates.values())
    assert rates == dict(_native.product_rates())


def test_every_name_of_the_package_is_what_it_says() -> None:
    """Names are imported when first used; none is a module of the same name."""
    assert {name for name in native.__all__ if isinstance(getattr(native, name), ModuleType)} == set()
    with pytest.raises(AttributeError, match=r"'kt_ray\.native' has no attribute"):
        native.nothing  # noqa: B018
