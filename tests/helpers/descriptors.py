"""Which files this process has open, so that a test sees what was left open."""

from __future__ import annotations

import os
import time


def descriptors() -> set[str]:
    """Number and target of each open file. Not those of /proc: threads read there at all times."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # closed meanwhile, as the one of this listing is
            continue
        if not target.startswith("/proc/"):
            found.add(f"{fd} {target}")
    return found


def left_open(before: set[str], seconds: float = 10) -> set[str]:
    """What is open that was not, and stays so: threads of earlier tests may open a file for a moment."""
    deadline = time.monotonic() + seconds
    while (left := descriptors() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
