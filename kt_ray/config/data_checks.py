"""Checks of `data`: where rows come from, and what goes with what."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

from kt_ray.config.faults import Fault, guess, quoted, value_of
from kt_ray.config.fields import show
from kt_ray.config.limits import WORDS
from kt_ray.config.schema import Config

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


def data_faults(c: Config) -> Iterator[Fault]:
    """Keys under data that cannot be together, or with others."""
    data = c.data
    for key in ("data.path", "data.eval_path"):
        files = value_of(c, key)
        if files is not None and (not files or not all(files)):
            yield Fault(key, "names no file", "a file or a list of files", f"set {key}=<file.jsonl>")
    named = [value for value in (data.path, data.sources, data.builtin) if value is not None]
    if not named and c.mode in ("train", "preview", "predict"):
        yield Fault(
            "data.path",
            f"but mode={c.mode} needs rows",
            "a jsonl, json, parquet, csv or arrow file, a directory or hf://owner/name",
            "set data.path=<file.jsonl> or data=demo",
        )
    if data.eval_split is not None and data.eval_path is None:
        yield Fault(
            "data.eval_split",
            "names a split of data.eval_path, which is null",
            remedy="set data.eval_path=<files with that split>, or data.eval_split=null",
        )
    if data.template is not None and c.model.chat_template is not None:
        yield Fault(
            "data.template",
            f"and model.chat_template={c.model.chat_template} both name a template",
            remedy="set data.template=null or model.chat_template=null",
        )
    if data.date is not None:
        try:
            date.fromisoformat(data.date)
        except ValueError:
            yield Fault("data.date", "is no date", "YYYY-MM-DD", "set data.date=null")
    if data.packing and data.group_by_length:
        yield Fault(
            "data.group_by_length",
            "has nothing to group with data.packing=true: packed rows are all nearly data.max_length long",
            remedy="set data.group_by_length=false",
        )
    fraction = data.eval_fraction
    if isinstance(fraction, float) and fraction >= 1 and fraction != int(fraction):
        yield Fault(
            "data.eval_fraction",
            "is neither a share nor a number of rows",
            "less than 1 (a share), or a whole number",
            f"set data.eval_fraction={int(fraction)} or data.eval_fraction=0.05",
        )
    if fraction or data.eval_path is not None:
        return
    for key, mode, off in (
        ("trainer.eval_every", "train", 0),
        ("trainer.early_stopping", "train", 0),
        ("trainer.save_best", "train", False),
        ("eval.after_training", "train", 0),
        ("generate.split", "predict", "all"),
    ):
        if c.mode == mode and value_of(c, key) not in (off, "auto"):
            yield Fault(
                key,
                "needs held-out rows, but data.eval_fraction=0 and data.eval_path=null",
                remedy=f"set {key}={off}, data.eval_fraction=0.05 or data.eval_path=<file>",
            )


def source_faults(c: Config) -> Iterator[Fault]:
    """What data.sources and data.columns hold."""
    data = c.data
    yield from _columns("data.columns", data.columns or {})
    if data.sources is None:
        return
    if data.path is not None:
        yield Fault(
            "data.sources",
            f"and data.path={show(data.path)} both name rows",
            remedy="put data.path into the list of data.sources",
        )
    if not data.sources:
        yield Fault("data.sources", "names no source", "a list", "set data.sources=null")
    if data.limit is not None:
        yield Fault(
            "data.limit",
            "would cut the list of data.sources, not each of them",
            "a limit in each source",
            "set data.limit=null and write {path: …, limit: …} into data.sources",
        )
    for number, source in enumerate(data.sources):
        yield from _source(f"data.sources[{number}]", source)


def _source(place: str, source: Any) -> Iterator[Fault]:
    """One entry of data.sources."""
    if not isinstance(source, Mapping):
        yield Fault(
            f"{place}={show(source)}",
            "is no mapping",
            "{path: …, weight: …}",
            "write {path: <file>}",
        )
    for name, value in source.items():
        key = f"{place}.{name}={quoted(value)}"
        if name not in SOURCE_KEYS:
            _, meant = guess(str(name), SOURCE_KEYS)
            yield Fault(key, f"is not known{meant}", ", ".join(SOURCE_KEYS), "rename or delete it")
        if isinstance(value, bool) or not isinstance(value, SOURCE_KEYS[name]):
            kinds = " or ".join(kind.__name__.lower() for kind in SOURCE_KEYS[name])
            yield Fault(key, "has the wrong type", kinds, f"correct {place}.{name}")
        if name in ("weight", "limit") and not 0 < value < math.inf:
            yield Fault(key, "is out of range", "a number more than 0", "delete it")
        if name == "format" and value not in WORDS["data.format"]:
            yield Fault(key, "is not known", f"{' or '.join(WORDS['data.format'])}", "delete it")
    path = source.get("path")
    files = path if isinstance(path, list) else [path]
    if not files or not all(isinstance(file, str) and file for file in files):
        fault = f"{place}.path={quoted(path)}"
        yield Fault(fault, "names no file", "a file, or a list of files", f"set {place}.path")
    yield from _columns(f"{place}.columns", source.get("columns", {}))


def _columns(place: str, columns: Mapping[str, Any]) -> Iterator[Fault]:
    for name, column in columns.items():
        if column is not None and (not isinstance(column, str) or not column):
            key = f"{place}.{name}"
            yield Fault(
                f"{key}={quoted(column)}",
                "names no column",
                "the name of a column, or null",
                f"correct {key}",
            )
