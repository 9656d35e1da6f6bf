"""Hardware read from /sys and /proc (of a made-up host), from files and from rules."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kt_ray.config.files import conf_dir
from kt_ray.config.schema import ExpertsRule, RuleConfig
from kt_ray.errors import UserError
from kt_ray.hardware.describe import (
    cache_bytes,
    cpu_quota,
    gpus_wanted,
    hardware_for,
    hardware_from_file,
    isas_of,
    memory_free,
    memory_limit,
    nominal_hardware,
    parse_cpus,
    parse_gpus,
    this_host,
)
from kt_ray.hardware.machine import on_hosts
from kt_ray.placement.devices import count_stages
from kt_ray.placement.memory import GIB
from kt_ray.placement.plan import make_plan
from tests.helpers.composing import compose
from tests.placement.configs import make_config, small_dims

SPR_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    *("avx512_bf16", "avx512vbmi", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"),
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def fake_host(root: Path) -> Path:
    """Two nodes of two cores with two threads each, and a node that only has memory."""
    files = {
        "proc/meminfo": "MemTotal: 201326592 kB\n",
        "proc/cpuinfo": "processor : 0\nmodel name : Test CPU\nflags : fpu " + " ".join(SPR_FLAGS) + "\n",
        "sys/devices/system/cpu/online": "0-7\n",
        "sys/devices/system/node/node2/cpulist": "\n",
        "sys/devices/system/node/node2/meminfo": "Node 2 MemTotal: 67108864 kB\n",
    }
    for node in (0, 1):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{2 * node}-{2 * node + 1},{2 * node + 4}-{2 * node + 5}\n"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal: 67108864 kB\nNode {node} MemFree: 1 kB\n"
    for cpu in range(8):
        siblings = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        files[siblings] = f"{cpu % 4},{cpu % 4 + 4}\n"
    return write(root, files)


def test_two_sockets_with_threads(tmp_path: Path) -> None:
    host = this_host(fake_host(tmp_path))
    assert [(s.node, s.cpus, s.cores) for s in host.sockets] == [(0, (0, 1, 4, 5), 2), (1, (2, 3, 6, 7), 2)]
    assert host.cpus == (0, 1, 2, 3, 4, 5, 6, 7)  # one of each core first
    assert all(s.memory_bytes == 64 * GIB for s in host.sockets)
    assert host.isas[-1] == "amx" and host.gpus == ()


def test_container_limits_are_shared_out(tmp_path: Path) -> None:
    fake_host(tmp_path)
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": str(32 * GIB),
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/cpu.max": "200000 100000",
        },
    )
    assert memory_limit(tmp_path) == 32 * GIB and cpu_quota(tmp_path) == 2.0
    host = this_host(tmp_path)
    assert [s.memory_bytes for s in host.sockets] == [16 * GIB, 16 * GIB]
    assert [(s.cores, s.pinned) for s in host.sockets] == [(1, False)] * 2
    plan = make_plan(small_dims(), make_config(), host)
    assert [(actor.threads, actor.cpus, actor.pinned) for actor in plan.experts] == [
        (1, (0, 1, 4, 5), False), (1, (2, 3, 6, 7), False)
    ]  # fmt: skip
    # As much time as there are cores, on the CPUs of half of them or of others; all that the CPUs have.
    for quota, pinned in (("400000", False), ("800000", True)):
        write(tmp_path, {"sys/fs/cgroup/job/cpu.max": f"{quota} 100000"})
        assert [(s.cores, s.pinned) for s in this_host(tmp_path).sockets] == [(2, pinned)] * 2


def test_last_level_caches_of_a_socket(tmp_path: Path) -> None:
    """Two of an EPYC's: each shared by four of its CPUs."""
    for cpu in range(8):
        folder, shared = f"sys/devices/system/cpu/cpu{cpu}/cache", "0-1,4-5" if cpu % 4 < 2 else "2-3,6-7"
        for index, (level, size, cpus) in enumerate(((1, "32K", cpu), (2, "1M", cpu), (3, "32768K", shared))):
            values = {"level": level, "size": size, "shared_cpu_list": cpus}
            write(tmp_path, {f"{folder}/index{index}/{name}": f"{value}\n" for name, value in values.items()})
    assert [cache_bytes(cpus, tmp_path) >> 20 for cpus in (range(8), (0, 4), ())] == [64, 32, 0]
    assert cache_bytes((9,), tmp_path) == 0


NODE = "sys/devices/system/node/node{}/meminfo"


@pytest.mark.parametrize(
    ("files", "memory"),
    [
        ({NODE.format(1): "Node 1 MemTotal: 0 kB\n"}, [64, 64]),  # no DIMMs: of 64 + 0 + 64 GiB half each
        ({"proc/self/status": "Mems_allowed_list:\t1\n"}, [32, 32]),  # cpuset.mems
        ({NODE.format(n): "" for n in range(3)}, [96, 96]),  # nodes say nothing
        ({"proc/meminfo": f"MemTotal: {192 << 20} kB\nHugetlb: {48 << 20} kB\n"}, [48, 48]),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.high": str(32 * GIB)}, [16, 16]),
        ({"proc/meminfo": f"MemTotal: {32 << 20} kB\n"}, [16, 16]),  # of a container, by lxcfs
    ],
)
def test_memory_that_is_there_and_may_be_used(
    tmp_path: Path, files: dict[str, str], memory: list[int]
) -> None:
    host = this_host(write(fake_host(tmp_path), files))
    assert [s.memory_bytes // GIB for s in host.sockets] == memory


def test_cgroup_version_1(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a\n2:cpu,cpuacct:/b\n0::/\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(8 * GIB),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert memory_limit(tmp_path) == 8 * GIB and cpu_quota(tmp_path) is None
    assert memory_limit(tmp_path / "absent") is None


def test_pages_of_files_are_free_memory(tmp_path: Path) -> None:
    """Weights that were read twice are "active"; a run may still have their place."""
    folder = "sys/fs/cgroup/"
    stat = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {4 * GIB}\n"
    usage = {folder + "memory.max": str(8 * GIB), folder + "memory.current": str(7 * GIB)}
    there = {"proc/meminfo": f"MemAvailable: {32 << 20} kB\n", "proc/self/cgroup": "0::/\n"}
    assert memory_free(write(tmp_path, {**there, **usage, folder + "memory.stat": stat})) == 7 * GIB


def test_without_numa_information(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 1048576 kB\n", "sys/devices/system/cpu/online": "0-1\n"})
    host = this_host(tmp_path)
    assert [(s.cpus, s.cores, s.memory_bytes) for s in host.sockets] == [((0, 1), 2, GIB)]
    assert host.isas == ("reference",)


def test_this_host_respects_the_affinity_mask() -> None:
    host = this_host()
    cpus = [cpu for socket in host.sockets for cpu in socket.cpus]
    assert sorted(cpus) == sorted(os.sched_getaffinity(0))
    assert all(1 <= s.cores <= len(s.cpus) and s.memory_bytes > 0 for s in host.sockets)


def test_an_instruction_set_that_the_environment_forces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KT_RAY_ISA", raising=False)
    host = this_host()
    assert (host.forced_isa, host.auto_isa) == ("", host.isas[-1])
    monkeypatch.setenv("KT_RAY_ISA", "reference")
    forced = this_host()
    assert (forced.auto_isa, forced.best_isa) == ("reference", host.best_isa) and forced.isas == host.isas
    for other in ("auto", "avx1024"):  # what no engine takes is refused before a run begins
        monkeypatch.setenv("KT_RAY_ISA", other)
        assert this_host().auto_isa == host.best_isa


def test_isas_of_flags() -> None:
    assert isas_of(set(SPR_FLAGS))[-1] == "amx"
    for flag in ("amx_tile", "amx_bf16", "amx_int8"):
        assert isas_of(set(SPR_FLAGS) - {flag})[-1] == "avx512_bf16"
    for flag in ("avx512_bf16", "avx512vbmi", "avx512_vnni"):
        assert isas_of(set(SPR_FLAGS) - {flag})[-1] == "avx512"
    assert isas_of(set(SPR_FLAGS) - {"f16c"}) == ("reference",)
    assert isas_of({"avx2", "fma", "f16c"}) == ("reference", "avx2")
    assert isas_of(set()) == ("reference",)


def test_parse_cpus() -> None:
    assert parse_cpus("0-2,5,8-9\n") == [0, 1, 2, 5, 8, 9]
    assert parse_cpus("") == []


def test_gpus_as_cuda_visible_devices_has_them() -> None:
    listing = "0, GPU-aa1, RTX 4090, 24564, 352\n1, GPU-bb2, RTX 4090, 24564, 352\n"
    listing += "2, GPU-cc3, H200, 143771, [N/A]\n"
    assert [gpu.name for gpu in parse_gpus(listing, None)] == ["RTX 4090", "RTX 4090", "H200"]
    chosen = parse_gpus(listing, "2,0")
    assert [(gpu.index, gpu.name, gpu.uuid) for gpu in chosen] == [
        (0, "H200", "GPU-cc3"),
        (1, "RTX 4090", "GPU-aa1"),
    ]
    assert chosen[0].memory_bytes == 143771 << 20
    assert [gpu.name for gpu in parse_gpus(listing, "GPU-cc")] == ["H200"]
    assert len(parse_gpus(listing, "0,9,1")) == 1  # CUDA stops at the first unknown entry
    assert parse_gpus(listing, "0,0") == () == parse_gpus(listing, "GPU-cc,GPU-cc3")  # as CUDA has it
    assert parse_gpus(listing, "") == () and parse_gpus("No devices were found\n", None) == ()


@pytest.mark.parametrize(
    ("visible", "message"),
    [("MIG-1b2c", r"slice of a GPU \(MIG\).*MIG-1b2c"), (None, "how much memory.*GB10")],
)
def test_gpus_that_cannot_be_planned_for_are_told(visible: str | None, message: str) -> None:
    listing = "0, GPU-aa1, NVIDIA GB10, [N/A], [N/A]\n1, GPU-bb2, RTX 4090, 24564, 352\n"
    with pytest.raises(UserError, match=message + ".*To fix: set CUDA_VISIBLE_DEVICES"):
        parse_gpus(listing, visible)
    assert [gpu.name for gpu in parse_gpus(listing, "1")] == ["RTX 4090"]


def test_a_card_that_is_cut_into_slices_is_not_planned_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where CUDA_VISIBLE_DEVICES names no slice: CUDA then takes the first of them."""

    def smi(fields: str) -> str:
        if "mig" in fields:
            return "0, [N/A]\n1, Enabled\n"
        return "0, GPU-aa1, RTX 4090, 24564, 352\n1, GPU-bb2, A100, 81920, 600\n"

    monkeypatch.setattr("kt_ray.hardware.describe.nvidia_smi", smi)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    host, told = this_host(), r"slice of a GPU \(MIG\).*GPU 1: A100.*set CUDA_VISIBLE_DEVICES"
    assert host.gpus == () and host.gpu_fault == ""
    on_cpu, lane = ["mode=plan", "rule.device=cpu"], "rule.experts.gpu_resident=1"
    for settings in (["mode=plan"], [*on_cpu, lane]):
        with pytest.raises(UserError, match=told):
            make_plan(small_dims(), compose(settings), host)
    for settings in (on_cpu, [*on_cpu, lane, "rule.experts.lane_device=cpu"]):
        assert make_plan(small_dims(), compose(settings), host).workers[0].device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert [gpu.name for gpu in this_host().gpus] == ["RTX 4090"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_host().gpus == ()


def test_a_gpu_has_what_cuda_gives_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """23.64 GiB of a 24 GB card: without what the driver reserves."""
    (card,) = parse_gpus("0, GPU-aa1, RTX 4090, 24564, 352\n", None)
    assert card.memory_bytes == (24564 - 352) << 20 and card.room == int(0.95 * card.memory_bytes)

    def old_driver(fields: str) -> str:
        return "" if "reserved" in fields else "0, GPU-aa1, RTX 3090, 24268\n"

    monkeypatch.setattr("kt_ray.hardware.describe.nvidia_smi", old_driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (old,) = this_host().gpus
    assert old.memory_bytes == 24268 << 20


def test_an_nvidia_smi_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an update of the driver: attention on the CPU is then nobody's wish."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho\necho 'Driver/library version mismatch'\nexit 18\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_host().gpu_fault == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    host = this_host()
    assert host.gpus == () and host.gpu_fault == "Driver/library version mismatch"
    told = "attention is on the CPU, since nvidia-smi fails: Driver/library version mismatch"
    assert told in make_plan(small_dims(), compose(["mode=plan"]), host).notes
    assert told not in make_plan(small_dims(), compose(["mode=plan", "rule.device=cpu"]), host).notes
    program.write_text("#!/bin/sh\necho index\n")
    assert this_host().gpu_fault == ""
    program.write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    assert this_host().gpu_fault == ""


@pytest.mark.parametrize("file", sorted((conf_dir() / "hardware").glob("*.yaml")), ids=lambda f: f.stem)
def test_shipped_hardware_files(file: Path) -> None:
    hardware = hardware_from_file(file)
    assert hardware.sockets and not hardware.present
    cpus = [cpu for socket in hardware.sockets for cpu in socket.cpus]
    assert len(set(cpus)) == len(cpus)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", "no mapping"),
        ("a: [", "cannot be read"),
        ("gpus: []", "names no socket"),
        ("sockets: [{cores: 4}]", "memory_gib"),
        ("sockets: [{cores: 0, memory_gib: 1}]", "cores"),
        ("sockets: [{cores: 0.5, memory_gib: 1}]", "cores .* not a positive whole number"),
        ("sockets: [{cores: 1, memory_gib: 1.0e-12}]", "memory_gib"),
        (
            "sockets: [{cpu: EPYC 7763, memory_gib: 64}, {cpu: EPYC 9654, memory_gib: 64}]",
            "several CPUs.*7763, EPYC 9654",
        ),
        ("sockets: [{cpu: Core i7-9700K, cores: 8, memory_gib: 64}]", "cpu .* unknown.*cores and isa"),
        ("sockets: [{cores: 1, memory_gib: 1}]\ngpus: [{name: RTX 4090, count: 1.5}]", "count .* whole"),
        ("sockets: 2", "sockets"),
        (
            "isa: avx2\nsockets: [{cores: 4, memory_gib: 16}]\ngpu: [{name: RTX 4090}]",
            "gpu is unknown .*gpus",
        ),
        ("isa: avx2\nsockets: [{cores: 4, memory_gib: 16, counts: 2}]", r"sockets\.counts is unknown"),
        (
            "isa: avx2\nsockets: [{cores: 4, memory_gib: 16}]\ngpus: [{name: RTX 4090, memory: 48}]",
            r"gpus\.mem",
        ),
        ("sockets: [{cores: 4, memory_gib: 16}]", "isa is missing"),
        ("isa: avx2\nsockets: [{cores: 4, memory_gib: 7800}]", "memory_gib .* too large"),  # MiB, as of 8 GB
        ("sockets: [{cpu: EPYC 9654, cores: 192, memory_gib: 16}]", "cores .*EPYC 9654.*at most 96"),
        (
            "isa: avx2\nsockets: [{cores: 4, memory_gib: 16}]\ngpus: [{name: x, memory_gib: 24564}]",
            "at most 2048",
        ),
        ("isa: amx\nsockets: [{cpu: EPYC 9654, memory_gib: 16}]", "more than its CPU has .EPYC 9654"),
        ("sockets: [{cores: 4, memory_gib: 16}]\nisa: sse9", "isa"),
        ("isa: avx2\nsockets: [{cores: 4, memory_gib: '16'}]", "not a positive number.*found '16'"),
        ("isa: avx2\nsockets: [{cores: 4, memory_gib: 16}]\nisa: amx", "'isa' appears twice"),
        ("sockets: [{cores: 4, memory_gib: 16}]\ngpus: [{name: x}]", "memory_gib"),
    ],
)
def test_faulty_hardware_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "host.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        hardware_from_file(file)
    assert "host.yaml" in caught.value.where and caught.value.remedy


def test_missing_hardware_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        hardware_from_file(tmp_path / "absent.yaml")


def test_nominal_hardware() -> None:
    rule = RuleConfig("four", device="cuda", stages=4, experts=ExpertsRule(sockets=2, backend="AMXBF16"))
    hardware = nominal_hardware(rule)
    assert (len(hardware.gpus), len(hardware.sockets), hardware.isas[-1]) == (4, 2, "amx")
    assert "four (nominal)" in hardware.source and not hardware.present
    one = nominal_hardware(
        RuleConfig("one", device="cuda", stages=1, experts=ExpertsRule(sockets=1, isa="avx512_bf16"))
    )
    assert one.sockets[0].memory_bytes == 512 * GIB and one.isas[-1] == "avx512_bf16"
    assert gpus_wanted(RuleConfig("r", device="cuda", stages=2, replicas=2)) == 4
    assert gpus_wanted(RuleConfig("r", device="cuda", layers=[3, 3, 2])) == 3
    assert gpus_wanted(RuleConfig("r", device="auto", stages=2)) == 0


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"nodes": 2, "replicas": 2}, 1),
        ({"nodes": 2, "replicas": 2, "attention_hosts": "all", "stages": 2}, 2),
        ({"nodes": 2, "replicas": 2, "attention_hosts": "driver"}, 2),
        ({"nodes": 2, "replicas": 3}, 3),
        ({"replicas": 2, "layers": [{"layers": 4, "device": ["cuda:0", "cuda:0"]}]}, 1),
        ({"replicas": 2, "layers": [{"layers": 4, "device": "cuda:0"}]}, 2),
    ],
)
def test_a_host_has_the_gpus_of_its_own_workers(keys: dict[str, Any], wanted: int) -> None:
    """As the plan counts them: with fewer it is refused, and on another host it would not be asked for."""
    rule, dims = RuleConfig("r", device="cuda", **keys), cast(Any, SimpleNamespace(cuts=range(1, 8)))
    assert gpus_wanted(rule) == wanted
    found = [
        replace(nominal_hardware(rule), gpus=nominal_hardware(rule).gpus[:n]) for n in (wanted, wanted - 1)
    ]
    enough, short = (replace(one, sockets=on_hosts(one.sockets, rule.nodes)) for one in found)
    assert count_stages(rule, "cuda", enough, dims)
    with pytest.raises(UserError, match="needs more GPUs than there are"):
        count_stages(rule, "cuda", short, dims)


def test_hardware_for_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kt_ray.hardware.describe._gpus", lambda: ())
    assert hardware_for(make_config()).source == "this host"
    assert "nominal" in hardware_for(make_config(rule={"device": "cuda", "stages": 2})).source
    file = str(conf_dir() / "hardware" / "laptop_16gb.yaml")
    assert hardware_for(make_config(plan={"hardware": file})).source == "file laptop_16gb.yaml"
