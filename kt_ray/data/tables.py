"""Rows of tables: parquet and arrow files through pyarrow, data sets of the hub through `datasets`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError

HUB = "hf://"


def is_hub(name: str) -> bool:
    """Whether a path names a data set of the Hugging Face hub: hf://owner/name[@revision]."""
    return name.startswith(HUB)


def read_hub(
    name: str, key: str = "data.path", split: str | None = None, subset: str | None = None
) -> Iterator[tuple[str, Any]]:
    """(where, row) of a data set of the hub, downloaded into the cache of `datasets` where it is not there.

    Args:
        name: hf://owner/name, hf://datasets/owner/name, with @revision at the end if one is meant; a local
            directory after hf:// is read by the same code.
        split: None = "train". subset: named configuration; None = the only one.

    Raises:
        UserError: `datasets` is not installed, or it cannot load this.
    """
    chosen = split or "train"
    rows = _from_hub(name, key, subset, chosen)
    for number, row in enumerate(rows, start=1):
        yield f"{name} [{chosen}], row {number}", dict(row)


def hub_splits(name: str, key: str = "data.eval_path", subset: str | None = None) -> list[str]:
    """Names of the splits of a data set of the hub.

    Raises:
        UserError: as `read_hub`.
    """
    return [str(split) for split in _from_hub(name, key, subset, None)]


def _from_hub(name: str, key: str, subset: str | None, split: str | None) -> Any:
    """The rows of a split, or without one the names of all splits."""
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            "data sets of the hub need the package datasets",
            where=f"{key}={name}",
            remedy="pip install 'kt_ray[hub]', or download its files and name them",
        ) from error
    target = name.removeprefix(HUB).removeprefix("datasets/")
    revision = None
    if "@" in target:
        target, _, revision = target.rpartition("@")
    option = "data.eval_split" if key == "data.eval_path" else "data.split"
    try:
        if split is None:
            return datasets.get_dataset_split_names(target, subset, revision=revision)
        return datasets.load_dataset(target, subset, split=split, revision=revision)
    except Exception as error:  # network, authorisation, unknown names and loading scripts: many kinds
        raise UserError(
            "the data set cannot be loaded from the hub",
            where=f"{key}={name}",
            observed=f"{type(error).__name__}: {clip(str(error), 200)}",
            required="a public data set, or one your HF_TOKEN may read"
            + (f", with split {split}" if split else ""),
            remedy=f"check the name, {option} and data.subset; without a network, download its files and "
            "name their directory",
        ) from error


def read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of a parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError) as error:
        raise _unreadable("parquet", path, number, error) from error


def read_arrow(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of an arrow file, as a stream (what `datasets` writes) or with a footer (Feather 2)."""
    import pyarrow as pa

    number = 0
    try:
        with pa.memory_map(str(path)) as source:
            footer = source.read(6) == b"ARROW1"
            source.seek(0)
            if footer:
                reader = pa.ipc.open_file(source)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                batches = iter(pa.ipc.open_stream(source))
            for batch in batches:
                for start in range(0, batch.num_rows, 1024):
                    for row in batch.slice(start, 1024).to_pylist():
                        number += 1
                        yield f"{path}, row {number}", row
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _unreadable("arrow", path, number, error) from error


def _unreadable(kind: str, path: Path, number: int, error: Exception) -> UserError:
    return UserError(
        f"the {kind} file cannot be read",
        where=f"{path}, after row {number}",
        observed=clip(str(error)),
        remedy="write it again, or convert it to .jsonl",
    )


def clip(text: str, width: int = 80) -> str:
    """Text on one line, cut to a width."""
    flat = " ".join(text.split())
    return flat if len(flat) <= width else flat[: width - 1] + "…"
