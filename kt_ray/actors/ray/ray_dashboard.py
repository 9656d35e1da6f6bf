"""Where the Ray dashboard is, and how to get past its question for a token."""

from __future__ import annotations

import os
from typing import Any


def dashboard_hint(url: str | None) -> str:
    """What the line about the cluster ends in."""
    return ", without a dashboard" if url is None else f"; dashboard {url}{_token_hint()}"


def _token_hint() -> str:
    """How to get past the dashboard's question. `ray.init` sets RAY_AUTH_MODE when it turns tokens on."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return ""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return " (asks for a token: the value of RAY_AUTH_TOKEN)"
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"
    return f" (asks for a token: 'ray get-auth-token' prints it, from {path})"


def dashboard_url(context: Any = None) -> str | None:
    """Of the cluster that this process is connected to; None = it has none. context: what ray.init gave."""
    url = getattr(context, "dashboard_url", None) if context is not None else None
    if not url:
        from ray._private.worker import get_dashboard_url

        url = get_dashboard_url()
    return f"http://{url}" if url and not str(url).startswith("http") else url
