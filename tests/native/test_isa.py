"""Which instruction set is chosen, and what a forced one does."""

from __future__ import annotations

import pytest

from kt_ray.native import Engine, _native, available_isas, select_isa

ALL = ("reference", "avx2", "avx512", "avx512_bf16")


def test_what_is_available_is_ordered_and_never_invented() -> None:
    isas = available_isas()
    assert isas[0] == "reference"
    assert list(isas) == [name for name in ALL if name in isas]
    with open("/proc/cpuinfo") as file:
        flags = next((set(line.split()) for line in file if line.startswith("flags")), set())
    for name, flag in [("avx2", "avx2"), ("avx512", "avx512bw"), ("avx512_bf16", "avx512_bf16")]:
        assert (name in isas) == (flag in flags)


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


@pytest.mark.parametrize("name", ["amx", "avx1024"])
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
    with pytest.raises(ValueError, match="isa: this build has no amx"):
        _native.Engine("amx", 1, [])
