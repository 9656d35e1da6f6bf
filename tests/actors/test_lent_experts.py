"""Attention workers with a lane have their host's experts open, after deaths and with kept adapters, too."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kt_ray.actors.actor import PlainActor
from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.cluster import ActorCluster
from kt_ray.actors.expert_actor import ExpertActor
from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs, lent_experts
from kt_ray.config.schema import Config
from kt_ray.experts import LocalExperts
from kt_ray.experts.lane_device import PinnedWeights
from kt_ray.experts.shared_experts import ExportedExperts
from kt_ray.placement.plan_types import LanePlan, Plan
from kt_ray.train.cluster_protocol import ActorLost
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.mortal import Death, MortalCluster
from tests.helpers.runs import config_for, one_pass, plan_for, steps, waves_of

BATCHES = [random_rows(8, seed=s) for s in range(2)]
TWO_ACTORS = ("rule=cpu_2workers_2sockets", "lora.dropout=0.1", "optim.lr=0.02")


def with_lanes(plan: Plan, *ranks: int) -> Plan:
    """Workers of these ranks, or all, have a lane that carries nothing."""
    lane = LanePlan(("cpu",))
    return replace(
        plan,
        workers=tuple(replace(w, lane=lane) if w.rank in ranks or not ranks else w for w in plan.workers),
    )


@contextlib.contextmanager
def started(
    path: Path, config: Config, plan: Plan, kind: type[LocalCluster] = LocalCluster, *deaths: Death
) -> Iterator[ActorCluster]:
    cluster = kind(plan, actor_specs(plan, config, str(path)))
    if isinstance(cluster, MortalCluster):
        cluster.deaths = deaths
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.shutdown()


def workers(cluster: ActorCluster) -> list[AttentionWorker]:
    return [cast(Any, handle).actor for handle in cluster.workers]


def actors(cluster: ActorCluster) -> list[ExpertActor]:
    return [cast(Any, handle).actor for handle in cluster.experts]


def open_files(worker: AttentionWorker) -> dict[int, str]:
    return {rank: opened.of_weights.name for rank, opened in worker.shared_experts.items()}


def files(cluster: ActorCluster) -> dict[int, str]:
    return {rank: actor.export_experts().files[0].name for rank, actor in enumerate(actors(cluster))}


def memory(worker: AttentionWorker, rank: int) -> Tensor:
    opened = worker.shared_experts[rank]
    return opened.files[opened.of_weights].memory


def test_losses_are_the_same_bits(tmp_path: Path) -> None:
    """And workers see the LoRA that their actors have trained."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS)
    plan = plan_for(path, config)
    losses, parameters = {}, {}
    for name, chosen in {"private": plan, "shared": with_lanes(plan, 1)}.items():
        with started(path, config, chosen) as cluster:
            assert [spec.shared for spec in cluster.specs.experts] == [name == "shared"] * 2
            losses[name] = steps(cluster, config, BATCHES, 3)
            parameters[name] = cluster.parameters()
            first, second = workers(cluster)
            assert not first.shared_experts and not actors(cluster)[0]._facts()["notes"]
            if name == "private":
                assert not second.shared_experts
                continue
            assert open_files(second) == files(cluster)
            for rank, actor in enumerate(actors(cluster)):
                opened = second.shared_experts[rank]
                assert opened.weights.keys() == actor.experts.weights.keys()
                for layer, lora in actor.experts.lora.present.items():
                    ids, weights = opened.weights[layer]
                    assert ids == weights.expert_ids == actor.experts.order[layer]
                    assert lora.up_b.any() and torch.equal(opened.adapters[True][layer].up_b, lora.up_b)
            # One process: what the actors hold is counted once.
            assert second._counted_elsewhere == sum(o.resident_bytes for o in second.shared_experts.values())
    assert losses["private"] == losses["shared"]
    assert all(torch.equal(value, parameters["shared"][n]) for n, value in parameters["private"].items())


def test_memory_is_read_on_its_own_host_and_of_its_own_copy(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=4)
    common = ("rule=multi_node", "rule.device=cpu", "rule.replicas=2", "rule.attention_hosts=all")
    of_copies, far = (config_for(path, *common, f"rule.experts.copies={copies}") for copies in (2, 1))
    plan = with_lanes(plan_for(path, of_copies), 1)
    assert plan.copies == 2 and lent_experts(plan, 0) == ()
    assert lent_experts(plan, 1) == tuple(actor.rank for actor in plan.experts if actor.copy == 1)
    config, plan = far, with_lanes(plan_for(path, far), 0)
    plan = replace(plan, experts=tuple(replace(actor, host=actor.rank) for actor in plan.experts))
    assert len(plan.experts) == 2 and lent_experts(plan, 0) == (0,) and lent_experts(plan, 1) == ()
    assert [spec.shared for spec in actor_specs(plan, config, str(path)).experts] == [True, False]


@pytest.mark.parametrize("dead", [("experts", 1), ("worker", 1)])
def test_a_new_actor_after_a_death(tmp_path: Path, dead: tuple[str, int]) -> None:
    """The memory of the dead goes before its successor loads, that of the others stays mapped."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS)
    plan = with_lanes(plan_for(path, config))
    with started(path, config, plan, MortalCluster, Death(dead, "run_pass", 1)) as cluster:
        before = files(cluster)
        mapped = [memory(workers(cluster)[0], rank) for rank in range(2)]
        load, seen = ExpertActor.load_again, []

        def load_again(actor: ExpertActor) -> dict[str, Any]:
            seen.append([open_files(worker) for worker in workers(cluster)])
            return load(actor)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ExpertActor, "load_again", load_again)
            with pytest.raises(ActorLost):
                cluster.run_pass(one_pass(cluster, waves_of(BATCHES[0], config, plan)))
            cluster.recover()
        after = files(cluster)
        assert [open_files(worker) for worker in workers(cluster)] == [after] * 2
        still = [memory(workers(cluster)[0], rank) for rank in range(2)]
        assert still[0] is mapped[0] and after[0] == before[0]
        if dead[0] == "experts":
            assert seen == [[{0: before[0]}] * 2] and after[1] != before[1]
            assert still[1] is not mapped[1]
        else:
            assert not seen and after == before


def test_a_death_in_the_hand_over_at_the_start(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS, "trainer.recoveries=2")
    plan = with_lanes(plan_for(path, config))
    deaths = (Death(("worker", 1), "take_experts", 1), Death(("experts", 0), "export_experts", 2, "after"))
    with started(path, config, plan, MortalCluster, *deaths) as cluster:
        assert cast(Any, cluster).happened == 2
        assert [open_files(worker) for worker in workers(cluster)] == [files(cluster)] * 2


@pytest.mark.parametrize("dead", [True, False])
def test_memory_that_went_with_its_owner(tmp_path: Path, dead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner that dies between its export and the opening is replaced; else the error is told."""
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS, "trainer.recoveries=1")
    plan = with_lanes(plan_for(path, config))
    cluster = MortalCluster(plan, actor_specs(plan, config, str(path)))
    take, failed = AttentionWorker.take_experts, list[int]()

    def take_experts(worker: AttentionWorker, exports: Sequence[ExportedExperts]) -> None:
        if exports and not failed:
            failed.append(worker.rank)
            cast(Any, cluster.experts[0]).dead = dead
            raise RuntimeError("the memory cannot be opened")
        take(worker, exports)

    monkeypatch.setattr(AttentionWorker, "take_experts", take_experts)
    try:
        if dead:
            cluster.start()
            assert cluster.recoveries == 1
            assert [open_files(worker) for worker in workers(cluster)] == [files(cluster)] * 2
        else:
            with pytest.raises(RuntimeError, match="cannot be opened"):
                cluster.start()
    finally:
        cluster.shutdown()


def test_kept_adapters(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS)
    with started(path, config, with_lanes(plan_for(path, config))) as cluster:
        directory = tmp_path / "adapter"
        directory.mkdir()

        def take(actor: PlainActor, source: str, one_of_several: bool = False) -> int:
            for number, (_, tensor) in enumerate(actor.trained("param")):
                tensor.fill_(number + len(source))
            return 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PlainActor, "load_adapter", take)
            cluster.load_adapters({"one": "a", "three": "abc"})
        for worker in workers(cluster):
            for rank, actor in enumerate(actors(cluster)):
                adapters = worker.shared_experts[rank].adapters
                assert adapters.keys() == {True, "one", "three"}
                for layer, lora in actor.experts.lora.present.items():
                    assert torch.equal(adapters["one"][layer].up_a + 2, lora.up_a)
                    assert torch.equal(adapters["three"][layer].up_a, lora.up_a)


def test_the_memory_goes_with_the_cluster(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS)
    with started(path, config, with_lanes(plan_for(path, config))) as cluster:
        exports: list[ExportedExperts] = [actor.export_experts() for actor in actors(cluster)]
    del cluster
    gc.collect()
    for file in (file for exported in exports for file in exported.files):
        found = os.readlink(file.path) if os.path.exists(file.path) else ""
        assert file.name not in found


def test_a_kernel_without_shared_huge_pages_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS)
    load = LocalExperts.load

    def without(self: LocalExperts, *args: Any) -> None:
        load(self, *args)
        self.huge_pages = False

    monkeypatch.setattr(LocalExperts, "load", without)
    plan = with_lanes(plan_for(path, config))
    cluster = LocalCluster(plan, actor_specs(plan, config, str(path)))
    try:
        notes = {fact["actor"]: fact["notes"] for fact in cluster.start()}
    finally:
        cluster.shutdown()
    (note,) = notes.pop("experts-0")
    assert "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled" in note
    assert not any(notes.values())


def test_memory_that_cannot_be_locked_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker locks it after it was loaded: its note comes with what `start` returns, and after a death."""

    def refused(self: PinnedWeights, address: int, size: int) -> None:
        self.refusal = self.refusal or "no"

    monkeypatch.setattr(PinnedWeights, "_register", refused)
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, *TWO_ACTORS, "trainer.recoveries=1")
    plan, lane = plan_for(path, config), LanePlan(("cpu",), (), ((0, 0.5),))
    plan = replace(plan, workers=tuple(replace(worker, lane=lane) for worker in plan.workers))
    cluster = MortalCluster(plan, actor_specs(plan, config, str(path)))
    note = "lane: host memory stays pageable (no); copies are slower"
    try:
        found = {fact["actor"]: fact["notes"] for fact in cluster.start()}
        assert found["worker-0"] == found["worker-1"] == [note]
        cast(Any, cluster.workers[1]).dead = True
        cluster._lost.add(("worker", 1))
        with caplog.at_level("WARNING"):
            cluster.recover()
        assert [r.getMessage() for r in caplog.records if "pageable" in r.getMessage()] == [
            f"worker-1: {note}"
        ]
    finally:
        cluster.shutdown()
