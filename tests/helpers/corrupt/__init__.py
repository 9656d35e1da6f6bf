"""Damaged checkpoints: each is refused by one clear error, in seconds, before Ray starts.

python -m tests.helpers.corrupt OUT       # writes all of them, one directory each
"""

from tests.helpers.corrupt.case import Case
from tests.helpers.corrupt.content import CONTENT
from tests.helpers.corrupt.files import FILES
from tests.helpers.corrupt.folder import Folder, make_bases
from tests.helpers.corrupt.keys import KEYS
from tests.helpers.corrupt.quantised import QUANTISED

CASES: list[Case] = [*FILES, *KEYS, *QUANTISED, *CONTENT]

__all__ = ["CASES", "Case", "Folder", "make_bases"]
