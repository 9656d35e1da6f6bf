"""Checks of the machine: CPU, sockets, memory, limits, disk. Each takes what it looks at as arguments."""

from __future__ import annotations

import math
import mmap
import os
import resource
import shutil
from pathlib import Path

from kt_ray.config.schema import ClusterConfig, Config, RuleConfig
from kt_ray.disk import free_bytes
from kt_ray.doctor.check import Check, failed, passed, warned
from kt_ray.hardware.describe import (
    GIB,
    cpu_name,
    cpu_quota,
    meminfo,
    memory_free,
    memory_limit,
    parse_cpus,
    read_text,
)
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import cpu_ranges, gib
from kt_ray.runs.disk_room import disk_need

MIN_OPEN_FILES = 8192  # Ray keeps several descriptors per worker and object
OBJECT_STORE = GIB  # /dev/shm that Ray's object store wants at least; below it falls back to a disk file


def cpu(hardware: Hardware, root: str | Path = "/") -> Check:
    """CPU model and the best instruction set it has."""
    best = hardware.best_isa
    observed = f"{cpu_name(root)}; best ISA {best}"
    if best == "reference":
        remedy = "use a CPU with AVX2 or better: the reference kernels are for checking only"
        return warned("CPU", observed, remedy)
    return passed("CPU", observed)


def amx(hardware: Hardware, rule: RuleConfig) -> Check:
    """AMX tiles. Their absence only matters to a rule that names them."""
    if "amx" in hardware.isas:
        return passed("AMX", "present")
    best = hardware.auto_isa
    if rule.experts.isa == "amx":
        return failed("AMX", "not present, but rule.experts.isa=amx", "set rule.experts.isa=auto")
    if rule.experts.backend.startswith("AMX"):
        observed = f"not present: {rule.experts.backend} runs the same mathematics on {best}"
        return warned("AMX", observed, "expect a lower rate, or use a Sapphire Rapids or newer Xeon")
    return passed("AMX", f"not present, not needed: {best} is used")


def numa(hardware: Hardware, root: str | Path = "/") -> Check:
    """Sockets, and whether the kernel moves pages behind our back."""
    observed = "; ".join(f"node {s.node}: {s.cores} cores, {gib(s.memory_bytes)}" for s in hardware.sockets)
    balancing = read_text(Path(root) / "proc/sys/kernel/numa_balancing")
    if len(hardware.sockets) > 1 and balancing not in ("", "0"):
        return warned("NUMA", f"{observed}; automatic balancing is on", "sudo sysctl kernel.numa_balancing=0")
    return passed("NUMA", observed)


def affinity(root: str | Path = "/", allowed: set[int] | None = None) -> Check:
    """CPUs this process may use, against those the machine has."""
    mask = os.sched_getaffinity(0) if allowed is None else allowed
    online = parse_cpus(read_text(Path(root) / "sys/devices/system/cpu/online")) or sorted(mask)
    observed = f"{len(mask)} of {len(online)} CPUs ({cpu_ranges(sorted(mask))})"
    quota = cpu_quota(root)
    if quota is not None and quota < len(mask):
        observed += f", limited to {quota:.1f} CPUs of time by the container"
        remedy = "raise the container's CPU limit, or give it CPUs of its own (docker --cpuset-cpus)"
        return warned("CPUs", observed, f"{remedy}: only to these are threads pinned")
    if len(mask) < len(online):
        return warned("CPUs", observed, "start without taskset, or give the container or job every CPU")
    return passed("CPUs", observed)


def memory(hardware: Hardware, plan: Plan | None, root: str | Path = "/") -> Check:
    """Free memory against what the plan's sockets on this host need."""
    total = sum(s.memory_bytes for s in hardware.sockets)
    known = meminfo(Path(root) / "proc/meminfo", "MemAvailable")
    free = min(memory_free(root), total) if known else total
    limit = memory_limit(root)
    observed = f"{gib(free)} free of {gib(total)}"
    observed += " (container limit)" if limit and limit <= total else ""
    if plan is None:
        return passed("memory", observed)
    need = sum(b.total for b in plan.budgets if b.is_socket and b.host == 0)
    observed += f", plan needs {gib(need)}"
    if need > total:
        return failed("memory", observed, "run mode=plan: it says which rule or option would fit")
    if need > free:
        return warned("memory", observed, "end other programs before training")
    return passed("memory", observed)


def swap(root: str | Path = "/") -> Check:
    """Swap in use: weights that are read every step must not be paged out."""
    file = Path(root) / "proc/meminfo"
    total, free = meminfo(file, "SwapTotal"), meminfo(file, "SwapFree")
    if not total:
        return passed("swap", "none")
    used = total - free
    observed = f"{gib(used)} used of {gib(total)}"
    if used > GIB // 4:
        return warned("swap", observed, "free memory, then: sudo swapoff -a && sudo swapon -a")
    return passed("swap", observed)


def huge_pages(root: str | Path = "/") -> Check:
    """Transparent huge pages: large weights have fewer TLB misses with them."""
    text = read_text(Path(root) / "sys/kernel/mm/transparent_hugepage/enabled")
    if not text:
        remedy = "expect a somewhat lower rate on large models"
        return warned("huge pages", "not offered by this kernel", remedy)
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        remedy = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return warned("huge pages", "transparent huge pages are off", remedy)
    return passed("huge pages", f"transparent: {chosen}")


def shared_memory(plan: Plan | None, cluster: ClusterConfig, shm: str | Path = "/dev/shm") -> Check:
    """Arenas between actors are anonymous memory files; Ray's object store lies in /dev/shm."""
    if cluster.name != "ray":
        return passed("shared memory", f"not used (cluster={cluster.name})")
    observed = "arenas"
    if plan is not None:
        observed += f" need {gib(sum(b.items.get('staging', 0) for b in plan.budgets if b.host == 0))}"
    try:
        _try_arena()
    except OSError as error:
        remedy = "allow memfd_create and /proc/<pid>/fd (seccomp profile, hidepid), or set cluster=local"
        return failed("shared memory", f"{observed}: {error}", remedy)
    try:
        usage = shutil.disk_usage(shm)
    except OSError:
        remedy = "mount a tmpfs there: Ray's object store lies on it"
        return warned("shared memory", f"{observed}; no {shm}", remedy)
    limit = f"{gib(usage.free)} free of {gib(usage.total)}" if usage.total else "no limit of its own"
    observed += f"; {shm} has {limit}"
    if usage.total and usage.free < OBJECT_STORE:
        remedy = "give the container --shm-size=2g: Ray's object store is slow on disk"
        return warned("shared memory", observed, remedy)
    return passed("shared memory", observed)


def _try_arena() -> None:
    """One page of an anonymous memory file, written here and read through /proc as a peer does."""
    fd = os.memfd_create("kt_ray-doctor", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        os.pwrite(fd, b"arena", 0)
        with open(f"/proc/{os.getpid()}/fd/{fd}", "rb") as peer:
            if peer.read(5) != b"arena":
                raise OSError("a memory file does not read back")
    finally:
        os.close(fd)


def open_files(limits: tuple[int, int] | None = None) -> Check:
    """The limit on open files."""
    soft, hard = limits or resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = resource.RLIM_INFINITY
    limited = f"{soft} (hard limit {'none' if hard == infinite else hard})"
    observed = "unlimited" if soft == infinite else limited
    if soft != infinite and soft < MIN_OPEN_FILES:
        room = hard == infinite or hard >= MIN_OPEN_FILES
        most = 65536 if hard == infinite else min(65536, hard)  # more is refused
        remedy = f"ulimit -n {most}" if room else "raise nofile in /etc/security/limits.conf or the container"
        return warned("open files", observed, remedy)
    return passed("open files", observed)


def disk(config: Config, plan: Plan | None) -> Check:
    """Space and write access where runs are kept: adapter, and checkpoints with their moments."""
    root = Path(config.run.root)
    folder = next((p for p in (root, *root.parents) if os.path.exists(p)), Path("/"))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        remedy = "set run.root to a directory you may write to"
        return failed("disk", f"{folder} cannot be written to", remedy)
    free = free_bytes(folder)
    observed = (
        f"{gib(free)} free at {folder}" if math.isfinite(free) else f"{folder} does not say what is free"
    )
    if plan is None:
        return passed("disk", observed)
    need = run_bytes(config, plan)
    observed += f", a run writes {gib(need)}"
    if need > free:
        fewer = ", or trainer.keep_checkpoints=1" if config.trainer.keep_checkpoints > 1 else ""
        return failed("disk", observed, f"set run.root to a larger disk{fewer}")
    return passed("disk", observed)


def run_bytes(config: Config, plan: Plan) -> int:
    """Bytes that a run of unknown length writes; of trainer.keep_checkpoints=0, which keeps all, two
    checkpoints."""
    need = disk_need(plan.dims, config, None, 0.0)
    return need.total + need.checkpoint * (not config.trainer.keep_checkpoints)
