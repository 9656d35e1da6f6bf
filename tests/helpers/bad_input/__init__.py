"""Bad inputs as a table: what a user did wrong, and what the one error line must hold."""

from tests.helpers.bad_input.data import DATA
from tests.helpers.bad_input.foreign import FOREIGN
from tests.helpers.bad_input.foreign_runs import FOREIGN_RUNS
from tests.helpers.bad_input.foreign_settings import FOREIGN_SETTINGS
from tests.helpers.bad_input.model import MODEL
from tests.helpers.bad_input.place import ROWS, VOCAB, Case, Place
from tests.helpers.bad_input.plan import PLAN
from tests.helpers.bad_input.run import RESUME, RUN

CASES: list[Case] = [*MODEL, *PLAN, *DATA, *RUN, *FOREIGN, *FOREIGN_RUNS, *FOREIGN_SETTINGS]

__all__ = ["CASES", "RESUME", "ROWS", "VOCAB", "Case", "Place"]
