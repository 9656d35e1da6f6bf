"""Where rows come from: one data set or several with weights, read into conversations in one order."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from kt_ray.config.files import builtin_data
from kt_ray.config.schema import DataConfig
from kt_ray.data.bad_rows import BadRows
from kt_ray.data.data_files import HELD_OUT, KINDS, files_of, other_splits, unread_files
from kt_ray.data.formats import Parser, UnclearVerdict
from kt_ray.data.held_out_split import held_out_count
from kt_ray.data.readers import cannot_be_read, held_out_split, is_hub, parquet_rows, read_rows
from kt_ray.data.row_types import Conversation
from kt_ray.errors import UserError
from kt_ray.parse import parse_json

_MOST_NAMED = 8  # columns in a note
_BYTES_PER_TOKEN = 3  # of raw text, for a count that is rather too large


@dataclass(frozen=True)
class Source:
    """One data set."""

    path: str | list[str]  # as in DataConfig
    key: str = "data.path"  # the configuration key that names it
    weight: float = 1.0  # how often each row is taken per epoch
    # format, columns, split, subset, system, limit: as in DataConfig
    format: str = "auto"
    columns: dict[str, Any] = field(default_factory=dict)
    split: str | None = None
    subset: str | None = None
    system: str | None = None
    limit: int | None = None

    @property
    def name(self) -> str:
        first = self.path if isinstance(self.path, str) else self.path[0]
        more = "" if isinstance(self.path, str) or len(self.path) == 1 else f" and {len(self.path) - 1} more"
        return first.rstrip("/").rpartition("/")[2] + more


@dataclass(frozen=True)
class SourceRows:
    """What a source gave."""

    source: Source
    format: str  # of its rows, as named or as detected
    rows: list[Conversation]  # conversations, sample_ids counted on from the source before
    left_out: str = ""  # which bad rows were left out
    unread: Sequence[str] = ()  # columns, and keys of turns, that are not read

    def line(self) -> str:
        """One line of the report."""
        how = "detected" if self.source.format == "auto" else "as set"
        weight = f", weight {self.source.weight:g}" if self.source.weight != 1 else ""
        return f"{self.source.name}: {len(self.rows):,} rows, format {self.format} ({how}){weight}"

    def notes(self) -> list[str]:
        """What of the source is not trained on, though it is there."""
        notes = [self.left_out] if self.left_out else []
        if self.unread:
            names = _first([name or "the column without a name" for name in self.unread], _MOST_NAMED)
            notes.append(f"{self.source.name}: keys of rows that are not read: {names}")
        if self.format == "text" and self.source.system:
            notes.append(f"{self.source.name}: raw text has no turns, and so no system prompt (data.system)")
        return notes


def sources_of(data: DataConfig) -> list[Source]:
    """The data sets that a configuration names.

    Raises:
        UserError: it names none, or a subset of local files.
    """
    shared = {
        "format": data.format,
        "columns": dict(data.columns or {}),
        "split": data.split,
        "subset": data.subset,
        "system": data.system,
    }
    if data.sources is not None:
        sources = [
            Source(**{**shared, **source, "key": f"data.sources[{number}].path"})
            for number, source in enumerate(data.sources)
        ]
        # data.subset is that of those on the hub, if there are any.
        shares = any(map(_on_hub, sources))
        return [
            source if shares and "subset" not in own else _with_subset(source)
            for source, own in zip(sources, data.sources, strict=True)
        ]
    if data.path is not None:
        return [_with_subset(Source(data.path, **shared))]  # type: ignore[arg-type]
    if data.builtin == "demo":
        return [Source(str(builtin_data("demo")), system=data.system, format=data.format)]
    raise UserError(
        "no training data is named" if data.builtin is None else "no such built-in data set",
        where="data.path" if data.builtin is None else "data.builtin",
        observed=data.builtin,
        required="a file, a directory, hf://owner/name, or data.builtin=demo",
        remedy="set data.path=<file>, or take data=demo",
    )


def _with_subset(source: Source) -> Source:
    """The source, if it can have the subset that it names: of a local directory all files would be read."""
    if source.subset is not None and not _on_hub(source):
        key = source.key.removesuffix("path") + "subset"
        raise UserError(
            "subsets are those of a data set on the hub",
            where=f"{source.key}={source.name}",
            observed=f"{key}={source.subset}",
            required="hf://owner/name",
            remedy=f"set {key}=null, and name the files or the directory of the subset in {source.key}",
        )
    return source


def _on_hub(source: Source) -> bool:
    return any(map(is_hub, [source.path] if isinstance(source.path, str) else source.path))


def eval_source(data: DataConfig) -> Source:
    """The data set of data.eval_path, which must be set."""
    assert data.eval_path is not None
    return Source(
        data.eval_path,
        "data.eval_path",
        format=data.format,
        columns=dict(data.columns or {}),
        split=data.eval_split or HELD_OUT,
        # A subset is one of a certain data set's; another data set need not have it.
        subset=data.subset if data.eval_path == data.path else None,
        system=data.system,
    )


def require_files(data: DataConfig) -> None:
    """Looks whether the files of `data` are there; the hub is not asked.

    Raises:
        UserError: one is not, or is no data file.
    """
    _local_files(data)


def _local_files(data: DataConfig) -> list[Path]:
    """All that is trained or evaluated on and is not of the hub. Raises UserError: as `require_files`."""
    found: list[Path] = []
    for source in [*sources_of(data), *([] if data.eval_path is None else [eval_source(data)])]:
        for name in [source.path] if isinstance(source.path, str) else source.path:
            if not is_hub(name):
                split = held_out_split(name, source.key) if source.split == HELD_OUT else source.split
                found += files_of(Path(name).expanduser(), source.key, split)
    return found


def left_out(data: DataConfig) -> list[str]:
    """Notes about files of directories that are not read: those of unknown kinds, and those that are neither
    trained nor evaluated on because of their names alone: web-dev.jsonl need not be a split called dev."""
    evaluated = [data.eval_path] if isinstance(data.eval_path, str) else data.eval_path or []
    folders = [*map(Path, evaluated)]
    used = {file.resolve() for file in _local_files(data)}
    trained = [
        (source, name)
        for source in sources_of(data)
        for name in ([source.path] if isinstance(source.path, str) else source.path)
        if not is_hub(name)
    ]
    read = [*(name for _, name in trained), *(name for name in evaluated if not is_hub(name))]
    notes = []
    for folder in dict.fromkeys(Path(name).expanduser() for name in read):  # once, with several splits, too
        if unread := unread_files(folder):
            notes.append(f"{folder}: not read: {_first(unread)}; what is read: {KINDS}")
    for source, name in trained:
        if source.split is not None or Path(name) in folders:
            continue
        path = Path(name).expanduser()
        others = other_splits(path, source.key).items()
        named = [f"{file} ({split})" for file, split in others if (path / file).resolve() not in used]
        if named:
            notes.append(
                f"{name}: not trained on, since their names tell another split: {_first(named)}; to "
                f"train on them, list the files in {source.key}"
            )
    return notes


def _first(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def read_sources(
    sources: Sequence[Source], limit: int | None = None, skip_bad: bool = False
) -> list[SourceRows]:
    """Every source's rows, numbered through; all of one kind.

    Args:
        limit: rows over all sources at the most; None = all.
        skip_bad: leave out the rows that are none.

    Raises:
        UserError: a fault of a file, the faults of a source's rows, or rows of different kinds (answers,
            pairs, verdicts).
    """
    result: list[SourceRows] = []
    total = 0
    for source in sources:
        parser = Parser(source.format, source.system, source.columns)
        stops = [n for n in (source.limit, None if limit is None else limit - total) if n is not None]
        rows: list[Conversation] = []
        bad = BadRows(skip_bad)
        given = read_rows(source.path, source.key, split=source.split, subset=source.subset, on_bad=bad.add)
        for where, row in islice(given, min(stops) if stops else None):
            try:
                rows.append(parser(row, where, total + len(rows)))
            except UserError as fault:
                if isinstance(fault, UnclearVerdict) or (parser.format == "auto" and not skip_bad):
                    raise  # what the rows are is not known: nothing can be said of the others
                bad.add(fault)
        total += len(rows)
        left = bad.settle(len(rows), source.name)
        result.append(SourceRows(source, parser.format, rows, left, [*parser.unread]))
    kinds: dict[str, Conversation] = {}
    for part in result:
        for conversation in part.rows:
            kinds.setdefault(conversation.kind, conversation)
    if len(kinds) > 1:
        first, other, *_ = kinds.values()
        raise UserError(
            "rows of different kinds cannot be trained together",
            where=other.where,
            observed=f"{other.kind} here, {first.kind} in {first.where}",
            required="answers (sft), pairs or verdicts (kto), one of them in all sources",
            remedy="train them one after the other",
        )
    return result


def weighted(
    parts: Sequence[tuple[float, Sequence[Conversation]]], total: int, seed: int
) -> list[tuple[Conversation, int]]:
    """One epoch's rows: each part's as often as its weight says, evenly mixed, in a fixed order.

    A weight of 2.5 takes every row twice and a seeded half of them a third time. Copy k of a row has
    sample_id + k·total, so that its dropout differs from the first one's.

    Returns:
        (row, sample id of this copy).
    """
    placed: list[tuple[float, int, Conversation, int]] = []
    for number, (weight, rows) in enumerate(parts):
        whole = int(weight)
        rest = round((weight - whole) * len(rows))
        if rows and not whole and not rest:
            rest = 1  # a source that is named gives at least one row
        chosen: list[tuple[Conversation, int]] = []
        for copy in range(whole + (1 if rest else 0)):
            keep = rows if copy < whole else _some(rows, rest, seed)
            chosen += [(row, row.sample_id + copy * total) for row in keep]
        # spread evenly over [0, 1); ties by the order of the sources
        placed += [((i + 0.5) / len(chosen), number, row, sample) for i, (row, sample) in enumerate(chosen)]
    placed.sort(key=lambda item: item[:2])
    return [(row, sample) for _, _, row, sample in placed]


def _some(rows: Sequence[Conversation], count: int, seed: int) -> list[Conversation]:
    """A fixed choice of `count` rows, in source order."""

    def rank(index: int) -> bytes:
        return hashlib.sha256(f"{seed}:{rows[index].sample_id}".encode()).digest()

    chosen = sorted(sorted(range(len(rows)), key=rank)[:count])
    return [rows[i] for i in chosen]


def count_rows(data: DataConfig) -> int | None:
    """Training rows of `data` per epoch: what is not held out of its sources' rows, by their weights.

    Rows that later turn out too long (data.overflow=drop) are counted, and packed ones one by one. Raw text
    counts by its bytes, see `cuts_text`. None when no data are named, or they are on the hub: planning
    downloads nothing.

    Raises:
        UserError: a file is missing or cannot be read, or all rows would be held out.
    """
    if data.builtin is None and data.path is None and data.sources is None:
        return None
    total, taken = 0, 0.0
    for source in sources_of(data):
        paths = [source.path] if isinstance(source.path, str) else source.path
        if any(is_hub(path) for path in paths):
            return None
        whole = sum(rows_in(path, source.key, source.split) for path in paths)
        limits = [source.limit, None if data.limit is None else data.limit - total]
        count = min([whole, *(limit for limit in limits if limit is not None)])
        total += count
        pieces = 0.0
        if whole and data.overflow == "truncate" and _is_text(source):
            size = sum(path.stat().st_size for path in _files(source))
            pieces = math.ceil(size / (_BYTES_PER_TOKEN * data.max_length)) * count / whole
        taken += source.weight * max(count, pieces)
    held_out = held_out_count(data.eval_fraction, total) if data.eval_path is None else 0
    return round(taken * (total - held_out) / max(1, total))


def cuts_text(data: DataConfig) -> bool:
    """Whether rows are cut out of raw text, so that `count_rows` guesses how many."""
    return data.overflow == "truncate" and any(map(_is_text, sources_of(data)))


def _is_text(source: Source) -> bool:
    """Whether a source's rows are raw text, as its format or its first row says."""
    parser = Parser(source.format, source.system, source.columns)
    # What is wrong with the row is told by who reads it.
    with contextlib.suppress(UserError, ValueError, OSError, StopIteration):
        parser(_first_row(_files(source)[0]), source.name, 0)
    return parser.format == "text"


def _files(source: Source) -> list[Path]:
    paths = [source.path] if isinstance(source.path, str) else source.path
    return [file for path in paths for file in files_of(Path(path).expanduser(), source.key, source.split)]


def _first_row(path: Path) -> Any:
    if path.suffix.lower() != ".jsonl":
        return next(read_rows(path))[1]
    with path.open(encoding="utf-8-sig") as file:  # not the whole of it
        return parse_json(next(line for line in file if line.strip()))


def rows_in(path: str, key: str, split: str | None) -> int:
    """Rows of a file, or of a directory's split; parquet and jsonl files are not parsed for it.

    Raises:
        UserError: as `count_rows`.
    """
    return sum(_count(file, key) for file in files_of(Path(path).expanduser(), key, split))


def _count(path: Path, key: str) -> int:
    if path.suffix.lower() == ".parquet":
        return parquet_rows(path)
    if path.suffix.lower() == ".jsonl":
        try:
            with path.open("rb") as file:
                return sum(1 for line in file if line.strip())
        except OSError as error:
            raise cannot_be_read(path, error) from error
    return sum(1 for _ in read_rows(path, key))
