"""A cache of tokenised rows, keyed by a hash of everything that the tokens depend on.

The key covers the rows as read (so files, columns, limits and system prompts), the template, the
tokenizer and what is trained, so an entry never goes stale. A file is written under a temporary name and then
renamed, so concurrent runs read whole files or none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kt_ray.batch import IGNORE
from kt_ray.data.row_types import Conversation

if TYPE_CHECKING:
    from kt_ray.data.template import ChatEncoder

VERSION = 12  # of the encoding: raise it when the same input gives other tokens
WORTH = 2_000  # fewer rows are tokenised in about a second
_ABANDONED = 24 * 3600  # seconds after which an unfinished file is one of a run that was killed
Tokens = list[tuple[np.ndarray, np.ndarray]]  # ids and labels of each row


def encoder_key(encoder: ChatEncoder) -> bytes:
    """Digest of what turns a conversation into tokens."""
    tokenizer = encoder.tokenizer
    parts = (
        str(VERSION),
        tokenizer.backend_tokenizer.to_str(),
        json.dumps({k: str(v) for k, v in tokenizer.special_tokens_map.items()}, sort_keys=True),
        encoder.rendered,
        encoder.train_on,
    )
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def rows_key(rows: Sequence[Conversation], encoder: bytes) -> str:
    """Name of the file that holds these rows encoded."""
    digest = hashlib.sha256(encoder)
    for row in rows:
        # Keys in their order: templates write tools and arguments of calls as they come.
        content = (row.messages, row.tools, row.rejected, row.text, row.kind)
        digest.update(json.dumps(content, ensure_ascii=False).encode() + b"\n")
    return digest.hexdigest()


class TokenCache:
    """A directory of encoded data sets; above the limit the least recently used are deleted.

    Args:
        directory: created by the first write.
        limit_gb: size limit; 0 = nothing is read or written.
        worth: smaller data sets are not cached.
    """

    def __init__(self, directory: Path, limit_gb: float, worth: int = WORTH) -> None:
        self.directory = directory
        self.limit = int(limit_gb * 1e9)
        self.worth = worth

    def read(self, key: str, rows: int) -> tuple[Tokens, list[str]] | None:
        """((ids, labels) of each row, notes), or None where the rows are not here or no longer readable."""
        path = self.directory / f"{key}.npz"
        if not self.limit or not path.is_file():
            return None
        try:
            # opened here: np.load leaves a file open that is no archive
            with path.open("rb") as handle, np.load(handle, allow_pickle=False) as file:
                ids, trained, lengths, notes = (file[k] for k in ("ids", "trained", "lengths", "notes"))
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None
        if len(lengths) != rows or int(lengths.sum()) != len(ids) or len(trained) != len(ids):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now: the last to be deleted
        stops = np.cumsum(lengths)
        ids = ids.astype(np.int64)
        labels = np.where(trained, ids, IGNORE)
        bounds = zip(stops - lengths, stops, strict=True)
        return [(ids[start:stop], labels[start:stop]) for start, stop in bounds], list(map(str, notes))

    def write(self, key: str, encoded: Tokens, notes: Sequence[str] = ()) -> None:
        """Store rows and notes. A full or read-only disk is no error: the rows are just not cached."""
        if not self.limit or len(encoded) < self.worth:
            return
        with contextlib.suppress(OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.directory, suffix=".part")
            try:
                with os.fdopen(handle, "wb") as file:
                    np.savez(
                        file,
                        ids=np.concatenate([ids for ids, _ in encoded]).astype(np.int32),
                        trained=np.concatenate([labels != IGNORE for _, labels in encoded]),
                        notes=np.array(list(notes), dtype=np.str_),
                        lengths=np.array([len(ids) for ids, _ in encoded], dtype=np.int64),
                    )
                os.replace(name, self.directory / f"{key}.npz")
            finally:
                Path(name).unlink(missing_ok=True)
            self._shrink(f"{key}.npz")

    def _shrink(self, keep: str) -> None:
        for path in self.directory.glob("*.part"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < time.time() - _ABANDONED:
                    path.unlink()
        files = []
        for path in self.directory.glob("*.npz"):
            with contextlib.suppress(OSError):  # another run may delete it meanwhile
                stat = path.stat()
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit:
                break
            if path.name != keep:
                path.unlink(missing_ok=True)
                total -= size
