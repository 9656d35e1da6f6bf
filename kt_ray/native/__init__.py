"""The expert engine: Mixture-of-Experts layers with LoRA on CPUs, forward and backward, in C++."""

from kt_ray.native._native import Saved
from kt_ray.native.engine import Engine
from kt_ray.native.isa import ENV as ISA_VARIABLE
from kt_ray.native.isa import available_isas, select_isa
from kt_ray.native.matrix import ExpertMatrix
from kt_ray.native.pages import MemoryFile, allocate, allocating
from kt_ray.native.quantize import quantize
from kt_ray.native.tensors import FORMATS, Activation, DropoutSpec, ExpertFormula, ExpertLora, ExpertWeights

__all__ = [
    "FORMATS",
    "ISA_VARIABLE",
    "Activation",
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
