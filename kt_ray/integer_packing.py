"""GPTQ's and AWQ's packings of integers: which are read, and what files store for them.

Both store a weight W [N, K] turned round, with a scale and a zero point for a group of columns of each row:
X.scales [K / group, N] and X.qzeros I32 [K / group, N / 8]. W = scale * (integer - zero point).

    gptq   X.qweight I32 [K / 8, N], eight consecutive values of a row of W in a word, the first in the lowest
           bits; X.g_idx [K], the group of each value, in order unless desc_act says otherwise (AutoRound
           leaves it out). The first version of the format stores zero points less 1. All are 8 where integers
           are symmetric. Of 8 bits there are four in a word, and symmetric ones have zero points of 128.
    awq    X.qweight I32 [K, N / 8], eight consecutive rows of W in a word: from the lowest bits on rows 0, 2,
           4, 6, 1, 3, 5 and 7; zero points likewise.

Sources: GPTQConfig and AwqConfig of transformers, whose defaults hold where a key is absent; files of
AutoGPTQ, GPTQModel, AutoAWQ and AutoRound.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

METHODS = ("gptq", "awq", "auto-round")
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # of W, by the nibbles of a word


def method(quantization: Mapping[str, Any]) -> Literal["gptq", "awq"] | None:
    """The packing that quantization_config of a config.json states."""
    named = str(quantization.get("quant_method", "")).lower()
    if named == "auto-round":
        named = re.split("[:_]", str(quantization.get("packing_format") or ""))[-1]
    return "gptq" if named == "gptq" else "awq" if named == "awq" else None


def has_zeros(quantization: Mapping[str, Any]) -> bool:
    """Whether integers are not symmetric."""
    return method(quantization) == "awq" or quantization.get("sym") is False


def unread(quantization: Mapping[str, Any]) -> str | None:
    """Why integers in this packing are not read, in words; None = they are.

    Args:
        quantization: quantization_config of the model's config.json.
    """
    named, packing = str(quantization.get("quant_method", "")).lower(), method(quantization)
    if packing is None:
        own = str(quantization.get("packing_format") or "")
        return f"in the packing of {' '.join(filter(None, (named, own))) or 'GPTQ or AWQ'}"
    bits = str(quantization.get("bits") or quantization.get("w_bit") or 4)
    if bits != "4" and (bits, packing) != ("8", "gptq"):
        return f"of {bits} bits in the packing of {named}"
    if bits == "8" and has_zeros(quantization):
        return f"of 8 bits with zero points in the packing of {named}"
    version = _stated(quantization, "version", "checkpoint_format", "format") or "gemm"
    if packing == "awq" and version != "gemm":
        return f"in the packing of {named}, version {version}"
    if quantization.get("desc_act") and stated_group(quantization) and not quantization.get("static_groups"):
        return f"in an order of their own (desc_act) in the packing of {named}"
    return None


def stated_group(quantization: Mapping[str, Any]) -> int:
    """Columns that share a scale, as config.json says; 0 = all of them."""
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    return max(0, size) if isinstance(size, int) else 0


def stored_less(quantization: Mapping[str, Any]) -> int:
    """By how much GPTQ's files store zero points too small."""
    return 0 if _stated(quantization, "checkpoint_format", "format") == "gptq_v2" else 1


def _stated(quantization: Mapping[str, Any], *keys: str) -> str:
    """The first of some names of one setting: transformers 5 calls version and checkpoint_format format."""
    return str(next(filter(None, map(quantization.get, keys)), "")).lower()
