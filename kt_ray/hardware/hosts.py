"""Hardware of several hosts, and what its sockets are called. Pure functions.

Host 0 is the driver's: attention workers and GPUs are there. The sockets of all hosts hold experts.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError
from kt_ray.hardware.machine import Hardware, Socket


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
        sockets=copies(hardware.sockets, nodes),
    )


def copies(sockets: tuple[Socket, ...], hosts: int, first: int = 0) -> tuple[Socket, ...]:
    """`sockets` of one host once for each of `hosts` hosts, numbered from `first`."""
    return tuple(replace(socket, host=first + host) for host in range(hosts) for socket in sockets)


def described_hosts(hosts: Any, sockets: tuple[Socket, ...], file: Path) -> tuple[Socket, ...]:
    """Sockets of all hosts of a hardware file.

    Args:
        hosts: the file's key: a number of hosts that all have `sockets`; None = one.
        sockets: of one host.

    Raises:
        UserError: `hosts` is no positive integer.
    """
    if hosts is None:
        return sockets
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1:
        raise UserError(
            "hosts in the hardware file is not a number of hosts",
            where=str(file),
            observed=hosts,
            required="an integer of at least 1: hosts with these sockets (the GPUs are the first host's)",
            remedy="see conf/hardware/ for examples",
        )
    return copies(sockets, hosts)


def socket_name(hardware: Hardware, host: int, node: int) -> str:
    """What a socket's memory is called in a budget: "socket 1", with several hosts "host 2 socket 1"."""
    return f"host {host} socket {node}" if hardware.hosts > 1 else f"socket {node}"
