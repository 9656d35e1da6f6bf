"""A GGUF model: one file, or the files NAME-00001-of-0000N.gguf of a split set, each with its own header."""

from __future__ import annotations

import re
from pathlib import Path

from kt_ray.checkpoint.gguf_header import AGAIN, CHOOSE_GGUF, GgufHeader, read_gguf_header
from kt_ray.checkpoint.index import some
from kt_ray.errors import UserError

_SPLIT = re.compile(r"^(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


def open_gguf(path: str | Path) -> GgufHeader:
    """Read and check the headers of a GGUF model.

    Args:
        path: a file; any file of a split set; or a directory with one model (files mmproj*, the image
            encoders of multimodal models, do not count).

    Raises:
        UserError: absent, truncated or damaged files; parts of a split set that are absent or of another
            model; several models in the directory.
    """
    files = _files_of(Path(path).expanduser())
    headers = [read_gguf_header(file) for file in files]
    first = headers[0]
    count = first.metadata.get("split.count", 1)
    if count != len(files) and not (count == 0 and len(files) == 1):
        raise UserError(
            "GGUF file is part of a split set, but its name does not say which",
            where=str(first.path),
            observed=f"split.count {count}",
            required=f"NAME-00001-of-{int(count):05d}.gguf" if isinstance(count, int) else "a whole number",
            remedy="give all parts the names under which they were released",
        )
    tensors = dict(first.tensors)
    for number, header in enumerate(headers[1:], start=1):
        for key, required in (("split.no", number), ("split.count", len(files))):
            if header.metadata.get(key) != required:
                raise UserError(
                    "GGUF file is not the part of the split set that its name says",
                    where=str(header.path),
                    observed=f"{key} {header.metadata.get(key, 'missing')}",
                    required=f"{key} {required}",
                    remedy=AGAIN,
                )
        twice = sorted(tensors.keys() & header.tensors.keys())
        if twice:
            raise UserError(
                "GGUF split set holds tensors twice",
                where=f"{header.path} and {tensors[twice[0]].file.name}",
                observed=some(twice),
                required="parts of one model",
                remedy=AGAIN,
            )
        tensors |= header.tensors
    total = first.metadata.get("split.tensors.count")
    if total is not None and total != len(tensors):
        raise UserError(
            "GGUF split set does not hold all its tensors",
            where=str(first.path),
            observed=f"{len(tensors)} tensors in {len(files)} files",
            required=f"{total} (split.tensors.count)",
            remedy="download all files of the set again",
        )
    return GgufHeader(first.path, first.metadata, tensors, files)


def _files_of(path: Path) -> tuple[Path, ...]:
    if path.is_dir():
        path = _model_in(path)
    if not path.is_file():
        raise UserError("no such GGUF file", where=str(path), remedy=CHOOSE_GGUF)
    match = _SPLIT.match(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    files = tuple(path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}.gguf") for n in range(1, count + 1))
    absent = [file.name for file in files if not file.is_file()]
    if absent or path not in files:
        raise UserError(
            "GGUF split set is not complete",
            where=str(path),
            observed=f"missing: {some(absent)}" if absent else f"part {int(match['part'])}",
            required=f"{count} files",
            remedy="download the missing files beside it",
        )
    return files


def _model_in(folder: Path) -> Path:
    """The file, or the first of the split set, that a directory holds."""
    models: dict[str, Path] = {}
    for file in sorted(folder.glob("*.gguf")):
        if file.name.startswith("mmproj"):
            continue
        match = _SPLIT.match(file.name)
        models.setdefault(f"{match['stem']} {match['count']}" if match else file.name, file)
    if len(models) == 1:
        return next(iter(models.values()))
    raise UserError(
        "directory holds several GGUF models" if models else "directory holds no GGUF model",
        where=str(folder),
        observed=some([file.name for file in models.values()]) if models else "no *.gguf",
        required="one file, or one split set",
        remedy=CHOOSE_GGUF,
    )
