"""Access control as ASGI middleware: the API key, the Host header, the size of a body."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from kt_ray.errors import UserError
from kt_ray.serve.api_errors import ApiError

VARIABLE = "KT_RAY_API_KEY"
OPEN = ("/health",)  # paths that need no key


def bare(host: str) -> str:
    """An address without the brackets that IPv6 ones have in URLs."""
    return host.removeprefix("[").removesuffix("]")


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
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if scope["path"] not in OPEN:
                    if self._key is None:
                        self._check_host(headers)
                    else:
                        self._check_key(headers, self._key)
                receive = await self._read(headers, scope, receive)
            except ApiError as error:
                await error.response()(scope, receive, send)
                return
            except ClientDisconnect:
                return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> None:
        """Where no key is asked for, web pages open on this machine must not ask either: one whose owner
        points its name at 127.0.0.1 (DNS rebinding) sends that name as Host."""
        given = headers.get("host", "").strip()
        # A program that is no browser may leave the header out.
        if given and not is_loopback(_without_port(given)):
            raise ApiError(
                403,
                f"a server without a key answers to localhost and 127.0.0.1 only, not to '{given}': ask by "
                f"one of these, or start it with a key ({VARIABLE})",
                code="host_not_allowed",
            )

    def _check_key(self, headers: Headers, wanted: bytes) -> None:
        given = headers.get("authorization", "").strip(" \t")  # not what Latin-1 has for bytes of UTF-8
        scheme, _, key = given.partition(" ")
        # Clients send what is not ASCII as UTF-8 or, the older way, as Latin-1.
        digests = [digest(key.encode("latin-1")), digest(key)]
        right = [hmac.compare_digest(one, wanted) for one in digests]
        if scheme.lower() != "bearer" or not any(right):
            what = "incorrect API key provided" if given else "no API key provided"
            raise ApiError(
                401,
                f"{what}: send 'Authorization: Bearer <key>'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    async def _read(self, headers: Headers, scope: Scope, receive: Receive) -> Receive:
        """Read the body, as far as it may go; what follows it is left to the application.

        Raises:
            ClientDisconnect: the client left before its end.
        """
        message = f"the request is larger than {self._max_body} bytes (serve.max_body)"
        too_large = ApiError(413, message, code="request_too_large")
        stated, body = headers.get("content-length", ""), bytearray()
        if stated.isdecimal() and int(stated) > self._max_body:
            raise too_large
        async for part in Request(scope, receive).stream():
            body += part
            if len(body) > self._max_body:
                raise too_large
        waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        return replay


def _without_port(host: str) -> str:
    """ "localhost:8000" -> "localhost", "[::1]:8000" -> "[::1]"."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.endswith("]")) else host
