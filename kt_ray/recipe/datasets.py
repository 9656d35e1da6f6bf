"""dataset_info.json: named data sets as sources of kt_ray."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kt_ray.errors import UserError
from kt_ray.parse import check_shape, read_json
from kt_ray.recipe.reading import Reading

INFO = "dataset_info.json"
# Keys of an entry that are read. Others are refused by name.
KNOWN = frozenset(
    {
        *("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "formatting", "ranking", "subset", "split"),
        *("num_samples", "columns", "tags", "revision"),
    }
)
# LLaMA-Factory's column names of alpaca files, and ours.
ALPACA = {"prompt": "instruction", "query": "input", "response": "output", "history": "history"}
SHARED = {
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
}
# What kt_ray's readers look at in a row of each format: a column that the entry leaves out must not be seen.
_PROMPTS = ("messages", "conversations", "prompt", "instruction", "input", "system", "history", "tools")
SEEN = {
    "alpaca": ("instruction", "input", "output", "system", "history", "tools"),
    "sharegpt": ("conversations", "system", "tools"),
    "messages": ("messages", "system", "tools"),
    "preference": ("chosen", "rejected", *_PROMPTS),
    "kto": ("label", "completion", "output", *_PROMPTS),
    "text": ("text",),
}
# The role that each tag names, and the words that kt_ray's readers know for it.
TAGS = {
    "user_tag": ("human", ("user", "human")),
    "assistant_tag": ("gpt", ("assistant", "gpt", "model", "chatgpt", "bot")),
    "observation_tag": (
        "observation",
        ("tool", "observation", "function_response", "tool_response", "ipython"),
    ),
    "function_tag": ("function_call", ("function_call", "tool_call")),
    "system_tag": ("system", ("system", "developer")),
}

_ENTRY = {
    **dict.fromkeys(("file_name?", "hf_hub_url?", "revision?", "subset?", "split?", "formatting?"), str),
    "num_samples?": int,
    "columns?": {f"{name}?": str for name in (*ALPACA, *SHARED, "messages")},
    "tags?": {f"{name}?": str for name in ("role_tag", "content_tag", *TAGS)},
}


@dataclass
class Source:
    """One data set, as an entry of data.sources."""

    name: str  # in dataset_info.json
    path: str  # file, directory or hf:// name
    format: str  # of kt_ray
    # see data.columns; None = a column that is not read
    columns: dict[str, str | None] = field(default_factory=dict)
    # split, subset: of a hub data set
    split: str | None = None
    subset: str | None = None
    limit: int | None = None  # rows; None = all
    file: bool = True  # whether `path` is local

    def entry(self, weight: float) -> dict[str, Any]:
        """The entry of data.sources."""
        optional = {"split": self.split, "subset": self.subset, "limit": self.limit}
        entry: dict[str, Any] = {"path": self.path, "format": self.format, "columns": self.columns}
        if weight != 1:
            entry["weight"] = weight
        return entry | {key: value for key, value in optional.items() if value is not None}


def map_data(reading: Reading, stage: str) -> None:
    """data.path or data.sources, data.eval_path and what the two share."""
    names = reading.names("dataset")
    if not names:
        reading.refuse("dataset", "names no data set", *_NAMED, value="null")
        return
    info, folder = _info(reading)
    sources = [_source(reading, info, folder, name, stage, "dataset") for name in names]
    evals = [_source(reading, info, folder, n, stage, "eval_dataset") for n in reading.names("eval_dataset")]
    mapped = [source for source in sources if source is not None]
    if len(mapped) != len(names):
        return
    first = mapped[0]
    reading.set("data.format", first.format, "dataset")
    if first.columns:
        reading.set("data.columns", first.columns, "dataset")
    if len(mapped) == 1:
        reading.set("data.path", first.path, "dataset", "dataset_dir")
        for key in ("split", "subset", "limit"):
            if getattr(first, key) is not None:
                reading.set(
                    f"data.{key}", getattr(first, key), "max_samples" if key == "limit" else "dataset"
                )
    elif reading.get("disable_shuffling") is True and _in_order(reading, mapped):
        reading.set("data.path", [source.path for source in mapped], "dataset", "dataset_dir")
        for key in ("split", "subset"):
            if getattr(first, key) is not None:
                reading.set(f"data.{key}", getattr(first, key), "dataset")
    else:
        weights = _weights(reading, mapped)
        entries = [source.entry(weight) for source, weight in zip(mapped, weights, strict=True)]
        used = [n for n in ("mix_strategy", "interleave_probs", "max_samples") if reading.given(n)]
        reading.set("data.sources", entries, "dataset", "dataset_dir", *used)
    _eval(reading, first, evals)


_NAMED = ("data", "data.path", "data.sources", "data.builtin")


def _info(reading: Reading) -> tuple[dict[str, Any] | None, Path]:
    """The entries of dataset_info.json (None = names of the hub) and the directory of files."""
    folder = str(reading.get("dataset_dir", "data"))
    if folder == "ONLINE":
        return None, Path()
    if folder.startswith("REMOTE:"):
        reading.refuse("dataset_dir", "lies elsewhere: download it", *_NAMED)
        return {}, Path()
    path = reading.existing(folder)
    file = path / INFO
    if not file.is_file():
        reading.refuse("dataset_dir", f"holds no {INFO}", *_NAMED, value=folder)
        return {}, path
    return read_json(file, INFO, "correct it"), path


@dataclass
class _Entry:
    """One data set's entry while it is read."""

    reading: Reading
    name: str  # of the data set
    fields: Mapping[str, Any]  # the entry
    keys: tuple[str, ...]  # options that lift a refusal when the command line gives them
    _refusals: int = 0

    @property
    def columns(self) -> Mapping[str, str]:
        return self.fields.get("columns") or {}

    def refuse(self, key: str, reason: str, value: Any = None) -> None:
        """Records a field of the entry ("columns.prompt") that is not mapped."""
        self.reading.refuse(f"{INFO}: {self.name}.{key}", reason, *self.keys, value=value)
        self._refusals += 1

    def failed(self) -> bool:
        """Whether a field was refused."""
        return self._refusals > 0


def _source(
    reading: Reading, info: dict[str, Any] | None, folder: Path, name: str, stage: str, asked_by: str
) -> Source | None:
    """The data set `name`; None = it cannot be mapped, which `reading` then holds."""
    keys = _NAMED if asked_by == "dataset" else ("data.eval_path",)
    if info is not None and name not in info:
        if info:
            reading.refuse(asked_by, f"is not in {folder / INFO}", *keys, value=name)
        return None
    fields: dict[str, Any] = {"hf_hub_url": name}
    if info is not None:
        fields = check_shape(info[name], _ENTRY, folder / INFO, INFO, "correct it", name)
    entry = _Entry(reading, name, fields, keys)
    for key in set(entry.fields) - KNOWN:
        entry.refuse(key, "is not known", entry.fields[key])
    source = _placed(entry, folder)
    format = str(entry.fields.get("formatting", "alpaca"))
    if format not in ("alpaca", "sharegpt", "openai"):
        entry.refuse("formatting", "is none of alpaca, sharegpt, openai", format)
    if source is None or entry.failed():
        return None
    limits = [entry.fields["num_samples"]] if entry.fields.get("num_samples") is not None else []
    if reading.given("max_samples"):
        limits.append(reading.integer("max_samples", 1, *keys))
    source.limit = min(limits, default=None)
    for key in set(entry.columns) - {*SHARED, *(ALPACA if format == "alpaca" else ("messages",))}:
        entry.refuse(f"columns.{key}", "is not read: only text is trained", entry.columns[key])
    ranking = bool(entry.fields.get("ranking"))
    if ranking != (stage in ("dpo", "orpo")):
        entry.refuse("ranking", f"does not go with stage {stage}", ranking)
    if entry.failed():
        return None
    if stage == "pt":
        _text(entry, source)
    elif format == "alpaca":
        _alpaca(entry, source, ranking)
    else:
        _chat(entry, source, format, ranking)
    if entry.failed():
        return None
    if stage == "kto" and source.format != "kto":
        entry.refuse("columns.kto_tag", "is needed for stage kto")
    _hide_others(source)
    return source


def _placed(entry: _Entry, folder: Path) -> Source | None:
    """Where the rows are. Downloading goes before a file, as LLaMA-Factory has it."""
    fields, split = entry.fields, entry.fields.get("split")
    if fields.get("hf_hub_url"):
        revision = f"@{fields['revision']}" if fields.get("revision") else ""
        path = f"hf://{fields['hf_hub_url']}{revision}"
        return Source(entry.name, path, "", split=split, subset=fields.get("subset"), file=False)
    for key in ("ms_hub_url", "om_hub_url"):
        if fields.get(key):
            entry.refuse(key, "is another hub than Hugging Face's", fields[key])
            return None
    if not fields.get("file_name"):
        entry.refuse("file_name", "is missing")
        return None
    if fields.get("subset"):
        entry.refuse("subset", "a file has none", fields["subset"])
    if split not in (None, "train"):
        text = "a file has no split but train, here no part of it: num_samples takes its first rows"
        entry.refuse("split", text, split)
    return Source(entry.name, str(folder / fields["file_name"]), "", split=split)


def _alpaca(entry: _Entry, source: Source, ranking: bool) -> None:
    # Where columns are named, those that are not named are not read: so LLaMA-Factory has it.
    default = {"prompt": "instruction", "query": "input", "response": "output"}
    named = dict(entry.columns) or default
    source.format = "preference" if ranking else "kto" if named.get("kto_tag") else "alpaca"
    if ranking:
        named.pop("response", None)
    ours = {**ALPACA, **SHARED}
    source.columns = {ours[key]: column for key, column in named.items() if column}


def _chat(entry: _Entry, source: Source, format: str, ranking: bool) -> None:
    columns, tags = entry.columns, entry.fields.get("tags") or {}
    for key in set(tags) - {"role_tag", "content_tag", *TAGS}:
        entry.refuse(f"tags.{key}", "is not known", tags[key])
    for key, (_, words) in TAGS.items():
        if tags.get(key) and tags[key] not in words:
            entry.refuse(f"tags.{key}", f"is no word for that role here ({', '.join(words)})", tags[key])
    default = ("from", "value") if format == "sharegpt" else ("role", "content")
    role, content = tags.get("role_tag", default[0]), tags.get("content_tag", default[1])
    shape = "conversations" if (role, content) == ("from", "value") else "messages"
    source.format = "sharegpt" if shape == "conversations" else "messages"
    if ranking:
        source.format = "preference"
    elif columns.get("kto_tag"):
        source.format = "kto"
    named: dict[str, str | None] = {
        SHARED[key]: column for key, column in columns.items() if key in SHARED and column
    }
    named[shape] = columns.get("messages") or "conversations"
    if shape == "messages":
        named |= {"role": role, "content": content}
    source.columns = named


def _text(entry: _Entry, source: Source) -> None:
    """Raw text: a whole text file, else the column that LLaMA-Factory takes, the prompt's."""
    source.format = "text"
    whole = Path(source.path).suffix in (".txt", ".md")
    if not (entry.columns or whole):
        text = "must name the one column of text: without them instruction and input are joined there"
        entry.refuse("columns", text)
    for key in ("query", "history", "messages"):
        if entry.columns.get(key):
            entry.refuse(f"columns.{key}", "stage pt reads one column of text", entry.columns[key])
    source.columns = {"text": "text" if whole else entry.columns.get("prompt") or "instruction"}


def _hide_others(source: Source) -> None:
    """Drops names that need no renaming; what the entry leaves out becomes null, if rows have it or not."""
    hidden = {name: None for name in SEEN[source.format] if name not in source.columns}
    renamed = {name: column for name, column in source.columns.items() if name != column}
    source.columns = {**renamed, **hidden}


def _in_order(reading: Reading, sources: list[Source]) -> bool:
    """Whether rows come set after set, as one list of files; data.sources would mix the sets evenly."""
    if reading.get("mix_strategy", "concat") != "concat" or reading.given("interleave_probs"):
        return False  # `_weights` refuses the second beside concat
    read_as = [(s.format, s.columns, s.split or "train", s.subset) for s in sources]
    whole = [s.limit is None or 0 < _count(s) <= s.limit for s in sources]
    if all(how == read_as[0] for how in read_as) and all(whole):
        return True
    text = (
        "takes one set after the other, which needs whole sets of one format, columns, split and subset here"
    )
    reading.refuse("disable_shuffling", text, "data.sources", "data.path", "data.shuffle")
    return False


def _weights(reading: Reading, sources: list[Source]) -> list[float]:
    """How often a row of each source is taken per epoch."""
    strategies = ("concat", "interleave_under", "interleave_over")
    strategy = reading.word("mix_strategy", strategies, "concat", "data.sources")
    even = [1.0] * len(sources)
    if strategy == "concat":
        if reading.given("interleave_probs"):
            reading.refuse("interleave_probs", "has no meaning with mix_strategy: concat", "data.sources")
        return even
    try:
        shares = [float(p) for p in reading.names("interleave_probs")] or [1 / len(sources)] * len(sources)
    except ValueError:
        shares = []
    if len(shares) != len(sources) or not all(0 < p < math.inf for p in shares):
        reading.refuse("interleave_probs", f"must be {len(sources)} numbers above 0", "data.sources")
        return even
    counts = []
    for source in sources:
        rows = _count(source)
        if not rows:
            text = f"needs the number of rows of {source.name}, which cannot be counted here"
            reading.refuse("mix_strategy", text, "data.sources")
            return even
        counts.append(rows if source.limit is None else min(rows, source.limit))
    shares = [share / sum(shares) for share in shares]
    # Sets are drawn from by their shares until the first (under) or the last (over) is used up.
    drawn = [count / share for count, share in zip(counts, shares, strict=True)]
    total = min(drawn) if strategy == "interleave_under" else max(drawn)
    return [round(share * total / count, 6) for share, count in zip(shares, counts, strict=True)]


def _count(source: Source) -> int:
    """Rows of a local file; 0 where they cannot be counted."""
    from kt_ray.data.sources import rows_in

    try:
        return rows_in(source.path, "data.path", source.split) if source.file else 0
    except (OSError, UserError):
        return 0


def _eval(reading: Reading, first: Source, evals: list[Source | None]) -> None:
    """data.eval_path or data.eval_fraction; without either nothing is held out."""
    mapped = [source for source in evals if source is not None]
    if len(mapped) != len(evals):
        return
    if not mapped:
        size = reading.number("val_size", 0.0, "data.eval_fraction", "data.eval_path")
        reading.set("data.eval_fraction", int(size) if size >= 1 else size, "val_size")
        return
    if reading.number("val_size", 0.0):
        reading.refuse("val_size", "has no meaning beside eval_dataset", "data.eval_path")
    for source in mapped:
        same = (source.format, source.columns) == (first.format, first.columns)
        if not same or (source.split or "train") != "train" or source.subset:
            text = f"{source.name} has another format, columns or split than {first.name}"
            reading.refuse("eval_dataset", text, "data.eval_path")
    if any(not source.file for source in mapped):
        reading.set("data.eval_split", "train", "eval_dataset", note="what is read of it there")
    paths = [source.path for source in mapped]
    note = "max_samples does not cut it" if reading.given("max_samples") else ""
    reading.set("data.eval_path", paths[0] if len(paths) == 1 else paths, "eval_dataset", note=note)
