"""A server without Ray: the application under uvicorn, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import Any

import uvicorn

from kt_ray.data.template import ChatEncoder
from kt_ray.data.tokenizer_files import load_tokenizer
from kt_ray.disk import raise_open_files
from kt_ray.errors import UserError
from kt_ray.generate.generator import Generator
from kt_ray.serve.access import bare
from kt_ray.serve.app import make_app
from kt_ray.serve.completions import FAREWELL, CompletionService, Served
from kt_ray.serve.header_timeout import TimedProtocol

# Each answer that a client waits for has a connection: all that serve.max_queue admits, and up to 2000 of one
# client of the Tinker API. Shells often allow 1024.
Revive = Callable[[BaseException], Generator]  # a generator after one that an error ended; or raises


def make_service(served: Served, generator: Generator) -> CompletionService:
    """With a tokenizer of its own: the generator decodes with its own in other threads."""
    tokenizer = load_tokenizer(served.tokenizer)
    tokenizer("a")  # drops what the file says about padding and truncation, once and not beside others
    encoder = ChatEncoder(tokenizer, served.template, name=served.template_name, date=served.date)
    return CompletionService(served, encoder, generator)


def check_port(host: str, port: int) -> None:
    """Raises UserError: nobody can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((bare(host), port))
        except OSError as error:
            raise UserError(
                "the server cannot listen there",
                where=f"serve.host={host}, serve.port={port}",
                observed=error.strerror or str(error),
                remedy="set serve.port to a free port and serve.host to an address of this machine",
            ) from error


def http_config(app: Any, host: str, port: int, farewell: int) -> uvicorn.Config:
    """How uvicorn serves an application; farewell: seconds that connections get when it ends."""
    return uvicorn.Config(
        app,
        host=bare(host),
        port=port,
        http=TimedProtocol,
        ws="none",
        log_level=logging.ERROR,  # what clients do wrong is no news
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=farewell,
    )


class AnnouncedServer(uvicorn.Server):
    """Calls `ready` once requests are answered."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        raise_open_files()  # each connection is one
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class Server(AnnouncedServer):
    """Ends with the service, and ends it beside its connections: streams end with an event, not midway.

    Attributes:
        error: why generation could not be brought back.
    """

    def __init__(
        self, service: CompletionService, host: str, port: int, ready: Callable[[], None], revive: Revive
    ) -> None:
        # a second more, for clients that do not read what they are sent
        super().__init__(http_config(make_app(service), host, port, int(FAREWELL) + 1), ready)
        self.error: BaseException | None = None
        self._service = service
        self._revive = revive

    async def on_tick(self, counter: int) -> bool:
        if await super().on_tick(counter):
            return True
        if self._service.generator.error is not None:
            try:
                await asyncio.to_thread(self._renew)
            except Exception as error:
                self.error = error
        return self.error is not None

    def _renew(self) -> None:
        fault = self._service.fault()
        if fault is not None:
            self._service.generator = self._revive(fault)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(asyncio.to_thread(self._service.close))
        await super().shutdown(sockets)
        await ending


def run_server(
    service: CompletionService, host: str, port: int, ready: Callable[[], None], revive: Revive
) -> None:
    """Serve until Ctrl-C, SIGTERM or the service's end; `ready` is called once requests are answered.

    Raises:
        Exception: what `revive` raised.
    """
    server = Server(service, host, port, ready, revive)
    with contextlib.suppress(KeyboardInterrupt):
        server.run()  # uvicorn takes the signals, ends, and raises them again
    if server.error is not None:
        raise server.error
