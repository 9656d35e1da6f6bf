"""The date that some chat templates write into the system turn (strftime_now), fixed for a run.

Without it the tokens of the same rows would be others after midnight, and a run could not be resumed.
"""

from __future__ import annotations

import json
import re
from datetime import date, datetime, time

_CALL = re.compile(r"""strftime_now\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")


def with_date(template: str, day: str) -> str:
    """A template in which every strftime_now("...") is what it gives at 0:00 of a day, YYYY-MM-DD.

    Calls with a format that is no literal stay as they are.
    """
    at = datetime.combine(date.fromisoformat(day), time())
    return _CALL.sub(lambda call: json.dumps(at.strftime(call[1] or call[2] or "")), template)


def dated(template: str) -> bool:
    """Whether a template depends on the date."""
    return "strftime_now(" in template
