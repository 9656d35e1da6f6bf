"""Section `right`: the tests of tests/ that say whether results are right on this very machine."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kt_ray.accept.items import FAIL, PASS, QUICK, REPO, CannotRunError, Claim, Found, Item, Task
from kt_ray.accept.pytest_plugin import outcomes
from kt_ray.config.schema import Config
from kt_ray.hardware.machine import Gpu, Hardware
from kt_ray.placement.render import counted

NOTHING_LEFT = 5  # pytest's exit status where no test was chosen: an earlier round has passed them all


class Topic(NamedTuple):
    """Tests that carry the marker accept(name). each: once on every card, else all cards are seen."""

    title: str
    page: str
    each: bool = False
    needs_ray: bool = False
    needs_gpu: bool = False

    def missing(self, config: Config, hardware: Hardware) -> str:
        """Why its tests cannot run here; "" = they can."""
        if self.needs_gpu and not hardware.gpus:
            return "there is no GPU"
        if self.needs_ray and config.cluster.name == "local":
            return "not with cluster=local"
        absent = self.needs_ray and importlib.util.find_spec("ray") is None
        return "ray is not installed" if absent else ""


TOPICS = {
    "engine": Topic("Experts agree with float64, on every ISA and in every format", "docs/numerics.md"),
    "parity": Topic("Logits and all LoRA gradients agree with Hugging Face", "README.md", each=True),
    "layouts": Topic("Stages, replicas, workers on one card and resume: one loss curve", "docs/schedule.md"),
    "ray": Topic("Under Ray as in one process, bit for bit", "docs/architecture.md", needs_ray=True),
    "lane": Topic("Experts on a GPU agree with the CPU's", "docs/streaming.md", each=True),
    "generation": Topic("Greedy answers are Hugging Face's", "docs/generation.md", each=True),
    "memory": Topic(
        "Shared memory is page-locked and given back",
        "docs/schedule.md",
        each=True,
        needs_ray=True,
        needs_gpu=True,
    ),
}


def items(config: Config, hardware: Hardware, quick: bool) -> Iterator[Item]:
    """One item per topic, and per card where each card is tried."""
    packages = [name for name in ("pytest", "pytest_timeout") if importlib.util.find_spec(name) is None]
    missing = f"{', '.join(packages)} not installed: pip install -e '.[dev]'" if packages else ""
    if quick:
        topics = tuple(name for name, topic in TOPICS.items() if not topic.missing(config, hardware))
        yield _item(QUICK, "A few tests of every topic", "README.md", topics, None, missing)
        return
    for name, topic in TOPICS.items():
        cards: Sequence[Gpu | None] = hardware.gpus if topic.each else ()
        for card in cards or [None]:
            on = "" if card is None else f"_cuda{card.index}"
            title = topic.title + ("" if card is None else f" (GPU {card.index})")
            reason = missing or topic.missing(config, hardware)
            yield _item(name + on, title, topic.page, (name,), card, reason)


def _item(name: str, title: str, page: str, topics: tuple[str, ...], card: Gpu | None, missing: str) -> Item:
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
    task: Task, title: str, page: str, topics: tuple[str, ...], card: Gpu | None, *, quick: bool
) -> Found:
    out = task.file.with_suffix(".jsonl")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kt_ray.accept.pytest_plugin"]
    # Warnings of packages in other versions than the tested ones say nothing about results.
    command += ["-p", "no:cacheprovider", "-o", "filterwarnings=default", "--continue-on-collection-errors"]
    command += [f"--accept-topic={topic}" for topic in topics] + [f"--accept-out={out}"]
    command += ["--accept-quick"] if quick else []
    visible = {}
    if card is not None:
        visible["CUDA_VISIBLE_DEVICES"] = card.uuid or str(card.index)
        command += ["-m", "gpu"] if card.index else []  # the first card's item has the tests of CPUs, too
    code = task.run([*command, *files_of(topics)], visible)
    found = outcomes(out)
    counts = Counter(entry["outcome"] for entry in found.values())
    observed = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())) or "no test ran"
    skipped = Counter(entry["message"] for entry in found.values() if entry["outcome"] == "skipped")
    notes = [f"{counted(n, 'test')} skipped: {why}" for why, n in skipped.most_common()]
    if code not in (None, 0, 1, NOTHING_LEFT):
        observed += f"; pytest ended with exit status {code}"
    elif code is None and not counts["failed"]:
        return Found(notes=[f"{observed}, then the time was over", *notes], records=dict(counts), cut=True)
    elif not counts["failed"] and not counts["passed"]:
        raise CannotRunError("; ".join(notes) or observed)
    elif not counts["failed"]:
        claim = Claim(PASS, title, observed, "every test passes", page)
        return Found([claim], notes=notes, records=dict(counts))
    failed = [
        (test, entry["message"].strip()) for test, entry in found.items() if entry["outcome"] == "failed"
    ]
    rows = [("test", "last line"), *((test, (text.splitlines() or [""])[-1]) for test, text in failed)]
    return Found(
        [Claim(FAIL, title, observed, "every test passes", page)],
        {"Failed tests": rows},
        notes,
        dict(counts),
        cut=code is None,
    )
