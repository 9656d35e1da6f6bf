"""This process's connection to Ray: to a cluster that runs, or to one that ends with this process."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray

from kt_ray import torch_environment
from kt_ray.actors.ray.ray_access import check_open_dashboard, guard_token, token_to_join, token_to_start
from kt_ray.actors.ray.ray_address import (
    PORTS_TRIED,
    Running,
    dashboard_url,
    files_to_start,
    free_port,
    ray_directory,
)
from kt_ray.actors.ray.ray_guard import RayGuard
from kt_ray.config.schema import ClusterConfig
from kt_ray.errors import TryAgain, UserError

logger = logging.getLogger(__name__)

START_ATTEMPTS = 3
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR)


class RayConnection:
    """Made by `start_local` or `join`, ended by `disconnect` and `end_guard`.

    Args:
        config: how to start Ray.
        namespace: of the actors.
    """

    def __init__(self, config: ClusterConfig, namespace: str) -> None:
        self.config = config
        self.namespace = namespace
        self._connected = False  # by this object: it then disconnects, too
        self._guard: RayGuard | None = None  # of a Ray that this object started

    def start_local(self) -> tuple[str | None, list[str]]:
        """Start a Ray of this run's own: its dashboard's URL, if it has one, and lines for the user.

        Raises:
            UserError: it does not start, may open too few files, or its dashboard has no port or would be
                open to everybody.
        """
        check_open_dashboard(self.config)
        files_to_start()
        notes = token_to_start()
        # Ray kills workers at 95 % of the host's memory; the plan has already counted every byte against
        # its capacity, and 5 % of a terabyte is much. A value of the user's stays.
        os.environ.setdefault("RAY_memory_usage_threshold", "0.99")
        # A GCS of our own does not come back: a minute's wait for it (Ray's default) gains nothing.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "10")
        # Ray's 30 s are short beside other programs.
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", str(math.ceil(self.config.start_timeout)))
        # Ray's workers are nice by default; training is what this machine is here for.
        os.environ.setdefault("RAY_worker_niceness", "0")
        torch_environment.apply()
        self._guard = RayGuard()
        context = self._attempts(self._guard)
        # Ray's URL is empty without a dashboard.
        return dashboard_url(context) or None, notes + guard_token()

    def _attempts(self, guard: RayGuard) -> Any:
        """A Ray of this run's own, in up to START_ATTEMPTS attempts, the last without the dashboard.

        On a busy host Ray's processes are late, and another program may take the dashboard's port between
        our look and Ray's.
        """
        first = self.config.dashboard_port
        for attempt in range(1, START_ATTEMPTS + 1):
            last = attempt == START_ATTEMPTS
            # Named here only when it is shown: without a dashboard the port must not matter.
            wanted = self.config.dashboard and not last
            port = free_port(self.config.dashboard_host, first) if wanted else None
            if wanted and port is None:
                logger.warning("ports %d to %d are taken: no dashboard", first, first + PORTS_TRIED - 1)
            try:
                with guard.own_ray(), _deaf_to_hangups():
                    return self._init(
                        address="local",
                        include_dashboard=port is not None,
                        dashboard_host=self.config.dashboard_host,
                        dashboard_port=port,
                    )
            except Exception as error:  # Ray raises plain ones for a dashboard or a node that is late
                ray.shutdown()
                guard.sweep()
                why = last_line(error)
                place = ray_directory().parent  # which Ray makes, where it can
                stays = isinstance(error, OSError) and (error.errno in UNWRITABLE or not place.is_dir())
                if stays:
                    raise UserError(
                        "Ray cannot write its directory",
                        where=str(place),
                        observed=why,
                        remedy="free space there, or set RAY_TMPDIR to another directory, with a short "
                        "name; cluster=local runs without Ray",
                    ) from error
                if last:
                    raise TryAgain(
                        "Ray cannot be started on this host",
                        observed=why,
                        required=f"a start within Ray's own time limits, in {START_ATTEMPTS} attempts",
                        remedy="start the run again when the host is less busy, set cluster=local (no Ray), "
                        f"or look into {ray_directory()}/session_latest/logs",
                    ) from error
                without = " without its dashboard" if port and attempt + 1 == START_ATTEMPTS else ""
                logger.warning("Ray did not start, once more%s: %s", without, why)
                first = port + 1 if port is not None else first
        raise AssertionError("unreachable")

    def join(self, running: Running) -> str | None:
        """Connect to a cluster that runs; its dashboard's URL, if it has one.

        Raises:
            UserError: it refuses, or does not answer.
        """
        # Not Ray's own "auto", which looks for a cluster again, and may find another.
        for note in token_to_join(found=running.source == "ray start"):
            logger.warning("%s", note)
        try:
            context = self._init(address=running.address)
        except Exception as error:  # of many classes: connections, versions, tokens, time-outs
            raise UserError(
                "the Ray cluster cannot be joined",
                where=f"{running.address} (from {running.source})",
                observed=last_line(error),
                remedy="if it wants a token, set RAY_AUTH_MODE=token and put the token into "
                "~/.ray/auth_token (or name its file in RAY_AUTH_TOKEN_PATH); use the cluster's "
                "versions of Ray and Python; or set cluster.address=local",
            ) from error
        return dashboard_url(context)

    def _init(self, **how: Any) -> Any:
        # ray.init puts a handler of SIGTERM in place that ends the process with code 15, without a word.
        handler: Any = signal.getsignal(signal.SIGTERM)
        ours = callable(handler) and threading.current_thread() is threading.main_thread()
        try:
            context = ray.init(
                namespace=self.namespace, log_to_driver=False, logging_level=logging.ERROR, **how
            )
            self._connected = True
            return context
        except SystemExit as ended:
            if ours and ended.code == signal.SIGTERM:
                handler(signal.SIGTERM, None)
            raise
        finally:
            if ours:
                signal.signal(signal.SIGTERM, handler)

    def disconnect(self) -> None:
        """Ends a Ray that this object started; leaves one that it joined."""
        if self._connected:
            ray.shutdown()
            self._connected = False

    def end_guard(self) -> None:
        """After an orderly end of the Ray that this object started, if it did."""
        if self._guard is not None:
            self._guard.end()
            self._guard = None


@contextlib.contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """Processes started inside ignore SIGHUP: a closed terminal asks the driver to save, which needs them.

    It reaches the driver when the block ends. An ignored signal would be lost, a blocked one waits.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def last_line(error: Exception) -> str:
    """The reason in an error of Ray's: of a dashboard's it holds the log's last lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
