"""SIGTERM, SIGINT and SIGHUP while a run trains: a request that the loop answers, not the end of the process.

The first signal asks the loop to stop. Between two steps it saves at once; a step gets `GRACE` seconds to
end, else it is given up, which loses that step alone: what was applied before it is whole in the actors. A
second signal raises KeyboardInterrupt wherever the driver is, a third ends the process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from kt_ray.errors import INTERRUPTED

# Slurm kills 30 s after its SIGTERM, Kubernetes as well: half for the step, half for the checkpoint.
GRACE = 15.0
# Signals this close to the first one are the same request: a terminal or a job manager signals a whole group,
# and a parent passes its own on.
SAME = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """What was asked for.

    Attributes:
        name: of the first signal, "SIGTERM"; "" = none came.
    """

    def __init__(self) -> None:
        self.name = ""
        self._count = 0
        self._last = -SAME
        self._deadline = float("inf")

    def __bool__(self) -> bool:
        return bool(self.name)

    def give_up(self) -> str:
        """Why the step in progress must not be waited for; "" = it may end."""
        if time.monotonic() < self._deadline:
            return ""
        return f"{self.name} came, and the step did not end within {GRACE:.0f} s"

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """The signals' handler."""
        now = time.monotonic()
        if now - self._last < SAME:
            return
        self._last = now
        self._count += 1
        if self._count == 1:
            self._deadline = now + GRACE
            self.name = signal.Signals(number).name
            # Not print: the signal may have come in the middle of one.
            line = f"{self.name}: saving within about {GRACE:.0f} s; a second signal ends the run at once"
            with contextlib.suppress(OSError):
                os.write(2, f"\n{line}\n".encode())
        elif self._count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """The signals as requests to the block. SIGHUP that is ignored (nohup) stays so."""
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    taken = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop.handle) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
