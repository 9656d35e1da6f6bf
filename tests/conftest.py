"""For all tests: one torch thread unless a test asks for more, idle threads that sleep as in a run, and an
interrupt that interrupts.

OpenMP threads that outnumber free cores spin against each other; with parallel test workers on two
cores that turns seconds into minutes. A run sets how long they spin before it imports torch
(kt_ray/openmp.py); a run inside a test comes too late for that. Set before torch is imported.

A shell that starts pytest in the background has it ignore SIGINT, and so would every program that tests
start and end by it.
"""

import os
import signal

from kt_ray import openmp

os.environ.setdefault("OMP_NUM_THREADS", "1")
openmp.apply()
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
