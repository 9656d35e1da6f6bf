"""Which files this process has open, so that a test sees what was left open."""

from __future__ import annotations

import os
import time


def descriptors() -> set[str]:
    """Number and target of each open file. Not those of /proc, which threads read at all times, nor sockets
    and events: Ray's and gloo's threads open them even when their test is over.
    """
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # closed meanwhile, as the one of this listing is
            continue
        if not target.startswith(("/proc/", "socket:", "anon_inode:")):
            found.add(f"{fd} {target}")
    return found


def left_open(before: set[str], most: int = 0) -> set[str]:
    """What is open that was not, once that is no more than `most` or stays so: threads of earlier tests may
    open a file for a moment.
    """
    deadline = time.monotonic() + 10
    while len(left := descriptors() - before) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return left
