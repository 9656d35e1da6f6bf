"""A count of what this process gets done, so that the driver can tell long work from none.

Whoever finishes a part of something long calls `beat`: a message taken, an operation of a pass, some bytes of
a file, one tensor of many. What matters is that the count changes, not by how much.
"""

from __future__ import annotations

_beats = 0


def beat() -> None:
    """Something was done. From any thread; two at once may count as one."""
    global _beats
    _beats += 1


def beats() -> int:
    """The count so far."""
    return _beats
