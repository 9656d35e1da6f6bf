"""Section `right`: the tests of tests/ that say whether results are right on this very machine."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from kt_ray.accept.items import FAIL, PASS, QUICK, REPO, WARN, Claim, Found, Item, Task
from kt_ray.accept.pytest_plugin import outcomes
from kt_ray.hardware.machine import Hardware

NOTHING_LEFT = 5  # pytest's exit status where no test was chosen: an earlier round has passed them all
NO_PYTEST = "pytest is not installed: pip install -e '.[dev]'"


class Topic(NamedTuple):
    """Tests that carry the marker accept(name). each: once on every card, else all cards are seen."""

    title: str
    page: str
    each: bool = False
    needs_ray: bool = False

    @property
    def missing(self) -> str:
        absent = self.needs_ray and importlib.util.find_spec("ray") is None
        return "ray is not installed" if absent else ""


TOPICS = {
    "engine": Topic("Experts agree with float64, on every ISA and in every format", "docs/numerics.md"),
    "parity": Topic("Logits and all LoRA gradients agree with Hugging Face", "README.md", each=True),
    "layouts": Topic("Stages, replicas, workers on one card and resume: one loss curve", "docs/schedule.md"),
    "ray": Topic("Under Ray as in one process, bit for bit", "docs/architecture.md", needs_ray=True),
    "lane": Topic("Experts on a GPU agree with the CPU's", "docs/gpu_lane.md", each=True),
    "generation": Topic("Greedy answers are Hugging Face's", "docs/generation.md", each=True),
    "memory": Topic(
        "Shared memory is page-locked and given back", "docs/schedule.md", each=True, needs_ray=True
    ),
}


def items(hardware: Hardware, quick: bool) -> Iterator[Item]:
    """One item per topic, and per card where each card is tried."""
    missing = NO_PYTEST if importlib.util.find_spec("pytest") is None else ""
    if quick:
        topics = tuple(name for name, topic in TOPICS.items() if not topic.missing)
        yield _item(QUICK, "A few tests of every topic", "README.md", topics, None, missing)
        return
    for name, topic in TOPICS.items():
        cards: list[int | None] = [gpu.index for gpu in hardware.gpus] if topic.each else []
        for card in cards or [None]:
            on = "" if card is None else f"_cuda{card}"
            title = topic.title + ("" if card is None else f" (GPU {card})")
            yield _item(name + on, title, topic.page, (name,), card, missing or topic.missing)


def _item(name: str, title: str, page: str, topics: tuple[str, ...], card: int | None, missing: str) -> Item:
    def run(task: Task) -> Found:
        return _tests(task, title, page, topics, card, quick=name == QUICK)

    return Item("right", name, title, run, missing)


def files_of(topics: tuple[str, ...]) -> list[str]:
    """Test modules that name one of the topics, so that the others need not be collected."""
    wanted = [f'accept("{topic}"' for topic in topics]
    found = sorted((REPO / "tests").rglob("test_*.py"))
    return [
        str(f.relative_to(REPO)) for f in found if any(w in f.read_text(encoding="utf-8") for w in wanted)
    ]


def _tests(
    task: Task, title: str, page: str, topics: tuple[str, ...], card: int | None, *, quick: bool
) -> Found:
    out = task.file.with_suffix(".jsonl")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "kt_ray.accept.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    # Warnings of packages in other versions than the tested ones say nothing about results.
    command += ["-o", "filterwarnings=default", "--continue-on-collection-errors"]
    command += [f"--accept-topic={topic}" for topic in topics] + [f"--accept-out={out}"]
    visible = {} if card is None else {"CUDA_VISIBLE_DEVICES": str(card)}
    code = task.run(
        [*command, *(["--accept-quick"] if quick else []), *files_of(topics)], environment=visible
    )
    found = outcomes(out)
    counts = Counter(entry["outcome"] for entry in found.values())
    observed = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) or "no test ran"
    ended = code in (0, 1, NOTHING_LEFT)
    if code is None:
        observed += ", then the time was over"
    elif not ended:
        observed += f"; pytest ended with exit status {code}"
    broken = counts["failed"] or not found or not (ended or code is None)
    status = FAIL if broken else WARN if code is None else PASS
    skipped = Counter(entry["message"] for entry in found.values() if entry["outcome"] == "skipped")
    failed = [
        (test, entry["message"].strip()) for test, entry in found.items() if entry["outcome"] == "failed"
    ]
    tables = {
        "Failed tests": [("test", "last line"), *((t, (m.splitlines() or [""])[-1]) for t, m in failed)]
    }
    return Found(
        claims=[Claim(status, title, observed, "every test passes", page)],
        tables=tables if failed else {},
        notes=[f"{n} tests skipped: {why}" for why, n in skipped.most_common()],
        records=dict(counts),
        cut=code is None,
    )
