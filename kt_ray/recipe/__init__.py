"""recipe=FILE on the command line: a LLaMA-Factory training YAML becomes Hydra overrides.

    python launch.py recipe=FILE.yaml [recipe.devices=N] [recipe.accelerate=FILE] [KEY=VALUE ...]

It runs before Hydra composes, with neither torch nor Ray; of data files it reads column names and counts
rows. The command line overrules the recipe. docs/recipes.md lists the fields.
"""

from kt_ray.recipe.command import with_recipe
from kt_ray.recipe.llamafactory import read
from kt_ray.recipe.peer_options import refuse_peer_options

__all__ = ["read", "refuse_peer_options", "with_recipe"]
