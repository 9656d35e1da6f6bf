"""recipe=FILE on the command line: a LLaMA-Factory training YAML becomes Hydra overrides.

    python launch.py recipe=FILE.yaml [recipe.devices=N] [recipe.accelerate=FILE] [KEY=VALUE ...]

It works before Hydra composes, on text and files alone: no torch, no Ray, no data are loaded. What the
command line says itself goes before the recipe. docs/recipes.md lists the fields.
"""

from kt_ray.recipe.command import with_recipe
from kt_ray.recipe.llamafactory import read

__all__ = ["read", "with_recipe"]
