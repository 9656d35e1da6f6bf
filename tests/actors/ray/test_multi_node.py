"""Two Ray nodes: experts on both, attention on one or both, the bits of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from kt_ray.actors.ray.ray_cluster import RayCluster, RayHandle
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from tests.helpers.exhaustive import exhaustive
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.ray_place import head_node, ray_place, second_node, shared_memory
from tests.helpers.runs import config_for, local_cluster, plan_for, steps

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MIXED = ("rule=cpu_2workers_2sockets", "rule.ray.strategy=SPREAD")
BATCHES = [random_rows(8, seed=s) for s in range(2)]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Two Ray nodes, two CPUs each, as processes on this machine."""
    logs = tmp_path_factory.mktemp("nodes")
    with (
        ray_place(own_token=False) as place,
        head_node(place, logs / "head", cpus=2),
        second_node(place, logs / "second", cpus=2),
    ):
        yield place.address
        ray.shutdown()


def started(checkpoint: Path, config: Config, run_dir: Path) -> RayCluster:
    plan = plan_for(checkpoint, config)
    specs = actor_specs(plan, config, str(checkpoint))
    return RayCluster(plan, specs, config.cluster, config.rule.ray, "hosts", run_dir=str(run_dir))


@pytest.mark.parametrize(
    ("attention", "copies"),
    [exhaustive(("driver", 1)), exhaustive(("all", 1)), ("all", 2)],
)
def test_bit_identical_and_in_their_places(tmp_path: Path, address: str, attention: str, copies: int) -> None:
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=4)
    common = ("rule=multi_node", "rule.device=cpu", "optim.lr=0.02", "lora.dropout=0.1", "rule.replicas=2")
    common = (*common, f"rule.attention_hosts={attention}", f"rule.experts.copies={copies}")
    config = config_for(checkpoint, *common, "cluster=ray", f"cluster.address={address}")
    cluster = started(checkpoint, config, tmp_path)
    try:
        lines = cluster.connect()
        assert any(line.startswith("host 1: Ray node") for line in lines)
        cluster.start()
        losses = steps(cluster, config, BATCHES, 2)
        handles = [handle for handle in cluster.handles if isinstance(handle, RayHandle)]
        nodes = {handle.address: ray.get(handle.actor.place.remote())[0] for handle in handles}
        driver = ray.get_runtime_context().get_node_id()
    finally:
        cluster.shutdown()
    hosts = [nodes["worker", worker.rank] for worker in cluster.plan.workers]
    assert [host == driver for host in hosts] == [True, attention == "driver"]
    hosts = [nodes["experts", actor.rank] for actor in cluster.plan.experts]
    assert [host == driver for host in hosts] == [actor.host == 0 for actor in cluster.plan.experts]
    assert len(set(hosts)) == 2
    assert not list(tmp_path.glob(".kt_ray*"))  # the check of the run directory leaves nothing
    for local in (config_for(checkpoint, *common), config):  # folded onto this host, and Ray's own plan
        with local_cluster(checkpoint, local) as here:
            assert losses == steps(here, local, BATCHES, 2)


def test_too_few_nodes_end_before_anything_is_loaded(tmp_path: Path, address: str) -> None:
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(
        checkpoint,
        "rule=multi_node",
        "rule.nodes=3",
        "rule.device=cpu",
        "cluster=ray",
        f"cluster.address={address}",
    )
    cluster = started(checkpoint, config, tmp_path)
    try:
        with pytest.raises(UserError, match="too few nodes") as caught:
            cluster.connect()
        assert "2 nodes as planned" in str(caught.value.observed) and not cluster.handles
    finally:
        cluster.shutdown()


def test_no_cluster_is_no_place_for_several_hosts(tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(
        checkpoint, "rule=multi_node", "rule.device=cpu", "cluster=ray", "cluster.address=local"
    )
    with pytest.raises(UserError, match="no running Ray cluster"):
        started(checkpoint, config, tmp_path).connect()
    assert not ray.is_initialized()


@pytest.mark.exhaustive
def test_replicas_of_a_host_share_streamed_weights(tmp_path: Path, address: str) -> None:
    """Two replicas on each host, whose layers are streamed: one copy of the weights per host."""
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3)
    rule = ("rule=multi_node", "rule.device=cpu", "rule.replicas=4", "rule.attention_hosts=all")
    more = ("rule.resident_layers=0", "cluster=ray", f"cluster.address={address}")
    config = config_for(checkpoint, *rule, *more)
    cluster = started(checkpoint, config, tmp_path)
    try:
        cluster.start()
        losses = steps(cluster, config, BATCHES, 2)
        facts = [fact for fact in cluster.info() if fact["actor"].startswith("worker")]
        opened = [weights_of(fact["pid"]) for fact in facts]
        assert not any(fact["notes"] for fact in facts), facts
    finally:
        cluster.shutdown()
    assert len(opened[0]) == 1 and opened[0] == opened[1] != opened[2] == opened[3]
    with local_cluster(checkpoint, config) as here:
        assert losses == steps(here, config, BATCHES, 2)


def weights_of(pid: int) -> set[str]:
    """Files of shared weights that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split("memfd:")[1].split()[0] for line in lines if "memfd:kt_ray-weights" in line}


@pytest.mark.exhaustive
def test_bit_identical_over_two_nodes(tmp_path: Path, address: str) -> None:
    """Without a rule for several nodes: bytes in the message between nodes, shared memory within one."""
    # Wide enough that messages within a node go through shared memory.
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256, num_hidden_layers=4)
    common = ("cluster=ray", f"cluster.address={address}", "optim.lr=0.02", "lora.dropout=0.1")

    # Two workers and two expert actors: the same message goes to a near peer and to a far one.
    mixed = config_for(checkpoint, *common, *MIXED)
    losses, nodes, opened = _ran(checkpoint, mixed)
    assert sorted(nodes) == ["experts-0", "experts-1", "worker-0", "worker-1"]
    for name, others in opened.items():
        assert others == {other for other in nodes if nodes[other] == nodes[name]}
        assert len(others) == 2
    with local_cluster(checkpoint, mixed) as local:
        assert losses == steps(local, mixed, BATCHES, 4)

    # One way for all, near and far: the same bits. Shared memory alone is refused.
    forced = config_for(checkpoint, *common, *MIXED, "rule.transport=gloo")
    forced_losses, _, opened = _ran(checkpoint, forced)
    assert forced_losses == losses
    assert opened == {name: set() for name in nodes}
    with pytest.raises(UserError, match="cannot carry tensors between nodes"):
        _ran(checkpoint, config_for(checkpoint, *common, *MIXED, "rule.transport=arena"))

    assert not ray.is_initialized()  # joined, then left


@pytest.mark.parametrize(
    ("asked", "found"), [((), 1), exhaustive((("rule.ray.worker_cpus=2", "rule.ray.expert_cpus=2"), 2))]
)
def test_a_plan_for_one_host_is_on_one_node_where_it_fits(
    tmp_path: Path, address: str, asked: tuple[str, ...], found: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver's, though its threads add up to the CPUs of both, and Ray prefers neither."""
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3")
    threads = ("rule=cpu_1worker_1socket", "rule.worker_threads=2", "rule.experts.threads=2")
    config = config_for(checkpoint, *threads, *asked, "cluster=ray", f"cluster.address={address}")
    cluster = started(checkpoint, config, tmp_path)
    try:
        cluster.start()
        handles = [handle for handle in cluster.handles if isinstance(handle, RayHandle)]
        nodes = {ray.get(handle.actor.place.remote())[0] for handle in handles}
        driver = ray.get_runtime_context().get_node_id()
    finally:
        cluster.shutdown()
    assert driver in nodes and len(nodes) == found
    assert caplog.text.count("Ray put them on 2 nodes") == found - 1


def _ran(checkpoint: Path, config: Config) -> tuple[list[float], dict[str, str], dict[str, set[str]]]:
    """Losses of four steps; by actor its node, and the actors whose shared memory it has open."""
    cluster = started(checkpoint, config, checkpoint.parent)
    try:
        cluster.start()
        losses = steps(cluster, config, BATCHES, 4)
        handles = [handle for handle in cluster.handles if isinstance(handle, RayHandle)]
        nodes = {f"{h.address[0]}-{h.address[1]}": ray.get(h.actor.place.remote())[0] for h in handles}
        return losses, nodes, {fact["actor"]: shared_memory(fact["pid"]) for fact in cluster.info()}
    finally:
        cluster.shutdown()
