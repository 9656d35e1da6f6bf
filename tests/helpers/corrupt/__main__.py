"""Write the corpus: good/<format> and one directory per case."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.helpers.corrupt import CASES, make_bases


def main(out: Path) -> None:
    """Make everything below `out`, which must not exist."""
    (out / "good").mkdir(parents=True)
    bases = make_bases(out / "good")
    for case in CASES:
        case.make(bases, out)
    print(f"{len(CASES)} damaged checkpoints and {len(bases)} good ones in {out}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
