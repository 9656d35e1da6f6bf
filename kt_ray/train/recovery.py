"""Back to the last committed state after an actor was lost, and what that cost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kt_ray.config.resume_line import resume_line
from kt_ray.errors import TryAgain, UserError
from kt_ray.train.cluster_protocol import ActorLost, Cluster

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """A state to go back to: after `taken` updates, in a checkpoint (None = built as at the start)."""

    taken: int
    directory: Path | None = None

    def __str__(self) -> str:
        return f"checkpoint {self.directory.name}" if self.directory else "the start of the run"


class Recovery:
    """Brings a cluster back, at most `limit` times.

    Attributes:
        point: where a replay would begin; None = nothing was begun.
        seconds_lost: wall time lost so far: from the last progress before a death to the moment when as much
            was done again.
    """

    def __init__(
        self,
        cluster: Cluster,
        limit: int,
        point: Point | None,
        say: Callable[[str], None],
        run: Path | None = None,
    ) -> None:
        """run: the run's directory, if it has one."""
        self.cluster = cluster
        self._run = run
        self.limit = limit
        self.point = point
        self.say = say
        self.seconds_lost = 0.0
        self._progress = time.monotonic()
        self._behind = False

    @property
    def used(self) -> int:
        """Recoveries so far, those while loading included."""
        return self.cluster.recoveries

    def progressed(self) -> None:
        """Something was finished that had not been done before."""
        self._progress = time.monotonic()

    def caught_up(self, taken: int) -> None:
        """All that was done before the death is done again."""
        if self._behind:
            self._behind = False
            lost = time.monotonic() - self._progress
            self.seconds_lost += lost
            self.say(f"as far as before, after step {taken}: {lost:.1f} s lost")
            self.progressed()

    def bring_back(self, lost: ActorLost, taken: int, *, applying: bool = False) -> int:
        """Actors running again, in a committed state. Returns the number of updates behind it.

        Args:
            lost: what happened.
            taken: updates that the driver knows to be committed.
            applying: it happened in the next one's commit, which all that hold a state may have behind them.

        Raises:
            UserError: `trainer.recoveries` are used up, or it cannot be done.
        """
        while True:
            self.count(lost)
            self._behind = True
            begin = time.monotonic()
            try:
                back = self._bring_back(taken, applying)
            except ActorLost as another:
                lost = another
                continue
            except UserError as error:
                raise self.with_way_on(error) from error
            self.say(f"back after {time.monotonic() - begin:.1f} s: {self._what_follows(back, taken)}")
            return back

    def count(self, lost: ActorLost) -> None:
        """One more recovery. Raises UserError: `trainer.recoveries` are used up."""
        if self.used >= self.limit:
            raise self._given_up(lost) from lost
        self.cluster.recoveries += 1
        logger.info("%s", lost.line())
        self.say(f"{lost.what}: starting it again (recovery {self.used} of {self.limit})")

    def _bring_back(self, taken: int, applying: bool) -> int:
        survived = self.cluster.recover()
        if self.point is not None and survived is not None and 0 <= survived - taken <= applying:
            return survived
        if self.point is None or self.point.directory is None:
            self.cluster.restart()
        else:
            self.cluster.restore(str(self.point.directory), self.point.taken)
        return self.point.taken if self.point is not None else 0

    def _what_follows(self, back: int, taken: int) -> str:
        if self.point is None:
            return "nothing was lost"
        if back >= taken:
            return f"nothing committed was lost, on after step {back}"
        steps = f"step {back + 1} is" if taken == back + 1 else f"steps {back + 1}-{taken} are"
        # By design, but worth knowing in a long run.
        why = "" if self.point.directory else "no checkpoint yet (trainer.save_every), "
        return f"{why}from {self.point}: {steps} repeated"

    def _given_up(self, lost: ActorLost) -> UserError:
        if not self.limit:
            return self.with_way_on(lost)
        return self.with_way_on(
            TryAgain(
                f"{lost.what}, and all recoveries are used up",
                observed=lost.observed,
                required=f"at most {self.limit} (trainer.recoveries)",
                remedy=lost.remedy,
            )
        )

    @property
    def way_on(self) -> str:
        """What the user does after an error from which the run does not recover."""
        if self.point is None:
            return "start the same command again"
        if self.point.directory is None:
            return "start the run again (it had no checkpoint yet: trainer.save_every)"
        run = self.point.directory.parent.parent
        if self._run is not None and run.resolve() != self._run.resolve():  # where this run began
            own = "it had no checkpoint of its own yet"
            return f"start the same command again, with run.overwrite=true if run.name is set ({own})"
        return f"continue: {resume_line(run)}"

    def with_way_on(self, error: UserError) -> UserError:
        """The same error; its remedy ends with how to continue the run."""
        remedy = f"{error.remedy}; then {self.way_on}" if error.remedy else self.way_on
        return type(error)(
            error.what, where=error.where, observed=error.observed, required=error.required, remedy=remedy
        )
