"""mode=serve in a cluster that ends without it, and in one that it outlives."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from openai import OpenAI

from tests.helpers.ray_place import fetch, free_ports, head_node, ray_place, until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.exhaustive
def test_a_server_outlives_its_ray(tmp_path: Path) -> None:
    """trainer.restarts: with Ray's head gone, another driver serves on the same port."""
    (port,) = free_ports(1)
    log = tmp_path / "log.txt"
    settings = ("cluster.address=local", "cluster.dashboard=false", "trainer.restarts=3")
    with ray_place() as place:
        process = place.launch("mode=serve", f"serve.port={port}", *settings, log=log)
        address = f"http://127.0.0.1:{port}/health"
        until(lambda: fetch(address)[0] == 200 or process.poll() is not None, 240)
        heads = [p for p, command in place.commands() if "gcs_server" in command]
        assert len(heads) == 1, log.read_text()
        heads[0].kill()
        # Not by the port alone: what is left of the first Ray may answer there for a moment.
        until(lambda: log.read_text().count("serving demo") == 2 or process.poll() is not None, 240)
        assert process.poll() is None and "restart 1 of 3" in log.read_text(), log.read_text()
        assert fetch(address)[0] == 200, log.read_text()
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.completions.create(model="demo", prompt="a", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens <= 2
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        until(lambda: place.left() == [], 30)


@pytest.mark.exhaustive
def test_a_server_on_a_running_cluster_ends_without_it(tmp_path: Path) -> None:
    (port, other) = free_ports(2)
    log, second = tmp_path / "log.txt", tmp_path / "second.txt"
    common = ("mode=serve", "cluster.address=auto", "model.dtype=float32")
    with ray_place() as place, head_node(place, tmp_path / "head.txt"):
        process = place.launch(*common, f"serve.port={port}", log=log)
        until(lambda: "serving demo" in log.read_text() or process.poll() is not None, 240)
        assert "joined the running cluster" in log.read_text(), log.read_text()
        with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.completions.create(model="demo", prompt="a", max_tokens=2)
        assert answer.usage is not None and answer.usage.completion_tokens <= 2

        late = place.launch(*common, f"serve.port={other}", "cluster.namespace=other", log=second)
        assert late.wait(120) == 2 and "Ray Serve runs in this cluster already" in second.read_text()
        assert fetch(f"http://127.0.0.1:{port}/health")[0] == 200  # it took nothing with it

        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0 and "the server has ended" in log.read_text(), log.read_text()
        assert fetch(f"http://127.0.0.1:{port}/health")[0] == 0

        def names() -> list[str]:
            return [command for p, command in place.commands() if p.pid != os.getpid()]

        until(lambda: not [n for n in names() if "ray::RayActor" in n or "ray::Serve" in n], 30)
        assert any("gcs_server" in name for name in names())
