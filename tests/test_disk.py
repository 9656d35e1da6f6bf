"""Files are replaced whole or not at all."""

from __future__ import annotations

import os

import pytest

from kt_ray.disk import write_atomic


def test_files_are_replaced_whole(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    write_atomic(file, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
