"""What oneDNN keeps of compiled products: bounded before a first one, while a user's setting stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kt_ray.experts.process_memory import bound_compiled_products

OURS = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in OURS:
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)


def settings() -> list[str | None]:
    return [os.environ.get(name) for name in OURS]


def test_only_plans_short_of_memory_pay_with_time() -> None:
    bound_compiled_products(tight=False)
    assert settings() == ["64", None, None]
    bound_compiled_products(tight=True)
    assert settings() == ["64", "128", None]


@pytest.mark.parametrize("name", OURS)
def test_a_setting_of_the_users_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "7")
    bound_compiled_products(tight=True)
    assert os.environ[name] == "7"
    if name.startswith("DNNL"):
        assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ


MEASURE = """
import sys
import torch
from kt_ray.experts.process_memory import bound_compiled_products

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

torch.set_num_threads(1)
torch.randn(4, 4) @ torch.randn(4, 4)  # a float32 product comes first in an actor, too
if sys.argv[1] == "bounded":
    bound_compiled_products(tight=True)
weight, before = torch.randn(128, 128).bfloat16(), anonymous()
for length in range(8, 408):
    torch.nn.functional.linear(torch.randn(length, 128).bfloat16(), weight)
print(anonymous() - before)
"""


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this CPU"
)
def test_it_is_in_time_after_torch_was_loaded() -> None:
    """400 lengths of row: all are kept without the bound, 128 with it (and 64 in the second cache)."""

    def grown(how: str) -> int:
        command = [sys.executable, "-c", MEASURE, how]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert grown("bounded") < 0.7 * grown("as it comes")
