"""Checks of the data group: what names the rows, and what goes together."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

from kt_ray.config.fields import closest
from kt_ray.config.key_errors import fault
from kt_ray.config.limits import WORDS
from kt_ray.config.schema import Config, DataConfig

# Keys of one entry of data.sources, with the types their values may have.
SOURCE_KEYS: dict[str, tuple[type, ...]] = {
    "path": (str, list),
    "weight": (int, float),
    "format": (str,),
    "columns": (Mapping,),
    "split": (str,),
    "subset": (str,),
    "system": (str,),
    "limit": (int,),
}


def check_data(config: Config) -> None:
    """Raises UserError for the first value of `data` that cannot work."""
    data = config.data
    for key, value in (("data.path", data.path), ("data.eval_path", data.eval_path)):
        if value is not None and (not value or not all(value)):
            raise fault(key, value, "names no file", "a file or a list of files", f"set {key}=<file.jsonl>")
    if data.sources is not None:
        _sources(data)
    elif data.path is None and data.builtin is None and config.mode in ("train", "preview", "predict"):
        raise fault(
            "data.path",
            None,
            f"but mode={config.mode} needs rows",
            "a jsonl, json, parquet, csv or arrow file, a directory or hf://owner/name",
            "set data.path=<file.jsonl> or data=demo",
        )
    if data.eval_split is not None and data.eval_path is None:
        raise fault(
            "data.eval_split",
            data.eval_split,
            "names a split of data.eval_path, which is null",
            "data.eval_path, or no eval_split",
            "set data.eval_path=<files with that split>, or data.eval_split=null",
        )
    if data.template is not None and config.model.chat_template is not None:
        raise fault(
            "data.template",
            data.template,
            f"and model.chat_template={config.model.chat_template} both name a template",
            "one of them",
            "set data.template=null or model.chat_template=null",
        )
    if data.date is not None:
        try:
            date.fromisoformat(data.date)
        except ValueError:
            raise fault("data.date", data.date, "is no date", "YYYY-MM-DD", "set data.date=null") from None
    if data.columns is not None:
        _columns("data.columns", data.columns)
    if data.packing and data.group_by_length:
        raise fault(
            "data.group_by_length",
            True,
            "has nothing to group with data.packing=true: packed rows are all nearly data.max_length long",
            "one of them",
            "set data.group_by_length=false",
        )


def _sources(data: DataConfig) -> None:
    if data.path is not None:
        raise fault(
            "data.sources",
            data.sources,
            f"and data.path={data.path} both name rows",
            "one of them",
            "put data.path into the list of data.sources",
        )
    if not data.sources:
        raise fault("data.sources", data.sources, "names no source", "a list", "set data.sources=null")
    if data.limit is not None:
        raise fault(
            "data.limit",
            data.limit,
            "would cut the list of data.sources, not each of them",
            "a limit in each source",
            "set data.limit=null and write {path: …, limit: …} into data.sources",
        )
    for number, source in enumerate(data.sources):
        where = f"data.sources[{number}]"
        if not isinstance(source, Mapping):
            raise fault(where, source, "is no mapping", "{path: …, weight: …}", "write {path: <file>}")
        for key, value in source.items():
            if key not in SOURCE_KEYS:
                match = closest(str(key), tuple(SOURCE_KEYS))
                raise fault(
                    f"{where}.{key}",
                    value,
                    "is not known" + (f"; did you mean {match}?" if match else ""),
                    ", ".join(SOURCE_KEYS),
                    "rename or delete it",
                )
            if isinstance(value, bool) or not isinstance(value, SOURCE_KEYS[key]):
                names = " or ".join(kind.__name__.lower() for kind in SOURCE_KEYS[key])
                raise fault(f"{where}.{key}", value, "has the wrong type", names, f"correct {where}.{key}")
        if not source.get("path"):
            raise fault(f"{where}.path", None, "names no file", "a file", f"set {where}.path")
        for key, low in (("weight", 0), ("limit", 0)):
            if not source.get(key, 1) > low:
                raise fault(f"{where}.{key}", source[key], "is out of range", "more than 0", "delete it")
        words = WORDS["data.format"]
        if source.get("format", "auto") not in words:
            raise fault(f"{where}.format", source["format"], "is not known", " or ".join(words), "delete it")
        _columns(f"{where}.columns", source.get("columns", {}))


def _columns(key: str, columns: Mapping[str, Any]) -> None:
    for name, column in columns.items():
        if column is not None and (not isinstance(column, str) or not column):
            raise fault(
                f"{key}.{name}",
                column,
                "names no column",
                "the name of a column, or null",
                f"correct {key}.{name}",
            )
