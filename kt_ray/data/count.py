"""How many rows a data set holds, without tokenising it."""

from __future__ import annotations

from pathlib import Path

from kt_ray.config.schema import DataConfig
from kt_ray.data.readers import files_of, read_rows
from kt_ray.data.sources import Source, sources_of
from kt_ray.data.tables import is_hub


def count_rows(data: DataConfig) -> int | None:
    """Training rows of `data` per epoch: those of its sources by their weights, less what is held out.

    Rows that later turn out too long (data.overflow=drop) are counted, and packed ones one by one. None
    when no data are named, or they are on the hub: planning downloads nothing.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    if data.builtin is None and data.path is None and data.sources is None:
        return None
    rows = 0.0
    for source in sources_of(data):
        paths = [source.path] if isinstance(source.path, str) else source.path
        if any(is_hub(path) for path in paths):
            return None
        count = sum(_count(file, source) for path in paths for file in _files(path, source))
        rows += source.weight * (count if source.limit is None else min(count, source.limit))
    total = round(rows)
    if data.limit is not None:
        total = min(total, data.limit)
    if data.eval_path is None:
        total -= round(total * data.eval_fraction)
    return total


def _files(path: str, source: Source) -> list[Path]:
    return files_of(Path(path).expanduser(), source.key, source.split)


def _count(path: Path, source: Source) -> int:
    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    if path.suffix.lower() == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    return sum(1 for _ in read_rows(path, source.key))
