"""Checkpoints: reading Hugging Face models, writing PEFT adapters, saving and resuming training."""

from kt_ray.adapter.adapter_dir import (
    AdapterLayout,
    adapter_layout,
    create_adapter,
    finish_adapter,
    read_adapter,
    write_tensors,
)
from kt_ray.adapter.peft_config import AdapterInfo, adapter_config
from kt_ray.checkpoint.content import check_content
from kt_ray.checkpoint.expert_layout import ExpertLayout
from kt_ray.checkpoint.gguf_experts import GgufExperts
from kt_ray.checkpoint.index import CheckpointIndex
from kt_ray.checkpoint.load_experts import load_experts
from kt_ray.checkpoint.manifest import Manifest, ShardInfo, list_checkpoints
from kt_ray.checkpoint.non_experts import (
    LoadReport,
    check_non_experts,
    load_non_experts,
    materialize_buffers,
)
from kt_ray.checkpoint.safetensors_file import TensorInfo
from kt_ray.checkpoint.training import (
    begin_checkpoint,
    commit_checkpoint,
    find_checkpoint,
    prune_checkpoints,
    read_named,
    step_name,
    write_shard,
)

__all__ = [
    "AdapterInfo",
    "AdapterLayout",
    "CheckpointIndex",
    "ExpertLayout",
    "GgufExperts",
    "LoadReport",
    "Manifest",
    "ShardInfo",
    "TensorInfo",
    "adapter_config",
    "adapter_layout",
    "begin_checkpoint",
    "check_content",
    "check_non_experts",
    "commit_checkpoint",
    "create_adapter",
    "find_checkpoint",
    "finish_adapter",
    "list_checkpoints",
    "load_experts",
    "load_non_experts",
    "materialize_buffers",
    "prune_checkpoints",
    "read_adapter",
    "read_named",
    "step_name",
    "write_shard",
    "write_tensors",
]
