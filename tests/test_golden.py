"""The demo's losses, bit for bit, keyed by ISA and torch version: a refactor must not move them.

    python -m tests.test_golden    writes the losses of this machine's ISAs into tests/golden/demo_losses.json

A changed formula, order of summation, data order or dropout stream shows here. Regenerate only for a
change that is meant to move them, and say so in the commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kt_ray.actors.local_cluster import LocalCluster
from kt_ray.actors.specs import actor_specs
from kt_ray.config.compose import compose
from kt_ray.native import available_isas
from kt_ray.runs.prepare import prepare
from kt_ray.train.trainer import Trainer

GOLDEN = Path(__file__).parent / "golden" / "demo_losses.json"
STEPS = 5
SETTINGS = (
    "model=demo_random",  # its weights never change
    "cluster=local",
    "rule=cpu_2workers_2sockets",
    "rule.worker_threads=1",
    "rule.experts.threads=1",
    "model.dtype=float32",
    "lora.dropout=0.1",
    f"trainer.max_steps={STEPS}",
    "trainer.eval_every=0",
)


def key(isa: str) -> str:
    """What losses depend on besides the code: torch and its BLAS choose kernels by capability and vendor."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{isa}, torch {torch.__version__}, {capability}, {vendor()}"


def vendor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("vendor_id"):
            return line.partition(":")[2].strip()
    return "unknown"


def losses(isa: str) -> list[str]:
    """Exact losses of the first steps, as hexadecimal floats."""
    prepared = prepare(compose([*SETTINGS, f"rule.experts.isa={isa}"]))
    specs = actor_specs(prepared.plan, prepared.config, prepared.model_dir)
    cluster = LocalCluster(prepared.plan, specs)
    try:
        cluster.start()
        return [loss.hex() for loss in Trainer(prepared.config, cluster, prepared.batches).run().losses]
    finally:
        cluster.shutdown()


def recorded() -> dict[str, Any]:
    return dict(json.loads(GOLDEN.read_text(encoding="utf-8")))


@pytest.mark.parametrize("isa", available_isas())
def test_demo_losses(isa: str) -> None:
    golden = recorded()
    observed = losses(isa)
    if key(isa) in golden:
        assert observed == golden[key(isa)]
    else:
        # Another torch or CPU: the same numbers to rounding, so that the test never passes for nothing.
        reference = next(iter(golden.values()))
        expected = [float.fromhex(x) for x in reference]
        assert [float.fromhex(x) for x in observed] == pytest.approx(expected, rel=2e-3)


if __name__ == "__main__":
    values = recorded() | {key(isa): losses(isa) for isa in available_isas()}
    GOLDEN.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
