"""The expert actor of one socket: a plain class; Ray or a thread calls it.

During a pass it walks the planned order of (layer, direction, group), takes each item's messages
from all replicas out of its mailbox, computes them as one engine call, and sends each replica its
rows back. Early messages wait in the mailbox, so the order of float32 accumulation never depends
on who was faster.

Shapes: T tokens of a group, all replicas' in rank order, H hidden, K experts per token.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from typing import Any

import torch
from torch import Tensor

from kt_ray.actors.actor import PlainActor, worker_of_layer
from kt_ray.actors.generation_session import ExpertSession, GenerationReport
from kt_ray.adapter.adapter_dir import write_tensors
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.batch import PassSpec
from kt_ray.checkpoint.training import ShardInfo, read_named_into, write_shard
from kt_ray.experts import LocalExperts, LocalExpertsSpec
from kt_ray.experts.local_experts import Alloc, new_memory
from kt_ray.generate.requests import SessionSpec
from kt_ray.optim.optimizers import gradient_norms, state_kinds, use_torch_threads
from kt_ray.placement.order import expert_order
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import SpanRecorder, name_thread
from kt_ray.train.reports import ExpertPassReport, resident_bytes
from kt_ray.transport.messages import Lease, Message


class ExpertActor(PlainActor):
    """One socket's experts, driven by messages.

    Args:
        plan: the whole plan (order and addresses are pure functions of it).
        spec: this actor's share.
        timeout: seconds to wait for a message before giving the pass up.
    """

    def __init__(self, plan: Plan, spec: LocalExpertsSpec, timeout: float) -> None:
        self.plan = plan
        self.rank = spec.rank
        super().__init__(f"expert actor {spec.rank}", timeout)
        use_torch_threads(spec.threads)
        self.experts = LocalExperts(spec)

    # -- life --------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Read weights, make LoRA. Returns facts about this actor for env.json."""
        name_thread(f"kt-experts-{self.rank}")
        use_torch_threads(self.experts.spec.threads)
        self.doing = "loading"

        def note(layer: int, done: int, total: int) -> None:
            self.load_progress = (layer, done, total)

        self.experts.load(note)
        self.doing = "idle"
        return self.info()

    def info(self) -> dict[str, Any]:
        experts = self.experts
        lane = experts.lane
        return {
            **({} if lane is None else {"lane": lane.facts(), "notes": lane.notes}),
            "actor": f"experts-{self.rank}",
            "pid": os.getpid(),
            "host": sockets.gethostname(),
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

    def close(self) -> None:
        if self.port is not None:
            self.port.close()
        self.experts.close()

    # -- a pass ------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> ExpertPassReport:
        """Compute every call of the planned order. Shapes and steps come with the messages."""
        self.check_restored()
        assert self.port is not None
        name_thread(f"kt-experts-{self.rank}")  # every time: Ray names it after each call's method
        # torch only copies and counts here; waiting OpenMP threads would spin on the engine's cores.
        use_torch_threads(1)
        self.port.release_all()
        self.mailbox.seconds_waited = 0.0
        self.experts.begin_pass(spec.step, spec.dropout, spec.adapters)
        leases: dict[tuple[int, int], Lease] = {}  # (replica, group) -> the last reply
        engine = self.experts.engine
        start, busy = time.monotonic(), engine.busy_seconds
        recorder = SpanRecorder(full=spec.timeline)
        for layer, direction, group in expert_order(self.plan, spec.kind):
            self.doing = f"pass {spec.number}, layer {layer}, {direction}, group {group}"
            recorder.note_queue(len(self.mailbox))
            with recorder.span(f"wait {direction}", "wait", layer, group):
                requests = [
                    self.mailbox.take((direction, spec.number, layer, group, replica), self.timeout)
                    for replica in range(self.plan.replicas)
                ]
            # A replica's next request of the group proves that the reply before it was read.
            for replica in range(self.plan.replicas):
                if (replica, group) in leases:
                    self.port.release(leases.pop((replica, group)))
            with recorder.span("gather", "transfer", layer, group):
                # A single request is read where it lies: the engine keeps copies of its own, and the sender
                # leaves the memory alone until it has the answer.
                inputs = {name: _concat([r.tensors[name] for r in requests]) for name in requests[0].tensors}
            with recorder.span(direction, "compute", layer, group):
                answers = self._compute(direction, layer, group, inputs, keep=spec.kind == "train")
            start_row = 0
            for replica, request in enumerate(requests):
                end_row = start_row + next(iter(request.tensors.values())).shape[0]
                rows = {name: tensor[start_row:end_row] for name, tensor in answers.items()}
                start_row = end_row
                with recorder.span(f"reply {direction}", "transfer", layer, group):
                    reply = Message(("reply", direction, spec.number, layer, group, self.rank), rows)
                    worker = worker_of_layer(self.plan, layer, replica)
                    leases[replica, group] = self.port.send([worker], reply)
        self.doing = "idle"
        return ExpertPassReport(
            rank=self.rank,
            seconds=time.monotonic() - start,
            seconds_waiting=self.mailbox.seconds_waited,
            counters=self.experts.take_counters(),
            host_rss_bytes=resident_bytes(),
            pid=os.getpid(),
            kernel_calls=engine.calls,
            activity=recorder.activity(
                f"experts-{self.rank}", self.host_name, engine.threads, engine.busy_seconds - busy
            ),
        )

    def _compute(
        self, direction: str, layer: int, group: int, inputs: dict[str, Tensor], *, keep: bool
    ) -> dict[str, Tensor]:
        """One engine call: y_TH of forward, dx_TH and dw_TK of backward."""
        assert self.port is not None
        # If one replica alone reads the answer where it lies, it is computed there.
        shared = self.plan.replicas == 1 and self.port.shares(worker_of_layer(self.plan, layer, 0))
        alloc: Alloc = self.port.alloc if shared else new_memory
        if direction == "backward":
            dx_TH, dw_TK = self.experts.backward(layer, group, inputs["dy"], alloc=alloc)
            return {"dx": dx_TH, "dw": dw_TK}
        ids_TK = self.experts.local_ids(layer, inputs["ids"], self.plan.dims.num_experts)
        y_TH = self.experts.forward(
            layer, group, inputs["x"], ids_TK, inputs["weights"], inputs["keys"], keep=keep, alloc=alloc
        )
        return {"y": y_TH}

    # -- generation --------------------------------------------------------------------------

    def generate(self, spec: SessionSpec) -> GenerationReport:
        """One session of generation, until all workers have left it."""
        self.check_restored()
        name_thread(f"kt-experts-{self.rank}")
        use_torch_threads(1)  # as in a pass
        assert self.port is not None
        self.port.release_all()
        report = ExpertSession(self, spec, self.plan, self.rank, self.experts).run()
        self.doing = "idle"
        return report

    # -- a step's end ------------------------------------------------------------------------

    def prepare(self, step: int, token: int) -> float:
        """Phase one: the squared norm of this actor's gradients (float64)."""
        del token  # nothing travels here
        use_torch_threads(self.experts.spec.threads)
        return self.experts.gradient_norm_squared()

    def commit(self, step: int, lr: float, clip: float, token: int) -> float:
        """Phase two, idempotent: apply the gradients of `step`. Returns seconds spent."""
        del token  # nothing travels here
        if step <= self._committed:
            return 0.0
        use_torch_threads(self.experts.spec.threads)
        start = time.monotonic()
        self.experts.apply_gradients(lr, clip)
        self._committed = step
        return time.monotonic() - start

    def discard(self) -> None:
        """Forget gradients, messages and counts of a failed step."""
        self.mailbox.clear()
        self.experts.discard_gradients()
        self.experts.take_counters()  # else a failed pass would count in the next report

    def skip(self, step: int) -> None:
        """Forget a step's gradients; the step counts as taken."""
        self.discard()
        self.experts.set_step(step + 1)
        self._committed = step

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        """Norm and name of this actor's largest gradients."""
        return gradient_norms(self.experts.named("grad"), count)

    def restart(self) -> None:
        """Back to before the first step: initial LoRA, no moments."""
        self.experts.restart_lora()
        self.discard()
        self._committed = -1
        self.reborn = False

    # -- by name -----------------------------------------------------------------------------

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.experts.named("param")}

    def gradients(self) -> dict[str, Tensor]:
        """LoRA gradients by name (tests: a copy of what the next commit would apply)."""
        return {name: tensor.clone() for name, tensor in self.experts.named("grad")}

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.experts.named("param")}

    def set_parameters(self, values: dict[str, Tensor]) -> None:
        """Overwrite LoRA parameters by name; names of other actors are ignored."""
        for name, tensor in self.experts.named("param"):
            if name in values:
                tensor.copy_(values[name])

    def save_shard(self, directory: str) -> ShardInfo | None:
        """Write this actor's parameters and moments. None when it trains nothing."""
        tensors = {
            f"{what}/{name}": tensor
            for what in ("param", *state_kinds(self.experts.spec.optim))
            for name, tensor in self.experts.named(what)
        }
        return write_shard(directory, f"experts-{self.rank}.safetensors", tensors) if tensors else None

    def restore(self, directory: str, step: int) -> None:
        """Take parameters and moments by name from a checkpoint; `step` updates were taken so far."""
        for what in ("param", *state_kinds(self.experts.spec.optim)):
            # Straight into place: a copy of one kind would be gigabytes for a large model.
            read_named_into(
                directory, {f"{what}/{name}": tensor for name, tensor in self.experts.named(what)}
            )
        self.experts.set_step(step)
        self.discard()
        self._committed = step - 1
        self.reborn = False

    def load_adapter(self, directory: str, one_of_several: bool = False) -> int:
        """Take this actor's experts' LoRA from a PEFT adapter. Returns the number of tensors."""
        return AdapterReader(directory, self.experts.spec.model_dir).read_into(
            self.experts.named("param"), self.experts.spec.lora.scale, one_of_several=one_of_several
        )

    def keep_adapter(self, name: str, copy: bool) -> None:
        """Keep this actor's present LoRA for requests that name it."""
        self.experts.keep(name, copy=copy)

    def write_adapter(self, directory: str, layout: Any) -> int:
        """Write this actor's byte ranges of the adapter file. Returns the number of tensors."""
        tensors = dict(self.experts.named("param"))
        write_tensors(directory, layout, tensors)
        return len(tensors)


def _concat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
