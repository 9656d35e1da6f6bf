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

import httpx
import tinker
import uvicorn
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from kt_ray.serve.access import digest
from kt_ray.train_server.endpoints import make_app
from kt_ray.train_server.http_server import TrainServer
from kt_ray.train_server.service import TrainService
from tests.helpers.fake_train_backend import FakeBackend

KEY = "tml-key-of-the-tests"
MAX_BODY = 1 << 20
PROTOBUF = {"content-type": "application/x-protobuf"}


@dataclass
class Running:
    """A server that answers."""

    url: str
    backend: FakeBackend
    service: TrainService
    directory: Path
    end: Callable[[], None]
    clients: list[Any] = field(default_factory=list)

    def client(self, key: str = KEY) -> tinker.ServiceClient:
        self.clients.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self.clients[-1]

    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.url, api_key=KEY)


@contextlib.contextmanager
def running(
    directory: Path, backend: FakeBackend | None = None, *, key: str = KEY, **settings: Any
) -> Iterator[Running]:
    backend = backend or FakeBackend()
    backend.aside = directory / ".aside"
    service = TrainService(backend, directory, **settings)
    app = make_app(service, digest(key), MAX_BODY)
    config = uvicorn.Config(
        app, log_level=logging.ERROR, lifespan="off", ws="none", timeout_graceful_shutdown=1
    )
    server = TrainServer(service, config, lambda: None)

    def end() -> None:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()

    with contextlib.closing(socket.socket()) as port:
        port.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [port]}, daemon=True)
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            made = Running(f"http://127.0.0.1:{port.getsockname()[1]}", backend, service, directory, end)
            yield made
        finally:
            backend.gate.set()
            for client in made.clients:
                client.close("success").result(60)
            service.close()
            end()
            made.clients.clear()
            collect_clients()


def collect_clients() -> None:
    """Of those that nobody refers to any longer. The SDK leaves connections of its first question open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def until(found: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def datum(tokens: list[int], **inputs: list[float]) -> types.Datum:
    inputs = inputs or {"weights": [1.0] * len(tokens)}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens),
        loss_fn_inputs={"target_tokens": [*tokens[1:], 1], **inputs},  # type: ignore[dict-item]
    )


class Raw:
    """The API without the SDK."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.http = httpx.Client(base_url=f"{server.url}/api/v1", headers={"X-API-Key": KEY}, timeout=40)
        self.session = self.post("create_session", tags=[], user_metadata=None, sdk_version="0")["session_id"]

    def post(self, path_: str, **body: Any) -> Any:
        answer = self.http.post(path_, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def asked_for_model(self, number: int = 0) -> Any:
        """The promise of one."""
        return self.post(
            "create_model",
            session_id=self.session,
            model_seq_id=number,
            base_model="demo/model",
            lora_config={"rank": 8, "seed": 3},
        )

    def model(self, number: int = 0) -> str:
        return self.result(self.asked_for_model(number))["model_id"]

    def result(self, promised: Any) -> Any:
        answer = self.http.post("retrieve_future", json={"request_id": promised["request_id"]})
        return answer.json() if "json" in answer.headers["content-type"] else answer.content

    def passed(self, model: str, number: int, rows: int = 1) -> Any:
        body = ForwardBackwardInput(data=[datum([2, 3])] * rows, loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=body, model_id=model, seq_id=number)
        content = forward_backward_request_to_proto(request).SerializeToString()
        answer = self.http.post("forward_backward", content=content, headers=PROTOBUF)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def step(self, model: str, number: int) -> Any:
        return self.post("optim_step", model_id=model, seq_id=number, adam_params={})

    def sampler(self, number: int = 0) -> str:
        return self.post(
            "create_sampling_session",
            session_id=self.session,
            sampling_session_seq_id=number,
            base_model="demo/model",
        )["sampling_session_id"]

    def sampler_of(self, path: str, number: int) -> str:
        """A session's sampler of saved weights."""
        session = {"session_id": self.session, "sampling_session_seq_id": number}
        return self.post("create_sampling_session", **session, model_path=path)["sampling_session_id"]

    def sample(self, sampler: str, number: int, **more: Any) -> Any:
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=number,
            prompt={"chunks": [{"tokens": [5, 6], "type": "encoded_text"}]},
            sampling_params={"max_tokens": 2},
            **more,
        )

    def calls(self, *names: str) -> list[Any]:
        return [call for call in self.server.backend.calls if call[0] in names]
