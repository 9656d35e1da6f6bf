"""What goes wrong in the middle of a step: the message, and that the next step is as if nothing had been."""

from pathlib import Path

import pytest
import torch

from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.actors.local_cluster import LocalHandle
from kt_ray.errors import UserError
from kt_ray.model.layer_loop import LayerLoop
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, steps, waves_of

ROWS = random_rows(8)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.self_attn.o_proj.lora_B.weight", float("nan")),
        ("model.layers.1.mlp.experts.2.down_proj.lora_B.weight", float("nan")),
        ("model.layers.0.mlp.down_proj.lora_B.weight", 3e38),
    ],
)
@pytest.mark.parametrize("rule", ["cpu_1worker_1socket", "cpu_2workers_2sockets"])
def test_a_non_finite_loss_stops_before_the_update(
    tmp_path: Path, name: str, value: float, rule: str
) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, f"rule={rule}", "optim.lr=0.02")
    with local_cluster(path, config) as cluster:
        before = cluster.parameters()
        broken = {name: torch.full_like(before[name], value)}
        cluster.set_parameters(broken)
        with pytest.raises(
            UserError,
            match=r"loss of step 1 is (nan|inf); the step was not applied; .*group 0.*compare the checkpoint",
        ):
            steps(cluster, config, [ROWS], 1)
        after = cluster.parameters()
        assert all(torch.equal(after[n], before[n]) for n in before if n != name)


def test_an_error_in_the_middle_of_a_pass_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule=cpu_2workers_2sockets", "optim.lr=0.02")
    with local_cluster(path, config) as cluster:
        waves = waves_of(ROWS, config, cluster.plan)
        expected = cluster.run_pass(one_pass(cluster, waves)).loss
        gradients = cluster.gradients()
        cluster.discard()
        handle = cluster.workers[1]
        assert isinstance(handle, LocalHandle) and isinstance(handle.actor, AttentionWorker)
        model, recompute = handle.actor.stage.model, LayerLoop.recompute
        with monkeypatch.context() as patch:

            def fail(loop: LayerLoop, layer: int, group: int) -> None:
                if loop.model is model:
                    raise RuntimeError(f"layer {layer} broke")
                recompute(loop, layer, group)

            patch.setattr(LayerLoop, "recompute", fail)
            with pytest.raises(RuntimeError, match="broke"):
                cluster.run_pass(one_pass(cluster, waves, number=2))
        cluster.discard()
        assert cluster.run_pass(one_pass(cluster, waves, number=3)).loss == expected
        again = cluster.gradients()
        assert all(torch.equal(again[name], gradients[name]) for name in gradients)


def test_commit_may_be_repeated(tmp_path: Path) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule=cpu_2workers_2sockets")
    with local_cluster(path, config) as cluster:
        cluster.run_pass(one_pass(cluster, waves_of(ROWS, config, cluster.plan)))
        cluster.prepare(0)
        cluster.commit(0, 0.1, 1.0)
        once = cluster.parameters()
        cluster.commit(0, 0.1, 1.0)
        twice = cluster.parameters()
    assert all(torch.equal(once[name], twice[name]) for name in once)
