"""A place for a real Ray cluster in a test: own directory, own token, own ports.

Every process of Ray inherits RAY_TMPDIR, so a place knows its own processes from those of other
clusters on the machine: only its own are counted, and only its own are ever stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

REPO = Path(__file__).resolve().parents[2]
T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """Where a cluster lives.

    Attributes:
        path: RAY_TMPDIR; short, because Ray's socket paths must be.
        token: what its API asks for; None = what this very process uses, a token or none.
    """

    path: Path
    token: str | None

    @property
    def env(self) -> dict[str, str]:
        """The environment for processes of this place, free of settings for other clusters."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        own = {"RAY_TMPDIR": str(self.path)}
        if self.token:
            own["RAY_AUTH_TOKEN_PATH"] = str(self.path / "token")
        else:
            # Ray turns tokens on for good in a process that once started a local cluster.
            own |= {"RAY_AUTH_MODE": "disabled"}
            own |= {key: value for key, value in os.environ.items() if key.startswith("RAY_AUTH_")}
        return {**clean, **own, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster that `head_node` started here."""
        return (self.path / "ray" / "ray_current_cluster").read_text().strip()

    def processes(self) -> list[psutil.Process]:
        """Everything that runs here, Ray's own processes and actors included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("RAY_TMPDIR") == str(self.path):
                    found.append(process)
        return found

    def commands(self) -> list[tuple[psutil.Process, str]]:
        """All of them with their command lines, without those that end meanwhile."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found.append((process, " ".join(process.cmdline()) or process.name()))
        return found

    def left(self, seconds: float = 60.0) -> list[str]:
        """What still runs after at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            until(lambda: not self.processes(), seconds, every=0.3)
        return [command for _, command in self.commands()]

    def metrics(self) -> str:
        """The Prometheus text of all endpoints in Ray's service discovery file ("" before there is one)."""
        file = self.path / "ray" / "prom_metrics_service_discovery.json"
        text = []
        with contextlib.suppress(OSError, json.JSONDecodeError):
            for group in json.loads(file.read_text()):
                text += [fetch(f"http://{target}/metrics")[1] for target in group["targets"]]
        return "\n".join(text)

    def launch(self, *arguments: str, log: Path) -> subprocess.Popen[bytes]:
        """`python launch.py ...` in this place, output into `log`."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [sys.executable, str(REPO / "launch.py"), *arguments],
                env=self.env,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.path,
                start_new_session=True,
            )

    @contextlib.contextmanager
    def serving(self, ready: str, log: Path, *arguments: str) -> Iterator[str]:
        """The URL of a server that says `ready`; it ends with Ctrl-C, if not before, and with exit code 0."""
        (port,) = free_ports(1)
        process = self.launch(*arguments, f"serve.port={port}", log=log)
        try:
            until(lambda: ready in log.read_text() or process.poll() is not None, 480)
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            assert process.wait(180) == 0, log.read_text()
            assert "the server has ended" in log.read_text() and "Traceback" not in log.read_text()
        finally:
            if process.poll() is None:
                process.kill()


@contextlib.contextmanager
def ray_place(*, own_token: bool = True) -> Iterator[Place]:
    """A fresh place; afterwards nothing of it is left, neither processes nor files."""
    path = Path(tempfile.mkdtemp(prefix="ktr", dir="/tmp"))
    place = Place(path, secrets.token_hex(16) if own_token else None)
    if place.token:
        (path / "token").write_text(place.token)
    try:
        yield place
    finally:
        killed = place.processes()
        for process in killed:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(killed, timeout=10)
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """A local Ray that this process joins, with two CPUs and four GPUs that only Ray believes in.

    A `RayCluster` takes the cluster that its process is connected to, and leaves it when it shuts down.
    """
    import ray

    with ray_place() as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", str(place.path))
        patch.setenv("RAY_worker_niceness", "0")
        for tries_left in (2, 1, 0):
            try:
                ray.init(
                    address="local",
                    namespace="tests",
                    include_dashboard=False,
                    num_cpus=2,
                    num_gpus=4,
                    log_to_driver=False,
                    logging_level="error",
                )
                break
            except Exception:  # a node that a busy machine starts too slowly, see `RayConnection.start_local`
                ray.shutdown()
                if not tries_left:
                    raise
        try:
            yield
        finally:
            ray.shutdown()


@contextlib.contextmanager
def head_node(place: Place, log: Path, cpus: int = 4, *, alert: bool = False) -> Iterator[str]:
    """`ray start --head` in a place; yields its dashboard's URL.

    alert: a node that is gone counts as dead after two seconds, not twenty.
    """
    gcs, board, client = free_ports(3)
    how = [f"--port={gcs}", f"--dashboard-port={board}", f"--ray-client-server-port={client}"]
    if alert:
        checks = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
        how.append(f"--system-config={json.dumps({**checks, 'health_check_failure_threshold': 4})}")
    with _node(place, log, "--head", f"--num-cpus={cpus}", "--disable-usage-stats", *how):
        yield f"http://127.0.0.1:{board}"


@contextlib.contextmanager
def second_node(place: Place, log: Path, cpus: int = 4) -> Iterator[None]:
    """`ray start --address` in a place: one more node of its cluster, on the same machine."""
    with _node(place, log, f"--address={place.address}", f"--num-cpus={cpus}"):
        yield


@contextlib.contextmanager
def _node(place: Place, log: Path, *how: str) -> Iterator[None]:
    (agent,) = free_ports(1)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *how]
    command += [f"--dashboard-agent-listen-port={agent}"]
    with log.open("wb") as out:
        node = subprocess.Popen(
            command, env=place.env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: "Ray runtime started" in log.read_text() or node.poll() is not None, 240)
        assert node.poll() is None, log.read_text()
        yield
    finally:
        node.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(20)


def gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has taken note."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], T], seconds: float, every: float = 0.5) -> T:
    """The first true value of `condition`. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(every)


def fetch(url: str, token: str | None = None) -> tuple[int, str]:
    """(status, body) of a GET; (0, reason) where nobody answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def actors(dashboard: str, token: str) -> dict[str, dict[str, Any]]:
    """Named actors by name, as the dashboard's state API lists them."""
    status, body = fetch(f"{dashboard}/api/v0/actors?detail=true", token)
    assert status == 200, body
    return {a["name"]: a for a in json.loads(body)["data"]["result"]["result"] if a["name"]}


def shared_memory(pid: int) -> set[str]:
    """Actors whose shared memory a process has open: its own ("worker-0") and that of peers it has read."""
    names = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.add(os.readlink(link))
    return {m.group(1) for n in names if (m := re.match(r"/memfd:kt_ray-(\w+-\d+)-", n))}


def arena_bytes(pid: int, actor: str) -> int:
    """Shared memory that an actor's process has made for its own messages."""
    sizes = {}  # by file: mmap keeps a descriptor of its own
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(f"/memfd:kt_ray-{actor}-"):
                sizes[link.stat().st_ino] = link.stat().st_size
    return sum(sizes.values())


_GIVEN: deque[int] = deque(maxlen=64)  # of the 187 ports that a worker has


def free_ports(count: int) -> list[int]:
    """Distinct free ports outside the ranges that Ray and the kernel hand out themselves.

    Each worker of pytest-xdist has ports of its own: what it is told is free may be taken seconds later. So
    ports that were given lately are not given again.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(20_000 + worker % 64, 32_000, 64)
        with contextlib.closing(socket.socket()) as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.append(port)
                ports.append(port)
    return ports
