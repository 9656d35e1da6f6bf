"""What run directories tell: one HTML page about a run, several runs side by side."""
