"""Two copies of the experts, each with its own replicas: the numbers of one copy, the update shared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.expert_actor import ExpertActor
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, steps, waves_of

COMMON = (
    *("rule=multi_node", "rule.device=cpu", "rule.replicas=2", "rule.attention_hosts=all", "optim.lr=0.02"),
    *("lora.dropout=0.1", "rule.groups=2"),
)
BATCHES = [random_rows(8, seed=s) for s in range(3)]


def test_the_losses_of_one_copy_to_rounding(tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=4)
    losses, parameters = {}, {}
    for copies in (1, 2):
        config = config_for(checkpoint, *COMMON, f"rule.experts.copies={copies}")
        with local_cluster(checkpoint, config) as cluster:
            assert cluster.plan.copies == copies
            losses[copies] = steps(cluster, config, BATCHES, 3)
            parameters[copies] = cluster.parameters()
    assert losses[2] == pytest.approx(losses[1], rel=1e-5)
    assert parameters[1].keys() == parameters[2].keys()
    for name, value in parameters[1].items():
        torch.testing.assert_close(parameters[2][name], value, rtol=1e-2, atol=2e-3, msg=name)


def test_each_layer_is_updated_once_and_resumed_under_one_copy(tmp_path: Path) -> None:
    """Checkpoints have every tensor once; two copies go on bit for bit, one copy to rounding."""
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=4)
    two, one = (config_for(checkpoint, *COMMON, f"rule.experts.copies={copies}") for copies in (2, 1))
    shards = tmp_path / "shards"
    shards.mkdir()
    with local_cluster(checkpoint, two) as cluster:
        straight = steps(cluster, two, BATCHES, 4)
        final = cluster.parameters()
    with local_cluster(checkpoint, two) as cluster:
        first = steps(cluster, two, BATCHES, 4, stop=2)
        written = sum(shard.tensors for shard in cluster.save_shards(str(shards)))
        assert written == 3 * len(final)  # parameters and two moments
    for config, exactly in ((two, True), (one, False)):
        with local_cluster(checkpoint, config) as cluster:
            cluster.restore(str(shards), 2)
            losses = first + steps(cluster, config, BATCHES, 4, first=2)
            assert losses == straight if exactly else losses == pytest.approx(straight, rel=1e-5)
            if exactly:
                assert all((value == final[name]).all() for name, value in cluster.parameters().items())


def test_gradients_of_a_pass_add_up_over_the_copies(tmp_path: Path) -> None:
    """Before and after they are reduced."""
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3)
    found = {}
    for copies in (1, 2):
        config = config_for(checkpoint, *COMMON, f"rule.experts.copies={copies}")
        with local_cluster(checkpoint, config) as cluster:
            cluster.run_pass(one_pass(cluster, waves_of(BATCHES[0], config, cluster.plan)))
            before = cluster.gradients()
            norm = cluster.prepare(0)
            experts = {name: grad for name, grad in cluster.gradients().items() if "experts" in name}
            found[copies] = before, norm
        for name, grad in experts.items():
            torch.testing.assert_close(grad, before[name], rtol=1e-5, atol=1e-7, msg=name)
    for name, grad in found[1][0].items():
        torch.testing.assert_close(found[2][0][name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert found[2][1] == pytest.approx(found[1][1], rel=1e-5)


def test_an_update_whose_sending_breaks_off_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks what is committed must not be told that nothing was applied."""
    checkpoint = build_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=3)
    config = config_for(checkpoint, *COMMON, "rule.experts.copies=2")
    with local_cluster(checkpoint, config) as cluster:
        steps(cluster, config, BATCHES, 1)
        before = cluster.committed()
        cluster.run_pass(one_pass(cluster, waves_of(BATCHES[1], config, cluster.plan)))
        cluster.prepare(1)

        def breaks(*_: object) -> None:
            raise ConnectionError("closed by peer")

        monkeypatch.setattr(ExpertActor, "publish", breaks)
        monkeypatch.setattr(AttentionWorker, "_exchange_parameters", breaks)
        with pytest.raises(ConnectionError):
            cluster.commit(1, 0.01, 1.0)
        cluster.discard()
        assert cluster.committed() != before
