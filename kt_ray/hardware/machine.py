"""A machine as data: its sockets, GPUs and instruction sets; and several hosts of one kind.

Host 0 is the driver's. The sockets of all hosts hold experts; attention workers are on host 0 or on all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kt_ray.errors import UserError
from kt_ray.hardware.rates import Figure


@dataclass(frozen=True)
class Socket:
    """One NUMA node: its CPUs (logical ids this process may use), physical cores and memory.

    cpus lists one logical CPU per physical core first (`cores` of them), then their siblings in the
    same order, so that the first n entries are n different cores. Empty = unknown (other hardware).
    host: which host it is in; 0 is the driver's. node and cpus are numbers of that host. pinned: whether
    threads may keep to a CPU each. Where a quota gives this process less time than its CPUs have, others run
    on them as well: two containers would both take the first ones.
    """

    node: int
    cpus: tuple[int, ...]
    cores: int
    memory_bytes: int
    host: int = 0
    pinned: bool = True


# Of a GPU's memory that a plan leaves free: gaps between blocks of torch's allocator, and what a display or
# another program holds.
GPU_FREE = 0.05


@dataclass(frozen=True)
class Gpu:
    """One GPU. index: its number i in "cuda:i". memory_bytes: what CUDA gives of it, without the driver's own
    part: 23.6 GiB of a 24 GB card. uuid: NVIDIA's name of this very card; "" = described, or not known.
    cap: bytes of it that the run may use (rule.gpu_memory); 0 = all.
    """

    index: int
    name: str
    memory_bytes: int
    uuid: str = ""
    cap: int = 0

    @property
    def room(self) -> int:
        """Bytes that a plan may fill."""
        return int(self.usable * (1 - GPU_FREE))

    @property
    def usable(self) -> int:
        """Bytes that the run may use."""
        return min(self.memory_bytes, self.cap) if self.cap else self.memory_bytes


@dataclass(frozen=True)
class Hardware:
    """One host, or several alike; gpus are those of each host that has attention workers (host 0 has).

    source says where the figures come from ("this host", "rule amx_4gpu (nominal)", a file).

    isas is ordered best last; forced_isa is the one that KT_RAY_ISA makes of rule.experts.isa=auto, if any.
    present is False for hardware that is only described, not there. rates are the figures of a hardware file
    (nominal.py), by name; rates_file the file with measured ones that it names instead. gpu_fault: what
    nvidia-smi says where it is there and fails, so that gpus are not known; sliced a card that is cut into
    slices (MIG), so that none is planned for.
    """

    source: str
    sockets: tuple[Socket, ...]
    gpus: tuple[Gpu, ...]
    isas: tuple[str, ...]
    present: bool = True
    rates: tuple[tuple[str, Figure], ...] = ()
    rates_file: str = ""
    gpu_fault: str = ""
    sliced: str = ""
    forced_isa: str = ""

    @property
    def best_isa(self) -> str:
        return self.isas[-1] if self.isas else "reference"

    @property
    def auto_isa(self) -> str:
        """What rule.experts.isa=auto takes."""
        return self.forced_isa or self.best_isa

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return 1 + max(socket.host for socket in self.sockets)

    @property
    def cpus(self) -> tuple[int, ...]:
        """Of the driver's host: one of each core first."""
        sockets = self.on(0)
        first = [cpu for socket in sockets for cpu in socket.cpus[: socket.cores]]
        return (*first, *(cpu for socket in sockets for cpu in socket.cpus[socket.cores :]))

    def on(self, host: int) -> tuple[Socket, ...]:
        """Sockets of one host."""
        return tuple(socket for socket in self.sockets if socket.host == host)


def with_hosts(hardware: Hardware, nodes: int) -> Hardware:
    """Hardware of `nodes` hosts: the first of those described, or one host so many times over.

    Raises:
        UserError: several hosts are described, but fewer than `nodes`.
    """
    if hardware.hosts == nodes:
        return hardware
    if hardware.hosts > nodes:
        kept = tuple(socket for socket in hardware.sockets if socket.host < nodes)
        return replace(hardware, sockets=kept)
    if hardware.hosts > 1:
        raise UserError(
            "rule.nodes asks for more hosts than are described",
            where=hardware.source,
            observed=f"{hardware.hosts} hosts",
            required=f"rule.nodes={nodes}",
            remedy=f"set rule.nodes={hardware.hosts}, or describe more hosts (key hosts)",
        )
    return replace(
        hardware,
        source=f"{nodes} hosts like {hardware.source}",
        sockets=on_hosts(hardware.sockets, nodes),
    )


def on_hosts(sockets: tuple[Socket, ...], hosts: int) -> tuple[Socket, ...]:
    """`sockets` of one host once for each of `hosts` hosts."""
    return tuple(replace(socket, host=host) for host in range(hosts) for socket in sockets)


def gpu_name(host: int, device: str) -> str:
    """What a GPU's memory is called in a budget: "cuda:1" on the driver's host, else "host 2 cuda:1"."""
    return f"host {host} {device}" if host else device


def socket_name(hardware: Hardware, host: int, node: int) -> str:
    """What a socket's memory is called in a budget: "socket 1", with several hosts "host 2 socket 1"."""
    return f"host {host} socket {node}" if hardware.hosts > 1 else f"socket {node}"
