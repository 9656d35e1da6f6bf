"""loss.png, drawn from metrics.jsonl. Never raises: a plot is not worth a training run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from kt_ray.tracking.jsonl import read_jsonl, series

log = logging.getLogger(__name__)

_REACH = 20  # neighbours on each side that smoothing looks at
_TRAIN, _HELD_OUT, _INK, _GRID = "#2a6fb0", "#c2571a", "#444444", "#dddddd"


def plot_loss(metrics_file: Path, image: Path, unit: str) -> bool:
    """Draw training loss (raw and smoothed) and held-out loss over steps; of trainer.stage=grpo the rewards.

    The title is the run's name, as its directory has it.

    Args:
        metrics_file: metrics.jsonl; lines without a finite loss are skipped.
        image: the PNG to write; an older one is replaced when the new one is whole.
        unit: of the loss (`kt_ray.tracking.metrics.loss_unit`).

    Returns:
        Whether an image was written; the reason why not is in the log.
    """
    beside = image.with_name(f".{image.name}.part")
    try:
        records = read_jsonl(metrics_file)
        rewards = series(records, "policy_reward")
        train = rewards or series(records, "loss")
        held_out = series(records, "eval_reward" if rewards else "eval_loss")
        if not train and not held_out:
            log.info("no loss to plot yet in %s", metrics_file)
            return False
        run, name = metrics_file.parent.name, "reward" if rewards else "loss"
        _draw(train, held_out, beside, run, name, unit)
        os.replace(beside, image)
        return True
    except Exception as error:
        log.warning("loss.png was not written: %r", error)
        beside.unlink(missing_ok=True)
        return False


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Each value by a line through its neighbours on both sides, weighted by `weight` to their distance.

    So the smoothed curve lies in the raw one: a moving average of what came before runs after it, and a
    mean of both sides leaves it at the ends.
    """
    import numpy as np

    distance = np.arange(-_REACH, _REACH + 1)
    weights = weight ** np.abs(distance)

    def sums(power: int, of: np.ndarray) -> np.ndarray:
        return np.convolve(of, (weights * distance**power)[::-1])[_REACH : _REACH + len(of)]

    loss = np.asarray(values, dtype=float)
    if len(loss) < 2:
        return list(loss)
    count, first, second = (sums(power, np.ones(len(loss))) for power in range(3))
    fitted = (second * sums(0, loss) - first * sums(1, loss)) / (count * second - first**2)
    return [float(value) for value in fitted]


def _draw(
    train: list[tuple[int, float]],
    held_out: list[tuple[int, float]],
    file: Path,
    title: str,
    name: str,
    unit: str,
) -> None:
    # Figure and Agg directly: pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if train:
        steps, losses = [s for s, _ in train], [v for _, v in train]
        dots = "o" if len(train) < 30 else ""
        if len(train) < 5:
            axes.plot(steps, losses, color=_TRAIN, marker="o", linewidth=1.5, label=f"training {name}")
        else:
            axes.plot(
                steps,
                losses,
                color=_TRAIN,
                alpha=0.35,
                linewidth=1,
                marker=dots,
                markersize=3,
                label=f"training {name}",
            )
            axes.plot(steps, smooth(losses), color=_TRAIN, linewidth=2, label=f"training {name}, smoothed")
    if held_out:
        steps, losses = [s for s, _ in held_out], [v for _, v in held_out]
        axes.plot(
            steps, losses, color=_HELD_OUT, marker="o", markersize=5, linewidth=1.5, label=f"held-out {name}"
        )
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("mean reward" if name == "reward" else f"loss, {unit}", color=_INK)
    axes.set_title(title, loc="left", color=_INK, fontsize=11, parse_math=False)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.legend(frameon=False, labelcolor=_INK)
    figure.savefig(file, format="png")
