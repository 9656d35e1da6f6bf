"""Checks of the software: Python, packages, native engine, GPUs, Ray, the model's files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from kt_ray.actors.ray.ray_access import MODE, check_open_dashboard, token_off, token_readers
from kt_ray.actors.ray.ray_address import address_file, answers, running_cluster, started_here
from kt_ray.config.schema import ClusterConfig, Config, ModelConfig, RuleConfig
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.dims.weight_formats import TRAINABLE_FORMATS
from kt_ray.doctor.check import Check, failed, passed, warned
from kt_ray.errors import UserError
from kt_ray.hardware.describe import gpus_wanted, nvidia_smi, sliced_gpu
from kt_ray.hardware.machine import Hardware
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import billions, counted, gib
from kt_ray.runs.memory_now import gpus_in_use

# Packages whose versions matter to results or to starting at all; ranges come from the package metadata.
SHOWN = (
    *("torch", "transformers", "peft", "ray", "hydra-core", "wandb", "safetensors", "numpy"),
    *("jinja2", "fastapi", "starlette", "datasets"),  # older ones let others in
)


def python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Check:
    """The interpreter against the versions the package supports."""
    observed = ".".join(map(str, version))
    if (3, 11) <= version[:2] <= (3, 13):
        return passed("Python", observed)
    remedy = "use Python 3.11, 3.12 or 3.13: make a new environment with one of them"
    return failed("Python", observed, remedy)


def requirements() -> dict[str, str]:
    """Package -> supported range, from the source tree's pyproject.toml or the installed metadata."""
    lines: list[str] = []
    file = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if file.is_file():  # what is installed in place may have been written for an older one
        project = tomllib.loads(file.read_text())["project"]
        lines = [*project["dependencies"], *project["optional-dependencies"]["hub"]]
    else:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            lines = importlib.metadata.requires("kt_ray") or []
    ranges: dict[str, str] = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?\s*([^;]*)(;.*extra.*)?$", line)
        if match and (not match[3] or "hub" in match[3]):
            ranges[match[1].lower()] = match[2].strip()
    return ranges


def packages(config: Config) -> list[Callable[[], Check]]:
    """One check per package."""
    ranges = requirements()
    unused = {"ray"} if config.cluster.name == "local" else set()
    unused |= set() if "wandb" in config.tracking.names else {"wandb"}
    unused |= set() if config.mode in ("doctor", "serve", "train_server") else {"fastapi", "starlette"}
    # An extra: what is not there lets nobody in, and hf:// itself says that it is missing.
    shown = [name for name in SHOWN if name != "datasets" or importlib.util.find_spec(name)]
    return [partial(package, name, ranges.get(name, ""), needed=name not in unused) for name in shown]


def package(name: str, wanted: str, installed: str | None = None, *, needed: bool = True) -> Check:
    """One package's installed version against the supported range (a PEP 440 specifier).

    Args:
        needed: by this configuration; else its absence is a warning.
    """
    from packaging.specifiers import SpecifierSet

    if installed is None:
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            absent = failed if needed else warned
            return absent(name, "not installed", f"pip install '{name}{wanted}'")
    if wanted and not SpecifierSet(wanted).contains(installed, prereleases=True):
        return failed(name, f"{installed}, supported {wanted}", f"pip install '{name}{wanted}'")
    return passed(name, installed + (f" (supported {wanted})" if wanted else ""))


def native(has: Sequence[str], rule: RuleConfig) -> Check:
    """The C++ engine, and that it can use the instruction sets that the CPU `has`."""
    try:
        from kt_ray.native import FORMATS, available_isas, select_isa
    except ImportError as error:
        remedy = "pip install -e . (make demo does it), with a C++20 compiler"
        return failed("native engine", f"not built: {error}", remedy)
    isas = available_isas()
    try:
        isa, reason = select_isa(rule.experts.isa)
    except ValueError as error:
        return failed("native engine", str(error), "set rule.experts.isa=auto, or unset KT_RAY_ISA")
    loaded = [name for name in FORMATS if name in TRAINABLE_FORMATS]
    observed = (
        f"{', '.join(isas)}; {isa} chosen: {reason}; computes {len(FORMATS)} weight formats on each, "
        f"of which checkpoints may hold {', '.join(loaded)}"
    )
    missing = [name for name in has if name not in isas]
    if missing:
        remedy = (
            "rebuild with a newer compiler (gcc 12 or clang 16), or allow AMX in the kernel or hypervisor"
        )
        return warned("native engine", f"{observed}; the CPU also has {', '.join(missing)}", remedy)
    return passed("native engine", observed)


def gpus(hardware: Hardware, rule: RuleConfig, plan: Plan | None = None) -> Check:
    """GPUs, their driver, torch's CUDA, and whether other programs use what the plan needs of them. Whether
    there are as many as the rule asks for, the plan's own check says."""
    if not hardware.gpus:
        if hardware.sliced and rule.device != "cpu":
            refusal = sliced_gpu(hardware.sliced)
            return failed("GPUs", f"{refusal.what} ({refusal.observed})", refusal.remedy)
        if wanted := gpus_wanted(rule):
            remedy = "set rule=auto, or check nvidia-smi and the driver"
            return failed("GPUs", f"none, rule {rule.name} needs {wanted}", remedy)
        if rule.device != "cpu" and hardware.gpu_fault:
            remedy = "restart the machine, else install the driver again; or set rule.device=cpu"
            return warned("GPUs", f"nvidia-smi fails: {hardware.gpu_fault}", remedy)
        if rule.device != "cpu" and importlib.util.find_spec("torch"):
            import torch

            if torch.cuda.is_available():  # planned without
                observed = f"none by nvidia-smi, but torch finds {torch.cuda.device_count()}: not used"
                remedy = "put nvidia-smi, which comes with the driver, on PATH; or set rule.device=cpu"
                return warned("GPUs", observed, remedy)
        return passed("GPUs", "none: attention runs on the CPU")
    names = ", ".join(f"cuda:{gpu.index} {gpu.name} {gib(gpu.memory_bytes)}" for gpu in hardware.gpus)
    driver = nvidia_smi("driver_version").partition("\n")[0].strip() or "unknown"
    observed = f"{names}; driver {driver}"
    if rule.device == "cpu":
        return passed("GPUs", f"{observed}; not used (rule.device=cpu)")
    try:
        import torch

        from kt_ray.gpu import cuda_fault
    except ImportError as error:
        return failed("GPUs", f"{observed}; torch cannot be imported: {error}", "pip install torch")
    if fault := cuda_fault():
        remedy = (
            "install a CUDA build of torch that the driver supports (pytorch.org), or set rule.device=cpu"
        )
        return failed("GPUs", f"{observed}; {fault}", remedy)
    if plan is not None and (taken := gpus_in_use(plan)):
        remedy = "end them (nvidia-smi lists them), or set rule.gpu_memory to the GiB that the run may use"
        return warned("GPUs", f"{observed}; {'; '.join(taken)}", remedy)
    return passed("GPUs", f"{observed}; torch CUDA {torch.version.cuda}")


def threads_environment(environment: dict[str, str] | None = None) -> Check:
    """Variables that bind or limit OpenMP threads. The plan sets torch's threads, the engine has its own."""
    values = dict(os.environ) if environment is None else environment
    for name in ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND"):
        if values.get(name, "").lower() not in ("", "false", "disabled", "none"):
            return warned(
                "threads",
                f"{name}={values[name]} binds torch's threads",
                f"unset {name}: actors bind themselves to their sockets",
            )
    number = values.get("OMP_NUM_THREADS")
    text = f"OMP_NUM_THREADS={number}, overruled by the plan" if number else "OMP_NUM_THREADS not set"
    return passed("threads", text)


def ray_cluster(cluster: ClusterConfig, file: Path | None = None) -> Check:
    """Which Ray cluster would be used. Connects a socket at most; starts nothing."""
    if cluster.name != "ray":
        return passed("Ray cluster", f"not used (cluster={cluster.name})")
    if cluster.address == "local":
        return passed("Ray cluster", "a new local one will be started")
    named = cluster.address if cluster.address != "auto" else os.environ.get("RAY_ADDRESS", "")
    if named and named not in ("auto", "local"):
        if answers(named):
            return passed("Ray cluster", f"{named} answers")
        remedy = "start it (ray start --head), or set cluster.address=local"
        return failed("Ray cluster", f"{named} does not answer", remedy)
    found = started_here(address_file() if file is None else file)
    if isinstance(found, str):
        remedy = "set cluster.address=HOST:PORT if that cluster is yours, or cluster.address=local"
        return warned("Ray cluster", f"{found}; a local one will be started", remedy)
    if found is not None:
        return passed("Ray cluster", f"a cluster runs at {found.address} and will be joined")
    return passed("Ray cluster", "none running: a local one will be started")


def ray_access(cluster: ClusterConfig) -> Check:
    """Who else could run programs in this user's cluster: its token, and whether it asks for one."""
    if cluster.name != "ray":
        return passed("Ray access", f"not used (cluster={cluster.name})")
    try:
        check_open_dashboard(cluster)
    except UserError as error:
        return failed("Ray access", f"{error.what} ({error.observed})", error.remedy)
    if token_off():
        observed = f"{MODE}=disabled: every user of this host can run programs as this one"
        return warned("Ray access", observed, f"unset {MODE}")
    if open_file := token_readers():
        return warned("Ray access", open_file, "chmod 600 the file; delete it if others may have read it")
    return passed("Ray access", "only with the token, which only this user reads")


def hosts(cluster: ClusterConfig, rule: RuleConfig) -> Check:
    """Whether there is a cluster for a plan of several hosts. What its nodes are like, a run looks at."""
    if rule.nodes == 1 or cluster.name != "ray":
        return passed("hosts", "this one")
    try:
        running = running_cluster(cluster.address)
    except UserError as error:
        return failed("hosts", f"rule.nodes={rule.nodes}: {error.what} ({error.observed})", error.remedy)
    if running is None:
        remedy = "ray start --head here, ray start --address=HOST:PORT on the others (docs/multi_node.md)"
        return failed("hosts", f"rule.nodes={rule.nodes}, but no Ray cluster runs", remedy)
    text = f"{rule.nodes} of the cluster at {running.address}; a run looks at each before it loads"
    return passed("hosts", text)


def model(config: ModelConfig) -> Check:
    """The checkpoint: config, index and shards, headers only."""
    if config.path is None:
        if config.build is not None:
            how = "inside the package" if config.build == "demo_base" else "built locally on first use"
            return passed("model", f"{config.name}: {how}")
        observed = f"{config.name}: dimensions only, no checkpoint"
        return warned("model", observed, "set model.path=<directory> to train")
    try:
        dims = dims_from_dir(config.path)
        if dims.refusal:
            return failed("model", f"{config.path}: {dims.refusal}", "choose another checkpoint")
        from kt_ray.checkpoint import CheckpointIndex

        index = CheckpointIndex.open(config.path)
    except UserError as error:
        return failed("model", f"{error.what} ({error.where})" if error.where else error.what, error.remedy)
    parameters, tensors = billions(dims.total_params), counted(len(index.tensors), "tensor")
    return passed("model", f"{config.path}: {parameters} parameters, {tensors}")
