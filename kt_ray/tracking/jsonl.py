"""metrics.jsonl: one JSON object per line, always written."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from kt_ray.disk import only_warned, write_atomic
from kt_ray.parse import parse_json
from kt_ray.tracking.metrics import Value

FILE = "metrics.jsonl"
log = logging.getLogger(__name__)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Records of a metrics file, in order.

    A line that is no JSON object is left out: a process killed while writing leaves its last line
    incomplete. A missing file has no records.
    """
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def series(records: Iterable[Mapping[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, value) of one figure, in order of steps: finite values only, the last of a step counts.

    Figures that a skipped step was skipped for are not among them.
    """
    points: dict[int, float] = {}
    for record in records:
        if record.get("skipped") and key != "skipped":
            continue
        step, value = record.get("step"), record.get(key)
        if is_figure(step) and isinstance(step, int) and is_figure(value):
            points[step] = float(value)
    return sorted(points.items())


def is_figure(value: Any) -> TypeGuard[float]:
    """A finite number that a plot can hold; files that others wrote may have any."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def encode(step: int, metrics: Mapping[str, Value]) -> str:
    """One line, without its end. NaN and infinities, which JSON lacks, become null."""
    record: dict[str, Any] = {"step": step}
    for key, value in metrics.items():
        # numpy and torch scalars print as JSON only after .item().
        plain = value.item() if hasattr(value, "item") else value
        record[key] = None if isinstance(plain, float) and not math.isfinite(plain) else plain
    record["step"] = step
    return json.dumps(record, ensure_ascii=False)


class JsonlTracker:
    """Appends to `metrics.jsonl`; a line is on its way to the disk when `log` returns.

    Lines that a full disk refuses wait in memory and are written with the next one that it takes.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # None = before start or after finish
        self._file: BinaryIO | None = None  # opened with the first line that can be written
        self._kept: str | None = None  # what the file must hold before that; None = as it is
        self._unwritten = b""
        self._warned = False

    def start(self, run_dir: Path, config: Mapping[str, Any], *, first_step: int = 0) -> None:
        self._path = path = run_dir / FILE
        if path.exists():
            # Records of steps that will be run again go, so that the curve has each step once. The
            # whole file is replaced by renaming: a crash here leaves the old file or the new one.
            kept = [r for r in read_jsonl(path) if isinstance(r.get("step"), int) and r["step"] < first_step]
            self._kept = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in kept)
        self._try()

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        if self._path is None:
            raise ValueError("JsonlTracker.log before start or after finish")
        self._unwritten += encode(step, metrics).encode() + b"\n"
        self._try()

    def _try(self) -> None:
        try:
            self._write()
            self._warned = False
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written, its lines wait in memory: %s", FILE, error)
            self._warned = True

    def _write(self) -> None:
        assert self._path is not None
        if self._kept is not None:
            write_atomic(self._path, self._kept)
            self._kept = None
        if self._file is None:
            self._file = self._path.open("ab", buffering=0)
        elif not os.fstat(self._file.fileno()).st_nlink:  # removed, with the run directory; not another run's
            anew = self._path.open("xb", buffering=0)
            self._file.close()
            self._file = anew
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def artifact(self, path: Path) -> None:
        """Nothing: artifacts are in the run directory already."""

    def finish(self, status: str) -> None:
        if self._path is None:
            return
        lines = self._unwritten.count(b"\n")
        with only_warned(f"{self._path} cannot be written at the end, lines that are lost: {lines}"):
            self._write()
        self._path = None
        if self._file is not None:
            self._file.close()
            self._file = None
