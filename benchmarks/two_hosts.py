"""Two Ray nodes on one machine whose only way to each other is a network of their own.

The second node runs in a network namespace behind a veth pair, whose rate `tc` limits in both directions.
Needs root, iproute2 and a kernel with namespaces, veth and tbf.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SUBNETS = "10.213"  # each pair of hosts takes a /24 of these that no link has


@dataclass(frozen=True)
class TwoHosts:
    """`here` and `there`: addresses of the two ends. device: this end's interface. space: the namespace."""

    here: str
    there: str
    device: str
    space: str

    def limit(self, gbit: float | None) -> None:
        """Limit the rate of each direction to `gbit` Gbit/s; None = as fast as the kernel copies."""
        for prefix, device in ((("ip", "netns", "exec", self.space), "there0"), ((), self.device)):
            # Without a limit there is nothing to delete the first time.
            command = [*prefix, "tc", "qdisc", "del", "dev", device, "root"]
            subprocess.run(command, capture_output=True, check=False)
            if gbit is not None:
                rate = round(gbit * 1e9)
                # A quarter of a millisecond's worth: a larger one lets what follows a pause pass unlimited.
                burst = max(1 << 14, rate // 8 // 4000)
                command = [*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{rate}bit"]
                _run([*command, "burst", str(burst), "latency", "100ms"])

    def bytes(self) -> tuple[int, int]:
        """Bytes that went there and came back so far."""
        folder = Path("/sys/class/net") / self.device / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())

    def socket_gbit(self, seconds: float = 1.0) -> float:
        """What one plain TCP connection carries from there to here, in Gbit/s."""
        with socket.create_server((self.here, 0)) as server:
            code = (
                "import socket,sys\n"
                f"s=socket.create_connection(('{self.here}',{server.getsockname()[1]}))\n"
                "b=bytes(1<<20)\n"
                "try:\n"
                "  while True: s.sendall(b)\n"
                "except OSError: pass\n"
            )
            command = ["ip", "netns", "exec", self.space, sys.executable, "-c", code]
            with subprocess.Popen(command) as sender:
                server.settimeout(30)  # accept()'s: a connection between two hosts here takes microseconds
                connection, _ = server.accept()
                with connection:
                    buffer, got = bytearray(1 << 20), 0
                    warm = time.monotonic() + 0.3
                    while time.monotonic() < warm:
                        connection.recv_into(buffer)
                    start = time.monotonic()
                    while time.monotonic() < start + seconds:
                        got += connection.recv_into(buffer)
                    spent = time.monotonic() - start
                sender.wait(30)
        return 8 * got / spent / 1e9


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """The namespace and its link; both are gone afterwards, or when the next one starts (a killed run)."""
    _remove_left_over()
    space = f"ktr{os.getpid()}"
    subnet = _free_subnet()
    hosts = TwoHosts(f"{subnet}.1", f"{subnet}.2", f"k{os.getpid()}", space)
    _run(["ip", "netns", "add", space])
    try:
        pair = ["ip", "link", "add", hosts.device, "type", "veth"]
        _run([*pair, "peer", "name", "there0", "netns", space])
        _run(["ip", "addr", "add", f"{hosts.here}/24", "dev", hosts.device])
        _run(["ip", "link", "set", hosts.device, "up"])
        for command in (
            ["addr", "add", f"{hosts.there}/24", "dev", "there0"],
            ["link", "set", "there0", "up"],
            ["link", "set", "lo", "up"],
        ):
            _run(["ip", "-n", space, *command])
        yield hosts
    finally:
        _run(["ip", "netns", "del", space])  # takes the veth pair with it


def _remove_left_over() -> None:
    """Namespaces of runs that were killed: their links would share an address with a new one's."""
    spaces = Path("/run/netns")
    for space in spaces.iterdir() if spaces.is_dir() else ():
        pid = space.name.removeprefix("ktr")
        if space.name.startswith("ktr") and pid.isdigit() and not Path("/proc", pid).exists():
            # Another run may do the same just now.
            subprocess.run(["ip", "netns", "del", space.name], capture_output=True, check=False)


def _free_subnet() -> str:
    """The first three numbers of a /24 that no link of this machine has."""
    taken = _run(["ip", "-o", "-4", "addr", "show"])
    start = os.getpid() % 256  # two runs that look at once choose differently
    for number in (*range(start, 256), *range(start)):
        if f" {_SUBNETS}.{number}." not in taken:
            return f"{_SUBNETS}.{number}"
    raise RuntimeError(f"every network of {_SUBNETS}.0.0/16 is taken; see `ip addr`")


@contextlib.contextmanager
def two_ray_nodes(hosts: TwoHosts, cpus: tuple[int, int]) -> Iterator[str]:
    """A Ray node at each end; yields the cluster's address. RAY_TMPDIR is set for this process meanwhile."""
    folder = Path(tempfile.mkdtemp(prefix="ktn", dir="/tmp"))
    before = {key: os.environ.get(key) for key in ("RAY_TMPDIR", "RAY_AUTH_MODE")}
    os.environ.update(RAY_TMPDIR=str(folder), RAY_AUTH_MODE="disabled")
    with socket.create_server((hosts.here, 0)) as first, socket.create_server((hosts.here, 0)) as second:
        port, client = first.getsockname()[1], second.getsockname()[1]
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    head = [*start, "--head", f"--port={port}", f"--node-ip-address={hosts.here}", f"--num-cpus={cpus[0]}"]
    head += [
        "--include-dashboard=false",
        "--object-store-memory=500000000",
        f"--ray-client-server-port={client}",
    ]
    other = ["ip", "netns", "exec", hosts.space, *start, f"--address={hosts.here}:{port}"]
    other += [f"--node-ip-address={hosts.there}", f"--num-cpus={cpus[1]}", "--object-store-memory=500000000"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate((head, other)):
            log = folder / f"node{number}.log"
            with log.open("wb") as out:
                nodes.append(
                    subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
                )
            _await(nodes[-1], log)
        yield f"{hosts.here}:{port}"
    finally:
        for node in reversed(nodes):
            node.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGKILL)
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})
        shutil.rmtree(folder, ignore_errors=True)


def _await(node: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 180
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if node.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"a Ray node did not start:\n{log.read_text(errors='replace')}")
        threading.Event().wait(0.3)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
