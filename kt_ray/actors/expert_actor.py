"""The expert actor of one socket: a plain class; Ray or a thread calls it.

During a pass it walks the planned order of (layer, direction, group), takes each item's messages
from all replicas out of its mailbox, computes them as one engine call, and sends each replica its
rows back. Early messages wait in the mailbox, so the order of float32 accumulation never depends
on who was faster.

Shapes: T tokens of a group, all replicas' in rank order, H hidden, K experts per token.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kt_ray.actors.actor import PlainActor, worker_of_layer
from kt_ray.actors.joined_calls import JoinedCalls
from kt_ray.actors.specs import lent_experts
from kt_ray.batch import PassSpec
from kt_ray.experts import LocalExperts, LocalExpertsSpec
from kt_ray.experts.call_rows import Alloc, new_memory
from kt_ray.experts.shared_experts import ExportedExperts
from kt_ray.generate.requests import GenerationReport, SessionSpec
from kt_ray.native.pages import HUGE_PAGES, SHARED_HUGE_PAGES
from kt_ray.optim.optimizers import AdamStep, use_torch_threads
from kt_ray.placement.order import expert_order
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import SpanRecorder
from kt_ray.train.reports import ExpertPassReport, resident_bytes
from kt_ray.transport.messages import Address, Lease, Message


class ExpertActor(PlainActor):
    """One socket's experts, driven by messages."""

    def __init__(self, plan: Plan, spec: LocalExpertsSpec, timeout: float) -> None:
        super().__init__(plan, ("experts", spec.rank), spec, spec.optim, timeout)
        use_torch_threads(spec.threads)
        self.experts = LocalExperts(spec)
        self._replicas = plan.replicas_of(spec.copy)  # whose tokens it computes
        # backward calls of the present pass whose gradients from attention workers are not yet added
        self._awaited: list[tuple[int, int]] = []
        self._summed = False  # gradients are those of all copies, in the layers that this one updates

    # -- life --------------------------------------------------------------------------------

    def _load(self) -> None:
        def note(layer: int, done: int, total: int) -> None:
            self.load_progress = (layer, done, total)

        with self.gpu_memory():
            self.experts.load(note)

    def _gpus(self) -> tuple[str, ...]:
        plan = self.plan.experts[self.rank]
        return () if plan.lane is None else tuple(map(plan.place, plan.lane.devices))

    def _frees_gpu(self) -> str:
        return "rule.experts.stream=off, rule.experts.gpu_resident=0 or a lower rule.experts.stream"

    def _facts(self) -> dict[str, Any]:
        experts = self.experts
        lane = experts.lane
        return {
            **({} if lane is None else {"lane": lane.facts()}),
            "notes": [*self._notes(), *(() if lane is None else lane.notes)],
            "isa": experts.engine.isa,
            "isa_reason": experts.engine.isa_reason,
            "threads": experts.engine.threads,
            "cpus": sorted(os.sched_getaffinity(0)),
            "experts": max(experts.spec.counts(self.plan.dims.moe_layers)),
            "weight_bytes": experts.weight_bytes,
            "load_seconds": experts.load_seconds,
            "kernel_calls": experts.engine.calls,
            "kernel_busy_seconds": experts.engine.busy_seconds,
        }

    def _notes(self) -> list[str]:
        """What a user should know of a host, from its first actor."""
        first = next(actor for actor in self.plan.experts if actor.host == self.experts.spec.host)
        if self.experts.huge_pages or self.rank != first.rank:
            return []
        slower = "so the CPU's part of the experts is slower, in backward by up to a fifth"
        if self.experts.spec.shared:
            return [
                f"weights that attention workers read are without huge pages, {slower}: "
                f"{SHARED_HUGE_PAGES} says never, and only Linux 6.1 and later make them all the same; "
                f"as root: echo advise > {SHARED_HUGE_PAGES}"
            ]
        return [
            f"weights are without huge pages, {slower}: {HUGE_PAGES} says never, or memory is in pieces; "
            f"as root: echo madvise > {HUGE_PAGES}; echo 1 > /proc/sys/vm/compact_memory"
        ]

    @property
    def _threads(self) -> int:
        return self.experts.spec.threads

    def export_experts(self) -> ExportedExperts:
        """For attention workers of this host, where the plan has such as read the experts' memory."""
        self.claim_thread()
        return self.experts.export()

    def close(self) -> None:
        self.port.close()
        self.experts.close()

    # -- a pass ------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> ExpertPassReport:
        """Compute every call of the planned order. Shapes and steps come with the messages."""
        with self.gpu_memory():
            return self._run_pass(spec)

    def _run_pass(self, spec: PassSpec) -> ExpertPassReport:
        self.check_restored()
        # torch only counts here; waiting OpenMP threads would spin on the engine's cores.
        self.claim_thread(1)
        self.port.release_all()
        self.experts.begin_pass(
            spec.step, spec.dropout, spec.adapters, [self._put_aside(name) for name in spec.joined]
        )
        trainings = self._trainings_of(spec)
        leases: dict[tuple[int, int], Lease] = {}  # (replica, group) -> the last reply
        engine = self.experts.engine
        busy = engine.busy_seconds
        recorder = SpanRecorder(full=spec.timeline)
        self._awaited = []
        for layer, direction, group in expert_order(self.plan, spec.kind):
            self.doing = f"pass {spec.number}, layer {layer}, {direction}, group {group}"
            recorder.note_queue(len(self.mailbox))
            with recorder.span(f"wait {direction}", "wait", layer, group):
                requests = [
                    self.mailbox.take((direction, spec.number, layer, group, replica))
                    for replica in self._replicas
                ]
            # A replica's next request of the group proves that the reply before it was read.
            for replica in self._replicas:
                if (replica, group) in leases:
                    self.port.release(leases.pop((replica, group)))
            with recorder.span("gather", "transfer", layer, group):
                inputs = {
                    name: [request.tensors[name] for request in requests] for name in requests[0].tensors
                }
            for elsewhere in (request.facts.get("elsewhere") for request in requests):
                if elsewhere is not None:
                    self.experts.count_elsewhere(layer, group, elsewhere)
            with recorder.span(direction, "compute", layer, group):
                keep = spec.kind == "train" and layer >= self.plan.backward.lowest
                of_rows = trainings[group] if trainings else None
                answers = self._compute(direction, layer, group, inputs, keep=keep, trainings=of_rows)
            for replica, rows in zip(self._replicas, _divided(requests, answers), strict=True):
                with recorder.span(f"reply {direction}", "transfer", layer, group):
                    reply = Message(("reply", direction, spec.number, layer, group, self.rank), rows)
                    worker = worker_of_layer(self.plan, layer, replica)
                    leases[replica, group] = self.port.send([worker], reply)
            if direction == "backward":
                # A worker that sent this layer's dy has sent the gradients of the layers above before.
                self._add_gradients(spec.number, recorder, [c for c in self._awaited if c[1] == group])
                self._awaited.append((layer, group))
        self._add_gradients(spec.number, recorder, list(self._awaited))
        self.doing = "idle"
        return ExpertPassReport(
            rank=self.rank,
            counters=self.experts.take_counters(),
            host_rss_bytes=resident_bytes(),
            pid=os.getpid(),
            activity=recorder.activity(self.name, self.host_name, engine.threads, engine.busy_seconds - busy),
        )

    def _trainings_of(self, spec: PassSpec) -> list[Tensor]:
        """By group int64 [T]: whose LoRA each token trains, 0 = the present training's, then in the order of
        `spec.joined`; empty where there is only one."""
        numbers: dict[bool | str, int] = {True: 0, **{name: i for i, name in enumerate(spec.joined, 1)}}
        groups = range(self.plan.groups) if spec.joined else ()
        micro = [[m for r in self._replicas for m in spec.wave[r][group]] for group in groups]
        parts = [[part for m in own for part in m.of_one_training] for own in micro]
        return [
            torch.tensor(
                [numbers[part.training] for part in own for _ in range(part.tokens)], dtype=torch.int64
            )
            for own in parts
        ]

    def _add_gradients(self, number: int, recorder: SpanRecorder, calls: Iterable[tuple[int, int]]) -> None:
        """What attention workers computed of these backward calls, in the order of the replicas."""
        for layer, group in calls:
            self._awaited.remove((layer, group))
            for replica in self._replicas:
                if self.rank not in lent_experts(self.plan, worker_of_layer(self.plan, layer, replica)[1]):
                    continue
                with recorder.span("wait gradients", "wait", layer, group):
                    message = self.mailbox.take(("lane gradients", number, layer, group, replica))
                with recorder.span("add gradients", "compute", layer, group):
                    values = dict(message.tensors)
                    ids = values.pop("ids", None)
                    if ids is not None:
                        self.experts.add_gradients(layer, group, ids, values)

    def _compute(
        self, direction: str, layer: int, group: int, inputs: dict[str, list[Tensor]], **how: Any
    ) -> dict[str, Tensor]:
        """One engine call: y_TH of forward, dx_TH and dw_TK of backward (as `LocalExperts` has them), all
        replicas' rows in one block. how: a forward is computed, as `LocalExperts.forward` has it."""
        workers = [worker_of_layer(self.plan, layer, replica) for replica in self._replicas]
        alloc: Alloc = self.port.alloc if any(map(self.port.shares, workers)) else new_memory
        if direction == "forward":
            return self._forward(layer, group, inputs, alloc, **how)
        wanted = layer >= self.plan.backward.inputs
        dx_TH, dw_TK = self.experts.backward(layer, group, inputs["dy"], alloc=alloc, input_grad=wanted)
        return {"dx": dx_TH, "dw": dw_TK}

    def _forward(
        self, layer: int, group: int, inputs: dict[str, list[Tensor]], alloc: Alloc, **how: Any
    ) -> dict[str, Tensor]:
        joined = {name: self.experts.rows.joined(name, inputs[name]) for name in ("ids", "weights", "keys")}
        ids_TK = self.experts.local_ids(layer, joined["ids"], self.plan.dims.num_experts)
        weights_TK, keys_T = joined["weights"], joined["keys"]
        y_TH = self.experts.forward(layer, group, inputs["x"], ids_TK, weights_TK, keys_T, alloc=alloc, **how)
        return {"y": y_TH}

    # -- generation --------------------------------------------------------------------------

    def generate(self, spec: SessionSpec) -> GenerationReport:
        """One session of generation: answers messages in the order they come, or joined, until all workers
        have left."""
        with self.gpu_memory():
            return self._generate(spec)

    def _generate(self, spec: SessionSpec) -> GenerationReport:
        self.check_restored()
        self.claim_thread(1)  # as in a pass
        self.port.release_all()
        report = GenerationReport(self.rank)
        # (worker, group) -> the reply that its next request of the group proves read
        leases: dict[tuple[Address, int], Lease] = {}
        workers = len(self._replicas) * self.plan.stages
        slots = self.plan.dims.experts_per_token
        joined = JoinedCalls(self._replicas, cache(lambda layer: self.experts.row_tokens(layer, slots)))
        self.experts.begin_pass(0, dropout=False)
        self.doing = "generating"
        while workers:
            with report.timed("wait"):
                message = self.mailbox.take_first(("forward", "bye"), None)
            assert message is not None
            if message.tag[0] == "bye":
                workers -= message.tag[1] == spec.number
            elif spec.holds(message.tag[1]):  # else it is of a session that an error ended
                for call in joined.add(message):
                    with report.timed("engine"):
                        self._answer(call, leases)
                    report.steps += 1
        self.port.release_all()
        self.experts.take_counters()
        self.doing = "idle"
        return report

    def _answer(self, messages: Sequence[Message], leases: dict[tuple[Address, int], Lease]) -> None:
        """One engine call over the tokens of these replicas, of one layer with one adapter."""
        layer, group = messages[0].tag[2:4]
        workers = [worker_of_layer(self.plan, layer, message.tag[4]) for message in messages]
        for worker in workers:
            if (worker, group) in leases:
                self.port.release(leases.pop((worker, group)))
        alloc = self.port.alloc if any(map(self.port.shares, workers)) else new_memory
        adapter = messages[0].facts.get("adapter", True)
        self.experts.forget_calls()  # they come in any order
        inputs = {name: [message.tensors[name] for message in messages] for name in messages[0].tensors}
        alone = max(len(x_TH) for x_TH in inputs["x"])
        answers = self._forward(layer, group, inputs, alloc, keep=False, adapter=adapter, tokens_alone=alone)
        for worker, message, rows in zip(workers, messages, _divided(messages, answers), strict=True):
            reply = Message(("reply", *message.tag[:4], self.rank), rows)
            leases[worker, group] = self.port.send([worker], reply)

    # -- a step's end ------------------------------------------------------------------------

    def prepare(self, step: int, token: int) -> float:
        """Phase one: gradients of all copies added up, in their order, where this actor updates a layer; then
        their squared norm (float64)."""
        self.claim_thread()
        own = self.experts.spec.copy
        for copy, actor in self._copies():
            for layer, grads in self.experts.lora.shares("grad", copy):
                self.port.send([actor], Message(("expert gradients", token, layer, own), grads))
        for layer, grads in self.experts.lora.shares("grad", own) if self._copies() else ():
            self.doing = f"step {step}, reducing gradients of layer {layer}"
            parts = [
                grads if copy == own else self.mailbox.take(("expert gradients", token, layer, copy)).tensors
                for copy in range(self.plan.copies)
            ]
            for key, total in grads.items():
                summed = parts[0][key].clone()
                for part in parts[1:]:
                    summed.add_(part[key])
                total.copy_(summed)
        self._summed = True
        self.doing = "idle"
        return self.experts.lora.gradient_norm_squared()

    def _copies(self) -> list[tuple[int, Address]]:
        """The actors that hold the same experts in the other copies, and which copy is whose."""
        own, count = self.experts.spec.copy, len(self.plan.first_copy)
        return [
            (copy, ("experts", self.rank + (copy - own) * count))
            for copy in range(self.plan.copies)
            if copy != own
        ]

    def publish(self, token: int) -> None:
        """LoRA of the layers that this actor updates to the other copies, theirs from them."""
        self.claim_thread()
        peers, own = self._copies(), self.experts.spec.copy
        for layer, values in self.experts.lora.shares("param", own) if peers else ():
            self.port.send([actor for _, actor in peers], Message(("expert LoRA", token, layer), values))
        for copy, _ in peers:
            for layer, values in self.experts.lora.shares("param", copy):
                received = self.mailbox.take(("expert LoRA", token, layer)).tensors
                for key, value in values.items():
                    value.copy_(received[key])

    def commit(self, step: int, lr: float, clip: float, token: int, adam: AdamStep | None = None) -> float:
        """Phase two, idempotent: apply the gradients of `step`, send the other copies what changed. Returns
        seconds spent."""
        self.claim_thread()
        start = time.monotonic()
        if step > self._committed:
            self.experts.lora.apply_gradients(lr, clip, adam)
            self._summed = False
        self._committed = step  # whatever becomes of the messages: a second update would be one too many
        self.publish(token)
        return time.monotonic() - start

    def discard(self) -> None:
        self.mailbox.clear()
        self._summed = False
        self.experts.lora.discard_gradients()
        self.experts.take_counters()  # else a failed pass would count in the next report

    def _restart_lora(self, seed: int | None = None) -> None:
        self.experts.lora.restart(seed)

    def _training_state(self) -> list[tuple[Tensor, bool]]:
        return list(self.experts.lora.training_state())

    def _moved(self) -> None:
        self.experts.lora.find()

    # -- what it trains ----------------------------------------------------------------------

    def trained(self, what: str) -> Iterable[tuple[str, Tensor]]:
        return self.experts.lora.named(what)

    def lora(self, what: str) -> Mapping[str, Tensor]:
        return dict(self.experts.lora.named(what, updated=what == "grad" and self._summed))

    def adapter(self, which: bool | str = True) -> Mapping[str, Tensor]:
        """Of each expert one copy writes a layer."""
        return dict(self.experts.lora.named("param", which=which))

    def _set_step(self, step: int) -> None:
        self.experts.lora.set_step(step)

    def keep_adapter(self, name: str, copy: bool) -> None:
        self.experts.lora.keep(name, copy=copy)

    def drop_adapter(self, name: str) -> None:
        self.experts.lora.drop(name)


def _divided(requests: Sequence[Message], answers: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Each request's rows of the answers."""
    end = 0
    for request in requests:
        start, end = end, end + next(iter(request.tensors.values())).shape[0]
        yield {name: tensor[start:end] for name, tensor in answers.items()}
