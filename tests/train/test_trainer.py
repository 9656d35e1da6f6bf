"""What the loop never loses: it saves first, stops at a signal, and nothing beside a step ends it."""

from __future__ import annotations

import logging
import math
import signal
from typing import Any

import pytest

import kt_ray.train.trainer as loop
from kt_ray.batch import PassSpec
from kt_ray.errors import Stopped, UserError
from kt_ray.train import stop_signals
from kt_ray.train.cluster_protocol import ActorLost, GivenUp
from kt_ray.train.reports import PassReport
from kt_ray.train.stop_signals import StopSignals
from tests.train.test_options import Go, Scripted, go  # noqa: F401  (a fixture)

EVALUATES = ("trainer.eval_every=2",)


def at(monkeypatch: pytest.MonkeyPatch, method: str, step: int, what: Any, kind: str = "train") -> None:
    """Raise or call `what` in the scripted cluster's method at a step (0-based)."""
    before = getattr(Scripted, method)

    def changed(self: Scripted, first: Any, *rest: Any) -> Any:
        here = first.step == step and first.kind == kind if isinstance(first, PassSpec) else first == step
        if here and isinstance(what, Exception):
            raise what
        if here:
            what()
        return before(self, first, *rest)

    monkeypatch.setattr(Scripted, method, changed)


def test_a_death_does_not_lengthen_the_wait_for_room(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The last checkpoint waits as long as the step took, which takes as long again after the death."""
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(loop.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    at(monkeypatch, "run_pass", 0, lambda: now.__setitem__(0, now[0] + 1000.0))
    told: list[str] = []
    tries: list[float] = []

    def checkpoint(*_: Any) -> None:
        tries.append(now[0])
        raise ActorLost("gone") if len(tries) == 3 else UserError("no room")

    before = loop.Trainer.__init__

    def init(self: loop.Trainer, config: Any, cluster: Any, batches: Any, events: Any) -> None:
        before(self, config, cluster, batches, loop.Events(save=checkpoint, say=told.append))

    monkeypatch.setattr(loop.Trainer, "__init__", init)
    with pytest.raises(UserError, match="no room"):
        go(total=1)
    assert [round(time) for time in tries] == [1000, 1060, 1120, 2120]
    assert sum("tried again for 17 min" in line for line in told) == 1


@pytest.mark.parametrize("error", [UserError("the loss is nan"), RuntimeError("broke"), OSError("full")])
def test_a_failed_evaluation_ends_nothing(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    for step in (4, 8):
        at(monkeypatch, "run_pass", step, error, kind="eval")
    with caplog.at_level(logging.WARNING):
        trainer, cluster, told = go(*EVALUATES, held_out=[3.0, 2.0, 2.5, 2.4, 1.0])
    assert trainer.summary.steps == 8 and trainer.summary.eval_losses == {0: 3.0, 2: 2.0, 6: 2.4}
    assert told == ["save 8"] and cluster.calls.count("discard") == 2
    lines = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert [line.partition(":")[0] for line in lines] == [
        f"no held-out loss after step {step}, training goes on" for step in (4, 8)
    ]
    assert all(str(error) in line for line in lines)


def test_the_last_state_is_saved_before_it_is_evaluated(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    order: list[str] = []
    at(monkeypatch, "run_pass", 8, lambda: order.append("evaluated"), kind="eval")
    save = loop.Trainer._save
    monkeypatch.setattr(
        loop.Trainer,
        "_save",
        lambda self, taken, **k: (order.append(f"save {taken}"), save(self, taken, **k)),
    )
    go(*EVALUATES, held_out=[3.0, 2.0, 2.5, 2.4, 1.0])
    assert order == ["save 8", "evaluated"]


def test_saving_by_time(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    late = [0.0]
    clock = loop.time.monotonic
    monkeypatch.setattr(loop.time, "monotonic", lambda: clock() + late[0])
    before = Scripted.run_pass

    def run_pass(self: Scripted, spec: PassSpec) -> PassReport:
        late[0] += 700.0
        return before(self, spec)

    monkeypatch.setattr(Scripted, "run_pass", run_pass)
    assert go()[2] == ["save 3", "save 6", "save 8"]  # the default, 30 minutes
    assert go("trainer.save_every=1h")[2] == ["save 6", "save 8"]
    assert go("trainer.save_every=0")[2] == ["save 8"]


def test_saving_and_evaluating_by_epoch(go: Go) -> None:  # noqa: F811
    assert go("trainer.save_every=1epoch", steps_per_epoch=3)[2] == ["save 3", "save 6", "save 8"]
    assert go("trainer.save_every=0.5epoch", steps_per_epoch=3)[2] == [f"save {n}" for n in (2, 3, 5, 6, 8)]
    held_out = {0: 3.0, 3: 2.0, 6: 1.5, 8: 1.0}
    trainer, _, told = go(
        *("trainer.eval_every=1epoch", "trainer.save_every=0", "trainer.save_best=true"),
        held_out=[3.0],
        more_held_out=held_out,
        steps_per_epoch=3,
    )
    assert trainer.summary.eval_losses == held_out
    assert told == ["save 3", "best 3 2.0", "save 6", "best 6 1.5", "save 8", "best 8 1.0"]


@pytest.mark.parametrize(("owes", "told"), [(False, []), (True, ["best 4 2.5"])])
def test_a_state_that_was_saved_and_not_evaluated_is_evaluated_after_the_resume(
    go: Go,  # noqa: F811
    owes: bool,
    told: list[str],
) -> None:
    """The run ended between the two."""
    trainer, _, lines = go(
        *EVALUATES,
        "trainer.save_best=true",
        held_out=[3.0, 2.9, 2.5, 2.6, 2.7],
        first_step=4,
        kept=(2, 2.9),
        owes_evaluation=owes,
    )
    assert (4 in trainer.summary.eval_losses) == owes
    assert [line for line in lines if line.startswith("best 4")] == told


def test_a_best_that_cannot_be_marked_ends_nothing(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise UserError("checkpoint cannot be written", observed="No space left on device")

    monkeypatch.setattr(loop.Events, "best", full, raising=False)
    before = loop.Trainer.__init__

    def init(self: loop.Trainer, *arguments: Any, **options: Any) -> None:
        before(self, *arguments, **options)
        object.__setattr__(self.events, "best", full)

    monkeypatch.setattr(loop.Trainer, "__init__", init)
    trainer, cluster, _ = go(*EVALUATES, "trainer.save_best=true", held_out=[3.0, 2.0, 2.5, 2.4, 1.0])
    assert trainer.summary.steps == 8 and trainer.kept is None
    assert cluster.calls.count("discard") == 4  # it may have saved: actors were told to stop
    assert caplog.text.count("No space left on device") == 4


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_between_steps_saves_and_leaves(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
) -> None:
    stop = StopSignals()
    at(monkeypatch, "commit", 2, lambda: stop.handle(getattr(signal, name)))
    saved: list[int] = []
    save = loop.Trainer._save
    monkeypatch.setattr(
        loop.Trainer, "_save", lambda self, taken, **k: (saved.append(taken), save(self, taken, **k))
    )
    with pytest.raises(Stopped, match=f"{name}: stopped after step 3 of 8"):
        go(*EVALUATES, held_out=[3.0, 2.0, 2.5, 2.4, 1.0], stop=stop)
    assert saved == [3]
    assert f"{name}: saving within about 15 s" in capfd.readouterr().err


def test_a_step_that_does_not_end_is_given_up(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The pass is what it costs: two steps were applied, and those are saved."""
    monkeypatch.setattr(stop_signals, "GRACE", 0.0)
    stop = StopSignals()

    def given_up() -> None:
        stop.handle(signal.SIGTERM)
        raise GivenUp(stop.give_up())

    at(monkeypatch, "run_pass", 2, given_up)
    with pytest.raises(Stopped, match="stopped after step 2 of 8"):
        go(stop=stop)
    assert "did not end within 0 s" in stop.give_up()


def test_a_signal_in_the_last_evaluation_lets_the_run_finish(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stop = StopSignals()

    def given_up() -> None:
        stop.handle(signal.SIGTERM)
        raise GivenUp("now")

    at(monkeypatch, "run_pass", 8, given_up, kind="eval")
    trainer, _, told = go(*EVALUATES, held_out=[3.0, 2.0, 2.5, 2.4, 1.0], stop=stop)
    assert trainer.summary.steps == 8 and told == ["save 8"]


def test_a_death_after_the_signal_is_not_recovered_from(go: Go, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    stop = StopSignals()

    def died() -> None:
        stop.handle(signal.SIGTERM)  # a job manager signals the actors, too
        raise ActorLost("expert actor 0 died")

    at(monkeypatch, "run_pass", 4, died)
    with pytest.raises(Stopped, match=r"SIGTERM: expert actor 0 died before the state was saved"):
        go(stop=stop)


def test_signals_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now[0])
    left: list[int] = []
    monkeypatch.setattr(stop_signals.os, "_exit", left.append)
    stop = StopSignals()
    assert not stop and stop.give_up() == ""
    stop.handle(signal.SIGTERM)
    now[0] += 0.5
    stop.handle(signal.SIGINT)  # the same request: a whole group was signalled
    assert stop.name == "SIGTERM" and stop.give_up() == ""
    now[0] += 15
    assert "SIGTERM came" in stop.give_up()
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGTERM)
    now[0] += 2
    stop.handle(signal.SIGTERM)
    assert left == [130]


def test_the_handlers_are_put_back_and_nohup_is_respected() -> None:
    hup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with stop_signals.stop_signals() as stop:
            assert signal.getsignal(signal.SIGTERM) == stop.handle
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGHUP, hup)


@pytest.mark.parametrize(
    ("error", "committed", "saved"),
    [
        (RuntimeError("a bug"), 5, True),
        (UserError("memory is short"), 5, True),
        (RuntimeError("in the middle of a commit"), None, False),
    ],
)
def test_what_was_applied_is_saved_before_an_error_ends_the_run(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    committed: int | None,
    saved: bool,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(Scripted, "committed", lambda self: committed, raising=False)
    monkeypatch.setattr(
        loop.Trainer, "_save", lambda self, taken, **_: told.append(taken) if taken > self._saved else None
    )
    at(monkeypatch, "run_pass", 5, error)
    with pytest.raises(type(error), match=str(error)):
        go()
    assert told == [5] * saved


@pytest.mark.parametrize(("loss", "saved"), [(50.0, True), (math.nan, False)])
def test_a_refused_step_leaves_a_checkpoint_of_the_state_before_it(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    loss: float,
    saved: bool,
) -> None:
    monkeypatch.setattr(Scripted, "committed", lambda self: 5, raising=False)
    _, _, told = go("trainer.spike=3", losses={5: loss})
    assert ("save 5" in told) == saved and "the step was not applied" in told[-1]


def test_a_timeline_that_cannot_be_written_ends_nothing(
    go: Go,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.Events, "timeline", full, raising=False)
    monkeypatch.setattr(loop.Trainer, "_write_timeline", full)
    trainer, _, _ = go("trainer.timeline_every=2")
    assert trainer.summary.steps == 8 and "the timeline cannot be written; training goes on" in caplog.text


def test_a_skipped_spike_that_is_repeated_is_no_surprise(
    go: Go,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = ["trainer.eval_every=1", "trainer.save_best=true", "trainer.bad_steps=skip", "trainer.spike=3"]
    held_out = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3, 2.2]
    trainer, cluster, _ = go(*settings, losses={5: 50.0}, held_out=held_out, lost_at_best=(7,))
    assert "restart" in cluster.calls and cluster.calls.count("skip 5") == 2
    assert trainer.summary.skipped == 1 and "repeated after a recovery, has loss" not in caplog.text
