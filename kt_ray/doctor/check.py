"""What one check of mode=doctor returns."""

from __future__ import annotations

from typing import NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"


class Check(NamedTuple):
    """status: "pass", "warn" or "fail". remedy: what to do, empty for a pass."""

    status: str
    name: str
    found: str
    remedy: str


def passed(name: str, found: str) -> Check:
    return Check(PASS, name, found, "")


def warned(name: str, found: str, remedy: str) -> Check:
    return Check(WARN, name, found, remedy)


def failed(name: str, found: str, remedy: str) -> Check:
    return Check(FAIL, name, found, remedy)
