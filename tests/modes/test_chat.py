"""What a person types."""

from __future__ import annotations

import io

import pytest

from kt_ray.modes.chat import _reader


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # Python's own in UTF-8 and in "C"
def test_bytes_that_are_no_text_end_no_chat(errors: str) -> None:
    read = _reader(io.TextIOWrapper(io.BytesIO("caf\xe9\n猫".encode() + b"\xe9\n"), "utf-8", errors))
    assert [read(), read(), read()] == ["café", "猫\ufffd", None]
    read = _reader(io.StringIO("a\n"))
    assert [read(), read()] == ["a", None]
