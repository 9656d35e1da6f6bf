"""The service under uvicorn, in the process that drives the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import uvicorn

from kt_ray.serve.run import AnnouncedServer, http_config
from kt_ray.train_server.backend import Backend
from kt_ray.train_server.endpoints import make_app
from kt_ray.train_server.service import TrainService

FAREWELL = 5  # seconds that answers on their way get when the server ends


class TrainServer(AnnouncedServer):
    """Ends the service beside its connections: whoever waits learns of it, and is not just cut off."""

    def __init__(self, service: TrainService, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config, ready)
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        self._service.tick()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.end()
        patience = (self.config.timeout_graceful_shutdown or FAREWELL) - 1
        asyncio.get_running_loop().call_later(patience, self._service.abandon)
        await super().shutdown(sockets)


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
    config = http_config(make_app(service, key, max_body), host, port, FAREWELL)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            # uvicorn takes the signals, ends, and raises them again
            TrainServer(service, config, ready).run()
    finally:
        service.close()
