"""What `mode=` runs: one file per mode, each with `run(config) -> exit code`."""
