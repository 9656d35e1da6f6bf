"""Read rows from files, directories and the Hugging Face hub; every fault names file and line or row.

pyarrow reads parquet and arrow files, the package `datasets` the hub.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_ray.data.data_files import (
    HELD_OUT,
    KINDS,
    SPLITS,
    TABLES,
    TEXT_SUFFIXES,
    files_of,
    split_key,
    splits_of,
)
from kt_ray.data.turns import keys_of
from kt_ray.disk import content_of_file
from kt_ray.errors import UserError
from kt_ray.parse import parse_json
from kt_ray.terminal import shortened

HUB = "hf://"
_SHOWN = 80  # characters of what is wrong
_BETWEEN = re.compile(r"[\s,]*")  # rows of a list


def read_rows(
    paths: str | Path | Sequence[str | Path],
    key: str = "data.path",
    *,
    split: str | None = None,
    subset: str | None = None,
    on_bad: Callable[[UserError], None] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield (where, row) from one file or several, in order.

    Args:
        paths: files, directories (their data files by name) and hub names (hf://owner/name), or one of them.
        key: the configuration key that named them, for messages.
        split: of a data set of several splits (hub, directories); None = "train". HELD_OUT = of several
            the first one there is of "validation" and "test"; where there is one only, that one.
        subset: of a hub data set.
        on_bad: told of each line that is no JSON, which is left out; None = the first one is raised.

    Raises:
        UserError: a file is missing, empty, of unknown kind or not parseable.
    """
    listed = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not listed:
        raise UserError(
            "the list of data files is empty", where=key, remedy=f"give {key} at least one file ({KINDS})"
        )
    told: list[UserError] = []

    def tell(fault: UserError) -> None:
        assert on_bad is not None
        told.append(fault)
        on_bad(fault)

    for name in map(str, listed):
        chosen = held_out_split(name, key, subset) if split == HELD_OUT else split
        if is_hub(name):
            items = _read_hub(name, key, chosen or "train", subset)
        else:
            files = files_of(Path(name).expanduser(), key, chosen)
            items = itertools.chain.from_iterable(_read(file, on_bad and tell) for file in files)
        empty, told[:] = True, []
        for item in items:
            empty = False
            yield item
        if empty and not told:
            raise UserError(
                "the data file holds no rows",
                where=name,
                remedy=f"put at least one row into it or change {key}",
            )


def held_out_split(name: str, key: str, subset: str | None = None) -> str | None:
    """Which split of a data set its held-out rows are; None = it is a file, or has no splits.

    Raises:
        UserError: it has several, and none of them is called validation or test.
    """
    path = Path(name).expanduser()
    splits = _from_hub(name, key, subset, None) if is_hub(name) else splits_of(path, key)
    if splits is None:
        return None
    if len(splits) == 1:
        return splits[0] or None
    for split in ("validation", "test"):
        match = next((name for name in splits if SPLITS.get(name, name) == split), None)
        if match is not None:
            return match
    raise UserError(
        "which of its splits is held out is not known",
        where=f"{key}={name}",
        observed=", ".join(split or "files whose names tell none" for split in splits),
        required="a split called validation or test",
        remedy=f"set {split_key(key)}, or name the files",
    )


def _read(path: Path, on_bad: Callable[[UserError], None] | None) -> Iterator[tuple[str, Any]]:
    suffix = path.suffix.lower()
    # Else it is a text as any other, which a .txt file of a page is, too.
    known = ("a Git LFS pointer", "zeros", *(() if suffix in TEXT_SUFFIXES else ("a web page",)))
    if (content := content_of_file(path)).startswith(known):
        pull = "run git lfs pull in that directory, or " if "LFS" in content else ""
        raise UserError(
            "the data file is not what its name says",
            where=str(path),
            observed=content,
            remedy=f"{pull}download the file again",
        )
    if suffix in TABLES:
        yield from _read_table(path, suffix[1:])
        return
    try:
        if wide := _wide_encoding(path):
            raise _not_utf8(path, wide, wide)
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise _not_utf8(path, byte, "ENCODING") from error
    except OSError as error:
        raise cannot_be_read(path, error) from error
    before, zero, after = text.partition("\0")
    if zero and not suffix.startswith(".json"):  # there it is no JSON, and its line is told
        raise UserError(
            "the data file holds zero bytes, which no text has",
            where=str(path),
            observed=f"{1 + after.count(zero):,}, the first in line {1 + before.count(chr(10))}",
            remedy="write or download it again: a write that was interrupted may leave them",
        )
    # A .json file of one object per line is common enough to be taken for what it is.
    if suffix in TEXT_SUFFIXES:
        if text.strip():
            yield str(path), {"text": text}
    elif suffix in (".csv", ".tsv"):
        yield from _read_csv(path, text, "," if suffix == ".csv" else "\t")
    elif suffix == ".json" and not _looks_like_lines(text):
        yield from _read_json(path, text)
    else:
        yield from _read_jsonl(path, text, on_bad)


def _wide_encoding(path: Path) -> str:
    """UTF-16 or UTF-32, as a file's first bytes tell; "" = neither. What is in it may be valid UTF-8."""
    with path.open("rb") as file:
        start = file.read(4)
    if start in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    zeros = [byte == 0 for byte in start]
    wide = {"UTF-16LE": [False, True, False, True], "UTF-16BE": [True, False, True, False]}
    return next((name for name, pattern in wide.items() if zeros == pattern), "")


def _not_utf8(path: Path, observed: str, encoding: str) -> UserError:
    content = content_of_file(path)
    beside = path.with_name(f"utf8_{path.name}")
    convert = shlex.join(["iconv", "-f", encoding, "-t", "utf-8", "-o", str(beside), str(path)])
    remedy = f"name the file after what it is, or unpack it ({KINDS})"
    return UserError(
        "the data file is not UTF-8",
        where=str(path),
        observed=content or observed,
        remedy=remedy if content else f"convert it ({convert}), and name the new file",
    )


def cannot_be_read(path: Path, error: OSError) -> UserError:
    """A data file that is there, and gives nothing."""
    observed = error.strerror or str(error)
    remedy = "check its permissions and its disk"
    return UserError("the data file cannot be read", where=str(path), observed=observed, remedy=remedy)


def _looks_like_lines(text: str) -> bool:
    lines = [line for line in text.split("\n", 20) if line.strip()][:2]
    return len(lines) == 2 and all(
        line.strip().startswith("{") and line.strip().endswith("}") for line in lines
    )


def _read_jsonl(
    path: Path, text: str, on_bad: Callable[[UserError], None] | None
) -> Iterator[tuple[str, Any]]:
    # split, not splitlines: JSON strings may hold U+2028 and the like unescaped
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, unique=True)
        except ValueError as error:
            column = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            fault = UserError(
                "invalid JSON",
                where=f"{path}, line {number}{column}",
                observed=f"{getattr(error, 'msg', error)}: {shortened(line, _SHOWN)}",
                required="one JSON object per line",
                remedy="correct or delete that line (a JSON list belongs into a .json file)",
            )
            if on_bad is None:
                raise fault from error
            on_bad(fault)
            continue
        if isinstance(row, list) and number == 1 and text.count("\n", 0, len(text.rstrip())) == 0:
            raise UserError(
                "a .jsonl data file must hold a row per line",
                where=str(path),
                observed=f"one list: {shortened(line, _SHOWN)}",
                required="one JSON object per line",
                remedy=f"name it {path.with_suffix('.json').name}: a JSON list belongs into a .json file",
            )
        yield f"{path}, line {number}", row


def _read_json(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    if not text.strip():
        return
    try:
        rows = parse_json(text, unique=True)
    except ValueError as error:
        at = f", line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            "invalid JSON",
            where=f"{path}{at or _row_at_fault(text)}",
            observed=getattr(error, "msg", error),
            required="a list of objects",
            remedy="correct that line, or name the file .jsonl if it holds one object per line",
        ) from error
    if not isinstance(rows, list):
        an_object = isinstance(rows, dict)
        name = _wrapping(rows)
        if an_object and name is None and "\n" not in text.strip():  # one object per line, and one of them
            yield f"{path}, line 1", rows
            return
        raise UserError(
            "a .json data file must hold a list of rows",
            where=str(path),
            observed=f"an object with {keys_of(list(rows)[:8])}" if an_object else type(rows).__name__,
            required="[{...}, {...}]",
            remedy="wrap the rows in a list" if name is None else f'keep only the list under "{name}"',
        )
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _wrapping(value: Any) -> str | None:
    """The key under which an object holds nothing but a list of rows, which turns are not."""
    if not isinstance(value, dict) or len(value) != 1:
        return None
    ((name, rows),) = value.items()
    listed = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    return str(name) if listed and not any("role" in row or "from" in row for row in rows) else None


def _row_at_fault(text: str) -> str:
    """Of a list that parses but holds what no row can: ", row 3"; "" where it cannot be told."""
    decoder, at = json.JSONDecoder(), text.find("[") + 1
    for number in itertools.count(1) if text.lstrip().startswith("[") else ():
        between = _BETWEEN.match(text, at)
        assert between is not None
        at = between.end()
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            break
        try:
            parse_json(text[at:end], unique=True)
        except ValueError:
            return f", row {number}"
        at = end
    return ""


def _read_csv(path: Path, text: str, delimiter: str) -> Iterator[tuple[str, Any]]:
    """Rows under the names of the first line; an empty cell is a missing value."""
    csv.field_size_limit(1 << 30)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    number = 0
    try:
        names = reader.fieldnames or []
        if len(set(names)) != len(names):
            raise csv.Error("two columns of the same name")
        if len(names) == 1 and re.search(r"[;\t|]", names[0]):
            raise UserError(
                "the columns of a CSV file are parted by another character",
                where=f"{path}, line 1",
                observed=shortened(names[0], _SHOWN),
                required="commas in .csv, tabs in .tsv",
                remedy="save it with commas, or with tabs as .tsv",
            )
        for row in reader:
            number += 1
            if None in row or None in row.values():
                raise csv.Error(f"{'more' if None in row else 'fewer'} cells than the {len(names)} columns")
            yield f"{path}, row {number}", {name: value or None for name, value in row.items()}
    except csv.Error as error:
        raise UserError(
            "invalid CSV",
            where=f"{path}, line {reader.line_num}",
            observed=str(error),
            required="column names in the first line, quoted cells where they hold line breaks",
            remedy="correct that line, or write the rows as .jsonl",
        ) from error


def is_hub(name: str) -> bool:
    """Whether a path names a data set of the Hugging Face hub: hf://owner/name[@revision]."""
    return name.startswith(HUB)


def _read_hub(name: str, key: str, split: str, subset: str | None) -> Iterator[tuple[str, Any]]:
    """Rows of a split of hf://owner/name[@revision], downloaded into the cache of `datasets` where it is not
    there; hf://datasets/owner/name is the same, and `datasets` also reads a local directory after hf://.
    """
    for number, row in enumerate(_from_hub(name, key, subset, split), start=1):
        yield f"{name} [{split}], row {number}", _own_keys(row)


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
    try:
        if split is None:
            return datasets.get_dataset_split_names(target, subset, revision=revision)
        return datasets.load_dataset(target, subset, split=split, revision=revision)
    except Exception as error:  # network, authorisation, unknown names and loading scripts: many kinds
        raise UserError(
            "the data set cannot be loaded from the hub",
            where=f"{key}={name}",
            observed=f"{type(error).__name__}: {shortened(str(error), 200)}",
            required="a public data set, or one your HF_TOKEN may read"
            + (f", with split {split}" if split else ""),
            remedy=f"check the name, {split_key(key)} and data.subset; without a network, download its "
            "files and name their directory",
        ) from error


def _read_table(path: Path, kind: str) -> Iterator[tuple[str, Any]]:
    """Rows of a parquet file, or of an arrow file: a stream (what `datasets` writes) or with a footer
    (Feather 2)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with contextlib.ExitStack() as files:
            if kind == "parquet":
                batches = files.enter_context(pq.ParquetFile(path)).iter_batches(batch_size=1024)
            else:
                source = files.enter_context(pa.memory_map(str(path)))
                footer = source.read(6) == b"ARROW1"
                source.seek(0)
                if footer:
                    reader = pa.ipc.open_file(source)
                    batches = map(_validated, map(reader.get_batch, range(reader.num_record_batches)))
                else:
                    batches = map(_validated, pa.ipc.open_stream(source))
            for batch in batches:
                names = Counter(batch.schema.names)
                if twice := next((name for name in names if names[name] > 1), None):
                    raise ValueError(f"two columns of the name {twice}")
                for start in range(0, batch.num_rows, 1024):
                    for row in batch.slice(start, 1024).to_pylist():
                        number += 1
                        yield f"{path}, row {number}", _own_keys(row)
    except (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, RecursionError) as error:
        raise _damaged_table(path, kind, f", after row {number}", error) from error


def _own_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """A table's row without the nulls of objects inside it: keys that only other rows' objects have."""

    def own(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: own(part) for key, part in value.items() if part is not None}
        return [own(part) for part in value] if isinstance(value, list) else value

    return {name: own(value) for name, value in row.items()}


def parquet_rows(path: Path) -> int:
    """Rows that a parquet file's footer promises.

    Raises:
        UserError: it has none that can be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            return int(file.metadata.num_rows)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged_table(path, "parquet", "", error) from error


def _damaged_table(path: Path, kind: str, after: str, error: Exception) -> UserError:
    return UserError(
        f"the {kind} file cannot be read",
        where=f"{path}{after}",
        observed=shortened(str(error), _SHOWN),
        remedy="write it again, or convert it to .jsonl",
    )


def _validated(batch: Any) -> Any:
    """A record batch whose offsets stay inside its buffers; a crafted one would end the process."""
    batch.validate(full=True)
    return batch
