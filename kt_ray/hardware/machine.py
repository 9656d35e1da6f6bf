"""A machine as data: its sockets, GPUs and instruction sets."""

from __future__ import annotations

from dataclasses import dataclass

from kt_ray.hardware.rates import Figure


@dataclass(frozen=True)
class Socket:
    """One NUMA node: its CPUs (logical ids this process may use), physical cores and memory.

    cpus lists one logical CPU per physical core first (`cores` of them), then their siblings in the
    same order, so that the first n entries are n different cores. Empty = unknown (other hardware).
    host: which host it is in; 0 is the driver's. node and cpus are numbers of that host.
    """

    node: int
    cpus: tuple[int, ...]
    cores: int
    memory_bytes: int
    host: int = 0


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    """One host, or several; gpus are those of host 0.

    source says where the figures come from ("this host", "rule amx_4gpu (nominal)", a file).

    isas is ordered best last. present is False for hardware that is only described, not there. rates
    are the figures of a hardware file (nominal.py), by name.
    """

    source: str
    sockets: tuple[Socket, ...]
    gpus: tuple[Gpu, ...]
    isas: tuple[str, ...]
    present: bool = True
    rates: tuple[tuple[str, Figure], ...] = ()

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 + max(socket.host for socket in self.sockets)

    def on(self, host: int) -> tuple[Socket, ...]:
        """Sockets of one host."""
        return tuple(socket for socket in self.sockets if socket.host == host)
