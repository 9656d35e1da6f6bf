"""Which integers in GPTQ's packing are read: symmetric ones of 4 bits, in their order.

A weight W [N, K] is X.qweight I32 [K / 8, N], eight consecutive values of a row of it in a word, the first
in the lowest bits; X.scales [K / group, N]; X.qzeros I32 [K / group, N / 8], which is 8 throughout where
integers are symmetric, but stored as 7 by the first version of the format; and X.g_idx [K], the group of each
value, in order unless desc_act says otherwise (AutoRound leaves it out). W = scale * (integer - 8).

Sources: GPTQConfig of transformers, whose defaults hold where a key is absent; files of AutoGPTQ, GPTQModel
and AutoRound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = ("gptq", "auto-round")


def unread(quantization: Mapping[str, Any]) -> str | None:
    """Why integers in this packing are not read, in words; None = they are.

    Args:
        quantization: quantization_config of the model's config.json.
    """
    method = str(quantization.get("quant_method", "")).lower()
    packing = str(quantization.get("packing_format") or "")
    bits = str(quantization.get("bits") or 4)
    if method not in METHODS or (method == "auto-round" and not packing.endswith("gptq")):
        return f"in the packing of {' '.join(filter(None, (method, packing))) or 'GPTQ or AWQ'}"
    if bits != "4":
        return f"of {bits} bits in the packing of {method}"
    if quantization.get("sym") is False:
        return f"with zero points in the packing of {method}"
    if quantization.get("desc_act") and stated_group(quantization) and not quantization.get("static_groups"):
        return f"in an order of their own (desc_act) in the packing of {method}"
    return None


def stated_group(quantization: Mapping[str, Any]) -> int:
    """Columns that share a scale, as config.json says; 0 = all of them."""
    size = quantization.get("group_size", 128)
    return max(0, size) if isinstance(size, int) else 0


def zero_point(quantization: Mapping[str, Any]) -> int:
    """What files store for the zero point 8."""
    return 8 if quantization.get("checkpoint_format") == "gptq_v2" else 7
