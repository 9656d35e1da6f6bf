"""The attention worker of one stage: a plain class; Ray or a thread calls it.

During a pass it walks its planned program and hands every operation to the layer loop of its
`kt_ray.model.stage.Stage`. Worker 0 also holds the float32 masters and the optimizer of the non-expert
LoRA of all stages: gradients are reduced to it in rank order, updated weights go back.
"""

from __future__ import annotations

import os
import socket as sockets
import time
from collections.abc import Callable
from typing import Any

import torch

from kt_ray.actors.actor import PlainActor
from kt_ray.actors.generation_session import GenerationReport, WorkerSession
from kt_ray.actors.profile import profiled
from kt_ray.adapter.adapter_dir import write_tensors
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.batch import PassSpec
from kt_ray.checkpoint.training import ShardInfo, read_named_into, write_shard
from kt_ray.config.schema import OptimConfig
from kt_ray.experts.process_memory import bound_compiled_products
from kt_ray.generate.requests import SessionSpec, Token
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.optim.masters import Masters, flat_of, set_flat
from kt_ray.optim.optimizers import gradient_norms, squared_norm, use_torch_threads
from kt_ray.placement.order import worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.timeline import SpanRecorder, name_thread
from kt_ray.train.reports import WorkerPassReport, resident_bytes
from kt_ray.transport.doorbell import DoorbellAddress
from kt_ray.transport.inbox import Outbox
from kt_ray.transport.links import ExpertLink, StageLink
from kt_ray.transport.messages import Address, Message

ROOT: Address = ("worker", 0)  # holds the masters


class AttentionWorker(PlainActor):
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

        The same number of threads under Ray and in one process gives the same bits. CUDA events and streams
        belong to the current device; in one process every stage has another one.
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
        """Build the stage. Returns facts about this worker for env.json."""
        self._claim_thread()
        self.doing = "loading"
        start = time.monotonic()
        self._stage = self._build_stage(self.spec)
        self.load_seconds = time.monotonic() - start
        self.doing = "idle"
        return {**self.info(), "affine_scale": self._stage.scales}

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
        recorder = SpanRecorder(full=spec.timeline)
        experts, stages = self._links(spec.number, recorder)
        stage = self.stage
        with recorder.span("begin", "compute"):
            loop = stage.begin(spec, self.here.replica, experts, stages)
        for op in worker_program(self.plan, self.here.replica, self.here.stage, spec.kind):
            self.doing = f"pass {spec.number}, {op.kind}, layer {op.layer}, group {op.group}"
            with recorder.span(op.kind, "compute", op.layer, op.group):
                loop.run(op)
        experts.finish()
        stages.finish()
        self.doing = "idle"
        seconds = loop.seconds()
        return WorkerPassReport(
            rank=self.rank,
            seconds=time.monotonic() - start,
            loss_sum=loop.loss_sum,
            terms={
                "attention": seconds["attention"],
                "head": seconds["loss"],
                "experts": experts.seconds_waiting,
                "stages": stages.seconds,
            },
            host_rss_bytes=resident_bytes(),
            gpu_bytes=torch.cuda.max_memory_allocated(self.spec.device) if self._on_gpu else 0,
            pid=os.getpid(),
            activity=recorder.activity(f"worker-{self.rank}", self.host_name, self.here.threads),
            logits=loop.logits() if spec.return_logits and stage.last else [],
            losses=loop.losses() if stage.last else [],
            routing=loop.routing(),
            logps=loop.logps() if stage.last and (spec.return_logps or spec.objective is not None) else [],
        )

    def _links(self, number: int, recorder: SpanRecorder) -> tuple[ExpertLink, StageLink]:
        """The conversations with the expert actors and with the neighbouring stages.

        Args:
            number: of the pass, or of a generation step.
        """
        assert self.port is not None
        experts = ExpertLink(
            self.mailbox,
            self.port,
            replica=self.here.replica,
            experts=len(self.plan.experts),
            number=number,
            timeout=self.timeout,
            experts_of=lambda layer, rank: self.plan.experts[rank].experts_of(layer),
            num_experts=self.plan.dims.num_experts,
            device=self.spec.device,
            overlap=self.plan.overlap,
            recorder=recorder,
        )
        stages = StageLink(
            self.mailbox,
            self.port,
            rank=self.rank,
            number=number,
            timeout=self.timeout,
            device=self.spec.device,
            recorder=recorder,
        )
        return experts, stages

    # -- generation --------------------------------------------------------------------------

    def generate(self, spec: SessionSpec) -> GenerationReport:
        """One session of generation, until the driver ends it."""
        self.check_restored()
        self._claim_thread()
        experts, stages = self._links(spec.tag(0), SpanRecorder())
        session = WorkerSession(self, spec, self.plan, self.here, self.stage, self.outbox, experts, stages)
        report = session.run()
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

    # -- the end of a step ------------------------------------------------------------------

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of this stage's LoRA; empty on replicas above 0, which have the same."""
        if self.here.replica > 0:
            return {}
        return {name: tuple(p.shape) for name, p in self.stage.parameters.items()}

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

        `token` distinguishes the messages of a repeated step from the messages of the failed attempt.
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

        Called again for an applied step, it only sends the weights again; `token` distinguishes the messages
        of the attempts.
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

    # -- after a failure ---------------------------------------------------------------------

    def discard(self) -> None:
        """Forget gradients and messages of a failed step."""
        self.mailbox.clear()
        self.stage.zero_grad()
        if self._on_gpu:
            # Finish copies out of peers' memory: it is unmapped when peers are replaced.
            torch.cuda.synchronize(self.spec.device)

    def skip(self, step: int) -> None:
        """Forget a step's gradients; the step counts as taken."""
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
        """Keep this stage's present LoRA for requests that name it."""
        self.stage.adapters.keep(name, copy=copy)

    def write_adapter(self, directory: str, layout: Any) -> int:
        """Write this stage's byte ranges of the adapter file (replica 0). Returns the number of tensors."""
        if self.here.replica != 0:
            return 0
        tensors = self.stage.adapter()
        write_tensors(directory, layout, tensors)
        return len(tensors)
