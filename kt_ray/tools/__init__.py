"""Tools on checkpoints and adapters: convert, merge, export, inspect (`python -m kt_ray.tools --help`)."""
