"""Small runs for tests: a configuration, a plan on this host, a cluster, a number of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.batch import MicroBatch, PassSpec
from kt_ray.checkpoint.manifest import Manifest
from kt_ray.checkpoint.training import begin_checkpoint, commit_checkpoint
from kt_ray.checkpoint_dirs import step_name
from kt_ray.config.schema import Config
from kt_ray.data.batches import Wave, step_waves
from kt_ray.data.row_types import Row as DataRow
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.hardware.describe import this_host
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Plan
from kt_ray.train.trainer import StepBatches, Trainer
from tests.helpers.composing import compose
from tests.helpers.hf_reference import ExpertIds, Row, find_router, forced_routing

COMMON = (
    "data=demo",
    "cluster=local",
    "model.dtype=float32",
    "seed=3",
    "lora.rank=4",
    "lora.alpha=8",
    "rule.worker_threads=1",
    "trainer.micro_batch_size=1",
    "trainer.step_timeout=120",
    "optim.warmup=0",
)


def config_for(model_dir: Path, *overrides: str) -> Config:
    """Tests' settings on a checkpoint, and whatever else a test wants."""
    return compose([f"model.path={model_dir}", *COMMON, *overrides])


def plan_for(model_dir: Path, config: Config) -> Plan:
    return make_plan(dims_from_dir(str(model_dir)), config, this_host())


@contextlib.contextmanager
def local_cluster(model_dir: Path, config: Config) -> Iterator[ActorCluster]:
    """A started in-process cluster."""
    plan = plan_for(model_dir, config)
    cluster = LocalCluster(plan, actor_specs(plan, config, str(model_dir)))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.shutdown()


def waves_of(rows: Sequence[Row], config: Config, plan: Plan, *, unpadded: bool = False) -> Wave:
    """The rows of one step, for PassSpec."""
    data = [DataRow(np.array(r.ids), np.array(r.labels), r.sample) for r in rows]
    multiple = config.data.pad_to_multiple_of
    size = plan.micro_batch_rows
    (wave,) = step_waves(data, size, plan.replicas, plan.groups, multiple=multiple, unpadded=unpadded)
    return wave


def one_pass(
    cluster: ActorCluster,
    waves: Wave,
    kind: str = "train",
    *,
    number: int = 1,
    step: int = 0,
    logits: bool = False,
) -> PassSpec:
    """The description of one pass over `waves`."""
    tokens = sum(mb.loss_tokens for replica in waves for group in replica for mb in group)
    return PassSpec(number, step, kind, 3, waves, tokens, return_logits=logits)


def steps(
    cluster: ActorCluster,
    config: Config,
    batches: Sequence[Sequence[Row]],
    total: int,
    first: int = 0,
    stop: int | None = None,
) -> list[float]:
    """Losses of steps first..stop-1 of a run of `total` steps; step s takes batches[s % len(batches)]."""
    step_batches = StepBatches(
        total_steps=total,
        steps_per_epoch=len(batches),
        train=lambda step: step_waves(
            [DataRow(np.array(r.ids), np.array(r.labels), r.sample) for r in batches[step % len(batches)]],
            cluster.plan.micro_batch_rows,
            cluster.plan.replicas,
            cluster.plan.groups,
            cluster.plan.wave,
            multiple=config.data.pad_to_multiple_of,
            budget=cluster.plan.micro_batch_tokens,
        ),
    )
    trainer = Trainer(config, cluster, step_batches, first_step=first)
    for step in range(first, total if stop is None else stop):
        trainer.step(step)
    return trainer.summary.losses


def save_state(
    cluster: ActorCluster, root: Path, taken: int, also: Callable[[Path], object] = lambda _: None
) -> Path:
    """A checkpoint of the actors alone, of whose directory `also` is told before it is whole."""
    partial = begin_checkpoint(root, taken)
    shards = tuple(cluster.save_shards(str(partial)))
    also(partial)
    return commit_checkpoint(partial, root / step_name(taken), Manifest(taken, 0, {}, "", {}, shards))


def by_row(
    logits: Sequence[Sequence[Tensor]], wave_of_replica: Sequence[Sequence[MicroBatch]]
) -> dict[int, Tensor]:
    """sample id -> logits [length, V], out of a worker's logits per group and micro-batch."""
    rows: dict[int, Tensor] = {}
    for group, tensors in zip(wave_of_replica, logits, strict=True):
        for mb, tensor in zip(group, tensors, strict=True):
            for i, sample in enumerate(mb.sample_ids.tolist()):
                rows[sample] = tensor[i, : int(mb.lengths[i])]
    return rows


def relative(observed: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Per name, ||observed - expected|| / ||expected|| (a zero reference must be met by zeros)."""
    assert set(observed) == set(expected)
    errors = {}
    for name, value in expected.items():
        norm = float(value.double().norm())
        error = float((observed[name].double() - value.double()).norm())
        errors[name] = error / norm if norm > 0 else (0.0 if error == 0 else float("inf"))
    return errors


@contextlib.contextmanager
def replayed(cluster: ActorCluster, rows: Sequence[Row], expert_ids: ExpertIds) -> Iterator[None]:
    """The only worker's routers choose the reference's experts (one micro-batch of all rows)."""
    (handle,) = cluster.workers
    assert isinstance(handle, LocalHandle) and isinstance(handle.actor, AttentionWorker)
    stage = handle.actor.stage
    width = max(len(row.ids) for row in rows)
    with contextlib.ExitStack() as stack:
        for layer, by_sample in expert_ids.items():
            padded = torch.arange(stage.top_k).repeat(len(rows), width, 1)
            for i, row in enumerate(rows):
                padded[i, : len(row.ids)] = by_sample[row.sample]
            wanted = padded.view(-1, stage.top_k)
            router = find_router(stage.model.layers[layer])
            stack.enter_context(
                forced_routing(router, cluster.plan.dims.choices, stage.top_k, lambda ids=wanted: ids)
            )
        yield
