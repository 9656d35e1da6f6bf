"""The training loop, against a `Cluster` protocol."""
