"""Routed experts in host memory: one `ExpertHost` per NUMA socket."""

from kt_ray.experts.host import ExpertHost, ExpertHostSpec, HostCounters, bind_to_cpus

__all__ = ["ExpertHost", "ExpertHostSpec", "HostCounters", "bind_to_cpus"]
