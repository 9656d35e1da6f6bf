"""The service under uvicorn, in the process that drives the cluster."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from kt_ray.serve.header_timeout import TimedProtocol
from kt_ray.train_server.backend import Backend
from kt_ray.train_server.endpoints import make_app
from kt_ray.train_server.service import TrainService

FAREWELL = 5  # seconds that answers on their way get when the server ends


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


def serve_backend(
    backend: Backend,
    directory: Path,
    *,
    host: str,
    port: int,
    key: bytes | None,
    max_body: int,
    most_samplers: int,
    ready: Callable[[], None],
) -> None:
    """Serve until Ctrl-C or SIGTERM; `ready` is called once requests are answered.

    Args:
        directory: of the checkpoints. key: digest of the clients' key; None = nobody needs one.
        max_body: bytes of a request at the most. most_samplers: as `TrainService`.
    """
    service = TrainService(backend, directory, most_samplers=most_samplers)
    config = uvicorn.Config(
        make_app(service, key, max_body),
        host=host,
        port=port,
        http=TimedProtocol,
        ws="none",
        log_level=logging.ERROR,  # what clients do wrong is no news
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=FAREWELL,
    )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            _Server(config, ready).run()  # uvicorn takes the signals, ends, and raises them again
    finally:
        service.close()
