"""The same actors under Ray: bit-identical to one process, errors and deaths reported, a clean end."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import Config
from kt_ray.errors import UserError
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.ray_place import Place, arena_bytes, ray_place, shared_memory
from tests.helpers.runs import config_for, local_cluster, one_pass, plan_for, steps, waves_of

pytestmark = pytest.mark.ray

BATCHES = [random_rows(8, seed=s) for s in range(3)]
COMMON = (
    "cluster=ray",
    "cluster.address=local",
    "cluster.dashboard=false",
    "optim.lr=0.02",
    "lora.dropout=0.1",
    "trainer.neftune_noise_alpha=0.2",
)


def ray_cluster(path: Path, config: Config, name: str) -> RayCluster:
    plan = plan_for(path, config)
    return RayCluster(plan, actor_specs(plan, config, str(path)), config.cluster, config.rule.ray, name)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    # Wide enough that messages go through shared memory, not inside the call.
    return build_checkpoint(tmp_path, "deepseek_v3", hidden_size=256)


def taken_by_doorbell(pid: int) -> int:
    """How often the thread that listens for peers has waited for the next frame."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        status = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines())
        if status["Name"] == "kt-doorbell":
            return int(status["voluntary_ctxt_switches"])
    return 0


def test_a_joined_clusters_processes_see_our_settings(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its raylets were started with another environment; those that this run starts inherit its own."""
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    cluster = ray_cluster(checkpoint, config_for(checkpoint, *COMMON, "rule=cpu_1worker_1socket"), "test-env")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in cluster.environment()
    cluster.joined = True
    assert cluster.environment()["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    seen = cluster.environment()
    assert seen["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64" and "PYTORCH_CUDA_ALLOC_CONF" not in seen


def test_shutdown_leaves_no_process(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Ray that the cluster itself starts (the module's first test: the others share one)."""
    config = config_for(checkpoint, *COMMON, "rule=cpu_1worker_1socket")
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        try:
            check_own_ray(checkpoint, config, place)
        finally:
            ray.shutdown()  # where the test failed half-way


def check_own_ray(checkpoint: Path, config: Config, place: Place) -> None:
    cluster = ray_cluster(checkpoint, config, "test-end")
    pids = {fact["actor"]: fact["pid"] for fact in cluster.start()}
    # All the shared memory that the plan counts is made at the start, and a step makes no more.
    plan = cluster.plan
    made = {"worker-0": plan.workers[0].staging, "experts-0": plan.experts[0].staging}
    assert {name: arena_bytes(pid, name) for name, pid in pids.items()} == made
    steps(cluster, config, BATCHES, 1)
    assert {name: arena_bytes(pid, name) for name, pid in pids.items()} == made
    opened = {fact["actor"]: shared_memory(fact["pid"]) for fact in cluster.info()}
    assert opened == {name: {"worker-0", "experts-0"} for name in ("worker-0", "experts-0")}
    assert all(taken_by_doorbell(fact["pid"]) > 5 for fact in cluster.info())
    assert len(place.processes()) > 4
    cluster.shutdown()
    cluster.shutdown()
    assert place.left() == []
    assert not [n for n in os.listdir("/dev/shm") if "kt_ray" in n]


def assert_bits_of_one_process(checkpoint: Path, config: Config, cluster: ActorCluster) -> None:
    observed = steps(cluster, config, BATCHES, 4)
    parameters = cluster.parameters()
    with local_cluster(checkpoint, config) as local:
        assert observed == steps(local, config, BATCHES, 4)
        reference = local.parameters()
    assert set(parameters) == set(reference)
    assert all((parameters[name] == reference[name]).all() for name in reference)


@pytest.mark.usefixtures("local_ray")
def test_bit_identical_to_one_process_and_a_killed_actor_ends_the_step_with_one_error(
    checkpoint: Path,
) -> None:
    patterns = "lora.rank_pattern={experts: 2, o_proj: 6}"
    options = ["rule=cpu_2workers_2sockets", "trainer.step_timeout=60", patterns]
    config = config_for(checkpoint, *COMMON, *options)
    cluster = ray_cluster(checkpoint, config, "test")
    try:
        cluster.start()
        pids = {fact["actor"]: fact["pid"] for fact in cluster.info()}
        assert len(set(pids.values())) == 4 and os.getpid() not in pids.values()
        assert_bits_of_one_process(checkpoint, config, cluster)
        assert all(f["kernel_calls"] > 0 for f in cluster.info() if f["actor"].startswith("experts"))

        os.kill(pids["experts-1"], signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(UserError, match=r"expert actor 1 died.*To fix: .*dmesg"):
            cluster.run_pass(one_pass(cluster, waves_of(BATCHES[0], config, cluster.plan)))
        assert time.monotonic() - begin < 50
    finally:
        cluster.shutdown()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_a_lane_gives_the_bits_of_one_process(checkpoint: Path) -> None:
    """And answers rounded to bfloat16, of two replicas that share their streamed layers' weights."""
    lane = (
        "rule.replicas=2",
        "rule.resident_layers=0",
        "rule.experts.answers=bfloat16",
        "rule.experts.lane_device=[cpu,cpu]",
        "rule.experts.gpu_resident=4",
        "rule.experts.stream=0.9",
    )
    config = config_for(checkpoint, *COMMON, "rule=cpu_2workers_2sockets", "rule.stages=1", *lane)
    cluster = ray_cluster(checkpoint, config, "lane")
    try:
        facts = cluster.start()
        assert_bits_of_one_process(checkpoint, config, cluster)
        lanes = [fact["lane"] for fact in cluster.info() if "lane" in fact]
    finally:
        cluster.shutdown()
    devices = [device for lane in lanes for device in lane["devices"]]
    assert len(devices) == 4 and all(d["carried_bytes"] > 0 and d["resident_bytes"] > 0 for d in devices)
    assert all(fact.get("notes", []) == [] for fact in facts)


@pytest.mark.usefixtures("local_ray")
def test_workers_lanes_give_the_bits_of_one_process(checkpoint: Path) -> None:
    """Two replicas read the experts of two actors, each in a process of its own."""
    lane = (
        *("rule.replicas=2", "rule.stages=1", "rule.experts.lane_device=cpu"),
        *("rule.experts.stream=0.7", "rule.experts.stream_to=workers"),
    )
    config = config_for(checkpoint, *COMMON, "rule=cpu_2workers_2sockets", *lane)
    cluster = ray_cluster(checkpoint, config, "workers-lane")
    try:
        cluster.start()
        assert all(worker.lane is not None and worker.lane.ahead for worker in cluster.plan.workers)
        assert_bits_of_one_process(checkpoint, config, cluster)
        lanes = [fact["lane"] for fact in cluster.info() if "lane" in fact]
    finally:
        cluster.shutdown()
    assert len(lanes) == 2 and all(lane["devices"][0]["carried_bytes"] > 0 for lane in lanes)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("local_ray")
def test_layers_by_ranges_give_the_bits_of_one_process(checkpoint: Path) -> None:
    """Of two stages and two replicas, whose layers are streamed."""
    keys = ("rule.activations=ranges", "rule.resident_layers=0", "rule.replicas=2", "rule.stages=2")
    config = config_for(checkpoint, *COMMON, "rule=cpu_2workers_2sockets", *keys)
    cluster = ray_cluster(checkpoint, config, "ranges")
    try:
        cluster.start()
        assert cluster.plan.head_ranges == 2
        assert_bits_of_one_process(checkpoint, config, cluster)
    finally:
        cluster.shutdown()


def stage_where_products_are_bounded(spec: StageSpec) -> Stage:
    assert os.environ["LRU_CACHE_CAPACITY"] == "64"
    return Stage(spec)


@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("cluster_of", [LocalCluster, RayCluster])
def test_compiled_products_are_bounded_before_the_first(
    cluster_of: type[ActorCluster], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage is built, and probed, after the bound was set in its process."""
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "")  # so that what the actor in this process sets is undone
    monkeypatch.delenv("LRU_CACHE_CAPACITY")
    config = config_for(checkpoint, *COMMON, "rule=cpu_1worker_1socket")
    plan = plan_for(checkpoint, config)
    specs = replace(actor_specs(plan, config, str(checkpoint)), build_stage=stage_where_products_are_bounded)
    more = (config.cluster, config.rule.ray, "bound") if cluster_of is RayCluster else ()
    cluster = cluster_of(plan, specs, *more)
    try:
        assert len(cluster.start()) == 2
    finally:
        cluster.shutdown()


@pytest.mark.usefixtures("local_ray")
def test_resources_that_never_come(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_for(
        checkpoint,
        *COMMON,
        "rule=cpu_1worker_1socket",
        "rule.ray.expert_cpus=9999",
        "cluster.start_timeout=3",
    )
    cluster = ray_cluster(checkpoint, config, "test-wait")
    try:
        with pytest.raises(UserError, match=r"did not provide.*CPU.*required CPU .*rule.ray"):
            cluster.start()
    finally:
        cluster.shutdown()
    printed = capfd.readouterr().err
    assert "Resources of 1 node(s):" in printed and "CPU:" in printed


@pytest.mark.usefixtures("local_ray")
def test_an_actor_that_cannot_load_names_the_fault(checkpoint: Path) -> None:
    config = config_for(checkpoint, *COMMON, "rule=cpu_1worker_1socket")
    cluster = ray_cluster(checkpoint, config, "test-load")
    weights = checkpoint / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    try:
        with pytest.raises(UserError, match=r"model\.safetensors"):
            cluster.start()
    finally:
        cluster.shutdown()
