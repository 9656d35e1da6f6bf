"""A case of bad input, and the place that it may spoil."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

VOCAB = 400  # of the tokenizer and of the model
ROWS = [{"instruction": f"What is {i}?", "output": f"A number: {i}."} for i in range(12)]
TINY = "model.path={model} data.path={dir}/rows.jsonl trainer.max_steps=1 trainer.eval_every=0"


@dataclass
class Place:
    """What a case may spoil: its own copy of the checkpoint, an empty directory, a finished run.

    Attributes:
        path: the case's directory; "{dir}" in arguments.
        model: a copy of the checkpoint, made on first use; "{model}".
        finished: a directory of runs with one finished run "done"; copied on first use by `run`.
    """

    path: Path
    original: Path
    finished: Path
    monkeypatch: pytest.MonkeyPatch

    @property
    def model(self) -> Path:
        copy = self.path / "model"
        if not copy.exists():
            shutil.copytree(self.original, copy)
        return copy

    @property
    def run(self) -> Path:
        copy = self.path / "runs" / "done"
        if not copy.exists():
            shutil.copytree(self.finished / "done", copy, symlinks=True)
        return copy

    @property
    def checkpoint(self) -> Path:
        return self.run / "checkpoints" / "step_000002"

    def config(self, drop: Sequence[str] = (), **changes: Any) -> None:
        """Change keys of the checkpoint's config.json."""
        file = self.model / "config.json"
        config = {key: value for key, value in json.loads(file.read_text()).items() if key not in drop}
        file.write_text(json.dumps({**config, **changes}))

    def weights(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Let `change` alter the checkpoint's tensors in place."""
        file = self.model / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    def tensor(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace one tensor of the checkpoint."""
        self.weights(lambda tensors: tensors.update({name: change(tensors[name]).contiguous()}))

    def experts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace every routed expert's tensors."""
        self.weights(
            lambda tensors: tensors.update({n: change(t) for n, t in tensors.items() if ".experts." in n})
        )

    def shards(self) -> tuple[Path, Path]:
        """Split the checkpoint into two shards with an index."""
        file = self.model / "model.safetensors"
        tensors = load_file(file)
        file.unlink()
        names = sorted(tensors)
        parts = names[: len(names) // 2], names[len(names) // 2 :]
        files = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
        for part, name in zip(parts, files, strict=True):
            save_file({key: tensors[key] for key in part}, self.model / name, metadata={"format": "pt"})
        weight_map = {key: name for part, name in zip(parts, files, strict=True) for key in part}
        index = self.model / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return self.model / files[0], self.model / files[1]

    def write(self, name: str, content: str | bytes) -> Path:
        """A file in the case's directory."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def rows(self, *rows: Any, name: str = "rows.jsonl") -> Path:
        """A data file of these rows."""
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))


@dataclass(frozen=True)
class Case:
    """One mistake.

    Attributes:
        name: what the user did.
        arguments: of the command line; {dir} and {model} are filled in.
        expected: parts of the error line: what is wrong, where, the remedy.
        spoil: makes the input bad.
        skip: why this machine cannot make the mistake.
    """

    name: str
    arguments: str
    expected: Sequence[str]
    spoil: Callable[[Place], object] = lambda place: None
    skip: str = ""


def truncate(file: Path) -> None:
    """Leave two thirds of a file."""
    os.truncate(file, file.stat().st_size * 2 // 3)


def flip(file: Path) -> None:
    """Change one bit of a file's last byte: only a checksum notices."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
