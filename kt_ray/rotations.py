"""Rotations of weights that the model's code has to undo at run time, as SpinQuant and QuIP leave them.

compressed-tensors lists them in transform_config, AMD Quark in algo_config. Those of weights alone are in the
stored values, and cancel out; those of activations, queries and keys are not, and without them the weights
belong to no model. Quark may leave their matrices out of the file: then its tensors do not tell.

Sources: TransformArgs of compressed-tensors 0.20; Quark's RotationConfig, as vLLM reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STORED = ("weight_input", "weight_output")
_ONLINE_OF_QUARK = ("r3", "r4", "online_r1_rotation")


def unread(quantization: Mapping[str, Any]) -> str | None:
    """Which rotations are left to the model's code, in words; None = none.

    Args:
        quantization: quantization_config of the model's config.json.
    """
    config = quantization.get("transform_config")
    groups = config.get("config_groups") if isinstance(config, Mapping) else None
    left: set[str] = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        applied = group.get("apply") if isinstance(group, Mapping) else None
        for one in applied if isinstance(applied, list) else ():
            left |= {str(one.get("location"))} if isinstance(one, Mapping) else set()
    online = sorted(left.difference(_STORED)) + _of_quark(quantization.get("algo_config"))
    return f"rotated, with rotations left to the model's code ({', '.join(online)})" if online else None


def _of_quark(algorithms: Any) -> list[str]:
    """What rotates at run time among those that Quark applied, a list of them or one."""
    online: list[str] = []
    for one in algorithms if isinstance(algorithms, list) else [algorithms]:
        if not isinstance(one, Mapping) or one.get("name") != "rotation":
            continue
        online += [key for key in _ONLINE_OF_QUARK if one.get(key)]
        config = one.get("online_config")
        if isinstance(config, Mapping) and config.get("online_rotation_layers"):
            online.append("online_rotation_layers")
    return online
