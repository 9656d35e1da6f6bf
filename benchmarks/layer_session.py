"""Implementations of one expert layer taking turns, and the records of what they took."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
from child import Child, ChildError, Message
from common import cpu_seconds, wait_quiet
from layer_inputs import Case, expert_bytes, touched_bytes
from peak import Rates, loop_for

HERE = Path(__file__).parent
OURS = "kt_ray"
# Formats of each peer, and its memory as a multiple of the weights: copies made while loading, transposed
# or adapted ones.
PEERS: dict[str, tuple[tuple[str, ...], float]] = {
    "kt": (("bf16", "fp8", "mxfp4", "int8", "int4"), 4.0),
    "torch": (("bf16", "f32"), 1.2),
    "peft": (("bf16", "f32"), 5.0),
    "grouped_mm": (("bf16", "f32"), 2.0),
}
OURS_MEMORY = 1.2
DIRECTIONS = (
    "forward",
    "backward",
    "predict",
)  # predict: ours alone, a forward of few tokens that keeps nothing
PROCESS_BYTES = 6e8  # torch itself, activations


@dataclass
class Participant:
    """One implementation, instruction set and adapter setting.

    Attributes:
        impl: OURS or one of PEERS.
        case: what it computes; `format` may be the baseline's.
        isa: asked of the engine; None for peers.
        lora: False: without adapters.
        int8_products: of the engine.
        times: milliseconds of each round: DIRECTIONS, "repack" (part of backward).
        last: its last answer.
        error: why it has no times.
    """

    impl: str
    case: Case
    isa: str | None = None
    lora: bool = True
    int8_products: bool = False
    times: dict[str, list[float]] = field(default_factory=dict)
    last: Message = field(default_factory=dict)
    error: str = ""

    @property
    def question(self) -> Message:
        """What it is asked each round."""
        return {"isa": self.isa, "lora": self.lora, "int8_products": self.int8_products}

    @property
    def process(self) -> tuple[str, Case]:
        """Participants with the same share a process and its weights."""
        return self.impl, self.case

    def median(self, direction: str) -> float:
        """Milliseconds."""
        return statistics.median(self.times[direction])


@dataclass
class Group:
    """Participants of one run: only their times are compared.

    Attributes:
        case: what is measured.
        participants: ours and peers in the case's format.
        baselines: ours in BF16 in the same rounds, when the case has another format; one per instruction
            set of ours.
        others_cpus: CPUs that other programs used in the counted rounds, mean.
        quiet: that was at most 5 % of the machine.
        repeated: rounds that were done again because it was more.
    """

    case: Case
    participants: list[Participant]
    baselines: list[Participant] = field(default_factory=list)
    others_cpus: float = 0.0
    quiet: bool = True
    repeated: int = 0


def make_group(
    case: Case, isas: Sequence[str], peers: Sequence[str], profile: bool, int8_products: bool = False
) -> Group:
    """Who takes part: ours on every instruction set, the peers that know the format, the baseline."""
    ours = [Participant(OURS, case, isa) for isa in isas]
    if profile and case.rank:
        ours += [Participant(OURS, case, isa, lora=False) for isa in isas]
    if int8_products and case.format in ("int8", "int4"):
        ours += [Participant(OURS, case, isa, int8_products=True) for isa in isas]
    theirs = [Participant(peer, case) for peer in peers if case.format in PEERS[peer][0]]
    baselines = []
    if case.format not in ("bf16", "f32"):
        baselines = [Participant(OURS, replace(case, format="bf16"), isa) for isa in isas]
    return Group(case, ours + theirs, baselines)


def run_group(group: Group, rounds: int, patience: float, kt_python: Path | str, logs: Path) -> None:
    """Measure: one round that is not counted, then `rounds`, there and back in turn.

    Args:
        group: filled in.
        rounds: counted ones.
        patience: seconds to spend on doing disturbed rounds again and waiting for quiet between them.
        kt_python: interpreter of the peer kt, or why there is none.
        logs: folder for what the children print.
    """
    everyone = [*group.participants, *group.baselines]
    children: dict[tuple[str, Case], Child] = {}
    used = seconds = 0.0
    try:
        for participant in everyone:
            _start(participant, everyone, children, kt_python, logs)
        _round(everyone, children)
        deadline = time.monotonic() + patience
        for participant in everyone:
            participant.times = {}
        number = 0
        while number < rounds:
            others, wall = _round(everyone[::-1] if number % 2 else everyone, children)
            # Ticks of 10 ms are what /proc counts in.
            if others > quiet_cpus() * wall + 0.05 and time.monotonic() < deadline:
                for participant in everyone:
                    participant.times = {name: t[:number] for name, t in participant.times.items()}
                group.repeated += 1
                wait_quiet(deadline - time.monotonic(), below=quiet_cpus(), window=2.0)
                continue
            used, seconds, number = used + others, seconds + wall, number + 1
    finally:
        for child in children.values():
            child.close()
    group.others_cpus = used / seconds if seconds else 0.0
    group.quiet = group.others_cpus <= quiet_cpus()


def quiet_cpus() -> float:
    """How many CPUs others may use on a quiet machine: 5 %."""
    return 0.05 * (psutil.cpu_count() or 1)


def _round(everyone: list[Participant], children: dict[tuple[str, Case], Child]) -> tuple[float, float]:
    """Every participant once; (CPU seconds that other programs used, seconds it took)."""
    own, busy = cpu_seconds()
    begin = time.monotonic()
    for participant in everyone:
        if not participant.error:
            _turn(participant, children[participant.process])
    own_after, busy_after = cpu_seconds()
    return max(0.0, busy_after - busy - (own_after - own)), time.monotonic() - begin


def _start(
    participant: Participant,
    everyone: list[Participant],
    children: dict[tuple[str, Case], Child],
    kt_python: Path | str,
    logs: Path,
) -> None:
    """Start the participant's process unless it runs; a failure is the error of all who share it."""
    key = impl, case = participant.process
    if key in children or participant.error:
        return
    try:
        if impl == "kt" and isinstance(kt_python, str):
            raise ChildError(kt_python)
        factor = OURS_MEMORY if impl == OURS else PEERS[impl][1]
        need = PROCESS_BYTES + factor * case.experts * expert_bytes(case)
        free = psutil.virtual_memory().available
        if need > 0.95 * free:
            gigabytes = f"needs about {need / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
            raise ChildError(f"{gigabytes}: fewer --experts")
        python = str(kt_python) if impl == "kt" else sys.executable
        script = "kt_child.py" if impl == "kt" else "layer_child.py"
        command = [python, str(HERE / script), json.dumps({"impl": impl, "case": asdict(case)})]
        environment = {"OMP_NUM_THREADS": str(case.threads), "MKL_NUM_THREADS": str(case.threads)}
        child = children[key] = Child(command, environment, logs / f"{impl}_{case.format}.log")
        child.ask({"build": True})
        child.pause()
    except ChildError as error:
        for other in everyone:
            if other.process == key:
                other.error = str(error)


def _turn(participant: Participant, child: Child) -> None:
    child.resume()
    try:
        participant.last = child.ask(participant.question)
    except ChildError as error:
        participant.error, participant.times = str(error), {}
        return
    finally:
        child.pause()
    for name in (*DIRECTIONS, "repack"):
        if f"{name}_ms" in participant.last:
            participant.times.setdefault(name, []).append(participant.last[f"{name}_ms"])


def records(group: Group, rates: Rates) -> list[dict[str, Any]]:
    """A record per participant and direction, or one with the error; see README.md.

    Args:
        group: measured.
        rates: the machine's peak, see peak.py.
    """
    reference = next((p for p in group.participants if p.impl == OURS and p.lora and not p.error), None)
    found = []
    for participant in group.participants:
        if participant.error:
            found.append({**_head(participant, group), "direction": None, "error": participant.error})
            continue
        for direction in (name for name in DIRECTIONS if name in participant.times):
            found.append(
                {
                    **_head(participant, group),
                    "direction": direction,
                    **_speed(participant, direction, rates.get(str(group.case.threads), {})),
                    **_ratios(participant, direction, group, reference),
                }
            )
    return found


def _head(participant: Participant, group: Group) -> dict[str, Any]:
    case, last = participant.case, participant.last
    _, _, experts, k = case.dims
    return {
        "impl": participant.impl,
        "format": case.format,
        "isa": last.get("isa", participant.isa),
        "shape": case.shape,
        "model": case.shape,
        "tokens": case.tokens,
        "threads": case.threads,
        "experts": experts,
        "rows_per_expert": round(case.tokens * k / experts, 2),
        "rank": case.rank if participant.lora and participant.impl != "grouped_mm" else 0,
        "int8_products": participant.int8_products,
        "note": last.get("note", ""),
        "peak_rss_bytes": last.get("peak_rss_bytes"),
        "others_cpus": round(group.others_cpus, 3),
        "quiet": group.quiet,
        "rounds_repeated": group.repeated,
    }


def _speed(participant: Participant, direction: str, rates: dict[str, float]) -> dict[str, Any]:
    case, times = participant.case, participant.times[direction]
    median = statistics.median(times)
    isa = participant.last.get("isa") if participant.impl == OURS else None
    loop = loop_for(isa, "float32" if case.format == "f32" else "bfloat16", rates)
    loop = None if participant.int8_products else loop  # no loop multiplies integers
    gflops, touched = case.flops / median / 1e6, touched_bytes(case)
    speed = {
        "median_ms": round(median, 4),
        "min_ms": round(min(times), 4),
        "times_ms": [round(t, 4) for t in times],
        "median_s": round(median / 1e3, 7),
        "tokens_per_s": round(case.tokens / median * 1e3, 2),
        "gflops": round(gflops, 2),
        "peak_loop": loop,
        "of_peak": round(gflops / rates[loop], 4) if loop else None,
        "floor_ms": round(case.flops / rates[loop] / 1e6, 4) if loop else None,
        "touched_bytes": round(touched),
        "of_bandwidth": None,
        "bandwidth_floor_ms": None,
    }
    if "read" in rates:
        speed["bandwidth_floor_ms"] = round(touched / rates["read"] / 1e6, 4)
        speed["of_bandwidth"] = round(touched / median / 1e6 / rates["read"], 4)
    if direction == "backward" and "repack" in participant.times:
        speed["repack_ms"] = round(participant.median("repack"), 4)
    return speed


def _ratios(
    participant: Participant, direction: str, group: Group, reference: Participant | None
) -> dict[str, Any]:
    """Medians of the same rounds divided: by ours in the same format, and by ours in BF16."""
    ratios: dict[str, Any] = {}
    both = ("forward", "backward")
    if reference is not None and reference is not participant:
        ratios["ratio_to_ours"] = round(participant.median(direction) / reference.median(direction), 4)
        sums = [sum(p.median(d) for d in both) for p in (participant, reference)]
        ratios["ratio_to_ours_both"] = round(sums[0] / sums[1], 4)
    asked = (b for b in group.baselines if b.isa == participant.isa and not b.error)
    baseline = next(asked, None) if participant.impl == OURS and participant.lora else None
    if baseline is not None:
        ratios["ratio_to_bf16"] = round(participant.median(direction) / baseline.median(direction), 4)
        ratios["bf16_median_ms"] = round(baseline.median(direction), 4)
    return ratios
