"""Actors on two nodes: bytes in the message between nodes, shared memory within one, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from kt_ray.actors.ray.ray_cluster import RayCluster, RayHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.ray_place import head_node, ray_place, second_node, shared_memory
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MIXED = ("rule=cpu_2workers_2sockets", "rule.ray.strategy=SPREAD")
BATCHES = [random_rows(8, seed=s) for s in range(2)]


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """Two Ray nodes, two CPUs each, as processes on this machine."""
    # This process joins by itself, and it may hold a token for other clusters already.
    with (
        ray_place(own_token=False) as place,
        head_node(place, tmp_path / "head", cpus=2),
        second_node(place, tmp_path / "second", cpus=2),
    ):
        yield place.address
        ray.shutdown()


def test_bit_identical_over_two_nodes(tmp_path: Path, address: str) -> None:
    # Wide enough that messages within a node go through shared memory.
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256, num_hidden_layers=4)
    common = ("cluster=ray", f"cluster.address={address}", "optim.lr=0.02", "lora.dropout=0.1")

    # Two workers and two expert actors: the same message goes to a near peer and to a far one.
    mixed = config_for(checkpoint, *common, *MIXED)
    losses, nodes, opened = _run(checkpoint, mixed)
    assert sorted(nodes) == ["experts-0", "experts-1", "worker-0", "worker-1"]
    for name, others in opened.items():
        assert others == {other for other in nodes if nodes[other] == nodes[name]}
        assert len(others) == 2
    with local_cluster(checkpoint, mixed) as local:
        assert losses == steps(local, mixed, BATCHES, 4)

    # One way for all, near and far: the same bits. Shared memory alone is refused.
    forced = config_for(checkpoint, *common, *MIXED, "rule.transport=gloo")
    forced_losses, _, opened = _run(checkpoint, forced)
    assert forced_losses == losses
    assert opened == {name: set() for name in nodes}
    with pytest.raises(UserError, match="cannot carry tensors between nodes"):
        _run(checkpoint, config_for(checkpoint, *common, *MIXED, "rule.transport=arena"))

    assert not ray.is_initialized()  # joined, then left


def _run(checkpoint: Path, config: Config) -> tuple[list[float], dict[str, str], dict[str, set[str]]]:
    """Losses of four steps; by actor its node, and the actors whose shared memory it has open."""
    plan = plan_for(checkpoint, config)
    specs = actor_specs(plan, config, str(checkpoint))
    cluster = RayCluster(plan, specs, config.cluster, config.rule.ray, "two")
    try:
        cluster.start()
        losses = steps(cluster, config, BATCHES, 4)
        handles = [handle for handle in cluster.handles if isinstance(handle, RayHandle)]
        nodes = {f"{h.address[0]}-{h.address[1]}": ray.get(h.actor.place.remote())[0] for h in handles}
        return losses, nodes, {fact["actor"]: shared_memory(fact["pid"]) for fact in cluster.info()}
    finally:
        cluster.shutdown()
