"""mode=doctor: every check in every state it can report, and the exit code."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import ClusterConfig, ExpertsRule, RuleConfig
from kt_ray.doctor import machine_checks as machine
from kt_ray.doctor import software_checks as software
from kt_ray.doctor.check import FAIL, PASS, WARN, Check
from kt_ray.modes import doctor
from kt_ray.placement.memory import GIB, checkpoint_bytes
from kt_ray.placement.plan import make_plan
from tests.helpers.composing import compose
from tests.placement.configs import SMALL, make_config, make_hardware, small_dims

AUTO = RuleConfig("auto")


def write(root: Path, name: str, text: str) -> Path:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
    return root


def verdict(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    for word in words:
        assert word in check.observed + check.remedy, check
    assert bool(check.remedy) == (status != PASS)


@pytest.fixture(autouse=True)
def own_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """hardware.yaml is written where the command runs."""
    monkeypatch.chdir(tmp_path)


def test_run_on_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quick = ["mode=doctor", "cluster=local", "plan.rates=nominal"]  # test_doctor_rates.py measures
    config = compose([*quick, f"run.root={tmp_path}"])
    checks = doctor.examine(config)
    assert len({check.name for check in checks}) == len(checks) > 20
    assert all(bool(check.remedy) == (check.status != PASS) for check in checks)
    code = doctor.run(config)
    text = capsys.readouterr().out
    assert code == (1 if any(check.status == FAIL for check in checks) else 0)
    assert "native engine" in text and " fail" in text.splitlines()[-2]
    assert "described in hardware.yaml" in text and (tmp_path / "hardware.yaml").is_file()


def test_a_failure_gives_exit_code_1(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given = ["mode=doctor", "cluster=local", "plan.rates=nominal", "model.path=/nowhere"]
    assert doctor.run(compose([*given, f"run.root={tmp_path}"])) == 1
    assert "does not exist" in capsys.readouterr().out


def test_a_broken_check_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def swap() -> Check:
        raise RuntimeError("boom")

    monkeypatch.setattr(machine, "swap", swap)
    checks = doctor.examine(compose(["mode=doctor", "cluster=local", f"run.root={tmp_path}"]))
    assert [c for c in checks if c.status == FAIL and "RuntimeError: boom" in c.observed]
    denied = PermissionError(errno.EACCES, "Permission denied", "/closed/config.json")
    monkeypatch.setattr(doctor, "model_dims", refuse := Mock(side_effect=denied))
    monkeypatch.setattr(software, "dims_from_dir", refuse)
    checks = doctor.examine(compose(["mode=doctor", "cluster=local", "model.path=/closed"]))
    closed = [c for c in checks if "may not use" in c.observed]
    assert [c.name for c in closed] == ["model", "plan"]
    for check in closed:
        verdict(check, FAIL, "/closed/config.json", "ask its owner")


def test_memory_that_a_check_does_not_get_is_said_without_an_empty_place() -> None:
    def plan() -> Check:
        raise MemoryError("no 3 GiB")

    check = doctor._guarded(plan)
    verdict(check, FAIL, "no more memory (no 3 GiB)")


def test_python() -> None:
    verdict(software.python((3, 11, 7)), PASS, "3.11.7")
    verdict(software.python((3, 10, 0)), FAIL, "3.11")
    verdict(software.python((3, 14, 0)), FAIL)


def test_cpu_and_amx(tmp_path: Path) -> None:
    write(tmp_path, "proc/cpuinfo", "model name : Test CPU\n")
    verdict(machine.cpu(make_hardware(), tmp_path), PASS, "Test CPU", "avx512")
    verdict(machine.cpu(make_hardware(isa="reference"), tmp_path), WARN, "AVX2")
    verdict(machine.amx(make_hardware(isa="amx"), AUTO), PASS)
    verdict(machine.amx(make_hardware(), AUTO), PASS, "not needed")
    verdict(
        machine.amx(make_hardware(), RuleConfig("r", experts=ExpertsRule(backend="AMXBF16"))), WARN, "avx512"
    )
    verdict(machine.amx(make_hardware(), RuleConfig("r", experts=ExpertsRule(isa="amx"))), FAIL)


def test_numa(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/kernel/numa_balancing", "1\n")
    verdict(machine.numa(make_hardware(sockets=2), tmp_path), WARN, "sysctl")
    verdict(machine.numa(make_hardware(sockets=1), tmp_path), PASS, "node 0: 4 cores")
    write(tmp_path, "proc/sys/kernel/numa_balancing", "0\n")
    verdict(machine.numa(make_hardware(sockets=2), tmp_path), PASS, "node 1")


def test_affinity(tmp_path: Path) -> None:
    write(tmp_path, "sys/devices/system/cpu/online", "0-7\n")
    verdict(machine.affinity(tmp_path, set(range(8))), PASS, "8 of 8")
    verdict(machine.affinity(tmp_path, {0, 1}), WARN, "2 of 8", "taskset")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000")
    verdict(machine.affinity(tmp_path, set(range(8))), WARN, "1.5 CPUs")


def test_memory(tmp_path: Path) -> None:
    plan = make_plan(small_dims(), make_config(), make_hardware())
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")
    verdict(machine.memory(make_hardware(), plan, tmp_path), PASS, "32.00 GiB free", "plan needs")
    verdict(machine.memory(make_hardware(), None, tmp_path), PASS)
    verdict(machine.memory(make_hardware(memory=GIB), plan, tmp_path), FAIL, "mode=plan")
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: 1024 kB\n")
    verdict(machine.memory(make_hardware(), plan, tmp_path), WARN, "end other programs")
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", str(16 * GIB))
    write(tmp_path, "sys/fs/cgroup/memory.current", str(16 * GIB))
    verdict(machine.memory(make_hardware(), plan, tmp_path), WARN, "0.0 MiB free")


def test_swap_and_huge_pages(tmp_path: Path) -> None:
    verdict(machine.swap(write(tmp_path, "proc/meminfo", "SwapTotal: 0 kB\n")), PASS, "none")
    verdict(
        machine.swap(write(tmp_path, "proc/meminfo", "SwapTotal: 9000000 kB\nSwapFree: 9000000 kB\n")), PASS
    )
    verdict(machine.swap(write(tmp_path, "proc/meminfo", "SwapTotal: 9000000 kB\nSwapFree: 1000 kB\n")), WARN)
    name = "sys/kernel/mm/transparent_hugepage/enabled"
    verdict(machine.huge_pages(tmp_path / "absent"), WARN, "not offered")
    verdict(machine.huge_pages(write(tmp_path, name, "always madvise [never]\n")), WARN, "madvise")
    verdict(machine.huge_pages(write(tmp_path, name, "[always] madvise never\n")), PASS, "always")


def test_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(small_dims(), make_config(), make_hardware())
    usage = type("Usage", (), {"total": 4 * GIB, "free": 4 * GIB})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    verdict(machine.shared_memory(plan, ClusterConfig(), tmp_path), PASS, "arenas need")
    usage.total = usage.free = 0  # a tmpfs without a limit
    verdict(machine.shared_memory(plan, ClusterConfig(), tmp_path), PASS, "no limit")
    usage.total, usage.free = 4 * GIB, 64 << 20
    verdict(machine.shared_memory(plan, ClusterConfig(), tmp_path), WARN, "--shm-size")

    def refuse(*_: Any) -> int:
        raise PermissionError("memfd_create")

    monkeypatch.setattr(os, "memfd_create", refuse)
    verdict(machine.shared_memory(plan, ClusterConfig(), tmp_path), FAIL, "cluster=local")
    verdict(machine.shared_memory(plan, ClusterConfig(name="local"), tmp_path), PASS, "not used")


def test_open_files() -> None:
    verdict(machine.open_files((1024, 65536)), WARN, "ulimit -n 65536")
    verdict(machine.open_files((1024, 20000)), WARN, "ulimit -n 20000")  # more is refused
    verdict(machine.open_files((1024, 4096)), WARN, "limits.conf")
    verdict(machine.open_files((65536, 65536)), PASS)
    verdict(machine.open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)), PASS, "unlimited")


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(run={"root": str(tmp_path / "runs" / "deeper")})
    plan = make_plan(small_dims(), config, make_hardware())
    verdict(machine.disk(config, plan), PASS, str(tmp_path))
    verdict(machine.disk(config, None), PASS)
    usage = type("Usage", (), {"total": 1, "free": 1})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    verdict(machine.disk(config, plan), FAIL, "run.root", "trainer.keep_checkpoints=1")
    usage.total = usage.free = 0
    verdict(machine.disk(config, plan), PASS, "does not say what is free")
    usage.total = usage.free = 1
    one = with_keys(config, {"trainer.keep_checkpoints": 1})
    assert "keep_checkpoints" not in machine.disk(one, plan).remedy  # it keeps no more already
    best = with_keys(one, {"trainer.save_best": True})
    assert machine.run_bytes(best, plan) - machine.run_bytes(one, plan) == checkpoint_bytes(plan.dims, one)
    muon = make_config(optim={"name": "muon"}, trainer={"keep_checkpoints": 1})  # one moment
    assert machine.run_bytes(muon, plan) * 7 == machine.run_bytes(one, plan) * 5
    monkeypatch.setattr(os, "access", lambda *_: False)
    verdict(machine.disk(config, plan), FAIL, "cannot be written")


def test_packages() -> None:
    ranges = software.requirements()
    assert set(software.SHOWN) <= set(ranges) and ranges["torch"].startswith(">=")
    verdict(software.package("torch", ">=2.6", "2.13.0+cpu"), PASS, "2.13.0+cpu")
    verdict(software.package("torch", ">=2.6", "2.1.0"), FAIL, "pip install 'torch>=2.6'")
    verdict(software.package("no-such-package-here", ">=1"), FAIL, "not installed")
    verdict(software.package("no-such-package-here", ">=1", needed=False), WARN, "not installed")


@pytest.mark.parametrize(("mode", "status"), [("accept", WARN), ("doctor", FAIL), ("serve", FAIL)])
def test_what_only_servers_need(monkeypatch: pytest.MonkeyPatch, mode: str, status: str) -> None:
    """fastapi and starlette are absent on a machine without a network: mode=accept does without."""

    def version(name: str) -> str:
        raise software.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(software.importlib.metadata, "version", version)
    found = {check.name: check for check in (c() for c in software.packages(make_config(mode=mode)))}
    assert found["fastapi"].status == found["starlette"].status == status
    assert found["torch"].status == FAIL


# The newest version that lets others in, and the first that does not.
@pytest.mark.parametrize(
    ("name", "open_to_others", "mended"),
    [
        ("ray", "2.53.0", "2.54.0"),
        ("jinja2", "3.1.5", "3.1.6"),
        ("datasets", "3.6.0", "4.0.0"),
        ("starlette", "0.49.0", "0.49.1"),
    ],
)
def test_versions_that_let_others_in(name: str, open_to_others: str, mended: str) -> None:
    assert name in software.SHOWN
    wanted = software.requirements()[name]
    verdict(software.package(name, wanted, open_to_others), FAIL, f"pip install '{name}{wanted}'")
    verdict(software.package(name, wanted, mended), PASS)


def test_what_was_tested_together_is_in_range() -> None:
    lines = (Path(__file__).resolve().parents[2] / "constraints.txt").read_text().splitlines()
    tested = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    for name, wanted in software.requirements().items():
        if name.replace("-", "_") in tested or name in tested:
            version = tested.get(name) or tested[name.replace("-", "_")]
            verdict(software.package(name, wanted, version), PASS)
    assert {"ray", "jinja2", "datasets", "fastapi", "starlette"} <= set(tested)


def test_native() -> None:
    present = software.native(("reference",), AUTO)
    verdict(present, PASS, "chosen")
    check = software.native(make_hardware(isa="amx").isas, AUTO)
    assert check.status in (PASS, WARN) and (check.status == PASS) == ("amx" in check.observed.split(";")[0])


def test_native_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kt_ray.native", None)
    verdict(software.native(make_hardware().isas, AUTO), FAIL, "not built", "pip install")


def test_native_forced_isa_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import kt_ray.native

    def refuse(_: str) -> tuple[str, str]:
        raise ValueError("amx is not available here")

    monkeypatch.setattr(kt_ray.native, "select_isa", refuse)
    verdict(software.native(make_hardware().isas, AUTO), FAIL, "rule.experts.isa=auto")


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    verdict(software.gpus(make_hardware(), AUTO), PASS, "none")
    cuda = RuleConfig("r", device="cuda", stages=2)
    verdict(software.gpus(make_hardware(), cuda), FAIL, "needs 2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    verdict(software.gpus(make_hardware(gpus=1), AUTO), FAIL, "CUDA")
    verdict(software.gpus(make_hardware(gpus=1), RuleConfig("r", device="cpu")), PASS, "not used")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    verdict(software.gpus(make_hardware(gpus=1), AUTO), PASS, "24 GB GPU")
    verdict(software.gpus(make_hardware(), AUTO), WARN, "but torch finds", "nvidia-smi")
    verdict(software.gpus(make_hardware(), RuleConfig("r", device="cpu")), PASS, "none")
    monkeypatch.setattr(software, "nvidia_smi", lambda fields: "")
    # Too few for the rule: the plan's check says what to change.
    verdict(software.gpus(make_hardware(gpus=1), cuda), PASS, "24 GB GPU")
    for rule, remedy in (({"replicas": 4}, "rule.replicas=2"), ({"gpus": 4}, "rule.gpus=auto")):
        config = make_config(
            model={"config": SMALL["mixtral"]}, rule={"name": "auto", "device": "cuda", **rule}
        )
        verdict(doctor._plan(config, make_hardware(gpus=2))[1], FAIL, "required 4 GPUs", f"set {remedy}")
    blind = dataclasses.replace(make_hardware(), gpu_fault="Driver/library version mismatch")
    verdict(software.gpus(blind, AUTO), WARN, "nvidia-smi fails: Driver/library version mismatch", "restart")
    verdict(software.gpus(blind, RuleConfig("r", device="cpu")), PASS, "none")
    cut = dataclasses.replace(make_hardware(), sliced="GPU 1: A100")
    verdict(software.gpus(cut, AUTO), FAIL, "slice of a GPU (MIG)", "GPU 1: A100", "CUDA_VISIBLE_DEVICES")
    verdict(software.gpus(cut, RuleConfig("r", device="cpu")), PASS, "none")


def test_threads_environment() -> None:
    verdict(software.threads_environment({}), PASS)
    verdict(software.threads_environment({"OMP_NUM_THREADS": "1"}), PASS, "overruled")
    verdict(software.threads_environment({"KMP_AFFINITY": "compact"}), WARN, "unset KMP_AFFINITY")
    verdict(software.threads_environment({"OMP_PROC_BIND": "false"}), PASS)
    both = {"KMP_AFFINITY": "disabled", "OMP_PROC_BIND": "true"}
    verdict(software.threads_environment(both), WARN, "unset OMP_PROC_BIND")


def test_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    two = RuleConfig(nodes=2)
    verdict(software.hosts(ClusterConfig(), RuleConfig()), PASS, "this one")
    verdict(software.hosts(ClusterConfig("local"), two), PASS, "this one")
    verdict(software.hosts(ClusterConfig(), two), FAIL, "no Ray cluster runs")
    verdict(software.hosts(ClusterConfig(address="127.0.0.1:1"), two), FAIL, "no Ray cluster answers")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        verdict(software.hosts(ClusterConfig(address=address), two), PASS, "2 of the cluster")


def test_ray_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    file = tmp_path / "ray_current_cluster"
    verdict(software.ray_cluster(ClusterConfig("local"), file), PASS, "not used")
    verdict(software.ray_cluster(ClusterConfig(address="local"), file), PASS, "new local")
    verdict(software.ray_cluster(ClusterConfig(), file), PASS, "none running")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        file.write_text(address)
        verdict(software.ray_cluster(ClusterConfig(), file), PASS, "will be joined")
        verdict(software.ray_cluster(ClusterConfig(address=address), file), PASS, "answers")
    verdict(software.ray_cluster(ClusterConfig(), file), PASS, "none running")  # a stale file
    verdict(software.ray_cluster(ClusterConfig(address=address), file), FAIL, "ray start --head")


def test_model(tmp_path: Path) -> None:
    verdict(software.model(make_config(model={"build": "demo"}).model), PASS, "first use")
    verdict(software.model(make_config(model={"build": "demo_base"}).model), PASS, "inside the package")
    verdict(software.model(make_config().model), WARN, "model.path")
    verdict(
        software.model(make_config(model={"path": str(tmp_path / "absent")}).model), FAIL, "does not exist"
    )
    write(tmp_path, "config.json", json.dumps(SMALL["mixtral"]))
    config = make_config(model={"path": str(tmp_path)}).model
    verdict(software.model(config), FAIL)  # no shards
    quantised = {**SMALL["mixtral"], "quantization_config": {"quant_method": "awq", "version": "gemv"}}
    write(tmp_path, "config.json", json.dumps(quantised))
    verdict(software.model(config), FAIL, "awq")


def test_model_complete(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    write(tmp_path, "config.json", json.dumps(SMALL["mixtral"]))
    save_file({"model.embed_tokens.weight": torch.zeros(256, 64)}, tmp_path / "model.safetensors")
    verdict(software.model(make_config(model={"path": str(tmp_path)}).model), PASS, "1 tensor")


def test_plan_check() -> None:
    fits = doctor._plan(make_config(model={"config": SMALL["mixtral"]}), make_hardware())
    assert fits[0] is not None
    verdict(fits[1], PASS, "1 attention worker, 1 expert actor")
    small = doctor._plan(make_config(model={"config": SMALL["mixtral"]}), make_hardware(memory=1 << 20))
    verdict(small[1], FAIL, "lacks", "mode=plan")
    impossible = make_config(model={"config": SMALL["mixtral"]}, rule={"device": "cuda", "stages": 2})
    assert doctor._plan(impossible, make_hardware())[0] is None
    verdict(doctor._plan(impossible, make_hardware())[1], FAIL, "GPU")


def test_the_plan_has_the_lane_that_a_run_would_have(tmp_path: Path) -> None:
    """rule.experts.stream=auto decides by rates; for a file that is not written yet nominal ones stand in."""
    lane = ["model=deepseek_v3", "rule.device=cuda", "rule.stages=1", "rule.experts.stream=auto"]
    step = ["trainer.batch_size=16", "data.max_length=1024"]
    plans = [
        doctor._plan(compose(["mode=doctor", *lane, *step, f"plan.rates={rates}"]), make_hardware(gpus=1))[0]
        for rates in ("nominal", tmp_path / "rates.json")
    ]
    assert [plan is not None and plan.experts[0].lane is not None for plan in plans] == [True, True]
