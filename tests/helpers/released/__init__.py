"""Tiny random checkpoints with the keys, formats and configuration that families are released with."""
