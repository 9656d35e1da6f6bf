"""train.log gets every line with its time, the console only warnings."""

from __future__ import annotations

import io
import logging
import os
import sys

from kt_ray.terminal import screen_console
from kt_ray.tracking.console import setup_logging


def test_log_file_has_timestamps_and_the_console_only_warnings(tmp_path, capsys):
    file = tmp_path / "train.log"
    for _ in range(2):  # a resumed run appends
        with setup_logging(file):
            logging.getLogger("kt_ray.train").info("quiet [bold]")
            logging.getLogger("kt_ray.train").warning("loud [bold]")
            logging.getLogger("elsewhere").warning("foreign")
    logging.getLogger("kt_ray.train").warning("after closing")
    lines = file.read_text().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("20") and lines[0].endswith("INFO kt_ray.train: quiet [bold]")
    assert lines[2].endswith("WARNING elsewhere: foreign")
    err = capsys.readouterr().err
    assert err.count("WARNING: loud [bold]") == 2 and "quiet" not in err and "foreign" not in err


def test_a_full_disk_is_said_once(tmp_path, capsys):
    (tmp_path / "train.log").symlink_to("/dev/full")
    with setup_logging(tmp_path / "train.log"):
        for _ in range(100):
            logging.getLogger("kt_ray.test").info("a record")
    told = capsys.readouterr().err
    assert told.count("No space left on device") == 1 and "Traceback" not in told


def test_a_full_disk_that_holds_standard_error_as_well_ends_nothing(tmp_path, monkeypatch):
    (tmp_path / "train.log").symlink_to("/dev/full")
    with setup_logging(tmp_path / "train.log"):
        monkeypatch.setattr(sys, "stderr", HungUp())
        logging.getLogger("kt_ray.test").info("a record")


class HungUp(io.StringIO):
    def write(self, text):
        raise OSError(5, "Input/output error")


def test_a_reader_or_a_terminal_that_is_gone_is_no_error(monkeypatch):
    """`python launch.py | tee log`, Ctrl-C: tee goes first."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        fresh = screen_console(highlight=False)
        for _ in range(3):
            fresh.print("a line")
            pipe.flush()  # what Python does at its end

    monkeypatch.setattr(sys, "stdout", HungUp())
    screen_console(highlight=False).print("a line")
