"""The attention worker of one stage: a plain class; Ray or a thread calls it.

During a pass it walks its planned program and hands every operation to the layer loop of its
`kt_ray.model.stage.Stage`. Worker 0 also holds the float32 masters and the optimizer of the non-expert
LoRA of all stages: gradients are reduced to it in rank order, updated weights go back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kt_ray.actors.actor import PlainActor
from kt_ray.actors.generation_session import WorkerSession
from kt_ray.actors.specs import lent_experts
from kt_ray.batch import Objective, PassSpec, TokenLoss
from kt_ray.config.schema import OptimConfig
from kt_ray.experts.process_memory import bound_compiled_products, give_back_freed_memory
from kt_ray.experts.shared_experts import ExportedExperts, OpenExperts
from kt_ray.experts.worker_lane import LaneTokens, WorkerLane
from kt_ray.generate.requests import GenerationReport, SessionSpec, Token
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.native import DropoutSpec
from kt_ray.optim.masters import Masters
from kt_ray.optim.optimizers import AdamStep, squared_norm, use_torch_threads
from kt_ray.placement.order import worker_program
from kt_ray.placement.plan_types import Plan
from kt_ray.placement.render import gib
from kt_ray.timeline import SpanRecorder
from kt_ray.train.reports import WorkerPassReport, resident_bytes
from kt_ray.transport.inbox import Outbox
from kt_ray.transport.links import ExpertLink, StageLink
from kt_ray.transport.messages import Address, Message
from kt_ray.transport.shared_memory import DoorbellAddress

logger = logging.getLogger(__name__)

ROOT: Address = ("worker", 0)  # holds the masters

# torch has one profiler per process: in one process the first worker gets it
_profiling = threading.Lock()


class AttentionWorker(PlainActor):
    """One stage of one replica, driven by messages.

    Args:
        rank: this worker's number: replica * stages + stage.
        spec: what to build; its device is the one this process sees (cuda:0 inside a Ray actor).
        optim: of the masters (worker 0).
        build_stage: what makes the stage of its spec.

    Attributes:
        shared_experts: by expert actor, the experts whose memory it reads.
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
        super().__init__(plan, ("worker", rank), spec, optim, timeout)
        self.part = plan.workers[rank]  # this worker's part of the plan
        self.spec = spec
        self._build_stage = build_stage
        self._load_seconds = 0.0
        self._capped = False  # whether torch's memory on the device is limited
        self.outbox = Outbox(rank)
        self.shared_experts: dict[int, OpenExperts] = {}
        self._stage: Stage | None = None
        self._lane: WorkerLane | None = None
        self._masters: Masters | None = None
        if plan.is_tight:
            give_back_freed_memory()
        bound_compiled_products(tight=plan.is_tight)  # before the first product in this process
        use_torch_threads(self.part.threads)

    def claim_thread(self, threads: int | None = None) -> None:
        """Also the current GPU: CUDA events and streams belong to it, and a process may use several."""
        super().claim_thread(threads)
        if self._on_gpu:
            torch.cuda.set_device(torch.device(self.spec.device))

    @property
    def _threads(self) -> int:
        return self.part.threads

    @property
    def _on_gpu(self) -> bool:
        return torch.device(self.spec.device).type == "cuda"

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "load() comes first"
        return self._stage

    @property
    def masters(self) -> Masters:
        assert self._masters is not None, "worker 0 has them, after hold_masters()"
        return self._masters

    # -- life --------------------------------------------------------------------------------

    def _load(self) -> None:
        start = time.monotonic()
        self._keep_to_cap()
        with self.gpu_memory():
            self._stage = self._build_stage(self.spec)
        if self.part.lane is not None:
            lane = replace(self.part.lane, devices=(str(self.spec.device),), named=(self.part.place,))
            self._lane = WorkerLane(lane, self.part.threads, self.plan.dims.num_experts)
        self._load_seconds = time.monotonic() - start

    def _keep_to_cap(self) -> None:
        """rule.gpu_memory: torch gives this process what the cap and CUDA's own part leave, and no more."""
        device = self.part.device
        gpu = next((g for g in self.plan.hardware.gpus if f"cuda:{g.index}" == device and g.cap), None)
        if gpu is None:
            return
        contexts = sum(b.items["runtime"] for b in self.plan.budgets if b.device == self.part.place)
        whole = torch.cuda.get_device_properties(self.spec.device).total_memory
        part = max(0, gpu.usable - contexts) / whole
        torch.cuda.set_per_process_memory_fraction(part, self.spec.device)
        self._capped = True

    def _facts(self) -> dict[str, Any]:
        lane = {} if self._lane is None else {"lane": self._lane.lane.facts()}
        return {
            **lane,
            "device": str(self.spec.device),
            "plan_device": self.part.device,
            "replica": self.part.replica,
            "stage": self.part.stage,
            "layers": list(self.part.layers),
            "threads": self.part.threads,
            "weight_bytes": self.stage.weight_bytes,
            "streamed": None if self.stage.streamed is None else self.stage.streamed.facts(),
            "trainable_parameters": sum(p.numel() for p in self.stage.parameters.values()),
            "load_seconds": self._load_seconds,
            "affine_scale": self.stage.scales,
            "padding_moves": self.stage.padding_moves,
            "notes": self._notes(),
        }

    @property
    def _counted_elsewhere(self) -> int:
        """Bytes of this process's resident memory that a worker of its host's first replica, or an expert
        actor, reports, too."""
        streamed = self.stage.streamed
        shared = streamed is not None and streamed.shared and not self.plan.first_of_host(self.part)
        experts = sum(opened.resident_bytes for opened in self.shared_experts.values())
        return experts + (streamed.host_bytes if streamed is not None and shared else 0)

    def _notes(self) -> list[str]:
        """What a user should know; what replicas have in common, from one of them."""
        held, notes = self.spec.activations, [] if self._lane is None else list(self._lane.lane.notes)
        streamed = self.stage.streamed
        if streamed is not None and streamed.not_shared:
            notes.append(
                f"{self.title} has a copy of its streamed layers' weights of its own, "
                f"{gib(streamed.host_bytes)} that the plan does not count: {streamed.not_shared}; run the "
                "driver and the workers of its host in one container, or set rule.replicas=1"
            )
        twice = [layer for layer, scale in self.stage.scales.items() if scale is None]
        if held in ("group", "retain") or not twice or self.part.replica:
            return notes
        return [
            *notes,
            f"rule.activations={held}: {len(twice)} layers from {twice[0]} on are not affine in their "
            "experts' output, so most of their micro-batches are recomputed twice; rule.activations=group "
            "does it once, in smaller waves",
        ]

    def take_experts(self, exports: Sequence[ExportedExperts]) -> None:
        """Open the memory of those expert actors that this worker reads, and let go of any other's.

        Raises:
            RuntimeError: as `OpenExperts`.
        """
        self.claim_thread()
        lent = lent_experts(self.plan, self.rank)
        own = {e.rank: e for e in exports if e.rank in lent}
        files = {file for exported in own.values() for file in exported.files}
        known = {
            f: o for before in self.shared_experts.values() for f, o in before.files.items() if f in files
        }
        self.shared_experts = {}  # what is gone is unmapped before anything is mapped
        if self._lane is not None:
            self._lane.keep_only(known)
        for rank, exported in own.items():
            self.shared_experts[rank] = OpenExperts(exported, known)
        if self._lane is not None:
            self._lane.take(self.shared_experts, range(*self.part.layers))

    def close(self) -> None:
        if self._lane is not None:  # whose thread may still write into the port's memory
            self._lane.close()
            self._lane = None
        self.port.close()
        self.shared_experts.clear()
        if self._capped:  # cluster=local: the process goes on
            torch.cuda.set_per_process_memory_fraction(1.0, self.spec.device)
        self._stage = None
        self._masters = None

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.outbox.close()

    # -- a pass ------------------------------------------------------------------------------

    def run_pass(self, spec: PassSpec) -> WorkerPassReport:
        """Walk this worker's program of the pass."""
        fixed = self.stage.adapters.fixed()
        with self._profiled(spec), self.gpu_memory(), self._joined(spec.joined), fixed:
            return self._run_pass(spec)

    @contextmanager
    def _joined(self, trainings: Collection[str]) -> Iterator[None]:
        """Inside, layers may also train the LoRA of trainings that were put aside: there, or in copies on a
        GPU, whose gradients go back at the end."""
        if not trainings:
            yield
            return
        flat = self.stage.flat
        own = {
            training: [tensor.to(self.spec.device) for tensor in self._put_aside(training)[:2]]
            for training in trainings
        }
        others = {
            training: (flat.by_name(values), flat.by_name(grads)) for training, (values, grads) in own.items()
        }
        with self.stage.adapters.lent(others):
            yield
        for training, (_, grads) in own.items() if self._on_gpu else ():
            self._put_aside(training)[1].copy_(grads)

    def _run_pass(self, spec: PassSpec) -> WorkerPassReport:
        self.check_restored()
        self.claim_thread()
        self.port.release_all()
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self.spec.device)
        recorder = SpanRecorder(full=spec.timeline)
        experts, stages = self._links(spec.number, recorder, later=True)
        stage = self.stage
        lane: LaneTokens | None = None
        try:
            with recorder.span("begin", "compute"):
                loop = stage.begin(spec, self.part.replica, experts, stages)
                if self._lane is not None:
                    how = (self._expert_dropout(spec), spec.adapters, len(loop.groups), self.plan.backward)
                    loop.tokens = lane = LaneTokens(self._lane, experts, stage.device, *how)
            for op in worker_program(self.plan, self.part.replica, self.part.stage, spec.kind):
                self.doing = f"pass {spec.number}, {op.kind}, layer {op.layer}, group {op.group}"
                with recorder.span(op.kind, "compute", op.layer, op.group):
                    loop.run(op)
            with recorder.span("check", "compute"):
                loop.recomputed.check()
            experts.finish()
            stages.finish()
        finally:
            experts.close()
            if lane is not None:
                lane.close()
            if spec.adapters is not True:
                stage.adapters.switch_all(True)  # a step or a save may follow
        self.doing = "idle"
        seconds = loop.seconds()
        of_rows = stage.last and (spec.return_logps or isinstance(spec.objective, Objective))
        of_tokens = stage.last and isinstance(spec.objective, TokenLoss)
        return WorkerPassReport(
            rank=self.rank,
            loss_sum=loop.loss_sum,
            terms={
                "attention": seconds["attention"],
                "head": seconds["loss"],
                "experts": experts.seconds_waiting,
                "stages": stages.seconds,
            },
            host_rss_bytes=resident_bytes() - self._counted_elsewhere,
            gpu_bytes=torch.cuda.max_memory_allocated(self.spec.device) if self._on_gpu else 0,
            pid=os.getpid(),
            activity=recorder.activity(self.name, self.host_name, self.part.threads),
            logits=loop.logits() if spec.return_logits and stage.last else [],
            losses=loop.losses() if stage.last else [],
            routing=loop.routing(),
            logps=loop.logps() if of_rows else [],
            token_logps=loop.token_logps() if of_tokens else [],
            tops=loop.tops() if of_tokens and spec.return_top else [],
        )

    def _expert_dropout(self, spec: PassSpec) -> DropoutSpec | None:
        """Dropout of the routed experts' LoRA in this pass."""
        lora = self.spec.lora
        if not spec.dropout or not lora.experts or lora.dropout <= 0:
            return None
        return DropoutSpec(p=lora.dropout, seed=self.spec.seed, step=spec.step)

    def _links(self, number: int, recorder: SpanRecorder, *, later: bool) -> tuple[ExpertLink, StageLink]:
        """The conversations with the expert actors and with the neighbouring stages.

        Args:
            number: of the pass, or of a generation step.
            later: as `ExpertLink` has it.
        """
        plan = self.plan
        common: dict[str, Any] = {
            "number": number,
            "device": self.spec.device,
            "recorder": recorder,
        }
        by_ranges = later and self.spec.activations == "ranges"  # what is as long as a row is on the host
        experts = ExpertLink(
            self.mailbox,
            self.port,
            replica=self.part.replica,
            experts=plan.experts_of(self.part.replica),
            experts_of=lambda layer, rank: plan.experts[rank].experts_of(layer),
            num_experts=plan.dims.num_experts,
            overlap=plan.overlap,
            later=later,
            sums="cpu" if by_ranges else None,
            **common,
        )
        stages = common | ({"device": "cpu"} if by_ranges else {})
        return experts, StageLink(self.mailbox, self.port, rank=self.rank, **stages)

    @contextmanager
    def _profiled(self, spec: PassSpec) -> Iterator[None]:
        """torch.profiler around a pass, if `spec.profile` names a directory (trainer.profile_steps).

        Writes step_000003_pass_7_worker-0.json there (Chrome trace). CUDA activities are recorded where the
        worker computes on a GPU.
        """
        if spec.profile is None or not _profiling.acquire(blocking=False):
            yield
            return
        try:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if self._on_gpu:
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            with torch.profiler.profile(activities=kinds, record_shapes=True) as trace:
                yield
            name = f"step_{spec.step + 1:06d}_pass_{spec.number}_{self.name}.json"
            try:
                Path(spec.profile).mkdir(parents=True, exist_ok=True)
                trace.export_chrome_trace(str(Path(spec.profile, name)))
            except (OSError, RuntimeError) as error:  # a run does not end for want of a trace
                logger.warning("the profile %s cannot be written: %s", name, error)
        finally:
            _profiling.release()

    def _gpus(self) -> tuple[str, ...]:
        return (self.part.place,)

    def _frees_gpu(self) -> str:
        """Of the present plan."""
        lane = "rule.experts.stream=off, " if self.part.lane is not None else ""
        levels = "group, host or ranges" if self.spec.activations == "retain" else "host or ranges"
        return (
            f"{lane}trainer.loss_chunk=256, rule.activations={levels}, a lower data.max_length, "
            "trainer.micro_batch_size or rule.resident_layers, or more rule.stages"
        )

    # -- generation --------------------------------------------------------------------------

    def generate(self, spec: SessionSpec) -> GenerationReport:
        """One session of generation, until the driver ends it."""
        self.check_restored()
        self.claim_thread()
        experts, stages = self._links(spec.tag(0), SpanRecorder(), later=False)
        with self.gpu_memory(), self.stage.adapters.fixed():
            report = WorkerSession(self, spec, self.part, self.stage, self.outbox, experts, stages).run()
        self.doing = "idle"
        return report

    def open_outbox(self, address: DoorbellAddress | None) -> bool:
        """Before a session. Returns whether tokens go to the driver's doorbell at `address`."""
        return self.outbox.open(address)

    def tokens(self, timeout: float) -> tuple[list[Token], bool]:
        """What was generated since the last call, and whether more can come (from another thread)."""
        return self.outbox.take(timeout)

    # -- the end of a step ------------------------------------------------------------------

    def hold_masters(self, shapes: list[dict[str, tuple[int, ...]]]) -> None:
        """Worker 0: make the optimizer for all stages' LoRA (one flat float32 vector per stage)."""
        with self.gpu_memory():
            self._masters = Masters(shapes, self.optim, self.spec.device)

    def start_masters(self, token: int) -> None:
        """Stages of replica 0 send their initial LoRA to worker 0."""
        if self.rank == 0:
            for stage in range(self.plan.stages):
                self.masters.set(stage, self._flat_from(stage, "param", ("initial", token, stage)))
        elif self.part.replica == 0:
            self._send_flat("param", ("initial", token, self.rank))

    def publish(self, token: int) -> None:
        """Worker 0 sends every worker the current masters; the others take them."""
        self._exchange_parameters(("params", token))
        if self.rank != 0:
            self.reborn = False  # what it trains with is all that it holds

    def prepare(self, step: int, token: int) -> float:
        """Phase one: reduce gradients to worker 0; returns their squared norm there, 0 elsewhere.

        `token` distinguishes the messages of a repeated step from the messages of the failed attempt.
        """
        self.claim_thread()
        if self.rank != 0:
            self._send_flat("grad", ("grads", token, self.rank))
            return 0.0
        self.doing = f"step {step}, reducing gradients"
        for stage in range(self.plan.stages):
            ranks = [self.plan.worker(replica, stage).rank for replica in range(self.plan.replicas)]
            self.masters.set_grad(stage, self._flat_from(ranks[0], "grad", ("grads", token, ranks[0])))
            for rank in ranks[1:]:  # rank order: the sum is the same every time
                self.masters.add_grad(stage, self._flat_from(rank, "grad", ("grads", token, rank)))
        self.doing = "idle"
        return squared_norm(self.masters.optimizer.gradients())

    def commit(self, step: int, lr: float, clip: float, token: int, adam: AdamStep | None = None) -> float:
        """Phase two, idempotent: step at worker 0, updated weights to all. Returns seconds spent.

        Called again for an applied step, it only sends the weights again; `token` distinguishes the messages
        of the attempts.
        """
        self.claim_thread()
        start = time.monotonic()
        if self.rank == 0 and step > self._committed:
            self.masters.optimizer.apply(lr, clip, adam)
        self._committed = step  # whatever becomes of the messages: a second update would be one too many
        self._exchange_parameters(("updated", token))
        self.stage.zero_grad()
        return time.monotonic() - start

    def _exchange_parameters(self, tag: tuple[str, int]) -> None:
        own = self.stage.flat.values
        if self.rank != 0:
            own.copy_(self.mailbox.take((*tag, self.part.stage)).tensors["flat"])
            return
        for stage in range(self.plan.stages):
            flat = self.masters.get(stage)
            others: list[Address] = [
                ("worker", w.rank) for w in self.plan.workers if w.stage == stage and w.rank != 0
            ]
            if others:
                self.port.send(others, Message((*tag, stage), {"flat": flat.cpu()}))
            if stage == 0:
                own.copy_(flat)

    def _flat(self, what: str) -> torch.Tensor:
        return self.stage.flat.grads if what == "grad" else self.stage.flat.values

    def _send_flat(self, what: str, tag: tuple[str, int, int]) -> None:
        """Send worker 0 this stage's parameters or gradients."""
        self.port.send([ROOT], Message(tag, {"flat": self._flat(what).cpu()}))

    def _flat_from(self, rank: int, what: str, tag: tuple[str, int, int]) -> torch.Tensor:
        """Worker 0: what `rank` sent with this tag; its own for rank 0."""
        if rank == 0:
            return self._flat(what)
        return self.mailbox.take(tag).tensors["flat"]

    # -- what it trains ----------------------------------------------------------------------

    def trained(self, what: str) -> Iterable[tuple[str, torch.Tensor]]:
        return () if self._masters is None else self._masters.named(what)

    def lora(self, what: str) -> Mapping[str, torch.Tensor]:
        return self.stage.flat.by_name(self._flat(what))

    def adapter(self, which: bool | str = True) -> Mapping[str, torch.Tensor]:
        """Empty on replicas above 0, which have the same."""
        return self.stage.adapter(which) if self.part.replica == 0 else {}

    def _set_step(self, step: int) -> None:
        if self._masters is not None:
            self._masters.optimizer.set_step(step)

    def discard(self) -> None:
        self.mailbox.clear()
        self.stage.zero_grad()
        self.stage.adapters.switch_all(True)  # what comes next may overwrite parameters
        if self._on_gpu:
            # Finish copies out of peers' memory: it is unmapped when peers are replaced.
            torch.cuda.synchronize(self.spec.device)

    def _restart_lora(self, seed: int | None = None) -> None:
        """Masters follow: `hold_masters`, `start_masters`, `publish`."""
        self.stage.load_parameters(self.stage.initial_parameters(seed))

    def _training_state(self) -> list[tuple[torch.Tensor, bool]]:
        self.stage.adapters.switch_all(True)
        own = self.stage.flat.values, self.stage.flat.grads
        of_masters = [] if self._masters is None else self._masters.training_state()
        return [(tensor, self._on_gpu) for tensor in (*own, *of_masters)]

    def _moved(self) -> None:
        self.stage.flat.find()
        self.stage.adapters.find_trained()
        if self._masters is not None:
            self._masters.find_values()

    def keep_adapter(self, name: str, copy: bool) -> None:
        self.stage.adapters.keep(name, copy=copy)

    def drop_adapter(self, name: str) -> None:
        self.stage.adapters.switch_all(True)
        self.stage.adapters.drop(name)
