"""How many rows a data set holds, without tokenising it."""

from __future__ import annotations

from pathlib import Path

from kt_ray.config.schema import DataConfig
from kt_ray.data.readers import read_rows


def count_rows(data: DataConfig) -> int | None:
    """Training rows of `data`: those of its files (or the built-in set), less what is held out.

    Rows that later turn out too long (data.overflow=drop) are counted. None when no data are named.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    if data.builtin is not None:
        from kt_ray.demo import persona_path

        paths: list[str | Path] = [persona_path()]
    elif data.path is not None:
        paths = [data.path] if isinstance(data.path, str) else list(data.path)
    else:
        return None
    rows = sum(_count(Path(path).expanduser()) for path in paths)
    if data.limit is not None:
        rows = min(rows, data.limit)
    if data.eval_path is None:
        rows -= round(rows * data.eval_fraction)
    return rows


def _count(path: Path) -> int:
    if path.suffix.lower() == ".parquet" and path.is_file():
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    if path.suffix.lower() == ".jsonl" and path.is_file():
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    return sum(1 for _ in read_rows(path))
