"""One expert actor that only loads, in a process of its own; started by load.py.

{"do": "prepare", ...} names its share; {"do": "load"} reads it and answers with times (CLOCK_MONOTONIC,
the same in every process) and memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from child import Message, serve
from common import kilobytes

_held: dict[str, Any] = {}


def answer(question: Message) -> Message:
    if question["do"] == "prepare":
        return prepare(question)
    host = _held["host"]
    baseline = _memory("VmRSS")
    # The peak so far is that of imports; from here on it is the load's.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    begun = time.monotonic()
    host.load()
    ended = time.monotonic()
    return {
        "begun": begun,
        "ended": ended,
        "weight_bytes": host.weight_bytes,
        "load_peak_bytes": _memory("VmHWM"),
        "resident_bytes": _memory("VmRSS"),
        "baseline_bytes": baseline,
    }


def prepare(job: Message) -> Message:
    """Everything but reading: what an actor has done before `load` is called."""
    from kt_ray.config.compose import compose
    from kt_ray.experts import LocalExperts, LocalExpertsSpec

    config = compose(["lora.experts=false"])
    _held["host"] = LocalExperts(
        LocalExpertsSpec(
            rank=job["rank"],
            model_dir=job["model_dir"],
            experts=tuple(job["experts"]),
            lora=config.lora,
            optim=config.optim,
            seed=0,
            isa="auto",
            threads=job["threads"],
            cpus=(),
            node=-1,
            activations="retain",
            backend=job["backend"],
        )
    )
    return {}


def _memory(key: str) -> int:
    return kilobytes(Path("/proc/self/status").read_text(encoding="ascii", errors="replace"), key)


if __name__ == "__main__":
    serve(answer)
