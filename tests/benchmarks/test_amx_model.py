"""benchmarks/amx_model.py: shares of AMX's peak by counting."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.amx_model import BACKWARD, ENGINES, FLOP_PER_CYCLE, FORMATS, FORWARD, HIDDEN, INTER, cycles

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "amx_model.py"


def test_nothing_is_above_the_peak() -> None:
    for direction in (FORWARD, BACKWARD):
        for rows in (16, 64, 256):
            least = 6 * HIDDEN * INTER * rows / FLOP_PER_CYCLE
            assert all(cycles(engine, direction, rows) > least for engine in ENGINES)


def test_the_page_has_its_shares() -> None:
    answer = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True)
    page = SCRIPT.parents[1].joinpath("docs", "kernels.md").read_text()
    for name in FORMATS:
        shares = re.findall(rf"^  {name} .*", answer.stdout, re.MULTILINE)
        cells = [f"{share} %, {limit}" for s in shares for share, limit in re.findall(r"(\d+)% \((\w+)\)", s)]
        assert len(cells) == 6
        assert f"| {name} | {' | '.join(cells)} |" in page
