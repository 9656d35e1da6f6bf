"""The training loop: token ids in, scalars out.

One optimizer step = one training pass per wave of micro-batches, over which gradients add up, then two
phases: `prepare` (gradients reduced, squared norms), a look at loss and norm, `commit` (clip, AdamW,
weights back). Nothing is random but by counters, so a step is a pure function of (configuration, step
number, parameters).
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kt_ray.batch import Objective, TokenLoss, Wave, trained_tokens
from kt_ray.config.interval import ends_after, evaluation_interval, seconds_of
from kt_ray.config.schema import Config
from kt_ray.data.row_types import Row
from kt_ray.disk import only_warned
from kt_ray.errors import BadStep, Stopped, UserError
from kt_ray.optim.optimizers import learning_rate
from kt_ray.placement.expert_load import ExpertLoad
from kt_ray.timeline import Activity, SpanRecorder
from kt_ray.train import policy_steps
from kt_ray.train.cluster_protocol import ActorLost, Cluster, GivenUp
from kt_ray.train.figures import step_metrics, tokens_per_expert
from kt_ray.train.guard import WINDOW, judge
from kt_ray.train.passes import Passes
from kt_ray.train.policy_steps import Policy
from kt_ray.train.preference_steps import STAGES, Preference
from kt_ray.train.recovery import Point, Recovery
from kt_ray.train.reports import PassReport, merged
from kt_ray.train.rollouts import Rollouts
from kt_ray.train.stop_signals import StopSignals

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAVE_AGAIN = 60.0  # seconds after which a checkpoint that could not be written is tried again


@dataclass(frozen=True)
class StepBatches:
    """The waves of every step."""

    total_steps: int  # optimizer steps of the whole run
    steps_per_epoch: int  # for the epoch figure
    # step (0-based) -> the step's waves, each the micro-batches per replica and group
    train: Callable[[int], Sequence[Wave]]
    evaluate: Sequence[Sequence[Wave]] = ()  # the waves of every held-out batch; empty = no evaluation
    held_out: int = 0  # the rows (pairs) of those batches
    # cuts any rows into waves as a step does (KTO, GRPO)
    cut: Callable[[Sequence[Row]], Sequence[Wave]] | None = None
    # GRPO, whose `train` has rows as long as answers may get: number of a batch of prompts -> its prompts
    prompts: Callable[[int], Sequence[Row]] | None = None
    held_out_prompts: Sequence[Row] = ()


@dataclass
class Summary:
    """The result of a run. Losses are token means in nats; eval_losses maps steps taken -> held-out loss
    (GRPO: the mean reward, negative), those of the command's earlier drivers too. rewards: GRPO's mean of
    each step, as far as it has one.

    Steps repeated after a recovery count once. Skipped steps (trainer.bad_steps=skip) are in `losses` and
    `grad_norms`, too. stopped: why the run ended early, "" = it did not.
    """

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    skipped_steps: set[int] = field(default_factory=set)  # their places in `losses`
    stopped: str = ""
    eval_losses: dict[int, float] = field(default_factory=dict)
    recoveries: int = 0
    seconds_lost: float = 0.0

    @property
    def skipped(self) -> int:
        """How many steps were."""
        return len(self.skipped_steps)

    @property
    def applied_losses(self) -> list[float]:
        """Without those of skipped steps."""
        return [loss for i, loss in enumerate(self.losses) if i not in self.skipped_steps]


@dataclass(frozen=True)
class Events:
    """Callbacks of the loop, all optional."""

    on_step: Callable[[Any], None] = lambda _: None  # metrics of each step
    on_eval: Callable[[int, float], None] = lambda *_: None  # steps taken, held-out loss (as in Summary)
    save: Callable[[int], Path | None] = lambda _: None  # steps taken; returns the checkpoint's directory
    # steps taken, activity of the driver and of every actor; every trainer.timeline_every steps
    timeline: Callable[[int, Sequence[Activity]], None] = lambda *_: None
    # after a recovery the number of steps taken, then again after every repeated step
    on_repeat: Callable[[int], None] = lambda _: None
    say: Callable[[str], None] = lambda _: None  # lines for the user
    # steps taken, loss: the checkpoint just saved has the lowest held-out loss so far
    best: Callable[[int, float], None] = lambda *_: None
    # steps taken, loss and gradient norm of the last of them, which was skipped; nan = not known
    on_skip: Callable[[int, float, float], None] = lambda *_: None


class _WentBack(Exception):
    """The actors are in an earlier state than the step in progress: the walk goes on from there."""


class Trainer:
    """Runs all steps on a cluster.

    Args:
        first_step: number of steps already taken (resume).
        before: losses and gradient norms of the last of them, as `recent` had them: trainer.spike's measure.
        resumed_from: the checkpoint that they come from.
        load: tokens per expert of those steps; `self.load` adds every applied step.
        directory: of the run, if it has one.
        began: time.monotonic() of the command's start, which trainer.max_hours counts from; None = now.
        kept: marked checkpoint of the resumed run: steps taken and held-out loss.
        evaluated: steps and held-out losses (as in Summary) of drivers of the same command before this one.
        longest_step: seconds of the longest of the steps that those took up to here; None = they took none.
        stop: signals to end the run by; None = none are looked at.
        owes_evaluation: the resumed state was saved, but the run ended before it was evaluated.
        rollouts: where GRPO's answers come from.

    Attributes:
        best: the last held-out loss that counted as lower for trainer.early_stopping, and after how many
            steps; the untrained model's counts too.
        kept: of the checkpoint that trainer.save_best saved and marked; None = none so far.
    """

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        batches: StepBatches,
        events: Events | None = None,
        *,
        first_step: int = 0,
        before: Sequence[tuple[float, float]] = (),
        resumed_from: Path | None = None,
        load: ExpertLoad | None = None,
        directory: Path | None = None,
        began: float | None = None,
        kept: tuple[int, float] | None = None,
        evaluated: Sequence[tuple[int, float]] = (),
        longest_step: float | None = None,
        stop: StopSignals | None = None,
        owes_evaluation: bool = False,
        rollouts: Rollouts | None = None,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.batches = batches
        self.events = events or Events()
        self.first_step = first_step
        self._before = list(before)
        self.load = load or ExpertLoad()
        self.stop = StopSignals() if stop is None else stop
        cluster.give_up = self.stop.give_up
        self.summary = Summary(eval_losses=dict(evaluated))
        self.kept = kept
        self._restarted = longest_step is not None
        self.best = None if kept in evaluated else kept
        for step, loss in evaluated:
            self._compare(step, loss)
        self._began = time.monotonic() if began is None else began
        self._longest = {"step": longest_step or 0.0, "evaluation": 0.0, "checkpoint": 0.0}  # seconds
        self._last = batches.total_steps
        self._eval_every = evaluation_interval(config, batches.total_steps, batches.held_out)
        self._passes = Passes(config, cluster, directory)
        self._taken = first_step  # updates behind the cluster's state
        self._done = first_step  # steps that were taken at least once
        self._saved = first_step
        self._saved_at = time.monotonic()
        self._save_again_at: float | None = None  # time.monotonic(); None = no checkpoint is owed
        # when the last checkpoint is given up, by time.monotonic(), also after deaths; None = it did not fail
        self._waits_until: float | None = None
        self._owes_evaluation = owes_evaluation
        self._left = False  # the last save of this process was tried
        self._not_evaluated: set[int] = set()  # steps after which it failed
        self._preference: Preference | None = None
        if config.trainer.stage in STAGES:
            self._preference = Preference(config, cluster.plan, self._passes.log_probabilities, batches.cut)
        self.policy: Policy | None = None
        if config.trainer.stage == policy_steps.STAGE:
            assert rollouts is not None and batches.prompts is not None and batches.cut is not None
            forward = self._passes.token_log_probabilities
            self.policy = Policy(config, cluster.plan, batches.prompts, batches.cut, rollouts, forward)
            if resumed_from is not None:
                self.policy.load(first_step, resumed_from)
        # Steps of an earlier run can only be restored from their checkpoint.
        limit = config.trainer.recoveries if resumed_from or not first_step else 0
        self.recovery = Recovery(cluster, limit, Point(first_step, resumed_from), self.events.say, directory)

    def run(self) -> Summary:
        """All steps from `first_step` on, with evaluations and checkpoints in between."""
        start = time.monotonic()
        self.recovery.progressed()
        self.with_all_steps(lambda: None)
        self.summary.seconds = time.monotonic() - start
        return self.summary

    def with_all_steps(self, work: Callable[[], T]) -> T:
        """`work()` after all steps; when an actor is lost in it, once more after its recovery."""
        while True:
            try:
                self._walk()
                return work()
            except ActorLost as lost:
                self._go_on_from(self._brought_back(lost))
            except _WentBack:
                pass  # that was done
            except Exception as error:
                self._save_before(error)
                raise
            finally:
                self.summary.recoveries = self.recovery.used
                self.summary.seconds_lost = self.recovery.seconds_lost

    def _brought_back(self, lost: ActorLost, *, applying: bool = False) -> int:
        """Actors running again; returns the updates that they have. applying: as `Recovery.bring_back`."""
        try:
            if self.stop:
                raise GivenUp(lost.what)
            return self.recovery.bring_back(lost, self._taken, applying=applying)
        except GivenUp:
            raise Stopped(f"{self.stop.name}: {lost.what} before the state was saved") from lost

    def _go_on_from(self, taken: int) -> None:
        self._taken = taken
        self.events.on_repeat(taken)
        if taken >= self._done:
            self.recovery.caught_up(taken)

    def _commit(self, step: int, lr: float, clip: float) -> None:
        """The update of a step. A death that takes no state with it costs none: all others have it by then.

        Raises:
            _WentBack: one did.
        """
        try:
            self.cluster.commit(step, lr, clip)
        except ActorLost as lost:
            left, self._left = self._left, True  # without its actors the run saves nothing
            taken = self._brought_back(lost, applying=True)
            self._left = left
            self._go_on_from(taken)
            if taken <= step:
                raise _WentBack from lost

    def _walk(self) -> None:
        """From the state that the cluster is in to the last step. What was evaluated or saved stays so."""
        while True:
            taken = self._taken
            moved = taken > self.first_step
            # Saved first: what fails in the evaluation takes nothing with it.
            if moved and self._save_is_due(taken):
                self._save(taken)
            if self.stop and taken < self._last:
                self._stop_here(taken)
            try:
                new = moved or self._owes_evaluation
                if self._evaluates and (
                    taken == 0 or (new and (taken == self._last or self._ends(self._eval_every, taken)))
                ):
                    self._evaluate(taken)
                # An earlier driver of the command may have come as far as its end.
                if (moved or self._restarted) and taken < self._last:
                    self._consider_stopping(taken)
                    if taken == self._last:
                        self._save(taken)
                        if self._evaluates:
                            self._evaluate(taken)
                if taken >= self._last:
                    return
                with self._timed("step"):
                    self.step(taken)
            except GivenUp as given_up:
                logger.warning("%s", given_up)
                self.cluster.discard()

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._longest[what] = max(self._longest[what], time.monotonic() - start)

    def _consider_stopping(self, taken: int) -> None:
        """Make `taken` the last step when time or patience is over."""
        if taken < self._done:
            return  # repeated after a recovery: the run went on from here
        trainer = self.config.trainer
        since = -1 if self.best is None else self.best[0]
        after = [step for step in self.summary.eval_losses if since < step <= taken]
        # Another step, and then the last state is evaluated and saved.
        hours = (time.monotonic() - self._began + sum(self._longest.values())) / 3600
        reason = ""
        if trainer.max_hours is not None and hours >= trainer.max_hours:
            reason = f"trainer.max_hours={trainer.max_hours:g} would pass in the next step"
        elif trainer.early_stopping and len(after) >= trainer.early_stopping:
            better = "lower held-out loss" if self.policy is None else "higher held-out reward"
            reason = f"{len(after)} evaluations without a {better} (trainer.early_stopping)"
        if reason:
            self._last = taken
            self.summary.stopped = f"stopped after step {taken} of {self.batches.total_steps}: {reason}"
            logger.info("%s", self.summary.stopped)
            self.events.say(self.summary.stopped)

    def _save_is_due(self, taken: int) -> bool:
        every = self.config.trainer.save_every
        if taken == self._last:
            return True
        if self._save_again_at is not None:  # the last one could not be written
            return time.monotonic() >= self._save_again_at
        if isinstance(every, str) and (seconds := seconds_of(every)) is not None:
            return time.monotonic() - self._saved_at >= seconds
        return self._ends(every, taken)

    def _ends(self, every: int | str, taken: int) -> bool:
        return ends_after(every, taken, self.batches.steps_per_epoch)

    def _save_before(self, error: Exception) -> None:
        """The end that an error brings: what was applied before it is whole in the actors. Not after a loss
        that is not finite: the state may be what it comes from."""
        broken = isinstance(error, BadStep) and not error.finite
        if self._taken <= self._saved or self._taken == self._last or self._left or broken:
            return
        try:
            self.cluster.discard()
            if self.cluster.committed() == self._taken:
                self._save(self._taken, leaving=True)
                self.events.say(f"saved: {self.recovery.point}")
        except Exception:
            logger.info("the state cannot be saved either", exc_info=True)

    def _stop_here(self, taken: int) -> NoReturn:
        """After a signal: save, and leave the loop."""
        steps = f"step {taken} of {self.batches.total_steps}"
        self._left = True
        if taken > self.first_step:
            self._save(taken, leaving=True)
        point = self.recovery.point
        saved = "nothing" if point is None or point.directory is None else point.directory.name
        raise Stopped(f"{self.stop.name}: stopped after {steps}, saved: {saved}")

    def _save(self, taken: int, leaving: bool = False) -> None:
        """A checkpoint. One that cannot be written is tried again later, and ends the run only if it is the
        last (`leaving`: this process takes no further step)."""
        if taken <= self._saved:
            return
        last = taken == self._last
        try:
            directory = self._checkpoint(taken, waits=last and not leaving)
        except ActorLost:
            raise
        except UserError as error:
            if leaving or last:
                raise self.recovery.with_way_on(error) from error
            if self._save_again_at is None:
                self.events.say(f"{error.line()}. Training goes on, the checkpoint is tried again")
            self.cluster.discard()  # the other actors were told to stop
            self._save_again_at = time.monotonic() + SAVE_AGAIN
            return
        self._saved, self._saved_at, self._save_again_at = taken, time.monotonic(), None
        if directory is not None:
            self.recovery.point = Point(taken, directory)
            if self.policy is not None:
                self.policy.forget_before(taken)
        self.recovery.progressed()

    def _checkpoint(self, taken: int, waits: bool) -> Path | None:
        """Its directory. waits: one that cannot be written is tried for as long as the steps took that would
        be lost, if they took a minute; a signal brings the last try."""
        while True:
            told = bool(self.stop)
            try:
                with self._timed("checkpoint"):
                    return self.events.save(taken)
            except ActorLost:
                raise
            except UserError as error:
                logger.info("checkpoint after step %d: %s", taken, error.line())
                if not waits or told:
                    raise
                if self._waits_until is None:
                    self._waits_until = self._patience_ends(error)
                if time.monotonic() >= self._waits_until:
                    raise
            self.cluster.discard()  # the other actors were told to stop
            again = min(self._waits_until, time.monotonic() + SAVE_AGAIN)
            while not self.stop and (left := again - time.monotonic()) > 0:
                time.sleep(min(left, 0.2))

    def _patience_ends(self, error: UserError) -> float:
        """When the last checkpoint is given up, by time.monotonic(); the run says so."""
        now = time.monotonic()
        patience = now - self._saved_at
        if (hours := self.config.trainer.max_hours) is not None:
            patience = min(patience, self._began + 3600 * hours - now)
        if patience < SAVE_AGAIN:
            return now
        minutes = f"{patience / 60:.0f} min, no longer than the steps took that would be lost"
        self.events.say(f"{error.line()}. The checkpoint is tried again for {minutes}")
        return now + patience

    @property
    def _evaluates(self) -> bool:
        return bool(self._eval_every) and not self.stop

    def step(self, step: int) -> None:
        """Optimizer step `step` (0-based): pass, prepare, commit; or what trainer.bad_steps says.

        Raises:
            BadStep: it must not be applied, and was not.
        """
        try:
            self._step(step)
        except BadStep as bad:
            self.cluster.discard()
            if self.config.trainer.bad_steps != "skip":
                raise
            self._skip(step, bad)

    def _skip(self, step: int, bad: BadStep) -> None:
        """Go on without a step: it counts as taken, its rows are not trained on."""
        self.cluster.skip(step)
        self._taken = step + 1
        logger.warning("%s", bad.line())
        if step < self._done:
            self._repeated(step, math.nan)
            return
        self._done = step + 1
        self.events.say(f"step {step + 1} skipped: {bad.what}; at {bad.where}")
        self.summary.skipped_steps.add(step - self.first_step)
        self._note(step, math.nan, math.nan)  # of a pass that broke off; else they are known
        self.events.on_skip(step + 1, self.summary.losses[-1], self.summary.grad_norms[-1])
        self.recovery.progressed()

    def recent(self, step: int) -> list[tuple[float, float]]:
        """Losses and gradient norms of the steps before this one (0-based), the oldest first."""
        end = step - self.first_step
        last = slice(max(0, end - WINDOW), end)
        own = zip(self.summary.losses[last], self.summary.grad_norms[last], strict=True)
        return [*self._before, *own][-WINDOW:]

    def _note(self, step: int, loss: float, norm: float) -> None:
        """Once per step: an actor may be lost between this and the commit, and the step is repeated."""
        if len(self.summary.losses) == step - self.first_step:
            self.summary.losses.append(loss)
            self.summary.grad_norms.append(norm)

    def _step(self, step: int) -> None:
        optim = self.config.optim
        start = time.monotonic()
        every = self.config.trainer.timeline_every
        timeline = bool(every) and (step + 1) % every == 0
        recorder = SpanRecorder(full=timeline)
        objective: Objective | TokenLoss | None = None
        waves: Sequence[Wave]
        if self.policy is not None:
            with recorder.span("rollouts", "wait"):
                waves, objective = self.policy.prepared(step)
        else:
            with recorder.span("batches", "compute"):
                waves = self.batches.train(step)
        loss_tokens = sum(map(trained_tokens, waves))
        divisor = loss_tokens if self.policy is None else 1  # its losses have their weights
        if self._preference is not None:
            with recorder.span("reference", "wait"):
                waves, objective = self._preference.prepared(step, waves)
            divisor = objective.units
        aux_loss: float | None = None
        slopes: tuple[float, ...] | None = None
        if self.config.trainer.aux_loss:
            with recorder.span("routing", "wait"):
                aux_loss, slopes = self._passes.router_balance(step, waves)
        passes = []
        for wave in waves:
            with recorder.span("pass", "wait"):
                more = {"objective": objective, "router_slopes": slopes}
                passes.append(self._passes.run(step, "train", wave, divisor, timeline, **more))
        report = merged([report for _, report in passes])
        tokens = sum(spec.tokens for spec, _ in passes)
        passed = time.monotonic()
        with recorder.span("prepare", "wait"):
            norm = math.sqrt(self.cluster.prepare(step))
        recent = self.recent(step)
        losses, norms = [loss for loss, _ in recent], [norm for _, norm in recent]
        trainer = self.config.trainer
        usual = losses, norms, trainer.spike, trainer.stage, self.config.samples_per_row
        bad = judge(self.cluster, step, waves, report, norm, *usual)
        self._note(step, report.loss, norm)
        if bad is not None:
            raise bad
        clip = 1.0
        if optim.max_grad_norm > 0 and norm > optim.max_grad_norm:
            clip = optim.max_grad_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_
        lr = learning_rate(optim, step, self.batches.total_steps)
        with recorder.span("commit", "wait"):
            self._commit(step, lr, clip)
        self._taken = step + 1
        if step < self._done:
            self._repeated(step, report.loss)
            return
        self._done = step + 1
        now = time.monotonic()
        self.load = self.load.plus(tokens_per_expert(self.cluster.plan, report))
        self.summary.steps += 1
        self.summary.tokens += tokens
        metrics = step_metrics(
            self.cluster.plan,
            self.config,
            report,
            tokens=tokens,
            loss_tokens=loss_tokens,
            step=step + 1,
            epoch=(step + 1) / self.batches.steps_per_epoch,
            grad_norm=norm,
            lr=lr,
            seconds=now - start,
            optimizer_seconds=now - passed,
        )
        logger.info("step %d loss %.6f grad_norm %.4f lr %.3e", step + 1, report.loss, norm, lr)
        if self.policy is not None:
            figures = self.policy.figures(waves, [report for _, report in passes])
            metrics = replace(metrics, policy=figures)
            self.summary.rewards += [figures["reward"]] if "reward" in figures else []
        if self._preference is not None and isinstance(objective, Objective):
            figures = self._preference.figures(waves, objective, [report for _, report in passes])
            metrics = replace(metrics, preference=figures)
        metrics = replace(metrics, aux_loss=aux_loss)
        if self.recovery.used:
            metrics = replace(metrics, recoveries=self.recovery.used, seconds_lost=self.recovery.seconds_lost)
        self.events.on_step(metrics)
        if timeline:
            with only_warned("the timeline cannot be written; training goes on"):
                self._write_timeline(step, report, recorder)
        self.recovery.progressed()

    def _write_timeline(self, step: int, report: PassReport, recorder: SpanRecorder) -> None:
        driver = recorder.activity("driver", socket.gethostname(), 1)
        workers = [worker.activity for worker in report.workers]
        experts = [actor.activity for actor in report.experts]
        self.events.timeline(step + 1, [driver, *workers, *experts])

    def _repeated(self, step: int, loss: float) -> None:
        """A step that was taken before a recovery: its figures are known, and a replay is exact."""
        before = self.summary.losses[step - self.first_step]
        # A skipped step was recorded with the loss that it was skipped for.
        if loss != before and not math.isnan(loss):
            logger.warning(
                "step %d, repeated after a recovery, has loss %r, the first time %r (another kind of CPU?)",
                step + 1,
                loss,
                before,
            )
        logger.info("step %d repeated", step + 1)
        self.events.on_repeat(step + 1)
        if step + 1 == self._done:
            self.recovery.caught_up(step + 1)

    def _evaluate(self, taken: int) -> None:
        """The held-out loss after `taken` steps, once; what trainer.save_best keeps is looked at each time:
        an actor may be lost while that is saved, and the step comes again."""
        if taken in self._not_evaluated:
            return
        if taken not in self.summary.eval_losses:
            try:
                with self._timed("evaluation"):
                    loss, tokens = self._held_out_loss(taken)
            except (ActorLost, GivenUp):
                raise
            except BadStep as bad:  # a figure, too: that of a model that does not learn any more
                self.cluster.discard()
                logger.warning("%s", bad.line())
                loss, tokens = math.nan, 0
            except Exception as error:  # the state is not concerned
                self.cluster.discard()
                self._not_evaluated.add(taken)
                self._say_not_evaluated(taken, error)
                return
            self.summary.eval_losses[taken] = loss
            what, value = ("loss", loss) if self.policy is None else ("reward", -loss)
            logger.info("after step %d: held-out %s %.6f, mean of %d", taken, what, value, tokens)
            self.events.on_eval(taken, loss)
            self._compare(taken, loss)
        self._keep_best(taken, self.summary.eval_losses[taken])
        self.recovery.progressed()

    def _compare(self, taken: int, loss: float) -> None:
        """With the best so far, for trainer.early_stopping."""
        lower_by = self.config.trainer.early_stopping_threshold
        if math.isfinite(loss) and (self.best is None or loss < self.best[1] - lower_by):
            self.best = taken, loss

    def _say_not_evaluated(self, taken: int, error: Exception) -> None:
        logger.info("the held-out loss was not computed", exc_info=error)
        reason = error.line() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        line = f"no held-out loss after step {taken}, training goes on: {' '.join(reason.split())}"
        if self.policy is not None:
            line = line.replace("loss", "reward", 1)
        logger.warning("%s", line)

    def _keep_best(self, taken: int, loss: float) -> None:
        """Save and mark the state if its loss is the lowest of this run's; the untrained model is none."""
        resumed = taken <= self.first_step and not (taken and self._owes_evaluation)
        if not self.config.trainer.save_best or resumed or not math.isfinite(loss):
            return
        if self.kept is None or loss < self.kept[1]:
            self._save(taken)
            if self._saved == taken:
                try:
                    self.events.best(taken, loss)
                except ActorLost:
                    raise
                except UserError as error:
                    logger.warning("%s", error.line())
                    self.cluster.discard()  # the other actors were told to stop, if it was saved only now
                    return
                self.kept = taken, loss

    def _held_out_loss(self, taken: int) -> tuple[float, int]:
        """Mean loss over the held-out rows, and over how many tokens (or pairs)."""
        if self.policy is not None:
            reward, count = self.policy.held_out_reward(self.batches.held_out_prompts)
            return -reward, count
        total, tokens = 0.0, 0
        for waves in self.batches.evaluate:
            objective: Objective | None = None
            if self._preference is not None:  # of the whole batch, as of a step
                waves, objective = self._preference.prepared(taken, waves)
            for wave in waves:
                divisor = trained_tokens(wave) if objective is None else objective.units
                total += self._passes.run(taken, "eval", wave, divisor, objective=objective)[1].loss * divisor
            tokens += sum(map(trained_tokens, waves)) if objective is None else objective.units
        return total / max(1, tokens), tokens
