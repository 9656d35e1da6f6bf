"""The service under uvicorn, in the process that drives the cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from kt_ray.serve.run import AnnouncedServer, http_config
from kt_ray.train_server.backend import Backend
from kt_ray.train_server.endpoints import make_app
from kt_ray.train_server.service import TrainService

FAREWELL = 5  # seconds that answers on their way get when the server ends


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
            AnnouncedServer(config, ready).run()  # uvicorn takes the signals, ends, and raises them again
    finally:
        service.close()
