"""Checkpoints: reading Hugging Face models, writing PEFT adapters, saving and resuming training."""

from kt_ray.checkpoint.experts import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.load_experts import load_experts
from kt_ray.checkpoint.non_experts import LoadReport, load_non_experts, materialize_buffers
from kt_ray.checkpoint.safetensors_file import TensorInfo

__all__ = [
    "CheckpointIndex",
    "ExpertLayout",
    "LoadReport",
    "TensorInfo",
    "load_experts",
    "load_non_experts",
    "materialize_buffers",
]
