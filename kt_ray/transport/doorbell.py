"""The doorbell: small frames from actor to actor on one node, through a pipe and past Ray.

Every actor listens at one anonymous pipe, which its peers open as `/proc/<pid>/fd/<n>`, just as they open its
shared memory (arena.py): no port, no file, nothing that a crash leaves behind, and the kernel lets in
processes of the same user and PID namespace only. Writes of up to PIPE_BUF bytes are whole or do not happen
(POSIX), so all peers share the pipe, and one that is killed leaves no half of a frame.

Ringing never waits and never raises: a frame that is too large, finds the pipe full or nobody at its end is
the caller's to send another way, in any order.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import select
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from kt_ray.timeline import name_thread

logger = logging.getLogger(__name__)

PIPE_BYTES = 1 << 20  # some thousand frames; what an unprivileged user may have
_TOKEN_BYTES = 8
_LENGTH = struct.Struct("<I")
_HEAD = _TOKEN_BYTES + _LENGTH.size
FRAME_BYTES = select.PIPE_BUF - _HEAD  # the largest frame
_PATIENCE = 10.0  # seconds that `close` waits for the frame in progress


@dataclass(frozen=True)
class DoorbellAddress:
    """Where to ring: the pipe's path and inode, and what its frames begin with."""

    path: str
    inode: int
    token: bytes


class Doorbell:
    """Receives frames in its own thread until `close`.

    Args:
        take: called with each frame, in that thread.
        lost: called with the reason when a frame cannot be taken.
    """

    def __init__(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._take, self._lost = take, lost
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user's share of pipes is used up: it stays small
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.set_blocking(self._write, False)
        token = secrets.token_bytes(_TOKEN_BYTES)
        inode = os.fstat(self._write).st_ino
        self.address = DoorbellAddress(f"/proc/{os.getpid()}/fd/{self._write}", inode, token)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="doorbell", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        name_thread("kt-doorbell")  # not the compute thread's name, which its CPU time is counted by
        rest = b""
        while not self._closed:
            data = rest + os.read(self._read, 1 << 16)
            begin = 0
            while not self._closed and len(data) - begin >= _HEAD:
                if not data.startswith(self.address.token, begin):
                    self._lost(
                        "a stranger rang its doorbell: a frame without its token "
                        f"({len(data) - begin} bytes dropped)"
                    )
                    begin = len(data)
                    break
                (size,) = _LENGTH.unpack_from(data, begin + _TOKEN_BYTES)
                end = begin + _HEAD + size
                if end > len(data):
                    break
                self._take_one(data[begin + _HEAD : end])
                begin = end
            rest = data[begin:]

    def _take_one(self, frame: bytes) -> None:
        try:
            self._take(frame)
        except Exception as error:  # nobody waits for this thread: the compute thread must hear of it
            logger.exception("a message was lost")
            self._lost(f"could not take a message: {type(error).__name__}: {error}")

    def close(self) -> None:
        """Stop listening. `Ringer.ring` then returns False."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(BlockingIOError):  # full: then the thread is about to read, and look
            os.write(self._write, b"\0" * _HEAD)
        self._thread.join(_PATIENCE)
        os.close(self._write)
        if not self._thread.is_alive():  # else it still uses it
            os.close(self._read)


class Ringer:
    """Rings one peer's doorbell. Not thread-safe.

    Raises:
        OSError: the peer cannot be reached this way: it is gone, another user's, or in another container.
    """

    def __init__(self, address: DoorbellAddress) -> None:
        self._fd = os.open(address.path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(self._fd)
        # A process id that was used again, or means somebody else here.
        if not stat.S_ISFIFO(status.st_mode) or status.st_ino != address.inode:
            os.close(self._fd)
            raise FileNotFoundError(f"{address.path} is not the peer's pipe")
        self._token = address.token

    @staticmethod
    def fits(frame: bytes) -> bool:
        """Whether a frame is small enough."""
        return len(frame) <= FRAME_BYTES

    def ring(self, frame: bytes) -> bool:
        """Whether the frame is in the peer's pipe; False = send it another way."""
        if not self.fits(frame):
            return False
        try:
            os.write(self._fd, self._token + _LENGTH.pack(len(frame)) + frame)
        except (BlockingIOError, BrokenPipeError):
            return False
        return True

    def close(self) -> None:
        os.close(self._fd)
