"""Two hosts of one machine: a run that was killed, and one that goes on, do not stand in the way."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
WAITS = """
import time, two_hosts
with two_hosts.two_hosts() as hosts:
    print(hosts.space, hosts.here, flush=True)
    time.sleep(60)
"""


@pytest.mark.bench
def test_a_killed_run_leaves_nothing_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and ip for a network of its own")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    two_hosts = importlib.import_module("two_hosts")
    with subprocess.Popen(
        [sys.executable, "-c", WAITS], cwd=BENCHMARKS, stdout=subprocess.PIPE, text=True
    ) as other:
        try:
            space, here = other.stdout.readline().split()
            with two_hosts.two_hosts() as hosts:
                assert hosts.here != here and Path("/run/netns", space).exists()
                assert hosts.socket_gbit(0.1) > 0
        finally:
            other.send_signal(signal.SIGKILL)
    assert Path("/run/netns", space).exists()
    with two_hosts.two_hosts() as hosts:
        assert not Path("/run/netns", space).exists()
        assert hosts.socket_gbit(0.1) > 0
    assert not Path("/run/netns", hosts.space).exists()
