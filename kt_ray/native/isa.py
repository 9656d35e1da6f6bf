"""Choice of the instruction set, made once per engine and explained."""

from __future__ import annotations

import os

from kt_ray.native import _native

ENV = "KT_RAY_ISA"


def available_isas() -> tuple[str, ...]:
    """Instruction sets this build can run on this CPU, slowest first; "reference" is always there."""
    return tuple(name for name, available, _ in _native.isas() if available)


def select_isa(requested: str = "auto") -> tuple[str, str]:
    """Which instruction set to use, and why.

    Args:
        requested: a name, or "auto"; then the environment variable KT_RAY_ISA decides if it is set,
            otherwise the best available one is taken.

    Returns:
        (name, reason in words).

    Raises:
        ValueError: the forced one is unknown or unavailable; the message lists what is available
            and what the others lack.
    """
    requested = requested or "auto"
    source = "isa"
    if requested == "auto":
        requested = os.environ.get(ENV) or "auto"
        source = ENV
    known = _native.isas()
    usable = available_isas()
    if requested == "auto":
        missing = [f"{name} not available: {reason}" for name, available, reason in known if not available]
        return usable[-1], "; ".join([f"best of {', '.join(usable)}", *missing])
    if requested in usable:
        return requested, f"forced by {source}={requested}"
    others = [f"{name} ({reason})" for name, available, reason in known if not available]
    if requested not in {name for name, _, _ in known}:
        others.append(f"{requested} (not in this build)")
    raise ValueError(
        f"{source}: instruction set {requested!r} cannot be used on this machine; "
        f"available: {', '.join(usable)}; not available: {', '.join(others)}"
    )
