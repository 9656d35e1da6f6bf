"""The same actors under Ray: bit-identical to one process, errors and deaths reported, a clean end."""

import contextlib
import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

import kt_ray.actors.ray.ray_cluster as ray_cluster_module
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.ray.ray_cluster import RayCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.config.schema import ClusterConfig, Config
from kt_ray.errors import TryAgain, UserError
from kt_ray.model.stage import Stage
from kt_ray.model.stage_spec import StageSpec
from kt_ray.runs.start_cluster import Ended, _interrupted
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


LATE = "The last 20 lines of dashboard.log:\nTraceback\nOSError: [Errno 98] address already in use\n"


def starts(
    monkeypatch: pytest.MonkeyPatch, errors: list[Exception], **config: Any
) -> tuple[list[tuple[bool, int | None]], list[str], Any]:
    """`_start_local` where the first attempts raise `errors`: (dashboard, port) of each attempt, what was
    cleaned up, and how to start."""
    cluster = RayCluster.__new__(RayCluster)
    cluster.config = ClusterConfig(dashboard_port=9000, **config)
    asked: list[tuple[bool, int | None]] = []
    cleaned: list[str] = []
    monkeypatch.setattr(ray_cluster_module.ray, "shutdown", lambda: cleaned.append("shutdown"))

    def init(**how: Any) -> str:
        asked.append((how["include_dashboard"], how["dashboard_port"]))
        if len(asked) <= len(errors):
            raise errors[len(asked) - 1]
        return "context"

    monkeypatch.setattr(cluster, "_init", init)
    guard: Any = SimpleNamespace(own_ray=contextlib.nullcontext, sweep=lambda: cleaned.append("sweep"))
    return asked, cleaned, lambda: cluster._start_local(guard)


def test_a_start_that_fails_is_tried_on_another_port_and_then_without_the_dashboard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Between our look at the port and Ray's there is time for another program. Ray's errors are plain."""
    monkeypatch.setattr(ray_cluster_module, "free_port", lambda host, first: first)
    asked, cleaned, start = starts(monkeypatch, [ValueError("9000 is already occupied"), Exception(LATE)])
    assert start() == "context"
    assert asked == [(True, 9000), (True, 9001), (False, None)]
    assert cleaned == ["shutdown", "sweep"] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "Ray did not start, once more: 9000 is already occupied",
        "Ray did not start, once more without its dashboard: OSError: [Errno 98] address already in use",
    ]


def test_a_host_too_busy_for_ray_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    late = Exception("The current node timed out during startup.\n")
    asked, cleaned, start = starts(monkeypatch, [late] * 3, dashboard=False)
    with pytest.raises(TryAgain) as raised:
        start()
    line = "Ray cannot be started on this host; found The current node timed out during startup.; required"
    assert raised.value.line().startswith(line) and "cluster=local" in raised.value.remedy
    assert asked == [(False, None)] * 3 and cleaned == ["shutdown", "sweep"] * 3
    assert caplog.text.count("once more: The current node timed out") == 2


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.ENOENT])
def test_a_directory_that_ray_cannot_write_is_no_matter_of_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    place = tmp_path / "scratch"
    place.symlink_to(tmp_path if code == errno.ENOSPC else "/nowhere")
    monkeypatch.setenv("RAY_TMPDIR", str(place))
    fault = OSError(code, why := os.strerror(code), f"{place}/ray")
    asked, cleaned, start = starts(monkeypatch, [fault], dashboard=False)
    with pytest.raises(
        UserError, match=rf"its directory; at .*/scratch; found .*{why}.*RAY_TMPDIR"
    ) as raised:
        start()
    assert not isinstance(raised.value, TryAgain)
    assert len(asked) == 1 and cleaned == ["shutdown", "sweep"]


def test_without_a_free_port_there_is_no_dashboard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_cluster_module, "free_port", lambda host, first: None)
    asked, _, start = starts(monkeypatch, [])
    assert start() == "context" and asked == [(False, None)]
    assert "ports 9000 to 9049 are taken: no dashboard" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_ray_starts_ends_the_run_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Ray's handler of SIGTERM, which it has while it starts, ends the process with code 15. A hang-up is
    hidden from what is started then, not from the driver."""
    cluster, blocked = RayCluster.__new__(RayCluster), set()
    cluster.namespace = "signals"

    def init(**_: Any) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))
        blocked.update(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        signal.raise_signal(number)

    monkeypatch.setattr(ray_cluster_module.ray, "init", init)
    guard: Any = SimpleNamespace(own_ray=contextlib.nullcontext)
    cluster.config = ClusterConfig(dashboard=False)
    hup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which these tests may run under, ignores it
    try:
        with _interrupted():
            before = signal.getsignal(signal.SIGTERM)
            with pytest.raises(Ended):
                cluster._start_local(guard)
            assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGHUP, hup)
    assert signal.SIGHUP in blocked and signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
