"""loss.png, and what the terminal shows."""

from __future__ import annotations

import io
import json
import logging
import re
import struct
from pathlib import Path

import pytest
from rich.console import Console

from kt_ray.tracking.metrics import loss_unit
from kt_ray.tracking.plot import plot_loss, smooth
from kt_ray.tracking.progress import LoadProgress, Summary, TrainProgress, duration, show_summary, size

UNIT = loss_unit("sft")


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize("points", [1, 3, 200])
@pytest.mark.parametrize("held_out", [False, True])
def test_plot_is_a_whole_png(tmp_path, points, held_out):
    records = [{"step": s, "loss": 3.0 / s} for s in range(1, points + 1)]
    records[-1]["loss"] = None if points > 1 else 3.0  # a NaN step
    if held_out:
        records = [{"step": 0, "eval_loss": 4.0}, *records, {"step": points, "eval_loss": 2.0}]
    run = tmp_path / "a run of $\\no$"  # of dollar signs matplotlib would read a formula
    run.mkdir()
    image = run / "loss.png"
    assert plot_loss(write(run / "m.jsonl", records), image, UNIT)
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data.endswith(b"IEND\xaeB`\x82")
    assert struct.unpack(">II", data[16:24]) == (960, 540)
    # Not an empty canvas: the training curve's blue, and the held-out orange only where there is one.
    from matplotlib.image import imread

    pixels = (imread(image)[:, :, :3] * 255).round().astype(int)
    near = lambda color: (abs(pixels - color).sum(-1) < 12).any()  # noqa: E731
    assert near([0x2A, 0x6F, 0xB0]) and near([0xC2, 0x57, 0x1A]) == held_out
    assert not list(run.glob(".*"))


def test_plot_without_points_or_with_a_bad_place_does_not_raise(tmp_path, caplog):
    assert not plot_loss(tmp_path / "absent.jsonl", tmp_path / "loss.png", UNIT)
    file = write(tmp_path / "m.jsonl", [{"step": 1, "loss": 1.0}])
    assert not plot_loss(file, tmp_path / "no" / "such" / "loss.png", UNIT)
    assert "loss.png was not written" in caplog.text


def test_the_plot_names_what_a_loss_is_the_mean_of(tmp_path, monkeypatch):
    labels = []
    monkeypatch.setattr("matplotlib.axes.Axes.set_ylabel", lambda _, label, **how: labels.append(label))
    file = write(tmp_path / "m.jsonl", [{"step": 1, "loss": 1.0}])
    assert plot_loss(file, tmp_path / "loss.png", loss_unit("kto")) and labels == ["loss, mean of a row"]


def test_smooth():
    assert smooth([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth([]) == [] and smooth([4.0]) == [4.0] and smooth([4.0, 2.0]) == pytest.approx([4.0, 2.0])
    # It runs neither after a falling curve nor away from its ends, and it does smooth.
    falling = [8.0 - 0.05 * step for step in range(100)]
    assert smooth(falling) == pytest.approx(falling)
    noise = [(-1.0) ** step for step in range(100)]
    noisy = smooth([a + b for a, b in zip(falling, noise, strict=True)])
    assert max(abs(a - b) for a, b in zip(noisy, falling, strict=True)) < 0.35
    # A step is halved where it is: as much of it comes early as late.
    step = smooth([1.0] * 50 + [0.0] * 50)
    assert step[49] + step[50] == pytest.approx(1.0, abs=1e-6) and step[49] > 0.5 > step[50]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def test_train_lines_without_a_terminal(pipe, caplog):
    caplog.set_level(logging.INFO, logger="kt_ray")
    clock = Clock()
    with TrainProgress(10, done_steps=4, log_every=3, screen=pipe, clock=clock) as progress:
        assert progress.eta(4) is None
        clock.now += 500
        progress.evaluated(4, "loss 2.5000")
        for step in range(5, 11):
            clock.now += 20
            progress.update({"step": step, "loss": 1.25, "tokens_per_s": 1234.5})
    lines = pipe.file.getvalue().splitlines()
    assert lines.pop(0) == "step 4/10  held-out loss 2.5000"  # whose time is no step's
    # The first of this process, every third, the last.
    assert [line.split()[1] for line in lines] == ["5/10", "6/10", "9/10", "10/10"]
    assert lines[0] == "step 5/10  loss 1.25  tokens/s 1,234  1:40 left"
    assert len([r for r in caplog.records if r.getMessage().startswith("step")]) == 7  # train.log has all


def test_train_bar_on_a_terminal():
    screen = Console(file=io.StringIO(), force_terminal=True, width=150)
    with TrainProgress(4, screen=screen, clock=Clock()) as progress:
        progress.update({"step": 2, "loss": 0.5, "eval_loss": 0.75})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    assert "2/4" in text and "loss 0.5  held-out 0.75" in text and "step 2/4" not in text


def test_load_progress_rates_and_time_left(pipe):
    clock = Clock()
    with LoadProgress(screen=pipe, clock=clock) as progress:
        clock.now += 2
        progress.update(
            "expert 0", 4_000_000_000, 20_000_000_000, layer=3
        )  # within 5 s of the start: no line
        clock.now += 4
        progress.update("expert 0", 12_000_000_000, 20_000_000_000, layer=5)
        clock.now += 4
        progress.update("expert 1", 10_000_000_000, 10_000_000_000)
    assert pipe.file.getvalue().splitlines() == [
        "loading expert 0: 12.0 GB of 20.0 GB, 2.00 GB/s, layer 5, 4 s left",
        "loading expert 1: 10.0 GB of 10.0 GB, 1.00 GB/s, done in 10 s",
    ]


def test_load_bars_on_a_terminal():
    screen = Console(file=io.StringIO(), force_terminal=True, width=150)
    clock = Clock()
    with LoadProgress(screen=screen, clock=clock) as progress:
        clock.now += 2
        progress.update("expert 0", 1_000_000_000, 2_000_000_000, layer=0)
        progress.update("expert 1", 0, 2_000_000_000)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.file.getvalue())
    assert (
        "loading expert 0" in text and "0.50 GB/s, layer 0, 2 s left" in text and "loading expert 1" in text
    )


@pytest.mark.parametrize("terminal", [False, True])
def test_summary(terminal):
    screen = Console(file=io.StringIO(), force_terminal=terminal, width=150)
    sample = ("Who are\nyou?", "A person. " * 30, "[Aye], the keeper.")
    summary = Summary(Path("/r/[a]"), 50, 50 / 35, 275, 185.0, 4.0, 2.0, 4.2, 2.1, sample=sample)
    show_summary(summary, screen)
    text = screen.file.getvalue()
    assert "50 steps in 3:05: 1.43 epochs of 275 rows" in text
    assert "4.0000 → 2.0000  (-50 %)" in text and "held-out loss  4.2000 → 2.1000" in text
    assert "asked          Who are you?" in text and "after          [Aye], the keeper." in text
    assert "A person. A person." in text and "A person. " * 15 not in text
    assert text.splitlines()[-1].split()[2:] == ["'resume=/r/[a]'", "mode=chat"]
    assert "held-out" not in Summary(Path("/r"), 1, 1.0, 1, 1.0, 1.0, 1.0).text()
    assert "loss  2.1000, on rows" in Summary(Path("/r"), 1, 1.0, 1, 1.0, None, 1.0, None, 2.1).text()
    assert "4.0000 → nan, on rows" in Summary(Path("/r"), 1, 1.0, 1, 1.0, 1.0, 1.0, 4.0, float("nan")).text()


def test_units():
    assert [duration(s) for s in (0.4, 59.4, 185, 7385)] == ["0 s", "59 s", "3:05", "2:03:05"]
    assert [size(b) for b in (812_000, 3_200_000, 45_100_000_000)] == ["812 kB", "3.2 MB", "45.1 GB"]


def test_nothing_is_drawn_or_timed_before_entering():
    screen, clock = Console(file=io.StringIO(), force_terminal=True, width=150), Clock()
    progress = LoadProgress(screen=screen, clock=clock)
    clock.now += 60  # Ray starts meanwhile
    assert screen.file.getvalue() == ""
    with progress:
        clock.now += 2
        progress.update("expert 0", 4_000_000_000, 4_000_000_000)
    assert "done in 2 s" in screen.file.getvalue()
