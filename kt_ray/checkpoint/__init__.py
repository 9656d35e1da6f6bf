"""Checkpoints: reading Hugging Face models, writing PEFT adapters, saving and resuming training."""

from kt_ray.checkpoint.experts import ExpertLayout
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.load_experts import load_experts
from kt_ray.checkpoint.non_experts import LoadReport, load_non_experts, materialize_buffers
from kt_ray.checkpoint.safetensors_file import TensorInfo
from kt_ray.checkpoint.training import (
    Manifest,
    ShardInfo,
    begin_checkpoint,
    commit_checkpoint,
    find_checkpoint,
    list_checkpoints,
    prune_checkpoints,
    read_named,
    write_shard,
)

__all__ = [
    "CheckpointIndex",
    "ExpertLayout",
    "LoadReport",
    "Manifest",
    "ShardInfo",
    "TensorInfo",
    "begin_checkpoint",
    "commit_checkpoint",
    "find_checkpoint",
    "list_checkpoints",
    "load_experts",
    "load_non_experts",
    "materialize_buffers",
    "prune_checkpoints",
    "read_named",
    "write_shard",
]
