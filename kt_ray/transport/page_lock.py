"""Page-locking of shared memory for CUDA, so that the GPU copies straight out of it and into it.

Untested on hardware: the logic is tested with a stand-in for the CUDA runtime.
"""

from __future__ import annotations

from typing import Any

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every CUDA context of the process


class PageLock:
    """Registers mappings of this process with CUDA (`cudaHostRegister`), each once.

    Args:
        runtime: what `torch.cuda.cudart()` returns; None = that, at first use.

    Registering makes the pages resident, so a segment then takes all of its memory. Each process registers
    its own mapping of the same pages.
    """

    def __init__(self, runtime: Any = None) -> None:
        self._runtime = runtime
        self._registered: dict[int, int] = {}  # address -> bytes

    def register(self, address: int, size: int) -> None:
        """Page-lock a mapping; again for the same one, does nothing.

        Raises:
            RuntimeError: CUDA refuses (a limit of locked memory, say).
        """
        if size == 0 or address in self._registered:
            return
        self._check(self._cuda().cudaHostRegister(address, size, _PORTABLE), f"page-lock {size} bytes")
        self._registered[address] = size

    def unregister(self, address: int) -> None:
        """Undo `register`, if it was; before the mapping goes away, and with no copy under way."""
        if self._registered.pop(address, None) is not None:
            self._check(self._cuda().cudaHostUnregister(address), "unlock pages")

    def close(self) -> None:
        for address in list(self._registered):
            self.unregister(address)

    @property
    def bytes(self) -> int:
        return sum(self._registered.values())

    def _cuda(self) -> Any:
        if self._runtime is None:
            self._runtime = torch.cuda.cudart()
        return self._runtime

    @staticmethod
    def _check(code: Any, what: str) -> None:
        if int(code) != 0:
            raise RuntimeError(
                f"CUDA cannot {what} of shared memory: cudaError {int(code)}; the limit of locked memory "
                "(ulimit -l) may be too low: raise it, or set rule.transport=ray"
            )
