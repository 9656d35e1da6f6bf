"""How fast a lane's GPU multiplies: the rate of rule.experts.gpu_products, roundings to FP8 counted.

Rounding reads a matrix for its rows' largest values, reads it again and writes a byte per element; an FP8
product is written in bfloat16, read, and written in float32, where a bfloat16 product is written once. These
passes go through the card's memory. Those over the weights take as long for few rows as for many, so FP8 pays
from a number of rows per expert on.
"""

from __future__ import annotations

from kt_ray.config.schema import Config
from kt_ray.dims.model_dims import ModelDims
from kt_ray.hardware.rates import Curve, DeviceRate

ROUNDED = 5.0  # bytes per element that is rounded: read twice in bfloat16, written once in FP8
CONVERTED = 4.0  # bytes per element of a result, beyond a bfloat16 product's


def lane_gemm(gpu: DeviceRate, dims: ModelDims, config: Config) -> Curve:
    """FLOP/s of the products alone over rows per expert."""
    if dims.expert_format == "f32":
        return gpu.gemm["float32"]
    bfloat16 = gpu.gemm["bfloat16"]
    if config.rule.experts.gpu_products == "bfloat16":
        return bfloat16
    return gpu.gemm.get("float8") or bfloat16.scaled(2, "assumed: FP8 at twice that rate")


def lane_flops(gpu: DeviceRate, dims: ModelDims, config: Config, rows: float) -> float:
    """FLOP/s of an expert's frozen products with so many rows, passes that FP8 needs included: the mean of
    forward and backward."""
    rate = lane_gemm(gpu, dims, config)(rows)
    if config.rule.experts.gpu_products == "bfloat16":
        return rate
    width, inter, inside = dims.expert_width, dims.expert_intermediate, 2 if dims.gated else 1
    # x and act, then dy and the gradients of gate and up; gates, ups and y, then dact and each one's dx.
    rounded = rows * ((width + inter) + (width + inside * inter)) / 2
    results = rows * ((inside * inter + width) + (inter + inside * width)) / 2
    moved = ROUNDED * (dims.expert_params + rounded) + CONVERTED * results
    flops = 2.0 * dims.expert_params * rows
    return flops / (flops / rate + moved / gpu.memory.value)
