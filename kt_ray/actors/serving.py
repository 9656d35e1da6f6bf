"""What actors do during a session of generation: no driver in the loop, no fixed order.

The last stage of each replica, its coordinator, takes requests out of its mailbox, tells the other stages
of its replica what the next step is (`Step`), samples, and puts tokens where the driver fetches them.
Expert actors serve whatever comes, in the order it comes, each replica's tokens as an engine call of
their own: nothing waits for a message that may never be sent, so nothing can deadlock. Everybody leaves
after the coordinators' last step: workers say goodbye to the expert actors, which leave after the last.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kt_ray.experts.local_experts import new_memory
from kt_ray.generate.requests import SessionSpec, Step
from kt_ray.generate.schedule import Schedule
from kt_ray.timeline import Recorder
from kt_ray.transport.expert_link import MessageExchange
from kt_ray.transport.mailbox import Address, Message
from kt_ray.transport.port import Lease
from kt_ray.transport.stage_link import StageLink

if TYPE_CHECKING:
    from torch import Tensor

    from kt_ray.actors.attention_worker import AttentionWorker
    from kt_ray.actors.expert_actor import ExpertActor


@dataclass
class ServeReport:
    """One actor's session: steps (an expert actor: calls), tokens chosen, seconds by what it did.

    A worker's terms: "attention", "experts" (waiting for them), "head", "record" (call arguments, caches),
    "sample", "stages" (waiting for other stages), "idle" (no request). An expert actor's: "engine", "wait".
    """

    rank: int
    steps: int = 0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, term: str, seconds: float) -> None:
        self.seconds[term] = self.seconds.get(term, 0.0) + seconds


class WorkerSession:
    """One attention worker's session."""

    def __init__(self, actor: AttentionWorker, spec: SessionSpec) -> None:
        assert actor.port is not None
        self.actor = actor
        self.spec = spec
        self.port = actor.port
        self.mailbox = actor.mailbox
        self.report = ServeReport(actor.rank)
        plan, here = actor.plan, actor.here
        self.stages: list[Address] = [
            ("worker", plan.worker(here.replica, s).rank) for s in range(plan.stages)
        ]
        self.coordinates = here.stage == plan.stages - 1
        self.decoder = actor.stage.decoder()
        self.recorder = Recorder()
        self.exchange = MessageExchange(
            actor.mailbox,
            actor.port,
            replica=here.replica,
            experts=len(plan.experts),
            number=spec.tag(0),
            timeout=actor.timeout,
            held=plan.held,
            num_experts=plan.dims.num_experts,
            device=actor.spec.device,
            overlap=plan.overlap,
            recorder=self.recorder,
        )

    def run(self) -> ServeReport:
        """Until the last step."""
        try:
            if self.coordinates:
                self._coordinate()
            else:
                self._follow()
            self.port.release_all()
            experts: list[Address] = [("experts", actor.rank) for actor in self.actor.plan.experts]
            self.port.send(experts, Message(("bye", self.spec.number, self.actor.rank)))
        finally:
            self.actor.outbox.close()
            self.decoder.close()
        return self.report

    def _coordinate(self) -> None:
        schedule = Schedule(self.spec, self.decoder.joint)
        outbox = self.actor.outbox
        while self._take_orders(schedule):
            step = schedule.next()
            self._tell(step)
            logits = self._compute(step)
            start = time.monotonic()
            tokens = schedule.advance(step, logits)
            outbox.put(tokens)
            self.report.tokens += len(tokens)
            self.report.add("sample", time.monotonic() - start)
        self._tell(schedule.last())

    def _take_orders(self, schedule: Schedule) -> bool:
        """Requests and cancellations so far; waits for one when there is nothing to do. False = stop."""
        while True:
            self.actor.doing = "generating" if schedule.busy else "waiting for a request"
            start = time.monotonic()
            message = self.mailbox.take_first(("request", "cancel", "stop"), 0.0 if schedule.busy else None)
            self.report.add("idle", time.monotonic() - start)
            if message is None:
                return True
            kind, session, *rest = message.tag
            if session != self.spec.number:
                continue  # meant for a session that has ended
            if kind == "stop":
                return False
            if kind == "request":
                self.actor.outbox.put(schedule.add(rest[0], message.facts["request"]))
            else:
                self.actor.outbox.put(schedule.cancel(rest[0]))

    def _tell(self, step: Step) -> None:
        others = [address for address in self.stages if address[1] != self.actor.rank]
        if others:
            self.port.send(others, Message(("step", self.spec.number, step.number), {}, {"step": step}))

    def _follow(self) -> None:
        number = 0
        while True:
            self.actor.doing = f"waiting for step {number}"
            start = time.monotonic()
            # For ever: the coordinator has none to tell while no request comes. An abort wakes it.
            tag = ("step", self.spec.number, number)
            step: Step = self.mailbox.take(tag, threading.TIMEOUT_MAX / 2).facts["step"]
            self.report.add("idle", time.monotonic() - start)
            if step.last:
                return
            self._compute(step)
            number += 1

    def _compute(self, step: Step) -> list[Tensor]:
        """One step of this stage; the last stage's logits, per batch."""
        # All that was sent in the step before has been read: its tokens were chosen from it.
        self.port.release_all()
        self.actor.doing = f"step {step.number}"
        decoder, here, plan = self.decoder, self.actor.here, self.actor.plan
        number = self.spec.tag(step.number)
        self.exchange.go_on(number)
        link = StageLink(
            self.mailbox,
            self.port,
            rank=self.actor.rank,
            number=number,
            timeout=self.actor.timeout,
            device=self.actor.spec.device,
            recorder=self.recorder,
        )
        start = time.monotonic()
        decoder.begin(step, self.exchange)
        self.report.add("record", time.monotonic() - start)
        groups = range(len(step.batches))
        waited = self.exchange.seconds_waiting
        logits: list[Tensor] = []
        for layer in range(*here.layers):
            for group in groups:
                if layer > here.layers[0]:
                    if layer - 1 in decoder.model.experts:
                        decoder.join(layer - 1, group)
                elif here.stage == 0:
                    decoder.embed(group)
                else:
                    start = time.monotonic()
                    decoder.receive_hidden(group, link.receive_hidden(group))
                    self.report.add("stages", time.monotonic() - start)
                decoder.forward(layer, group)
        last = here.layers[1] - 1
        for group in groups:
            if last in decoder.model.experts:
                decoder.join(last, group)
            if here.stage < plan.stages - 1:
                link.send_hidden(group, decoder.hidden(group))
            else:
                logits.append(decoder.logits(group))
        link.finish()
        decoder.finish()
        seconds = decoder.clock.read()
        self.report.add("attention", seconds.get("attention", 0.0))
        self.report.add("head", seconds.get("loss", 0.0))
        self.report.add("experts", self.exchange.seconds_waiting - waited)
        self.report.steps += 1
        return logits


class ExpertSession:
    """One expert actor's session."""

    def __init__(self, actor: ExpertActor, spec: SessionSpec) -> None:
        assert actor.port is not None
        self.actor = actor
        self.spec = spec
        self.port = actor.port
        self.report = ServeReport(actor.rank)
        # (worker, group) -> the reply that its next request of the group proves read
        self._leases: dict[tuple[Address, int], Lease] = {}

    def run(self) -> ServeReport:
        """Until all workers have left."""
        workers = len(self.actor.plan.workers)
        self.actor.host.begin_pass(0, dropout=False)
        while workers:
            self.actor.doing = "serving"
            start = time.monotonic()
            message = self.actor.mailbox.take_first(("forward", "bye"), None)
            self.report.add("wait", time.monotonic() - start)
            assert message is not None
            if message.tag[0] == "bye":
                workers -= message.tag[1] == self.spec.number
                continue
            if not self.spec.holds(message.tag[1]):
                continue  # of a session that an error ended
            start = time.monotonic()
            self._serve(message)
            self.report.add("engine", time.monotonic() - start)
            self.report.steps += 1
        self.port.release_all()
        self.actor.host.take_counters()
        return self.report

    def _serve(self, message: Message) -> None:
        actor, port = self.actor, self.port
        _, number, layer, group, replica = message.tag
        asker = actor.asker(layer, replica)
        lease = self._leases.pop((asker, group), None)
        if lease is not None:
            port.release(lease)
        given = message.tensors
        y = actor.host.forward(
            layer,
            group,
            given["x"],
            actor.host.local_ids(layer, given["ids"], actor.plan.dims.num_experts),
            given["weights"],
            given["keys"],
            keep=False,
            adapter=message.facts.get("adapter", True),
            alloc=port.alloc if port.shares(asker) else new_memory,
        )
        tag = ("reply", "forward", number, layer, group, actor.rank)
        self._leases[asker, group] = port.send([asker], Message(tag, {"y": y}))
