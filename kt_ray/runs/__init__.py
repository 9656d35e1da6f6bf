"""The run directory, the checks before any actor starts, and what several modes share."""
