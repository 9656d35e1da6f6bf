"""How fast this machine is: short measurements with the real engine, torch and disk (mode=doctor)."""

from kt_ray.measure.device_rates import measure_cpu, measure_gpu
from kt_ray.measure.expert_rates import ExpertShape, measure_experts
from kt_ray.measure.host_rates import (
    measure_arena,
    measure_disk,
    measure_local_message,
    measure_memory,
    measure_optimizer,
)
from kt_ray.measure.layers import measure_layers

__all__ = [
    "ExpertShape",
    "measure_arena",
    "measure_cpu",
    "measure_disk",
    "measure_experts",
    "measure_gpu",
    "measure_layers",
    "measure_local_message",
    "measure_memory",
    "measure_optimizer",
]
