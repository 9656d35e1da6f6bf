"""The attention worker of one stage: a plain class; Ray or a thread calls it.

It owns the layer loop: during a pass it walks its planned program of operations on a
`kt_ray.model.Stage`. Worker 0 also holds the float32 masters and the optimizer of the non-expert
LoRA of all stages: gradients are reduced to it in rank order, updated weights go back.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Callable
from typing import Any

import torch

from kt_ray.actors.profile import profiled
from kt_ray.actors.serving import ServeReport, WorkerSession
from kt_ray.actors.step_end import StepEnd
from kt_ray.adapter.adapter_dir import write_tensors
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.batch import PassSpec
from kt_ray.checkpoint.training import ShardInfo, read_named_into, write_shard
from kt_ray.config.schema import OptimConfig
from kt_ray.experts.process_memory import bound_compiled_products
from kt_ray.generate.requests import SessionSpec, Token
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.optim.masters import Masters
from kt_ray.optim.optimizers import gradient_norms, use_torch_threads
from kt_ray.placement.order import Op, worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import Recorder, name_thread
from kt_ray.train.reports import WorkerPassReport, resident_bytes
from kt_ray.transport.doorbell import DoorbellAddress
from kt_ray.transport.expert_link import MessageExchange
from kt_ray.transport.inbox import Outbox
from kt_ray.transport.stage_link import StageLink


class AttentionWorker(StepEnd):
    """One stage of one replica, driven by messages.

    Args:
        plan: the whole plan.
        rank: this worker's number: replica * stages + stage.
        spec: what to build; its device is the one this process sees (cuda:0 inside a Ray actor).
        optim: of the masters (worker 0).
        timeout: seconds to wait for a message before giving the pass up.
        build_stage: what makes the stage of its spec.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        spec: StageSpec,
        optim: OptimConfig,
        timeout: float,
        build_stage: Callable[[StageSpec], Any] = Stage,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.here = plan.workers[rank]
        self.spec = spec
        self.optim = optim
        self._build_stage = build_stage
        super().__init__(f"attention worker {rank}", timeout)
        self.load_seconds = 0.0
        self.outbox = Outbox(rank)
        self._stage: Stage | None = None
        self._masters: Masters | None = None
        bound_compiled_products(tight=plan.is_tight)  # before the first product in this process
        use_torch_threads(self.here.threads)

    def _claim_thread(self) -> None:
        """Set what torch keeps per thread: its number of threads, and the current GPU.

        The same number under Ray and in one process gives the same bits. Events and streams of the layer
        loop are those of the current device, which in one process is another one for each stage.
        """
        name_thread(f"kt-worker-{self.rank}")  # every time: Ray names it after each call's method
        use_torch_threads(self.here.threads)
        device = torch.device(self.spec.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "load() comes first"
        return self._stage

    # -- life --------------------------------------------------------------------------------

    def load(self) -> dict[str, Any]:
        """Build the stage, probe its MoE layers. Returns facts about this worker for env.json."""
        self._claim_thread()
        self.doing = "loading"
        start = time.monotonic()
        self._stage = self._build_stage(self.spec)
        probe = self._stage.probe()
        self.load_seconds = time.monotonic() - start
        self.doing = "idle"
        return {**self.info(), "affine_scale": probe}

    def info(self) -> dict[str, Any]:
        return {
            "actor": f"worker-{self.rank}",
            "pid": os.getpid(),
            "host": sockets.gethostname(),
            "device": str(self.spec.device),
            "plan_device": self.here.device,
            "replica": self.here.replica,
            "stage": self.here.stage,
            "layers": list(self.here.layers),
            "threads": self.here.threads,
            "weight_bytes": self.stage.weight_bytes,
            "trainable_parameters": sum(p.numel() for p in self.stage.parameters.values()),
            "load_seconds": self.load_seconds,
        }

    def close(self) -> None:
        if self.port is not None:
            self.port.close()
        self._stage = None
        self._masters = None

    # -- a pass ------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> WorkerPassReport:
        """Walk this worker's program of the pass."""
        with profiled(spec, self.rank, self._on_gpu):
            return self._run_pass(spec)

    def _run_pass(self, spec: PassSpec) -> WorkerPassReport:
        self.check_restored()
        assert self.port is not None
        self._claim_thread()
        self.port.release_all()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.spec.device)
        start = time.monotonic()
        recorder = Recorder(full=spec.timeline)
        exchange = MessageExchange(
            self.mailbox,
            self.port,
            replica=self.here.replica,
            experts=len(self.plan.experts),
            number=spec.number,
            timeout=self.timeout,
            held=self.plan.held,
            num_experts=self.plan.dims.num_experts,
            device=self.spec.device,
            overlap=self.plan.overlap,
            recorder=recorder,
        )
        link = StageLink(
            self.mailbox,
            self.port,
            rank=self.rank,
            number=spec.number,
            timeout=self.timeout,
            device=self.spec.device,
            recorder=recorder,
        )
        stage = self.stage
        with recorder.span("begin", "compute"):
            stage.begin(spec, self.here.replica, exchange)
        loss_sum = waiting_for_stages = 0.0
        for op in worker_program(self.plan, self.here.replica, self.here.stage, spec.kind):
            self.doing = f"pass {spec.number}, {op.kind}, layer {op.layer}, group {op.group}"
            began = time.monotonic()
            with recorder.span(op.kind, "compute", op.layer, op.group):
                loss_sum += self._run(op, link)
            if op.kind.startswith(("recv", "send")):
                waiting_for_stages += time.monotonic() - began
        exchange.finish()
        link.finish()
        self.doing = "idle"
        total = time.monotonic() - start
        seconds = stage.metrics()["seconds"]
        terms = {
            "attention": seconds["attention"],
            "head": seconds["loss"],
            "experts": exchange.seconds_waiting,
            "stages": waiting_for_stages,
        }
        groups = range(len(spec.waves[self.here.replica]))
        logits = [stage.logits(group) for group in groups] if spec.return_logits and stage.last else []
        wanted = spec.return_logps or spec.objective is not None
        losses = [stage.losses(group) for group in groups] if stage.last else []
        return WorkerPassReport(
            rank=self.rank,
            seconds=total,
            loss_sum=loss_sum,
            terms=terms,
            host_rss_bytes=resident_bytes(),
            gpu_bytes=torch.cuda.max_memory_allocated(self.spec.device) if self._on_gpu else 0,
            pid=os.getpid(),
            activity=recorder.activity(f"worker-{self.rank}", self.host_name, self.here.threads),
            logits=logits,
            losses=losses,
            routing=stage.routing() if spec.routing else None,
            logps=[stage.logps(group) for group in groups] if stage.last and wanted else [],
        )

    def _run(self, op: Op, link: StageLink) -> float:
        stage, group = self.stage, op.group
        if op.kind == "embed":
            stage.embed(group)
        elif op.kind == "forward":
            stage.forward(op.layer, group)
        elif op.kind == "join":
            stage.join(op.layer, group)
        elif op.kind == "recompute":
            stage.recompute(op.layer, group)
        elif op.kind == "backward":
            stage.backward(op.layer, group)
        elif op.kind == "loss":
            return stage.loss(group)
        elif op.kind == "send_hidden":
            link.send_hidden(group, stage.hidden(group))
        elif op.kind == "recv_hidden":
            stage.receive_hidden(group, link.receive_hidden(group))
        elif op.kind == "send_grad":
            link.send_grad(group, stage.grad(group))
        elif op.kind == "recv_grad":
            stage.receive_grad(group, link.receive_grad(group))
        else:
            raise ValueError(f"operation {op} is not known to the attention worker")
        return 0.0

    # -- generation --------------------------------------------------------------------------

    def serve(self, spec: SessionSpec) -> ServeReport:
        """One session of generation, until the driver ends it."""
        self.check_restored()
        self._claim_thread()
        report = WorkerSession(self, spec).run()
        self.doing = "idle"
        return report

    def open_outbox(self, address: DoorbellAddress | None) -> bool:
        """Before a session. Returns whether tokens go to the driver's doorbell at `address`."""
        return self.outbox.open(address)

    def tokens(self, timeout: float) -> tuple[list[Token], bool]:
        """What was generated since the last call, and whether more can come (from another thread)."""
        return self.outbox.take(timeout)

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.outbox.close()

    @property
    def _on_gpu(self) -> bool:
        return torch.device(self.spec.device).type == "cuda"

    # -- after a failure ---------------------------------------------------------------------

    def discard(self) -> None:
        """Forget gradients and messages of a step that was given up."""
        self.mailbox.clear()
        self.stage.zero_grad()
        if self._on_gpu:
            # Copies out of peers' memory may be under way, which is unmapped when peers were replaced.
            torch.cuda.synchronize(self.spec.device)

    def skip(self, step: int) -> None:
        """Forget a step's gradients; it counts as taken."""
        self.discard()
        if self._masters is not None:
            self._masters.optimizer.set_step(step + 1)
        self._committed = step

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        """Worker 0, after `prepare`: norm and name of the largest gradients of all stages."""
        return gradient_norms(self._masters.named("grad"), count) if self._masters is not None else []

    def restart(self) -> None:
        """Back to before the first step; then `hold_masters`, `start_masters` and `publish`."""
        self.discard()
        self.stage.load_parameters(self.stage.initial_parameters())
        self._committed = -1
        self.reborn = False

    # -- by name -----------------------------------------------------------------------------

    def gradients(self) -> dict[str, torch.Tensor]:
        """This stage's LoRA gradients by name, as they are now (tests)."""
        zero = torch.zeros(())
        return {
            name: (p.grad if p.grad is not None else zero.expand_as(p)).detach().cpu().clone()
            for name, p in self.stage.parameters.items()
        }

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().cpu().clone() for name, p in self.stage.parameters.items()}

    def set_parameters(self, values: dict[str, torch.Tensor]) -> None:
        """Worker 0: overwrite masters by name (names of experts are ignored); then `publish`."""
        if self._masters is not None:
            for name, tensor in self._masters.named("param"):
                if name in values:
                    tensor.copy_(values[name])

    def save_shard(self, directory: str) -> ShardInfo | None:
        """Worker 0: write masters and moments of all stages. None elsewhere or when nothing trains."""
        if self._masters is None:
            return None
        tensors = {name: tensor.cpu().contiguous() for name, tensor in self._masters.state().items()}
        return write_shard(directory, "worker-0.safetensors", tensors) if tensors else None

    def restore(self, directory: str, step: int) -> None:
        """Worker 0: take masters and moments by name from a checkpoint; then `publish`."""
        self.discard()
        self._committed = step - 1
        self.reborn = False
        if self._masters is None:
            return
        read_named_into(directory, self._masters.state())
        self._masters.optimizer.set_step(step)

    def load_adapter(self, directory: str, one_of_several: bool = False) -> int:
        """Worker 0: take all stages' masters from a PEFT adapter; then `publish`. Returns their number."""
        if self._masters is None:
            return 0
        return AdapterReader(directory, self.spec.model_dir).read_into(
            self._masters.named("param"), self.spec.lora.scale, one_of_several=one_of_several
        )

    def keep_adapter(self, name: str, copy: bool) -> None:
        """What this stage's LoRA is now, it will be for requests that name it."""
        self.stage.keep(name, copy=copy)

    def write_adapter(self, directory: str, layout: Any) -> int:
        """Write this stage's byte ranges of the adapter file (replica 0). Returns the number of tensors."""
        if self.here.replica != 0:
            return 0
        tensors = self.stage.adapter()
        write_tensors(directory, layout, tensors)
        return len(tensors)
