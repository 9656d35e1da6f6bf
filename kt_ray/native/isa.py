"""Choice of the instruction set, made once per engine and explained."""

from __future__ import annotations

import os

from kt_ray.native import _native

ENV = "KT_RAY_ISA"

# So many times faster an older instruction set has to multiply to be taken instead of a newer one. CPUs are
# far from it on both sides, so that all processes of a run, and its replay, choose alike: Zen 4 multiplies
# bfloat16 twice as fast as float32, Xeons whose AMX is not to be had half as fast.
FASTER = 1.3


def available_isas() -> tuple[str, ...]:
    """Instruction sets this build can run on this CPU: "reference" first, last the one that "auto" takes."""
    usable = _usable()
    best = usable[-1]
    if len(usable) > 2:  # there is a choice
        rates = dict(_native.product_rates())
        for older in usable[-2:0:-1]:
            if rates[older] > FASTER * rates[best]:
                best = older
    return (*(name for name in usable if name != best), best)


def _usable() -> tuple[str, ...]:
    """The same, the newest last; nothing is measured."""
    return tuple(name for name, available, _ in _native.isas() if available)


def select_isa(requested: str = "auto") -> tuple[str, str]:
    """Which instruction set to use, and why.

    Args:
        requested: a name, or "auto"; then the environment variable KT_RAY_ISA decides if it is set,
            otherwise the newest available one, or an older one that multiplies clearly faster (`FASTER`).

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
    usable = _usable()
    if requested == "auto":
        usable = available_isas()
        missing = [f"{name} not available: {reason}" for name, available, reason in known if not available]
        why = [f"best of {', '.join(usable)}"]
        if len(usable) > 2:
            rates = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in _native.product_rates())
            why.append(f"products of one core in GFLOP/s: {rates}")
        return usable[-1], "; ".join([*why, *missing])
    if requested in usable:
        return requested, f"forced by {source}={requested}"
    others = [f"{name} ({reason})" for name, available, reason in known if not available]
    if requested not in {name for name, _, _ in known}:
        others.append(f"{requested} (not in this build)")
    raise ValueError(
        f"{source}: instruction set {requested!r} cannot be used on this machine; "
        f"available: {', '.join(usable)}; not available: {', '.join(others)}"
    )
