"""An attention worker's part in the end of a step: gradients to worker 0, updated weights back.

A part of `AttentionWorker` in a file of its own. Worker 0 holds the float32 masters and the optimizer of the
non-expert LoRA of all stages; gradients are added there in rank order.
"""

from __future__ import annotations

import time
from abc import abstractmethod

import torch

from kt_ray.actors.actor import PlainActor
from kt_ray.config.schema import OptimConfig
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.optim.masters import Masters, flat_of, set_flat
from kt_ray.optim.optimizers import squared_norm
from kt_ray.placement.plan_types import Plan, WorkerPlan
from kt_ray.transport.mailbox import Address, Message

ROOT: Address = ("worker", 0)


class StepEnd(PlainActor):
    """What `AttentionWorker` does between the last backward pass of a step and the next step."""

    plan: Plan
    rank: int
    here: WorkerPlan
    spec: StageSpec
    optim: OptimConfig
    _masters: Masters | None

    @property
    @abstractmethod
    def stage(self) -> Stage:
        """The loaded stage."""

    @abstractmethod
    def _claim_thread(self) -> None:
        """Set what torch keeps per thread."""

    def collect_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of this stage's LoRA parameters."""
        return {name: tuple(p.shape) for name, p in self.stage.parameters.items()}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `collect_shapes` for replica 0; other replicas hold the same names, so nothing."""
        return self.collect_shapes() if self.here.replica == 0 else {}

    def hold_masters(self, shapes: list[dict[str, tuple[int, ...]]]) -> None:
        """Worker 0: make the optimizer for all stages' LoRA (one flat float32 vector per stage)."""
        assert self.rank == 0
        self._masters = Masters(shapes, self.optim, self.spec.device)

    def publish(self, token: int) -> None:
        """Worker 0 sends every worker the current masters; the others take them."""
        self._exchange_parameters(("params", token))
        if self.rank != 0:
            self.reborn = False  # what it trains with is all that it holds

    def start_masters(self, token: int) -> None:
        """Stages of replica 0 send their initial LoRA to worker 0."""
        tag = ("initial", token, self.here.stage)
        if self.rank == 0:
            assert self._masters is not None
            for stage in range(self.plan.stages):
                flat = (
                    self._flat(grad=False)
                    if stage == 0
                    else self.mailbox.take(("initial", token, stage), self.timeout).tensors["flat"]
                )
                self._masters.set(stage, flat)
        elif self.here.replica == 0:
            assert self.port is not None
            self.port.send([ROOT], Message(tag, {"flat": self._flat(grad=False)}))

    def prepare(self, step: int, token: int) -> float:
        """Phase one: reduce gradients to worker 0; returns their squared norm there, 0 elsewhere.

        `token` tells the messages of a repeated step from those of the attempt that was given up.
        """
        self._claim_thread()
        assert self.port is not None
        if self.rank != 0:
            self.port.send([ROOT], Message(("grads", token, self.rank), {"flat": self._flat(grad=True)}))
            return 0.0
        assert self._masters is not None
        self.doing = f"step {step}, reducing gradients"
        for stage in range(self.plan.stages):
            total: torch.Tensor | None = None
            for replica in range(self.plan.replicas):  # rank order: the sum is the same every time
                rank = self.plan.worker(replica, stage).rank
                if rank == 0:
                    part = self._flat(grad=True)
                else:
                    part = self.mailbox.take(("grads", token, rank), self.timeout).tensors["flat"]
                total = part.clone() if total is None else total.add_(part)
            assert total is not None
            self._masters.set_grad(stage, total)
        self.doing = "idle"
        return squared_norm(self._masters.optimizer.gradients())

    def commit(self, step: int, lr: float, clip: float, token: int) -> float:
        """Phase two, idempotent: step at worker 0, updated weights to all. Returns seconds spent.

        Repeated for a step that was applied already, it only hands the weights out again; `token` tells
        the attempts' messages apart.
        """
        self._claim_thread()
        start = time.monotonic()
        if self.rank == 0 and step > self._committed:
            assert self._masters is not None
            self._masters.optimizer.apply(lr, clip)
        self._exchange_parameters(("updated", token))
        self.stage.zero_grad()
        self._committed = step
        return time.monotonic() - start

    def _exchange_parameters(self, tag: tuple[str, int]) -> None:
        assert self.port is not None
        if self.rank == 0:
            assert self._masters is not None
            for stage in range(self.plan.stages):
                flat = self._masters.get(stage)
                others: list[Address] = [
                    ("worker", w.rank) for w in self.plan.workers if w.stage == stage and w.rank != 0
                ]
                if others:
                    self.port.send(others, Message((*tag, stage), {"flat": flat.cpu()}))
                if stage == 0:
                    self._set_flat(flat)
        else:
            self._set_flat(self.mailbox.take((*tag, self.here.stage), self.timeout).tensors["flat"])

    def _flat(self, *, grad: bool) -> torch.Tensor:
        return flat_of(self.stage.parameters.values(), grad=grad)

    def _set_flat(self, flat: torch.Tensor) -> None:
        set_flat(self.stage.parameters.values(), flat)
