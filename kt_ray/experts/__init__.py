"""Routed experts in host memory: one `ExpertHost` per NUMA socket."""

from kt_ray.experts.host import ExpertHost, bind_to_cpus
from kt_ray.experts.spec import ExpertHostSpec, HostCounters

__all__ = ["ExpertHost", "ExpertHostSpec", "HostCounters", "bind_to_cpus"]
