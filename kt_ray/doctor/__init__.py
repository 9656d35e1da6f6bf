"""The checks and measurements of mode=doctor."""
