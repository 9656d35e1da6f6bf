"""Which parameter of a checkpoint an adapter's module name means.

Adapters name modules as transformers builds them ("model.layers.0.self_attn.q_a_proj"); released
checkpoints may name them otherwise ("layers.0.attn.wq_a", "model.language_model.layers.0..."). The mapping
is transformers' own, applied to the names alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.key_map import KeyNames
from kt_ray.checkpoint.names import expert_name
from kt_ray.errors import UserError
from kt_ray.model import layer_calls
from kt_ray.model.family import build_causal, read_family


@dataclass(frozen=True)
class ModuleNames:
    """Module -> parameter of the checkpoint.

    Attributes:
        parameters: module as transformers or the checkpoint names it -> parameter.
        joined: modules whose weight is a part of, or made from, other tensors of the checkpoint.
        reason: why transformers' names are not known; "" = they are.
    """

    parameters: dict[str, str] = field(default_factory=dict)
    joined: dict[str, str] = field(default_factory=dict)
    reason: str = ""


def module_names(index: CheckpointIndex, prefixes: Iterable[str]) -> ModuleNames:
    """Names of every matrix outside the routed experts.

    Args:
        index: the checkpoint.
        prefixes: of its routed experts ("model.layers.3.mlp.experts").
    """
    names = sorted(n for n in index.names if expert_name(n) is None and n.endswith(".weight"))
    parameters = {name.removesuffix(".weight"): name for name in names}
    try:
        layer_calls.register()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of configurations: nothing is computed with this model
            model, _, _ = build_causal(read_family(index.path), torch.bfloat16, "eager")
    except UserError as error:
        return ModuleNames(parameters, {}, error.line())
    found = ModuleNames(parameters)
    keys = KeyNames(model, prefixes)
    for name in names:
        renamed, converter, _ = keys.target(name)
        for target in keys.targets(renamed, converter):
            place = found.parameters if converter is None else found.joined
            place[target.removesuffix(".weight")] = name
    return found
