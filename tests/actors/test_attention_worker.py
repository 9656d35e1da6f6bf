"""An attention worker and the memory of its GPU: what it says when that runs out, and rule.gpu_memory.

torch's error is raised by hand here, and CUDA's functions are stand-ins.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kt_ray.actors import attention_worker
from kt_ray.actors.attention_worker import AttentionWorker
from kt_ray.config.schema import OptimConfig
from kt_ray.errors import UserError
from kt_ray.experts.device_lane import DeviceLane
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.model.stage_spec import StageSpec
from kt_ray.optim.masters import Masters
from kt_ray.placement.memory import GPU_RUNTIME
from kt_ray.placement.plan import make_plan
from kt_ray.placement.plan_types import Budget
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, waves_of
from tests.placement.configs import make_config, make_hardware, small_dims

SAID = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.55 GiB of which "
    "1.10 GiB is free. If reserved but unallocated memory is large try setting something"
)


def run_out(*_: object) -> None:
    raise torch.OutOfMemoryError(SAID)


def test_memory_that_runs_out_in_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    config = config_for(path, "rule=cpu_2workers_2sockets")
    with local_cluster(path, config) as cluster:
        monkeypatch.setattr(LayerLoop, "forward", run_out)
        with pytest.raises(UserError) as caught:
            cluster.run_pass(one_pass(cluster, waves_of(random_rows(8, seed=0), config, cluster.plan)))
    line = caught.value.line()
    assert (
        line.startswith("GPU memory ran out; at attention worker 0 on cpu: pass ")
        and "forward, layer 0" in line
    )
    assert "which 1.10 GiB is free" in line and "If reserved" not in line and "trainer.loss_chunk" in line


@pytest.mark.parametrize(("lane_of", "who"), [("actors", "expert actor"), ("workers", "attention worker")])
def test_memory_that_runs_out_in_a_lane(
    lane_of: str, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    stream = ("rule.experts.stream=0.5", "rule.experts.lane_device=cpu", f"rule.experts.stream_to={lane_of}")
    config = config_for(path, "rule=cpu_2workers_2sockets", *stream)
    with local_cluster(path, config) as cluster:
        monkeypatch.setattr(DeviceLane, "_forward", run_out)
        with pytest.raises(
            UserError, match=rf"GPU memory ran out; at {who} \d on .*rule\.experts\.stream=off"
        ):
            cluster.run_pass(one_pass(cluster, waves_of(random_rows(8, seed=0), config, cluster.plan)))


def test_memory_that_runs_out_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    monkeypatch.setattr(Masters, "__init__", run_out)
    with pytest.raises(UserError, match="GPU memory ran out"), local_cluster(path, config_for(path)):
        pass


@pytest.mark.parametrize("rule", [{}, {"experts": {"stream": 0.5}}])
def test_a_cap_is_planned_for_and_kept(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan leaves 5 % of it free; torch gets what CUDA's own part leaves, until the worker ends."""
    dims, hardware = small_dims(), make_hardware(gpus=1)
    plan = make_plan(dims, make_config(rule={"gpu_memory": 16.0, **rule}), hardware)
    (budget,) = [b for b in plan.budgets if b.device == "cuda:0"]
    assert budget.capacity == int(16 * 2**30 * 0.95)
    set_to: list[tuple[float, str]] = []
    whole = SimpleNamespace(total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: set_to.append((part, device))
    )
    spec = StageSpec("", plan.workers[0].layers, dims.num_layers, device="cuda:0")
    worker = AttentionWorker(plan, 0, spec, OptimConfig(), 1.0)
    worker._keep_to_cap()
    ((part, device),) = set_to
    contexts = budget.items["runtime"]  # the lane's process has one, too
    assert device == "cuda:0" and part * 24 * 2**30 == pytest.approx(16 * 2**30 - contexts)
    assert contexts == (2 if rule else 1) * GPU_RUNTIME
    worker.close()
    assert set_to[-1] == (1.0, "cuda:0")
    plan = make_plan(dims, make_config(rule=rule), hardware)
    AttentionWorker(plan, 0, spec, OptimConfig(), 1.0)._keep_to_cap()
    assert len(set_to) == 2
    larger = make_plan(dims, make_config(rule={"gpu_memory": 30.0, **rule}), hardware)
    assert larger.budgets == plan.budgets


@pytest.mark.parametrize(
    ("items", "gpus", "gives"),
    [
        ({"experts": 84}, 0, 0),
        ({"experts": 86}, 0, 1),
        ({"experts": 60, "kept activations": 20}, 0, 1),  # freed, a part of it may stay in the process
        ({"experts": 60, "kept activations": 20}, 1, 0),  # whose device has them
    ],
)
def test_freed_memory_is_given_back_where_it_would_fill_a_socket(
    items: dict[str, int], gpus: int, gives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = small_dims()
    plan = make_plan(dims, make_config(), make_hardware(gpus=gpus))
    plan = replace(plan, budgets=(Budget("socket 0", items, 100),))
    given: list[bool] = []
    monkeypatch.setattr(attention_worker, "give_back_freed_memory", lambda: given.append(True))
    monkeypatch.setattr(attention_worker, "bound_compiled_products", lambda tight: None)
    spec = StageSpec("", plan.workers[0].layers, dims.num_layers)
    AttentionWorker(plan, 0, spec, OptimConfig(), 1.0)
    assert len(given) == gives


def test_a_cap_without_a_gpu_is_said_to_change_nothing() -> None:
    plan = make_plan(small_dims(), make_config(rule={"gpu_memory": 16.0}), make_hardware())
    assert "rule.gpu_memory=16.0 changes nothing: no GPU is used" in plan.notes
