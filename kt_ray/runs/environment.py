"""Where a run took place: what env.json says of the machine, the versions and the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kt_ray.hardware.describe import UNKNOWN_CPU, cpu_name

_PACKAGES = ("torch", "transformers", "peft", "ray", "hydra-core", "numpy", "safetensors", "wandb", "kt_ray")


def environment() -> dict[str, Any]:
    """Where this process runs: host, CPU, memory in bytes, versions, commit, command line."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    name = cpu_name()  # /proc/cpuinfo names no model on ARM
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": name if name != UNKNOWN_CPU else platform.processor() or platform.machine() or name,
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "packages": versions,
        "git_commit": git_commit(),
        "argv": list(sys.argv),
        "pid": os.getpid(),
    }


def git_commit() -> str | None:
    """The checkout's commit, "+" behind it when tracked files are changed; None outside a checkout."""
    top = Path(__file__).resolve().parents[2]
    if not (top / ".git").exists():
        # An installed package may lie inside some other project's checkout.
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(top), *arguments], capture_output=True, text=True, timeout=10, check=True
        )
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None
