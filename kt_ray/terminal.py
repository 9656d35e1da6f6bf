"""What a terminal gets to see: text of data, models and errors cannot steer it.

An escape sequence in a row, in a file's name or in a model's answer could set the window's title, change what
was printed before, or write to the clipboard. Files keep text as it is.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console

# C0 without newline and tab, DEL, C1; and halves of surrogate pairs, which no terminal's encoding has.
_SHOWN = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
_SHOWN |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}


def open_streams() -> None:
    """Standard streams for any text, at a program's start: a closed one leads nowhere, which is no fault, and
    what a stream's encoding lacks is spelled out.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            fd = os.open(os.devnull, os.O_RDWR)  # the lowest number: that of the closed one
            os.set_inheritable(fd, True)
            setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def close_streams() -> None:
    """At its end: what cannot be written is given up, for which Python would change the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            silence(stream)


def silence(stream: Any) -> None:
    """All that is written to a stream from now on, and what it still holds, goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def visible(text: str) -> str:
    """Text with control characters spelled out; newlines and tabs stay."""
    return text.replace("\r\n", "\n").translate(_SHOWN)


def shortened(text: str, limit: int) -> str:
    """One line of at most `limit` characters."""
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def screen_console(**options: Any) -> Console:
    """A rich console that prints all text as `visible` has it, whatever carries it.

    Without a file of its own it never raises: a terminal that is gone, or the reader of a pipe, is no reason
    to end a run.

    Args:
        options: rich.console.Console's.
    """
    from rich.console import Console, ConsoleOptions, RenderableType, RenderHook
    from rich.segment import Segment

    class Shown:
        """Something printable, its text visible; colours are rich's own, and not text."""

        def __init__(self, inside: RenderableType) -> None:
            self.inside = inside

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for text, style, control in console.render(self.inside, options):
                yield Segment(text if control else visible(text), style, control)

    class Filter(RenderHook):
        def process_renderables(self, renderables: Iterable[Any]) -> list[Any]:
            return [Shown(renderable) for renderable in renderables]

    if "file" not in options:
        options["file"] = lasting(options.pop("stderr", False))
    console = Console(**options, emoji=False)  # a path or a model may be called a:train:0
    console.push_render_hook(Filter())
    return console


def lasting(stderr: bool = False) -> TextIO:
    """Standard output, or standard error, for what a run says on its way: a fault of it ends nothing."""
    return cast(TextIO, _Lasting(stderr))


class _Lasting(io.TextIOBase):
    """Standard output, or standard error, as it is at each write; faults of it are swallowed."""

    def __init__(self, stderr: bool) -> None:
        self._stderr = stderr

    @property
    def _stream(self) -> Any:
        stream = sys.stderr if self._stderr else sys.stdout
        return getattr(stream, "rich_proxied_file", stream)  # rich.live puts itself before the stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def write(self, text: str) -> int:
        self._try(lambda stream: stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(lambda stream: stream.flush())

    def _try(self, call: Callable[[Any], Any]) -> None:
        try:
            call(self._stream)
        except BrokenPipeError:
            silence(self)  # else Python complains once more when it ends
        except OSError:
            pass  # a terminal that hung up; a full disk behind `> log`
