"""paced_schedule.py: a real run on described cards keeps to the schedule that is simulated.

Looked at is what overlaps and in which order, never how long it took: others use this machine, too.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPO / "benchmarks"))
        yield importlib.import_module("paced_schedule")


@pytest.fixture(scope="module")
def model(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = bench.checkpoint(tmp_path_factory.mktemp("paced") / "model")
    return made


def ran(bench: Any, model: Path, *options: str, slow: float = 1.0, hardware: str = "") -> tuple[Any, Any]:
    """A pass of eight rows in two groups, a third of the experts carried to the card."""
    case = bench.Case(hardware or bench.DESKTOP, 8, ("rule.experts.stream=0.35", "rule.groups=2", *options))
    planned = bench.Planned.of(model, case, slow)
    (run,) = bench.run_case(model, planned)
    return planned, run


def of(run: Any, stream: str, name: str = "") -> list[tuple[float, float]]:
    """What a stream did, in order; what touches is one."""
    spans: list[tuple[float, float]] = []
    for d in run.done:
        if d.stream == stream and d.name.startswith(name):
            if spans and d.start - spans[-1][1] < 1e-9:
                spans[-1] = (spans[-1][0], d.end)
            else:
                spans.append((d.start, d.end))
    return spans


def together(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> float:
    """Seconds in which both work."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in two)


def assert_together(
    bench: Any, model: Path, together_in: Callable[[Any], dict[str, float]], *options: str, hardware: str = ""
) -> None:
    """All that `together_in` finds of a run is more than 0 seconds.

    A machine that others use comes late with its next order and can hide an overlap of milliseconds, so
    slower cards are tried then. A schedule without one shows none at any speed.
    """
    for slow in (1.0, 4.0, 16.0):
        planned, run = ran(bench, model, *options, slow=slow, hardware=hardware)
        # Nothing is left out or counted twice: a run is not faster than simulated.
        assert run.seconds > 0.95 * planned.simulated().pass_seconds
        found = together_in(run)
        if all(seconds > 0 for seconds in found.values()):
            return
    pytest.fail(f"seconds in which both work, at the slowest: {found}")


@pytest.mark.parametrize("activations", ["group", "host"])
def test_links_card_and_engine_work_at_the_same_time(bench: Any, model: Path, activations: str) -> None:

    def together_in(run: Any) -> dict[str, float]:
        computing, engine = of(run, "compute"), of(run, "host")
        found = {
            # Attention of a group while the engine and the lane have another's tokens.
            "forward": together(of(run, "compute", "forward"), of(run, "host", "forward")),
            "backward": together(of(run, "compute", "recompute"), of(run, "host", "backward")),
            "lane": together(of(run, "lane"), engine),
            "experts": together(of(run, "experts"), engine),
            # A streamed layer's weights come while the one before it is computed; asked for only when it
            # begins, they would be waited for.
            "weights": together(of(run, "weights"), computing),
        }
        if activations == "host":
            busy = computing + engine + of(run, "lane")
            found |= {name: together(of(run, name), busy) for name in ("shelf out", "shelf in")}
        return found

    assert_together(bench, model, together_in, "rule.resident_layers=0", f"rule.activations={activations}")


def test_tokens_and_answers_cross_the_link_beside_the_computation(bench: Any, model: Path) -> None:
    """Where the card has most to do: it goes on with one group while another's are on their way."""

    def together_in(run: Any) -> dict[str, float]:
        return {name: together(of(run, name), of(run, "compute")) for name in ("tokens", "answers")}

    only = ("rule.experts.stream=off", "rule.gpus=1")
    assert_together(bench, model, together_in, *only, hardware=bench.SERVER)


def test_a_schedule_without_overlap_shows(bench: Any, model: Path) -> None:
    """The same bits, and none of the above."""
    _, run = ran(bench, model, slow=0.25)
    _, other = ran(bench, model, "rule.overlap=false", slow=0.25)
    assert run.loss == other.loss
    assert together(of(other, "compute", "forward"), of(other, "host", "forward")) == 0
    assert together(of(other, "answers"), of(other, "compute")) == 0


def test_cards_change_no_bit(bench: Any, model: Path) -> None:
    """The losses of the stand-in that computes at once, without a card."""
    planned, run = ran(bench, model, "rule.resident_layers=0", slow=0.25)
    with bench.cluster_of(model, planned, bench.EvenStage) as cluster:
        assert run.loss == cluster.run_pass(bench.a_pass(planned)).loss
