"""The one console that progress bars, lines and warnings share, so that none tears another; and train.log."""

from __future__ import annotations

import logging
import sys
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from rich.console import Console

from kt_ray.config.secret_values import hide
from kt_ray.terminal import lasting, screen_console


@cache
def console() -> Console:
    """Standard output as rich sees it. Built on first use, so that redirection at start is honoured."""
    return screen_console(highlight=False)


def say(line: str) -> None:
    """Print one line unwrapped, so that paths and addresses in it can be copied."""
    console().print(line, markup=False, soft_wrap=True)


class ConsoleHandler(logging.Handler):
    """Log records as plain lines above a live progress bar, or on standard error without a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._stderr = screen_console(stderr=True, highlight=False)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # A live bar owns the terminal and only its own console can print above it.
            target = console() if console().is_terminal else self._stderr
            target.print(self.format(record), markup=False, soft_wrap=True)
        except Exception:
            self.handleError(record)


class _LogFile(logging.FileHandler):
    """A full disk is said once, not with a traceback per record."""

    said = False

    def close(self) -> None:
        with suppress(OSError):  # what it still holds is lost, and was said
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.said:
            self.said = True
            print(f"WARNING: {self.baseFilename} cannot be written: {error}", file=lasting(stderr=True))


class _Discreet(logging.Formatter):
    """Without secrets: others' errors quote what they were given."""

    def format(self, record: logging.LogRecord) -> str:
        return hide(super().format(record))


def setup_logging(log_file: Path) -> ExitStack:
    """Send every logger's INFO and above to `log_file`, with timestamps; keep the console clean.

    The console (stderr) gets kt_ray's warnings and errors, one plain line each. A resumed run appends to
    its log. Only this process logs here; actors write to Ray's own files.

    Returns:
        To be closed after the run: it takes the handlers off again and closes the file.
    """
    root, ours = logging.getLogger(), logging.getLogger("kt_ray")
    file = _LogFile(log_file, encoding="utf-8")
    file.setLevel(logging.INFO)
    file.setFormatter(_Discreet("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = ConsoleHandler()
    screen.setLevel(logging.WARNING)
    screen.setFormatter(_Discreet("%(levelname)s: %(message)s"))
    log = ExitStack()
    log.callback(file.close)
    log.callback(ours.setLevel, ours.level)
    log.callback(ours.removeHandler, screen)
    log.callback(root.removeHandler, file)
    ours.setLevel(logging.INFO)
    root.addHandler(file)
    ours.addHandler(screen)
    return log
