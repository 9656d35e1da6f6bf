"""HTTP connections that send half a request are closed. uvicorn has no option for it.

Only uvicorn is imported: Ray Serve's proxy, which runs it too, imports this module.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SECONDS = 5.0  # from a connection, or from a further request's first byte, to the end of its headers
# How Ray Serve's proxy is told to call `install` when it starts.
PROXY_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
INSTALL = f"{__name__}:install"


class TimedProtocol(HttpToolsProtocol):
    """One connection; closed when the headers of a request are not complete in time, or its body is not
    complete when the connection would be closed for silence behind the answer."""

    _timer: asyncio.TimerHandle | None = None
    _coming = False  # a request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def on_message_begin(self) -> None:
        self._unset_keepalive_if_required()  # one that waited for the body of the request before
        self._coming = True
        super().on_message_begin()
        self._await_headers()

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._coming = False
        super().on_message_complete()

    def _unset_keepalive_if_required(self) -> None:
        # uvicorn, at every byte that comes; nothing would set it again behind the answer.
        if not (self._coming and self.cycle is not None and self.cycle.response_complete):
            super()._unset_keepalive_if_required()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self._stop()
        self._timer = self.loop.call_later(SECONDS, self._give_up)

    def _give_up(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:  # an answer to the request before is on its way
            self._await_headers()

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def install() -> list[Any]:
    """Have every server of this process use it. Returns no middleware: that is what Ray Serve asks for."""
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{__name__}:{TimedProtocol.__name__}"
    return []
