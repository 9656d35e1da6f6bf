"""Access control as ASGI middleware: the API key, the Host header, the size and the pace of a body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from kt_ray.config.secret_values import remember
from kt_ray.errors import UserError
from kt_ray.serve.api_errors import ApiError

VARIABLE = "KT_RAY_API_KEY"
OPEN = ("/health",)  # paths that need no key
BODY_TIMEOUT = 30.0  # seconds that a body may take to arrive


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


def taken_key(stated: str | None) -> str | None:
    """The clients' key: serve.api_key, else the variable. It leaves the environment: neither Ray nor
    what it starts needs it. Messages will not show it."""
    variable = os.environ.pop(VARIABLE, None)
    key = (stated or variable or "").strip() or None
    if key is not None:
        remember(key)
    return key


def digest(key: str | bytes) -> bytes:
    """What is kept of a key; whitespace around it does not count, as around a header's value."""
    # surrogateescape: a variable of the environment may hold any bytes
    value = key.encode("utf-8", "surrogateescape") if isinstance(key, str) else key
    return hashlib.sha256(value.strip()).digest()


def bearer_keys(headers: Headers) -> tuple[str, ...]:
    """The key of `Authorization: Bearer <key>`."""
    given = headers.get("authorization", "").strip(" \t")  # not what Latin-1 has for bytes of UTF-8
    scheme, _, key = given.partition(" ")
    return (key,) if scheme.lower() == "bearer" else ()


class Gate:
    """The outermost layer.

    Args:
        app: ASGI application.
        key: digest of the clients' key; None = nobody needs one, but only requests to an address of this
            machine are answered.
        max_body: bytes of a body at the most.
        open_paths: that need no key.
        keys_of: the key that a request has, in the ways it may be meant; header: that it stands in.
    """

    def __init__(
        self,
        app: Any,
        key: bytes | None,
        max_body: int,
        *,
        open_paths: tuple[str, ...] = OPEN,
        keys_of: Callable[[Headers], tuple[str, ...]] = bearer_keys,
        header: str = "Authorization: Bearer <key>",
    ) -> None:
        self._app = app
        self._key = key
        self._max_body = max_body
        self._open_paths = open_paths
        self._keys_of = keys_of
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            try:
                if scope["path"] not in self._open_paths:
                    if self._key is None:
                        self._check_host(headers)
                    else:
                        self._check_key(headers, self._key)
                receive = self._limited(headers, receive)
            except ApiError as error:
                await error.response()(scope, receive, send)
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
        # Clients send what is not ASCII as UTF-8 or, the older way, as Latin-1.
        digests = [
            one for key in self._keys_of(headers) for one in (digest(key.encode("latin-1")), digest(key))
        ]
        right = [hmac.compare_digest(one, wanted) for one in digests]
        if not any(right):
            given = headers.get(self._header.partition(":")[0], "").strip(" \t")
            what = "incorrect API key provided" if given else "no API key provided"
            raise ApiError(
                401,
                f"{what}: send '{self._header}'",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _limited(self, headers: Headers, receive: Receive) -> Receive:
        """`receive` that ends a body which is too large, or too slow, with an error for who reads it.

        Raises:
            ApiError: the request says itself that it is too large.
        """
        message = f"the request is larger than {self._max_body} bytes (serve.max_body)"
        too_large = ApiError(413, message, code="request_too_large")
        # Some clients send the length of a body and then wait: they are answered before it comes.
        stated = headers.get("content-length", "")
        if stated.isdecimal() and (len(stated) > 18 or int(stated) > self._max_body):
            raise too_large
        size, deadline = 0, 0.0  # from the first question on; infinite once the body has come

        async def limited() -> Message:
            nonlocal size, deadline
            loop = asyncio.get_running_loop()
            deadline = deadline or loop.time() + BODY_TIMEOUT
            try:
                async with asyncio.timeout_at(None if deadline == float("inf") else deadline):
                    message = await receive()
            except TimeoutError:
                raise ApiError(
                    408,
                    f"the request's body did not come within {BODY_TIMEOUT:.0f} s",
                    code="request_timeout",
                ) from None
            if message["type"] == "http.request":
                size += len(message.get("body", b""))
                if size > self._max_body:
                    raise too_large
                if not message.get("more_body", False):
                    deadline = float("inf")
            return message

        return limited


def _without_port(host: str) -> str:
    """ "localhost:8000" -> "localhost", "[::1]:8000" -> "[::1]"."""
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and (":" not in name or name.endswith("]")) else host
