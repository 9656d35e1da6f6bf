"""docs/quickstart.md shows what its commands print.

    python -m tests.test_doc_quickstart [cluster=local]

trains the demo to its end, as a reader does (minutes), and writes the printed blocks anew, the picture of
the loss, and the losses in docs/data.md. The speeds in them are those of the machine that did it.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kt_ray import cli
from kt_ray.tracking.progress import shortened

ROOT = Path(__file__).resolve().parents[1]
PAGE, DATA = ROOT / "docs" / "quickstart.md", ROOT / "docs" / "data.md"
PRINTED = re.compile(
    r"(<!-- printed: python -m tests\.test_doc_quickstart -->\n(?:<!-- usage -->\n)?```\n)(.*?)(```\n)",
    re.DOTALL,
)
LOSSES = re.compile(r"held-out loss +([\d.]+) → ([\d.]+)")
FIRST = ("train: ", "predicted ", "step 0/", "step 1/")
STEP = re.compile(r"step (\d+)/\d+  (held-out loss|loss) ([\d.]+)")


def first_lines(printed: str) -> str:
    """The lines from before the first step to after it that the page shows."""
    lines = printed.splitlines()
    found = (next(line for line in lines if line.startswith(begin)) for begin in FIRST)
    return "".join(shortened(line, 110) + "\n" for line in found)


def last_lines(printed: str) -> str:
    """The summary, to the last line."""
    return printed[printed.rindex("\ntrained  ") + 1 :].rstrip("\n") + "\n"


def losses(lines: str) -> dict[tuple[str, str], float]:
    return {(step, which): float(loss) for step, which, loss in STEP.findall(lines)}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_the_first_lines_are_what_a_run_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """Rows and tokens exactly, losses as far as a CPU's kernels round, speeds not at all."""
    shown, _ = (match[2] for match in PRINTED.finditer(PAGE.read_text(encoding="utf-8")))
    short = ["cluster=local", "trainer.max_steps=1", "trainer.eval_every=1", "eval.after_training=0"]
    assert cli.main(["run.name=first", *short]) == 0
    printed = first_lines(capfd.readouterr().out)
    again = "run python -m tests.test_doc_quickstart"
    assert shown.splitlines()[0] == printed.splitlines()[0], again
    assert losses(printed)["0", "held-out loss"] < math.log(2048), "the base is no better than a guess"
    assert losses(shown) == pytest.approx(losses(printed), abs=0.02), again


def test_the_last_lines_are_of_the_losses_that_the_pages_tell() -> None:
    first, last = (match[2] for match in PRINTED.finditer(PAGE.read_text(encoding="utf-8")))
    shown = LOSSES.search(last)
    told = LOSSES.search(DATA.read_text(encoding="utf-8"))
    assert shown is not None and told is not None
    assert [f"{float(loss):.2f}" for loss in shown.groups()] == list(told.groups())
    assert losses(first)["0", "held-out loss"] == float(shown[1])


def test_the_preview_is_what_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"instruction": f"What is {i} and {i}?", "output": f"It is {2 * i}."} for i in range(2, 42)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["mode=preview", "data.path=rows.jsonl"]) == 0
    page = PAGE.read_text(encoding="utf-8")
    block = re.search(r"```\n(row 0: .*?)```\n", page, re.DOTALL)
    assert block is not None and block[1] in capfd.readouterr().out


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "launch.py"), "run.name=first", *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        shutil.copy(Path(folder, "runs", "first", "loss.png"), ROOT / "docs" / "assets" / "demo_loss.png")
        printed = done.stdout.replace(str(Path(folder).resolve()), "/home/you/kt_ray")
    blocks = iter((first_lines(printed), last_lines(printed)))
    page = PRINTED.sub(lambda match: match[1] + next(blocks) + match[3], PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")
    before, after = (float(loss) for loss in LOSSES.search(last_lines(printed)).groups())  # type: ignore[union-attr]
    told = f"held-out loss {before:.2f} → {after:.2f}"
    DATA.write_text(LOSSES.sub(told, DATA.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
