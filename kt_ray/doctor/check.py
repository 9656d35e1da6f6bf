"""What one check of mode=doctor returns."""

from __future__ import annotations

from typing import NamedTuple

PASS, WARN, FAIL = "pass", "warn", "fail"


class Check(NamedTuple):
    """status: "pass", "warn" or "fail". remedy: what to do, empty for a pass."""

    status: str
    name: str
    observed: str
    remedy: str


def passed(name: str, observed: str) -> Check:
    return Check(PASS, name, observed, "")


def warned(name: str, observed: str, remedy: str) -> Check:
    return Check(WARN, name, observed, remedy)


def failed(name: str, observed: str, remedy: str) -> Check:
    return Check(FAIL, name, observed, remedy)
