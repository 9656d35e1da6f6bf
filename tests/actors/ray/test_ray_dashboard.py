"""A run under a real local Ray with its real dashboard: our figures, our actors, the token, a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from kt_ray.errors import STOPPED
from kt_ray.tracking.metrics import METRICS
from tests.helpers.ray_place import actors, fetch, free_ports, ray_place, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SAMPLE = re.compile(r"^ray_(kt_ray_\w+)\{(.*)\} (\S+)$", re.MULTILINE)


def exported(text: str) -> dict[tuple[str, str], float]:
    """(metric, value of its own tag or "") -> value, out of Prometheus text, for the run "watched"."""
    own_tag = {spec.name: spec.tag for spec in METRICS}
    values = {}
    for name, labels, value in SAMPLE.findall(text):
        tags = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert tags["run"] == "watched"
        tag = own_tag[name]
        values[name, tags[tag] if tag else ""] = float(value)
    return values


def test_a_run_shows_its_figures_and_its_actors_and_ends_clean(tiny_run: list[str], tmp_path: Path) -> None:
    log = tmp_path / "output"
    root = Path(next(a for a in tiny_run if a.startswith("run.root=")).partition("=")[2])
    with ray_place() as place:
        (port,) = free_ports(1)
        run = place.launch(
            *tiny_run,
            "run.name=watched",
            "cluster.address=local",
            f"cluster.dashboard_port={port}",
            "trainer.max_steps=100000",
            log=log,
        )
        dashboard = f"http://127.0.0.1:{port}"

        def figures() -> dict[tuple[str, str], float]:
            assert run.poll() is None, log.read_text()
            return exported(place.metrics())

        first = until(figures, 240)

        # Without the token nothing but the page itself; with it the actors by the names we gave.
        assert fetch(f"{dashboard}/api/v0/actors")[0] == 401
        assert fetch(f"{dashboard}/api/v0/actors", "no" + place.token)[0] == 403
        named = actors(dashboard, place.token)
        assert set(named) == {"worker-0", "experts-0"}
        assert {a["state"] for a in named.values()} == {"ALIVE"}
        assert {a["ray_namespace"] for a in named.values()} == {"kt_ray-watched"}
        assert {n: a["repr_name"] for n, a in named.items()} == {
            "worker-0": "layers 0-2",
            "experts-0": "8 experts per layer",
        }
        env = json.loads((root / "watched" / "env.json").read_text())
        assert {a["actor"]: a["pid"] for a in env["actors"]} == {n: a["pid"] for n, a in named.items()}
        assert env["dashboard"] == dashboard

        # A later look has later figures: gauges follow the run.
        second = until(
            lambda: (f := figures()) and f["kt_ray_step", ""] > first["kt_ray_step", ""] and f, 120
        )

        os.killpg(run.pid, signal.SIGINT)  # as a terminal's Ctrl-C, which reaches all processes of the group
        assert run.wait(120) == STOPPED
        assert place.left() == []
    output = log.read_text()
    assert "SIGINT: stopped after step" in output and "Traceback" not in output, output
    token = place.path / "token"
    assert f"dashboard {dashboard} (asks for a token: 'ray get-auth-token' prints it, from {token})" in output

    records = [json.loads(line) for line in (root / "watched" / "metrics.jsonl").read_text().splitlines()]
    keys = {
        "kt_ray_loss": "loss",
        "kt_ray_grad_norm": "grad_norm",
        "kt_ray_tokens_per_second": "tokens_per_s",
    }
    totals = [0]
    for record in records:
        totals.append(totals[-1] + record["tokens"])
    for seen in (first, second):
        # An export may fall between two gauges of a step, so neighbours of the step count as well.
        step = int(seen["kt_ray_step", ""])
        near = records[max(0, step - 2) : step + 1]
        for name, key in keys.items():
            assert any(seen[name, ""] == pytest.approx(r[key], rel=1e-9) for r in near), (name, seen)
        assert seen["kt_ray_tokens_total", ""] in totals[max(0, step - 1) : step + 2]
        assert seen["kt_ray_loss", ""] > 0
        assert seen["kt_ray_seconds", "experts"] < seen["kt_ray_seconds", "total"]
        assert all(seen["kt_ray_host_rss_bytes", kind] > 2**26 for kind in ("driver", "worker", "expert"))
        # Everything is there but what this run does not have: evaluations and GPUs.
        absent = {f"kt_ray_{name}" for name in ("eval_loss", "eval_reward", "policy", "gpu_memory_bytes")}
        absent |= {"kt_ray_recoveries", "kt_ray_seconds_lost", "kt_ray_skipped_total"}
        assert {name for name, _ in seen} == {spec.name for spec in METRICS} - absent
