"""Routed experts in host memory: one `LocalExperts` per NUMA socket."""

from kt_ray.experts.experts_spec import ExpertCounters, LocalExpertsSpec
from kt_ray.experts.local_experts import LocalExperts
from kt_ray.experts.process_memory import bind_to_cpus

__all__ = ["ExpertCounters", "LocalExperts", "LocalExpertsSpec", "bind_to_cpus"]
