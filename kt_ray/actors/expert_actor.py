"""The expert actor of one socket: a plain class; Ray or a thread calls it.

During a pass it walks the planned order of (layer, direction, group), takes each item's messages
from all replicas out of its mailbox, computes them as one engine call, and sends each replica its
part back. Early arrivals wait in the mailbox, so the order of float32 accumulation never depends
on who was faster.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from typing import Any

import torch

from kt_ray.actors.actor import PlainActor
from kt_ray.actors.serving import ExpertSession, ServeReport
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
from kt_ray.timeline import Recorder, name_thread
from kt_ray.train.reports import ExpertPassReport, resident_bytes
from kt_ray.transport.mailbox import Address, Message
from kt_ray.transport.port import Lease


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
        self.host = LocalExperts(spec)

    # -- life --------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Read weights, make LoRA. Returns facts about this actor for env.json."""
        name_thread(f"kt-experts-{self.rank}")
        use_torch_threads(self.host.spec.threads)
        self.doing = "loading"

        def note(layer: int, done: int, total: int) -> None:
            self.load_progress = (layer, done, total)

        self.host.load(note)
        self.doing = "idle"
        return self.info()

    def info(self) -> dict[str, Any]:
        host = self.host
        lane = host.lane
        of_lane = {} if lane is None else {"lane": lane.facts(), "notes": lane.notes}
        return {
            **of_lane,
            "actor": f"experts-{self.rank}",
            "pid": os.getpid(),
            "host": sockets.gethostname(),
            "isa": host.engine.isa,
            "isa_reason": host.engine.isa_reason,
            "threads": host.engine.threads,
            "cpus": sorted(os.sched_getaffinity(0)),
            "experts": max(host.spec.counts(self.plan.dims.moe_layers)),
            "weight_bytes": host.weight_bytes,
            "load_seconds": host.load_seconds,
            "kernel_calls": host.engine.calls,
            "kernel_busy_seconds": host.engine.busy_seconds,
        }

    def close(self) -> None:
        if self.port is not None:
            self.port.close()
        self.host.close()

    # -- a pass ------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> ExpertPassReport:
        """Serve every item of the planned order. Shapes and steps come with the messages."""
        self.check_restored()
        assert self.port is not None
        name_thread(f"kt-experts-{self.rank}")  # every time: Ray names it after each call's method
        # torch only copies and counts here; waiting OpenMP threads would spin on the engine's cores.
        use_torch_threads(1)
        self.port.release_all()
        self.mailbox.seconds_waited = 0.0
        train = spec.kind == "train"
        self.host.begin_pass(spec.step, spec.dropout, spec.adapters)
        leases: dict[tuple[int, int], Lease] = {}
        engine = self.host.engine
        start, busy = time.monotonic(), engine.busy_seconds
        recorder = Recorder(full=spec.timeline)
        for layer, direction, group in expert_order(self.plan, spec.kind):
            self.doing = f"pass {spec.number}, layer {layer}, {direction}, group {group}"
            recorder.note_queue(len(self.mailbox))
            with recorder.span(f"wait {direction}", "wait", layer, group):
                parts = [
                    self.mailbox.take((direction, spec.number, layer, group, replica), self.timeout)
                    for replica in range(self.plan.replicas)
                ]
            # A replica's next request of the group proves that the reply before it was read.
            for replica in range(self.plan.replicas):
                if (replica, group) in leases:
                    self.port.release(leases.pop((replica, group)))
            with recorder.span("gather", "transfer", layer, group):
                # A single part is read where it lies: the engine keeps copies of its own, and the sender
                # leaves the memory alone until it has the answer.
                joined = {name: _joined([p.tensors[name] for p in parts]) for name in parts[0].tensors}
            alloc = self._answers(layer)
            with recorder.span(direction, "compute", layer, group):
                if direction == "forward":
                    ids = self.host.local_ids(layer, joined["ids"], self.plan.dims.num_experts)
                    results = {
                        "y": self.host.forward(
                            layer,
                            group,
                            joined["x"],
                            ids,
                            joined["weights"],
                            joined["keys"],
                            keep=train,
                            alloc=alloc,
                        )
                    }
                else:
                    dx, dw = self.host.backward(layer, group, joined["dy"], alloc=alloc)
                    results = {"dx": dx, "dw": dw}
            begin = 0
            for replica, part in enumerate(parts):
                rows = next(iter(part.tensors.values())).shape[0]
                mine = {name: tensor[begin : begin + rows] for name, tensor in results.items()}
                begin += rows
                with recorder.span(f"reply {direction}", "transfer", layer, group):
                    reply = Message(("reply", direction, spec.number, layer, group, self.rank), mine)
                    leases[replica, group] = self.port.send([self.asker(layer, replica)], reply)
        self.doing = "idle"
        return ExpertPassReport(
            rank=self.rank,
            seconds=time.monotonic() - start,
            seconds_waiting=self.mailbox.seconds_waited,
            counters=self.host.take_counters(),
            host_rss_bytes=resident_bytes(),
            pid=os.getpid(),
            kernel_calls=engine.calls,
            activity=recorder.activity(
                f"experts-{self.rank}", self.host_name, engine.threads, engine.busy_seconds - busy
            ),
        )

    def _answers(self, layer: int) -> Alloc:
        """Where an answer is computed: where it is sent from, if one replica alone reads it there."""
        assert self.port is not None
        if self.plan.replicas == 1 and self.port.shares(self.asker(layer, 0)):
            return self.port.alloc
        return new_memory

    def asker(self, layer: int, replica: int) -> Address:
        """The worker that computes a layer of a replica."""
        for worker in self.plan.workers:
            if worker.replica == replica and worker.layers[0] <= layer < worker.layers[1]:
                return ("worker", worker.rank)
        raise ValueError(f"no worker of replica {replica} owns layer {layer}")

    # -- generation --------------------------------------------------------------------------

    def serve(self, spec: SessionSpec) -> ServeReport:
        """One session of generation, until all workers have left it."""
        self.check_restored()
        name_thread(f"kt-experts-{self.rank}")
        use_torch_threads(1)  # as in a pass
        assert self.port is not None
        self.port.release_all()
        report = ExpertSession(self, spec).run()
        self.doing = "idle"
        return report

    # -- a step's end ------------------------------------------------------------------------

    def prepare(self, step: int, token: int) -> float:
        """Phase one: the squared norm of this actor's gradients (float64)."""
        del token  # nothing travels here
        use_torch_threads(self.host.spec.threads)
        return self.host.gradient_norm_squared()

    def commit(self, step: int, lr: float, clip: float, token: int) -> float:
        """Phase two, idempotent: apply the gradients of `step`. Returns seconds spent."""
        del token  # nothing travels here
        if step <= self._committed:
            return 0.0
        use_torch_threads(self.host.spec.threads)
        start = time.monotonic()
        self.host.apply_gradients(lr, clip)
        self._committed = step
        return time.monotonic() - start

    def discard(self) -> None:
        """Forget gradients, messages and counts of a step that was given up."""
        self.mailbox.clear()
        self.host.discard_gradients()
        self.host.take_counters()  # a pass that ended half-way is not to count in the next one's report

    def skip(self, step: int) -> None:
        """Forget a step's gradients; it counts as taken."""
        self.discard()
        self.host.set_step(step + 1)
        self._committed = step

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        """Norm and name of this actor's largest gradients."""
        return gradient_norms(self.host.named("grad"), count)

    def restart(self) -> None:
        """Back to before the first step: initial LoRA, no moments."""
        self.host.restart_lora()
        self.discard()
        self._committed = -1
        self.reborn = False

    # -- by name -----------------------------------------------------------------------------

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.host.named("param")}

    def gradients(self) -> dict[str, torch.Tensor]:
        """LoRA gradients by name (tests: a copy of what the next commit would apply)."""
        return {name: tensor.clone() for name, tensor in self.host.named("grad")}

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.host.named("param")}

    def set_parameters(self, values: dict[str, torch.Tensor]) -> None:
        """Overwrite LoRA parameters by name; names held by others are ignored."""
        for name, tensor in self.host.named("param"):
            if name in values:
                tensor.copy_(values[name])

    def save_shard(self, directory: str) -> ShardInfo | None:
        """Write this actor's parameters and moments. None when it trains nothing."""
        tensors = {
            f"{what}/{name}": tensor
            for what in ("param", *state_kinds(self.host.spec.optim))
            for name, tensor in self.host.named(what)
        }
        return write_shard(directory, f"experts-{self.rank}.safetensors", tensors) if tensors else None

    def restore(self, directory: str, step: int) -> None:
        """Take parameters and moments by name from a checkpoint; `step` updates were taken so far."""
        for what in ("param", *state_kinds(self.host.spec.optim)):
            # Straight into place: a copy of one kind would be gigabytes for a large model.
            read_named_into(directory, {f"{what}/{name}": tensor for name, tensor in self.host.named(what)})
        self.host.set_step(step)
        self.discard()
        self._committed = step - 1
        self.reborn = False

    def load_adapter(self, directory: str, one_of_several: bool = False) -> int:
        """Take this actor's experts' LoRA from a PEFT adapter. Returns the number of tensors."""
        return AdapterReader(directory, self.host.spec.model_dir).read_into(
            self.host.named("param"), self.host.spec.lora.scale, one_of_several=one_of_several
        )

    def keep_adapter(self, name: str, copy: bool) -> None:
        """What this actor's LoRA is now, it will be for requests that name it."""
        self.host.keep(name, copy=copy)

    def write_adapter(self, directory: str, layout: Any) -> int:
        """Write this actor's byte ranges of the adapter file. Returns the number of tensors."""
        tensors = dict(self.host.named("param"))
        write_tensors(directory, layout, tensors)
        return len(tensors)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
