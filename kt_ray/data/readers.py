"""Read rows from jsonl, json and parquet files; every fault is named by file and line or row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError

SUFFIXES = (".jsonl", ".json", ".parquet")


def read_rows(paths: str | Path | Sequence[str | Path], key: str = "data.path") -> Iterator[tuple[str, Any]]:
    """Yield (where, row) from one file or several, in order.

    Args:
        paths: a .jsonl, .json (a list of objects) or .parquet file, or a list of such files.
        key: the configuration key that named them, for messages.

    Raises:
        UserError: a file is missing, empty, of unknown kind or not parseable.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not listed:
        raise UserError(
            "the list of data files is empty", where=key, remedy=f"give {key} at least one file ({_kinds()})"
        )
    for name in listed:
        path = Path(name).expanduser()
        _check_file(path, key)
        count = 0
        for count, item in enumerate(_read(path), start=1):  # noqa: B007 (count is read after the loop)
            yield item
        if count == 0:
            raise UserError(
                "the data file holds no rows",
                where=str(path),
                remedy=f"put at least one row into it or change {key}",
            )


def _kinds() -> str:
    return ", ".join(SUFFIXES)


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in SUFFIXES)
        raise UserError(
            "a data path is a directory",
            where=f"{key}={path}",
            observed=f"a directory with {', '.join(inside[:5]) or 'no data file'}",
            required=f"a file ({_kinds()}) or a list of files",
            remedy=f"name the files: {key}=[file1,file2]",
        )
    if not path.is_file():
        raise UserError(
            "the data file does not exist",
            where=f"{key}={path}",
            observed=f"working directory {Path.cwd()}",
            remedy=f"correct {key}; relative paths count from the working directory",
        )
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(
            "unknown kind of data file",
            where=f"{key}={path}",
            observed=path.suffix or "no suffix",
            required=_kinds(),
            remedy="convert it, for example to one JSON object per line in a .jsonl file",
        )


def _read(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix.lower() == ".parquet":
        yield from _read_parquet(path)
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            "the data file is not UTF-8",
            where=str(path),
            observed=f"byte {error.object[error.start]:#04x} at offset {error.start}",
            remedy=f"convert it: iconv -f <encoding> -t utf-8 {path}",
        ) from error
    # A .json file of one object per line is common enough to be taken for what it is.
    if path.suffix.lower() == ".json" and not _looks_like_lines(text):
        yield from _read_json(path, text)
    else:
        yield from _read_jsonl(path, text)


def _looks_like_lines(text: str) -> bool:
    lines = [line for line in text.split("\n", 20) if line.strip()][:2]
    return len(lines) == 2 and all(
        line.strip().startswith("{") and line.strip().endswith("}") for line in lines
    )


def _read_jsonl(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    # split, not splitlines: JSON strings may hold U+2028 and the like unescaped
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(
                "invalid JSON",
                where=f"{path}, line {number}, column {error.colno}",
                observed=f"{error.msg}: {_clip(line)}",
                required="one JSON object per line",
                remedy="correct or delete that line (a JSON list belongs into a .json file)",
            ) from error
        yield f"{path}, line {number}", row


def _read_json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            "invalid JSON",
            where=f"{path}, line {error.lineno}, column {error.colno}",
            observed=error.msg,
            required="a list of objects",
            remedy="correct that line, or name the file .jsonl if it holds one object per line",
        ) from error
    if not isinstance(rows, list):
        hint = ""
        if isinstance(rows, dict):
            hint = f"an object with {_keys(rows)}"
        raise UserError(
            "a .json data file must hold a list of rows",
            where=str(path),
            observed=hint or type(rows).__name__,
            required="[{...}, {...}]",
            remedy="wrap the rows in a list",
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(
            "parquet files need pyarrow",
            where=str(path),
            remedy="pip install pyarrow, or convert the file to .jsonl",
        ) from error
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise UserError(
            "the parquet file cannot be read",
            where=f"{path}, after row {number}",
            observed=_clip(str(error)),
            remedy="write it again, or convert it to .jsonl",
        ) from error


def _keys(row: dict[str, Any]) -> str:
    return "keys " + (", ".join(map(str, list(row)[:8])) or "(none)")


def _clip(text: str, width: int = 80) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
