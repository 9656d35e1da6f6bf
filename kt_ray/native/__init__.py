"""The expert engine: Mixture-of-Experts layers with LoRA on CPUs, forward and backward, in C++.

Names are imported when they are first used: who asks which instruction sets there are does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kt_ray.native._native import Saved
    from kt_ray.native.engine import Engine
    from kt_ray.native.isa import ENV as ISA_VARIABLE
    from kt_ray.native.isa import available_isas, select_isa
    from kt_ray.native.matrix import ExpertMatrix
    from kt_ray.native.pages import MemoryFile, allocate, allocating
    from kt_ray.native.quantization import quantize
    from kt_ray.native.tensors import (
        FORMATS,
        DropoutSpec,
        ExpertFormula,
        ExpertLora,
        ExpertWeights,
    )

__all__ = [
    "FORMATS",
    "ISA_VARIABLE",
    "DropoutSpec",
    "Engine",
    "ExpertFormula",
    "ExpertLora",
    "ExpertMatrix",
    "ExpertWeights",
    "MemoryFile",
    "Saved",
    "allocate",
    "allocating",
    "available_isas",
    "quantize",
    "select_isa",
]

_HOMES = {
    "_native": ("Saved",),
    "engine": ("Engine",),
    "isa": ("available_isas", "select_isa"),
    "matrix": ("ExpertMatrix",),
    "pages": ("MemoryFile", "allocate", "allocating"),
    "quantization": ("quantize",),
    "tensors": ("FORMATS", "DropoutSpec", "ExpertFormula", "ExpertLora", "ExpertWeights"),
}


def __getattr__(name: str) -> Any:
    if name == "ISA_VARIABLE":
        return import_module("kt_ray.native.isa").ENV
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"kt_ray.native.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
