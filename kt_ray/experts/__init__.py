"""Routed experts in host memory: one `ExpertHost` per NUMA socket."""

from kt_ray.experts.experts_spec import ExpertHostSpec, HostCounters
from kt_ray.experts.local_experts import ExpertHost, bind_to_cpus

__all__ = ["ExpertHost", "ExpertHostSpec", "HostCounters", "bind_to_cpus"]
