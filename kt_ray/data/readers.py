"""Read rows from files, directories and the Hugging Face hub; every fault names file and line or row.

pyarrow reads parquet and arrow files, the package `datasets` the hub.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import glob
import io
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kt_ray.data.turns import keys_of
from kt_ray.disk import content_of_file, stays_inside
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, kind_of_file, parse_json, read_json
from kt_ray.terminal import shortened

HUB = "hf://"
TABLES = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".json", *TABLES, ".csv", ".tsv")
TEXT_SUFFIXES = (".txt", ".md")
KINDS = ", ".join((*SUFFIXES, *TEXT_SUFFIXES))
_SAVE = "save the data set again with save_to_disk"
_SHOWN = 80  # characters of what is wrong
_PLAIN = re.compile(r"[\w./@-]+")
_BETWEEN = re.compile(r"[\s,]*")  # rows of a list
HELD_OUT = "validation or test"  # as a split: see read_rows


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


def files_of(path: Path, key: str = "data.path", split: str | None = None) -> list[Path]:
    """The data files that a path stands for: itself, or those of a directory, by name.

    A directory that `datasets` saved gives the files of its split in their order. Any other one gives its
    files with known suffixes, all of the same kind of place: directories inside it are entered too.

    Raises:
        UserError: nothing there that can be read.
    """
    if not path.is_dir():
        if path.exists() and not path.is_file():
            raise UserError(
                "the data file is no regular file",
                where=f"{key}={path}",
                observed=kind_of_file(path),
                required=KINDS,
                remedy=f"write its rows into a file, and name that in {key}",
            )
        if not path.is_file():
            observed = f"working directory {Path.cwd()}"
            remedy = (
                f"correct {key}; relative paths count from the working directory, a data set of the hub is "
            )
            remedy += "hf://owner/name"
            if matching := sorted(glob.glob(str(path), recursive=True)):
                observed = f"a pattern, of {len(matching)} files"
                # in quotes where Hydra's grammar has a meaning for what is in it: year=2024/a.parquet
                names = (name if _PLAIN.fullmatch(name) else f'"{name}"' for name in matching[:3])
                listed = shlex.quote(f"{key}=[{','.join([*names, *['…'] * (len(matching) > 3)])}]")
                remedy = f"list the files ({listed}), or name a directory that holds no others"
            raise UserError(
                "the data file does not exist", where=f"{key}={path}", observed=observed, remedy=remedy
            )
        if path.suffix.lower() not in (*SUFFIXES, *TEXT_SUFFIXES):
            packed = content if "unpacks it" in (content := content_of_file(path)) else ""
            remedy = "convert it, for example to one JSON object per line in a .jsonl file"
            raise UserError(
                "unknown kind of data file",
                where=f"{key}={path}",
                observed=packed or path.suffix or "no suffix",
                required=KINDS,
                remedy=f"unpack it, and name what was in it in {key}" if packed else remedy,
            )
        _refuse_split(path, key, split)
        return [path]
    splits = _saved_splits(path)
    if splits is None and (path / "state.json").is_file():
        _refuse_split(path, key, split)
    if splits is not None:
        chosen = split or "train"
        if chosen not in splits:
            raise UserError(
                "the data set has no such split",
                where=f"{key}={path}",
                observed=chosen,
                required=" or ".join(splits),
                remedy=f"set {_split_key(key)}",
            )
        path = path / chosen
    if (path / "state.json").is_file():
        state = read_json(path / "state.json", "state.json of the saved data set", _SAVE)
        if state.get("_indices_files") or not isinstance(state.get("_data_files"), list):
            raise UserError(
                "the saved data set holds a selection of rows, not the rows",
                where=f"{key}={path}",
                remedy="save it again after dataset.flatten_indices()",
            )
        files, what = state["_data_files"], "state.json of the saved data set"
        check_shape(files, [{"filename": str}], path / "state.json", what, _SAVE, "_data_files")
        for name in (entry["filename"] for entry in files):
            if not stays_inside(name) or not (path / name).is_file():
                raise UserError(
                    f"{what} names a file that is not beside it",
                    where=str(path / "state.json"),
                    observed=name,
                    required="arrow files of this directory",
                    remedy=_SAVE,
                )
        return [path / entry["filename"] for entry in files]
    found = _of_split(_data_files(path, key), path, split or "train", key)
    if broken := next((file for file in found if _is_broken(file)), None):
        raise UserError(
            "a data file is a link to nothing: its rows would be missing",
            where=str(broken),
            observed=f"a link to {broken.readlink()}",
            required="the file",
            remedy="fetch the file (git annex get, or download the data set again), or delete the link",
        )
    return found


def _is_broken(path: Path) -> bool:
    return path.is_symlink() and not path.exists()


def _refuse_split(path: Path, key: str, split: str | None) -> None:
    """What has no splits is training rows: all of them for train[:100], or for test, would go unnoticed."""
    if split not in (None, "train", HELD_OUT):
        raise UserError(
            "the data set has no splits",
            where=f"{key}={path}",
            observed=f"{_split_key(key)}={split}",
            required="null or train: all its rows",
            remedy=f"leave out {_split_key(key)}; data.limit takes the first rows",
        )


def _saved_splits(path: Path) -> list[str] | None:
    """Names of the splits of a directory that `datasets` saved; None = it has none."""
    file = path / "dataset_dict.json"
    if not file.is_file():
        return None
    what = "dataset_dict.json of the saved data set"
    splits = read_json(file, what, _SAVE).get("splits", [])
    check_shape(splits, [str], file, what, _SAVE, "splits")
    outside = next((split for split in splits if not stays_inside(split)), None)
    if outside is not None:
        required = "directories beside it"
        raise UserError(
            f"{what} names a split elsewhere",
            where=str(file),
            observed=outside,
            required=required,
            remedy=_SAVE,
        )
    return [str(split) for split in splits]


def _data_files(path: Path, key: str) -> list[Path]:
    """Files with known suffixes, and links to nothing, in a directory and those inside it, by name."""
    # What only describes data is not rows.
    about = ("readme.md", "license.txt", "dataset_info.json", "dataset_infos.json")
    known = (*SUFFIXES, *TEXT_SUFFIXES)
    files = [p for p in _visible(path) if p.suffix.lower() in known and p.name.lower() not in about]
    if not files:
        inside = ", ".join(sorted(p.name for p in path.iterdir())[:5])
        raise UserError(
            "the directory holds no data file",
            where=f"{key}={path}",
            observed=inside or "nothing",
            required=KINDS,
            remedy=f"correct {key}, or put data files there",
        )
    return files


_SHARD = re.compile(r"([\w.]+)-\d{5}-of-\d{5}")  # a data set of the hub has such files: SPLIT-00000-of-00002
# Words of file and directory names that name a split.
_SPLITS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
}


def _split_named(path: Path, root: Path) -> str:
    """The split that a file's name or its directories' names tell; "" = none."""
    words = re.split(r"[^a-z]+", str(path.relative_to(root)).lower())
    return next((_SPLITS[word] for word in words if word in _SPLITS), "")


def _shard(path: Path, root: Path) -> str:
    """The split of which a file of the hub is a part; "" = it is named otherwise, as train/part-00000-of-…"""
    match = _SHARD.match(path.name)
    if match is None or (_split_named(path.parent, root) and not _split_named(Path(match[1]), Path())):
        return ""
    return match[1]


def _of_split(files: list[Path], root: Path, split: str, key: str) -> list[Path]:
    """The files of one split as names tell it: test rows in training would go unnoticed.

    Files whose names tell no split are training rows.
    """
    name = _SPLITS.get(split, split)
    names = {path: _split_named(path, root) for path in files}
    if split in _SPLITS:
        chosen = [path for path in files if names[path] == name or (name == "train" and not names[path])]
    else:
        chosen = [path for path in files if split.lower() in str(path.relative_to(root)).lower()]
    shards = {path: _shard(path, root) for path in chosen}
    several = dict.fromkeys(shards[path] for path in chosen if names[path] and shards[path])
    if split in shards.values():
        chosen = [path for path in chosen if shards[path] in ("", split)]
    elif len(several) > 1:
        raise UserError(
            f"the directory has several splits that {split} may mean",
            where=f"{key}={root}",
            observed=", ".join(several),
            required="one",
            remedy=f"set {_split_key(key)} to one of these, or name the files",
        )
    if not chosen:
        raise UserError(
            "the directory has no file of that split",
            where=f"{key}={root}",
            observed=", ".join(sorted(p.name for p in files)[:8]),
            required=f"names with {split} in them",
            remedy=f"set {_split_key(key)}, or name the files",
        )
    return chosen


def other_splits(path: Path, key: str) -> dict[str, str]:
    """Data files of a directory that are no training rows, as their names tell: name -> split."""
    if not path.is_dir() or _saved_splits(path) is not None or (path / "state.json").is_file():
        return {}
    files = _data_files(path, key)
    left = set(files).difference(_of_split(files, path, "train", key))
    named = {file: _shard(file, path) or _split_named(file, path) for file in sorted(left)}
    return {str(file.relative_to(path)): split for file, split in named.items()}


def unread_files(path: Path) -> list[str]:
    """Files of a directory whose kind is not read: nobody would miss rows.jsonl.gz beside others."""
    if not path.is_dir() or _saved_splits(path) is not None or (path / "state.json").is_file():
        return []
    known = (*SUFFIXES, *TEXT_SUFFIXES, ".py")  # the last describes data, as do these
    about = ("readme", "license", "notice")
    files = [p for p in _visible(path) if p.suffix.lower() not in known and p.stem.lower() not in about]
    return [str(p.relative_to(path)) for p in files]


def _visible(path: Path) -> list[Path]:
    """Files, and links to nothing, in a directory and those inside it, by name, but for hidden ones."""
    return sorted(
        p
        for p in path.rglob("*")
        if not any(part.startswith(".") for part in p.relative_to(path).parts)
        and (p.is_file() or _is_broken(p))
    )


def held_out_split(name: str, key: str, subset: str | None = None) -> str | None:
    """Which split of a data set its held-out rows are; None = it is a file, or has no splits.

    Raises:
        UserError: it has several, and none of them is called validation or test.
    """
    path = Path(name).expanduser()
    splits = _from_hub(name, key, subset, None) if is_hub(name) else _saved_splits(path)
    if splits is None:
        if not path.is_dir() or (path / "state.json").is_file():
            return None
        # Files of no name beside named ones may be anything: they count as a split of their own.
        splits = sorted({_split_named(file, path) for file in _data_files(path, key)})
    if len(splits) == 1:
        return splits[0] or None
    for split in ("validation", "test"):
        match = next((name for name in splits if _SPLITS.get(name, name) == split), None)
        if match is not None:
            return match
    raise UserError(
        "which of its splits is held out is not known",
        where=f"{key}={name}",
        observed=", ".join(split or "files whose names tell none" for split in splits),
        required="a split called validation or test",
        remedy=f"set {_split_key(key)}, or name the files",
    )


def _split_key(key: str) -> str:
    return "data.eval_split" if key == "data.eval_path" else "data.split"


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
            remedy=f"check the name, {_split_key(key)} and data.subset; without a network, download its "
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
