"""What an attention worker says when the memory of its GPU runs out. torch's error is raised by hand here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kt_ray.errors import UserError
from kt_ray.model.layer_loop import LayerLoop
from kt_ray.optim.masters import Masters
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, waves_of

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


def test_memory_that_runs_out_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build_checkpoint(tmp_path, "deepseek_v3")
    monkeypatch.setattr(Masters, "__init__", run_out)
    with pytest.raises(UserError, match="GPU memory ran out"), local_cluster(path, config_for(path)):
        pass
