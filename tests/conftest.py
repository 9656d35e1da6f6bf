"""For all tests: one torch thread unless a test asks for more.

OpenMP threads that outnumber free cores spin against each other; with parallel test workers on two
cores that turns seconds into minutes. Set before torch is imported.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
