"""rule.experts.answers=bfloat16: what rounding y and dx costs, relative to the norm of what is rounded.

`pytest -s` prints the figures that docs/numerics.md quotes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kt_ray.actors.local_cluster import LocalHandle
from kt_ray.transport.messages import Message
from tests.helpers.exhaustive import exhaustive
from tests.helpers.hf_reference import build_checkpoint, random_rows
from tests.helpers.runs import config_for, local_cluster, one_pass, waves_of

ROWS = random_rows(16, seed=1)
UNIT = 2.0**-8  # distance of bfloat16 numbers, relative to the lower of them


def a_pass(path: Path, *overrides: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients by name, and worker 0's answers by tag and name."""
    config = config_for(path, "rule=cpu_1worker_1socket", "rule.experts.sockets=2", *overrides)
    answers: dict[str, Tensor] = {}
    with local_cluster(path, config) as cluster:
        # LoRA's B is zero at first, and so are most gradients.
        random = {
            name: 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            for name, value in cluster.parameters().items()
            if "lora_B" in name
        }
        cluster.set_parameters(random)
        worker = next(h for h in cluster.workers if isinstance(h, LocalHandle)).actor
        put = worker.mailbox.put

        def note(message: Message) -> None:
            for name, tensor in message.tensors.items():
                answers["/".join(map(str, (*message.tag, name)))] = tensor.clone()
            put(message)

        worker.mailbox.put = note  # type: ignore[method-assign]
        report = cluster.run_pass(one_pass(cluster, waves_of(ROWS, config, cluster.plan)))
        return report.loss, cluster.gradients(), answers


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def gradient_distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return distance(*(torch.cat([g[name].flatten().float() for name in exact]) for g in (found, exact)))


@pytest.mark.parametrize("family", ["deepseek_v3", exhaustive("mixtral")])
def test_what_rounded_answers_cost(tmp_path: Path, family: str) -> None:
    path = build_checkpoint(tmp_path, family)
    exact: dict[str, dict[str, Tensor]] = {}
    for dtype in ("float32", "bfloat16"):
        loss, exact[dtype], answers = a_pass(path, f"model.dtype={dtype}")
        found, gradients, rounded = a_pass(path, f"model.dtype={dtype}", "rule.experts.answers=bfloat16")
        kinds = {name.rsplit("/", 1)[1]: tensor.dtype for name, tensor in rounded.items()}
        assert kinds == {"y": torch.bfloat16, "dx": torch.bfloat16, "dw": torch.float32}
        # The first layer with experts got the same tokens in both runs: its y differs by the rounding alone.
        first = next(name for name in answers if name.endswith("/y"))
        assert torch.equal(rounded[first], answers[first].to(torch.bfloat16))
        rounding = distance(rounded[first], answers[first])
        assert 0 < rounding < UNIT / 2
        drift = gradient_distance(gradients, exact[dtype])
        print(f"{family} {dtype}: y {100 * rounding:.2f} %, gradients {100 * drift:.2f} %")
        assert 0 < drift < 0.05
        assert found == pytest.approx(loss, rel=1e-3)
    # A yardstick: what computing attention in bfloat16 changes.
    yardstick = gradient_distance(exact["bfloat16"], exact["float32"])
    print(f"{family}: model.dtype=bfloat16 {100 * yardstick:.2f} %")
    assert drift < yardstick
