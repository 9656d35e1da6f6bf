"""What attention workers do during a session of generation: no driver in the loop, no fixed order.

The last stage of each replica, its coordinator, takes requests out of its mailbox, tells the other stages
of its replica what the next step is (`Step`), samples, and puts tokens into its outbox for the driver.
Expert actors answer every message in the order it comes, each replica's tokens in an engine call of
their own, or those of replicas that decode together (joined_calls.py): nothing waits for a message that may
never be sent, so nothing can deadlock. The coordinators' last
step ends the session: every worker says goodbye to the expert actors, which leave after the last goodbye.
"""

from __future__ import annotations

from torch import Tensor

from kt_ray.actors.actor import PlainActor
from kt_ray.config.limits import FEW_ROWS
from kt_ray.generate.batcher import Batcher
from kt_ray.generate.requests import GenerationReport, SessionSpec, Step
from kt_ray.model.decode import Decoder
from kt_ray.model.stage import Stage
from kt_ray.placement.plan_types import WorkerPlan
from kt_ray.transport.inbox import Outbox
from kt_ray.transport.links import ExpertLink, StageLink
from kt_ray.transport.messages import Address, Message


class WorkerSession:
    """One attention worker's session."""

    def __init__(
        self,
        actor: PlainActor,
        spec: SessionSpec,
        part: WorkerPlan,
        stage: Stage,
        outbox: Outbox,
        experts: ExpertLink,
        stages: StageLink,
    ) -> None:
        plan = actor.plan
        self.actor = actor
        self.spec = spec
        self.part = part
        self.first, self.last = part.stage == 0, part.stage == plan.stages - 1
        self.outbox = outbox
        self.experts = experts
        self.stages = stages
        self.port = actor.port
        self.mailbox = actor.mailbox
        self.decoder = Decoder(stage)
        self.report = GenerationReport(part.rank)
        self.expert_actors: list[Address] = [("experts", rank) for rank in plan.experts_of(part.replica)]
        workers = (plan.worker(part.replica, number).rank for number in range(plan.stages))
        self.followers: list[Address] = [("worker", rank) for rank in workers if rank != part.rank]

    def run(self) -> GenerationReport:
        """Until the last step."""
        try:
            if self.last:
                self._coordinate()
            else:
                self._follow()
            self.port.release_all()
            self.port.send(self.expert_actors, Message(("bye", self.spec.number, self.part.rank)))
        finally:
            self.outbox.close()
            self.decoder.close()
        return self.report

    def _coordinate(self) -> None:
        batcher = Batcher(self.spec, self.decoder.joint)
        while self._take_messages(batcher):
            step = batcher.next()
            self._tell(step)
            logits = self._compute(step)
            with self.report.timed("sample"):
                tokens = batcher.advance(step, logits)
                self.outbox.put(tokens)
            self.report.tokens += len(tokens)
        self._tell(batcher.last())

    def _take_messages(self, batcher: Batcher) -> bool:
        """Requests and cancellations so far; waits for one when there is nothing to do. False = stop."""
        while True:
            self.actor.doing = "generating" if batcher.busy else "waiting for a request"
            with self.report.timed("idle"):
                message = self.mailbox.take_first(
                    ("request", "cancel", "stop"), 0.0 if batcher.busy else None
                )
            if message is None:
                return True
            kind, session, *rest = message.tag
            if session != self.spec.number:
                continue  # meant for a session that has ended
            if kind == "stop":
                return False
            if kind == "request":
                for number, request in enumerate(message.facts["requests"], rest[0]):
                    self.outbox.put(batcher.add(number, request))
            else:
                self.outbox.put(batcher.cancel(rest[0]))

    def _tell(self, step: Step) -> None:
        if self.followers:
            self.port.send(
                self.followers, Message(("step", self.spec.number, step.number), {}, {"step": step})
            )

    def _follow(self) -> None:
        number = 0
        while True:
            self.actor.doing = f"waiting for step {number}"
            tag = ("step", self.spec.number, number)
            with self.report.timed("idle"):
                # The coordinator has none to tell while no request comes. An abort wakes it.
                step: Step = self.mailbox.take(tag, idle=True).facts["step"]
            if step.last:
                return
            self._compute(step)
            number += 1

    def _compute(self, step: Step) -> list[Tensor]:
        """One step of this stage; the last stage's float32 logits [b, V] of every batch."""
        # All that was sent in the step before has been read: its tokens were chosen from it.
        self.port.release_all()
        self.actor.doing = f"step {step.number}"
        number = self.spec.tag(step.number)
        self.experts.begin(number)
        self.experts.joined = self.spec.joined and step.decoded_rows > FEW_ROWS
        self.stages.begin(number)
        waited = self.experts.seconds_waiting, self.stages.seconds
        with self.report.timed("record"):
            loop = self.decoder.begin(step, self.experts, self.stages)
        for op in loop.program(self.part.layers, first=self.first, last=self.last):
            loop.run(op)
        self.stages.finish()
        self.decoder.finish()
        seconds = loop.seconds()
        self.report.add("attention", seconds["attention"])
        self.report.add("head", seconds["loss"])
        self.report.add("experts", self.experts.seconds_waiting - waited[0])
        self.report.add("stages", self.stages.seconds - waited[1])
        self.report.steps += 1
        computed, shared = step.prompt_tokens
        self.report.prompt_tokens += computed
        self.report.shared_tokens += shared
        return [logits_bV for batch in loop.logits() for logits_bV in batch] if self.last else []
