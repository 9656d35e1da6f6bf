"""A train server on a free port, and the SDK's clients."""

from __future__ import annotations

import contextlib
import gc
import logging
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tinker
import uvicorn

from kt_ray.serve.access import digest
from kt_ray.train_server.endpoints import make_app
from kt_ray.train_server.service import TrainService
from tests.helpers.fake_train_backend import FakeBackend

KEY = "tml-key-of-the-tests"
MAX_BODY = 1 << 20


@dataclass
class Running:
    """A server that answers."""

    url: str
    backend: FakeBackend
    service: TrainService
    directory: Path
    clients: list[Any] = field(default_factory=list)

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self.clients[-1]

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.url, api_key=KEY)


@contextlib.contextmanager
def running(directory: Path, backend: FakeBackend | None = None, **settings: Any) -> Iterator[Running]:
    backend = backend or FakeBackend()
    service = TrainService(backend, directory, **settings)
    app = make_app(service, digest(KEY), MAX_BODY)
    config = uvicorn.Config(
        app, log_level=logging.ERROR, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with contextlib.closing(socket.socket()) as port:
        port.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            made = Running(f"http://127.0.0.1:{port.getsockname()[1]}", backend, service, directory)
            yield made
        finally:
            backend.gate.set()
            for client in made.clients:
                client.close("success").result(10)
            service.close()
            server.should_exit = True
            thread.join(10)
            made.clients.clear()
            with warnings.catch_warnings():  # the SDK leaves the connections of its first question open
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path / "saved") as made:
        yield made


def until(found: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
