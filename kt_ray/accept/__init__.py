"""mode=accept: one command that proves a machine, and writes everything down as it goes."""
