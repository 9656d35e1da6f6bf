"""Rotations of weights that the model's code has to undo at run time, as SpinQuant and QuIP leave them.

compressed-tensors lists them in transform_config. Those of weights alone are in the stored values, and cancel
out; those of activations, queries and keys are not, and without them the weights belong to no model.

Source: TransformArgs of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_STORED = ("weight_input", "weight_output")


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
    online = sorted(left.difference(_STORED))
    return f"rotated, with rotations left to the model's code ({', '.join(online)})" if online else None
