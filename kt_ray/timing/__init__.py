"""How long a step takes: costs, simulation, prediction. Pure functions, no torch."""
