"""The checks before reading, on a checkpoint that has headers only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from kt_ray.checkpoint import CheckpointIndex, ExpertLayout, check_content, check_non_experts
from kt_ray.checkpoint.non_experts import LoadReport
from kt_ray.config.schema import LoraConfig
from kt_ray.errors import UserError
from kt_ray.model.build import build_on_meta
from kt_ray.model.stage_spec import StageSpec
from tests.helpers.sparse import write_sparse

# DeepSeek-V3 as released, and the changes that make it small.
RELEASED: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
SMALL = {"hidden_size": 384, "intermediate_size": 640, "moe_intermediate_size": 256, "num_hidden_layers": 5}
SMALL |= {"n_routed_experts": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 500}


def _check(path: Path) -> tuple[CheckpointIndex, ExpertLayout, LoadReport]:
    index = CheckpointIndex.open(path)
    layout = ExpertLayout.detect(index)
    count = index.config["num_hidden_layers"]
    spec = StageSpec(
        model_dir=str(path),
        layers=(0, count),
        num_layers=count,
        dtype="auto",
        attn_implementation="sdpa",
        seed=0,
        lora=LoraConfig(),
    )
    return index, layout, check_non_experts(index, build_on_meta(spec).causal, layout=layout)


def test_headers_alone_are_checked(tmp_path: Path) -> None:
    count = write_sparse(tmp_path / "m", RELEASED | SMALL, shards=4)
    index, layout, report = _check(tmp_path / "m")
    assert len(index.tensors) == count and len(index.files) == 4 and index.notes == ()
    assert layout.moe_layers == (3, 4) and layout.num_experts == 16 and layout.distinct_formats == ("fp8",)
    assert (layout.hidden, layout.intermediate) == (384, 256)
    prediction = {key for key in index.tensors if key.startswith("model.layers.5.")}
    assert len(prediction) > 100 and prediction >= set(report.ignored) >= prediction & index.names
    assert report.ignored == sorted(report.ignored)


def test_no_bytes_are_taken_and_reading_is_refused(tmp_path: Path) -> None:
    write_sparse(tmp_path / "m", RELEASED | SMALL, shards=2)
    files = sorted((tmp_path / "m").glob("*.safetensors"))
    assert sum(f.stat().st_blocks * 512 for f in files) < sum(f.stat().st_size for f in files) / 10
    with pytest.raises(UserError) as caught:
        check_content(CheckpointIndex.open(tmp_path / "m"))
    assert "has holes" in str(caught.value) and files[0].name in str(caught.value)


def test_plain_types_without_quantisation(tmp_path: Path) -> None:
    config = {k: v for k, v in (RELEASED | SMALL).items() if k != "quantization_config"}
    write_sparse(tmp_path / "m", config, shards=1)
    index, layout, _ = _check(tmp_path / "m")
    assert not index.matrices and layout.distinct_formats == ("bf16",)


@pytest.mark.slow
def test_a_model_of_671_billion_parameters_is_checked_in_seconds(tmp_path: Path) -> None:
    count = write_sparse(tmp_path / "m", RELEASED, shards=163)
    assert count > 91_000
    begun, used = time.monotonic(), time.process_time()
    index, layout, report = _check(tmp_path / "m")
    seconds, cpu = time.monotonic() - begun, time.process_time() - used
    print(json.dumps({"tensors": count, "seconds": round(seconds, 2), "cpu_seconds": round(cpu, 2)}))
    assert layout.num_experts == 256 and len(layout.moe_layers) == 58 and len(index.files) == 163
    assert len(report.ignored) > 700
    assert cpu < 40  # (not wall time, which other processes of the machine may stretch)
