"""One kind of damage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.corrupt.folder import Folder


@dataclass(frozen=True)
class Case:
    """A damaged checkpoint.

    Attributes:
        name: what is wrong.
        base: the good checkpoint it begins as: bf16, fp8, int4, fused or mxfp4.
        spoil: damages it.
        expected: parts of the error line: fault, file or key, observed and required; "{model}" is filled in.
    """

    name: str
    base: str
    spoil: Callable[[Folder], object]
    expected: Sequence[str]

    @property
    def slug(self) -> str:
        """The case's name as a directory."""
        return "".join(c if c.isalnum() else "_" for c in self.name.lower())

    def make(self, bases: dict[str, Folder], root: Path) -> Folder:
        """The damaged checkpoint, below `root`."""
        folder = bases[self.base].copy(root / self.slug)
        self.spoil(folder)
        return folder
