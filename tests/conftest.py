"""For all tests: one torch thread unless a test asks for more, and an interrupt that interrupts.

OpenMP threads that outnumber free cores spin against each other; with parallel test workers on two
cores that turns seconds into minutes. Set before torch is imported.

A shell that starts pytest in the background has it ignore SIGINT, and so would every program that tests
start and end by it.
"""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
