"""Other users of the host: which file is believed, who reads the token, who may run programs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kt_ray.actors.ray import ray_access, ray_address
from kt_ray.actors.ray.ray_access import (
    check_open_dashboard,
    distrust,
    guard_token,
    token_file,
    token_off,
    token_readers,
    token_to_join,
    token_to_start,
)
from kt_ray.actors.ray.ray_address import running_cluster, started_here
from kt_ray.config.schema import ClusterConfig
from kt_ray.doctor import software_checks as software
from kt_ray.doctor.check import FAIL, PASS, WARN
from kt_ray.errors import UserError

Give = Callable[[Path], None]
STRANGER = 54321


@pytest.fixture
def file(tmp_path: Path, listening: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `ray start` leaves it, in a directory that Ray has made writable for all."""
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    folder = tmp_path / "ray"
    folder.mkdir()
    folder.chmod(0o777)
    file = folder / "ray_current_cluster"
    file.write_text(listening)
    file.chmod(0o644)
    assert ray_address.address_file() == file
    return file


@pytest.fixture
def give(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Make a path another user's: by root, or by becoming another user to what asks."""

    def away(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr(ray_access, "_trusted", lambda owner: owner == 0)

    return away


def refused(file: Path, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the run nor doctor takes it, and both say why."""
    found = started_here(file)
    assert isinstance(found, str) and why in found and str(file) in found
    caplog.clear()
    assert running_cluster("auto") is None
    assert why in caplog.text and "cluster.address=HOST:PORT" in caplog.text
    check = software.ray_cluster(ClusterConfig())
    assert check.status == WARN and why in check.observed and check.remedy


def test_the_users_own_file_is_believed(file: Path, listening: str) -> None:
    found = running_cluster("auto")
    assert found is not None and found.address == listening
    assert software.ray_cluster(ClusterConfig()).status == PASS


def test_a_file_of_another_user(file: Path, give: Give, caplog: pytest.LogCaptureFixture) -> None:
    give(file)
    refused(file, "belongs to user", caplog)


def test_a_directory_of_another_user(file: Path, give: Give, caplog: pytest.LogCaptureFixture) -> None:
    give(file.parent)
    refused(file, "belongs to user", caplog)


def test_a_file_that_others_write(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.chmod(0o646)
    refused(file, "others may write it", caplog)


def test_a_file_that_a_group_writes(
    file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.chmod(0o664)
    assert distrust(file, "192.0.2.1:6379") is None  # the user's own group, as with umask 002
    monkeypatch.setattr(ray_access, "_of_one", lambda group: False)
    refused(file, "others may write it", caplog)


def test_a_link(file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(file, "no plain file", caplog)
    file.unlink()
    os.link(tmp_path / "elsewhere", file)
    refused(file, "no plain file", caplog)


def test_another_user_listens_at_an_old_address(
    file: Path, listening: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ray_access._listeners(listening) == [os.geteuid()]
    assert ray_access._listeners("192.0.2.1:6379") == []  # another host's
    real = ray_access._listeners
    monkeypatch.setattr(ray_access, "_listeners", lambda address: [STRANGER])
    refused(file, f"user {STRANGER} listens", caplog)
    table = file.parent / "tcp"
    port = int(listening.rpartition(":")[2])
    lines = [f"0: 0100007F:{port:04X} 00000000:0000 {state} 0:0 0:0 0 {uid}" for state, uid in
             (("01", 7), ("0A", STRANGER), ("0A", 8))]  # fmt: skip
    table.write_text("\n".join(["head", *lines]))
    assert real(listening, (str(table), "/none")) == [8, STRANGER]


def test_the_token_is_for_its_user_only(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "home" / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(place))
    assert token_file() == place and guard_token() == [] and not place.exists()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_to_start() == [] and not place.exists()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    before = os.umask(0)
    try:
        assert token_to_start() == []
    finally:
        os.umask(before)
    token = place.read_text()
    assert stat.S_IMODE(place.stat().st_mode) == 0o600 and len(token) >= 64
    place.chmod(0o644)
    assert "0644" in (token_readers() or "")
    check = software.ray_access(ClusterConfig())
    assert check.status == WARN and "0644" in check.observed
    (line,) = token_to_join(found=False)
    assert "0644" in line and "0600" in line
    assert stat.S_IMODE(place.stat().st_mode) == 0o600 and place.read_text() == token
    assert software.ray_access(ClusterConfig()).status == PASS


def test_no_dashboard_for_everybody(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = ClusterConfig(dashboard_host="0.0.0.0")
    check_open_dashboard(beyond)
    monkeypatch.setenv("RAY_AUTH_MODE", "Disabled")
    assert token_off()
    check_open_dashboard(ClusterConfig())
    check_open_dashboard(ClusterConfig(dashboard_host="0.0.0.0", dashboard=False))
    with pytest.raises(UserError, match=r"RAY_AUTH_MODE=disabled.*dashboard_host=127\.0\.0\.1"):
        check_open_dashboard(beyond)
    assert software.ray_access(beyond).status == FAIL
    assert software.ray_access(ClusterConfig()).status == WARN
    assert software.ray_access(ClusterConfig("local")).status == PASS


def test_a_local_cluster_asks_for_a_token_whatever_ray_would_do(tmp_path: Path) -> None:
    """In a process of its own: it sets how Ray starts."""
    text = """
import os
from kt_ray.actors.ray import ray_access, ray_cluster
from ray._raylet import AuthenticationMode, get_authentication_mode
ray_access.token_to_join(found=True)
assert get_authentication_mode() != AuthenticationMode.TOKEN  # there is no token to send
ray_access.token_to_start()
assert get_authentication_mode() == AuthenticationMode.TOKEN and os.environ["RAY_AUTH_MODE"] == "token"
assert ray_access.token_file().stat().st_mode & 0o777 == 0o600
"""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    clean["RAY_AUTH_TOKEN_PATH"] = str(tmp_path / "token")
    subprocess.run([sys.executable, "-c", text], env=clean, timeout=120, check=True)
