"""The one console that progress bars, lines and warnings share, so that none of them tears another."""

from __future__ import annotations

import logging
from functools import cache

from rich.console import Console


@cache
def console() -> Console:
    """Standard output as rich sees it. Built on first use, so that redirection at start is honoured."""
    return Console(highlight=False)


class ConsoleHandler(logging.Handler):
    """Log records as plain lines above a live progress bar, or on standard error without a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._stderr = Console(stderr=True, highlight=False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # A live bar owns the terminal and only its own console can print above it.
            target = console() if console().is_terminal else self._stderr
            target.print(self.format(record), markup=False, soft_wrap=True)
        except Exception:
            self.handleError(record)
