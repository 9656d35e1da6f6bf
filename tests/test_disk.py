"""Files are replaced whole or not at all; where the cache is."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from kt_ray.disk import cache_root, free_bytes, write_atomic


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    write_atomic(file, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("KT_RAY_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("KT_RAY_CACHE")
    assert cache_root() == Path.home() / ".cache" / "kt_ray"


def test_a_file_system_that_tells_no_size_has_room(tmp_path):
    """/proc tells none, as a tmpfs without a limit: a write says what it lacks."""
    assert free_bytes(Path("/proc/absent")) == math.inf
    assert 0 < free_bytes(tmp_path / "absent") < math.inf


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_users_umask_holds(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "env.json", "{}")
    finally:
        os.umask(before)
    assert (tmp_path / "env.json").stat().st_mode & 0o777 == mode
