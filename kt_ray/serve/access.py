"""Access control as ASGI middleware: the API key, the Host header, the size of a body."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from kt_ray.errors import UserError
from kt_ray.serve.api_errors import ApiError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

VARIABLE = "KT_RAY_API_KEY"
OPEN = ("/health",)  # paths that need no key


def bare(host: str) -> str:
    """An address without the brackets that IPv6 ones have in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(bare(host)).is_loopback
    except ValueError:
        return False  # a name: it may mean anything


def check_address(host: str, key: str | None) -> None:
    """Refuse to listen beyond this machine without a key.

    Raises:
        UserError: that.
    """
    if key is None and not is_loopback(host):
        raise UserError(
            "the server would answer anybody who reaches this machine",
            where=f"serve.host={host}",
            observed=f"no key (serve.api_key=null, {VARIABLE} not set)",
            required="a key, or an address of this machine only",
            remedy=f"set {VARIABLE}, or serve.host=127.0.0.1",
        )


def digest(key: str | bytes) -> bytes:
    """What is kept of a key; whitespace around it does not count, as around a header's value."""
    # surrogateescape: a variable of the environment may hold any bytes
    value = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
    return hashlib.sha256(value.strip()).digest()


class Gate:
    """The outermost layer.

    Args:
        app: ASGI application.
        key: digest of the clients' key; None = nobody needs one, but only requests to an address of this
            machine are answered.
        max_body: bytes of a body at the most.
    """

    def __init__(self, app: Any, key: bytes | None, max_body: int) -> None:
        self._app = app
        self._key = key
        self._max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_host(scope)
            self._check_key(scope)
            receive = await self._read(scope, receive)
        except ApiError as error:
            await _answer(send, error)
            return
        await self._app(scope, receive, send)

    def _check_host(self, scope: Scope) -> None:
        """Where no key is asked for, web pages open on this machine must not ask either: one whose owner
        points its name at 127.0.0.1 (DNS rebinding) sends that name as Host."""
        if self._key is not None or scope["path"] in OPEN:
            return
        given = _header(scope, b"host").decode("latin-1").strip()
        # A program that is no browser may leave the header out.
        if given and not is_loopback(_without_port(given)):
            raise ApiError(
                403,
                f"a server without a key answers to localhost and 127.0.0.1 only, not to '{given}': ask by "
                f"one of these, or start it with a key ({VARIABLE})",
                code="host_not_allowed",
            )

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["path"] in OPEN:
            return
        given = _header(scope, b"authorization").strip()
        scheme, _, key = given.partition(b" ")
        # Clients send what is not ASCII as UTF-8 or, the older way, as Latin-1.
        digests = [digest(key), digest(key.decode("latin-1"))]
        right = [hmac.compare_digest(one, self._key) for one in digests]
        if scheme.lower() != b"bearer" or not any(right):
            what = "incorrect API key provided" if given else "no API key provided"
            raise ApiError(
                401,
                f"{what}: send 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _read(self, scope: Scope, receive: Receive) -> Receive:
        """Read the body, as far as it may go; what follows it is left to the application."""
        stated = _header(scope, b"content-length")
        if stated.isdigit() and int(stated) > self._max_body:
            raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":  # the client left
                return _after(message, receive)
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body:
                raise self._too_large()
            more = message.get("more_body", False)
        return _after({"type": "http.request", "body": b"".join(parts), "more_body": False}, receive)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request is larger than {self._max_body} bytes (serve.max_body)",
            code="request_too_large",
        )


def _after(first: MutableMapping[str, Any], receive: Receive) -> Receive:
    waiting = [first]

    async def replay() -> MutableMapping[str, Any]:
        return waiting.pop() if waiting else await receive()

    return replay


def _without_port(host: str) -> str:
    """ "localhost:8000" -> "localhost", "[::1]:8000" -> "[::1]"."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.endswith("]")) else host


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key.lower() == name), b"")


async def _answer(send: Send, error: ApiError) -> None:
    body = json.dumps(error.body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": body})
