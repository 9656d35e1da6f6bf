"""The actors under Ray. Only here is Ray imported."""
