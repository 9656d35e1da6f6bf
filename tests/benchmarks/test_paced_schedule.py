"""paced_schedule.py: a real run on described cards keeps to the schedule that is simulated.

Looked at is what overlaps and in which order, never how long it took: others use this machine, too.
"""

from __future__ import annotations

import importlib
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


@pytest.mark.parametrize("activations", ["group", "host"])
def test_links_card_and_engine_work_at_the_same_time(bench: Any, model: Path, activations: str) -> None:
    planned, run = ran(bench, model, "rule.resident_layers=0", f"rule.activations={activations}")
    computing, engine = of(run, "compute"), of(run, "host")
    # Attention of a group while the engine and the lane have another's tokens.
    assert together(of(run, "compute", "forward"), of(run, "host", "forward")) > 0
    assert together(of(run, "compute", "recompute"), of(run, "host", "backward")) > 0
    assert together(of(run, "lane"), engine) > 0 and together(of(run, "experts"), engine) > 0
    if activations == "host":
        busy = computing + engine + of(run, "lane")
        assert together(of(run, "shelf out"), busy) > 0 and together(of(run, "shelf in"), busy) > 0
    # A streamed layer's weights come while the one before it is computed; asked for only when it begins, they
    # would be waited for.
    assert together(of(run, "weights"), computing) > 0
    # Nothing is left out or counted twice: a run is not faster than simulated.
    assert run.seconds > 0.95 * planned.simulated().pass_seconds


def test_tokens_and_answers_cross_the_link_beside_the_computation(bench: Any, model: Path) -> None:
    """Where the card has most to do: it goes on with one group while another's are on their way."""
    only = ("rule.experts.stream=off", "rule.gpus=1")
    planned, run = ran(bench, model, *only, hardware=bench.SERVER)
    computing = of(run, "compute")
    assert together(of(run, "answers"), computing) > 0 and together(of(run, "tokens"), computing) > 0
    assert run.seconds > 0.95 * planned.simulated().pass_seconds


def test_a_schedule_without_overlap_shows(bench: Any, model: Path) -> None:
    """The same bits, and none of the above."""
    _, run = ran(bench, model, slow=0.25)
    _, other = ran(bench, model, "rule.overlap=false", slow=0.25)
    assert run.loss == other.loss
    assert together(of(run, "compute", "forward"), of(run, "host", "forward")) > 0
    assert together(of(other, "compute", "forward"), of(other, "host", "forward")) == 0
    assert together(of(other, "answers"), of(other, "compute")) == 0


def test_cards_change_no_bit(bench: Any, model: Path) -> None:
    """The losses of the stand-in that computes at once, without a card."""
    planned, run = ran(bench, model, "rule.resident_layers=0", slow=0.25)
    with bench.cluster_of(model, planned, bench.EvenStage) as cluster:
        assert run.loss == cluster.run_pass(bench.a_pass(planned)).loss
