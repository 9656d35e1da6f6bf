"""Which parameter of a checkpoint an adapter's module name means.

Adapters name modules as transformers builds them ("model.layers.0.self_attn.q_a_proj"); released
checkpoints may name them otherwise ("layers.0.attn.wq_a", "model.language_model.layers.0..."). The mapping
is transformers' own, applied to the names alone.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.tools.names import expert_name


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


def module_names(index: CheckpointIndex) -> ModuleNames:
    """Names of every matrix outside the routed experts."""
    names = sorted(n for n in index.names if expert_name(n) is None and n.endswith(".weight"))
    found = ModuleNames({name.removesuffix(".weight"): name for name in names})
    model, reason = _meta_model(index)
    if model is None:
        return ModuleNames(found.parameters, {}, reason)
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    state = model.state_dict()
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if pattern is None:
            found.parameters[renamed.removesuffix(".weight")] = name
            continue
        targets = by_pattern[pattern].target_patterns
        for target in targets:
            found.joined[renamed.replace(targets[0], target).removesuffix(".weight")] = name
    return found


def _meta_model(index: CheckpointIndex) -> tuple[Any, str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of configurations: nothing is computed with this model
            config = AutoConfig.from_pretrained(index.path).get_text_config()
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config), ""
    except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
        text = str(error).strip().splitlines()
        return None, text[0] if text else type(error).__name__
