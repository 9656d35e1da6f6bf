"""Shared memory is not read after its lease: freed blocks are overwritten, the curve must not move."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.local_cluster import LocalCluster, LocalHandle
from kt_ray.actors.ray import ray_actor
from kt_ray.actors.ray.ray_actor import Packed, Peer, RayPort
from kt_ray.actors.specs import actor_specs
from kt_ray.placement.transports import Transport
from kt_ray.transport.messages import Address
from kt_ray.transport.shared_memory import Arena, Block, TensorRef
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

BATCHES = [random_rows(8, seed=s) for s in range(2)]


class _Doorbell:
    """Stands where a Ray handle stands: `deliver.remote(packed)`, in this process."""

    def __init__(self, port: RayPort) -> None:
        self.deliver = self
        self._port = port

    def remote(self, packed: Packed) -> None:
        self._port.receive(packed)


class _PoisoningArena(Arena):
    freed = 0
    copied = 0  # tensors of expert actors

    def write(self, tensor: Tensor) -> tuple[TensorRef, Block]:
        _PoisoningArena.copied += self._name.startswith("experts")
        return super().write(tensor)

    def free(self, block: Block) -> None:
        index, offset, size = block
        self._segments[index].map[offset : offset + size] = b"\xff" * size
        _PoisoningArena.freed += 1
        super().free(block)


class _ArenaCluster(LocalCluster):
    def _spawn(self) -> None:
        super()._spawn()
        ports = {
            h.address: RayPort(h.actor.name, h.actor.deliver, h.actor.abort, transport=Transport("arena", ""))
            for h in self._local()
        }
        peers: Mapping[Address, Peer] = {a: Peer(_Doorbell(port), "here") for a, port in ports.items()}
        for handle in self._local():
            actor = handle.actor
            actor.port = ports[handle.address]
            parts: Any = self.plan.workers if isinstance(actor, AttentionWorker) else self.plan.experts
            ports[handle.address].reserve(parts[actor.rank].staging)
            ports[handle.address].connect(handle.address, peers)

    def arena_bytes(self) -> dict[Address, int]:
        ports: dict[Address, Any] = {h.address: h.actor.port for h in self._local()}
        return {address: port._arena.bytes for address, port in ports.items()}

    def _local(self) -> Sequence[LocalHandle]:
        return [h for h in self.handles if isinstance(h, LocalHandle)]


@pytest.mark.parametrize(
    "layout",
    [
        ["rule=cpu_1worker_1socket"],
        ["rule.device=cpu", "rule.stages=2", "rule.replicas=2", "rule.experts.sockets=2", "rule.groups=2"],
        # Several waves per step, attention and experts in turn.
        [
            *("rule.device=cpu", "rule.stages=2", "rule.experts.sockets=2", "rule.groups=2", "rule.wave=3"),
            *("trainer.batch_size=8", "trainer.micro_batch_size=1", "rule.overlap=false"),
        ],
        # Answers rounded on their way into shared memory, one block for both replicas.
        [
            *("rule.device=cpu", "rule.replicas=2", "rule.experts.sockets=2", "rule.groups=2"),
            *("trainer.micro_batch_size=1", "rule.experts.answers=bfloat16"),
        ],
        # A lane that gets every token, and keeps what it needs for backward.
        ["rule.device=cpu", "rule.experts.lane_device=cpu", "rule.experts.gpu_resident=8", "rule.groups=2"],
    ],
)
def test_no_block_is_read_after_release(
    tmp_path: Path, layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_actor, "Arena", _PoisoningArena)
    monkeypatch.setattr(ray_actor, "INLINE_BYTES", -1)
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *layout, "optim.lr=0.02", "lora.dropout=0.1")
    with local_cluster(path, config) as local:
        expected = steps(local, config, BATCHES, 4)
    plan = plan_for(path, config)
    cluster: Any = _ArenaCluster(plan, actor_specs(plan, config, str(path)))
    _PoisoningArena.freed = _PoisoningArena.copied = 0
    try:
        cluster.start()
        observed = steps(cluster, config, BATCHES, 4)
    finally:
        cluster.shutdown()
    assert observed == expected
    assert _PoisoningArena.freed > 100
    # Every replica reads its rows where they were computed.
    assert _PoisoningArena.copied == 0


@pytest.mark.parametrize(
    "layout",
    [
        ["rule=cpu_1worker_1socket"],
        ["rule=cpu_1worker_1socket", "rule.groups=4", "trainer.micro_batch_size=1", "model.dtype=bfloat16"],
        ["rule.device=cpu", "rule.stages=3", "rule.experts.sockets=2", "rule.groups=2"],
        [
            *("rule.device=cpu", "rule.stages=2", "rule.replicas=2", "rule.experts.sockets=2"),
            *("rule.groups=2", "trainer.micro_batch_size=1", "lora.rank=64"),
        ],
        [
            *("rule.device=cpu", "rule.replicas=3", "rule.experts.sockets=2", "rule.groups=3"),
            *("trainer.micro_batch_size=1", "rule.experts.answers=bfloat16"),
        ],
    ],
)
def test_arenas_are_made_at_the_start_and_do_not_grow(
    tmp_path: Path, layout: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows as long as the plan allows, so every message is as large as the plan counts."""
    monkeypatch.setattr(ray_actor, "INLINE_BYTES", -1)
    path = build_checkpoint(tmp_path, "deepseek_v3")
    length = 128
    config = config_for(path, *layout, f"data.max_length={length}", "trainer.batch_size=12")
    plan = plan_for(path, config)
    cluster: Any = _ArenaCluster(plan, actor_specs(plan, config, str(path)))
    try:
        cluster.start()
        made = cluster.arena_bytes()
        steps(cluster, config, [random_rows(12, seed=s, lengths=(length,)) for s in range(2)], 3)
        assert cluster.arena_bytes() == made
    finally:
        cluster.shutdown()
    planned = {("worker", w.rank): w.staging for w in plan.workers}
    planned |= {("experts", a.rank): a.staging for a in plan.experts}
    page = mmap.PAGESIZE
    assert made == {address: (size + page - 1) // page * page for address, size in planned.items()}
    counted = sum(budget.items["staging"] for budget in plan.budgets if budget.is_socket)
    assert sum(planned.values()) == counted
