"""Checkpoints: reading and writing Hugging Face models, saving and resuming training."""

from kt_ray.checkpoint.content import check_content
from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.gguf_experts import GgufExperts
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.load_experts import load_experts
from kt_ray.checkpoint.non_experts import check_non_experts, load_non_experts

__all__ = [
    "CheckpointIndex",
    "ExpertLayout",
    "GgufExperts",
    "check_content",
    "check_non_experts",
    "load_experts",
    "load_non_experts",
]
