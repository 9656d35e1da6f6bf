"""Which Ray cluster `cluster.address` means on this host, and where its dashboard is.

Nothing here loads Ray when it is imported, so that doctor can ask, too. Who may be believed is in ray_access.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kt_ray.actors.ray.ray_access import distrust, token_file
from kt_ray.disk import raise_open_files
from kt_ray.errors import UserError

logger = logging.getLogger(__name__)

PORTS_TRIED = 50
LEAST_FILES = 128  # open in one process: with 64 Ray's raylet refuses the driver, which dies by it


def files_to_start() -> None:
    """Before a local cluster is started: its processes may open as many files as this one may be given.

    Raises:
        UserError: fewer than Ray needs.
    """
    if (most := raise_open_files()) < LEAST_FILES:
        raise UserError(
            "Ray cannot be started: its processes may open too few files",
            observed=f"ulimit -Hn is {most}",
            required=f"at least {LEAST_FILES}, and thousands for many actors",
            remedy="raise nofile in /etc/security/limits.conf, or of the container, or set cluster=local",
        )


@dataclass(frozen=True)
class Running:
    """A cluster that answers."""

    address: str  # HOST:PORT, or ray://HOST:PORT
    source: str  # who named it: "cluster.address", "RAY_ADDRESS", or "ray start"


def running_cluster(address: str) -> Running | None:
    """The cluster to join, or None when a local one is to be started.

    "auto" is RAY_ADDRESS (which `ray job submit` sets for its jobs), else the cluster of the last
    `ray start` on this host if it still answers. It is not the private cluster of another run,
    which Ray's own "auto" would join: that one ends with its run.

    Raises:
        UserError: a cluster named by the user does not answer. Ray itself would try for minutes.
    """
    source = "cluster.address"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "")
        source = "RAY_ADDRESS"
    if address == "local":
        return None
    if address not in ("", "auto"):
        if not answers(address):
            remedy = "start it with 'ray start --head', or set cluster.address=local"
            if address.startswith("http"):  # what `ray job submit` takes
                remedy = (
                    "this is a dashboard's address: set cluster.address=HOST:PORT, with the port of "
                    "'ray start --head' (6379), or cluster.address=local"
                )
            raise UserError(
                "no Ray cluster answers",
                where=source,
                observed=address,
                required="the HOST:PORT of a running cluster",
                remedy=remedy,
            )
        return Running(address, source)
    started = started_here(address_file())
    if isinstance(started, str):
        logger.warning("%s; set cluster.address=HOST:PORT to join a cluster all the same", started)
        return None
    return started


def started_here(file: Path) -> Running | str | None:
    """The cluster of the last `ray start` on this host; or why what the file says is not believed.

    None = there is none, or it does not answer any more.
    """
    try:
        address = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
    if not address or not answers(address):
        return None
    doubt = distrust(file, address)
    return doubt or Running(address, "ray start")


def ray_directory() -> Path:
    """Ray's own: sessions, their logs, the running cluster's address."""
    return Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray"


def address_file() -> Path:
    """Where `ray start` leaves the address of its cluster (a crash leaves it behind)."""
    return ray_directory() / "ray_current_cluster"


def answers(address: str, timeout: float = 5.0) -> bool:
    """Whether something listens at HOST:PORT or ray://HOST:PORT; a HOST of IPv6 is in brackets."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout=timeout):
            return True
    except (OSError, ValueError):
        return False


def free_port(host: str, first: int) -> int | None:
    """The first of PORTS_TRIED ports from `first` on that nobody listens on at `host`; None = all are taken.

    Ray looks for one itself only as long as no port is named; a named one that is taken is an error.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, min(first + PORTS_TRIED, 65536)):
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    continue
                raise UserError(
                    f"the dashboard cannot listen on {host}:{port}",
                    where="cluster.dashboard_host, cluster.dashboard_port",
                    observed=error.strerror,
                    remedy="set them to an address of this host and a free port, or cluster.dashboard=false",
                ) from error
            return port
    return None


def dashboard_hint(url: str | None) -> str:
    """What the line about the cluster ends in."""
    return ", without a dashboard" if url is None else f"; dashboard {url}{_token_hint()}"


def _token_hint() -> str:
    """How to answer the dashboard. `ray.init` sets RAY_AUTH_MODE when it turns tokens on."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return " (asks for a token: the value of RAY_AUTH_TOKEN)"
    return f" (asks for a token: 'ray get-auth-token' prints it, from {token_file()})"


def dashboard_url(context: Any = None) -> str | None:
    """Of the cluster that this process is connected to; None = it has none. context: what ray.init gave."""
    url = getattr(context, "dashboard_url", None)
    if not url:
        from ray._private.worker import get_dashboard_url
        from ray.exceptions import RaySystemError

        with contextlib.suppress(RaySystemError):  # through ray:// Ray does not say
            url = get_dashboard_url()
    return f"http://{url}" if url and not str(url).startswith("http") else url or None
