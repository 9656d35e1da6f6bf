"""The expert engine: Mixture-of-Experts layers with LoRA on CPUs, forward and backward, in C++."""

from kt_ray.native._native import Saved
from kt_ray.native.engine import Engine
from kt_ray.native.isa import ENV as ISA_VARIABLE
from kt_ray.native.isa import available_isas, select_isa
from kt_ray.native.types import DropoutSpec, ExpertLora, ExpertWeights

__all__ = [
    "ISA_VARIABLE",
    "DropoutSpec",
    "Engine",
    "ExpertLora",
    "ExpertWeights",
    "Saved",
    "available_isas",
    "select_isa",
]
