"""Which files a data path means, and of which split of a data set each of them is."""

from __future__ import annotations

import glob
import re
import shlex
from pathlib import Path

from kt_ray.disk import content_of_file, stays_inside
from kt_ray.errors import UserError
from kt_ray.parse import check_shape, kind_of_file, read_json

TABLES = (".parquet", ".arrow")
SUFFIXES = (".jsonl", ".json", *TABLES, ".csv", ".tsv")
TEXT_SUFFIXES = (".txt", ".md")
KINDS = ", ".join((*SUFFIXES, *TEXT_SUFFIXES))
_SAVE = "save the data set again with save_to_disk"
_PLAIN = re.compile(r"[\w./@-]+")
HELD_OUT = "validation or test"  # as a split: see kt_ray.data.readers.read_rows


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
                remedy=f"set {split_key(key)}",
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
            observed=f"{split_key(key)}={split}",
            required="null or train: all its rows",
            remedy=f"leave out {split_key(key)}; data.limit takes the first rows",
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
SPLITS = {
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
    return next((SPLITS[word] for word in words if word in SPLITS), "")


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
    name = SPLITS.get(split, split)
    names = {path: _split_named(path, root) for path in files}
    if split in SPLITS:
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
            remedy=f"set {split_key(key)} to one of these, or name the files",
        )
    if not chosen:
        raise UserError(
            "the directory has no file of that split",
            where=f"{key}={root}",
            observed=", ".join(sorted(p.name for p in files)[:8]),
            required=f"names with {split} in them",
            remedy=f"set {split_key(key)}, or name the files",
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


def splits_of(path: Path, key: str) -> list[str] | None:
    """Splits that a directory holds, "" for files of no name; None = it is a file, or has no splits."""
    splits = _saved_splits(path)
    if splits is not None:
        return splits
    if not path.is_dir() or (path / "state.json").is_file():
        return None
    # Files of no name beside named ones may be anything: they count as a split of their own.
    return sorted({_split_named(file, path) for file in _data_files(path, key)})


def split_key(key: str) -> str:
    """The option that names the split of a data set that another names."""
    return "data.eval_split" if key == "data.eval_path" else "data.split"
