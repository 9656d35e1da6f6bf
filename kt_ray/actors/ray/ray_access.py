"""Who else on this host could lead a run to a cluster of theirs, or into ours.

Whoever has the token of a Ray cluster, or reaches a cluster without one, runs code as its user.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import secrets
import socket
import stat
from pathlib import Path

from kt_ray.config.schema import ClusterConfig
from kt_ray.errors import UserError

MODE = "RAY_AUTH_MODE"
_LISTENS = "0A"  # in /proc/net/tcp


def distrust(file: Path, address: str) -> str | None:
    """Why a file that names a cluster is not believed; None = only this user or root can have written it.

    Ray makes its directory writable for all, so others may rename what lies in it. They can neither make a
    file that is this user's nor change one, and whoever listens at an address of this host must be this user
    or root: an old file may name a port that is somebody else's by now.
    """
    try:
        found = file.lstat()
    except OSError as error:
        return f"{file} is not believed: {error.strerror}"
    doubts = [
        (not stat.S_ISREG(found.st_mode) or found.st_nlink != 1, "it is no plain file"),
        (not _trusted(found.st_uid), f"it belongs to {_name(found.st_uid)}"),
        (_others_write(found), "others may write it"),
    ]
    for place in file.absolute().parents:
        owner = place.stat().st_uid
        doubts.append((not _trusted(owner), f"{place} belongs to {_name(owner)}"))
    listening = [owner for owner in _listeners(address) if not _trusted(owner)]
    doubts.append((bool(listening), f"at {address} {', '.join(map(_name, listening))} listens"))
    reason = next((text for doubtful, text in doubts if doubtful), None)
    return reason and f"{file} is not believed: {reason}"


def _trusted(owner: int) -> bool:
    return owner in (os.geteuid(), 0)


def _name(owner: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(owner).pw_name}"
    return f"user {owner}"


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _of_one(found.st_gid)


def _of_one(group: int) -> bool:
    """Whether a group is root's, or the user's own: where each has one, files are made writable for it."""
    if group == 0:
        return True
    with contextlib.suppress(KeyError):
        return group == pwd.getpwuid(os.geteuid()).pw_gid and not grp.getgrgid(group).gr_mem
    return False


def _listeners(address: str, tables: tuple[str, ...] = ("/proc/net/tcp", "/proc/net/tcp6")) -> list[int]:
    """User ids of what listens at HOST:PORT, if that is on this host."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as trial:
            trial.bind((host, 0))
    except OSError:
        return []  # another host's
    owners = set()
    for table in tables:
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == int(port):
                    owners.add(int(fields[7]))
    return sorted(owners)


def token_file() -> Path:
    """Where Ray looks for the token, unless it is in RAY_AUTH_TOKEN."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def token_readers() -> str | None:
    """What is wrong with the token's file; None = only its owner reads it, or there is none."""
    file = token_file()
    try:
        found = file.stat()
    except OSError:
        return None
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return f"{file} has mode {stat.S_IMODE(found.st_mode):04o}: other users of this host may use it"
    return None


def token_to_start() -> list[str]:
    """Before a local cluster is started: it asks for a token, unless the user has decided otherwise.

    Returns:
        Lines for the user.
    """
    if MODE not in os.environ:
        _use_token()
    file = token_file()
    if os.environ[MODE].lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN") and not file.exists():
        # Ray would make its own readable for all.
        with contextlib.suppress(OSError):  # Ray says what is wrong
            file.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(secrets.token_hex(32))
    return guard_token()


def token_to_join(*, found: bool) -> list[str]:
    """Before a running cluster is joined, which was found on this host or named by the user.

    Returns:
        Lines for the user.
    """
    if found and MODE not in os.environ and (os.environ.get("RAY_AUTH_TOKEN") or token_file().is_file()):
        _use_token()
    return guard_token()


def _use_token() -> None:
    from ray._raylet import Config  # type: ignore[attr-defined]

    os.environ[MODE] = "token"
    Config.initialize("")  # it was read when Ray was imported


def guard_token() -> list[str]:
    """Have the token's file readable for this user only. Returns lines for the user."""
    open_before = token_readers()
    if open_before is None:
        return []
    try:
        token_file().chmod(0o600)
    except OSError as error:
        return [f"Ray token: {open_before}, and it cannot be changed: {error.strerror}"]
    return [f"Ray token: {open_before}. It is 0600 now; delete it for a new one if others are about"]


def token_off() -> bool:
    """Whether Ray is told to let everybody in who reaches it."""
    return os.environ.get(MODE, "").lower() == "disabled"


def check_open_dashboard(cluster: ClusterConfig) -> None:
    """Refuse a dashboard that other hosts reach without a token: its jobs run as this user.

    Raises:
        UserError: that.
    """
    if not (token_off() and cluster.dashboard):
        return
    from kt_ray.serve.access import is_loopback  # needs packages that Ray's dashboard has, too

    if not is_loopback(cluster.dashboard_host):
        raise UserError(
            "anybody who reaches the dashboard could run programs as this user",
            where=f"cluster.dashboard_host={cluster.dashboard_host}",
            observed=f"{MODE}=disabled",
            required="a token, or a dashboard on this host only",
            remedy=f"unset {MODE}, or set cluster.dashboard_host=127.0.0.1 or cluster.dashboard=false",
        )
