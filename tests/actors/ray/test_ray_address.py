"""Which cluster is joined, and what a short run leaves in it."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from kt_ray.actors.ray.ray_address import (
    PORTS_TRIED,
    Running,
    address_file,
    dashboard_url,
    files_to_start,
    free_port,
    running_cluster,
)
from kt_ray.errors import UserError
from tests.helpers.ray_place import actors, head_node, ray_place, until


def test_a_ray_is_given_the_files_that_it_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 64 its raylet refused the driver, which ended with Ray's own words."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, limits: given.append(limits))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    files_to_start()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, resource.RLIM_INFINITY))
    files_to_start()
    assert given == [(4096, 4096), (65536, resource.RLIM_INFINITY)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(UserError, match=r"ulimit -Hn is 64;.*cluster=local"):
        files_to_start()
    assert len(given) == 2


@pytest.fixture
def dead() -> str:
    """An address that nobody listens on."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No RAY_ADDRESS, and a temp dir in which nobody ran `ray start`."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    assert address_file() == tmp_path / "ray" / "ray_current_cluster"
    return address_file()


def test_auto_without_a_cluster_and_local_start_one(
    monkeypatch: pytest.MonkeyPatch, listening: str, alone: Path
) -> None:
    assert running_cluster("auto") is None
    for address in ("local", "auto", ""):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert running_cluster("auto") is None
    monkeypatch.setenv("RAY_ADDRESS", listening)
    alone.write_text(listening)
    assert running_cluster("local") is None


def test_auto_takes_ray_address_before_ray_start(
    monkeypatch: pytest.MonkeyPatch, listening: str, alone: Path
) -> None:
    alone.write_text(f"{listening}\n")
    found = running_cluster("auto")
    assert found is not None and (found.address, found.source) == (listening, "ray start")
    monkeypatch.setenv("RAY_ADDRESS", listening)
    found = running_cluster("auto")
    assert found is not None and (found.address, found.source) == (listening, "RAY_ADDRESS")
    found = running_cluster(f"ray://{listening}")
    assert found is not None and (found.address, found.source) == (f"ray://{listening}", "cluster.address")


def test_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch, dead: str, alone: Path) -> None:
    """Left behind by a crash: one starts anew. Named by the user: an error, at once."""
    alone.write_text(dead)
    assert running_cluster("auto") is None
    with pytest.raises(UserError, match=rf"cluster\.address; found {dead};.*ray start --head"):
        running_cluster(dead)
    with pytest.raises(UserError, match="this is a dashboard's address: set cluster"):
        running_cluster(f"http://{dead}")
    monkeypatch.setenv("RAY_ADDRESS", dead)
    with pytest.raises(UserError, match=rf"at RAY_ADDRESS; found {dead}"):
        running_cluster("auto")
    # What `ray job submit` takes in this variable is no address of a cluster.
    monkeypatch.setenv("RAY_ADDRESS", f"http://{dead}")
    with pytest.raises(UserError, match="at RAY_ADDRESS; found http://"):
        running_cluster("auto")


def test_an_address_of_ipv6_is_joined(alone: Path) -> None:
    """As `ray start` writes it. A run that does not see it would start a cluster of its own."""
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    with contextlib.closing(server):
        address = f"[::1]:{server.getsockname()[1]}"
        alone.write_text(address)
        found = running_cluster("auto")
        assert found is not None and found.address == address
        assert running_cluster(address) == Running(address, "cluster.address")


def test_a_client_that_is_told_no_dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through ray:// of a cluster without one, where Ray's own question raises."""

    def no_worker() -> str:
        raise RaySystemError("Ray has not been started yet.")

    monkeypatch.setattr("ray._private.worker.get_dashboard_url", no_worker)
    assert dashboard_url(SimpleNamespace(dashboard_url="")) is None


def test_the_dashboard_takes_the_next_free_port(listening: str) -> None:
    taken = int(listening.rpartition(":")[2])
    assert taken < (free_port("127.0.0.1", taken) or 0) < taken + PORTS_TRIED
    assert free_port("127.0.0.1", 65536) is None  # nothing left to try
    with pytest.raises(UserError, match=r"cannot listen.*cluster\.dashboard_host"):
        free_port("203.0.113.1", 8265)  # of no host: reserved for documentation


@pytest.mark.ray
@pytest.mark.slow
def test_auto_joins_what_ray_start_made_and_a_short_run_leaves_its_figures(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "output"
    with ray_place() as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place.path))
        with head_node(place, tmp_path / "head") as dashboard:
            found = running_cluster("auto")
            assert found is not None and (found.address, found.source) == (place.address, "ray start")
            run = place.launch(*tiny_run, "run.name=short", "trainer.max_steps=3", log=log)
            assert run.wait(300) == 0, log.read_text()
            joined = (
                f"Ray: joined the running cluster at {place.address} (from ray start); dashboard {dashboard}"
            )
            assert joined in log.read_text()

            # Far less than Ray's ten seconds went by: the figures came with the driver's farewell.
            last = json.loads((_root(tiny_run) / "short" / "metrics.jsonl").read_text().splitlines()[-1])
            shown = re.compile(r'^ray_kt_ray_loss\{.*run="short".*\} (\S+)$', re.MULTILINE)
            loss = until(lambda: shown.search(place.metrics()), 15)  # a gauge is shown for 20 s
            assert float(loss.group(1)) == pytest.approx(last["loss"], rel=1e-9)
            assert last["step"] == 3

            # Its actors are gone, the cluster is not.
            def states() -> dict[str, str]:
                return {name: actor["state"] for name, actor in actors(dashboard, place.token).items()}

            until(lambda: states() == {"worker-0": "DEAD", "experts-0": "DEAD"}, 60)
            assert running_cluster("auto") == found
        assert place.left() == []
        assert address_file().exists() and running_cluster("auto") is None


def _root(arguments: list[str]) -> Path:
    return Path(next(a for a in arguments if a.startswith("run.root=")).partition("=")[2])
