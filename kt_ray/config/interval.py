"""Intervals in steps or in time, as trainer.save_every has them: 50, 30min, 2h."""

from __future__ import annotations

import re

FORM = "a number of steps, or a time such as 90s, 30min or 2h"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")


def seconds_of(text: str) -> float | None:
    """Seconds of an interval in time; None = the text is none."""
    match = _TIME.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    return seconds if seconds > 0 else None
