"""What a host has: sockets, cores, memory, GPUs, instruction sets. From /sys and /proc, a file, or a rule."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_ray.config.files import WIZARD, is_hardware_path
from kt_ray.config.schema import Config, RuleConfig
from kt_ray.errors import UserError
from kt_ray.hardware.machine import Gpu, Hardware, Socket, on_hosts
from kt_ray.hardware.nominal import described, file_fault
from kt_ray.hardware.parts import CPUS, Cpu, cpu_named, given_gib, named_host
from kt_ray.hardware.wizard import FILE, ask, keep
from kt_ray.parse import read_yaml

GIB = 1 << 30
ISAS = ("reference", "avx2", "avx512", "avx512_bf16", "amx")  # best last; names as in kt_ray.native

# What a described machine has at most; more GiB are MiB, as nvidia-smi and free -m print them. A socket's are
# those of two modules of 256 GB on each of 12 channels: in MiB they would be 6 GiB.
_MOST = {"cores": 4096, "memory_gib": 6144, "count": 1024, "hosts": 4096}
_MOST_OF_A_CARD = 2048  # GiB
# Its keys, and those of an entry of each list.
_KEYS = {
    "": ("isa", "sockets", "gpus", "hosts", "rates"),
    "sockets": ("cpu", "cores", "memory_gib", "count"),
    "gpus": ("name", "memory_gib", "count"),
}
# What each needs, as /proc/cpuinfo calls it; the same that the engine asks CPUID (cpu_features.cpp).
_AVX2 = {"avx2", "fma", "f16c"}
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
_AVX512_BF16 = _AVX512 | {"avx512_bf16", "avx512vbmi", "avx512_vnni"}  # Cooper Lake lacks the second
_FLAGS: dict[str, set[str]] = {
    "reference": set(),
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
}

# Hardware that a rule is drawn up for when nothing else is said (conf/rule/*.yaml say the same).
NOMINAL_GPU_BYTES = int(23.6 * GIB)  # what CUDA gives of a 24 GB card
NOMINAL_CORES = 48
NOMINAL_SOCKET_BYTES = 1024 * GIB  # in a host of two sockets or more
NOMINAL_ONE_SOCKET_BYTES = 512 * GIB


class SlicedGpu(UserError):
    """A GPU that is a slice of a card (MIG), or a card that is cut into such. observed: which."""


def this_host(root: str | Path = "/") -> Hardware:
    """The machine this process runs on, as far as its affinity mask and memory limit let it use it.

    Args:
        root: where /sys and /proc are mounted (tests give a directory of their own).
    """
    base = Path(root)
    online = parse_cpus(read_text(base / "sys/devices/system/cpu/online")) or [0]
    allowed = os.sched_getaffinity(0) if base == Path("/") else set(online)
    sockets = _sockets(base, allowed)
    total, machine = sum(s.memory_bytes for s in sockets), meminfo(base / "proc/meminfo")
    reserved = meminfo(base / "proc/meminfo", "Hugetlb")  # pages that only who asks for them gets
    limit = total - total * reserved // max(1, machine)
    # Inside LXC (Proxmox) meminfo alone has the container's limit; the nodes are the machine's.
    limit = min(limit, memory_limit(base) or limit, machine or limit)
    if limit < total:  # that, or a container's limit, shared out as the nodes are sized
        sockets = tuple(replace(s, memory_bytes=max(1, s.memory_bytes * limit // total)) for s in sockets)
    quota, cores = cpu_quota(base), sum(s.cores for s in sockets)
    if quota is not None and quota < sum(len(s.cpus) for s in sockets):
        # More threads than the time allowed would only wait.
        part = min(1.0, quota / cores)
        sockets = tuple(replace(s, cores=max(1, int(s.cores * part)), pinned=False) for s in sockets)
    if base != Path("/"):
        return Hardware("this host", sockets, (), cpu_isas(base))
    gpus: tuple[Gpu, ...] = ()
    sliced = ""
    try:
        gpus = _gpus()
    except SlicedGpu as error:  # told where a GPU is wanted
        sliced = error.observed or ""
    fault = "" if gpus or sliced else nvidia_smi_fault()
    isas, forced = _usable_isas()
    return Hardware("this host", sockets, gpus, isas, gpu_fault=fault, sliced=sliced, forced_isa=forced)


def hardware_from_file(path: str | Path) -> Hardware:
    """Hardware described in YAML: sockets [{cores or cpu, memory_gib, count}], gpus [{name, memory_gib,
    count}], isa; hosts (a number) where several hosts have these sockets and GPUs; rates (name: {value,
    source}, see nominal.py, or a JSON file of mode=doctor). What parts.py says of a cpu or a GPU's name may
    be left out.

    Raises:
        UserError: the file is missing, is no YAML mapping, lacks a figure, or has one that is unknown.
    """
    file = Path(path).expanduser()
    if not file.exists():
        where = f"plan.hardware={path}"
        raise file_fault(where, "the hardware file does not exist", None, "a YAML file")
    data = read_yaml(file, "the hardware file", "see conf/hardware/ for examples")
    if not isinstance(data, Mapping):
        raise file_fault(file, "the hardware file is no mapping", None, "sockets, gpus, isa")
    return _described(data, f"file {file.name}", file)


def _described(data: Mapping[str, Any], source: str, file: Path) -> Hardware:
    """As `hardware_from_file`, of the file's content."""
    _check_keys(data, "", file)
    sockets: list[Socket] = []
    cpu: Cpu | None = None
    given = [str(entry["cpu"]) for entry in _entries(data, "sockets", file) if entry.get("cpu")]
    named = {known.name if (known := cpu_named(text)) else text for text in given}
    if len(named) > 1:
        what = "the sockets of the hardware file have several CPUs"
        raise file_fault(file, what, ", ".join(sorted(named)), "one, as the sockets of a host have")
    for entry in _entries(data, "sockets", file):
        if "cpu" in entry:
            cpu = cpu_named(str(entry["cpu"]))
            if cpu is None and ("cores" not in entry or "isa" not in data):
                required = f"one of {', '.join(known.name for known in CPUS.values())}; or cores and isa"
                raise file_fault(file, "cpu in the hardware file is unknown", entry["cpu"], required)
        for _ in range(int(_figure(entry, "count", file, 1))):
            cores = int(_figure(entry, "cores", file, cpu.cores if cpu and "cpu" in entry else None))
            if cpu and "cpu" in entry and cores > cpu.cores:
                what = f"cores in the hardware file are more than its CPU computes experts on ({cpu.name})"
                required = f"at most {cpu.cores}: second threads and efficiency cores do not count"
                raise file_fault(file, what, cores, required)
            first = sum(s.cores for s in sockets)
            memory = int(_figure(entry, "memory_gib", file) * GIB)
            sockets.append(Socket(len(sockets), tuple(range(first, first + cores)), cores, memory))
    if not sockets:
        raise file_fault(file, "the hardware file names no socket", None, "sockets")
    hosts = 1 if data.get("hosts") is None else data["hosts"]
    if isinstance(hosts, bool) or not isinstance(hosts, int) or not 1 <= hosts <= _MOST["hosts"]:
        required = "an integer of at least 1: hosts with these sockets and GPUs"
        raise file_fault(file, "hosts in the hardware file is not a number of hosts", hosts, required)
    gpus: list[Gpu] = []
    for entry in _entries(data, "gpus", file):
        name = str(entry.get("name") or "GPU")
        memory = int(_figure(entry, "memory_gib", file, given_gib(name), most=_MOST_OF_A_CARD) * GIB)
        for _ in range(int(_figure(entry, "count", file, 1))):
            gpus.append(Gpu(len(gpus), name, memory))
    isa = data.get("isa", cpu.isa if cpu else None)
    if isa is None:
        raise file_fault(
            file, "isa is missing in the hardware file", None, f"cpu, or one of {', '.join(ISAS)}"
        )
    if isa not in ISAS:
        raise file_fault(file, "isa in the hardware file is unknown", isa, ", ".join(ISAS))
    if cpu is not None and ISAS.index(isa) > ISAS.index(cpu.isa):
        what = f"isa in the hardware file is more than its CPU has ({cpu.name})"
        raise file_fault(file, what, isa, f"{cpu.isa} or less, or another cpu")
    hardware = Hardware(source, on_hosts(tuple(sockets), hosts), tuple(gpus), _isas_up_to(isa), present=False)
    rates, sheets = data.get("rates"), dict(cpu.figures) if cpu else {}
    if not isinstance(rates, str):
        own = dict(described(rates, hardware, str(file)))
        return replace(hardware, rates=tuple({**sheets, **own}.items()))
    measured = file.parent / Path(rates).expanduser()
    if not os.path.isfile(measured) and os.path.isfile(file.parent / measured.name):  # both were taken along
        measured = file.parent / measured.name
    return replace(hardware, rates=tuple(sheets.items()), rates_file=str(measured))


def nominal_hardware(rule: RuleConfig) -> Hardware:
    """The hardware that `rule` is drawn up for.

    Its GPUs at 24 GB each; two sockets of 48 cores and 1 TiB each, or one of 512 GiB; AMX unless the
    rule forces another instruction set.
    """
    n_gpus = gpus_wanted(rule)
    n_sockets = rule.experts.sockets if isinstance(rule.experts.sockets, int) else 2
    memory = NOMINAL_SOCKET_BYTES if n_sockets > 1 else NOMINAL_ONE_SOCKET_BYTES
    sockets = tuple(
        Socket(n, tuple(range(n * NOMINAL_CORES, (n + 1) * NOMINAL_CORES)), NOMINAL_CORES, memory)
        for n in range(n_sockets)
    )
    gpus = tuple(Gpu(i, "24 GB GPU", NOMINAL_GPU_BYTES) for i in range(n_gpus))
    isa = rule.experts.isa if rule.experts.isa != "auto" else "amx"
    return Hardware(f"rule {rule.name} (nominal)", sockets, gpus, _isas_up_to(isa), present=False)


def gpus_wanted(rule: RuleConfig) -> int:
    """GPUs of a host that `rule` names by itself: 0 for CPU rules, and "auto", which takes what there is."""
    if isinstance(rule.gpus, int) and rule.device != "cpu":
        return rule.gpus
    if rule.device != "cuda":
        return 0
    divided = rule.attention_hosts != "driver" and rule.replica_count % rule.nodes == 0
    replicas = rule.replica_count // rule.nodes if divided else rule.replica_count
    return gpus_of_workers(rule, stages_named(rule, default=1), replicas)


def gpus_of_workers(rule: RuleConfig, stages: int, replicas: int) -> int:
    """Different GPUs that a host's workers take, of so many replicas of so many stages."""
    named = len(set(named_devices(rule)))
    entries = [entry for entry in rule.layers or () if isinstance(entry, Mapping)]
    if any(isinstance(entry.get("device"), list | tuple) for entry in entries):
        return named  # a device per replica: workers may share one
    return (named or stages) * replicas


def named_devices(rule: RuleConfig) -> list[str]:
    """Every device that rule.layers names, as often as it does."""
    names: list[str] = []
    for entry in rule.layers or ():
        device = entry.get("device") if isinstance(entry, Mapping) else None
        names += map(str, device) if isinstance(device, list | tuple) else [str(device)] if device else []
    return names


def stages_named(rule: RuleConfig, default: int) -> int:
    """Stages that `rule` names by number or by its layers; `default` where it says "auto"."""
    if isinstance(rule.stages, int):
        return rule.stages
    if rule.layers:
        if all(isinstance(entry, Mapping) and "layers" not in entry for entry in rule.layers):
            return len({str(entry.get("device")) for entry in rule.layers})
        return len(rule.layers)
    return default


def hardware_for(config: Config) -> Hardware:
    """Hardware for `mode=plan`: plan.hardware, else this host, else the rule's nominal hardware."""
    given = config.plan.hardware
    if given and given != WIZARD:
        if is_hardware_path(given):
            return hardware_from_file(given)
        return _described(named_host(given), given, Path(given))
    host = this_host()
    if given:
        data = ask(host, cpu_name())
        described_host = _described(data, f"file {FILE}", Path(f"plan.hardware={WIZARD}"))
        keep(data)
        return described_host
    rule = config.rule
    if gpus_wanted(rule) > len(host.gpus) or (
        rule.experts.isa != "auto" and rule.experts.isa not in host.isas
    ):
        return nominal_hardware(rule)
    return host


def isas_of(flags: set[str]) -> tuple[str, ...]:
    """Instruction sets the CPU flags allow, the newest last."""
    return tuple(isa for isa in ISAS if _FLAGS[isa] <= flags)


def cpu_isas(root: str | Path = "/") -> tuple[str, ...]:
    """Instruction sets that the CPU says it has, the newest last."""
    return isas_of(set(_cpuinfo(root, "flags").split()))


def _usable_isas() -> tuple[tuple[str, ...], str]:
    """Those that the engine can use here, the fastest last, and which of them KT_RAY_ISA forces, if any; what
    the CPU says where there is no engine."""
    try:
        from kt_ray.native.isa import ENV, available_isas
    except ImportError:
        return cpu_isas(), ""
    isas, forced = available_isas(), os.environ.get(ENV, "")
    return isas, forced if forced in isas else ""


def memory_limit(root: str | Path = "/") -> int | None:
    """Bytes this process' cgroup (or one above it) may use; None = no limit."""
    limits = [_folder_limit(folder) for folder in _cgroup_folders(Path(root), "memory")]
    return min((limit for limit in limits if limit is not None), default=None)


def _folder_limit(folder: Path) -> int | None:
    """Of one cgroup, version 2 (above memory.high a process is slowed to a crawl) or 1; None = no limit."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [int(text) for text in (read_text(folder / name) for name in names) if text.isdigit()]
    return min((limit for limit in limits if 0 < limit < 1 << 60), default=None)


def memory_free(root: str | Path = "/") -> int:
    """Bytes that a new process may fill: free memory of the machine, or what is left of a cgroup's limit."""
    base = Path(root)
    free = meminfo(base / "proc/meminfo", "MemAvailable")
    for folder in _cgroup_folders(base, "memory"):
        limit, used = _folder_limit(folder), read_text(folder / "memory.current")
        used = used or read_text(folder / "memory.usage_in_bytes")  # cgroup version 1
        if limit is not None and used.isdigit():
            # Pages of files go when memory is wanted, those in use last; version 1 has sums with a prefix.
            stat = dict(
                line.split()[:2] for line in read_text(folder / "memory.stat").splitlines() if " " in line
            )
            kinds = ("inactive_file", "active_file")
            cached = sum(int(stat.get(f"total_{kind}", stat.get(kind, 0))) for kind in kinds)
            free = min(free, limit - int(used) + cached)
    return max(0, free)


def cpu_quota(root: str | Path = "/") -> float | None:
    """CPUs' worth of time that this process' cgroup may use; None = no limit."""
    quotas: list[float] = []
    for folder in _cgroup_folders(Path(root), "cpu"):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        quota = quota or read_text(folder / "cpu.cfs_quota_us")  # cgroup version 1
        period = period or read_text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _cgroup_folders(base: Path, controller: str) -> list[Path]:
    """This process' cgroup directories of `controller` (version 1 or 2), and those above them."""
    folders: list[Path] = []
    for line in read_text(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = base / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = base / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may not exist below the mount; the mount's own limit then applies.
        folder = top / path.lstrip("/")
        folders += [f for f in (folder, *folder.parents) if f == top or top in f.parents]
    return folders


def _sockets(base: Path, allowed: set[int]) -> tuple[Socket, ...]:
    nodes = sorted(
        (int(p.name[4:]), p)
        for p in (base / "sys/devices/system/node").glob("node*")
        if p.name[4:].isdigit() and (p / "cpulist").is_file()
    )
    total = meminfo(base / "proc/meminfo")
    given = re.search(r"^Mems_allowed_list:\s*(\S+)", read_text(base / "proc/self/status"), re.MULTILINE)
    allowed_nodes = parse_cpus(given[1]) if given else [number for number, _ in nodes]
    memory = {number: meminfo(path / "meminfo") for number, path in nodes if number in allowed_nodes}
    sockets = []
    for number, folder in nodes:
        cpus = [c for c in parse_cpus((folder / "cpulist").read_text()) if c in allowed]
        if cpus:  # memory-only nodes, and nodes outside the affinity mask, hold no expert actor
            ordered, cores = _cores_first(base, cpus)
            sockets.append(Socket(number, ordered, cores, memory.get(number, 0)))
    if not sockets:
        ordered, cores = _cores_first(base, sorted(allowed))
        return (Socket(0, ordered, cores, total),)
    if len(nodes) == 1:  # hot-added memory may be missing from the node's own figure
        return (replace(sockets[0], memory_bytes=max(sockets[0].memory_bytes, total)),)
    if not all(s.memory_bytes for s in sockets):  # a socket without memory of its own uses the others'
        every, cores = sum(memory.values()) or total, sum(s.cores for s in sockets)
        return tuple(replace(s, memory_bytes=every * s.cores // cores) for s in sockets)
    return tuple(sockets)


def _cores_first(base: Path, cpus: list[int]) -> tuple[tuple[int, ...], int]:
    """`cpus` with one logical CPU of each physical core first, then the siblings; and the number of cores."""
    first: list[int] = []
    rest: list[int] = []
    seen: set[tuple[int, ...]] = set()
    for cpu in cpus:
        file = base / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        core = tuple(parse_cpus(read_text(file))) or (cpu,)
        (rest if core in seen else first).append(cpu)
        seen.add(core)
    return tuple(first + rest), len(first)


def cache_bytes(cpus: Iterable[int], root: str | Path = "/") -> int:
    """Bytes of the last-level caches that these CPUs have together; 0 where Linux does not say."""
    caches: dict[str, int] = {}  # by the CPUs that share one
    for cpu in cpus:
        folders = (Path(root) / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")
        last = max(folders, key=lambda folder: read_text(folder / "level"), default=None)
        if last is not None and (size := re.fullmatch(r"(\d+)([KM]?)", read_text(last / "size"))):
            shared = read_text(last / "shared_cpu_list") or str(cpu)
            caches[shared] = int(size[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[size[2]]
    return sum(caches.values())


def parse_cpus(text: str) -> list[int]:
    """Logical CPUs of a kernel list such as "0-3,8-11"."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            cpus += range(int(low), int(high or low) + 1)
    return cpus


def read_text(file: Path) -> str:
    """A file of /proc or /sys, stripped; "" where it cannot be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def meminfo(file: Path, key: str = "MemTotal") -> int:
    """Bytes of a key in a meminfo file of the machine or of a node; 0 when it cannot be read."""
    match = re.search(rf"\b{key}:\s*(\d+)", read_text(file))
    return int(match[1]) * 1024 if match else 0


def _cpuinfo(root: str | Path, key: str) -> str:
    match = re.search(rf"^{key}\s*:(.*)", read_text(Path(root) / "proc/cpuinfo"), re.MULTILINE)
    return match[1].strip() if match else ""


UNKNOWN_CPU = "unknown CPU"


def cpu_name(root: str | Path = "/") -> str:
    """The CPU's name as /proc/cpuinfo has it; UNKNOWN_CPU where it has none."""
    return _cpuinfo(root, "model name") or UNKNOWN_CPU


def _gpus() -> tuple[Gpu, ...]:
    """Those that this process may use."""
    return listed_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))


def listed_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """NVIDIA GPUs in CUDA_VISIBLE_DEVICES order, numbered from 0. visible: its value; None = all there are.

    Raises:
        UserError: as `parse_gpus`.
    """
    known = "index,uuid,name,memory.total"
    listing = nvidia_smi(f"{known},memory.reserved")
    if not listing:  # drivers before 510 do not know the field: their total is without the reserved part
        listing = "".join(f"{line}, 0\n" for line in nvidia_smi(known).splitlines())
    return parse_gpus(listing, visible, _sliced() if listing else set())


def _sliced() -> set[str]:
    """Numbers of the cards that are cut into slices (MIG), as nvidia-smi has them."""
    rows = (line.split(",") for line in nvidia_smi("index,mig.mode.current").splitlines())
    return {row[0].strip() for row in rows if row[-1].strip() == "Enabled"}


def gpu_memory_free() -> dict[str, int]:
    """Bytes of each GPU that no program uses now, by uuid."""
    rows = (line.split(",") for line in nvidia_smi("uuid,memory.free").splitlines())
    return {row[0].strip(): int(row[1]) << 20 for row in rows if len(row) == 2 and row[1].strip().isdigit()}


def nvidia_smi(fields: str) -> str:
    """What nvidia-smi says of every GPU, a line each; "" where there is none."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def nvidia_smi_fault() -> str:
    """What nvidia-smi says where it is there and fails, as after an update of the driver; else ""."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # none is wanted
        return ""
    try:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return "no answer within 20 s"
    except OSError:
        return ""
    if not done.returncode or "No devices were found" in done.stdout:
        return ""
    lines = (line.strip() for line in f"{done.stdout}\n{done.stderr}".splitlines())
    return next((line for line in lines if line), f"exit code {done.returncode}")


def parse_gpus(listing: str, visible: str | None, sliced: Collection[str] = frozenset()) -> tuple[Gpu, ...]:
    """GPUs from nvidia-smi's "index, uuid, name, MiB, reserved MiB" lines, as CUDA_VISIBLE_DEVICES has them.

    What the driver and the firmware reserve is no program's: CUDA's total is without it.

    Args:
        sliced: indices of cards that are listed whole and of which a program gets a slice (MIG).

    Raises:
        UserError: a GPU's memory is not known, or it is a slice of a card (MIG). To leave it out would give
            those after it other numbers than CUDA's.
    """
    rows: list[tuple[str, str, str, int]] = []
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) >= 5:
            total, reserved = (int(field) if field.isdigit() else 0 for field in fields[-2:])
            rows.append((fields[0], fields[1], ", ".join(fields[2:-2]), (total - reserved) << 20))
    if visible is not None:
        if rows and visible.startswith("MIG-"):
            raise sliced_gpu(visible)
        chosen = []
        for wanted in (part.strip() for part in visible.split(",")):
            match = [row for row in rows if row[0] == wanted or (wanted and row[1].startswith(wanted))]
            if not match:  # CUDA itself stops at the first entry it does not know
                break
            chosen.append(match[0])
        rows = chosen if len(set(chosen)) == len(chosen) else []  # named twice, CUDA gives none
    cut = next((f"GPU {index}: {name}" for index, _, name, _ in rows if index in sliced), None)
    if cut is not None:
        raise sliced_gpu(cut)
    unknown = next((name for _, _, name, memory in rows if memory <= 0), None)
    if unknown is not None:
        raise _gpu_fault(UserError, "nvidia-smi does not say how much memory a GPU has", unknown)
    return tuple(Gpu(i, name, memory, uuid) for i, (_, uuid, name, memory) in enumerate(rows))


def sliced_gpu(observed: str) -> UserError:
    """The refusal of a card for which nothing can be planned."""
    return _gpu_fault(SlicedGpu, "a slice of a GPU (MIG) is not planned for", observed)


def _gpu_fault(kind: type[UserError], what: str, observed: str) -> UserError:
    return kind(
        what,
        where="nvidia-smi, CUDA_VISIBLE_DEVICES",
        observed=observed,
        required="whole cards that have memory of their own",
        remedy="set CUDA_VISIBLE_DEVICES to the numbers of such cards, or to nothing to use the CPU alone",
    )


def _isas_up_to(isa: str) -> tuple[str, ...]:
    return ISAS[: ISAS.index(isa) + 1]


def _entries(data: Mapping[str, Any], key: str, file: Path) -> list[Mapping[str, Any]]:
    value = data.get(key) or []
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        what = f"{key} in the hardware file is no list of mappings"
        raise file_fault(file, what, value, f"{key}: a list of mappings")
    for entry in value:
        _check_keys(entry, key, file)
    return value


def _check_keys(entry: Mapping[str, Any], of: str, file: Path) -> None:
    """of: the list that the entry is of; "" = the file itself."""
    unknown = next((key for key in entry if key not in _KEYS[of]), None)
    if unknown is not None:
        what = f"{f'{of}.' if of else ''}{unknown} is unknown in the hardware file"
        raise file_fault(file, what, unknown, ", ".join(_KEYS[of]))


def _figure(
    entry: Mapping[str, Any], key: str, file: Path, default: float | None = None, *, most: int | None = None
) -> float:
    value = entry.get(key, default)
    most = _MOST[key] if most is None else most
    least, kind = (1 / GIB, "number") if key == "memory_gib" else (1, "whole number")
    whole = isinstance(value, int | float) and (key == "memory_gib" or value % 1 == 0)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not whole
        or not least <= value <= most
    ):
        large = isinstance(value, int | float) and value > most
        what = f"{key} in the hardware file is " + ("too large" if large else f"not a positive {kind}")
        unit = " GiB" if key == "memory_gib" else ""
        observed = repr(value) if isinstance(value, str) else value  # which is text, though it looks like one
        raise file_fault(file, what, observed, f"a {kind} above 0, at most {most}{unit}")
    return value
